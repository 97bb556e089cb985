// A simulated accelerator: a device of PyTorch (PrivateUse1) with its own memory, counters and random numbers.
//
// Each operation copies its operands out, runs the CPU's kernel and moves the results into device memory, so
// results are the CPU's to the bit. Memory has a hard limit and is filled with 0xFF (NaN) when it is new and when
// it is freed. What a program does to the device is counted: operations, stops of the host, bytes each way.
// Copies on a side stream (`non_blocking`) are put off until somebody waits for them, so that a wait that is
// forgotten gives wrong numbers.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>

namespace {

using at::Tensor;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);

// ---- what is counted

struct Counts {
  std::atomic<int64_t> operations{0}, items{0}, waits{0}, copies_out{0}, copies_in{0}, bytes_out{0}, bytes_in{0};
} counts;

thread_local int inside = 0;  // > 0 while an operation runs: its copies are those of the simulation
struct Inside {
  Inside() { inside++; }
  ~Inside() { inside--; }
};

// ---- memory

// With `is_caching` it keeps to the rules of torch's allocator for CUDA, c10/cuda/CUDACachingAllocator.cpp: pieces of
// segments, the best fit, split and merged; at the limit unused segments are given back, and the device is asked
// again. Without it a tensor takes the bytes that it has. Pieces have places in segments; their bytes are malloc's.
struct Memory final : c10::Allocator {
  static constexpr size_t GRANULE = 512, MB = 1 << 20, SMALL = MB, LARGE = 10 * MB;
  using Place = std::tuple<size_t, int64_t, size_t>;  // bytes, number of the segment, where in it
  struct Segment {
    bool is_small;
    std::map<size_t, std::pair<size_t, bool>> pieces;  // by where they are: bytes, and whether they are used
  };
  struct Block {
    void* start;
    size_t bytes;
    Place place;  // segment -1 without cache
  };

  c10::DataPtr allocate(size_t bytes) override {
    Place place{bytes, -1, 0};
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (is_caching && bytes) {
        place = taken((bytes + GRANULE - 1) / GRANULE * GRANULE);
      } else {
        reserve(bytes);
      }
      in_use += std::get<0>(place);
      peak = std::max(peak, in_use);
    }
    void* start = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    if (bytes) std::memset(start, 0xFF, bytes);
    return {start, new Block{start, bytes, place}, &release, DEVICE};
  }
  static void release(void* context);
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  void empty_cache() {
    for (auto one = segments.begin(); one != segments.end();) {
      auto& [number, segment] = *one;
      auto [bytes, is_used] = segment.pieces.begin()->second;
      if (segment.pieces.size() > 1 || is_used) {
        ++one;
        continue;
      }
      unused[segment.is_small].erase({bytes, number, 0});
      reserved -= bytes;
      one = segments.erase(one);
    }
  }

  std::mutex mutex;
  bool is_caching = false;
  int64_t in_use = 0, peak = 0, reserved = 0, reserved_peak = 0, most = 0, limit = INT64_MAX, refused = 0, flushed = 0, made = 0;

 private:
  void reserve(size_t bytes) {
    if (reserved + (int64_t)bytes > limit && is_caching) {
      flushed++;
      empty_cache();
    }
    if (reserved + (int64_t)bytes > limit) {
      refused++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes, " bytes: ", in_use,
                       " of ", limit, " are in use, ", reserved, " are reserved");
    }
    reserved += bytes;
    reserved_peak = std::max(reserved_peak, reserved);
    most = std::max(most, reserved);
  }

  Place taken(size_t bytes) {
    bool is_small = bytes <= SMALL;
    auto& pool = unused[is_small];
    auto best = pool.lower_bound({bytes, -1, 0});
    if (best == pool.end()) {
      size_t size = is_small ? 2 * MB : bytes < LARGE ? 20 * MB : (bytes + 2 * MB - 1) / (2 * MB) * (2 * MB);
      reserve(size);
      segments[made] = {is_small, {{0, {size, false}}}};
      best = pool.insert({size, made++, 0}).first;
    }
    auto [size, number, at] = *best;
    pool.erase(best);
    auto& pieces = segments[number].pieces;
    auto rest = size - bytes;
    if (is_small ? rest >= GRANULE : rest > SMALL) {
      pieces[at + bytes] = {rest, false};
      pool.insert({rest, number, at + bytes});
      size = bytes;
    }
    pieces[at] = {size, true};
    return {size, number, at};
  }

  void give_back(const Place& place) {
    auto [size, number, at] = place;
    auto& [is_small, pieces] = segments[number];
    auto one = pieces.find(at), after = std::next(one);
    auto joined = [&](auto next) {  // takes a free neighbour out of the pool
      unused[is_small].erase({next->second.first, number, next->first});
      return next->second.first;
    };
    if (after != pieces.end() && !after->second.second) {
      size += joined(after);
      pieces.erase(after);
    }
    if (one != pieces.begin() && !std::prev(one)->second.second) {
      auto before = std::prev(one);
      size += joined(before);
      pieces.erase(one);
      one = before;
    }
    one->second = {size, false};
    unused[is_small].insert({size, number, one->first});
  }

  std::map<int64_t, Segment> segments;
  std::array<std::set<Place>, 2> unused;  // pieces of the large and of the small pool
} memory;

void Memory::release(void* context) {
  auto block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.in_use -= std::get<0>(block->place);
    if (std::get<1>(block->place) < 0) {
      memory.reserved -= block->bytes;
    } else {
      memory.give_back(block->place);
    }
  }
  if (block->bytes) std::memset(block->start, 0xFF, block->bytes);
  std::free(block->start);
  delete block;
}

void must_exist(std::optional<at::Device> device) {
  TORCH_CHECK(!device || device->index() < 1, "sim error: there is one device, got ", device ? device->index() : 0);
}

bool has_float64 = true;  // MPS has none

void must_be_there(std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_TYPE(has_float64 || c10::dtype_or_default(dtype) != at::kDouble, "sim error: there is no float64");
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  must_exist(device);
  must_be_there(dtype);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  must_be_there(dtype);
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// ---- copies: the host sees device memory through a CPU tensor over the same bytes

Tensor seen(const Tensor& t) {
  if (t.is_cpu()) return t;
  auto start = static_cast<char*>(t.storage().mutable_data());
  return at::from_blob(start ? start + t.storage_offset() * t.itemsize() : nullptr, t.sizes(), t.strides(),
                       at::TensorOptions().dtype(t.dtype()));
}

// ---- side streams: copies that wait, each with its place in the stream

struct Queue {
  std::deque<std::function<void()>> waiting;
  int64_t done = 0;  // copies made so far
};
std::recursive_mutex queues_mutex;
std::map<int64_t, Queue> queues;  // by the stream's number; 0, the default stream, has none
thread_local int64_t stream_now = 0;

struct Event {
  int64_t stream = 0, place = 0;  // the number of copies before it
};

void catch_up(int64_t stream, int64_t place = INT64_MAX) {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  auto& queue = queues[stream];
  while (queue.done < place && !queue.waiting.empty()) {
    auto next = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    queue.done++;
    next();
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool is_async) {
  if (!inside) {
    if (from.is_cpu()) {
      counts.copies_in++;
      counts.bytes_in += from.nbytes();
    } else if (to.is_cpu()) {
      counts.copies_out++;
      counts.bytes_out += from.nbytes();
    } else {
      counts.operations++;
    }
  }
  auto copy = [from, to] {
    at::NoGradGuard off;
    if (to.numel()) seen(to).copy_(seen(from));
  };
  if (is_async && stream_now) {
    std::lock_guard<std::recursive_mutex> lock(queues_mutex);
    queues[stream_now].waiting.push_back(copy);
  } else {
    copy();
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& t) {
  counts.items++;
  counts.bytes_out += t.itemsize();
  return seen(t).item();
}

// ---- random numbers: the CPU's kernels, with the stream of the device

struct Stream final : at::CPUGeneratorImpl {
  explicit Stream(uint64_t seed = c10::default_rng_seed_val) : at::CPUGeneratorImpl(seed) {
    device_ = DEVICE;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_stream() {
  static at::Generator one = at::make_generator<Stream>();
  return one;
}

struct Drawing {  // the default stream of the CPU is that of the device for a while
  explicit Drawing(at::Generator of) : mine(of), cpu(at::detail::getDefaultCPUGenerator()), before(cpu.get_state()) {
    cpu.set_state(mine.get_state());
  }
  ~Drawing() {
    mine.set_state(cpu.get_state());
    cpu.set_state(before);
  }
  at::Generator mine, cpu;
  Tensor before;
};

// ---- operations

const std::set<std::string> WAITS = {  // the host must know the result, or its size
    "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave"};

std::mutex names_mutex;
std::map<std::string, int64_t> names;  // operation -> how often

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.operator_name().name;
  counts.operations++;
  counts.waits += WAITS.count(name);
  {
    std::lock_guard<std::mutex> lock(names_mutex);
    names[name]++;
  }
  Inside now;
  std::optional<Drawing> drawing;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    auto stream = default_stream();
    for (auto& argument : torch::jit::last(*stack, op.schema().arguments().size()))
      if (argument.isGenerator() && argument.toGenerator().device() == DEVICE) {
        stream = argument.toGenerator();
        const_cast<c10::IValue&>(argument) = c10::IValue();
      }
    drawing.emplace(stream);
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, c10::SymIntArrayRef stride,
                   c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                   c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  counts.operations++;
  Inside now;
  auto bias = b && b->defined() ? std::optional<Tensor>(seen(*b)) : std::nullopt;
  return at::convolution_symint(seen(x), seen(w), bias, stride, padding, dilation, transposed, output_padding, groups)
      .to(DEVICE);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& w, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
  counts.operations++;
  Inside now;
  c10::SymInt outputs = transposed ? w.size(1) * groups.expect_int() : w.size(0);
  auto found = at::convolution_backward_symint(seen(gradient), seen(x), seen(w), c10::SymIntArrayRef(outputs), stride,
                                               padding, dilation, transposed, output_padding, groups, wanted);
  auto moved = [](const Tensor& t) { return t.defined() ? t.to(DEVICE) : t; };
  return {moved(std::get<0>(found)), moved(std::get<1>(found)), moved(std::get<2>(found))};
}

// The cell of an LSTM, which torch calls on accelerators only.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& inputs, const Tensor& hidden, const Tensor& before,
                                             const std::optional<Tensor>& b1, const std::optional<Tensor>& b2) {
  counts.operations++;
  Inside now;
  auto gates = seen(inputs) + seen(hidden);
  if (b1 && b1->defined()) gates = gates + seen(*b1) + seen(*b2);
  auto parts = gates.chunk(4, 1);
  auto in = parts[0].sigmoid(), keep = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  auto after = keep * seen(before) + in * cell;
  return {(out * after.tanh()).to(DEVICE), after.to(DEVICE), at::cat({in, keep, cell, out}, 1).to(DEVICE)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& of_hidden,
                                                      const std::optional<Tensor>& of_cell, const Tensor& before,
                                                      const Tensor& after, const Tensor& gates, bool has_bias) {
  counts.operations++;
  Inside now;
  auto zeros = at::zeros_like(seen(after));
  auto given = [&](const std::optional<Tensor>& t) { return t && t->defined() ? seen(*t) : zeros; };
  auto parts = seen(gates).chunk(4, 1);
  auto in = parts[0], keep = parts[1], cell = parts[2], out = parts[3], top = seen(after).tanh();
  auto total = given(of_cell) + given(of_hidden) * out * (1 - top * top);
  auto found = at::cat({total * cell * in * (1 - in), total * seen(before) * keep * (1 - keep),
                        total * in * (1 - cell * cell), given(of_hidden) * top * out * (1 - out)}, 1);
  return {found.to(DEVICE), (total * keep).to(DEVICE), has_bias ? found.sum(0).to(DEVICE) : Tensor()};
}

const Tensor& resize_(const Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set_source(Tensor& t, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(t, source, offset, size, stride);
}
Tensor& set_whole(Tensor& t, at::Storage source) {
  return at::native::set_storage_cpu_(t, source, 0, {static_cast<int64_t>(source.nbytes() / t.itemsize())}, {});
}
Tensor view(const Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor as_strided(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}
Tensor reshape_alias(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// ---- the device, as torch asks for it

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::UNSAFE, DEVICE, stream_now); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return c10::Stream(c10::Stream::UNSAFE, DEVICE, ++made); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(DEVICE);
    stream_now = next.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(queues_mutex);
    if (!*event) *event = new Event;
    auto& queue = queues[stream.id()];
    *static_cast<Event*>(*event) = {stream.id(), queue.done + static_cast<int64_t>(queue.waiting.size())};
  }
  void block(void* event, const c10::Stream&) const override {
    auto one = static_cast<Event*>(event);
    catch_up(one->stream, one->place);
  }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> lock(queues_mutex);
    auto one = static_cast<Event*>(event);
    return queues[one->stream].done >= one->place;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    counts.waits++;
    block(event, getStream(DEVICE));
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> lock(queues_mutex);
    return queues[stream.id()].waiting.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    counts.waits++;
    catch_up(stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    counts.waits++;
    std::lock_guard<std::recursive_mutex> lock(queues_mutex);
    for (auto& one : queues) catch_up(one.first);
  }

  inline static std::atomic<int64_t> made{0};
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_stream(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Stream>(); }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto larger = memory.allocate(bytes);
    if (auto both = std::min(bytes, storage.nbytes())) std::memcpy(larger.get(), storage.data(), both);
    auto& one = const_cast<c10::Storage&>(storage);
    one.set_data_ptr_noswap(std::move(larger));
    one.set_nbytes(bytes);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_source);
  // What torch would do for them before the fallback resizes an output, and warns of it.
  for (auto loss : {"mse_loss", "smooth_l1_loss"})
    m.impl(loss, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("set_.source_Storage", set_whole);
  m.impl("view", view);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(group_norm, fp32)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::SetAllocator(KIND, &memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("in_use", [] { return memory.in_use; });
  m.def("peak", [] { return memory.peak; });
  m.def("reserved", [] { return memory.reserved; });
  m.def("reserved_peak", [] { return memory.reserved_peak; });
  m.def("most_reserved", [] { return std::exchange(memory.most, memory.reserved); });  // since the last call
  m.def("flushed", [] { return memory.flushed; });
  m.def("reset_peak", [] { memory.peak = memory.in_use, memory.reserved_peak = memory.reserved; });
  m.def("empty_cache", [] {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.empty_cache();
  });
  m.def("set_caching", [](bool is_on) { memory.is_caching = is_on; });
  m.def("limit", [] { return memory.limit; });
  m.def("set_limit", [](int64_t bytes) { memory.limit = bytes; });
  m.def("set_float64", [](bool is_there) { has_float64 = is_there; });
  m.def("refused", [] { return memory.refused; });
  m.def("default_generator", [] { return default_stream(); });
  m.def("counts", [] {
    return std::map<std::string, int64_t>{
        {"operations", counts.operations}, {"items", counts.items},           {"waits", counts.waits},
        {"copies_out", counts.copies_out}, {"copies_in", counts.copies_in},   {"bytes_out", counts.bytes_out},
        {"bytes_in", counts.bytes_in}};
  });
  m.def("names", [] {
    std::lock_guard<std::mutex> lock(names_mutex);
    return names;
  });
}
