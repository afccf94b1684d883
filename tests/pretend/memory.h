// Memory of the pretend device, and pinned memory of the CPU that it copies from and to. Both are poison (NaN) before they
// are written, until the writing has been waited for (late.h) and after they are freed; their accesses have an order (order.h).
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

#include "late.h"

namespace pretend {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream, c10::StreamId;
constexpr auto PRETEND = DeviceType::PrivateUse1;
constexpr size_t ARENA_BYTES = size_t{4} << 30; // of addresses; memory is taken where it is written
constexpr size_t ALIGNMENT_BYTES = 512;
using order::POISON;

// Neither this nor what follows is ever destroyed: tensors of PyTorch's own globals are freed when this library's are gone.
inline auto& events = *new order::Order;
inline thread_local StreamId current_stream = 0;
inline auto& streams = *new std::map<StreamId, order::Actor>; // under the lock of events

// needs the lock of events
inline order::Actor actor_of(StreamId stream) {
  auto found = streams.find(stream);
  return found != streams.end() ? found->second : streams[stream] = events.actor();
}

inline char *front, *back;
inline std::atomic<size_t> now_bytes{0}, peak_bytes{0};

inline bool is_front(const void* pointer) { return pointer >= front && pointer < front + ARENA_BYTES; }
inline void* behind(const void* pointer) {
  return is_front(pointer) ? back + (static_cast<const char*>(pointer) - front) : const_cast<void*>(pointer);
}
inline auto& late = *new order::Late(&behind); // under the lock of events

inline order::Span span_of(const void* pointer, size_t bytes) {
  auto start = reinterpret_cast<size_t>(pointer);
  return {start, start + bytes};
}

struct Block {
  size_t bytes;
  StreamId stream; // on which it was taken
  std::set<order::Actor> others; // on which it was said to be used, by record_stream
};

// Takes the first hole that is large enough. What is freed must have been used before what its stream is told next.
class Arena {
 public:
  Arena() { holes.emplace(0, ARENA_BYTES); }

  void* take(size_t bytes) {
    bytes = (bytes + ALIGNMENT_BYTES - 1) / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
    std::lock_guard<std::mutex> guard(events.lock);
    for (auto& [start, size] : holes) {
      if (size < bytes) continue;
      size_t place = start, rest = size - bytes;
      holes.erase(place);
      if (rest) holes.emplace(place + bytes, rest);
      taken.emplace(place, Block{bytes, current_stream, {}});
      now_bytes += bytes;
      peak_bytes = std::max(peak_bytes.load(), now_bytes.load());
      memset(back + place, POISON, bytes);
      return front + place;
    }
    TORCH_CHECK(false, "pretend: out of memory");
  }

  void give_back(void* pointer, order::Site site) {
    std::lock_guard<std::mutex> guard(events.lock);
    auto found = taken.find(static_cast<char*>(pointer) - front);
    auto& block = found->second;
    auto next = events.clock(actor_of(block.stream)); // of what its stream is told next
    next.join(events.host());
    for (auto waited : block.others) next.of(waited) = order::ALWAYS; // by the allocator itself
    next.of(actor_of(block.stream)) = order::ALWAYS;
    auto span = span_of(pointer, block.bytes);
    events.memory.check_freed(span, next, site);
    events.memory.forget(span);
    late.damage(events.memory.disturbed);
    late.forget(span, next);
    memset(behind(pointer), POISON, block.bytes);
    now_bytes -= block.bytes;
    holes.emplace(found->first, block.bytes);
    join_holes(found->first);
    taken.erase(found);
  }

  // needs the lock of events
  void use(const void* pointer, StreamId stream) {
    auto found = taken.find(static_cast<const char*>(pointer) - front);
    if (found != taken.end()) found->second.others.insert(actor_of(stream));
  }

 private:
  std::map<size_t, size_t> holes; // offset -> bytes
  std::map<size_t, Block> taken;

  void join_holes(size_t place) {
    auto hole = holes.find(place);
    if (auto next = std::next(hole); next != holes.end() && hole->first + hole->second == next->first) {
      hole->second += next->second;
      holes.erase(next);
    }
    if (hole == holes.begin()) return;
    auto before = std::prev(hole);
    if (before->first + before->second != hole->first) return;
    before->second += hole->second;
    holes.erase(hole);
  }
};
inline auto& arena = *new Arena;

inline void free_front(void* pointer) {
  if (pointer) arena.give_back(pointer, events.sites.here("free", false));
}

struct FrontAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    auto* memory = bytes ? arena.take(bytes) : nullptr;
    return {memory, memory, &free_front, Device(PRETEND, 0)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_front; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "pretend: no stream copies this"); }
};
inline auto& allocator = *new FrontAllocator;

// Pinned memory is the CPU's; which it is has to be known.
inline auto& pinned_lock = *new std::mutex;
inline auto& pinned = *new std::map<const char*, size_t>;

inline bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned.begin()) return false;
  auto [start, bytes] = *std::prev(after);
  return pointer < start + std::max<size_t>(bytes, 1);
}

inline void free_pinned(void* pointer) {
  size_t bytes;
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    bytes = pinned.extract(static_cast<char*>(pointer)).mapped();
  }
  auto site = events.sites.here("free of pinned memory", false);
  {
    std::lock_guard<std::mutex> guard(events.lock);
    // PyTorch gives it to nobody before the streams that copy it are done; of messages it knows nothing
    events.memory.check_messages(span_of(pointer, bytes), events.host(), site);
    events.memory.forget(span_of(pointer, bytes));
    late.forget(span_of(pointer, bytes));
  }
  memset(pointer, POISON, bytes);
  c10::GetDefaultCPUAllocator()->raw_deallocate(pointer);
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    auto* memory = static_cast<char*>(c10::GetDefaultCPUAllocator()->raw_allocate(std::max<size_t>(bytes, 1)));
    memset(memory, POISON, bytes);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.emplace(memory, bytes);
    return {memory, memory, &free_pinned, Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
inline auto& pinned_allocator = *new PinnedAllocator;

inline void map_arena(bool open) {
  int file = memfd_create("pretend", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, ARENA_BYTES) == 0, "pretend: no memory file");
  auto map = [&](int rights) { return static_cast<char*>(mmap(nullptr, ARENA_BYTES, rights, MAP_SHARED | MAP_NORESERVE, file, 0)); };
  back = map(PROT_READ | PROT_WRITE);
  front = map(open ? PROT_READ | PROT_WRITE : PROT_NONE);
  TORCH_CHECK(back != MAP_FAILED && front != MAP_FAILED, "pretend: no addresses");
  close(file);
}

} // namespace pretend
