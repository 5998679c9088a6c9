// Rows of an int8 KV cache: the values of a token and head, then their scale as a float.
//
// value = int8 * scale, rounded to the dtype of the queries before anything else is computed. So
// attention over an int8 cache has the bits of attention over a cache of the rounded values.
#pragma once

#include "vector.h"

namespace ingot {

constexpr int64_t KV_SCALE_BYTES = sizeof(float);

template <class T>
inline void quantize_kv_row(const T* x, int64_t width, int8_t* to) {
  Ints largest{};  // as integers, magnitudes have the same order, and a NaN exceeds them all
  for_each_vector(width, [&](int64_t at, auto... tail) {
    Ints magnitude = (Ints)load(x + at, tail...) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  });
  int32_t bits = 0;
  for (int i = 0; i < WIDTH; i++) bits = largest[i] > bits ? largest[i] : bits;
  float magnitude = bit_cast<float>(bits);
  float scale = (magnitude < MIN_MAGNITUDE ? MIN_MAGNITUDE : magnitude) / 127.0f;
  for_each_vector(width, [&](int64_t at, auto... tail) {
    store(to + at, quantize(load(x + at, tail...), broadcast(scale)), tail...);
  });
  std::memcpy(to + width, &scale, sizeof scale);
}

template <class T>
inline void dequantize_kv_row(const int8_t* row, int64_t width, T* to) {
  float scale;
  std::memcpy(&scale, row + width, sizeof scale);
  for_each_vector(width, [&](int64_t at, auto... tail) {
    store(to + at, load(row + at, tail...) * broadcast(scale), tail...);
  });
}

}  // namespace ingot
