// Norms, also fused with a residual addition. A row is read from memory once; later passes read it
// from the cache in float32, since converting from bfloat16 costs as much as the arithmetic.
#include "tensor.h"

#include <memory>

namespace ingot::kernels {

// A row in float32: the tensor's own memory if it is float32, else a copy.
template <class T>
struct Float32Row {
  std::unique_ptr<float[]> copy;
  const float* first = nullptr;

  Float32Row(int64_t width) {
    if constexpr (sizeof(T) == 2) copy = std::make_unique_for_overwrite<float[]>(width);
  }
  const float* load_row(const T* from, int64_t width) {
    if constexpr (sizeof(T) == 4) return first = from;
    else
      for_each_vector(width, [&](int64_t at, auto... tail) {
        store(copy.get() + at, load(from + at, tail...), tail...);
      });
    return first = copy.get();
  }
};

template <class T>
struct NormParams {
  Vector<T> weight;
  std::optional<Vector<T>> bias;
  float eps;

  NormParams(const Tensor& w, const std::optional<Tensor>& b, double eps, const Tensor& x)
      : weight(vector(w, x)), eps(float(eps)) {
    check(eps >= 0, "eps must not be negative");
    if (b) bias.emplace(vector(*b, x));
  }
  static Vector<T> vector(const Tensor& v, const Tensor& x) {
    check_same_dtype(v, x);
    check(x.dim() >= 1, "x must have at least one dimension");
    return Vector<T>(v, x.size(x.dim() - 1));
  }
};

// Buffers that a thread reuses from row to row.
template <class T>
struct Workspace {
  Float32Row<T> x, weight, bias;
  float eps;

  Workspace(const NormParams<T>& params, int64_t width)
      : x(width), weight(width), bias(params.bias ? width : 0), eps(params.eps) {
    weight.load_row(params.weight.first, width);
    if (params.bias) bias.load_row(params.bias->first, width);
  }
};

template <class T>
void rms_row(const Workspace<T>& workspace, const Output<T>& to, int64_t row) {
  const float *x = workspace.x.first, *weight = workspace.weight.first;
  Floats squares = sum_row(to.width, [&](Floats acc, int64_t at, auto... tail) {
    Floats values = load(x + at, tail...);
    return fma(values, values, acc);
  });
  Floats scale = broadcast(1.0f / std::sqrt(reduce_sum(squares) / to.width + workspace.eps));
  for_each_vector(to.width, [&](int64_t at, auto... tail) {
    to.write(row, at, load(x + at, tail...) * scale * load(weight + at, tail...), tail...);
  });
}

template <class T>
void layer_row(const Workspace<T>& workspace, const Output<T>& to, int64_t row) {
  const float *x = workspace.x.first, *weight = workspace.weight.first,
      *bias = workspace.bias.first;
  Floats total = sum_row(to.width, [&](Floats acc, int64_t at, auto... tail) {
    return acc + load(x + at, tail...);
  });
  Floats mean = broadcast(reduce_sum(total) / to.width);
  Floats squares = sum_row(to.width, [&](Floats acc, int64_t at, auto... tail) {
    Floats centred = load(x + at, tail...) - mean;
    return fma(centred, centred, acc);
  });
  Floats scale = broadcast(1.0f / std::sqrt(reduce_sum(squares) / to.width + workspace.eps));
  for_each_vector(to.width, [&](int64_t at, auto... tail) {
    Floats normal = (load(x + at, tail...) - mean) * scale;
    Floats shift = bias ? load(bias + at, tail...) : Floats{};
    to.write(row, at, fma(normal, load(weight + at, tail...), shift), tail...);
  });
}

// Which norm to compute is decided per row: as template arguments, norms doubled the code below.
enum class Norm { RMS, LAYER };

template <class T>
void norm_row(Norm norm, const Workspace<T>& workspace, const Output<T>& to, int64_t row) {
  if (norm == Norm::LAYER) layer_row(workspace, to, row);
  else rms_row(workspace, to, row);
}

Tensor norm_rows(Norm norm, const Tensor& x, const Tensor& weight,
                 const std::optional<Tensor>& bias, double eps) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    NormParams<T> params(weight, bias, eps, x);
    Rows<T> rows(x);
    Tensor y = allocate_like(x);
    Output<T> to(y);
    parallel_for(rows.count, rows.width, [&](int64_t begin, int64_t end) {
      Workspace<T> workspace(params, rows.width);
      for (int64_t row = begin; row < end; row++) {
        workspace.x.load_row(rows[row], rows.width);
        norm_row(norm, workspace, to, row);
      }
    });
    return y;
  });
}

template <class T>
void add_rows(const T* a, const T* b, int64_t width, T* to) {
  for_each_vector(width, [&](int64_t at, auto... tail) {
    store(to + at, load(a + at, tail...) + load(b + at, tail...), tail...);
  });
}

// The norm is computed from the stored (rounded) sum, so that fusing does not change the bits.
std::tuple<Tensor, Tensor> add_norm_rows(Norm norm, const Tensor& x, const Tensor& residual,
                                         const Tensor& weight,
                                         const std::optional<Tensor>& bias, double eps) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    check_same_dtype(residual, x);
    check(same_sizes(x, residual), "all inputs must have the shape of x");
    NormParams<T> params(weight, bias, eps, x);
    Rows<T> a(x), b(residual);
    Tensor y = allocate_like(x), total = allocate_like(x);
    Output<T> to(y), sums(total);
    parallel_for(a.count, a.width, [&](int64_t begin, int64_t end) {
      Workspace<T> workspace(params, a.width);
      for (int64_t row = begin; row < end; row++) {
        add_rows<T>(a[row], b[row], a.width, sums[row]);
        workspace.x.load_row(sums[row], a.width);
        norm_row(norm, workspace, to, row);
      }
    });
    return std::tuple(y, total);
  });
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return norm_rows(Norm::RMS, x, weight, std::nullopt, eps);
}
Tensor layer_norm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  double eps) {
  return norm_rows(Norm::LAYER, x, weight, bias, eps);
}
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, double eps) {
  return add_norm_rows(Norm::RMS, x, residual, weight, std::nullopt, eps);
}
std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                          const Tensor& weight, const std::optional<Tensor>& bias,
                                          double eps) {
  return add_norm_rows(Norm::LAYER, x, residual, weight, bias, eps);
}

// ---- Gradients, with n a normalized row and w the weight; means are over a row:
//
//   dX = scale (w dY - mean(w dY) - n mean(w dY n))    the first mean only for layer_norm
//   dw = sum of dY n over all rows, dbias = sum of dY
//
// Rows are summed in blocks of 32 that are added in a fixed order, independent of the threads.
constexpr int64_t ROWS_PER_SUM = 32;

// Contribution of a block of 32 rows to the gradients of weight and bias.
struct Sums {
  float *weight, *bias;

  Sums(float* memory, int64_t block, int64_t width)
      : weight(memory + 2 * block * width), bias(weight + width) {}
};

// `grad_sum`, the gradient of the sum, is added to dX if given.
template <bool CENTRED, class T>
void norm_row_backward(const float* x, const float* grad, const float* weight, const T* grad_sum,
                       float eps, int64_t width, const Sums& sums, T* to) {
  auto mean = [&](const auto& value) {
    return broadcast(reduce_sum(sum_row(width, [&](Floats acc, int64_t at, auto... tail) {
             return acc + value(at, tail...);
           })) / width);
  };
  Floats row_mean{};
  if constexpr (CENTRED) row_mean = mean([&](int64_t at,
                                             auto... tail) { return load(x + at, tail...); });
  Floats square = mean([&](int64_t at, auto... tail) {
    Floats centred = load(x + at, tail...) - row_mean;
    return centred * centred;
  });
  Floats scale = broadcast(1.0f / std::sqrt(square[0] + eps));
  auto normal = [&](int64_t at,
                    auto... tail) { return (load(x + at, tail...) - row_mean) * scale; };
  auto weighted = [&](int64_t at, auto... tail) {
    return load(grad + at, tail...) * load(weight + at, tail...);
  };
  Floats shift{};
  if constexpr (CENTRED) shift = mean(weighted);
  Floats along_normal = mean([&](int64_t at, auto... tail) {
    return weighted(at, tail...) * normal(at, tail...);
  });
  for_each_vector(width, [&](int64_t at, auto... tail) {
    Floats n = normal(at, tail...), g = load(grad + at, tail...);
    Floats value = (weighted(at, tail...) - shift - n * along_normal) * scale;
    if (grad_sum) value += load(grad_sum + at, tail...);
    store(to + at, value, tail...);
    store(sums.weight + at, fma(g, n, load(sums.weight + at, tail...)), tail...);
    store(sums.bias + at, load(sums.bias + at, tail...) + g, tail...);
  });
}

template <class T>
Tensor sum_blocks(const std::vector<float>& memory, int64_t blocks, int64_t width, bool is_bias,
                  const Tensor& like) {
  Tensor y = allocate_like(like);
  for_each_vector(width, [&](int64_t at, auto... tail) {
    Floats total{};
    for (int64_t b = 0; b < blocks; b++)
      total += load(memory.data() + (2 * b + is_bias) * width + at, tail...);
    store(data<T>(y) + at, total, tail...);
  });
  return y;
}

// Arguments of a norm and its gradients; x and the residual have the same gradient.
struct NormArgs {
  const Tensor &x, &weight;
  std::optional<Tensor> residual, bias;
  double eps;
};
struct NormGradients {
  Tensor x, weight;
  std::optional<Tensor> bias;
};

NormGradients norm_gradients(Norm norm, const NormArgs& args, const Tensor& grad,
                             const std::optional<Tensor>& grad_sum) {
  return dispatch_dtype(args.x, [&](auto tag) {
    using T = decltype(tag);
    NormParams<T> params(args.weight, args.bias, args.eps, args.x);
    auto rows_like_x = [&](const Tensor& tensor) {
      check_same_dtype(tensor, args.x);
      check(same_sizes(tensor, args.x),
            "all inputs must have the shape of x");
      return Rows<T>(tensor);
    };
    Rows<T> x(args.x), g = rows_like_x(grad);
    std::optional<Rows<T>> residual, m;
    if (args.residual) residual = rows_like_x(*args.residual);
    if (grad_sum) m = rows_like_x(*grad_sum);
    Tensor dx = allocate_like(args.x);
    Output<T> to(dx);
    int64_t width = x.width, blocks = (x.count + ROWS_PER_SUM - 1) / ROWS_PER_SUM;
    std::vector<float> memory(2 * blocks * width);
    bool centred = norm == Norm::LAYER;
    parallel_for(blocks, ROWS_PER_SUM * width, [&](int64_t begin, int64_t end) {
      Workspace<T> workspace(params, width);
      Float32Row<T> grads(width);
      auto total = std::make_unique_for_overwrite<T[]>(residual ? width : 0);
      for (int64_t row = begin * ROWS_PER_SUM; row < std::min(end * ROWS_PER_SUM, x.count); row++) {
        const T* from = x[row];
        if (residual) add_rows<T>(x[row], (*residual)[row], width, total.get()), from = total.get();
        Sums sums(memory.data(), row / ROWS_PER_SUM, width);
        auto backward = centred ? norm_row_backward<true, T> : norm_row_backward<false, T>;
        backward(workspace.x.load_row(from, width), grads.load_row(g[row], width),
                 workspace.weight.first, m ? (*m)[row] : nullptr, workspace.eps, width, sums,
                 to[row]);
      }
    });
    NormGradients result{dx, sum_blocks<T>(memory, blocks, width, false, args.weight), {}};
    if (args.bias) result.bias = sum_blocks<T>(memory, blocks, width, true, *args.bias);
    return result;
  });
}

// The needed gradients in the order of the arguments.
Tensors select_gradients(Norm norm, const NeedsGrad& needs_grad, const Tensors& grads,
                         const NormArgs& args) {
  bool sum = args.residual.has_value(), centred = norm == Norm::LAYER;
  check(grads.size() == 1 + size_t(sum), "expected one gradient per output");
  check(needs_grad.size() == 3 + size_t(sum) + size_t(centred), "expected one flag per argument");
  std::optional<Tensor> grad_sum;
  if (sum) grad_sum = grads[1];
  NormGradients grad = norm_gradients(norm, args, grads[0], grad_sum);
  Tensors result;
  if (needs_grad[0]) result.push_back(grad.x);
  if (sum && needs_grad[1]) result.push_back(needs_grad[0] ? clone_tensor(grad.x) : grad.x);
  if (needs_grad[1 + sum]) result.push_back(grad.weight);
  if (centred && needs_grad[2 + sum])
    check(grad.bias.has_value(), "the gradient of bias requires a bias"),
        result.push_back(*grad.bias);
  return result;
}

Tensors rms_norm_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& x,
                          const Tensor& weight, double eps) {
  return select_gradients(Norm::RMS, needs_grad, grads, {x, weight, {}, {}, eps});
}
Tensors layer_norm_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& x,
                            const Tensor& weight, const std::optional<Tensor>& bias, double eps) {
  return select_gradients(Norm::LAYER, needs_grad, grads, {x, weight, {}, bias, eps});
}
Tensors add_rms_norm_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& x,
                              const Tensor& residual, const Tensor& weight, double eps) {
  return select_gradients(Norm::RMS, needs_grad, grads, {x, weight, residual, {}, eps});
}
Tensors add_layer_norm_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& x,
                                const Tensor& residual,
                                const Tensor& weight, const std::optional<Tensor>& bias,
                                double eps) {
  return select_gradients(Norm::LAYER, needs_grad, grads, {x, weight, residual, bias, eps});
}

// The order of a row's sum depends on its width alone.
Tensor square_sum(const Tensor& x) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> rows(x);
    Tensor y = allocate({x.sizes().data(), size_t(x.dim() - 1)}, ScalarType::Float);
    float* sums = data<float>(y);
    parallel_for(rows.count, rows.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        const T* from = rows[row];
        sums[row] = reduce_sum(sum_row(rows.width, [&](Floats acc, int64_t at, auto... tail) {
          Floats values = load(from + at, tail...);
          return fma(values, values, acc);
        }));
      }
    });
    return y;
  });
}

}  // namespace ingot::kernels

REGISTER_OP(rms_norm)
REGISTER_OP(square_sum)
REGISTER_OP(layer_norm)
REGISTER_OP(add_rms_norm)
REGISTER_OP(add_layer_norm)

REGISTER_BACKWARD(rms_norm)
REGISTER_BACKWARD(layer_norm)
REGISTER_BACKWARD(add_rms_norm)
REGISTER_BACKWARD(add_layer_norm)
