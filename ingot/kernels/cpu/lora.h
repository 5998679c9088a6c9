// The two matmuls of a LoRA adapter of rank R, which is small:
//
//   shrink   h = x A^T          K is large: dot products, parallel along the rows of x
//   expand   y += h B           K is R: the rows of B times the elements of h, added in order
//
// Rows are computed independently of each other: the bits of a row do not depend on the adapters of
// the others.
#pragma once

#include "matmul.h"

namespace ingot {

// to[m] += sum over r, in order, of h[m][r] * b[r]. The vectors of b are loaded once for M rows, the
// elements of h once for N vectors.
template <int M, class T>
void expand_rows(float* const* to, const float* const* h, const Matrix<T>& b) {
  constexpr int N = M <= 4 ? 4 : 2;
  int64_t done = 0;
  for (; done + N * WIDTH <= b.width; done += N * WIDTH) {
    Floats acc[M][N];
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) acc[m][n] = load(to[m] + done + n * WIDTH);
    for (int64_t r = 0; r < b.rows; r++) {
      Floats values[N];
      for (int n = 0; n < N; n++) values[n] = load(b[r] + done + n * WIDTH);
      for (int m = 0; m < M; m++) {
        Floats factor = broadcast(h[m][r]);
        for (int n = 0; n < N; n++) acc[m][n] = fma(factor, values[n], acc[m][n]);
      }
    }
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) store(to[m] + done + n * WIDTH, acc[m][n]);
  }
  for_each_vector(b.width - done, [&](int64_t at, auto... tail) {
    at += done;
    Floats acc[M];
    for (int m = 0; m < M; m++) acc[m] = load(to[m] + at, tail...);
    for (int64_t r = 0; r < b.rows; r++) {
      Floats values = load(b[r] + at, tail...);
      for (int m = 0; m < M; m++) acc[m] = fma(broadcast(h[m][r]), values, acc[m]);
    }
    for (int m = 0; m < M; m++) store(to[m] + at, acc[m], tail...);
  });
}

template <class T>
void expand(float* const* to, const float* const* h, int64_t rows, const Matrix<T>& b) {
  for (; rows >= 8; rows -= 8, to += 8, h += 8) expand_rows<8>(to, h, b);
  if (rows & 4) expand_rows<4>(to, h, b), to += 4, h += 4;
  if (rows & 2) expand_rows<2>(to, h, b), to += 2, h += 2;
  if (rows & 1) expand_rows<1>(to, h, b);
}

// The adapter of each row: that of the index, -1 for none, or 0 without an index.
struct AdapterIndex {
  std::optional<Integers> index;

  AdapterIndex(const std::optional<Tensor>& given, const Tensor& x, int64_t adapters) {
    check(adapters > 0, "there must be at least one adapter");
    if (!given) return;
    check(given->dim() == x.dim() - 1, "the adapter index must have one entry per row");
    for (int64_t d = 0; d < given->dim(); d++)
      check(given->size(d) == x.size(d), "the adapter index must have one entry per row");
    index.emplace(*given);
    for (int64_t i = 0; i < index->count; i++)
      check((*index)[i] >= -1 && (*index)[i] < adapters, "adapter index out of range");
  }
  int64_t operator[](int64_t row) const { return index ? (*index)[row] : 0; }
};

// The LoRA term of a linear layer's epilogue, added to the accumulators.
template <class T>
class LoraTerm {
 public:
  // The columns of h are divided into `parts` of equal size; this term takes the given one. If B is
  // `stacked`, its columns are, too.
  [[gnu::noinline]] LoraTerm(const Tensor& h, const Tensor& b, const std::optional<Tensor>& index,
                             const Tensor& x, int64_t out_features, int64_t parts = 1,
                             int64_t part = 0, bool stacked = false)
      : h_(check_h(h, x)), b_(check_b(b, x, stacked ? parts * out_features : out_features)),
        rank_(b.size(1)), first_(part * rank_), first_column_(stacked ? part * out_features : 0),
        index_(index, x, b.size(0)) {
    check(h_.width == parts * rank_, "lora_h must have one column per rank of lora_b");
  }

  Matrix<float> h() const { return h_; }
  // The B of adapter 0.
  Matrix<T> b() const { return columns_of(0, {0, b_.width}); }
  int64_t first() const { return first_; }
  int64_t rank() const { return rank_; }

  [[gnu::noinline, gnu::noclone]] void add_to(const OutputBlock& block, int weight) const {
    float* to[BLOCK_M];
    const float* h[BLOCK_M];
    bool added[BLOCK_M] = {};
    for (int64_t r = 0; r < block.rows; r++) {
      int64_t adapter = index_[block.row + r], count = 0;
      if (added[r] || adapter < 0) continue;
      for (int64_t other = r; other < block.rows; other++) {
        if (index_[block.row + other] != adapter) continue;
        added[other] = true;
        to[count] = block.acc_row(weight, other);
        h[count++] = h_[block.row + other] + first_;
      }
      expand<T>(to, h, count, columns_of(adapter, block.columns));
    }
  }

 private:
  static const Tensor& check_h(const Tensor& h, const Tensor& x) {
    check(h.is_cpu() && h.scalar_type() == ScalarType::Float, "lora_h must be float32");
    check(h.dim() == x.dim(), "lora_h must have the rows of x");
    for (int64_t d = 0; d + 1 < x.dim(); d++)
      check(h.size(d) == x.size(d), "lora_h must have the rows of x");
    return h;
  }
  static const Tensor& check_b(const Tensor& b, const Tensor& x, int64_t out_features) {
    check_same_dtype(b, x);
    check(b.dim() == 3 && b.size(2) == out_features,
          "lora_b must be (adapters, rank, out_features)");
    return b;
  }
  Matrix<T> columns_of(int64_t adapter, ColumnRange columns) const {
    const T* first = b_[adapter * rank_] + first_column_ + columns.begin;
    return {first, rank_, columns.count, b_.stride};
  }

  Rows<float> h_;
  Rows<T> b_;
  int64_t rank_, first_, first_column_;
  AdapterIndex index_;
};

// Rows of x that are multiplied by the weight of one adapter.
struct AdapterRows {
  int64_t row, rows, adapter;
};

// Consecutive rows in tasks of whole blocks, several for each thread.
inline std::vector<AdapterRows> split_rows(int64_t rows) {
  int64_t tasks = 4 * num_threads();
  int64_t each = std::max<int64_t>((rows / tasks + BLOCK_M - 1) / BLOCK_M, 1) * BLOCK_M;
  std::vector<AdapterRows> result;
  for (int64_t row = 0; row < rows; row += each)
    result.push_back({row, std::min(each, rows - row), 0});
  return result;
}

// x W^T for weights of few rows, split along the rows of x. The epilogue gets the adapter as the
// block's group.
template <class T, class WeightOf>
void gemm_by_rows(const Matrix<T>& x, const std::vector<AdapterRows>& tasks,
                  const WeightOf& weight_of, const Epilogue& epilogue) {
  parallel_for_dynamic(tasks.size(), [&](TaskQueue& queue) {
    [[maybe_unused]] typename PackedB<T>::TileState tile_state;
    T* memory = scratch<Scratch::GEMM_PACKED_B, T>(PackedB<T>::size(BLOCK_N, x.width));
    for (int64_t i; queue.pop(i);) {
      auto [row, rows, adapter] = tasks[i];
      Matrix<T> w = weight_of(adapter);
      for (ColumnRange columns : fixed_size_columns(w.rows)) {
        PackedB<T> b(w.slice_rows(columns.begin, columns.count), memory, rows);
        for_each_block<1>(
            row, rows, columns, adapter,
            [&](int64_t at, int64_t count, int, AccTile& acc) { b.multiply(x, at, count, acc); },
            epilogue);
      }
    }
  });
}

}  // namespace ingot
