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
#include <cstdint>
#include <cstring>

#include <immintrin.h>

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
template <int tile>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
template <int c, int a, int b>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

// All tiles whole, for as long as this lives.
struct Tiles {
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    // Not the intrinsic: GCC 12 believes that it reads 8 bytes only, and drops the other stores.
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

}  // namespace ingot
#endif
