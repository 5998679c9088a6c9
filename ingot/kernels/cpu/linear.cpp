// Linear layers. LoRA adapters, bias, activation and residual are fused into the GEMM's epilogue, in
// float32: see epilogue.h.
#include "epilogue.h"
#include "gradient.h"

namespace ingot::kernels {

// The rows of a weight that matches x's channels.
template <class T>
[[gnu::noinline]] Rows<T> weight_rows(const Tensor& weight, const Tensor& x) {
  check_same_dtype(weight, x);
  check(x.dim() >= 1 && weight.dim() == 2 && weight.size(1) == x.size(x.dim() - 1),
        "weight must be (out_features, in_features)");
  return Rows<T>(weight);
}

inline Tensor allocate_output(const Tensor& x, const Tensor& weight) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = weight.size(0);
  return allocate(sizes, x.scalar_type());
}

template <class T, size_t NUM_WEIGHTS>
void run_linear(const Matrix<T>& x, const std::array<Matrix<T>, NUM_WEIGHTS>& weights,
                const LinearEpilogue<T>& epilogue) {
  gemm(x, weights, balanced_columns(epilogue.width), epilogue);
}

struct LinearArgs {
  const Tensor &x, &weight;
  const std::optional<Tensor>&bias, &residual;
  LoraArgs<1> lora;
};

template <class T>
std::optional<Vector<T>> bias_of(const LinearArgs& args) {
  std::optional<Vector<T>> bias;
  if (args.bias) check_same_dtype(*args.bias, args.x), bias.emplace(*args.bias, args.weight.size(0));
  return bias;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              int64_t activation, const std::optional<Tensor>& residual,
              const std::optional<Tensor>& lora_h, const std::optional<Tensor>& lora_b,
              const std::optional<Tensor>& lora_index) {
  LinearArgs args{x, weight, bias, residual, {lora_h, {&lora_b}, lora_index}};
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> w = weight_rows<T>(weight, x);
    std::optional<Rows<T>> r;
    if (residual) check_output_like(*residual, x, w.count), r.emplace(*residual);
    Tensor y = allocate_output(x, weight);
    run_linear<T, 1>(Rows<T>(x), {w},
                     {data<T>(y), w.count, checked_activation(activation), false,
                      args.lora.terms<T>(x, w.count), bias_of<T>(args), r});
    return y;
  });
}

Tensor gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                    int64_t activation, const std::optional<Tensor>& lora_h,
                    const std::optional<Tensor>& gate_lora_b,
                    const std::optional<Tensor>& up_lora_b,
                    const std::optional<Tensor>& lora_index) {
  LoraArgs<2> lora{lora_h, {&gate_lora_b, &up_lora_b}, lora_index};
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> gate = weight_rows<T>(gate_weight, x), up = weight_rows<T>(up_weight, x);
    check(gate.count == up.count, "gate_weight and up_weight must have the same shape");
    Tensor y = allocate_output(x, gate_weight);
    run_linear<T, 2>(Rows<T>(x), {gate, up},
                     {data<T>(y), gate.count, checked_activation(activation), true,
                      lora.terms<T>(x, gate.count)});
    return y;
  });
}

// One GEMM per group, one after the other, so that each row has the same bits as from `linear`.
template <size_t NUM_WEIGHTS>
Tensor grouped_linear_impl(const Tensor& x, const std::array<Tensor, NUM_WEIGHTS>& weights,
                           const Tensor& offsets, ActivationFn activation) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    const Tensor& first = weights[0];
    check(x.dim() == 2 && first.dim() == 3 && first.size(2) == x.size(1),
          "weight must be (groups, out_features, in_features)");
    int64_t groups = first.size(0), width = first.size(1), depth = first.size(2);
    check(offsets.dim() == 1 && offsets.size(0) == groups + 1,
          "offsets must have one entry more than there are groups");
    Integers starts(offsets);
    check(starts[0] == 0 && starts[groups] == x.size(0),
          "offsets must run from 0 to the number of rows");
    for (int64_t g = 0; g < groups; g++)
      check(starts[g] <= starts[g + 1], "offsets must be non-decreasing");
    std::vector<Rows<T>> stacked;
    for (const Tensor& weight : weights) {
      check_same_dtype(weight, x);
      check(same_sizes(weight, first), "weights must have the same shape");
      stacked.emplace_back(weight);
    }
    Rows<T> rows(x);
    Tensor y = allocate(std::array{x.size(0), width}, x.scalar_type());
    for (int64_t g = 0; g < groups; g++) {
      int64_t begin = starts[g], count = starts[g + 1] - begin;
      if (!count || !width) continue;
      auto group_weights = [&]<size_t... P>(std::index_sequence<P...>) {
        return std::array{Matrix<T>(stacked[P][g * width], width, depth, stacked[P].stride)...};
      }(std::make_index_sequence<NUM_WEIGHTS>());
      Matrix<T> group_rows(rows[begin], count, depth, rows.stride);
      run_linear<T, NUM_WEIGHTS>(group_rows, group_weights,
                                 {data<T>(y) + begin * width, width, activation, NUM_WEIGHTS == 2});
    }
    return y;
  });
}

Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                      int64_t activation) {
  return grouped_linear_impl<1>(x, {weight}, offsets, checked_activation(activation));
}
Tensor grouped_gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                            const Tensor& offsets, int64_t activation) {
  return grouped_linear_impl<2>(x, {gate_weight, up_weight}, offsets,
                                checked_activation(activation));
}

// ---- Gradients of y = act(z), z = x W^T + bias, with dZ the gradient of z:
//
//   dX = dZ W    dW = dZ^T X    dbias = sum of the rows of dZ    dH = dZ B^T    dB = H^T dZ
//
// Accumulated in float32 and rounded when stored, as dZ is; dH is float32. The last two are those
// of a single LoRA adapter; h is rounded for the product.

template <class T>
[[gnu::noinline]] Tensor grad_input(const Tensor& x, const std::vector<GemmOperands<T>>& operands) {
  return gemm_tensor<T>({x.sizes().data(), size_t(x.dim())}, x, operands);
}

// dZ: grad times the derivative of the activation at z, which is recomputed.
template <class T>
Tensor act_backward(const Rows<T>& grad, const Rows<T>& x, const Rows<T>& w,
                    const std::optional<Vector<T>>& bias, const LoraTerms<T>& lora,
                    ActivationFn activation) {
  Tensor grad_z = allocate_like(grad.owner);
  std::array<Matrix<T>, 1> weights{Matrix<T>(w)};
  gemm(Matrix<T>(x), weights, balanced_columns(w.count), [&](const OutputBlock& block) {
    int64_t column = block.columns.begin, count = block.columns.count;
    if (lora[0]) lora[0]->add_to(block, 0);
    for (int64_t r = 0; r < block.rows; r++) {
      int64_t row = block.row + r;
      float* z = block.acc_row(0, r);
      if (bias) add_row(z, bias->first + column, count);
      apply_activation_grad(activation, z, count);
      multiply_row(z, grad[row] + column, count);
      store_row(data<T>(grad_z) + row * w.count + column, z, count);
    }
  });
  return grad_z;
}

// The same of act(gate) * up: gradients of gate and of up.
template <class T>
std::tuple<Tensor, Tensor> gated_act_backward(const Rows<T>& grad, const Rows<T>& x,
                                              const Rows<T>& gate, const Rows<T>& up,
                                              const LoraTerms<T>& lora, ActivationFn activation) {
  int64_t width = gate.count;
  Tensor grad_gate = allocate_like(grad.owner), grad_up = allocate_like(grad.owner);
  std::array<Matrix<T>, 2> weights{Matrix<T>(gate), Matrix<T>(up)};
  gemm(Matrix<T>(x), weights, balanced_columns(width), [&](const OutputBlock& block) {
    int64_t column = block.columns.begin, count = block.columns.count;
    alignas(64) float z[BLOCK_N];
    for (size_t p = 0; p < 2; p++)
      if (lora[p]) lora[p]->add_to(block, p);
    for (int64_t r = 0; r < block.rows; r++) {
      const T* grad_row = grad[block.row + r] + column;
      int64_t to = (block.row + r) * width + column;
      float *gate_acc = block.acc_row(0, r), *up_acc = block.acc_row(1, r);
      std::copy_n(gate_acc, count, z);
      multiply_row(up_acc, grad_row, count);
      apply_activation_grad(activation, z, count);
      multiply_row(up_acc, z, count);
      store_row(data<T>(grad_gate) + to, up_acc, count);
      apply_activation(activation, gate_acc, count);
      multiply_row(gate_acc, grad_row, count);
      store_row(data<T>(grad_up) + to, gate_acc, count);
    }
  });
  return {grad_gate, grad_up};
}

// The part of dH that belongs to a LoRA term.
template <class T>
[[gnu::noinline]] void store_grad_h(const LoraTerm<T>& lora, const Matrix<T>& grad,
                                    const Tensor& grad_h) {
  Rows<float> to(grad_h);
  auto weight_of = [&](int64_t) { return lora.b(); };
  gemm_by_rows<T>(grad, split_rows(grad.rows), weight_of, [&](const OutputBlock& block) {
    for (int64_t r = 0; r < block.rows; r++)
      std::copy_n(block.acc_row(0, r), block.columns.count,
                  to[block.row + r] + lora.first() + block.columns.begin);
  });
}

template <class T>
[[gnu::noinline]] Tensor grad_lora_b(const LoraTerm<T>& lora, const Tensor& b,
                                     const Matrix<T>& grad) {
  Tensor h = round_columns<T>(lora.h(), lora.first(), lora.rank(), 1.0f, b.scalar_type());
  return grad_weight<T>(b, Rows<T>(h), grad);
}

inline const Tensor& single_grad(const Tensors& grads) {
  check(grads.size() == 1, "expected one gradient");
  return grads[0];
}

inline void check_single_adapter(const std::optional<Tensor>& b,
                                 const std::optional<Tensor>& index) {
  check(!index && (!b || b->size(0) == 1), "expected the gradient of one adapter");
}

// The needed gradients in the order of the arguments; `grad` is dZ, `output_grad` that of y.
template <class T>
Tensors linear_grads(const NeedsGrad& needs_grad, const Matrix<T>& grad, const Tensor& output_grad,
                     const LinearArgs& args, const LoraTerms<T>& lora) {
  Rows<T> x(args.x), w(args.weight);
  Tensors result;
  if (needs_grad[0]) result.push_back(grad_input<T>(args.x, {{grad, Transposed<T>(w)}}));
  if (needs_grad[1]) result.push_back(grad_weight<T>(args.weight, grad, x));
  if (needs_grad[2]) result.push_back(grad_bias<T>(args.bias.value(), grad));
  // The gradient of the residual is that of the output; autograd needs a copy.
  if (needs_grad[4]) result.push_back(clone_tensor(output_grad));
  if (needs_grad[5]) {
    result.push_back(allocate_like(args.lora.h.value()));
    store_grad_h<T>(*lora[0], grad, result.back());
  }
  if (needs_grad[6]) result.push_back(grad_lora_b<T>(*lora[0], args.lora.b[0]->value(), grad));
  return result;
}

Tensors linear_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias, int64_t activation,
                        const std::optional<Tensor>& residual, const std::optional<Tensor>& lora_h,
                        const std::optional<Tensor>& lora_b,
                        const std::optional<Tensor>& lora_index) {
  check(needs_grad.size() == 8 && (bias || !needs_grad[2]) && (residual || !needs_grad[4]) &&
            (lora_h || !(needs_grad[5] || needs_grad[6])),
        "expected one flag per argument");
  check_single_adapter(lora_b, lora_index);
  LinearArgs args{x, weight, bias, residual, {lora_h, {&lora_b}, lora_index}};
  ActivationFn act = checked_activation(activation);
  const Tensor& grad = single_grad(grads);
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> w = weight_rows<T>(weight, x), rows(x);
    if (residual) check_output_like(*residual, x, w.count);
    check_output_like(grad, x, w.count);
    LoraTerms<T> lora = args.lora.terms<T>(x, w.count);
    Rows<T> g(grad);
    std::optional<Vector<T>> b = bias_of<T>(args);
    if (act == ActivationFn::IDENTITY) return linear_grads<T>(needs_grad, g, grad, args, lora);
    Tensor grad_z = act_backward<T>(g, rows, w, b, lora, act);
    return linear_grads<T>(needs_grad, Rows<T>(grad_z), grad, args, lora);
  });
}

Tensors gated_linear_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& x,
                              const Tensor& gate_weight, const Tensor& up_weight,
                              int64_t activation, const std::optional<Tensor>& lora_h,
                              const std::optional<Tensor>& gate_lora_b,
                              const std::optional<Tensor>& up_lora_b,
                              const std::optional<Tensor>& lora_index) {
  check(needs_grad.size() == 8 &&
            (lora_h || !(needs_grad[4] || needs_grad[5] || needs_grad[6])),
        "expected one flag per argument");
  check_single_adapter(gate_lora_b, lora_index), check_single_adapter(up_lora_b, lora_index);
  LoraArgs<2> lora_args{lora_h, {&gate_lora_b, &up_lora_b}, lora_index};
  ActivationFn act = checked_activation(activation);
  const Tensor& grad = single_grad(grads);
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> gate = weight_rows<T>(gate_weight, x), up = weight_rows<T>(up_weight, x), rows(x);
    check(gate.count == up.count, "gate_weight and up_weight must have the same shape");
    check_output_like(grad, x, gate.count);
    LoraTerms<T> lora = lora_args.terms<T>(x, gate.count);
    auto [grad_gate, grad_up] =
        gated_act_backward<T>(Rows<T>(grad), rows, gate, up, lora, act);
    Rows<T> dg(grad_gate), du(grad_up);
    Tensors result;
    if (needs_grad[0])
      result.push_back(grad_input<T>(x, {{dg, Transposed<T>(gate)}, {du, Transposed<T>(up)}}));
    if (needs_grad[1]) result.push_back(grad_weight<T>(gate_weight, dg, rows));
    if (needs_grad[2]) result.push_back(grad_weight<T>(up_weight, du, rows));
    if (needs_grad[4]) {
      result.push_back(allocate_like(lora_args.h.value()));
      store_grad_h<T>(*lora[0], dg, result.back());
      store_grad_h<T>(*lora[1], du, result.back());
    }
    if (needs_grad[5]) result.push_back(grad_lora_b<T>(*lora[0], lora_args.b[0]->value(), dg));
    if (needs_grad[6]) result.push_back(grad_lora_b<T>(*lora[1], lora_args.b[1]->value(), du));
    return result;
  });
}

// ---- Parts of the gradients, for ranks that compute some rows or columns of each.

Tensor linear_preact_grad(const Tensor& grad, const Tensor& x, const Tensor& weight,
                          const std::optional<Tensor>& bias, int64_t activation) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> w = weight_rows<T>(weight, x);
    check_output_like(grad, x, w.count);
    std::optional<Tensor> none;
    return act_backward<T>(Rows<T>(grad), Rows<T>(x), w,
                           bias_of<T>({x, weight, bias, none, {none, {&none}, none}}), {},
                           checked_activation(activation));
  });
}

std::tuple<Tensor, Tensor> gated_linear_preact_grad(const Tensor& grad, const Tensor& x,
                                                    const Tensor& gate_weight,
                                                    const Tensor& up_weight, int64_t activation) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> gate = weight_rows<T>(gate_weight, x), up = weight_rows<T>(up_weight, x);
    check(gate.count == up.count, "gate_weight and up_weight must have the same shape");
    check_output_like(grad, x, gate.count);
    return gated_act_backward<T>(Rows<T>(grad), Rows<T>(x), gate, up, {},
                                 checked_activation(activation));
  });
}

Tensor gated_linear_input_grad(const Tensor& gate_grad, const Tensor& up_grad,
                               const Tensor& gate_weight, const Tensor& up_weight) {
  return dispatch_dtype(gate_grad, [&](auto tag) {
    using T = decltype(tag);
    check_same_dtype(gate_weight, gate_grad), check_same_dtype(up_weight, gate_grad);
    check(gate_grad.dim() >= 1 && gate_weight.dim() == 2 && same_sizes(gate_weight, up_weight) &&
              gate_weight.size(0) == gate_grad.size(gate_grad.dim() - 1),
          "weights must be (out_features, in_features)");
    check_output_like(up_grad, gate_grad, gate_weight.size(0));
    Rows<T> dg(gate_grad), du(up_grad), gate(gate_weight), up(up_weight);
    std::vector<int64_t> sizes(gate_grad.sizes().begin(), gate_grad.sizes().end());
    sizes.back() = gate_weight.size(1);
    return gemm_tensor<T>({sizes.data(), sizes.size()}, gate_grad,
                          {{dg, Transposed<T>(gate)}, {du, Transposed<T>(up)}});
  });
}

}  // namespace ingot::kernels

REGISTER_OP(linear)
REGISTER_OP(gated_linear)
REGISTER_OP(linear_preact_grad)
REGISTER_OP(gated_linear_preact_grad)
REGISTER_OP(gated_linear_input_grad)
REGISTER_OP(grouped_linear)
REGISTER_OP(grouped_gated_linear)

REGISTER_BACKWARD(linear)
REGISTER_BACKWARD(gated_linear)
