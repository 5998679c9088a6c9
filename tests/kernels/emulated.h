// AMX and AVX512-BF16 in software, for processors with AVX-512 but without them. Included before a
// kernel's source: see emulated.py.
//
// Sums are added in an order of their own, so bits differ from those of a real processor. Tiles that
// are used without a configuration end the process, as there.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace ingot::emulated {

// The sum of acc, the products of the even elements and those of the odd ones.
inline __m512 multiply_pairs(__m512 acc, __m512i a, __m512i b) {
  auto even = [](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
  auto odd = [](__m512i x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xffff0000)));
  };
  return _mm512_fmadd_ps(odd(a), odd(b), _mm512_fmadd_ps(even(a), even(b), acc));
}

// Rounds to nearest, ties to even; subnormals become 0.
inline __m256i round_to_bf16(__m512 values) {
  __m512i bits = _mm512_castps_si512(values);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  even = _mm512_mask_or_epi32(even, nan, bits, _mm512_set1_epi32(0x400000));
  __mmask16 subnormal = _mm512_fpclass_ps_mask(values, 0x20);
  __m512i sign = _mm512_set1_epi32(0x80000000);
  even = _mm512_mask_and_epi32(even, subnormal, bits, sign);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(even, 16));
}

struct Tile {
  alignas(64) char rows[16][64];
};
struct Tiles {
  std::array<uint8_t, 8> rows, bytes;  // rows are 0 without a configuration
  Tile tile[8];

  Tile& operator[](int index) {
    if (rows[index] == 0) std::abort();
    return tile[index];
  }
};
inline thread_local Tiles tiles{};

}  // namespace ingot::emulated

#define _mm512_dpbf16_ps(acc, a, b) \
  ingot::emulated::multiply_pairs(acc, (__m512i)(a), (__m512i)(b))
#define _mm512_cvtneps_pbh(values) ((__m256bh)ingot::emulated::round_to_bf16(values))

namespace ingot {

struct TileConfig {
  using PerTile = std::array<uint8_t, 8>;

  TileConfig() : TileConfig({16, 16, 16, 16, 16, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}) {}
  TileConfig(PerTile rows, PerTile bytes) {
    emulated::tiles.rows = rows;
    emulated::tiles.bytes = bytes;
  }
  ~TileConfig() { emulated::tiles.rows = {}; }
  TileConfig(const TileConfig&) = delete;
};

template <int tile>
inline void tile_zero() {
  emulated::tiles[tile] = {};
}
template <int tile>
inline void tile_load(const void* from, int64_t stride) {
  emulated::Tile& to = emulated::tiles[tile] = {};
  for (int r = 0; r < emulated::tiles.rows[tile]; r++)
    std::memcpy(to.rows[r], (const char*)from + r * stride, emulated::tiles.bytes[tile]);
}
template <int tile>
inline void tile_load_stream(const void* from, int64_t stride) {
  tile_load<tile>(from, stride);
}
template <int tile>
inline void tile_store(void* to, int64_t stride) {
  const emulated::Tile& from = emulated::tiles[tile];
  for (int r = 0; r < emulated::tiles.rows[tile]; r++)
    std::memcpy((char*)to + r * stride, from.rows[r], emulated::tiles.bytes[tile]);
}
template <int c, int a, int b>
inline void tile_dpbf16() {
  emulated::Tile &to = emulated::tiles[c], &left = emulated::tiles[a], &right = emulated::tiles[b];
  for (int r = 0; r < emulated::tiles.rows[c]; r++) {
    __m512 acc = _mm512_load_ps(to.rows[r]);
    for (int k = 0; k < emulated::tiles.bytes[a] / 4; k++) {
      int32_t pair;
      std::memcpy(&pair, left.rows[r] + 4 * k, sizeof pair);
      acc = emulated::multiply_pairs(acc, _mm512_set1_epi32(pair),
                                     _mm512_load_si512(right.rows[k]));
    }
    _mm512_store_ps(to.rows[r], acc);
  }
}

}  // namespace ingot
