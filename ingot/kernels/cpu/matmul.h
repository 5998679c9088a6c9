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

#include <bit>

#include "amx.h"
#include "scratch.h"
#include "transpose.h"

namespace ingot {

constexpr int BLOCK_M = 32, BLOCK_N = 256;

using AccTile = float[BLOCK_M][BLOCK_N];

struct ColumnRange {
  int64_t begin, count;
};

struct OutputBlock {
  int64_t row, rows;
  ColumnRange columns;
  int64_t group;  // index of the column range
  AccTile* acc;

  float* acc_row(int weight, int64_t r) const { return acc[weight][r]; }
};

using Epilogue = FunctionRef<void(const OutputBlock&)>;

// The same number of ranges for each thread, of equal size up to the granularity of tiles.
inline std::vector<ColumnRange> balanced_columns(int64_t count) {
  constexpr int64_t UNIT = 32;
  int64_t threads = num_threads(), units = (count + UNIT - 1) / UNIT;
  int64_t each = (units + threads - 1) / threads * UNIT;
  int64_t groups = std::min(units, threads * ((each + BLOCK_N - 1) / BLOCK_N));
  std::vector<ColumnRange> ranges(groups);
  for (int64_t g = 0; g < groups; g++) {
    int64_t begin = units * g / groups * UNIT, end = units * (g + 1) / groups * UNIT;
    ranges[g] = {begin, std::min(end, count) - begin};
  }
  return ranges;
}

// Ranges of a fixed size, independent of the number of threads.
inline std::vector<ColumnRange> fixed_size_columns(int64_t count) {
  std::vector<ColumnRange> ranges;
  for (int64_t begin = 0; begin < count; begin += BLOCK_N)
    ranges.push_back({begin, std::min<int64_t>(BLOCK_N, count - begin)});
  return ranges;
}

// ---- Vectorized dot products: float32 on all tiers, bf16 on all but AMX.

// bf16 elements as two vectors, of the even and of the odd elements.
struct EvenOdd {
  Floats even, odd;
};
inline Floats load_operand(const float* from) { return load(from); }
inline Floats load_operand(const float* from, int64_t count) { return load(from, count); }

#if defined(__AVX512BF16__)
typedef __m512bh DotOperand;
inline DotOperand load_operand(const bf16* from) { return (DotOperand)_mm512_loadu_si512(from); }
inline Floats dot_fma(DotOperand a, DotOperand b, Floats acc) {
  return (Floats)_mm512_dpbf16_ps((__m512)acc, a, b);
}
#else
typedef EvenOdd DotOperand;
inline DotOperand load_operand(const bf16* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return {(Floats)(words << 16), (Floats)(words & 0xffff0000)};
}
inline Floats dot_fma(DotOperand a, DotOperand b, Floats acc) {
  return fma(a.odd, b.odd, fma(a.even, b.even, acc));
}
#endif
inline DotOperand load_operand(const bf16* from, int64_t count) {
  bf16 padded[2 * WIDTH] = {};
  std::memcpy(padded, from, 2 * count);
  return load_operand(padded);
}
inline Floats dot_fma(Floats a, Floats b, Floats acc) { return fma(a, b, acc); }

template <int M, int N>
inline void reduce_sums(const Floats (&values)[M][N], float (&out)[M][N]) {
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) out[m][n] = reduce_sum(values[m][n]);
}

#if defined(__AVX512F__)
// 16 sums at once, with the additions of reduce_sum() in the same order: a GEMM of 576 to 1536
// channels is 3 to 12 % faster than with one sum at a time.
template <int M, int N>
  requires(M * N == 16)
inline void reduce_sums(const Floats (&values)[M][N], float (&out)[M][N]) {
  __m512 eights[8], fours[4], twos[2];  // vectors of the remaining terms of several sums
  for (int i = 0; i < 8; i++) {
    int j = 8 * (i % 2) + i / 2, k = j + 4;
    auto a = (__m512)values[j / N][j % N], b = (__m512)values[k / N][k % N];
    eights[i] = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
  }
  for (int i = 0; i < 4; i++) {
    __m512 a = eights[2 * i], b = eights[2 * i + 1];
    fours[i] = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  }
  for (int i = 0; i < 2; i++) {
    __m512 a = fours[2 * i], b = fours[2 * i + 1];
    twos[i] = _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
  }
  _mm512_storeu_ps(out, _mm512_shuffle_ps(twos[0], twos[1], 0x88) +
                            _mm512_shuffle_ps(twos[0], twos[1], 0xdd));
}
#endif

// Prefetches PREFETCHED rows of W, which are `ahead` elements further on.
template <int PREFETCHED, int M, int N, class T>
inline void dot_tile(const T* const (&x)[M], const T* const (&w)[N], int64_t width, int64_t ahead,
                     float (&out)[M][N]) {
  constexpr int64_t STEP = 4 * WIDTH / sizeof(T);
  Floats total[M][N] = {};
  auto step = [&](int64_t at, auto... tail) {
    decltype(load_operand(w[0])) b[N];
    for (int n = 0; n < N; n++) b[n] = load_operand(w[n] + at, tail...);
    for (int n = 0; n < PREFETCHED; n++) __builtin_prefetch(w[n] + at + ahead);
    for (int m = 0; m < M; m++) {
      auto a = load_operand(x[m] + at, tail...);
      for (int n = 0; n < N; n++) total[m][n] = dot_fma(a, b[n], total[m][n]);
    }
  };
  int64_t at = 0;
  for (; at + STEP <= width; at += STEP) step(at);
  if (at < width) step(at, width - at);
  reduce_sums(total, out);
}

template <int M, int N>
inline void store_tile(const float (&tile)[M][N], int64_t row, int64_t rows, int64_t column,
                       int64_t columns, AccTile& acc) {
  if (row + M <= rows && column + N <= columns) {
    for (int m = 0; m < M; m++) std::memcpy(&acc[row + m][column], tile[m], sizeof tile[m]);
    return;
  }
  for (int m = 0; m < std::min<int64_t>(M, rows - row); m++)
    for (int n = 0; n < std::min<int64_t>(N, columns - column); n++)
      acc[row + m][column + n] = tile[m][n];
}

template <int M, class T>
[[gnu::noinline]] void dot_block(const Matrix<T>& x, const Matrix<T>& w, AccTile& acc) {
  constexpr int N = 4;
  for (int64_t c = 0; c < w.rows; c += N) {
    const T* b[N];  // rows beyond the end repeat the last one; their results are discarded
    for (int n = 0; n < N; n++) b[n] = w[std::min<int64_t>(c + n, w.rows - 1)];
    for (int64_t r = 0; r < x.rows; r += M) {
      const T* a[M];
      for (int m = 0; m < M; m++) a[m] = x[std::min<int64_t>(r + m, x.rows - 1)];
      float out[M][N];
      // The next rows of W: the hardware prefetches rows of a few KB too late. Half of them with each
      // tile, if there are two: all with the first took 1.25x as long.
      if (x.rows <= M) dot_tile<N>(a, b, x.width, N * w.stride, out);
      else dot_tile<N / 2>(a, b, x.width, (r == 0 ? N : N + N / 2) * w.stride, out);
      store_tile(out, r, x.rows, c, w.rows, acc);
    }
  }
}

// ---- Packed dot products: many rows of float32, or of bf16 without instructions for it.
//
// dot_block_packed() copies the operands in the order in which they are read, in float32: otherwise a
// third of the instructions would convert bf16, and rows of a few KB evict each other from L1. The
// additions are those of dot_tile(), in the same order.
//
// A panel of R rows is (step, row, element): a step is one DotOperand, of bf16 its even elements and
// then its odd ones.
template <class T>
constexpr int64_t PACKED_STEP = 4 * WIDTH / sizeof(T);

template <class T>
inline int64_t padded_width(int64_t width) {
  return (width + PACKED_STEP<T> - 1) / PACKED_STEP<T> * PACKED_STEP<T>;
}

inline void store_operand(float* to, Floats values) { store(to, values); }
inline void store_operand(float* to, const EvenOdd& values) {
  store(to, values.even);
  store(to + WIDTH, values.odd);
}

template <int R, class T>
inline void pack_panel(const Matrix<T>& from, int64_t row, float* to) {
  constexpr int64_t STEP = PACKED_STEP<T>;
  const T* rows[R];  // rows beyond the end repeat the last one; their results are discarded
  for (int r = 0; r < R; r++) rows[r] = from[std::min<int64_t>(row + r, from.rows - 1)];
  auto step = [&](int64_t at, auto... tail) {
    for (int r = 0; r < R; r++, to += STEP) store_operand(to, load_operand(rows[r] + at, tail...));
  };
  int64_t at = 0;
  for (; at + STEP <= from.width; at += STEP) step(at);
  if (at < from.width) step(at, from.width - at);
}

// Multiply a panel of M rows of x by one of N rows of W. A block along k begins with the totals of
// the one before and ends by storing them; the last one reduces them to `out`. `next` is a part of W
// to prefetch meanwhile.
template <int M, int N, class T>
inline void dot_panels(const float* a, const float* b, int64_t steps, const T* next, bool first,
                       bool last, Floats (&totals)[M][N], float (&out)[M][N]) {
  constexpr int64_t STEP = PACKED_STEP<T>;
  Floats total[M][N];  // in registers: copying all of it would put it on the stack
  for (int i = 0; i < M * N; i++) total[i / N][i % N] = Floats{};
  if (!first)
    for (int i = 0; i < M * N; i++) total[i / N][i % N] = totals[i / N][i % N];
  for (; steps > 0; steps--, a += M * STEP, b += N * STEP, next += STEP) {
    __builtin_prefetch(next);
    for (int at = 0; at < STEP; at += WIDTH) {
      Floats left[M];
      for (int m = 0; m < M; m++) left[m] = load(a + m * STEP + at);
      for (int m = 0; m < M; m++) __builtin_prefetch(a + (m + 4 * M) * STEP + at);  // L2
      for (int n = 0; n < N; n++) {
        Floats right = load(b + n * STEP + at);
#if defined(__AVX2__)
        asm("" : "+v"(right));  // otherwise GCC 12 loads it again for each row
#endif
        for (int m = 0; m < M; m++) total[m][n] = fma(left[m], right, total[m][n]);
      }
    }
  }
  if (last) return reduce_sums(total, out);
  for (int i = 0; i < M * N; i++) totals[i / N][i % N] = total[i / N][i % N];
}

template <class T>
[[gnu::noinline]] void dot_block_packed(const Matrix<T>& x, const Matrix<T>& w, AccTile& acc) {
  constexpr int M = 2, N = WIDTH == 16 ? 8 : 4;
  constexpr int64_t MAX_DEPTH = 576;  // channels of a block: the panel of W stays in L1
  int64_t blocks = (x.width + MAX_DEPTH - 1) / MAX_DEPTH;
  int64_t depth = padded_width<T>((x.width + blocks - 1) / blocks);
  int64_t panels = (x.rows + M - 1) / M;
  float* b = scratch<Scratch::GEMM_PACKED_X, float>(N * depth + BLOCK_M * padded_width<T>(x.width));
  float* a = b + N * depth;  // (block, panel, step, row, element), so that it is read in order
  for (int64_t k = 0; k < x.width; k += depth) {
    Matrix<T> part = x.slice_columns(k, std::min(depth, x.width - k));
    int64_t width = padded_width<T>(part.width);
    for (int64_t p = 0; p < panels; p++)
      pack_panel<M>(part, p * M, a + (k * panels + p * width) * M);
  }
  Floats totals[BLOCK_M / M][M][N];
  for (int64_t c = 0; c < w.rows; c += N)
    for (int64_t k = 0; k < x.width; k += depth) {
      Matrix<T> part = w.slice_columns(k, std::min(depth, x.width - k));
      pack_panel<N>(part, c, b);
      int64_t width = padded_width<T>(part.width);
      bool last = k + depth >= x.width;
      const T* next = last ? w[c + N] : w[c] + k + depth;  // the next block
      for (int64_t p = 0; p < panels; p++) {
        float out[M][N];
        dot_panels(a + (k * panels + p * width) * M, b, width / PACKED_STEP<T>,
                   next + p % N * w.stride, k == 0, last, totals[p], out);
        if (last) store_tile(out, p * M, x.rows, c, w.rows, acc);
      }
    }
}

// For each block of a column range, call compute(row, rows, weight, acc) and then the epilogue.
template <int NUM_WEIGHTS, class Compute>
void for_each_block(int64_t row, int64_t rows, ColumnRange columns, int64_t group,
                    const Compute& compute, const Epilogue& epilogue) {
  AccTile* acc = scratch<Scratch::GEMM_ACC, AccTile>(NUM_WEIGHTS);
  for (int64_t end = row + rows; row < end; row += BLOCK_M) {
    int64_t count = std::min<int64_t>(BLOCK_M, end - row);
    for (int p = 0; p < NUM_WEIGHTS; p++) compute(row, count, p, acc[p]);
    epilogue(OutputBlock{row, count, columns, group, acc});
  }
}

// The B operand for at most 256 columns, packed by one thread into `memory` of `size` elements.
template <class T>
class PackedB {
 public:
  using TileState = char;  // per-thread state during the matmul: none

  static int64_t size(int64_t columns, int64_t depth) { return columns * depth; }

  PackedB(const Matrix<T>& w, T*) : w_(w) {}
  PackedB(const Transposed<T>& w, T* memory) : w_(memory, w.rows, w.width, w.width) {
    transpose_copy(w, 0, w.rows, memory, w.width);
  }
  void multiply(const Matrix<T>& x, int64_t row, int64_t rows, AccTile& acc) const {
    constexpr int M = WIDTH == 16 ? 4 : 2;  // as many accumulators as registers hold
    Matrix<T> block = x.slice_rows(row, rows);
    if (rows == 1) return dot_block<1>(block, w_, acc);
#if defined(__AVX512BF16__)
    constexpr bool pack = std::is_same_v<T, float>;
#else
    constexpr bool pack = true;
#endif
    // With fewer rows it is slower, and with more channels the rows of x do not fit into L2.
    if constexpr (pack)
      if (rows >= 12 && x.width > 0 && x.width <= 3072) return dot_block_packed(block, w_, acc);
    dot_block<M>(block, w_, acc);
  }

 private:
  Matrix<T> w_;
};

// ---- AMX, for bf16. The number of rows decides which operand is packed; the bits are the same.

#if defined(__AMX_BF16__)

// A matrix as B operands of 16 rows each, or of the next power of 2 if it has fewer. For a single
// row this saves 6 us per call compared with padding to 16.
struct PackedTiles {
  const bf16* first;
  int64_t columns, size;

  const bf16* operator[](int64_t tile) const { return first + tile * size; }
};

inline int64_t tile_columns(int64_t rows) {
  return rows >= TILE ? TILE : std::bit_ceil(uint64_t(std::max<int64_t>(rows, 1)));
}

inline PackedTiles pack_x(const Matrix<bf16>& x) {
  int64_t columns = tile_columns(x.rows), size = packed_tile_size(x.width, columns);
  int64_t count = (x.rows + TILE - 1) / TILE;
  bf16* to = scratch<Scratch::GEMM_PACKED_X, bf16>(count * size);
  switch (columns) {
    case 1: pack_tile<1>(x, 0, to); break;
    case 2: pack_tile<2>(x, 0, to); break;
    case 4: pack_tile<4>(x, 0, to); break;
    case 8: pack_tile<8>(x, 0, to); break;
    default:
      parallel_for(count, size, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) pack_tile(x, t * TILE, to + t * size);
      });
  }
  return {to, columns, size};
}

// Few rows: the weights are the A operand, read in place. The 16 rows of a panel are not adjacent
// but `whole` apart, so that panel j + 1 continues where panel j ended and memory sees 16
// sequential streams, which the hardware prefetches best: 36-40 GB/s, compared with 27-31 for 16
// adjacent rows or packed weights (2 cores; a plain read reaches 37-42).
struct WeightPanels {
  const Matrix<bf16>& w;
  ColumnRange columns;
  int64_t whole, rest;
  const bf16* padded = nullptr;  // the last `rest` rows, padded with zeros to 16

  WeightPanels(const Matrix<bf16>& w, ColumnRange columns, int weight)
      : w(w), columns(columns), whole(columns.count / TILE), rest(columns.count % TILE) {
    if (!rest) return;
    bf16* to = scratch<Scratch::GEMM_PADDED_ROWS, bf16>(2 * TILE * w.width);
    to += weight * TILE * w.width;
    padded = copy_rows_padded(w, columns.begin + whole * TILE, rest, to);
  }
  int64_t count() const { return whole + (rest > 0); }
  Panel operator[](int64_t j) const {
    if (j == whole) return {padded, w.width * int64_t(sizeof(bf16))};
    return {w[columns.begin + j], whole * w.stride * int64_t(sizeof(bf16))};
  }
};

constexpr int MAX_PANELS = BLOCK_N / TILE + 1;
using PanelAcc = float[MAX_PANELS][2][TILE * TILE];

// Convert (panel, tile of x, row of the panel, row of x) to (row of x, column).
inline void unpack_panels(const PanelAcc& panel_acc, const WeightPanels& panels, int64_t rows,
                          int64_t columns, AccTile& acc) {
  int64_t whole = panels.whole;
  for (int64_t q = 0; q * TILE < rows; q++) {
    int64_t count = std::min<int64_t>(TILE, rows - q * TILE);
    for (int64_t at = 0; at < TILE * columns && whole; at += TILE) {
      __m512i tile[TILE] = {};
      for (int64_t j = 0; j < whole; j++) tile[j] = _mm512_load_si512(panel_acc[j][q] + at);
      interleave(tile);
      for (int64_t i = 0; i < TILE; i++) {
        int64_t of_panel = (at + i) / columns, m = (at + i) % columns;
        if (m < count)
          _mm512_mask_storeu_epi32(&acc[q * TILE + m][of_panel * whole], (1u << whole) - 1,
                                   tile[i]);
      }
    }
    for (int64_t r = 0; r < panels.rest; r++)
      for (int64_t m = 0; m < count; m++)
        acc[q * TILE + m][whole * TILE + r] = panel_acc[whole][q][r * columns + m];
  }
}

template <int Q>
void gemm_block_small_m(const WeightPanels& panels, const PackedTiles& x, int64_t row, int64_t rows,
                        AccTile& acc) {
  PanelAcc& panel_acc = *scratch<Scratch::GEMM_PANEL_ACC, PanelAcc>(1);
  int64_t j = 0;
  const bf16* b[Q];
  for (int q = 0; q < Q; q++) b[q] = x[row / TILE + q];
  auto run = [&]<int P>() {
    Panel a[P];
    float* out[P][Q];
    for (int p = 0; p < P; p++) {
      a[p] = panels[j + p];
      for (int q = 0; q < Q; q++) out[p][q] = panel_acc[j + p][q];
    }
    constexpr CacheHint hint = P == 2 ? CacheHint::STREAM_A : CacheHint::NONE;
    tile_gemm<P, Q, hint>(a, b, panels.w.width, out, 4 * x.columns, x.columns);
    j += P;
  };
  // The first row block reads the weights from memory, one panel at a time; later ones from cache.
  while (row > 0 && j + 2 <= panels.count()) run.template operator()<2>();
  while (j < panels.count()) run.template operator()<1>();
  unpack_panels(panel_acc, panels, rows, x.columns, acc);
}

template <size_t NUM_WEIGHTS>
void gemm_small_m(const Matrix<bf16>& x, const std::array<Matrix<bf16>, NUM_WEIGHTS>& weights,
                  const std::vector<ColumnRange>& groups, const Epilogue& epilogue) {
  // With at most 16 rows, each thread packs x into its own cache instead.
  std::optional<PackedTiles> shared_b;
  if (x.rows > TILE) shared_b = pack_x(x);
  parallel_for_dynamic(groups.size(), [&](TaskQueue& queue) {
    PackedTiles b = shared_b ? *shared_b : pack_x(x);
    uint8_t bytes = 4 * b.columns;
    TileConfig config({16, 16, 16, 16, 16, 16, 16, 16},
                      {bytes, bytes, bytes, bytes, bytes, bytes, 64, 64});
    for (int64_t g; queue.pop(g);) {
      std::vector<WeightPanels> panels;
      for (size_t p = 0; p < NUM_WEIGHTS; p++) panels.emplace_back(weights[p], groups[g], p);
      for_each_block<NUM_WEIGHTS>(
          0, x.rows, groups[g], g,
          [&](int64_t row, int64_t count, int p, AccTile& acc) {
            if (count <= TILE) gemm_block_small_m<1>(panels[p], b, row, count, acc);
            else gemm_block_small_m<2>(panels[p], b, row, count, acc);
          },
          epilogue);
    }
  });
}

// Many rows: x is the A operand, read in place, and the weights of a column range are packed. The
// result needs no transpose, which outweighs the packing.
template <>
class PackedB<bf16> {
 public:
  using TileState = TileConfig;

  static int64_t size(int64_t columns, int64_t depth) {
    return (columns + 2 * TILE - 1) / (2 * TILE) * 2 * packed_tile_size(depth);
  }

  template <class Weights>
  PackedB(const Weights& w, bf16* memory) : first_(memory), columns_(w.rows) {
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
    constexpr int64_t K_BLOCK = 768;
    for (int64_t k = 0; k == 0 || k < x.width; k += K_BLOCK) {
      for (int64_t c = 0; c < columns_; c += 2 * TILE) {
        const bf16* tile = first_ + c / TILE * packed_tile_size(x.width) + k * TILE;
        const bf16* b[2] = {tile, tile + packed_tile_size(x.width)};
        float* out[2][2] = {{&acc[0][c], &acc[0][c + TILE]},
                            {&acc[TILE][c], &acc[TILE][c + TILE]}};
        int64_t depth = std::min(K_BLOCK, x.width - k);
        tile_gemm<2, 2, CacheHint::STREAM_B>(a, b, depth, out, sizeof acc[0], TILE, k > 0);
      }
      for (Panel& panel : a) panel.first += K_BLOCK;
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
        b.emplace_back(weights[p].slice_rows(groups[g].begin, groups[g].count), memory + p * each);
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
  constexpr int64_t LARGE_M = 512;
  if constexpr (std::is_same_v<Weights, Matrix<bf16>>)
    if (x.rows < LARGE_M) return gemm_small_m(x, weights, groups, epilogue);
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
