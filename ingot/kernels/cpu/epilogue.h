// The epilogue of a linear layer, applied to rows of the GEMM's float32 accumulators, which are in
// L1. It is data: each step is one function for all layers and weight formats, and a layer without
// a step skips it.
#pragma once

#include "lora.h"

namespace ingot::kernels {

// Values of ingot.ops.epilogue.ActivationFn.
enum class ActivationFn : int64_t { IDENTITY, GELU, GELU_TANH, SILU, RELU };

inline ActivationFn checked_activation(int64_t activation) {
  check(activation >= 0 && activation <= int64_t(ActivationFn::RELU),
        "activation must be an ActivationFn");
  return ActivationFn(activation);
}

// ---- Steps on a row of accumulators, in place.

template <class Function>
inline void map_row(float* values, int64_t count, const Function& function) {
  for_each_vector(count, [&](int64_t at, auto... tail) {
    store(values + at, function(load(values + at, tail...)), tail...);
  });
}

inline void apply_activation(ActivationFn activation, float* values, int64_t count) {
  switch (activation) {
    case ActivationFn::IDENTITY: return;
    case ActivationFn::GELU: return map_row(values, count, [](Floats v) { return gelu(v); });
    case ActivationFn::GELU_TANH:
      return map_row(values, count, [](Floats v) { return gelu_tanh(v); });
    case ActivationFn::SILU: return map_row(values, count, [](Floats v) { return silu(v); });
    case ActivationFn::RELU: return map_row(values, count, [](Floats v) { return relu(v); });
  }
}

// The derivative of the activation at `values`, which it replaces.
inline void apply_activation_grad(ActivationFn activation, float* values, int64_t count) {
  switch (activation) {
    case ActivationFn::IDENTITY: return std::fill_n(values, count, 1.0f), void();
    case ActivationFn::GELU: return map_row(values, count, [](Floats v) { return gelu_grad(v); });
    case ActivationFn::GELU_TANH:
      return map_row(values, count, [](Floats v) { return gelu_tanh_grad(v); });
    case ActivationFn::SILU: return map_row(values, count, [](Floats v) { return silu_grad(v); });
    case ActivationFn::RELU: return map_row(values, count, [](Floats v) { return relu_grad(v); });
  }
}

template <class T>
inline void add_row(float* to, const T* from, int64_t count) {
  for_each_vector(count, [&](int64_t at, auto... tail) {
    store(to + at, load(to + at, tail...) + load(from + at, tail...), tail...);
  });
}
template <class T>
inline void multiply_row(float* to, const T* by, int64_t count) {
  for_each_vector(count, [&](int64_t at, auto... tail) {
    store(to + at, load(to + at, tail...) * load(by + at, tail...), tail...);
  });
}
template <class T>
inline void store_row(T* to, const float* from, int64_t count) {
  for_each_vector(count, [&](int64_t at, auto... tail) {
    store(to + at, load(from + at, tail...), tail...);
  });
}

// ---- The whole epilogue.

inline void check_output_like(const Tensor& residual, const Tensor& x, int64_t out_features) {
  constexpr const char* MESSAGE = "residual (or gradient) must have the shape of the output";
  check_same_dtype(residual, x);
  check(residual.dim() == x.dim(), MESSAGE);
  for (int64_t d = 0; d + 1 < x.dim(); d++) check(residual.size(d) == x.size(d), MESSAGE);
  check(residual.size(x.dim() - 1) == out_features, MESSAGE);
}

// The LoRA term of each weight, if the call has adapters.
template <class T>
using LoraTerms = std::array<std::optional<LoraTerm<T>>, 2>;

// The LoRA arguments of a call with the B of each weight.
template <size_t NUM_WEIGHTS>
struct LoraArgs {
  const std::optional<Tensor>& h;
  std::array<const std::optional<Tensor>*, NUM_WEIGHTS> b;
  const std::optional<Tensor>& index;

  template <class T>
  LoraTerms<T> terms(const Tensor& x, int64_t out_features) const {
    LoraTerms<T> result;
    for (size_t p = 0; p < NUM_WEIGHTS; p++) {
      check(h.has_value() == b[p]->has_value() && (h || !index),
            "lora_h and lora_b must be given together");
      if (h) result[p].emplace(*h, **b[p], index, x, out_features, NUM_WEIGHTS, p);
    }
    return result;
  }
};

// residual + activation(acc + LoRA term + bias); with two weights, gate and up,
// activation(gate + LoRA term) * (up + LoRA term).
template <class T>
struct LinearEpilogue {
  T* out;
  int64_t width;
  ActivationFn activation;
  bool gated = false;  // two weights
  LoraTerms<T> lora = {};
  std::optional<Vector<T>> bias = {};
  std::optional<Rows<T>> residual = {};
  float* float32_out = nullptr;  // takes the result instead of `out`

  [[gnu::noinline]] void operator()(const OutputBlock& block) const {
    int64_t column = block.columns.begin, count = block.columns.count;
    for (size_t p = 0; p < lora.size(); p++)
      if (lora[p]) lora[p]->add_to(block, p);
    for (int64_t r = 0; r < block.rows; r++) {
      int64_t row = block.row + r;
      float* acc = block.acc_row(0, r);
      if (bias) add_row(acc, bias->first + column, count);
      apply_activation(activation, acc, count);
      if (gated) multiply_row(acc, block.acc_row(1, r), count);
      if (residual) add_row(acc, (*residual)[row] + column, count);
      if (float32_out) std::copy_n(acc, count, float32_out + row * width + column);
      else store_row(out + row * width + column, acc, count);
    }
  }
};

}  // namespace ingot::kernels
