// Registration of kernels with torch's dispatcher. REGISTER_OP(name) registers a kernel twice:
//
//   ingot_cpu::name   the kernel itself, called by the `cpu` provider
//   ingot::name       the op at the CPU dispatch key: the dispatcher calls the kernel without
//                     Python. Unsupported calls and calls inside `ops.prefer` go through Python
//
// torch's TORCH_BOX instantiates a boxing function per kernel. Here there is one per signature,
// which both registrations of all ops with that signature share: it was a fifth of the code to
// compile.
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
  static void box(StableIValue* stack, R&& value) {
    stack[0] = torch::stable::detail::from<R>(value);
  }
};
template <class... R>
struct Outputs<std::tuple<R...>> {
  static constexpr uint64_t COUNT = sizeof...(R);
  static void box(StableIValue* stack, std::tuple<R...>&& values) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      ((stack[I] = torch::stable::detail::from<R>(std::get<I>(values))), ...);
    }(std::index_sequence_for<R...>());
  }
};
template <>
struct Outputs<void> {
  static constexpr uint64_t COUNT = 0;
};

// Call a kernel with the arguments on the stack. With a `fallback`, the name of an op, that op is
// called instead inside `ops.prefer` and if the kernel throws Unsupported.
template <class R, class... Args>
[[gnu::noinline]] void call_boxed(R (*kernel)(Args...), StableIValue* stack, uint64_t num_args,
                                  uint64_t num_outputs, const char* fallback) {
  // torch cannot box a vector<bool>; gradients have no fallback.
  constexpr bool HAS_FALLBACK = !(std::is_same_v<std::remove_cvref_t<Args>, NeedsGrad> || ...);
  check_arity(num_args, sizeof...(Args));
  check_arity(num_outputs, Outputs<R>::COUNT);
  [&]<size_t... I>(std::index_sequence<I...>) {
    std::tuple<std::remove_cvref_t<Args>...> args{
        torch::stable::detail::to<std::remove_cvref_t<Args>>(stack[I])...};
    if (!fallback || *prefer_depth == 0) {
      try {
        if constexpr (std::is_void_v<R>) kernel(std::get<I>(args)...);
        else Outputs<R>::box(stack, kernel(std::get<I>(args)...));
        return;
      } catch (const Unsupported&) {
        if (!fallback) throw;
      }
    }
    if constexpr (HAS_FALLBACK) {
      StableIValue call[std::max<size_t>(sizeof...(Args), Outputs<R>::COUNT)] = {
          torch::stable::detail::from<std::remove_cvref_t<Args>>(std::get<I>(args))...};
      check(!torch_call_dispatcher(fallback, "", call, TORCH_ABI_VERSION),
            "the call through Python failed");
      std::copy_n(call, Outputs<R>::COUNT, stack);
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
INGOT_EXPORT void ingot_connect(const int* prefer_depth, void* thread_pool) {
  ingot::prefer_depth = prefer_depth;
  ingot::thread_pool = static_cast<ingot::ThreadPool*>(thread_pool);
}

#define REGISTER_OP(name)                                                        \
  STABLE_TORCH_LIBRARY_IMPL(ingot_cpu, CPU, m) {                                 \
    m.impl(#name, &ingot::boxed_kernel<&ingot::kernels::name>);                  \
  }                                                                              \
  STABLE_TORCH_LIBRARY_IMPL(ingot, CPU, m) {                                     \
    m.impl(#name, &ingot::boxed_op<&ingot::kernels::name, "ingot_python::" #name>); \
  }

// Register name_backward(needs_grad, grads, arguments...) as ingot_cpu::name_backward, called by
// the `cpu` provider. It returns the needed gradients in the order of the arguments.
#define REGISTER_BACKWARD(name)                                                  \
  STABLE_TORCH_LIBRARY_IMPL(ingot_cpu, CPU, m) {                                 \
    m.impl(#name "_backward", &ingot::boxed_kernel<&ingot::kernels::name##_backward>); \
  }
