// Random numbers as a function of a seed, a position and an index: Philox4x32-10 (Salmon et al. 2011).
#pragma once

#include <cstdint>

namespace ingot {

// First word for the key `seed` and the counter (position, index, 0).
inline uint32_t philox(uint64_t seed, uint64_t position, uint32_t index) {
  uint32_t a = uint32_t(position), b = uint32_t(position >> 32), c = index, d = 0;
  uint32_t key_0 = uint32_t(seed), key_1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t first = 0xD2511F53ull * a, second = 0xCD9E8D57ull * c;
    a = uint32_t(second >> 32) ^ b ^ key_0, b = uint32_t(second);
    c = uint32_t(first >> 32) ^ d ^ key_1, d = uint32_t(first);
    key_0 += 0x9E3779B9, key_1 += 0xBB67AE85;
  }
  return a;
}

// In [0, 1), with 24 bits.
inline float uniform_at(int64_t seed, int64_t position, uint32_t index = 0) {
  return float(philox(uint64_t(seed), uint64_t(position), index) >> 8) * 0x1p-24f;
}

}  // namespace ingot
