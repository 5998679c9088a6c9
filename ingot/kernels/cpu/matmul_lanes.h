// Matmuls of many rows, with columns of the result in the lanes of vectors.
//
// In dot_tile() a vector holds the sums of one element, which have to be added at the end. Here it
// holds one of these sums for each of WIDTH columns: lane after lane is summed over all its terms,
// with an element of x broadcast, and added to the others in the order of reduce_sum(), so that the
// bits are the same. Both operands are packed: in the order (lane, term), columns or rows last.
//
// A word is a float, or a pair of bf16.
#pragma once

#include <bit>

#include "matmul_dot.h"

namespace ingot {

constexpr int LANE_ROWS = WIDTH / 2, LANE_VECTORS = 2, LANE_COLUMNS = LANE_VECTORS * WIDTH;
constexpr int LANE_LEVELS = std::bit_width(unsigned(WIDTH));

// The lane at a position of the order in which reduce_sum() adds: bits reversed.
constexpr int lane_at(int position) {
  int lane = 0;
  for (int bit = 1; bit < WIDTH; bit *= 2) lane = 2 * lane + (position & bit ? 1 : 0);
  return lane;
}

template <class T>
constexpr int64_t WORD = sizeof(uint32_t) / sizeof(T);

template <class T>
inline int64_t lane_terms(int64_t width) {
  return padded_width<T>(width) / PACKED_STEP<T>;
}

inline Floats lane_fma(float, uint32_t a, Words b, Floats acc) {
  return fma(broadcast(bit_cast<float>(a)), (Floats)b, acc);
}
#if defined(__AVX512BF16__)
inline Floats lane_fma(bf16, uint32_t a, Words b, Floats acc) {
  return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
#endif

#if defined(__AVX512BF16__)
template <class T>
constexpr bool SUPPORTS_LANES = true;
#else
template <class T>
constexpr bool SUPPORTS_LANES = std::is_same_v<T, float>;
#endif

// Whether it is faster than the other ways: in float32 1.11 to 1.17 times with 1,024 rows. With more
// terms, the operands of a block do not fit into L2.
template <class T>
inline bool uses_lanes(int64_t rows, int64_t width) {
  return rows >= tunable(Tunable::LANE_ROWS) && width > 0 &&
         lane_terms<T>(width) <= tunable(Tunable::LANE_TERMS);
}

inline Words load_words(const void* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

// The words of a row at `at`, beyond its end 0.
template <class T>
inline Words row_words(const T* row, int64_t at, int64_t width) {
  if (at + PACKED_STEP<T> <= width) return load_words(row + at);
  Words words{};
  if (at < width) std::memcpy(&words, row + at, (width - at) * sizeof(T));
  return words;
}

// ---- W: groups of LANE_COLUMNS columns, (group, lane, term, column)

template <class T>
inline int64_t lane_panel_words(int64_t width) {
  return lane_terms<T>(width) * WIDTH * LANE_COLUMNS;
}

// Elements of memory for the packed weights of `columns` columns.
template <class T>
inline int64_t lane_weights_size(int64_t columns, int64_t width) {
  return (columns + LANE_COLUMNS - 1) / LANE_COLUMNS * lane_panel_words<T>(width) * WORD<T>;
}

template <class T>
inline void pack_lane_columns(const Matrix<T>& w, int64_t column, uint32_t* to) {
  int64_t terms = lane_terms<T>(w.width);
  const T* rows[WIDTH];  // rows beyond the end repeat the last one; their results are discarded
  for (int i = 0; i < WIDTH; i++) rows[i] = w[std::min<int64_t>(column + i, w.rows - 1)];
  for (int64_t term = 0; term < terms; term++) {
    Words tile[WIDTH];
    for (int i = 0; i < WIDTH; i++) tile[i] = row_words(rows[i], term * PACKED_STEP<T>, w.width);
    transpose(tile);
    for (int p = 0; p < WIDTH; p++)
      std::memcpy(to + (p * terms + term) * LANE_COLUMNS, &tile[lane_at(p)], sizeof(Words));
  }
}

// WIDTH columns of row k of a transposed weight.
inline Words column_words(const Transposed<float>& w, int64_t k, int64_t column, int64_t count) {
  if (k >= w.width) return Words{};
  const float* from = w.base[k] + column;
  return (Words)(count == WIDTH ? load(from) : load(from, count));
}
inline Words column_words(const Transposed<bf16>& w, int64_t k, int64_t column, int64_t count) {
  auto half = [&](int64_t row) {
    Halves halves{};
    if (row < w.width) std::memcpy(&halves, w.base[row] + column, count * sizeof(bf16));
    return __builtin_convertvector(halves, Words);
  };
  return half(2 * k) | half(2 * k + 1) << 16;
}

template <class T>
inline void pack_lane_columns(const Transposed<T>& w, int64_t column, uint32_t* to) {
  int64_t terms = lane_terms<T>(w.width);
  int64_t count = std::clamp<int64_t>(w.rows - column, 0, WIDTH);
  for (int p = 0; p < WIDTH; p++)
    for (int64_t term = 0; term < terms; term++) {
      Words words{};
      if (count) words = column_words(w, term * WIDTH + lane_at(p), column, count);
      std::memcpy(to + (p * terms + term) * LANE_COLUMNS, &words, sizeof words);
    }
}

template <class Weights, class T>
inline void pack_lane_weights(const Weights& w, T* memory) {
  auto* to = reinterpret_cast<uint32_t*>(memory);
  for (int64_t column = 0; column < w.rows; column += LANE_COLUMNS) {
    for (int v = 0; v < LANE_VECTORS; v++) pack_lane_columns(w, column + v * WIDTH, to + v * WIDTH);
    to += lane_panel_words<T>(w.width);
  }
}

// ---- x: groups of LANE_ROWS rows, (group, lane, term, row)

// Words of a lane: one more term than there are, as lanes that are a power of 2 apart would share
// cache sets.
inline int64_t lane_stride(int64_t terms) { return (terms + 1) * LANE_ROWS; }

template <class T>
inline void pack_lane_rows(const Matrix<T>& x, uint32_t* to) {
  int64_t terms = lane_terms<T>(x.width), stride = lane_stride(terms);
  for (int64_t first = 0; first < x.rows; first += WIDTH, to += 2 * WIDTH * stride) {
    const T* rows[WIDTH];
    for (int i = 0; i < WIDTH; i++) rows[i] = x[std::min<int64_t>(first + i, x.rows - 1)];
    for (int64_t term = 0; term < terms; term++) {
      Words tile[WIDTH];
      for (int i = 0; i < WIDTH; i++) tile[i] = row_words(rows[i], term * PACKED_STEP<T>, x.width);
      transpose(tile);
      for (int p = 0; p < WIDTH; p++) {
        uint32_t words[WIDTH];  // two groups of rows
        std::memcpy(words, &tile[lane_at(p)], sizeof words);
        uint32_t* at = to + p * stride + term * LANE_ROWS;
        std::memcpy(at, words, sizeof words / 2);
        std::memcpy(at + WIDTH * stride, words + LANE_ROWS, sizeof words / 2);
      }
    }
  }
}

// ---- The sums

using LaneSums = Floats[LANE_LEVELS][LANE_ROWS][LANE_VECTORS];

// Sum a lane over its terms and add the READY sums of lanes before it that now have a partner;
// level i holds the sum of 2^i lanes.
template <class T, int READY>
[[gnu::noinline]] void multiply_lane(const uint32_t* a, const uint32_t* b, int64_t terms,
                                     LaneSums& sums) {
  Floats total[LANE_ROWS][LANE_VECTORS] = {};
  const uint32_t* next = b + terms * LANE_COLUMNS;
  for (; terms > 0; terms--, a += LANE_ROWS, b += LANE_COLUMNS, next += LANE_COLUMNS) {
    __builtin_prefetch(next);
    Words right[LANE_VECTORS];
    for (int v = 0; v < LANE_VECTORS; v++) right[v] = load_words(b + v * WIDTH);
    for (int r = 0; r < LANE_ROWS; r++)
      for (int v = 0; v < LANE_VECTORS; v++)
        total[r][v] = lane_fma(T{}, a[r], right[v], total[r][v]);
  }
  for (int r = 0; r < LANE_ROWS; r++)
    for (int v = 0; v < LANE_VECTORS; v++) {
      for (int level = 0; level < READY; level++) total[r][v] = sums[level][r][v] + total[r][v];
      sums[READY][r][v] = total[r][v];
    }
}

// The matmul of at most BLOCK_M rows with packed weights.
template <class T>
[[gnu::noinline]] void multiply_lanes(const Matrix<T>& x, const T* packed, int64_t columns,
                                      AccTile& acc) {
  int64_t terms = lane_terms<T>(x.width), stride = lane_stride(terms);
  auto* a = scratch<Scratch::GEMM_PACKED_X, uint32_t>(BLOCK_M * WIDTH * (terms + 1));
  pack_lane_rows(x, a);
  auto* b = reinterpret_cast<const uint32_t*>(packed);
  for (int64_t column = 0; column < columns; column += LANE_COLUMNS) {
    for (int64_t row = 0; row < x.rows; row += LANE_ROWS) {
      LaneSums sums;
      [&]<int... P>(std::integer_sequence<int, P...>) {
        (multiply_lane<T, std::countr_one(unsigned(P))>(
             a + (row / LANE_ROWS * WIDTH + P) * stride, b + P * terms * LANE_COLUMNS, terms, sums),
         ...);
      }(std::make_integer_sequence<int, WIDTH>());
      for (int r = 0; r < LANE_ROWS; r++)
        for (int v = 0; v < LANE_VECTORS; v++)
          store(&acc[row + r][column + v * WIDTH], sums[LANE_LEVELS - 1][r][v]);
    }
    b += lane_panel_words<T>(x.width);
  }
}

}  // namespace ingot
