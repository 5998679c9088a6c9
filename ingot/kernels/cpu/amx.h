// AMX: eight tile registers of 16 rows by 64 bytes, and a product of two of them.
//
//   C (16 x 16 floats) += A (16 x 32 bf16) * B (16 pairs x 16 x 2 bf16)
//
// A is rows as they lie in memory. B has pairs of k side by side, so one operand of a product has
// to be packed, the other not. An element of C depends on one row of A and one column of B alone
// and on the order of the steps along k: rows and columns may be grouped in any way.
//
// GCC's intrinsics take literal register numbers only; these take template arguments.
#pragma once

#if defined(__AMX_BF16__)
#include "turned.h"

namespace ingot {

constexpr int TILE = 16;       // rows of A, columns of B
constexpr int TILE_DEPTH = 32;  // of A's rows

template <int tile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int tile>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
// Without a place in the nearest cache: for what comes by once in a while, so that what comes by at
// once again stays there. 1.85 instead of 1.65 TFLOPS for a product out of L2.
template <int tile>
inline void tile_load_passing(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
template <int c, int a, int b>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

// Tiles of so many rows and bytes a row, for as long as this lives.
struct Tiles {
  using Eight = std::array<uint8_t, 8>;

  Tiles() : Tiles({16, 16, 16, 16, 16, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}) {}
  Tiles(Eight rows, Eight bytes) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    std::ranges::copy(rows, config.rows);
    std::ranges::copy(bytes, config.bytes);
    // Not the intrinsic: GCC 12 believes that it reads 8 bytes only, and drops the other stores.
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

// 16 rows as a left operand.
struct Panel {
  const bf16* first;
  int64_t stride;  // between rows, in bytes
};

// Which operand is not worth a place in the nearest cache.
enum class Passing { none, left, right };

// P panels by Q packed tiles: 2 x 2, 4 x 1, 1 x 4 or less. Sums are tiles 0-3, 4 and 5 hold what is
// right, 6 and 7 what is left. `columns` are those of a packed tile.
template <int P, int Q, Passing passing = Passing::none>
inline void tile_products(const Panel (&left)[P], const bf16* const (&right)[Q], int64_t steps,
                          int64_t columns) {
  for (int64_t s = 0; s < steps; s++) {
    auto load_right = [&]<int q>() {
      const bf16* from = right[q] + s * TILE_DEPTH * columns;
      if constexpr (passing == Passing::right) tile_load_passing<4 + q % 2>(from, 4 * columns);
      else tile_load<4 + q % 2>(from, 4 * columns);
    };
    auto load_left = [&]<int p>() {
      const bf16* from = left[p].first + s * TILE_DEPTH;
      if constexpr (passing == Passing::left) tile_load_passing<6 + p % 2>(from, left[p].stride);
      else tile_load<6 + p % 2>(from, left[p].stride);
    };
    load_right.template operator()<0>();
    load_left.template operator()<0>();
    tile_multiply<0, 6, 4>();
    if constexpr (Q > 1) {
      load_right.template operator()<1>();
      tile_multiply<1, 6, 5>();
    }
    if constexpr (P > 1) {
      load_left.template operator()<1>();
      tile_multiply<Q, 7, 4>();
      if constexpr (Q > 1) tile_multiply<3, 7, 5>();
    }
    if constexpr (Q > 2) {
      load_right.template operator()<2>();
      tile_multiply<2, 6, 4>();
      load_right.template operator()<3>();
      tile_multiply<3, 6, 5>();
    }
    if constexpr (P > 2) {
      load_left.template operator()<2>();
      tile_multiply<2, 6, 4>();
      load_left.template operator()<3>();
      tile_multiply<3, 7, 4>();
    }
  }
}

template <int P, int Q>
inline void store_tiles(float* const (&out)[P][Q], int64_t stride) {
  tile_store<0>(out[0][0], stride);
  if constexpr (Q > 1) tile_store<1>(out[0][1], stride);
  if constexpr (P > 1) tile_store<Q>(out[1][0], stride);
  if constexpr (P > 1 && Q > 1) tile_store<3>(out[1][1], stride);
  if constexpr (Q > 2) tile_store<2>(out[0][2], stride), tile_store<3>(out[0][3], stride);
  if constexpr (P > 2) tile_store<2>(out[2][0], stride), tile_store<3>(out[3][0], stride);
}

template <int P, int Q>
inline void load_tiles(float* const (&out)[P][Q], int64_t stride) {
  tile_load<0>(out[0][0], stride);
  if constexpr (Q > 1) tile_load<1>(out[0][1], stride);
  if constexpr (P > 1) tile_load<Q>(out[1][0], stride);
  if constexpr (P > 1 && Q > 1) tile_load<3>(out[1][1], stride);
  if constexpr (Q > 2) tile_load<2>(out[0][2], stride), tile_load<3>(out[0][3], stride);
  if constexpr (P > 2) tile_load<2>(out[2][0], stride), tile_load<3>(out[3][0], stride);
}

// The products along the whole width, added to what `out` has if they go on from there. A panel is
// read no further than its width; a packed tile ends in zeros.
template <int P, int Q, Passing passing = Passing::none>
inline void tiles(const Panel (&left)[P], const bf16* const (&right)[Q], int64_t width,
                  float* const (&out)[P][Q], int64_t stride, int64_t columns = TILE,
                  bool going_on = false) {
  if (going_on) load_tiles<P, Q>(out, stride);
  else tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  int64_t steps = width / TILE_DEPTH, rest = width % TILE_DEPTH;
  tile_products<P, Q, passing>(left, right, steps, columns);
  if (rest) {
    alignas(64) bf16 padded[P][TILE][TILE_DEPTH] = {};
    Panel ends[P];
    for (int p = 0; p < P; p++) {
      for (int r = 0; r < TILE; r++) {
        const bf16* row = left[p].first + r * (left[p].stride / int64_t(sizeof(bf16)));
        std::memcpy(padded[p][r], row + steps * TILE_DEPTH, rest * sizeof(bf16));
      }
      ends[p] = {padded[p][0], 64};
    }
    const bf16* last[Q];
    for (int q = 0; q < Q; q++) last[q] = right[q] + steps * TILE_DEPTH * columns;
    tile_products<P, Q>(ends, last, 1, columns);
  }
  store_tiles<P, Q>(out, stride);
}

inline int64_t packed_tile_size(int64_t width, int64_t columns = TILE) {
  return (width + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH * columns;
}

// Rows as a right operand of as many columns: (pair of k, row, 2), with zeros for what is missing.
template <int COLUMNS = TILE>
inline void pack_tile(const Matrix<bf16>& x, int64_t row, bf16* to) {
  for (int64_t at = 0; at < x.width; at += TILE_DEPTH, to += TILE_DEPTH * COLUMNS) {
    int64_t count = std::min<int64_t>(TILE_DEPTH, x.width - at);
    __mmask32 mask = count == TILE_DEPTH ? ~0u : (1u << count) - 1;
    __m512i words[COLUMNS] = {};
    for (int r = 0; r < std::min<int64_t>(COLUMNS, x.rows - row); r++)
      words[r] = _mm512_maskz_loadu_epi16(mask, x[row + r] + at);
    interleave(words);
    for (int r = 0; r < COLUMNS; r++) _mm512_store_si512(to + r * TILE_DEPTH, words[r]);
  }
}

// The same of a matrix that lies turned round: a pair of k is two of its rows, side by side already.
inline void pack_tile(const Turned<bf16>& x, int64_t row, bf16* to) {
  int64_t count = std::clamp<int64_t>(x.rows - row, 0, TILE);
  __mmask16 mask = (1u << count) - 1;
  for (int64_t k = 0; k < (x.width + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH; k += 2) {
    __m256i one{}, other{};
    if (k < x.width) one = _mm256_maskz_loadu_epi16(mask, x.of[k] + row);
    if (k + 1 < x.width) other = _mm256_maskz_loadu_epi16(mask, x.of[k + 1] + row);
    _mm512_store_si512(to + k * TILE, beside(one, other));
  }
}

// 16 rows without gaps, of which `count` are copied and the others 0.
inline const bf16* copy_rows(const Matrix<bf16>& x, int64_t row, int64_t count, bf16* to) {
  if (x.width == 0) return to;
  std::memset(to, 0, TILE * x.width * sizeof(bf16));
  for (int64_t r = 0; r < count; r++)
    std::memcpy(to + r * x.width, x[row + r], x.width * sizeof(bf16));
  return to;
}

}  // namespace ingot
#endif
