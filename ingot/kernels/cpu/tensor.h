// The interface between torch and the kernels: argument checks, views, allocation.
//
// A kernel is a function in ingot::kernels with the op's name and signature. It validates all
// arguments before it dereferences a pointer, and throws
//
//   InvalidArgument   if a condition is violated; Python prepends the op's name and adds a hint
//   Unsupported       if another provider has to compute the call: other dtypes, other devices
//
// REGISTER_OP(name) registers it: see registration.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "threads.h"
#include "tunables.h"
#include "torch_abi.h"
#include "vector.h"

namespace ingot {

struct InvalidArgument : std::runtime_error {
  explicit InvalidArgument(const char* message)
      : runtime_error(std::string("invalid argument: ") + message) {}
};
struct Unsupported : std::runtime_error {
  Unsupported() : runtime_error("the CPU kernels support float32 and bfloat16 on the CPU") {}
};

[[noreturn]] INGOT_NOINLINE void throw_invalid(const char* message) {
  throw InvalidArgument(message);
}
[[noreturn]] INGOT_NOINLINE void throw_unsupported() { throw Unsupported(); }
inline void check(bool condition, const char* message) {
  if (!condition) throw_invalid(message);
}

#if defined(__SANITIZE_ADDRESS__)
constexpr bool SANITIZED = true;
#else
constexpr bool SANITIZED = false;
#endif

INGOT_NOINLINE void check_same_dtype(const Tensor& tensor, const Tensor& other) {
  check(tensor.is_cpu() && tensor.scalar_type() == other.scalar_type(),
        "all tensors must be on the CPU and have the same dtype");
}

INGOT_NOINLINE bool same_sizes(const Tensor& x, std::span<const int64_t> sizes) {
  return std::equal(x.sizes().begin(), x.sizes().end(), sizes.begin(), sizes.end());
}
inline bool same_sizes(const Tensor& x, const Tensor& other) {
  return same_sizes(x, other.sizes());
}

INGOT_NOINLINE void check_supported(const Tensor& x) {
  bool supported = x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16;
  if (!x.is_cpu() || !supported) throw_unsupported();
}

// Call body(float{}) or body(bf16{}).
template <class Body>
inline auto dispatch_dtype(const Tensor& x, const Body& body) {
  if (!x.is_cpu()) throw_unsupported();
  switch (x.scalar_type()) {
    case ScalarType::Float: return body(float{});
    case ScalarType::BFloat16: return body(bf16{});
    default: throw_unsupported();
  }
}

// madvise() for large allocations; best effort.
enum class Advice { HUGE_PAGES, DONT_NEED };
inline void advise_memory([[maybe_unused]] const void* from, size_t bytes,
                          [[maybe_unused]] Advice advice) {
  constexpr size_t LARGE = 8 << 20;
  if (bytes < LARGE) return;
#if defined(__linux__)
  constexpr uintptr_t PAGE = 4096;
  uintptr_t begin = (uintptr_t(from) + PAGE - 1) / PAGE * PAGE;
  uintptr_t end = (uintptr_t(from) + bytes) / PAGE * PAGE;
  madvise((void*)begin, end - begin, advice == Advice::HUGE_PAGES ? MADV_HUGEPAGE : MADV_DONTNEED);
#endif
}

// Large tensors use huge pages: malloc maps new pages at each call, and 16384 page faults take 35
// of the 45 ms of an rms_norm with an output of 64 MiB.
inline void use_huge_pages(const Tensor& x) {
  advise_memory(x.data_ptr(), x.numel() * x.element_size(), Advice::HUGE_PAGES);
}

// malloc() aligned to a cache line; the address to free is stored in front of the result. torch
// calls memalign, which before glibc 2.38 cannot reuse a freed block of just the right size:
// between forward and backward of GPT-2 124M a process held 0.5 GB of unused memory.
inline void* aligned_malloc(size_t bytes) {
  constexpr size_t LINE = 64;
  char* begin = static_cast<char*>(std::malloc(bytes + 2 * LINE));
  if (!begin) return nullptr;
  char* aligned = begin + 2 * LINE - uintptr_t(begin) % LINE;
  std::memcpy(aligned - sizeof begin, &begin, sizeof begin);
  return aligned;
}
inline void aligned_free(void* aligned, void*) {
  char* begin;
  std::memcpy(&begin, static_cast<char*>(aligned) - sizeof begin, sizeof begin);
  std::free(begin);
}

// Uninitialized tensor. A large one cannot be resized.
INGOT_NOINLINE Tensor allocate(std::span<const int64_t> sizes, ScalarType dtype) {
  constexpr size_t LARGE = 1 << 20;
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1, count = 1;
  for (size_t i = sizes.size(); i--; stride *= std::max<int64_t>(sizes[i], 1))
    strides[i] = stride, count *= sizes[i];
  int32_t type = dtype_number(dtype);
  int32_t cpu = aoti_torch_device_type_cpu(), layout = aoti_torch_layout_strided();
  bool floats = dtype == ScalarType::Float || dtype == ScalarType::BFloat16;  // others are small
  size_t bytes = count * (dtype == ScalarType::BFloat16 ? sizeof(bf16) : sizeof(float));
  AtenTensorHandle handle;
  // The address sanitizer only detects overruns of memory that torch allocated.
  void* at = SANITIZED || !floats || bytes < LARGE ? nullptr : aligned_malloc(bytes);
  check_torch(
      at ? torch_from_blob(at, sizes.size(), sizes.data(), strides.data(), 0, type, cpu, -1,
                           &handle, layout, nullptr, 0, aligned_free, nullptr)
         : aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), type, cpu, -1,
                                    &handle));
  Tensor tensor(handle);
  use_huge_pages(tensor);
  return tensor;
}
INGOT_NOINLINE Tensor allocate_like(const Tensor& x) {
  return allocate({x.sizes().data(), size_t(x.dim())}, x.scalar_type());
}

template <class T>
inline T* data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

// A tensor as a matrix with rows of the last dimension; copied unless rows are evenly spaced.
template <class T>
struct Rows {
  Tensor owner;
  int64_t count, width, stride;
  T* first;

  [[gnu::noinline]] explicit Rows(const Tensor& x) : owner(x) {
    check(x.dim() >= 1, "x must have at least one dimension");
    width = x.size(x.dim() - 1);
    count = 1;
    for (int64_t d = 0; d + 1 < x.dim(); d++) count *= x.size(d);
    stride = width;
    bool two_dims = x.dim() == 2 && x.stride(1) == 1 && x.stride(0) >= width;
    if (two_dims) stride = x.stride(0);
    else if (!x.is_contiguous()) owner = contiguous(x);
    first = data<T>(owner);
  }
  T* operator[](int64_t row) const { return first + row * stride; }
};

// Non-owning view of a matrix.
template <class T>
struct Matrix {
  const T* first;
  int64_t rows, width, stride;

  Matrix(const T* first, int64_t rows, int64_t width, int64_t stride)
      : first(first), rows(rows), width(width), stride(stride) {}
  Matrix(const Rows<T>& r) : first(r.first), rows(r.count), width(r.width), stride(r.stride) {}
  const T* operator[](int64_t row) const { return first + row * stride; }
  Matrix slice_rows(int64_t begin, int64_t count) const {
    return {(*this)[begin], count, width, stride};
  }
  Matrix slice_columns(int64_t begin, int64_t count) const {
    return {first + begin, rows, count, stride};
  }
};

// A tensor of `size` values; copied if it is strided.
template <class T>
struct Vector {
  Tensor owner;
  T* first;

  [[gnu::noinline]] Vector(const Tensor& x, int64_t size) : owner(x) {
    check(x.dim() == 1 && x.size(0) == size,
          "weight and bias must be vectors with one entry per channel");
    if (!x.is_contiguous()) owner = contiguous(x);
    first = data<T>(owner);
  }
  T& operator[](int64_t index) const { return first[index]; }
};

// Rows of an output tensor. Non-temporal stores are not used: into memory that malloc has just
// mapped, as it does from 32 MiB on, they took up to 4x as long.
template <class T>
struct Output {
  T* first;
  int64_t width;

  explicit Output(const Tensor& y) : first(data<T>(y)), width(y.size(y.dim() - 1)) {}
  T* operator[](int64_t row) const { return first + row * width; }
  template <class... Tail>
  void write(int64_t row, int64_t at, Floats values, Tail... tail) const {
    store((*this)[row] + at, values, tail...);
  }
};

// Integers of any dtype; copied unless they are contiguous int32 or int64.
struct Integers {
  Tensor owner;
  int64_t count;
  const int32_t* ints = nullptr;
  const int64_t* longs = nullptr;

  [[gnu::noinline]] explicit Integers(const Tensor& x) : owner(x), count(x.numel()) {
    check(x.is_cpu(), "indices must be on the CPU");
    switch (x.scalar_type()) {
      case ScalarType::Int:
      case ScalarType::Long: break;
      case ScalarType::Bool:
      case ScalarType::Byte:
      case ScalarType::Char:
      case ScalarType::Short: owner = to_dtype(x, ScalarType::Long); break;
      default: check(false, "indices must be integers");
    }
    if (!owner.is_contiguous()) owner = contiguous(owner);
    if (owner.scalar_type() == ScalarType::Int) ints = data<int32_t>(owner);
    else longs = data<int64_t>(owner);
  }
  int64_t operator[](int64_t index) const { return ints ? ints[index] : longs[index]; }
};

// Run body(begin, end) over parts of [0, count) on ingot's threads. `work` is the cost of one index
// in elements; a task has at least TASK_ELEMENTS of them, below which waking a thread does not pay.
INGOT_NOINLINE void parallel_for(int64_t count, int64_t work,
                                 const FunctionRef<void(int64_t, int64_t)>& body) {
  int64_t min_count =
      std::max<int64_t>(1, tunable(Tunable::TASK_ELEMENTS) / std::max<int64_t>(work, 1));
  int64_t tasks = std::min<int64_t>(count, 1);
  if (count > min_count)
    tasks = std::min((count + min_count - 1) / min_count,
                     tunable(Tunable::TASKS_PER_THREAD) * num_threads());
  parallel_for_dynamic(tasks, [&](TaskQueue& queue) {
    for (int64_t i; queue.pop(i);) body(count * i / tasks, count * (i + 1) / tasks);
  });
}

// Run body(row, at) for every full vector of every row, body(row, at, count) for the tail.
template <class Body>
inline void parallel_for_each_vector(int64_t rows, int64_t width, const Body& body) {
  parallel_for(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      int64_t at = 0;
      for (; at + WIDTH <= width; at += WIDTH) body(row, at);
      if (at < width) body(row, at, width - at);
    }
  });
}

// Copy a tensor on ingot's threads: torch's OpenMP threads would spin on the same cores afterwards.
INGOT_NOINLINE Tensor clone_tensor(const Tensor& x) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> from(x);
    Tensor y = allocate_like(x);
    parallel_for(from.count, from.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        std::copy_n(from[row], from.width, data<T>(y) + row * from.width);
    });
    return y;
  });
}

}  // namespace ingot

#include "registration.h"
