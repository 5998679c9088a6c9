// Elementwise activations, plain and gated.
#include "tensor.h"

namespace ingot::kernels {

template <class Function>
Tensor unary(const Tensor& x, Function function) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> from(x);
    Tensor y = allocate_like(x);
    Rows<T> to(y);
    parallel_for_each_vector(from.count, from.width, [&](int64_t row, int64_t at, auto... tail) {
      store(to[row] + at, function(load(from[row] + at, tail...)), tail...);
    });
    return y;
  });
}

template <class Function>
Tensor gated(const Tensor& gate, const Tensor& up, Function function) {
  return dispatch_dtype(gate, [&](auto tag) {
    using T = decltype(tag);
    check_same_dtype(up, gate);
    check(same_sizes(gate, up), "gate and up must have the same shape");
    Rows<T> g(gate), u(up);
    Tensor y = allocate_like(gate);
    Rows<T> to(y);
    parallel_for_each_vector(g.count, g.width, [&](int64_t row, int64_t at, auto... tail) {
      Floats a = load(g[row] + at, tail...), b = load(u[row] + at, tail...);
      store(to[row] + at, function(a) * b, tail...);
    });
    return y;
  });
}

Tensor gelu(const Tensor& x) { return unary(x, [](Floats v) { return ingot::gelu(v); }); }
Tensor gelu_tanh(const Tensor& x) { return unary(x, [](Floats v) { return ingot::gelu_tanh(v); }); }
Tensor silu(const Tensor& x) { return unary(x, [](Floats v) { return ingot::silu(v); }); }
Tensor relu_squared(const Tensor& x) {
  return unary(x, [](Floats v) { return relu(v) * relu(v); });
}
Tensor swiglu(const Tensor& gate, const Tensor& up) {
  return gated(gate, up, [](Floats v) { return ingot::silu(v); });
}
Tensor geglu(const Tensor& gate, const Tensor& up) {
  return gated(gate, up, [](Floats v) { return ingot::gelu(v); });
}
Tensor geglu_tanh(const Tensor& gate, const Tensor& up) {
  return gated(gate, up, [](Floats v) { return ingot::gelu_tanh(v); });
}

}  // namespace ingot::kernels

REGISTER_OP(gelu)
REGISTER_OP(gelu_tanh)
REGISTER_OP(silu)
REGISTER_OP(relu_squared)
REGISTER_OP(swiglu)
REGISTER_OP(geglu)
REGISTER_OP(geglu_tanh)
