// Gradients of GEMMs, accumulated in float32 and rounded when stored.
#pragma once

#include "matmul.h"

namespace ingot {

template <class T>
[[gnu::noinline]] Tensor gemm_tensor(std::span<const int64_t> sizes, const Tensor& like,
                                     const std::vector<GemmOperands<T>>& operands) {
  Tensor y = allocate(sizes, like.scalar_type());
  Output<T> to(y);
  gemm_sum<T>(operands, [&](int64_t row, ColumnRange columns, const float* values) {
    for_each_vector(columns.count, [&](int64_t at, auto... tail) {
      to.write(row, columns.begin + at, load(values + at, tail...), tail...);
    });
  });
  return y;
}

// grad^T x, with the sizes of the weight.
template <class T>
[[gnu::noinline]] Tensor grad_weight(const Tensor& weight, const Matrix<T>& grad,
                                     const Matrix<T>& x) {
  Matrix<T> grad_t = parallel_transpose_copy<Scratch::TRANSPOSED_GRAD>(Transposed<T>(grad));
  return gemm_tensor<T>({weight.sizes().data(), size_t(weight.dim())}, weight,
                        {{grad_t, Transposed<T>(x)}});
}

// Sums of the columns, in strips of columns; blocks of 32 rows are summed first.
template <class T>
[[gnu::noinline]] void sum_columns(const Matrix<T>& x, T* to) {
  constexpr int64_t STRIP = 128, ROWS = 32;
  parallel_for((x.width + STRIP - 1) / STRIP, STRIP * x.rows, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * STRIP; first < std::min(end * STRIP, x.width); first += STRIP) {
      int64_t width = std::min(STRIP, x.width - first);
      float total[STRIP] = {}, block[STRIP];
      auto add = [&](float* to, const auto* from) {
        for_each_vector(width, [&](int64_t at, auto... tail) {
          store(to + at, load(to + at, tail...) + load(from + at, tail...), tail...);
        });
      };
      for (int64_t row = 0; row < x.rows; row += ROWS) {
        std::fill_n(block, STRIP, 0.0f);
        for (int64_t r = row; r < std::min(row + ROWS, x.rows); r++) add(block, x[r] + first);
        add(total, block);
      }
      for_each_vector(width, [&](int64_t at, auto... tail) {
        store(to + first + at, load(total + at, tail...), tail...);
      });
    }
  });
}

template <class T>
[[gnu::noinline]] Tensor grad_bias(const Tensor& bias, const Matrix<T>& grad) {
  Tensor sums = allocate_like(bias);
  sum_columns(grad, data<T>(sums));
  return sums;
}

// Columns of a float32 matrix times a factor, rounded to T.
template <class T>
[[gnu::noinline]] Tensor round_columns(const Matrix<float>& x, int64_t first, int64_t count,
                                       float factor, ScalarType dtype) {
  Tensor y = allocate(std::array{x.rows, count}, dtype);
  parallel_for_each_vector(x.rows, count, [&](int64_t row, int64_t at, auto... tail) {
    store(data<T>(y) + row * count + at,
          load(x[row] + first + at, tail...) * broadcast(factor), tail...);
  });
  return y;
}

}  // namespace ingot
