// Registration of kernels with torch's dispatcher. REGISTER_OP(name) registers a kernel twice:
//
//   ingot_cpu::name   the kernel itself, called by the `cpu` provider
//   ingot::name       the op at the CPU dispatch key: the dispatcher calls the kernel without
//                     Python. Unsupported calls and calls inside `ops.prefer` go through Python
//
// There is one boxing function per signature, which both registrations of all ops with that
// signature share.
#pragma once

#include "tensor.h"

namespace ingot {

// Number of active `ops.prefer` contexts, in memory owned by Python. Until ingot_connect() is
// called, calls go through Python: another thread may call an op while this library is still being
// loaded.
inline const int NOT_CONNECTED = 1;
inline const int* prefer_depth = &NOT_CONNECTED;

inline void check_arity(uint64_t actual, uint64_t expected) {
  if (actual != expected) throw std::runtime_error("the schema does not match the kernel");
}

// Outputs of a kernel, boxed onto the stack.
template <class R>
struct Outputs {
  static constexpr uint64_t COUNT = 1;
  static void box(StableIValue* stack, const R& value) { stack[0] = ingot::box(value); }
};
template <class... R>
struct Outputs<std::tuple<R...>> {
  static constexpr uint64_t COUNT = sizeof...(R);
  static void box(StableIValue* stack, const std::tuple<R...>& values) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      ((stack[I] = ingot::box(std::get<I>(values))), ...);
    }(std::index_sequence_for<R...>());
  }
};
template <>
struct Outputs<void> {
  static constexpr uint64_t COUNT = 0;
};

// Call an op in Python with the arguments on the stack.
INGOT_NOINLINE void call_fallback(const char* name, StableIValue* stack) {
  check(!torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION),
        "the call through Python failed");
}

// Call a kernel with the arguments on the stack. With a `fallback`, the name of an op, that op is
// called instead inside `ops.prefer` and if the kernel throws Unsupported.
template <class R, class... Args>
[[gnu::noinline]] void call_boxed(R (*kernel)(Args...), StableIValue* stack, uint64_t num_args,
                                  uint64_t num_outputs, const char* fallback) {
  // Gradients have no fallback, and box() does not know their flags.
  constexpr bool HAS_FALLBACK = requires(const std::remove_cvref_t<Args>&... args) {
    (box(args), ...);
  };
  check_arity(num_args, sizeof...(Args));
  check_arity(num_outputs, Outputs<R>::COUNT);
  if (fallback && *prefer_depth) return call_fallback(fallback, stack);
  [&]<size_t... I>(std::index_sequence<I...>) {
    std::tuple<std::remove_cvref_t<Args>...> args{unbox<std::remove_cvref_t<Args>>(stack[I])...};
    try {
      if constexpr (std::is_void_v<R>) kernel(static_cast<Args&&>(std::get<I>(args))...);
      else Outputs<R>::box(stack, kernel(static_cast<Args&&>(std::get<I>(args))...));
    } catch (const Unsupported&) {
      if (!fallback) throw;
      if constexpr (HAS_FALLBACK) {
        ((stack[I] = box(std::get<I>(args))), ...);
        call_fallback(fallback, stack);
      }
    }
  }(std::index_sequence_for<Args...>());
}

template <size_t N>
struct FixedString {
  char text[N];
  constexpr FixedString(const char (&name)[N]) { std::copy_n(name, N, text); }
};

template <auto kernel>
void boxed_kernel(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  call_boxed(kernel, stack, num_args, num_outputs, nullptr);
}
template <auto kernel, FixedString name>
void boxed_op(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  call_boxed(kernel, stack, num_args, num_outputs, name.text);
}

}  // namespace ingot

// Every library can create a thread pool; all are connected to the pool of the first one loaded.
#define INGOT_EXPORT extern "C" __attribute__((visibility("default")))
INGOT_EXPORT void* ingot_create_thread_pool() { return new ingot::ThreadPool; }
INGOT_EXPORT void ingot_connect(const int* prefer_depth, void* thread_pool,
                                const int64_t* tunables) {
  ingot::thread_pool = static_cast<ingot::ThreadPool*>(thread_pool);
  ingot::tunables = tunables;
  ingot::prefer_depth = prefer_depth;
}

#define REGISTER_OP(name)                                                              \
  static const ingot::Registration register_##name("ingot_cpu", "CPU", {                 \
      {#name, ingot::boxed_kernel<&ingot::kernels::name>}});                             \
  static const ingot::Registration register_##name##_op("ingot", "CPU", {                \
      {#name, ingot::boxed_op<&ingot::kernels::name, "ingot_python::" #name>}});

// Register name_backward(needs_grad, grads, arguments...) as ingot_cpu::name_backward, called by
// the `cpu` provider. It returns the needed gradients in the order of the arguments.
#define REGISTER_BACKWARD(name)                                                          \
  static const ingot::Registration register_##name##_backward("ingot_cpu", "CPU", {      \
      {#name "_backward", ingot::boxed_kernel<&ingot::kernels::name##_backward>}});
