// Norms, alone and of a sum. A row is read from memory once; the passes that follow find it in
// the cache, in float32: widening a bfloat16 costs as much as the arithmetic on it.
#include "tensor.h"

#include <memory>

namespace ingot::kernels {

// Values in float32: those of a float32 tensor itself, else a copy.
template <class T>
struct Widened {
  std::unique_ptr<float[]> copy;
  const float* first = nullptr;

  Widened(int64_t width) {
    if constexpr (sizeof(T) == 2) copy = std::make_unique_for_overwrite<float[]>(width);
  }
  const float* take(const T* from, int64_t width) {
    if constexpr (sizeof(T) == 4) return first = from;
    else
      for_each_vector(width, [&](int64_t at, auto... tail) {
        store(copy.get() + at, load(from + at, tail...), tail...);
      });
    return first = copy.get();
  }
};

template <class T>
struct Scales {
  Vector<T> weight;
  std::optional<Vector<T>> bias;
  float eps;

  Scales(const Tensor& w, const std::optional<Tensor>& b, double eps, const Tensor& x)
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

// What a thread works with, from row to row.
template <class T>
struct Desk {
  Widened<T> x, weight, bias;
  float eps;

  Desk(const Scales<T>& scales, int64_t width)
      : x(width), weight(width), bias(scales.bias ? width : 0), eps(scales.eps) {
    weight.take(scales.weight.first, width);
    if (scales.bias) bias.take(scales.bias->first, width);
  }
};

template <class T>
void rms(const Desk<T>& desk, const Output<T>& to, int64_t row) {
  const float *x = desk.x.first, *weight = desk.weight.first;
  Floats squares = sum_row(to.width, [&](Floats acc, int64_t at, auto... tail) {
    Floats values = load(x + at, tail...);
    return fma(values, values, acc);
  });
  Floats scale = broadcast(1.0f / std::sqrt(reduce_sum(squares) / to.width + desk.eps));
  for_each_vector(to.width, [&](int64_t at, auto... tail) {
    to.write(row, at, load(x + at, tail...) * scale * load(weight + at, tail...), tail...);
  });
}

template <class T>
void layer(const Desk<T>& desk, const Output<T>& to, int64_t row) {
  const float *x = desk.x.first, *weight = desk.weight.first, *bias = desk.bias.first;
  Floats total = sum_row(to.width, [&](Floats acc, int64_t at, auto... tail) {
    return acc + load(x + at, tail...);
  });
  Floats mean = broadcast(reduce_sum(total) / to.width);
  Floats squares = sum_row(to.width, [&](Floats acc, int64_t at, auto... tail) {
    Floats centred = load(x + at, tail...) - mean;
    return fma(centred, centred, acc);
  });
  Floats scale = broadcast(1.0f / std::sqrt(reduce_sum(squares) / to.width + desk.eps));
  for_each_vector(to.width, [&](int64_t at, auto... tail) {
    Floats normal = (load(x + at, tail...) - mean) * scale;
    Floats shift = bias ? load(bias + at, tail...) : Floats{};
    to.write(row, at, fma(normal, load(weight + at, tail...), shift), tail...);
  });
}

template <class Norm>
Tensor alone(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, double eps,
             Norm norm) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Scales<T> scales(weight, bias, eps, x);
    Rows<T> rows(x);
    Tensor y = allocate_like(x);
    Output<T> to(y);
    parallel_for(rows.count, rows.width, [&](int64_t begin, int64_t end) {
      Desk<T> desk(scales, rows.width);
      for (int64_t row = begin; row < end; row++) {
        desk.x.take(rows[row], rows.width);
        norm(desk, to, row);
      }
    });
    return y;
  });
}

template <class T>
void put_sum(const T* a, const T* b, int64_t width, T* to) {
  for_each_vector(width, [&](int64_t at, auto... tail) {
    store(to + at, load(a + at, tail...) + load(b + at, tail...), tail...);
  });
}

// The norm of a sum is that of the sum as it is stored: so it does not matter who adds.
template <class Norm>
std::tuple<Tensor, Tensor> of_sum(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                  const std::optional<Tensor>& bias, double eps, Norm norm) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    check_same_dtype(residual, x);
    check(std::ranges::equal(x.sizes(), residual.sizes()), "all inputs must have the shape of x");
    Scales<T> scales(weight, bias, eps, x);
    Rows<T> a(x), b(residual);
    Tensor y = allocate_like(x), total = allocate_like(x);
    Output<T> to(y), sums(total);
    parallel_for(a.count, a.width, [&](int64_t begin, int64_t end) {
      Desk<T> desk(scales, a.width);
      for (int64_t row = begin; row < end; row++) {
        put_sum<T>(a[row], b[row], a.width, sums[row]);
        desk.x.take(sums[row], a.width);
        norm(desk, to, row);
      }
    });
    return std::tuple(y, total);
  });
}

constexpr auto RMS = [](auto&&... args) { rms(args...); };
constexpr auto LAYER = [](auto&&... args) { layer(args...); };

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return alone(x, weight, std::nullopt, eps, RMS);
}
Tensor layer_norm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  double eps) {
  return alone(x, weight, bias, eps, LAYER);
}
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, double eps) {
  return of_sum(x, residual, weight, std::nullopt, eps, RMS);
}
std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                          const Tensor& weight, const std::optional<Tensor>& bias,
                                          double eps) {
  return of_sum(x, residual, weight, bias, eps, LAYER);
}

// ---- Gradients, with n a row that is normal (mean 0 and variance 1, or just mean square 1) and w the
// weight; "mean" is a row's:
//
//   dX = scale (w dY - mean(w dY) - n mean(w dY n))    without the first mean where n is not centred
//   of the weight the sum of dY n over all rows, of the bias that of dY
//
// Sums over rows are those of every 32 rows, added up in their order, whoever computed them.
constexpr int64_t SUMMED = 32;

// What 32 rows add to the gradients of weight and bias.
struct Sums {
  float *weight, *bias;

  Sums(float* memory, int64_t block, int64_t width)
      : weight(memory + 2 * block * width), bias(weight + width) {}
};

// `more` is added to dX where it is given.
template <bool CENTRED, class T>
void slope(const float* x, const float* grad, const float* weight, const T* more, float eps,
           int64_t width, const Sums& sums, T* to) {
  auto mean = [&](const auto& value) {
    return broadcast(reduce_sum(sum_row(width, [&](Floats acc, int64_t at, auto... tail) {
             return acc + value(at, tail...);
           })) / width);
  };
  Floats middle{};
  if constexpr (CENTRED) middle = mean([&](int64_t at, auto... tail) { return load(x + at, tail...); });
  Floats square = mean([&](int64_t at, auto... tail) {
    Floats centred = load(x + at, tail...) - middle;
    return centred * centred;
  });
  Floats scale = broadcast(1.0f / std::sqrt(square[0] + eps));
  auto normal = [&](int64_t at, auto... tail) { return (load(x + at, tail...) - middle) * scale; };
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
    if (more) value += load(more + at, tail...);
    store(to + at, value, tail...);
    store(sums.weight + at, fma(g, n, load(sums.weight + at, tail...)), tail...);
    store(sums.bias + at, load(sums.bias + at, tail...) + g, tail...);
  });
}

template <class T>
Tensor summed(const std::vector<float>& memory, int64_t blocks, int64_t width, bool of_bias,
              const Tensor& like) {
  Tensor y = allocate_like(like);
  for_each_vector(width, [&](int64_t at, auto... tail) {
    Floats total{};
    for (int64_t b = 0; b < blocks; b++)
      total += load(memory.data() + (2 * b + of_bias) * width + at, tail...);
    store(data<T>(y) + at, total, tail...);
  });
  return y;
}

// The gradients of x (and of the residual), the weight and the bias. `more` is that of the sum.
struct Norm {
  const Tensor &x, &weight;
  std::optional<Tensor> residual, bias;
  double eps;
};
struct NormGradients {
  Tensor x, weight;
  std::optional<Tensor> bias;
};

template <bool CENTRED>
NormGradients norm_gradients(const Norm& of, const Tensor& grad, const std::optional<Tensor>& more) {
  return dispatch_dtype(of.x, [&](auto tag) {
    using T = decltype(tag);
    Scales<T> scales(of.weight, of.bias, of.eps, of.x);
    auto rows_like_x = [&](const Tensor& tensor) {
      check_same_dtype(tensor, of.x);
      check(std::ranges::equal(tensor.sizes(), of.x.sizes()), "all inputs must have the shape of x");
      return Rows<T>(tensor);
    };
    Rows<T> x(of.x), g = rows_like_x(grad);
    std::optional<Rows<T>> residual, m;
    if (of.residual) residual = rows_like_x(*of.residual);
    if (more) m = rows_like_x(*more);
    Tensor dx = allocate_like(of.x);
    Output<T> to(dx);
    int64_t width = x.width, blocks = (x.count + SUMMED - 1) / SUMMED;
    std::vector<float> memory(2 * blocks * width);
    parallel_for(blocks, SUMMED * width, [&](int64_t begin, int64_t end) {
      Desk<T> desk(scales, width);
      Widened<T> grads(width);
      auto total = std::make_unique_for_overwrite<T[]>(residual ? width : 0);
      for (int64_t row = begin * SUMMED; row < std::min(end * SUMMED, x.count); row++) {
        const T* from = x[row];
        if (residual) put_sum<T>(x[row], (*residual)[row], width, total.get()), from = total.get();
        Sums sums(memory.data(), row / SUMMED, width);
        slope<CENTRED>(desk.x.take(from, width), grads.take(g[row], width), desk.weight.first,
                       m ? (*m)[row] : nullptr, desk.eps, width, sums, to[row]);
      }
    });
    NormGradients found{dx, summed<T>(memory, blocks, width, false, of.weight), {}};
    if (of.bias) found.bias = summed<T>(memory, blocks, width, true, *of.bias);
    return found;
  });
}

// Those that are needed, in the order of the arguments.
template <bool CENTRED>
Tensors needed_gradients(const NeedsGrad& needs_grad, const Tensors& grads, const Norm& of) {
  bool sum = of.residual.has_value();
  check(grads.size() == 1 + size_t(sum), "expected one gradient per output");
  check(needs_grad.size() == 3 + size_t(sum) + CENTRED, "expected one flag per argument");
  std::optional<Tensor> more;
  if (sum) more = grads[1];
  NormGradients all = norm_gradients<CENTRED>(of, grads[0], more);
  Tensors found;
  if (needs_grad[0]) found.push_back(all.x);
  if (sum && needs_grad[1]) found.push_back(needs_grad[0] ? clone_tensor(all.x) : all.x);
  if (needs_grad[1 + sum]) found.push_back(all.weight);
  if (CENTRED && needs_grad[2 + sum]) check(all.bias.has_value(), "the gradient of bias requires a bias"), found.push_back(*all.bias);
  return found;
}

Tensors rms_norm_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& x, const Tensor& weight,
                          double eps) {
  return needed_gradients<false>(needs_grad, grads, {x, weight, {}, {}, eps});
}
Tensors layer_norm_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& x, const Tensor& weight,
                            const std::optional<Tensor>& bias, double eps) {
  return needed_gradients<true>(needs_grad, grads, {x, weight, {}, bias, eps});
}
Tensors add_rms_norm_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& x, const Tensor& residual,
                              const Tensor& weight, double eps) {
  return needed_gradients<false>(needs_grad, grads, {x, weight, residual, {}, eps});
}
Tensors add_layer_norm_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& x, const Tensor& residual,
                                const Tensor& weight, const std::optional<Tensor>& bias, double eps) {
  return needed_gradients<true>(needs_grad, grads, {x, weight, residual, bias, eps});
}

}  // namespace ingot::kernels

REGISTER_OP(rms_norm)
REGISTER_OP(layer_norm)
REGISTER_OP(add_rms_norm)
REGISTER_OP(add_layer_norm)

REGISTER_BACKWARD(rms_norm)
REGISTER_BACKWARD(layer_norm)
REGISTER_BACKWARD(add_rms_norm)
REGISTER_BACKWARD(add_layer_norm)
