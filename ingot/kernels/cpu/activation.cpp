// Activations, alone and gated: one pass, every element on its own.
#include "tensor.h"

namespace ingot::kernels {

template <class Function>
Tensor unary(const Tensor& x, Function function) {
  return with_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> from(x);
    Tensor y = made_like(x);
    Rows<T> to(y);
    each(from.count, from.width, [&](int64_t row, int64_t at, auto... part) {
      store(to[row] + at, function(load(from[row] + at, part...)), part...);
    });
    return y;
  });
}

template <class Function>
Tensor gated(const Tensor& gate, const Tensor& up, Function function) {
  return with_dtype(gate, [&](auto tag) {
    using T = decltype(tag);
    need_like(up, gate);
    need(std::ranges::equal(gate.sizes(), up.sizes()), "one shape");
    Rows<T> g(gate), u(up);
    Tensor y = made_like(gate);
    Rows<T> to(y);
    each(g.count, g.width, [&](int64_t row, int64_t at, auto... part) {
      Floats a = load(g[row] + at, part...), b = load(u[row] + at, part...);
      store(to[row] + at, function(a) * b, part...);
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

OP(gelu)
OP(gelu_tanh)
OP(silu)
OP(relu_squared)
OP(swiglu)
OP(geglu)
OP(geglu_tanh)
