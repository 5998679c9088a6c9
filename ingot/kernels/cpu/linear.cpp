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
  multiply(x, weights, even_columns(width), [&](const Block& block) {
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
