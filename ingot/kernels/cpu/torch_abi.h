// Tensors, calls of torch's ops and boxed arguments, on torch's stable C ABI.
//
// torch has a C++ wrapper of this ABI (torch/csrc/stable). It is inlined wherever a tensor is
// touched, with the formatting of its error messages, which took longer to compile than many
// kernels. Here everything that is not a load or a store is a function that is not inlined, and the
// metadata of a tensor are read once.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_shim.h"

#define INGOT_NOINLINE [[gnu::noinline]] inline

namespace ingot {

[[noreturn]] INGOT_NOINLINE void throw_torch_error() {
  throw std::runtime_error(torch_exception_get_what_without_backtrace());
}
// Throw if a function of the ABI has failed.
inline void check_torch(AOTITorchError error) {
  if (error) throw_torch_error();
}

INGOT_NOINLINE int64_t num_threads() {
  uint32_t count;
  check_torch(torch_get_num_threads(&count));
  return count;
}

enum class ScalarType : uint32_t {
  Byte, Char, Short, Int, Long, Half, Float, Double, ComplexHalf, ComplexFloat, ComplexDouble, Bool,
  BFloat16, Other
};

// torch's numbers of the dtypes above.
INGOT_NOINLINE const std::array<int32_t, size_t(ScalarType::Other)>& dtype_numbers() {
  static const std::array<int32_t, size_t(ScalarType::Other)> numbers{
      aoti_torch_dtype_uint8(),     aoti_torch_dtype_int8(),       aoti_torch_dtype_int16(),
      aoti_torch_dtype_int32(),     aoti_torch_dtype_int64(),      aoti_torch_dtype_float16(),
      aoti_torch_dtype_float32(),   aoti_torch_dtype_float64(),    aoti_torch_dtype_complex32(),
      aoti_torch_dtype_complex64(), aoti_torch_dtype_complex128(), aoti_torch_dtype_bool(),
      aoti_torch_dtype_bfloat16()};
  return numbers;
}
INGOT_NOINLINE int32_t dtype_number(ScalarType dtype) {
  if (dtype == ScalarType::Other) throw std::runtime_error("unsupported dtype");
  return dtype_numbers()[size_t(dtype)];
}

// A tensor, with shared ownership of its handle.
class Tensor {
 public:
  // Takes ownership of the handle.
  explicit Tensor(AtenTensorHandle handle) : shared_(share(handle)) {}
  Tensor(const Tensor& other) : shared_(other.shared_) {
    shared_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  Tensor(Tensor&& other) noexcept : shared_(std::exchange(other.shared_, nullptr)) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(shared_, other.shared_);
    return *this;
  }
  [[gnu::noinline]] ~Tensor() {
    if (shared_ && shared_->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete shared_;
  }

  AtenTensorHandle get() const { return shared_->handle; }
  void* data_ptr() const { return shared_->data; }
  int64_t dim() const { return shared_->dim; }
  ScalarType scalar_type() const { return shared_->dtype; }
  bool is_cpu() const { return shared_->is_cpu; }
  std::span<const int64_t> sizes() const { return {shared_->sizes, size_t(shared_->dim)}; }
  int64_t size(int64_t dim) const { return shared_->sizes[checked(dim)]; }
  int64_t stride(int64_t dim) const { return shared_->strides[checked(dim)]; }
  [[gnu::noinline]] int64_t numel() const {
    int64_t count;
    check_torch(aoti_torch_get_numel(get(), &count));
    return count;
  }
  [[gnu::noinline]] bool is_contiguous() const {
    bool result;
    check_torch(aoti_torch_is_contiguous(get(), &result));
    return result;
  }
  [[gnu::noinline]] int64_t element_size() const {
    return aoti_torch_dtype_element_size(shared_->dtype_number);
  }

 private:
  struct Shared {
    AtenTensorHandle handle;
    std::atomic<int64_t> owners = 1;
    void* data;
    int64_t dim, *sizes, *strides;
    int32_t dtype_number;
    ScalarType dtype = ScalarType::Other;
    bool is_cpu;

    explicit Shared(AtenTensorHandle handle) : handle(handle) {}
    ~Shared() { aoti_torch_delete_tensor_object(handle); }
  };

  [[gnu::noinline]] static Shared* share(AtenTensorHandle handle) {
    auto shared = std::make_unique<Shared>(handle);
    int32_t device;
    check_torch(aoti_torch_get_device_type(handle, &device));
    check_torch(aoti_torch_get_dtype(handle, &shared->dtype_number));
    check_torch(aoti_torch_get_dim(handle, &shared->dim));
    check_torch(aoti_torch_get_sizes(handle, &shared->sizes));
    check_torch(aoti_torch_get_strides(handle, &shared->strides));
    check_torch(aoti_torch_get_data_ptr(handle, &shared->data));
    shared->is_cpu = device == aoti_torch_device_type_cpu();
    const auto& numbers = dtype_numbers();
    for (size_t i = 0; i < numbers.size(); i++)
      if (numbers[i] == shared->dtype_number) shared->dtype = ScalarType(i);
    return shared.release();
  }
  [[noreturn, gnu::noinline]] static void throw_out_of_range() {
    throw std::runtime_error("invalid argument: a tensor has too few dimensions");
  }
  int64_t checked(int64_t dim) const {
    if (uint64_t(dim) >= uint64_t(shared_->dim)) throw_out_of_range();
    return dim;
  }

  Shared* shared_;
};

// Arguments and results of a backward kernel.
using NeedsGrad = std::vector<bool>;
using Tensors = std::vector<Tensor>;

// ---- Boxed values. unbox() takes over what a value owns, box() returns a value that owns a copy.

template <class T>
T unbox(StableIValue value) = delete;
template <>
inline int64_t unbox(StableIValue value) { return int64_t(value); }
template <>
inline bool unbox(StableIValue value) { return value & 0xff; }
template <>
inline double unbox(StableIValue value) {
  double result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}
template <>
inline Tensor unbox(StableIValue value) { return Tensor(AtenTensorHandle(value)); }
template <>
INGOT_NOINLINE std::string unbox(StableIValue value) {
  auto handle = StringHandle(value);
  size_t length;
  const char* data;
  check_torch(torch_string_length(handle, &length));
  check_torch(torch_string_c_str(handle, &data));
  std::string result(data, length);
  check_torch(torch_delete_string(handle));
  return result;
}

// The value that an optional one points to, in memory that is freed here.
INGOT_NOINLINE std::optional<StableIValue> take_optional(StableIValue value) {
  auto pointer = reinterpret_cast<StableIValue*>(value);
  if (!pointer) return {};
  StableIValue result = *pointer;
  check_torch(torch_delete_stable_ivalue(pointer));
  return result;
}
template <class T>
[[gnu::noinline]] std::optional<T> unbox_optional(StableIValue value) {
  if (std::optional<StableIValue> taken = take_optional(value)) return unbox<T>(*taken);
  return {};
}
// The elements of a list, which is freed here.
INGOT_NOINLINE std::vector<StableIValue> take_list(StableIValue value) {
  auto list = StableListHandle(value);
  size_t size = 0;
  AOTITorchError error = torch_list_size(list, &size);
  std::vector<StableIValue> result(size);
  for (size_t i = 0; !error && i < size; i++) error = torch_list_get_item(list, i, &result[i]);
  torch_delete_list(list);
  check_torch(error);
  return result;
}
INGOT_NOINLINE Tensors unbox_tensors(StableIValue value) {
  Tensors result;
  std::vector<StableIValue> taken = take_list(value);
  result.reserve(taken.size());
  for (StableIValue element : taken) result.push_back(unbox<Tensor>(element));
  return result;
}
INGOT_NOINLINE NeedsGrad unbox_flags(StableIValue value) {
  std::vector<StableIValue> taken = take_list(value);
  NeedsGrad result(taken.size());
  for (size_t i = 0; i < taken.size(); i++) result[i] = unbox<bool>(taken[i]);
  return result;
}
template <>
inline std::optional<Tensor> unbox(StableIValue value) { return unbox_optional<Tensor>(value); }
template <>
inline std::optional<int64_t> unbox(StableIValue value) { return unbox_optional<int64_t>(value); }
template <>
inline std::optional<double> unbox(StableIValue value) { return unbox_optional<double>(value); }
template <>
inline Tensors unbox(StableIValue value) { return unbox_tensors(value); }
template <>
inline NeedsGrad unbox(StableIValue value) { return unbox_flags(value); }

inline StableIValue box(int64_t value) { return StableIValue(value); }
inline StableIValue box(bool value) { return value; }
inline StableIValue box(double value) {
  StableIValue result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}
INGOT_NOINLINE StableIValue box(const Tensor& tensor) {
  AtenTensorHandle handle;
  check_torch(aoti_torch_new_tensor_handle(tensor.get(), &handle));
  return StableIValue(handle);
}
INGOT_NOINLINE StableIValue box_pointer(StableIValue value) {
  StableIValue* pointer;
  check_torch(torch_new_stable_ivalue(&pointer));
  *pointer = value;
  return StableIValue(pointer);
}
template <class T>
[[gnu::noinline]] StableIValue box(const std::optional<T>& value) {
  return value ? box_pointer(box(*value)) : 0;
}
INGOT_NOINLINE StableIValue box(const Tensors& tensors) {
  StableListHandle list;
  check_torch(torch_new_list_reserve_size(tensors.size(), &list));
  for (const Tensor& tensor : tensors) check_torch(torch_list_push_back(list, box(tensor)));
  return StableIValue(list);
}

// ---- Calls of torch's ops.

// Call an op with the arguments on the stack, which are replaced by its results.
INGOT_NOINLINE void call_op(const char* name, const char* overload, StableIValue* stack) {
  check_torch(torch_call_dispatcher(name, overload, stack, TORCH_ABI_VERSION));
}
INGOT_NOINLINE Tensor contiguous(const Tensor& x) {
  StableIValue stack[] = {box(x), box(int64_t(aoti_torch_memory_format_contiguous_format()))};
  call_op("aten::contiguous", "", stack);
  return unbox<Tensor>(stack[0]);
}
INGOT_NOINLINE Tensor to_dtype(const Tensor& x, ScalarType dtype) {
  StableIValue stack[] = {box(x), box(int64_t(dtype_number(dtype))), box(false), box(false), 0};
  call_op("aten::to", "dtype", stack);
  return unbox<Tensor>(stack[0]);
}
INGOT_NOINLINE void copy_to(const Tensor& to, const Tensor& from) {
  StableIValue stack[] = {box(to), box(from), box(false)};
  call_op("aten::copy_", "", stack);
  unbox<Tensor>(stack[0]);
}

// ---- Registration, for as long as the library is loaded.

class Registration {
 public:
  using Kernel = void (*)(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);

  // Kernels of existing ops at a dispatch key.
  [[gnu::noinline]] Registration(const char* name_space, const char* key,
                                 std::initializer_list<std::pair<const char*, Kernel>> kernels) {
    aoti_torch_library_init_impl(name_space, key, __FILE__, __LINE__, &library_);
    for (auto [name, kernel] : kernels)
      check_torch(torch_library_impl(library_, name, kernel, TORCH_ABI_VERSION));
  }
  // New ops.
  [[gnu::noinline]] Registration(const char* name_space,
                                 std::initializer_list<const char*> schemas) {
    aoti_torch_library_init_def(name_space, __FILE__, __LINE__, &library_);
    for (const char* schema : schemas) check_torch(aoti_torch_library_def(library_, schema));
  }
  Registration(const Registration&) = delete;
  [[gnu::noinline]] ~Registration() { aoti_torch_delete_library_object(library_); }

 private:
  TorchLibraryHandle library_;
};

}  // namespace ingot
