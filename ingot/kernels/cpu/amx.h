// AMX: eight tile registers of 16 rows by 64 bytes, and a matmul of two of them.
//
//   C (16 x 16 floats) += A (16 x 32 bf16) * B (16 pairs x 16 x 2 bf16)
//
// A is row-major as in memory. B has pairs of k interleaved, so that one operand of a matmul has to
// be packed and the other does not. An element of C depends only on one row of A, one column of B
// and the order of the steps along k: any grouping of rows and columns gives the same bits.
//
// GCC's intrinsics take literal register numbers only; these take template arguments.
#pragma once

#if defined(__AMX_BF16__)
#include "transpose.h"

namespace ingot {

constexpr int TILE = 16;       // rows of A, columns of B
constexpr int TILE_DEPTH = 32;  // elements of A's rows

#if !defined(INGOT_EMULATED)  // see tests/kernels/emulated.h
template <int tile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int tile>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
// tileloaddt1, a non-temporal hint: the operand that is reused later bypasses L1, so that the one
// that is reused at once stays there. 1.85 instead of 1.65 TFLOPS for a matmul from L2.
template <int tile>
inline void tile_load_stream(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
template <int c, int a, int b>
inline void tile_dpbf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

// Configures the tiles (rows, and bytes per row) during its lifetime.
struct TileConfig {
  using PerTile = std::array<uint8_t, 8>;

  TileConfig() : TileConfig({16, 16, 16, 16, 16, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}) {}
  TileConfig(PerTile rows, PerTile bytes) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    std::ranges::copy(rows, config.rows);
    std::ranges::copy(bytes, config.bytes);
    // Not the intrinsic: GCC 12 assumes that it reads 8 bytes only, and drops the other stores.
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileConfig() { _tile_release(); }
  TileConfig(const TileConfig&) = delete;
};
#endif

// 16 rows, the A operand.
struct Panel {
  const bf16* first;
  int64_t stride;  // between rows, in bytes
};

// The operand that is loaded with tile_load_stream.
enum class CacheHint { NONE, STREAM_A, STREAM_B };

// P panels by Q packed tiles: 2 x 2, 4 x 1, 1 x 4 or fewer. Tiles 0-3 accumulate, 4 and 5 hold B, 6
// and 7 hold A. `columns` is the number of columns of a packed tile.
template <int P, int Q, CacheHint hint = CacheHint::NONE>
inline void tile_gemm_steps(const Panel (&a)[P], const bf16* const (&b)[Q], int64_t steps,
                            int64_t columns) {
  for (int64_t s = 0; s < steps; s++) {
    auto load_b = [&]<int q>() {
      const bf16* from = b[q] + s * TILE_DEPTH * columns;
      if constexpr (hint == CacheHint::STREAM_B) tile_load_stream<4 + q % 2>(from, 4 * columns);
      else tile_load<4 + q % 2>(from, 4 * columns);
    };
    auto load_a = [&]<int p>() {
      const bf16* from = a[p].first + s * TILE_DEPTH;
      if constexpr (hint == CacheHint::STREAM_A) tile_load_stream<6 + p % 2>(from, a[p].stride);
      else tile_load<6 + p % 2>(from, a[p].stride);
    };
    load_b.template operator()<0>();
    load_a.template operator()<0>();
    tile_dpbf16<0, 6, 4>();
    if constexpr (Q > 1) {
      load_b.template operator()<1>();
      tile_dpbf16<1, 6, 5>();
    }
    if constexpr (P > 1) {
      load_a.template operator()<1>();
      tile_dpbf16<Q, 7, 4>();
      if constexpr (Q > 1) tile_dpbf16<3, 7, 5>();
    }
    if constexpr (Q > 2) {
      load_b.template operator()<2>();
      tile_dpbf16<2, 6, 4>();
      load_b.template operator()<3>();
      tile_dpbf16<3, 6, 5>();
    }
    if constexpr (P > 2) {
      load_a.template operator()<2>();
      tile_dpbf16<2, 6, 4>();
      load_a.template operator()<3>();
      tile_dpbf16<3, 7, 4>();
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

// Matmul over all of `width`, added to `out` if `accumulate`. A panel is not read beyond its width;
// a packed tile is padded with zeros.
template <int P, int Q, CacheHint hint = CacheHint::NONE>
inline void tile_gemm(const Panel (&a)[P], const bf16* const (&b)[Q], int64_t width,
                      float* const (&out)[P][Q], int64_t stride, int64_t columns = TILE,
                      bool accumulate = false) {
  if (accumulate) load_tiles<P, Q>(out, stride);
  else tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  int64_t steps = width / TILE_DEPTH, rest = width % TILE_DEPTH;
  tile_gemm_steps<P, Q, hint>(a, b, steps, columns);
  if (rest) {
    alignas(64) bf16 padded[P][TILE][TILE_DEPTH] = {};
    Panel tails[P];
    for (int p = 0; p < P; p++) {
      for (int r = 0; r < TILE; r++) {
        const bf16* row = a[p].first + r * (a[p].stride / int64_t(sizeof(bf16)));
        std::memcpy(padded[p][r], row + steps * TILE_DEPTH, rest * sizeof(bf16));
      }
      tails[p] = {padded[p][0], 64};
    }
    const bf16* last[Q];
    for (int q = 0; q < Q; q++) last[q] = b[q] + steps * TILE_DEPTH * columns;
    tile_gemm_steps<P, Q>(tails, last, 1, columns);
  }
  store_tiles<P, Q>(out, stride);
}

inline int64_t packed_tile_size(int64_t width, int64_t columns = TILE) {
  return (width + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH * columns;
}

// Pack rows as a B operand with one column per row: (pair of k, row, 2), padded with zeros.
template <int COLUMNS = TILE>
inline void pack_tile(const Matrix<bf16>& x, int64_t row, bf16* to) {
  for (int64_t at = 0; at < x.width; at += TILE_DEPTH, to += TILE_DEPTH * COLUMNS) {
    int64_t count = std::min<int64_t>(TILE_DEPTH, x.width - at);
    __mmask32 mask = count == TILE_DEPTH ? ~0u : (1u << count) - 1;
    __m512i pairs[COLUMNS] = {};
    for (int r = 0; r < std::min<int64_t>(COLUMNS, x.rows - row); r++)
      pairs[r] = _mm512_maskz_loadu_epi16(mask, x[row + r] + at);
    interleave(pairs);
    for (int r = 0; r < COLUMNS; r++) _mm512_store_si512(to + r * TILE_DEPTH, pairs[r]);
  }
}

// The same for a transposed matrix: a pair of k is two adjacent rows of its base.
inline void pack_tile(const Transposed<bf16>& x, int64_t row, bf16* to) {
  int64_t count = std::clamp<int64_t>(x.rows - row, 0, TILE);
  __mmask16 mask = (1u << count) - 1;
  for (int64_t k = 0; k < (x.width + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH; k += 2) {
    __m256i one{}, other{};
    if (k < x.width) one = _mm256_maskz_loadu_epi16(mask, x.base[k] + row);
    if (k + 1 < x.width) other = _mm256_maskz_loadu_epi16(mask, x.base[k + 1] + row);
    _mm512_store_si512(to + k * TILE, interleave_pairs(one, other));
  }
}

// Copy `count` rows without gaps, padded with zeros to 16.
inline const bf16* copy_rows_padded(const Matrix<bf16>& x, int64_t row, int64_t count, bf16* to) {
  if (x.width == 0) return to;
  std::memset(to, 0, TILE * x.width * sizeof(bf16));
  for (int64_t r = 0; r < count; r++)
    std::memcpy(to + r * x.width, x[row + r], x.width * sizeof(bf16));
  return to;
}

}  // namespace ingot
#endif
