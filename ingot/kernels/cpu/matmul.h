// GEMM with float32 accumulation and an epilogue, used by `linear`, the losses and the gradients.
//
//   gemm(x, {w}, balanced_columns(n), epilogue)
//
// computes x W^T in blocks of at most 32 rows by 256 columns and passes each block, row-major in
// float32, to epilogue(block). With two weights it computes two GEMMs of one x. A weight may be a
// transposed view: dY W is gemm(dY, {Transposed(W)}, ...).
//
// The GEMM is ours because it has to be batch-invariant: an element is the dot product of one row
// of x and one row of W in a fixed order. Work is split along rows and columns, never along k.
//
// No packed copy of the weights is kept, so there is nothing to update when training changes them.
#pragma once

#include "matmul_amx.h"
#include "matmul_lanes.h"

namespace ingot {

// The B operand for at most 256 columns, packed by one thread into `memory` of `size` elements; `rows`
// is the number of rows of x that it will be multiplied by.
template <class T>
class PackedB {
 public:
  using TileState = char;  // per-thread state during the matmul: none

  static int64_t size(int64_t columns, int64_t depth) {
    return std::max(columns * depth, lane_weights_size<T>(columns, depth));
  }

  PackedB(const Matrix<T>& w, T* memory, int64_t rows) : w_(w) { pack_lanes(w, memory, rows); }
  PackedB(const Transposed<T>& w, T* memory, int64_t rows)
      : w_(memory, w.rows, w.width, w.width) {
    if (!pack_lanes(w, memory, rows)) transpose_copy(w, 0, w.rows, memory, w.width);
  }
  void multiply(const Matrix<T>& x, int64_t row, int64_t rows, AccTile& acc) const {
    constexpr int M = WIDTH == 16 ? 4 : 2;  // as many accumulators as registers hold
    Matrix<T> block = x.slice_rows(row, rows);
    if constexpr (SUPPORTS_LANES<T>)
      if (lanes_) return multiply_lanes(block, lanes_, w_.rows, acc);
    if (rows == 1) return dot_block<1>(block, w_, acc);
#if defined(__AVX512BF16__)
    constexpr bool pack = std::is_same_v<T, float>;
#else
    constexpr bool pack = true;
#endif
    // With fewer rows it is slower, and with more channels the rows of x do not fit into L2.
    if constexpr (pack)
      if (rows >= tunable(Tunable::PACK_ROWS) && x.width > 0 &&
          x.width <= tunable(Tunable::PACK_CHANNELS))
        return dot_block_packed(block, w_, acc);
    dot_block<M>(block, w_, acc);
  }

 private:
  template <class Weights>
  bool pack_lanes(const Weights& w, T* memory, int64_t rows) {
    if constexpr (SUPPORTS_LANES<T>)
      if (uses_lanes<T>(rows, w.width)) pack_lane_weights(w, memory), lanes_ = memory;
    return lanes_;
  }

  Matrix<T> w_;
  const T* lanes_ = nullptr;
};

#if defined(__AMX_BF16__)
// AMX with many rows: x is the A operand, read in place, and the weights of a column range are packed. The
// result needs no transpose, which outweighs the packing.
template <>
class PackedB<bf16> {
 public:
  using TileState = TileConfig;

  static int64_t size(int64_t columns, int64_t depth) {
    return (columns + 2 * TILE - 1) / (2 * TILE) * 2 * packed_tile_size(depth);
  }

  template <class Weights>
  PackedB(const Weights& w, bf16* memory, int64_t) : first_(memory), columns_(w.rows) {
    for (int64_t c = 0; c < columns_; c += 2 * TILE)
      for (int64_t half = c; half <= c + TILE; half += TILE)
        pack_tile(w, half, memory + half / TILE * packed_tile_size(w.width));
  }

  void multiply(const Matrix<bf16>& x, int64_t row, int64_t rows, AccTile& acc) const {
    Panel a[2];
    for (int p = 0; p < 2; p++) {
      int64_t first = row + p * TILE, count = std::clamp<int64_t>(rows - p * TILE, 0, TILE);
      a[p] = {x[first], x.stride * int64_t(sizeof(bf16))};
      if (count == TILE) continue;
      bf16* to = scratch<Scratch::GEMM_PADDED_ROWS, bf16>(2 * TILE * x.width) + p * TILE * x.width;
      a[p] = {copy_rows_padded(x, first, count, to), x.width * int64_t(sizeof(bf16))};
    }
    // Blocked along k so that x stays in L1: 1.1x faster.
    const int64_t block_depth = tunable(Tunable::AMX_DEPTH);
    for (int64_t k = 0; k == 0 || k < x.width; k += block_depth) {
      for (int64_t c = 0; c < columns_; c += 2 * TILE) {
        const bf16* tile = first_ + c / TILE * packed_tile_size(x.width) + k * TILE;
        const bf16* b[2] = {tile, tile + packed_tile_size(x.width)};
        float* out[2][2] = {{&acc[0][c], &acc[0][c + TILE]},
                            {&acc[TILE][c], &acc[TILE][c + TILE]}};
        int64_t depth = std::min(block_depth, x.width - k);
        tile_gemm<2, 2, CacheHint::STREAM_B>(a, b, depth, out, sizeof acc[0], TILE, k > 0);
      }
      for (Panel& panel : a) panel.first += block_depth;
    }
  }

 private:
  const bf16* first_;
  int64_t columns_;
};
#endif

template <class T, class Weights, size_t NUM_WEIGHTS>
void gemm_large_m(const Matrix<T>& x, const std::array<Weights, NUM_WEIGHTS>& weights,
                  const std::vector<ColumnRange>& groups, const Epilogue& epilogue) {
  parallel_for_dynamic(groups.size(), [&](TaskQueue& queue) {
    [[maybe_unused]] typename PackedB<T>::TileState tile_state;
    int64_t each = PackedB<T>::size(BLOCK_N, x.width);
    T* memory = scratch<Scratch::GEMM_PACKED_B, T>(NUM_WEIGHTS * each);
    for (int64_t g; queue.pop(g);) {
      std::vector<PackedB<T>> b;
      for (size_t p = 0; p < NUM_WEIGHTS; p++)
        b.emplace_back(weights[p].slice_rows(groups[g].begin, groups[g].count), memory + p * each,
                       x.rows);
      for_each_block<NUM_WEIGHTS>(
          0, x.rows, groups[g], g,
          [&](int64_t row, int64_t rows, int p, AccTile& acc) {
            b[p].multiply(x, row, rows, acc);
          },
          epilogue);
    }
  });
}

template <class T, class Weights, size_t NUM_WEIGHTS>
void gemm(const Matrix<T>& x, const std::array<Weights, NUM_WEIGHTS>& weights,
          const std::vector<ColumnRange>& groups, const Epilogue& epilogue) {
  if (x.rows == 0) return;
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<Weights, Matrix<bf16>>)
    if (x.rows < tunable(Tunable::AMX_ROWS)) return gemm_small_m(x, weights, groups, epilogue);
#endif
  gemm_large_m(x, weights, groups, epilogue);
}

// Operands of one term of gemm_sum().
template <class T>
struct GemmOperands {
  Matrix<T> x;
  Transposed<T> w;
};

// Receives some columns of a row.
using RowStore = FunctionRef<void(int64_t row, ColumnRange columns, const float* values)>;

// Pass the sum of all x W^T to `store`. Terms with a large k are accumulated in float32 in chunks
// of 3072, so that the packed operand stays in L2.
template <class T>
[[gnu::noinline]] void gemm_sum(const std::vector<GemmOperands<T>>& all, const RowStore& store) {
  constexpr int64_t K_CHUNK = 3072;
  std::vector<GemmOperands<T>> parts;
  for (const GemmOperands<T>& each : all)
    for (int64_t k = 0; k == 0 || k < each.x.width; k += K_CHUNK) {
      int64_t count = std::min(K_CHUNK, each.x.width - k);
      parts.push_back({each.x.slice_columns(k, count), each.w.slice_columns(k, count)});
    }
  int64_t rows = all[0].x.rows, columns = all[0].w.rows;
  bool several = parts.size() > 1;
  float* sums = several ? scratch<Scratch::GEMM_SUM, float>(rows * columns) : nullptr;
  for (size_t i = 0; i < parts.size(); i++) {
    std::array<Transposed<T>, 1> weights{parts[i].w};
    gemm(parts[i].x, weights, balanced_columns(columns), [&](const OutputBlock& block) {
      for (int64_t r = 0; r < block.rows; r++) {
        int64_t row = block.row + r;
        float *acc = block.acc_row(0, r), *sum = nullptr;
        if (several) sum = sums + row * columns + block.columns.begin;
        if (i > 0)
          for_each_vector(block.columns.count, [&](int64_t at, auto... tail) {
            ingot::store(acc + at, load(acc + at, tail...) + load(sum + at, tail...), tail...);
          });
        if (i + 1 < parts.size()) std::copy_n(acc, block.columns.count, sum);
        else store(row, block.columns, acc);
      }
    });
  }
}

// Copy of the transpose in scratch memory, valid until the next call with the same slot.
template <Scratch slot, class T>
Matrix<T> parallel_transpose_copy(const Transposed<T>& x) {
  constexpr int64_t STRIP = 64;
  int64_t stride = padded_stride<T>(x.width), strips = (x.rows + STRIP - 1) / STRIP;
  T* to = scratch<slot, T>(x.rows * stride);
  parallel_for(strips, STRIP * x.width, [&](int64_t begin, int64_t end) {
    transpose_copy(x, begin * STRIP, std::min(end * STRIP, x.rows), to, stride);
  });
  return {to, x.rows, x.width, stride};
}

}  // namespace ingot
