// x W^T, and what is fused into its last step: on the float block, before it is rounded and stored.
#include "matmul.h"

namespace ingot::kernels {

// A matrix of weights for x's channels.
template <class T>
Rows<T> weight_of(const Tensor& weight, const Tensor& x) {
  need_like(weight, x);
  need(x.dim() >= 1 && weight.dim() == 2 && weight.size(1) == x.size(x.dim() - 1),
       "weight of (out, in)");
  return Rows<T>(weight);
}

inline Tensor product_like(const Tensor& x, const Tensor& weight) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = weight.size(0);
  return made(sizes, x.scalar_type());
}

// value(row, column, products, count...) gives what is stored.
template <class T, size_t PRODUCTS, class Value>
void store_product(const Matrix<T>& x, const std::array<Matrix<T>, PRODUCTS>& weights, T* out,
                   const Value& value) {
  int64_t width = weights[0].rows;
  multiply<T, Matrix<T>, PRODUCTS>(x, weights, even_columns(width), [&](const Block& block) {
    for (int64_t r = 0; r < block.rows; r++)
      along(block.columns.count, [&](int64_t at, auto... count) {
        int64_t row = block.row + r, column = block.columns.begin + at;
        Floats products[PRODUCTS];
        for (size_t p = 0; p < PRODUCTS; p++) products[p] = load(block.of(p, r) + at, count...);
        store(out + row * width + column, value(row, column, products, count...), count...);
      });
  });
}

template <class T, size_t PRODUCTS, class Value>
Tensor linear_of(const Tensor& x, const Tensor& weight, const std::array<Matrix<T>, PRODUCTS>& weights,
                 const Value& value) {
  Tensor y = product_like(x, weight);
  store_product<T, PRODUCTS>(Rows<T>(x), weights, data<T>(y), value);
  return y;
}

inline void need_like_product(const Tensor& residual, const Tensor& x, const Tensor& weight) {
  need_like(residual, x);
  need(residual.dim() == x.dim(), "a residual of the product's shape");
  for (int64_t d = 0; d + 1 < x.dim(); d++)
    need(residual.size(d) == x.size(d), "a residual of the product's shape");
  need(residual.size(x.dim() - 1) == weight.size(0), "a residual of the product's shape");
}

// residual + function(x W^T + bias)
template <class Function>
Tensor activated(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                 const std::optional<Tensor>& residual, Function function) {
  return with_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> w = weight_of<T>(weight, x);
    std::optional<Vector<T>> b;
    std::optional<Rows<T>> r;
    if (bias) need_like(*bias, x), b.emplace(*bias, w.count);
    if (residual) need_like_product(*residual, x, weight), r.emplace(*residual);
    return linear_of<T, 1>(
        x, weight, {w}, [&](int64_t row, int64_t column, auto& products, auto... count) {
          Floats value = products[0];
          if (b) value += load(b->first + column, count...);
          value = function(value);
          if (r) value += load((*r)[row] + column, count...);
          return value;
        });
  });
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return activated(x, weight, bias, {}, [](Floats v) { return v; });
}
Tensor linear_gelu(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return activated(x, weight, bias, {}, [](Floats v) { return gelu(v); });
}
Tensor linear_gelu_tanh(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return activated(x, weight, bias, {}, [](Floats v) { return gelu_tanh(v); });
}
Tensor linear_silu(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return activated(x, weight, bias, {}, [](Floats v) { return silu(v); });
}
Tensor linear_relu(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return activated(x, weight, bias, {}, [](Floats v) { return relu(v); });
}
Tensor linear_residual(const Tensor& x, const Tensor& weight, const Tensor& residual,
                       const std::optional<Tensor>& bias) {
  return activated(x, weight, bias, residual, [](Floats v) { return v; });
}

constexpr auto PRODUCT = [](int64_t, int64_t, auto& products, auto...) { return products[0]; };
constexpr auto SWIGLU = [](int64_t, int64_t, auto& products, auto...) {
  return silu(products[0]) * products[1];
};

Tensor linear_swiglu(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight) {
  return with_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> gate = weight_of<T>(gate_weight, x), up = weight_of<T>(up_weight, x);
    need(gate.count == up.count, "gate and up of one shape");
    return linear_of<T, 2>(x, gate_weight, {gate, up}, SWIGLU);
  });
}

// A group after the other, each a product of its own: so a row has the bits that `linear` gives it.
template <size_t PRODUCTS, class Value>
Tensor grouped(const Tensor& x, const std::array<Tensor, PRODUCTS>& weights, const Tensor& offsets,
               const Value& value) {
  return with_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    const Tensor& first = weights[0];
    need(x.dim() == 2 && first.dim() == 3 && first.size(2) == x.size(1), "weight of (groups, out, in)");
    int64_t groups = first.size(0), width = first.size(1), depth = first.size(2);
    need(offsets.dim() == 1 && offsets.size(0) == groups + 1, "an offset more than groups");
    Integers begins(offsets);
    need(begins[0] == 0 && begins[groups] == x.size(0), "offsets from 0 to the number of rows");
    for (int64_t g = 0; g < groups; g++) need(begins[g] <= begins[g + 1], "offsets that rise");
    std::vector<Rows<T>> all;
    for (const Tensor& weight : weights) {
      need_like(weight, x);
      need(std::ranges::equal(weight.sizes(), first.sizes()), "weights of one shape");
      all.emplace_back(weight);
    }
    Rows<T> rows(x);
    Tensor y = made(std::array{x.size(0), width}, x.scalar_type());
    for (int64_t g = 0; g < groups; g++) {
      int64_t begin = begins[g], count = begins[g + 1] - begin;
      if (!count || !width) continue;
      auto part = [&]<size_t... P>(std::index_sequence<P...>) {
        return std::array{Matrix<T>(all[P][g * width], width, depth, all[P].stride)...};
      }(std::make_index_sequence<PRODUCTS>());
      Matrix<T> taken(rows[begin], count, depth, rows.stride);
      store_product<T, PRODUCTS>(taken, part, data<T>(y) + begin * width, value);
    }
    return y;
  });
}

Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets) {
  return grouped<1>(x, {weight}, offsets, PRODUCT);
}
Tensor grouped_swiglu(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                      const Tensor& offsets) {
  return grouped<2>(x, {gate_weight, up_weight}, offsets, SWIGLU);
}

// ---- Gradients of y = function(x W^T + bias), with dZ that of what the function is given:
//
//   dX = dZ W    dW = dZ^T X    of the bias, the sum of dZ's rows
//
// All in the product's float blocks, and rounded when they are stored, as dZ is.

template <class T>
Tensor made_by(std::span<const int64_t> sizes, const Tensor& like,
               const std::vector<Factors<T>>& factors) {
  Tensor made_tensor = made(sizes, like.scalar_type());
  Output<T> to(made_tensor);
  add_products(factors, [&](int64_t row, int64_t column, Floats values, auto... count) {
    to.write(row, column, values, count...);
  });
  return made_tensor;
}

template <class T>
Tensor gradient_of_x(const Tensor& x, const std::vector<Factors<T>>& factors) {
  return made_by<T>({x.sizes().data(), size_t(x.dim())}, x, factors);
}

template <class T>
Tensor gradient_of_weight(const Tensor& weight, const Matrix<T>& grad, const Matrix<T>& x) {
  Matrix<T> turned = turned_copy<6>(Turned<T>(grad));
  return made_by<T>({weight.sizes().data(), 2}, weight, {{turned, Turned<T>(x)}});
}

// In strips of columns, each a sum of sums of 32 rows.
template <class T>
Tensor gradient_of_bias(const Tensor& bias, const Matrix<T>& grad) {
  constexpr int64_t STRIP = 128, ROWS = 32;
  Tensor sums = made_like(bias);
  parallel((grad.width + STRIP - 1) / STRIP, STRIP * grad.rows, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * STRIP; first < std::min(end * STRIP, grad.width); first += STRIP) {
      int64_t width = std::min(STRIP, grad.width - first);
      float total[STRIP] = {}, some[STRIP];
      auto add = [&](float* to, const auto* from) {
        along(width, [&](int64_t at, auto... count) {
          store(to + at, load(to + at, count...) + load(from + at, count...), count...);
        });
      };
      for (int64_t row = 0; row < grad.rows; row += ROWS) {
        std::fill_n(some, STRIP, 0.0f);
        for (int64_t r = row; r < std::min(row + ROWS, grad.rows); r++) add(some, grad[r] + first);
        add(total, some);
      }
      along(width, [&](int64_t at, auto... count) {
        store(data<T>(sums) + first + at, load(total + at, count...), count...);
      });
    }
  });
  return sums;
}

// grad times the function's slope at x W^T + bias, which is computed once more.
template <class T, class Slope>
Tensor through(const Rows<T>& grad, const Rows<T>& x, const Rows<T>& w,
               const std::optional<Vector<T>>& bias, const Slope& slope) {
  Tensor product = made(std::array{x.count, w.count}, grad.owner.scalar_type());
  store_product<T, 1>(x, {w}, data<T>(product),
                      [&](int64_t row, int64_t column, auto& products, auto... count) {
                        Floats value = products[0];
                        if (bias) value += load(bias->first + column, count...);
                        return load(grad[row] + column, count...) * slope(value);
                      });
  return product;
}

struct Linear {
  const Tensor &x, &weight;
  const std::optional<Tensor>& bias;
};

inline const Tensor& only(const Tensors& grads) {
  need(grads.size() == 1, "one gradient");
  return grads[0];
}

// Of x, weight and bias.
template <class T>
Tensors gradients(const Needs& needs, const Matrix<T>& grad, const Linear& of) {
  Rows<T> x(of.x), w(of.weight);
  Tensors found;
  if (needs[0]) found.push_back(gradient_of_x<T>(of.x, {{grad, Turned<T>(w)}}));
  if (needs[1]) found.push_back(gradient_of_weight<T>(of.weight, grad, x));
  if (needs[2]) found.push_back(gradient_of_bias<T>(of.bias.value(), grad));
  return found;
}

template <class Slope>
Tensors activated_backward(const Needs& needs, const Tensors& grads, const Linear& of,
                           const Slope& slope) {
  need(needs.size() == 3 && (of.bias || !needs[2]), "a flag for each argument");
  const Tensor& grad = only(grads);
  return with_dtype(of.x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> w = weight_of<T>(of.weight, of.x), x(of.x);
    std::optional<Vector<T>> b;
    if (of.bias) need_like(*of.bias, of.x), b.emplace(*of.bias, w.count);
    need_like_product(grad, of.x, of.weight);
    Rows<T> g(grad);
    if constexpr (std::is_same_v<Slope, std::nullptr_t>) {
      return gradients<T>(needs, g, of);
    } else {
      Tensor product = through<T>(g, x, w, b, slope);
      return gradients<T>(needs, Rows<T>(product), of);
    }
  });
}

Tensors linear_backward(Needs needs, Tensors grads, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias) {
  return activated_backward(needs, grads, {x, weight, bias}, nullptr);
}
Tensors linear_gelu_backward(Needs needs, Tensors grads, const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias) {
  auto slope = [](Floats v) { return gelu_slope(v); };
  return activated_backward(needs, grads, {x, weight, bias}, slope);
}
Tensors linear_gelu_tanh_backward(Needs needs, Tensors grads, const Tensor& x, const Tensor& weight,
                                  const std::optional<Tensor>& bias) {
  auto slope = [](Floats v) { return gelu_tanh_slope(v); };
  return activated_backward(needs, grads, {x, weight, bias}, slope);
}
Tensors linear_silu_backward(Needs needs, Tensors grads, const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias) {
  auto slope = [](Floats v) { return silu_slope(v); };
  return activated_backward(needs, grads, {x, weight, bias}, slope);
}
Tensors linear_relu_backward(Needs needs, Tensors grads, const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias) {
  auto slope = [](Floats v) { return relu_slope(v); };
  return activated_backward(needs, grads, {x, weight, bias}, slope);
}

Tensors linear_residual_backward(Needs needs, Tensors grads, const Tensor& x, const Tensor& weight,
                                 const Tensor& residual, const std::optional<Tensor>& bias) {
  need(needs.size() == 4, "a flag for each argument");
  need_like_product(residual, x, weight);
  Tensors found = activated_backward({needs[0], needs[1], needs[3]}, grads, {x, weight, bias}, nullptr);
  // The gradient of the residual is that of the result, in memory of its own.
  if (needs[2]) found.insert(found.begin() + needs[0] + needs[1], copied(grads[0]));
  return found;
}

Tensors linear_swiglu_backward(Needs needs, Tensors grads, const Tensor& x, const Tensor& gate_weight,
                               const Tensor& up_weight) {
  need(needs.size() == 3, "a flag for each argument");
  const Tensor& grad = only(grads);
  return with_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> gate = weight_of<T>(gate_weight, x), up = weight_of<T>(up_weight, x), rows(x);
    need(gate.count == up.count, "gate and up of one shape");
    need_like_product(grad, x, gate_weight);
    Rows<T> g(grad);
    int64_t width = gate.count;
    Tensor of_gate = made(std::array{rows.count, width}, x.scalar_type());
    Tensor of_up = made_like(of_gate);
    std::array<Matrix<T>, 2> weights{Matrix<T>(gate), Matrix<T>(up)};
    store_product<T, 2>(rows, weights, data<T>(of_up),
                        [&](int64_t row, int64_t column, auto& products, auto... count) {
                          Floats grads = load(g[row] + column, count...);
                          store(data<T>(of_gate) + row * width + column,
                                grads * products[1] * silu_slope(products[0]), count...);
                          return grads * silu(products[0]);
                        });
    Rows<T> dg(of_gate), du(of_up);
    Tensors found;
    if (needs[0])
      found.push_back(gradient_of_x<T>(x, {{dg, Turned<T>(gate)}, {du, Turned<T>(up)}}));
    if (needs[1]) found.push_back(gradient_of_weight<T>(gate_weight, dg, rows));
    if (needs[2]) found.push_back(gradient_of_weight<T>(up_weight, du, rows));
    return found;
  });
}

}  // namespace ingot::kernels

OP(linear)
OP(linear_gelu)
OP(linear_gelu_tanh)
OP(linear_silu)
OP(linear_relu)
OP(linear_residual)
OP(linear_swiglu)
OP(grouped_linear)
OP(grouped_swiglu)

BACKWARD(linear)
BACKWARD(linear_gelu)
BACKWARD(linear_gelu_tanh)
BACKWARD(linear_silu)
BACKWARD(linear_relu)
BACKWARD(linear_residual)
BACKWARD(linear_swiglu)
