// Dot products of rows: float32 on all tiers, bf16 on all but AMX.
//
// The sums of dot_tile() define the bits of a matmul on these tiers: lane i adds every WIDTH-th term,
// of bf16 every WIDTH-th pair, and reduce_sum() adds the lanes. All other paths add in this order.
#pragma once

#include "matmul_block.h"
#include "transpose.h"

namespace ingot {

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
  const int64_t max_depth = tunable(Tunable::PACK_DEPTH);  // the panel of W stays in L1
  int64_t blocks = (x.width + max_depth - 1) / max_depth;
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

}  // namespace ingot
