// Transposed matrices: as views, or copied.
#pragma once

#include "tensor.h"

namespace ingot {

// View of the transpose of `base`.
template <class T>
struct Transposed {
  Matrix<T> base;
  int64_t rows, width;

  explicit Transposed(const Matrix<T>& matrix) : base(matrix), rows(base.width), width(base.rows) {}
  Transposed slice_rows(int64_t begin, int64_t count) const {
    return Transposed(base.slice_columns(begin, count));
  }
  Transposed slice_columns(int64_t begin, int64_t count) const {
    return Transposed(base.slice_rows(begin, count));
  }
};

// The lanes of the first halves of two vectors in turn, or from lane `first` on.
template <int first, size_t... I>
inline Words alternate(Words a, Words b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (first + I / 2 + I % 2 * WIDTH)...);
}

// From (row, lane) to (lane, row). Each round interleaves the first half of all rows with the second.
inline void transpose(Words (&rows)[WIDTH]) {
#if defined(__AVX512F__)
  __m512i tile[WIDTH];
  std::memcpy(tile, rows, sizeof tile);
  interleave(tile);
  std::memcpy(rows, tile, sizeof tile);
#else
  constexpr auto lanes = std::make_index_sequence<WIDTH>();
  for (int round = 1; round < WIDTH; round *= 2) {
    Words shuffled[WIDTH];
    for (int i = 0; i < WIDTH / 2; i++) {
      shuffled[2 * i] = alternate<0>(rows[i], rows[i + WIDTH / 2], lanes);
      shuffled[2 * i + 1] = alternate<WIDTH / 2>(rows[i], rows[i + WIDTH / 2], lanes);
    }
    std::copy_n(shuffled, WIDTH, rows);
  }
#endif
}

#if defined(__AVX512F__)
// Two vectors of 16 elements as 16 pairs.
inline __m512i interleave_pairs(__m256i one, __m256i other) {
  __m512i low = _mm512_cvtepu16_epi32(one), high = _mm512_cvtepu16_epi32(other);
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Transpose a tile into 16 rows of 64 bytes.
inline void transpose_tile(const float* from, int64_t stride, float* to, int64_t to_stride) {
  __m512i tile[16];
  for (int i = 0; i < 16; i++) tile[i] = _mm512_loadu_si512(from + i * stride);
  interleave(tile);
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * to_stride, tile[i]);
}
inline void transpose_tile(const bf16* from, int64_t stride, bf16* to, int64_t to_stride) {
  __m512i tile[16];
  for (int i = 0; i < 16; i++) {
    auto row = [&](int r) { return _mm256_loadu_si256((const __m256i*)(from + r * stride)); };
    tile[i] = interleave_pairs(row(2 * i), row(2 * i + 1));
  }
  interleave(tile);
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * to_stride, tile[i]);
}
#endif

// Copy rows [begin, end) of the transpose; `to` is the address of its row 0.
template <class T>
void transpose_copy(const Transposed<T>& x, int64_t begin, int64_t end, T* to, int64_t stride) {
  [[maybe_unused]] constexpr int64_t TILE_K = 64 / sizeof(T), TILE_ROWS = 16;
  int64_t row = begin;
#if defined(__AVX512F__)
  for (; row + TILE_ROWS <= end; row += TILE_ROWS) {
    int64_t k = 0;
    for (; k + TILE_K <= x.width; k += TILE_K)
      transpose_tile(x.base[k] + row, x.base.stride, to + row * stride + k, stride);
    for (; k < x.width; k++)
      for (int64_t r = row; r < row + TILE_ROWS; r++) to[r * stride + k] = x.base[k][r];
  }
#endif
  for (int64_t k = 0; k < x.width; k++)
    for (int64_t r = row; r < end; r++) to[r * stride + k] = x.base[k][r];
}

// An odd number of cache lines: with a power of 2, rows that are read together would share cache
// sets.
template <class T>
inline int64_t padded_stride(int64_t width) {
  constexpr int64_t LINE = 64 / sizeof(T);
  return ((width + LINE - 1) / LINE | 1) * LINE;
}

}  // namespace ingot
