// "pretend": a PyTorch device whose memory the CPU may not touch, made out of the CPU and its memory.
//
//     one memory file, mapped twice       front  what tensors are told     PROT_NONE (sealed) or readable (open)
//                                         back   where the values are      read and written
//
//     operation on "pretend" tensors  -->  PyTorch's CPU fallback: copies to CPU tensors (by the back), computes, copies back
//
// So whatever takes a tensor's address to the CPU, NumPy, numba or MPI dies of SIGSEGV as it would with a GPU's, and operations
// that mix devices are refused. In "open" the front can be read: what a GPU-aware MPI sees. There is one device, with one
// stream on which everything is done at once; events can be recorded and waited for and have always happened.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/extension.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;
constexpr auto PRETEND = DeviceType::PrivateUse1;
constexpr size_t ARENA_BYTES = size_t{4} << 30; // of addresses; memory is taken where it is written
constexpr size_t ALIGNMENT_BYTES = 512;

char *front, *back;
std::mutex lock;
std::map<size_t, size_t> holes; // offset -> bytes
std::map<size_t, size_t> taken;
std::atomic<size_t> now_bytes{0}, peak_bytes{0};
std::atomic<int64_t> from_cpu{0}, to_cpu{0}; // copies between the device and the CPU that a program asked for

bool is_front(const void* pointer) { return pointer >= front && pointer < front + ARENA_BYTES; }
void* behind(const void* pointer) {
  return is_front(pointer) ? back + (static_cast<const char*>(pointer) - front) : const_cast<void*>(pointer);
}

void free_front(void* pointer) {
  if (!pointer) return;
  std::lock_guard<std::mutex> guard(lock);
  auto found = taken.find(static_cast<char*>(pointer) - front);
  auto hole = holes.emplace(*found).first;
  now_bytes -= found->second;
  taken.erase(found);
  if (auto next = std::next(hole); next != holes.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    holes.erase(next);
  }
  if (hole != holes.begin()) {
    auto before = std::prev(hole);
    if (before->first + before->second == hole->first) {
      before->second += hole->second;
      holes.erase(hole);
    }
  }
}

struct FrontAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    Device device(PRETEND, 0);
    if (!bytes) return {nullptr, nullptr, &free_front, device};
    bytes = (bytes + ALIGNMENT_BYTES - 1) / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
    std::lock_guard<std::mutex> guard(lock);
    for (auto& [start, size] : holes) {
      if (size < bytes) continue;
      size_t place = start, rest = size - bytes;
      holes.erase(place);
      if (rest) holes.emplace(place + bytes, rest);
      taken.emplace(place, bytes);
      now_bytes += bytes;
      peak_bytes = std::max(peak_bytes.load(), now_bytes.load());
      return {front + place, front + place, &free_front, device};
    }
    TORCH_CHECK(false, "pretend: out of memory");
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_front; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(behind(to), behind(from), bytes); }
} allocator;

// the same values as a CPU tensor, at the back; the device's memory must outlive it
at::Tensor cpu_view(const at::Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU);
  if (!tensor.device().is_privateuseone()) return tensor;
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(behind(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

thread_local int inside = 0; // the fallback's own copies are not the program's

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (!inside && from.device() != to.device()) ++(from.device().is_cpu() ? from_cpu : to_cpu);
  cpu_view(to).copy_(cpu_view(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return cpu_view(tensor).item(); }

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  auto bytes = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  auto& storage = impl->unsafe_storage();
  if (bytes > static_cast<int64_t>(storage.nbytes())) {
    auto memory = allocator.allocate(bytes);
    if (storage.nbytes()) memcpy(behind(memory.get()), behind(storage.data_ptr().get()), storage.nbytes());
    storage.set_data_ptr(std::move(memory));
    storage.set_nbytes(bytes);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage from, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(from));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage from) {
  int64_t values = from.nbytes() / self.itemsize();
  return set_storage(self, std::move(from), 0, {values}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& from) {
  return set_storage(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}

int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                         bool, std::optional<double>, bool) {
  return 0; // by plain operations
}

void record_stream(at::Tensor&, at::Stream) {}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++inside;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    --inside;
    throw;
  }
  --inside;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return PRETEND; }
  Device exchangeDevice(Device) const override { return Device(PRETEND, 0); }
  Device getDevice() const override { return Device(PRETEND, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, Device(PRETEND, 0)); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
};

// Pinned memory is the CPU's; which it is has to be known.
std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

void free_pinned(void* pointer) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(static_cast<char*>(pointer));
  c10::GetDefaultCPUAllocator()->raw_deallocate(pointer);
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    auto* memory = static_cast<char*>(c10::GetDefaultCPUAllocator()->raw_allocate(std::max<size_t>(bytes, 1)));
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.emplace(memory, bytes);
    return {memory, memory, &free_pinned, Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return Device(PRETEND, 0); }
  bool isPinnedPtr(const void* pointer) const override {
    std::lock_guard<std::mutex> guard(pinned_lock);
    auto after = pinned.upper_bound(static_cast<const char*>(pointer));
    if (after == pinned.begin()) return false;
    auto [start, bytes] = *std::prev(after);
    return pointer < start + std::max<size_t>(bytes, 1);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = allocator.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) memcpy(behind(memory.get()), behind(storage.data_ptr().get()), kept);
    storage.set_data_ptr(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
} hooks;

void start(bool open) {
  int file = memfd_create("pretend", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, ARENA_BYTES) == 0, "pretend: no memory file");
  auto map = [&](int rights) { return static_cast<char*>(mmap(nullptr, ARENA_BYTES, rights, MAP_SHARED | MAP_NORESERVE, file, 0)); };
  back = map(PROT_READ | PROT_WRITE);
  front = map(open ? PROT_READ | PROT_WRITE : PROT_NONE);
  TORCH_CHECK(back != MAP_FAILED && front != MAP_FAILED, "pretend: no addresses");
  holes.emplace(0, ARENA_BYTES);
  close(file);
  c10::SetAllocator(PRETEND, &allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

} // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("_fused_sdp_choice", &choose_attention);
  m.impl("record_stream", &record_stream);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", &start);
  m.def("now_bytes", [] { return now_bytes.load(); });
  m.def("peak_bytes", [] { return peak_bytes.load(); });
  m.def("reset_peak", [] { peak_bytes = now_bytes.load(); });
  m.def("copies", [] { return std::make_pair(from_cpu.load(), to_cpu.load()); });
  m.def("behind", [](size_t pointer) { return reinterpret_cast<size_t>(behind(reinterpret_cast<void*>(pointer))); });
}
