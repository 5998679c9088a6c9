// Linear layers. LoRA adapters, bias, activation and residual are fused into the GEMM's epilogue, in
// float32. An epilogue is described by the arguments of the call. The GEMM has an instantiation for
// the common activation of an op and one for all others, which take a branch per vector: an
// instantiation takes 0.3 s to compile.
#include "gradient.h"
#include "lora.h"

namespace ingot::kernels {

// Values of ingot.ops.epilogue.ActivationFn.
enum class ActivationFn : int64_t { IDENTITY, GELU, GELU_TANH, SILU, RELU };

struct Identity {
  Floats operator()(Floats v) const { return v; }
  Floats grad(Floats) const { return broadcast(1.0f); }
};
struct Gelu {
  Floats operator()(Floats v) const { return gelu(v); }
  Floats grad(Floats v) const { return gelu_grad(v); }
};
struct GeluTanh {
  Floats operator()(Floats v) const { return gelu_tanh(v); }
  Floats grad(Floats v) const { return gelu_tanh_grad(v); }
};
struct Silu {
  Floats operator()(Floats v) const { return silu(v); }
  Floats grad(Floats v) const { return silu_grad(v); }
};
struct Relu {
  Floats operator()(Floats v) const { return relu(v); }
  Floats grad(Floats v) const { return relu_grad(v); }
};

// Call body with the activation as a type.
template <class Body>
auto dispatch_activation(int64_t activation, const Body& body) {
  switch (ActivationFn(activation)) {
    case ActivationFn::IDENTITY: return body(Identity());
    case ActivationFn::GELU: return body(Gelu());
    case ActivationFn::GELU_TANH: return body(GeluTanh());
    case ActivationFn::SILU: return body(Silu());
    case ActivationFn::RELU: return body(Relu());
  }
  throw InvalidArgument("activation must be an ActivationFn");
}

// An activation that is chosen for each vector at run time, by a well-predicted branch.
struct RuntimeActivation {
  int64_t activation;
  Floats operator()(Floats v) const {
    return dispatch_activation(activation, [&](auto act) { return act(v); });
  }
  Floats grad(Floats v) const {
    return dispatch_activation(activation, [&](auto act) { return act.grad(v); });
  }
};

inline RuntimeActivation runtime(int64_t activation) {
  check(activation >= 0 && activation <= int64_t(ActivationFn::RELU),
        "activation must be an ActivationFn");
  return {activation};
}

// Call body with the common activation as a type, or with any other one as a RuntimeActivation.
template <class Common, class Body>
auto dispatch_common(ActivationFn common, int64_t activation, const Body& body) {
  if (activation == int64_t(common)) return body(Common());
  return body(runtime(activation));
}

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

// The LoRA term of each weight, if the call has adapters.
template <class T, size_t NUM_WEIGHTS>
using LoraTerms = std::array<std::optional<LoraTerm<T>>, NUM_WEIGHTS>;

// Store value(row, column, accumulators, count...) for each output element.
template <class T, size_t NUM_WEIGHTS, class Value>
void gemm_store(const Matrix<T>& x, const std::array<Matrix<T>, NUM_WEIGHTS>& weights, T* out,
                const Value& value, const LoraTerms<T, NUM_WEIGHTS>& lora = {}) {
  int64_t width = weights[0].rows;
  gemm<T, Matrix<T>, NUM_WEIGHTS>(x, weights, balanced_columns(width),
                                  [&](const OutputBlock& block) {
    for (size_t p = 0; p < NUM_WEIGHTS; p++)
      if (lora[p]) lora[p]->add_to(block, p);
    for (int64_t r = 0; r < block.rows; r++)
      for_each_vector(block.columns.count, [&](int64_t at, auto... tail) {
        int64_t row = block.row + r, column = block.columns.begin + at;
        Floats acc[NUM_WEIGHTS];
        for (size_t p = 0; p < NUM_WEIGHTS; p++) acc[p] = load(block.acc_row(p, r) + at, tail...);
        store(out + row * width + column, value(row, column, acc, tail...), tail...);
      });
  });
}

template <class T, size_t NUM_WEIGHTS, class Value>
Tensor linear_epilogue(const Tensor& x, const Tensor& weight,
                       const std::array<Matrix<T>, NUM_WEIGHTS>& weights, const Value& value,
                       const LoraTerms<T, NUM_WEIGHTS>& lora) {
  Tensor y = allocate_output(x, weight);
  gemm_store<T, NUM_WEIGHTS>(Rows<T>(x), weights, data<T>(y), value, lora);
  return y;
}

inline void check_output_like(const Tensor& residual, const Tensor& x, const Tensor& weight) {
  check_same_dtype(residual, x);
  check(residual.dim() == x.dim(), "residual (or gradient) must have the shape of the output");
  for (int64_t d = 0; d + 1 < x.dim(); d++)
    check(residual.size(d) == x.size(d),
          "residual (or gradient) must have the shape of the output");
  check(residual.size(x.dim() - 1) == weight.size(0),
        "residual (or gradient) must have the shape of the output");
}

// The LoRA arguments of a call with the B of each weight.
template <size_t NUM_WEIGHTS>
struct LoraArgs {
  const std::optional<Tensor>& h;
  std::array<const std::optional<Tensor>*, NUM_WEIGHTS> b;
  const std::optional<Tensor>& index;

  template <class T>
  LoraTerms<T, NUM_WEIGHTS> terms(const Tensor& x, const Tensor& weight) const {
    LoraTerms<T, NUM_WEIGHTS> result;
    for (size_t p = 0; p < NUM_WEIGHTS; p++) {
      check(h.has_value() == b[p]->has_value() && (h || !index),
            "lora_h and lora_b must be given together");
      if (h) result[p].emplace(*h, **b[p], index, x, weight.size(0), NUM_WEIGHTS, p);
    }
    return result;
  }
};

struct LinearArgs {
  const Tensor &x, &weight;
  const std::optional<Tensor>&bias, &residual;
  LoraArgs<1> lora;
};

// residual + function(x W^T + h B + bias)
template <class Act>
Tensor linear_act(const LinearArgs& args, Act act) {
  const Tensor &x = args.x, &weight = args.weight;
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> w = weight_rows<T>(weight, x);
    std::optional<Vector<T>> b;
    std::optional<Rows<T>> r;
    if (args.bias) check_same_dtype(*args.bias, x), b.emplace(*args.bias, w.count);
    if (args.residual) check_output_like(*args.residual, x, weight), r.emplace(*args.residual);
    return linear_epilogue<T, 1>(
        x, weight, {w},
        [&](int64_t row, int64_t column, auto& acc, auto... tail) {
          Floats value = acc[0];
          if (b) value += load(b->first + column, tail...);
          value = act(value);
          if (r) value += load((*r)[row] + column, tail...);
          return value;
        },
        args.lora.terms<T>(x, weight));
  });
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              int64_t activation, const std::optional<Tensor>& residual,
              const std::optional<Tensor>& lora_h, const std::optional<Tensor>& lora_b,
              const std::optional<Tensor>& lora_index) {
  LinearArgs args{x, weight, bias, residual, {lora_h, {&lora_b}, lora_index}};
  return dispatch_common<Identity>(ActivationFn::IDENTITY, activation,
                                   [&](auto act) { return linear_act(args, act); });
}

template <class Act>
auto activated(Act act) {
  return [act](int64_t, int64_t, auto& acc, auto...) { return act(acc[0]); };
}
template <class Act>
auto gated(Act act) {
  return [act](int64_t, int64_t, auto& acc, auto...) { return act(acc[0]) * acc[1]; };
}

Tensor gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                    int64_t activation, const std::optional<Tensor>& lora_h,
                    const std::optional<Tensor>& gate_lora_b,
                    const std::optional<Tensor>& up_lora_b,
                    const std::optional<Tensor>& lora_index) {
  LoraArgs<2> lora{lora_h, {&gate_lora_b, &up_lora_b}, lora_index};
  return dispatch_common<Silu>(ActivationFn::SILU, activation, [&](auto act) {
    return dispatch_dtype(x, [&](auto tag) {
      using T = decltype(tag);
      Rows<T> gate = weight_rows<T>(gate_weight, x), up = weight_rows<T>(up_weight, x);
      check(gate.count == up.count, "gate_weight and up_weight must have the same shape");
      return linear_epilogue<T, 2>(x, gate_weight, {gate, up}, gated(act),
                                   lora.terms<T>(x, gate_weight));
    });
  });
}

// One GEMM per group, one after the other, so that each row has the same bits as from `linear`.
template <size_t NUM_WEIGHTS, class Value>
Tensor grouped_linear_impl(const Tensor& x, const std::array<Tensor, NUM_WEIGHTS>& weights,
                           const Tensor& offsets, const Value& value) {
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
      gemm_store<T, NUM_WEIGHTS>(group_rows, group_weights, data<T>(y) + begin * width, value);
    }
    return y;
  });
}

Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                      int64_t activation) {
  return grouped_linear_impl<1>(x, {weight}, offsets, activated(runtime(activation)));
}
Tensor grouped_gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                            const Tensor& offsets, int64_t activation) {
  return grouped_linear_impl<2>(x, {gate_weight, up_weight}, offsets, gated(runtime(activation)));
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

// Column sums, in strips of columns; blocks of 32 rows are summed first.
template <class T>
[[gnu::noinline]] Tensor grad_bias(const Tensor& bias, const Matrix<T>& grad) {
  constexpr int64_t STRIP = 128, ROWS = 32;
  Tensor sums = allocate_like(bias);
  parallel_for((grad.width + STRIP - 1) / STRIP, STRIP * grad.rows,
               [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * STRIP; first < std::min(end * STRIP, grad.width); first += STRIP) {
      int64_t width = std::min(STRIP, grad.width - first);
      float total[STRIP] = {}, block[STRIP];
      auto add = [&](float* to, const auto* from) {
        for_each_vector(width, [&](int64_t at, auto... tail) {
          store(to + at, load(to + at, tail...) + load(from + at, tail...), tail...);
        });
      };
      for (int64_t row = 0; row < grad.rows; row += ROWS) {
        std::fill_n(block, STRIP, 0.0f);
        for (int64_t r = row; r < std::min(row + ROWS, grad.rows); r++) add(block, grad[r] + first);
        add(total, block);
      }
      for_each_vector(width, [&](int64_t at, auto... tail) {
        store(data<T>(sums) + first + at, load(total + at, tail...), tail...);
      });
    }
  });
  return sums;
}

// dZ: grad times the derivative of the activation at z, which is recomputed.
template <class T, class Act>
Tensor act_backward(const Rows<T>& grad, const Rows<T>& x, const Rows<T>& w,
                    const std::optional<Vector<T>>& bias, const LoraTerms<T, 1>& lora,
                    const Act& act) {
  Tensor grad_z = allocate(std::array{x.count, w.count}, grad.owner.scalar_type());
  gemm_store<T, 1>(x, {w}, data<T>(grad_z),
                   [&](int64_t row, int64_t column, auto& acc, auto... tail) {
                     Floats value = acc[0];
                     if (bias) value += load(bias->first + column, tail...);
                     return load(grad[row] + column, tail...) * act.grad(value);
                   }, lora);
  return grad_z;
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
                     const LinearArgs& args, const LoraTerms<T, 1>& lora) {
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

template <class Act>
Tensors linear_act_backward(const NeedsGrad& needs_grad, const Tensors& grads,
                            const LinearArgs& args, const Act& act) {
  const Tensor& grad = single_grad(grads);
  return dispatch_dtype(args.x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> w = weight_rows<T>(args.weight, args.x), x(args.x);
    std::optional<Vector<T>> b;
    if (args.bias) check_same_dtype(*args.bias, args.x), b.emplace(*args.bias, w.count);
    check_output_like(grad, args.x, args.weight);
    LoraTerms<T, 1> lora = args.lora.terms<T>(args.x, args.weight);
    Rows<T> g(grad);
    if constexpr (std::is_same_v<Act, Identity>) {
      return linear_grads<T>(needs_grad, g, grad, args, lora);
    } else {
      Tensor grad_z = act_backward<T>(g, x, w, b, lora, act);
      return linear_grads<T>(needs_grad, Rows<T>(grad_z), grad, args, lora);
    }
  });
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
  if (residual) check_output_like(*residual, x, weight);
  LinearArgs args{x, weight, bias, residual, {lora_h, {&lora_b}, lora_index}};
  return dispatch_common<Identity>(ActivationFn::IDENTITY, activation, [&](auto act) {
    return linear_act_backward(needs_grad, grads, args, act);
  });
}

template <class Act>
Tensors gated_act_backward(const NeedsGrad& needs_grad, const Tensors& grads, const Tensor& x,
                           const Tensor& gate_weight, const Tensor& up_weight,
                           const LoraArgs<2>& lora_args, const Act& act) {
  const Tensor& grad = single_grad(grads);
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> gate = weight_rows<T>(gate_weight, x), up = weight_rows<T>(up_weight, x), rows(x);
    check(gate.count == up.count, "gate_weight and up_weight must have the same shape");
    check_output_like(grad, x, gate_weight);
    Rows<T> g(grad);
    int64_t width = gate.count;
    Tensor grad_gate = allocate(std::array{rows.count, width}, x.scalar_type());
    Tensor grad_up = allocate_like(grad_gate);
    std::array<Matrix<T>, 2> weights{Matrix<T>(gate), Matrix<T>(up)};
    LoraTerms<T, 2> lora = lora_args.terms<T>(x, gate_weight);
    gemm_store<T, 2>(rows, weights, data<T>(grad_up),
                     [&](int64_t row, int64_t column, auto& acc, auto... tail) {
                       Floats grads = load(g[row] + column, tail...);
                       store(data<T>(grad_gate) + row * width + column,
                             grads * acc[1] * act.grad(acc[0]), tail...);
                       return grads * act(acc[0]);
                     }, lora);
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
  LoraArgs<2> lora{lora_h, {&gate_lora_b, &up_lora_b}, lora_index};
  return gated_act_backward(needs_grad, grads, x, gate_weight, up_weight, lora,
                            runtime(activation));
}

}  // namespace ingot::kernels

REGISTER_OP(linear)
REGISTER_OP(gated_linear)
REGISTER_OP(grouped_linear)
REGISTER_OP(grouped_gated_linear)

REGISTER_BACKWARD(linear)
REGISTER_BACKWARD(gated_linear)
