// Between torch and the kernels: arguments in, a tensor out, and who computes it.
//
// A kernel is a function in ingot::kernels with the op's name and signature. It checks all it is
// given before it reads through a pointer, and throws
//
//   Unfit       for what does not fit, with what it needs instead; Python adds the hint
//   Elsewhere   for what another provider can: other dtypes, other devices
//
// OP(name) registers it twice:
//
//   ingot_cpu::name   the kernel itself: the `cpu` provider calls it
//   ingot::name       the op, at the CPU key: the dispatcher calls the kernel without Python. Where
//                     it has to be computed elsewhere, or someone prefers a provider, Python decides
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

#include "vector.h"  // first, for what it does about a warning

#include "threads.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace ingot {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Unfit : std::runtime_error {
  explicit Unfit(const char* what) : runtime_error(std::string("unfit: ") + what) {}
};
struct Elsewhere : std::runtime_error {
  Elsewhere() : runtime_error("the CPU kernels take float32 and bfloat16 on the CPU") {}
};

inline void need(bool fits, const char* what) {
  if (!fits) throw Unfit(what);
}

#if defined(__SANITIZE_ADDRESS__)
constexpr bool SANITIZED = true;
#else
constexpr bool SANITIZED = false;
#endif

inline void need_like(const Tensor& tensor, const Tensor& model) {
  need(tensor.is_cpu() && tensor.scalar_type() == model.scalar_type(), "tensors of one CPU dtype");
}

// Calls body(float{}) or body(bf16{}).
template <class Body>
inline auto with_dtype(const Tensor& x, Body body) {
  if (!x.is_cpu()) throw Elsewhere();
  switch (x.scalar_type()) {
    case ScalarType::Float: return body(float{});
    case ScalarType::BFloat16: return body(bf16{});
    default: throw Elsewhere();
  }
}

// What is said of the pages of much memory; of little, nothing. Refused, it is only slower or larger.
enum class Pages { HUGE, UNUSED };
inline void advise([[maybe_unused]] const void* from, size_t bytes, [[maybe_unused]] Pages pages) {
  constexpr size_t LARGE = 8 << 20;
  if (bytes < LARGE) return;
#if defined(__linux__)
  constexpr uintptr_t PAGE = 4096;
  uintptr_t begin = (uintptr_t(from) + PAGE - 1) / PAGE * PAGE;
  uintptr_t end = (uintptr_t(from) + bytes) / PAGE * PAGE;
  madvise((void*)begin, end - begin, pages == Pages::HUGE ? MADV_HUGEPAGE : MADV_DONTNEED);
#endif
}

// Large tensors lie in huge pages: malloc maps new ones at each call, and 16384 page faults are
// 35 of the 45 ms that rms_norm would take to make 64 MiB.
inline void in_huge_pages(const Tensor& x) {
  advise(x.data_ptr(), x.numel() * x.element_size(), Pages::HUGE);
}

// A block of malloc's, aligned to a cache line, with its beginning noted before it. torch asks
// memalign, which before glibc 2.38 cannot give out a block again that is just large enough: between
// forward and backward of GPT-2 124M a process held 0.5 GB that nobody used.
inline void* block(size_t bytes) {
  constexpr size_t LINE = 64;
  char* begin = static_cast<char*>(std::malloc(bytes + 2 * LINE));
  if (!begin) return nullptr;
  char* aligned = begin + 2 * LINE - uintptr_t(begin) % LINE;
  std::memcpy(aligned - sizeof begin, &begin, sizeof begin);
  return aligned;
}
inline void free_block(void* aligned, void*) {
  char* begin;
  std::memcpy(&begin, static_cast<char*>(aligned) - sizeof begin, sizeof begin);
  std::free(begin);
}

// A tensor to be written; a large one cannot be resized.
inline Tensor made(std::span<const int64_t> sizes, ScalarType dtype) {
  constexpr size_t LARGE = 1 << 20;
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1, count = 1;
  for (size_t i = sizes.size(); i--; stride *= std::max<int64_t>(sizes[i], 1))
    strides[i] = stride, count *= sizes[i];
  int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  int32_t cpu = aoti_torch_device_type_cpu(), layout = aoti_torch_layout_strided();
  bool floats = dtype == ScalarType::Float || dtype == ScalarType::BFloat16;  // others are small
  size_t bytes = count * (dtype == ScalarType::BFloat16 ? sizeof(bf16) : sizeof(float));
  AtenTensorHandle handle;
  // The sanitizer has to see where a tensor ends.
  void* at = SANITIZED || !floats || bytes < LARGE ? nullptr : block(bytes);
  STABLE_TORCH_ERROR_CODE_CHECK(
      at ? torch_from_blob(at, sizes.size(), sizes.data(), strides.data(), 0, type, cpu, -1, &handle,
                           layout, nullptr, 0, free_block, nullptr)
         : aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), type, cpu, -1, &handle));
  Tensor tensor(handle);
  in_huge_pages(tensor);
  return tensor;
}
inline Tensor made_like(const Tensor& x) {
  return made({x.sizes().data(), size_t(x.dim())}, x.scalar_type());
}

template <class T>
inline T* data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

// A matrix of the last dimension by all the others; a copy where the strides are odd.
template <class T>
struct Rows {
  Tensor owner;
  int64_t count, width, stride;
  T* first;

  explicit Rows(const Tensor& x) : owner(x) {
    need(x.dim() >= 1, "at least one dimension");
    width = x.size(x.dim() - 1);
    count = 1;
    for (int64_t d = 0; d + 1 < x.dim(); d++) count *= x.size(d);
    stride = width;
    bool two_dims = x.dim() == 2 && x.stride(1) == 1 && x.stride(0) >= width;
    if (two_dims) stride = x.stride(0);
    else if (!x.is_contiguous()) owner = torch::stable::contiguous(x);
    first = data<T>(owner);
  }
  T* operator[](int64_t row) const { return first + row * stride; }
};

// The same without an owner.
template <class T>
struct Matrix {
  const T* first;
  int64_t rows, width, stride;

  Matrix(const T* first, int64_t rows, int64_t width, int64_t stride)
      : first(first), rows(rows), width(width), stride(stride) {}
  Matrix(const Rows<T>& r) : first(r.first), rows(r.count), width(r.width), stride(r.stride) {}
  const T* operator[](int64_t row) const { return first + row * stride; }
  Matrix some_rows(int64_t begin, int64_t count) const {
    return {(*this)[begin], count, width, stride};
  }
  Matrix some_columns(int64_t begin, int64_t count) const {
    return {first + begin, rows, count, stride};
  }
};

// What a gradient is given, and gives.
using Needs = std::vector<bool>;
using Tensors = std::vector<Tensor>;

// A vector of `size` values; a copy where it is strided.
template <class T>
struct Vector {
  Tensor owner;
  T* first;

  Vector(const Tensor& x, int64_t size) : owner(x) {
    need(x.dim() == 1 && x.size(0) == size, "a vector of the right size");
    if (!x.is_contiguous()) owner = torch::stable::contiguous(x);
    first = data<T>(owner);
  }
  T& operator[](int64_t index) const { return first[index]; }
};

// The rows of a new tensor. Stores that pass the caches by were tried: into memory that malloc has
// just mapped anew, as it does from 32 MiB on, they took up to 4 times as long.
template <class T>
struct Output {
  T* first;
  int64_t width;

  explicit Output(const Tensor& y) : first(data<T>(y)), width(y.size(y.dim() - 1)) {}
  T* operator[](int64_t row) const { return first + row * width; }
  template <class... Count>
  void write(int64_t row, int64_t at, Floats values, Count... count) const {
    store((*this)[row] + at, values, count...);
  }
};

// Integers of any dtype; a copy unless they are int32 or int64 without gaps.
struct Integers {
  Tensor owner;
  int64_t count;
  const int32_t* ints = nullptr;
  const int64_t* longs = nullptr;

  explicit Integers(const Tensor& x) : owner(x), count(x.numel()) {
    need(x.is_cpu(), "integers on the CPU");
    switch (x.scalar_type()) {
      case ScalarType::Int:
      case ScalarType::Long: break;
      case ScalarType::Bool:
      case ScalarType::Byte:
      case ScalarType::Char:
      case ScalarType::Short: owner = torch::stable::to(x, ScalarType::Long); break;
      default: need(false, "integers");
    }
    if (!owner.is_contiguous()) owner = torch::stable::contiguous(owner);
    if (owner.scalar_type() == ScalarType::Int) ints = data<int32_t>(owner);
    else longs = data<int64_t>(owner);
  }
  int64_t operator[](int64_t index) const { return ints ? ints[index] : longs[index]; }
};

// Runs body(begin, end) over parts of [0, count) on torch's threads. `work` is what one costs, in
// elements: a thread is worth waking for some thousands.
template <class Body>
inline void parallel(int64_t count, int64_t work, const Body& body) {
  constexpr int64_t ENOUGH = 16384, EACH = 4;  // pieces for each thread
  int64_t least = std::max<int64_t>(1, ENOUGH / std::max<int64_t>(work, 1));
  int64_t pieces = count <= least ? std::min<int64_t>(count, 1)
                                  : std::min((count + least - 1) / least,
                                             EACH * int64_t(torch::stable::get_num_threads()));
  shared(pieces, [&](Next& next) {
    for (int64_t i; next(i);) body(count * i / pieces, count * (i + 1) / pieces);
  });
}

// Runs body(row, at) for every whole vector of every row, body(row, at, count) for the rest.
template <class Body>
inline void each(int64_t rows, int64_t width, const Body& body) {
  parallel(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      int64_t at = 0;
      for (; at + WIDTH <= width; at += WIDTH) body(row, at);
      if (at < width) body(row, at, width - at);
    }
  });
}

// A tensor's values once more, by our own threads: torch's would look for work beside them for a while.
inline Tensor copied(const Tensor& x) {
  return with_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> from(x);
    Tensor y = made_like(x);
    parallel(from.count, from.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        std::copy_n(from[row], from.width, data<T>(y) + row * from.width);
    });
    return y;
  });
}

// Whether somebody prefers a provider (see `ingot.ops.op.prefer`); Python's memory. Until it is
// joined, Python is asked: another thread may call an op while this library is still being loaded.
inline const int UNKNOWN = 1;
inline const int* preferring = &UNKNOWN;

template <size_t N>
struct Name {
  char text[N];
  constexpr Name(const char (&name)[N]) { std::copy_n(name, N, text); }
};

template <class T>
T taken(StableIValue* stack, size_t at) {
  return torch::stable::detail::to<T>(stack[at]);
}

template <class R>
struct Result {
  static R from(StableIValue* stack) { return taken<R>(stack, 0); }
};
template <class... R>
struct Result<std::tuple<R...>> {
  static std::tuple<R...> from(StableIValue* stack) {
    return [&]<size_t... At>(std::index_sequence<At...>) {
      return std::tuple<R...>(taken<R>(stack, At)...);
    }(std::index_sequence_for<R...>());
  }
};

template <auto kernel, Name name>
struct Route;
template <class R, class... Args, R (*kernel)(Args...), Name name>
struct Route<kernel, name> {
  static R call(Args... args) {
    if (*preferring == 0) {
      try {
        return kernel(args...);
      } catch (const Elsewhere&) {
      }
    }
    StableIValue stack[] = {torch::stable::detail::from(std::remove_cvref_t<Args>(args))...};
    need(!torch_call_dispatcher(name.text, "", stack, TORCH_ABI_VERSION), "refused by Python too");
    return Result<R>::from(stack);
  }
};

}  // namespace ingot

// Each library can make a pool of threads; all are given the one of the first.
extern "C" __attribute__((visibility("default"))) void* ingot_pool() { return new ingot::Pool; }
extern "C" __attribute__((visibility("default"))) void ingot_join(const int* flag, void* pool) {
  ingot::preferring = flag;
  ingot::pool = static_cast<ingot::Pool*>(pool);
}

#define OP(name)                                                                            \
  STABLE_TORCH_LIBRARY_IMPL(ingot_cpu, CPU, m) { m.impl(#name, TORCH_BOX(&ingot::kernels::name)); } \
  STABLE_TORCH_LIBRARY_IMPL(ingot, CPU, m) {                                                \
    m.impl(#name, TORCH_BOX((&ingot::Route<&ingot::kernels::name, "ingot_python::" #name>::call)));  \
  }

// A gradient, name_backward(needs, grads, arguments...): as ingot_cpu::name_backward alone, which the
// `cpu` provider calls. It returns the gradients that are needed, in the order of the arguments.
#define BACKWARD(name)                                              \
  STABLE_TORCH_LIBRARY_IMPL(ingot_cpu, CPU, m) {                    \
    m.impl(#name "_backward", TORCH_BOX(&ingot::kernels::name##_backward)); \
  }
