// The transpose of a matrix: taken where the matrix lies, or as a copy.
#pragma once

#include "tensor.h"

namespace ingot {

// Rows are the columns of another matrix.
template <class T>
struct Turned {
  Matrix<T> of;
  int64_t rows, width;

  explicit Turned(const Matrix<T>& matrix) : of(matrix), rows(of.width), width(of.rows) {}
  Turned some_rows(int64_t begin, int64_t count) const {
    return Turned(of.some_columns(begin, count));
  }
  Turned some_columns(int64_t begin, int64_t count) const {
    return Turned(of.some_rows(begin, count));
  }
};

#if defined(__AVX512F__)
// Two rows of 16 as one of 16 pairs.
inline __m512i beside(__m256i one, __m256i other) {
  __m512i low = _mm512_cvtepu16_epi32(one), high = _mm512_cvtepu16_epi32(other);
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// 16 rows, each of 64 bytes of a column.
inline void turn_square(const float* from, int64_t stride, float* to, int64_t to_stride) {
  __m512i square[16];
  for (int i = 0; i < 16; i++) square[i] = _mm512_loadu_si512(from + i * stride);
  interleave(square);
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * to_stride, square[i]);
}
inline void turn_square(const bf16* from, int64_t stride, bf16* to, int64_t to_stride) {
  __m512i square[16];
  for (int i = 0; i < 16; i++) {
    auto row = [&](int r) { return _mm256_loadu_si256((const __m256i*)(from + r * stride)); };
    square[i] = beside(row(2 * i), row(2 * i + 1));
  }
  interleave(square);
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * to_stride, square[i]);
}
#endif

// Rows [begin, end) of the transpose, copied to where its row 0 would be at `to`.
template <class T>
void copy_turned(const Turned<T>& x, int64_t begin, int64_t end, T* to, int64_t stride) {
  [[maybe_unused]] constexpr int64_t DEEP = 64 / sizeof(T), WIDE = 16;
  int64_t row = begin;
#if defined(__AVX512F__)
  for (; row + WIDE <= end; row += WIDE) {
    int64_t k = 0;
    for (; k + DEEP <= x.width; k += DEEP)
      turn_square(x.of[k] + row, x.of.stride, to + row * stride + k, stride);
    for (; k < x.width; k++)
      for (int64_t r = row; r < row + WIDE; r++) to[r * stride + k] = x.of[k][r];
  }
#endif
  for (int64_t k = 0; k < x.width; k++)
    for (int64_t r = row; r < end; r++) to[r * stride + k] = x.of[k][r];
}

// Not a power of 2, or rows that are taken together would have the same few places in a cache.
template <class T>
inline int64_t odd_stride(int64_t width) {
  constexpr int64_t LINE = 64 / sizeof(T);
  return ((width + LINE - 1) / LINE | 1) * LINE;
}

}  // namespace ingot
