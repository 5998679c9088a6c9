// The first matmul of LoRA adapters, with an adapter for each row. The second one is part of the
// epilogue of `linear` and `gated_linear`: see lora.h.
#include "lora.h"

#include "gradient.h"

namespace ingot::kernels {

// The rows of x that have an adapter, in the order of their adapters, and the tasks of these rows.
struct SortedRows {
  std::vector<int64_t> order;
  std::vector<AdapterRows> tasks;

  SortedRows(const AdapterIndex& index, int64_t rows) {
    for (int64_t row = 0; row < rows; row++)
      if (index[row] >= 0) order.push_back(row);
    std::sort(order.begin(), order.end(), [&](int64_t row, int64_t other) {
      return std::pair(index[row], row) < std::pair(index[other], other);
    });
    // Two tasks per thread if all rows have one adapter, of whole tiles of a dot product.
    constexpr int64_t TILE_ROWS = 8;
    int64_t total = order.size(), parts = 2 * num_threads() * TILE_ROWS;
    int64_t most = std::max<int64_t>((total + parts - 1) / parts, 1) * TILE_ROWS;
    for (int64_t at = 0; at < total; at++) {
      int64_t adapter = index[order[at]];
      if (tasks.empty() || tasks.back().adapter != adapter || tasks.back().rows == most)
        tasks.push_back({at, 0, adapter});
      tasks.back().rows++;
    }
  }
  bool is_identity(int64_t rows) const {
    return int64_t(order.size()) == rows && std::is_sorted(order.begin(), order.end());
  }
  // The rows of x in this order; x itself if they are in it.
  template <class T>
  Matrix<T> gather(const Rows<T>& x) const {
    if (is_identity(x.count)) return x;
    T* to = scratch<Scratch::LORA_SORTED_ROWS, T>(order.size() * x.width);
    for (size_t at = 0; at < order.size(); at++)
      std::copy_n(x[order[at]], x.width, to + at * x.width);
    return {to, int64_t(order.size()), x.width, x.width};
  }
};

struct Shrink {
  std::vector<int64_t> sizes;
  int64_t rank;
  AdapterIndex index;

  [[gnu::noinline]] Shrink(const Tensor& x, const Tensor& a, const Tensor& scale,
                           const std::optional<Tensor>& given)
      : sizes(x.sizes().begin(), x.sizes().end()),
        rank(check_a(x, a, scale)),
        index(given, x, a.size(0)) {
    sizes.back() = rank;
  }

  // h = scale x A^T; `scale` has one value per adapter, 1 without it.
  template <class T>
  [[gnu::noinline]] Tensor run(const Tensor& x, const Tensor& a, const float* scale) const {
    Rows<T> from(x), weights(a);
    Tensor y = allocate(sizes, ScalarType::Float);
    float* to = data<float>(y);
    for (int64_t row = 0; row < from.count; row++)
      if (index[row] < 0) std::fill_n(to + row * rank, rank, 0.0f);
    if (from.count == 0) return y;
    auto weight_of = [&](int64_t adapter) {
      return Matrix<T>(weights[adapter * rank], rank, weights.width, weights.stride);
    };
    auto multiply = [&](const Matrix<T>& x, const std::vector<AdapterRows>& tasks, auto row_of) {
      gemm_by_rows<T>(x, tasks, weight_of, [&](const OutputBlock& block) {
        Floats factor = broadcast(scale ? scale[block.group] : 1.0f);
        for (int64_t r = 0; r < block.rows; r++) {
          float* h = to + row_of(block.row + r) * rank + block.columns.begin;
          for_each_vector(block.columns.count, [&](int64_t at, auto... tail) {
            store(h + at, load(block.acc_row(0, r) + at, tail...) * factor, tail...);
          });
        }
      });
    };
    if (!index.index) {
      multiply(from, split_rows(from.count), [](int64_t row) { return row; });
      return y;
    }
    SortedRows sorted(index, from.count);
    multiply(sorted.gather(from), sorted.tasks, [&](int64_t at) { return sorted.order[at]; });
    return y;
  }

 private:
  static int64_t rows(const Tensor& x) {
    int64_t count = 1;
    for (int64_t d = 0; d + 1 < x.dim(); d++) count *= x.size(d);
    return count;
  }
  static int64_t check_a(const Tensor& x, const Tensor& a, const Tensor& scale) {
    check_same_dtype(a, x);
    check(x.dim() >= 1 && a.dim() == 3 && a.size(2) == x.size(x.dim() - 1),
          "a must be (adapters, rank, in_features)");
    check(scale.is_cpu() && scale.scalar_type() == ScalarType::Float && scale.dim() == 1 &&
              scale.size(0) == a.size(0),
          "scale must be float32, one value per adapter");
    return a.size(1);
  }
};

Tensor lora_shrink(const Tensor& x, const Tensor& a, const Tensor& scale,
                   const std::optional<Tensor>& index) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Shrink shrink(x, a, scale, index);
    return shrink.run<T>(x, a, Vector<float>(scale, a.size(0)).first);
  });
}

// ---- Gradients for one adapter, with dH the gradient of h: dX = s dH A, dA = s dH^T X.

template <class T>
[[gnu::noinline]] Tensor grad_input(const Tensor& x, const Matrix<float>& grad,
                                    const Matrix<T>& a, float scale) {
  Tensor y = allocate_like(x);
  parallel_for((grad.rows + BLOCK_M - 1) / BLOCK_M, BLOCK_M * a.width * a.rows,
               [&](int64_t begin, int64_t end) {
    AccTile& acc = *scratch<Scratch::GEMM_ACC, AccTile>(1);
    for (int64_t row = begin * BLOCK_M; row < std::min(end * BLOCK_M, grad.rows); row += BLOCK_M)
      for (ColumnRange columns : fixed_size_columns(a.width)) {
        int64_t rows = std::min<int64_t>(BLOCK_M, grad.rows - row);
        float* to[BLOCK_M];
        const float* h[BLOCK_M];
        for (int64_t r = 0; r < rows; r++) {
          to[r] = acc[r], h[r] = grad[row + r];
          std::fill_n(acc[r], columns.count, 0.0f);
        }
        expand<T>(to, h, rows, a.slice_columns(columns.begin, columns.count));
        for (int64_t r = 0; r < rows; r++)
          for_each_vector(columns.count, [&](int64_t at, auto... tail) {
            store(data<T>(y) + (row + r) * a.width + columns.begin + at,
                  load(acc[r] + at, tail...) * broadcast(scale), tail...);
          });
      }
  });
  return y;
}

Tensor grad_scale(const Tensor& h, const Matrix<float>& grad) {
  Tensor y = allocate(std::array<int64_t, 1>{1}, ScalarType::Float);
  double total = 0;
  for (int64_t row = 0; row < grad.rows; row++)
    for (int64_t r = 0; r < grad.width; r++)
      total += double(grad[row][r]) * data<float>(h)[row * grad.width + r];
  data<float>(y)[0] = float(total);
  return y;
}

Tensors lora_shrink_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& x, const Tensor& a,
                             const Tensor& scale, const std::optional<Tensor>& index) {
  check(needs_grad.size() == 4 && grads.size() == 1 && !index && a.dim() == 3 && a.size(0) == 1,
        "expected the gradient of one adapter");
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Shrink shrink(x, a, scale, index);
    check(grads[0].is_cpu() && grads[0].scalar_type() == ScalarType::Float &&
              same_sizes(grads[0], shrink.sizes),
          "the gradient must have the shape of the output, in float32");
    Rows<float> grad(grads[0]);
    Rows<T> rows(x), weights(a);
    float factor = Vector<float>(scale, 1)[0];
    Tensors result;
    if (needs_grad[0]) result.push_back(grad_input<T>(x, grad, weights, factor));
    if (needs_grad[1]) {
      Tensor rounded = round_columns<T>(grad, 0, shrink.rank, factor, x.scalar_type());
      result.push_back(grad_weight<T>(a, Rows<T>(rounded), rows));
    }
    if (needs_grad[2]) result.push_back(grad_scale(shrink.run<T>(x, a, nullptr), grad));
    return result;
  });
}

}  // namespace ingot::kernels

REGISTER_OP(lora_shrink)
REGISTER_BACKWARD(lora_shrink)
