// "pretend": a PyTorch device whose memory the CPU may not touch, made out of the CPU and its memory.
//
//     one memory file, mapped twice       front  what tensors are told     PROT_NONE (sealed) or readable (open)
//                                         back   where the values are      read and written
//
//     operation on "pretend" tensors  -->  PyTorch's CPU fallback: copies to CPU tensors (by the back), computes, copies back
//                                          what it has written stays poison for all who have not waited for it
//
// So whatever takes a tensor's address to the CPU, NumPy, numba or MPI dies of SIGSEGV as it would with a GPU's, and operations
// that mix devices are refused. In "open" the front can be read: what a GPU-aware MPI sees. There is one device, with as many
// streams and events as a program makes. What may happen at the same time, but must not, is reported: see faults.
//
//     memory.h    what is where; poison        streams.h    streams, events, copies      late.h      operations are late
//     order.h     races                        sites.h      the lines of Python behind each        counts.h    what is counted

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <torch/extension.h>

#include "streams.h"

using namespace pretend;

namespace {

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

thread_local bool inside = false; // the fallback's own copies are not the program's
struct Inside {
  Inside() { inside = true; }
  ~Inside() { inside = false; }
};

using Touched = std::vector<std::pair<at::Tensor, order::Access>>;

// Contiguous runs of a tensor's memory; of the device's, one that holds them all if there are very many.
std::vector<order::Span> spans_of(const at::Tensor& tensor) {
  constexpr int64_t MOST_RUNS = 256;
  if (!tensor.numel()) return {};
  std::vector<std::pair<int64_t, int64_t>> dims; // stride, size; the closest values first
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d)) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t run = 1, runs = 1, last = 1;
  for (auto [stride, size] : dims) {
    last += stride * (size - 1);
    (stride <= run ? run : runs) = stride <= run ? stride * (size - 1) + run : runs * size;
  }
  auto* first = static_cast<const char*>(tensor.data_ptr());
  auto item = tensor.element_size();
  if (runs == 1 || (runs > MOST_RUNS && tensor.is_privateuseone())) return {span_of(first, last * item)};
  std::vector<int64_t> starts{0};
  int64_t so_far = 1;
  for (auto [stride, size] : dims) {
    if (stride <= so_far) {
      so_far += stride * (size - 1);
      continue;
    }
    auto before = starts;
    for (int64_t i = 1; i < size; ++i) {
      for (auto start : before) starts.push_back(start + i * stride);
    }
  }
  std::vector<order::Span> spans;
  for (auto start : starts) spans.push_back(span_of(first + start * item, so_far * item));
  return spans;
}

bool is_watched(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() && (tensor.is_privateuseone() || is_pinned(tensor.data_ptr()));
}

std::vector<order::Reach> reaches_of(const Touched& touched) {
  std::vector<order::Reach> reaches;
  for (auto& [tensor, access] : touched) {
    if (!is_watched(tensor)) continue;
    for (auto span : spans_of(tensor)) reaches.push_back({span, access});
  }
  return reaches;
}

// An operation of the current stream, from where it is told to where it has been computed.
class Launch {
 public:
  Launch(const std::string& name, std::vector<order::Reach> reached) : reaches(std::move(reached)) {
    auto site = events.sites.here(name.c_str());
    Held held;
    epoch = events.launch(actor_of(current_stream), site);
    ++counts.operators[name];
    auto& clock = events.clock(epoch.actor);
    for (auto& [span, access] : reaches) {
      events.memory.touch(span, access, clock, epoch);
      if (access == order::WRITE) held.end_copies(clock, site, span);
    }
    late.damage(events.memory.disturbed);
    late.begin(epoch, reaches, clock);
  }
  Launch(const std::string& name, const Touched& touched) : Launch(name, reaches_of(touched)) {
    Held held;
    count_bytes(touched);
  }
  Launch(const Launch&) = delete;
  ~Launch() { end(); }

  // it has written this, too, which is new
  void made(const Touched& results) {
    Held held;
    count_bytes(results);
    for (auto reach : reaches_of(results)) {
      events.memory.touch(reach.span, order::WRITE, events.clock(epoch.actor), epoch);
      reaches.push_back(reach);
    }
  }

  void end() {
    if (std::exchange(is_over, true)) return;
    Held held;
    late.end(epoch, reaches);
  }

  order::Epoch epoch;

 private:
  static void count_bytes(const Touched& touched) {
    for (auto& [tensor, access] : touched) counts.moved_bytes += is_watched(tensor) ? tensor.nbytes() : 0;
  }

  std::vector<order::Reach> reaches;
  bool is_over = false;
};

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (inside) return cpu_view(to).copy_(cpu_view(from)), to;
  Launch launch("copy", {{from, order::READ}, {to, order::WRITE}});
  cpu_view(to).copy_(cpu_view(from));
  if (from.device() == to.device()) return to;
  bool to_host = to.device().is_cpu();
  auto host = to_host ? to : from;
  bool waits = !non_blocking || !host.numel() || !is_pinned(host.data_ptr()); // else through memory of the driver's
  Copy copy{launch.epoch, host, waits || to_host ? at::Tensor() : host_view(from).clone(at::MemoryFormat::Contiguous)};
  {
    Held held;
    auto& copied = to_host ? counts.to_host : counts.to_device;
    ++copied.count;
    copied.bytes += from.numel() * from.element_size();
    if (copy.bytes.defined()) copies.push_back(std::move(copy));
  } // not beyond: to return a tensor counts its Python object, which takes the GIL, and who has that may wait for the lock
  launch.end();
  if (waits) synchronise_stream(current_stream, to_host ? "a read by the host" : "a copy that waits");
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  Launch("item", Touched{{tensor, order::READ}});
  synchronise_stream(current_stream, "a read by the host");
  return cpu_view(tensor).item();
}

// What a storage holds goes to memory of another size, on the current stream.
void move(const c10::Storage& storage, size_t bytes) {
  auto memory = allocator.allocate(bytes);
  auto* from = storage.data_ptr().get();
  if (auto kept = std::min(bytes, storage.nbytes())) {
    Launch launch("resize", std::vector<order::Reach>{{span_of(from, kept), order::READ}, {span_of(memory.get(), kept), order::WRITE}});
    memcpy(behind(memory.get()), behind(from), kept);
  }
  storage.set_data_ptr(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  auto bytes = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (bytes > static_cast<int64_t>(self.storage().nbytes())) move(self.storage(), bytes);
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

void record_stream(at::Tensor& tensor, at::Stream stream) {
  std::lock_guard<std::mutex> guard(events.lock);
  arena.use(tensor.storage().data_ptr().get(), stream.id());
}

// tensors of an operation's arguments or results, with what it does to them
void gather(const c10::IValue& value, order::Access access, Touched& touched) {
  if (value.isTensor()) {
    touched.emplace_back(value.toTensor(), access);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) touched.emplace_back(tensor, access);
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) gather(one, access, touched);
  }
}

// An operation's name, "add"; what makes CUDA synchronise is said: an index that is a mask, and indices that are checked.
std::string name_of(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  auto name = schema.name().substr(schema.name().rfind(':') + 1);
  if (name != "_index_put_impl_" && name != "index") return name.ends_with('_') ? name.substr(0, name.size() - 1) : name;
  auto* arguments = &stack.at(stack.size() - schema.arguments().size());
  for (const c10::IValue& index : arguments[1].toListRef()) {
    if (!index.isTensor() || !index.toTensor().defined()) continue;
    if (auto type = index.toTensor().scalar_type(); type == at::kBool || type == at::kByte) return name + " by a mask";
  }
  return name == "index" || arguments[4].toBool() ? name : name + " with a check"; // the argument `unsafe`
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  if (inside) return at::native::cpu_fallback(op, stack);
  Touched touched, made;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto* aliases = schema.arguments()[i].alias_info();
    auto& value = stack->at(stack->size() - schema.arguments().size() + i);
    gather(value, aliases && aliases->isWrite() ? order::WRITE : order::READ, touched);
  }
  Launch launch(name_of(schema, *stack), touched);
  bool waits = false;
  {
    Inside now;
    at::native::cpu_fallback(op, stack);
  }
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& value = stack->at(stack->size() - schema.returns().size() + i);
    if (!schema.returns()[i].alias_info()) gather(value, order::WRITE, made);
    waits |= value.isBool() || value.isScalar();
  }
  if (!made.empty()) launch.made(made);
  launch.end();
  if (waits) synchronise_stream(current_stream, "a read by the host");
}

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
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    move(storage, bytes);
  }
} hooks;

void start(bool open, unsigned chance) {
  seed = chance;
  map_arena(open);
  c10::SetAllocator(PRETEND, &allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

// What the host, or MPI, does to memory: at once, or from begin_message to end_message.
void touch_by_host(size_t pointer, size_t bytes, bool writes) {
  auto site = events.sites.here("the host");
  Held held;
  auto span = span_of(reinterpret_cast<void*>(pointer), bytes);
  auto access = writes ? order::WRITE : order::READ;
  events.memory.touch(span, access, events.host(), {order::this_thread, events.host().at(order::this_thread), site});
  late.damage(events.memory.disturbed);
}

order::Order::Message begin_message(size_t pointer, size_t bytes, bool writes) {
  auto site = events.sites.here(writes ? "receive" : "send");
  Held held;
  auto message = events.begin(span_of(reinterpret_cast<void*>(pointer), bytes), writes ? order::WRITE : order::READ, site);
  late.damage(events.memory.disturbed);
  return message;
}

void end_message(order::Order::Message message) {
  Held held;
  events.end(message);
}

// A thread has its own order from now on. `clock`: of who started it, or of whom it has waited for.
void begin_thread() {
  Held held;
  if (order::this_thread == order::MAIN) order::this_thread = events.actor();
}

order::Clock release() {
  Held held;
  return events.release();
}

void acquire(const order::Clock& clock) {
  auto site = events.sites.here("wait for a thread");
  Held held;
  held.synchronise(clock, site);
}

void note(const std::string& what) {
  auto site = events.sites.here("");
  Held held;
  events.memory.note({what, site, site});
}

// What was counted since the last call (counts.h). Blocks: (is it the program's thread, name and lines, times, operations).
pybind11::dict take_counts() {
  Counts now;
  {
    Held held;
    std::swap(now, counts);
  }
  std::vector<std::tuple<bool, std::string, int64_t, order::Time>> blocks;
  for (auto& [place, blocked] : now.blocks) {
    blocks.emplace_back(place.first, events.sites.text(place.second), blocked.count, blocked.longest);
  }
  using namespace pybind11::literals;
  return pybind11::dict("operators"_a = now.operators, "moved_bytes"_a = now.moved_bytes, "event_records"_a = now.records,
                        "event_waits"_a = now.waits, "to_device"_a = std::make_pair(now.to_device.count, now.to_device.bytes),
                        "to_host"_a = std::make_pair(now.to_host.count, now.to_host.bytes), "blocks"_a = blocks);
}

// Races found since the last call, each with both of its sides, for people.
std::vector<std::string> take_faults() {
  std::set<order::Fault> found;
  {
    Held held;
    found.swap(events.memory.faults);
  }
  std::vector<std::string> told;
  for (auto& fault : found) {
    told.push_back(fault.what + "\n    now: " + events.sites.text(fault.now) + "\n    before: " + events.sites.text(fault.before));
  }
  return told;
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
  m.def("touch_by_host", &touch_by_host);
  pybind11::class_<order::Order::Message>(m, "Message");
  m.def("begin_message", &begin_message);
  m.def("end_message", &end_message);
  pybind11::class_<order::Clock>(m, "Clock");
  m.def("begin_thread", &begin_thread);
  m.def("release", &release);
  m.def("acquire", &acquire);
  m.def("note", &note);
  m.def("is_pinned", [](size_t pointer) { return is_pinned(reinterpret_cast<void*>(pointer)); });
  pybind11::class_<Launch>(m, "Launch")
      .def("__enter__", [](Launch&) {})
      .def("__exit__", [](Launch& launch, const pybind11::args&) { launch.end(); });
  m.def("launch", [](const std::string& kernel, const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written) {
    Touched touched;
    for (auto& tensor : read) touched.emplace_back(tensor, order::READ);
    for (auto& tensor : written) touched.emplace_back(tensor, order::WRITE);
    return std::make_unique<Launch>(kernel, touched);
  });
  m.def("take_counts", &take_counts);
  m.def("take_faults", &take_faults);
  m.def("now_bytes", [] { return now_bytes.load(); });
  m.def("peak_bytes", [] { return peak_bytes.load(); });
  m.def("reset_peak", [] { peak_bytes = now_bytes.load(); });
  m.def("behind", [](size_t pointer) { return reinterpret_cast<size_t>(behind(reinterpret_cast<void*>(pointer))); });
}
