// Streams and events of the pretend device. What a stream is told is computed at once, of what its clock knows to be there,
// and seen by nobody before he has waited for it (late.h). An event answers "not yet" by chance, of a seed.
//
// A copy from pinned memory reads as late: what it has read must still be there when the host first knows that it is over.
#pragma once

#include <ATen/EmptyTensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <random>

#include "counts.h"
#include "memory.h"

namespace pretend {

struct Copy { // from pinned memory to the device, on its way
  order::Epoch epoch;
  at::Tensor host, bytes; // where from, and what was there
};
inline auto& copies = *new std::deque<Copy>; // under the lock of events, oldest first
inline unsigned seed = 1; // of all chance

inline at::Tensor host_view(const at::Tensor& tensor) { // without a version, so without autograd
  return at::from_blob(behind(tensor.data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

inline order::Span reach_of(const at::Tensor& tensor) { // from the first value to the last
  auto bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
  return span_of(tensor.data_ptr(), bytes);
}

// The lock of events, and the copies that ended under it: their memory is given back when the lock is open again.
struct Held {
  std::deque<Copy> ended;
  std::lock_guard<std::mutex> guard{events.lock};

  // The copies that `clock` knows are over: all, or those from this memory.
  void end_copies(const order::Clock& clock, order::Site site, order::Span written = {0, ~size_t{0}}) {
    std::deque<Copy> left;
    for (auto& copy : copies) {
      auto [start, end] = reach_of(copy.host);
      bool is_over = order::knows(clock, copy.epoch) && start < written.second && written.first < end;
      if (is_over) end_copy(copy, site);
      (is_over ? ended : left).push_back(std::move(copy));
    }
    copies.swap(left);
  }

  // this thread has waited for something with that clock
  void synchronise(const order::Clock& clock, order::Site site) {
    order::Time operations = 0;
    for (auto [stream, actor] : streams) operations += std::max(clock.at(actor), events.host().at(actor)) - events.host().at(actor);
    if (operations) {
      auto& blocked = counts.blocks[{order::this_thread == order::MAIN, site}];
      ++blocked.count;
      blocked.longest = std::max(blocked.longest, operations);
    }
    learn(clock, site);
  }

  // this thread has found out that something with that clock is over
  void learn(const order::Clock& clock, order::Site site) {
    events.learn(clock);
    end_copies(events.host(), site);
    late.publish(events.host());
  }

 private:
  static void end_copy(const Copy& copy, order::Site site) {
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor now;
    late.reveal(reach_of(copy.host), [&] { now = host_view(copy.host).clone(at::MemoryFormat::Contiguous); });
    if (!memcmp(now.data_ptr(), copy.bytes.data_ptr(), now.nbytes())) return;
    events.memory.note({"pinned memory changed while it was copied to the device", site, copy.epoch.site});
    late.damage(copy.epoch);
  }
};

inline void synchronise_stream(StreamId stream, const char* name) {
  auto site = events.sites.here(name);
  Held held;
  held.synchronise(events.clock(actor_of(stream)), site);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream stream_of(StreamId id) { return Stream(Stream::UNSAFE, Device(PRETEND, 0), id); }
  static order::Event& event_of(void* event) { return *static_cast<order::Event*>(event); }

  DeviceType type() const override { return PRETEND; }
  Device exchangeDevice(Device) const override { return Device(PRETEND, 0); }
  Device getDevice() const override { return Device(PRETEND, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const override { return stream_of(current_stream); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device, int) const override {
    static std::atomic<StreamId> made{0};
    return stream_of(++made);
  }
  Stream exchangeStream(Stream stream) const override { return stream_of(std::exchange(current_stream, stream.id())); }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    auto site = events.sites.here("record");
    std::lock_guard<std::mutex> guard(events.lock);
    auto recorded = events.record(actor_of(stream.id()), site);
    ++counts.records;
    if (!*event) *event = new order::Event;
    event_of(*event) = std::move(recorded);
  }
  void block(void* event, const Stream& stream) const override {
    auto site = events.sites.here("wait");
    std::lock_guard<std::mutex> guard(events.lock);
    events.use(event_of(event), site);
    events.wait(actor_of(stream.id()), event_of(event));
    ++counts.waits;
  }
  void synchronizeEvent(void* event) const override {
    auto site = events.sites.here("synchronize");
    Held held;
    events.use(event_of(event), site);
    held.synchronise(event_of(event).clock, site);
  }
  // sometimes not yet, so that whoever asks has to ask again
  bool queryEvent(void* event) const override {
    thread_local std::minstd_rand random(seed);
    if (random() % 2) return false;
    auto site = events.sites.here("query");
    Held held;
    events.use(event_of(event), site);
    held.learn(event_of(event).clock, site);
    return true;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<order::Event*>(event); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }

  bool queryStream(const Stream& stream) const override { return synchronizeStream(stream), true; }
  void synchronizeStream(const Stream& stream) const override { synchronise_stream(stream.id(), "synchronize of a stream"); }
  void synchronizeDevice(const DeviceIndex) const override {
    auto site = events.sites.here("synchronize of the device");
    Held held;
    for (auto [stream, actor] : streams) held.synchronise(events.clock(actor), site);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    std::lock_guard<std::mutex> guard(events.lock);
    arena.use(memory.get(), stream.id());
  }
};

} // namespace pretend
