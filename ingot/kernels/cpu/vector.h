// Vectors of floats, in the widest registers of the tier this file is compiled for.
//
//   amx, avx512_bf16, avx512   16 floats
//   avx2                        8
//   portable                    4, by the compiler's own vector extension
//
// GCC's and clang's vector types have + - * /, comparisons and ?: per element already. What is
// missing is here: loads and stores of both dtypes, whole or in part, multiply-add, sums and
// the elementary functions. Files are compiled with -ffp-contract=off, so that a product and a
// sum are rounded as they stand, wherever the compiler inlines them; fma() is one rounding where
// the tier has it. That is part of exactness: within a tier, one expression has one result.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12's _mm512_undefined_ps()
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace ingot {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef double Doubles __attribute__((vector_size(4 * WIDTH)));  // half as many

struct bf16 {
  uint16_t bits;
};

constexpr float INF = std::numeric_limits<float>::infinity();

template <class To, class From>
inline To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

inline Floats all(float value) { return value - Floats{}; }  // x - 0 keeps every x as it is

inline float widen(float value) { return value; }
inline float widen(bf16 value) { return bits_of<float>(uint32_t(value.bits) << 16); }

// Round to nearest, ties to even; a NaN stays one.
inline bf16 narrow(float value) {
  uint32_t bits = bits_of<uint32_t>(value);
  if (value != value) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <class T>
inline T rounded(float value) {
  if constexpr (sizeof(T) == 4) return value;
  else return narrow(value);
}

inline Halves narrow(Floats values) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)values);  // flushes subnormals to zero
#elif defined(__AVX512F__)
  __m512i bits = _mm512_castps_si512((__m512)values);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask((__m512)values, (__m512)values, _CMP_UNORD_Q);
  even = _mm512_mask_or_epi32(even, nan, bits, _mm512_set1_epi32(0x400000));
  // The upper half of each word: one shuffle, where a shift and vpmovdw would be three steps.
  typedef uint16_t Upper __attribute__((vector_size(64)));
  Upper upper{};
  for (int i = 0; i < WIDTH; i++) upper[i] = 2 * i + 1;
  return (Halves)_mm512_castsi512_si256(_mm512_permutexvar_epi16((__m512i)upper, even));
#else
  Words bits = (Words)values;
  Words even = bits + 0x7fff + ((bits >> 16) & 1);
  even = (Words)(values != values ? (Ints)(bits | 0x400000) : (Ints)even);
  return __builtin_convertvector(even >> 16, Halves);
#endif
}

inline Floats widen(Halves values) {
  return (Floats)(__builtin_convertvector(values, Words) << 16);
}

// Whole vectors.
inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}
inline Floats load(const bf16* from) {
  Halves values;
  std::memcpy(&values, from, sizeof values);
  return widen(values);
}
inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }
inline void store(bf16* to, Floats values) {
  Halves narrowed = narrow(values);
  std::memcpy(to, &narrowed, sizeof narrowed);
}

// The first `count` elements, 0 < count < WIDTH; the others are 0, or not written.
inline Floats load(const float* from, int64_t count) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_loadu_ps((1u << count) - 1, from);
#else
  Floats values{};
  std::memcpy(&values, from, 4 * count);
  return values;
#endif
}
inline Floats load(const bf16* from, int64_t count) {
#if defined(__AVX512F__)
  return widen((Halves)_mm256_maskz_loadu_epi16((1u << count) - 1, from));
#else
  Halves values{};
  std::memcpy(&values, from, 2 * count);
  return widen(values);
#endif
}
inline void store(float* to, Floats values, int64_t count) { std::memcpy(to, &values, 4 * count); }
inline void store(bf16* to, Floats values, int64_t count) {
  Halves narrowed = narrow(values);
  std::memcpy(to, &narrowed, 2 * count);
}

inline Ints lanes() {
  Ints lane;
  for (int i = 0; i < WIDTH; i++) lane[i] = i;
  return lane;
}
// The first `count` lanes of one, the rest of the other.
inline Floats first(Floats values, int64_t count, Floats rest) {
  return lanes() < int(count) ? values : rest;
}
// One where the flag is set, the other elsewhere. Of a part, the other beyond it.
inline Floats where(const bool* flags, Floats set, Floats unset, int64_t count = WIDTH) {
  typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
  Bytes bytes{};
  std::memcpy(&bytes, flags, count);
  // __builtin_convertvector takes bytes one by one in gcc 12.
#if defined(__AVX512F__)
  Ints wide = (Ints)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
  Ints wide = (Ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits_of<long long>(bytes)));
#else
  Ints wide;
  for (int i = 0; i < WIDTH; i++) wide[i] = bytes[i];
#endif
  return wide != 0 ? set : unset;
}
// A bit for each lane of a comparison, the first lane's lowest.
inline uint32_t bits_set(Ints comparison) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)comparison);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)comparison);
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)comparison);
#else
  uint32_t bits = 0;
  for (int i = 0; i < WIDTH; i++) bits |= (comparison[i] & 1u) << i;
  return bits;
#endif
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Where one is NaN, the second is taken: of max(known, unknown), an unknown NaN stays.
inline Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
inline Floats min(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// Elements half the width apart are paired, then a quarter, ...: one order for every width.
template <class Fold>
inline float folded(Floats values, Fold fold) {
  float lanes[WIDTH];
  std::memcpy(lanes, &values, sizeof lanes);
  for (int half = WIDTH / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] = fold(lanes[i], lanes[i + half]);
  return lanes[0];
}
inline float sum(Floats values) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)values);
#else
  return folded(values, [](float a, float b) { return a + b; });
#endif
}
inline float largest(Floats values) {
#if defined(__AVX512F__)
  if (_mm512_cmp_ps_mask((__m512)values, (__m512)values, _CMP_UNORD_Q)) return NAN;
  return _mm512_reduce_max_ps((__m512)values);
#else
  return folded(values, [](float a, float b) { return a > b || a != a ? a : b; });
#endif
}

// Runs body(at) for every whole vector of a row, body(at, count) for the rest.
template <class Body>
inline void along(int64_t width, const Body& body) {
  int64_t at = 0;
  for (; at + WIDTH <= width; at += WIDTH) body(at);
  if (at < width) body(at, width - at);
}

// Folds a row into one vector: step(so_far, at) or step(so_far, at, count) takes in a vector of
// it, join(a, b) adds up. Four chains, so that the latency of a step does not count; lanes beyond
// the end keep what they have.
template <class Step, class Join>
inline Floats folded_row(int64_t width, Floats start, const Step& step, const Join& join) {
  Floats chain[4] = {start, start, start, start};
  int64_t at = 0;
  for (; at + 4 * WIDTH <= width; at += 4 * WIDTH)
    for (int i = 0; i < 4; i++) chain[i] = step(chain[i], at + i * WIDTH);
  for (; at + WIDTH <= width; at += WIDTH) chain[0] = step(chain[0], at);
  if (at < width) chain[1] = first(step(chain[1], at, width - at), width - at, chain[1]);
  return join(join(chain[0], chain[1]), join(chain[2], chain[3]));
}
template <class Step>
inline Floats summed_row(int64_t width, const Step& step) {
  return folded_row(width, Floats{}, step, [](Floats a, Floats b) { return a + b; });
}

#if defined(__AVX512F__)
// From (row, word) to (word, row): with 16 rows, columns become rows. Each round deals the first half
// of all words out between those of the second.
template <int ROWS>
inline void interleave(__m512i (&rows)[ROWS]) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int round = 1; round < ROWS; round *= 2) {
    __m512i dealt[ROWS];
    for (int i = 0; i < ROWS / 2; i++) {
      dealt[2 * i] = _mm512_permutex2var_epi32(rows[i], low, rows[i + ROWS / 2]);
      dealt[2 * i + 1] = _mm512_permutex2var_epi32(rows[i], high, rows[i + ROWS / 2]);
    }
    std::copy_n(dealt, ROWS, rows);
  }
}
#endif

// Coefficients below are least-maximum fits of our own; the errors are those of the polynomial.

// 2^x for x <= 0, what a softmax needs, in fewer steps: 2.0e-9 relative, and 0 below 2^-126. A
// vector with a subnormal result takes 70 ns instead of 0.5, and -inf is what masks are made of.
inline Floats exp2_of_negative(Floats x) {
  const Floats magic = all(12582912.0f);
#if defined(__AVX512F__)
  Floats clamped = x;
#else
  Floats clamped = max(all(-126.0f), x);
#endif
  Floats shifted = clamped + magic;
  Floats n = shifted - magic;
  Floats r = clamped - n;
  Floats p = all(1.5353362e-4f);
  p = fma(p, r, all(1.33988747e-3f));
  p = fma(p, r, all(9.61843736e-3f));
  p = fma(p, r, all(5.55033247e-2f));
  p = fma(p, r, all(0.240226479f));
  p = fma(p, r, all(0.693147203f));
  p = fma(p, r, all(1.0f));
#if defined(__AVX512F__)
  __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
  Floats power = (Floats)(((Ints)shifted - (Ints)magic + 127) << 23);
  return x < all(-126.0f) ? Floats{} : p * power;
#endif
}
inline Floats exp_of_negative(Floats x) { return exp2_of_negative(x * all(1.44269504f)); }

// 1 / x for normal x; twice as fast as a division where there is an estimate to refine.
inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  Floats y = (Floats)_mm512_rcp14_ps((__m512)x);
  return fma(y, fma(-x, y, all(1.0f)), y);
#else
  return 1.0f / x;
#endif
}

inline Floats sigmoid(Floats x) {
  Floats e = exp_of_negative(x > Floats{} ? -x : x);  // at most 1, and 0 where it should be
  Floats r = reciprocal(all(1.0f) + e);
  return x < Floats{} ? e * r : r;
}

// The cumulative normal distribution; 5.5e-9 absolute up to 5.4, beyond which it is 0 or 1.
inline Floats normal_cdf(Floats x) {
  Floats clamped = min(all(5.4f), max(all(-5.4f), x));
  Floats t = clamped * clamped;
  Floats p = all(2.33867961e-8f);
  p = fma(p, t, all(6.36001945e-6f));
  p = fma(p, t, all(1.64321183e-4f));
  p = fma(p, t, all(4.65084802e-3f));
  p = fma(p, t, all(3.33721752e-2f));
  p = fma(p, t, all(0.398942245f));
  Floats q = all(1.21659276e-6f);
  q = fma(q, t, all(7.24000382e-5f));
  q = fma(q, t, all(1.85897854e-3f));
  q = fma(q, t, all(2.83786572e-2f));
  q = fma(q, t, all(0.250317727f));
  q = fma(q, t, all(1.0f));
  Floats cdf = fma(clamped * p, reciprocal(q), all(0.5f));
  return x < all(-5.4f) ? Floats{} : cdf;
}

// The largest of a row, lane by lane, and the sum of e^(x - that): a row is taken in blocks that
// stay in the first cache, so it comes from memory once. A lane that saw nothing but -inf has the
// lowest float and a sum of 0.
struct Exponentials {
  static constexpr int64_t BLOCK = 64 * WIDTH;
  Floats peak = all(std::numeric_limits<float>::lowest());
  Floats total{};

  // x(at) or x(at, count) loads a vector; each(at, e^(x - peak of its block)) sees the powers.
  template <class Load, class Each>
  void take(int64_t begin, int64_t end, const Load& x, const Each& each) {
    Floats before = peak;
    peak = folded_row(end - begin, peak, [&](Floats so_far, int64_t at, auto... part) {
      return max(so_far, x(begin + at, part...));
    }, max);
    Floats part_total = summed_row(end - begin, [&](Floats so_far, int64_t at, auto... part) {
      Floats power = exp_of_negative(x(begin + at, part...) - peak);
      each(begin + at, power, part...);
      return so_far + power;
    });
    total = fma(total, exp_of_negative(before - peak), part_total);
  }
  // What brings powers of a lane's peak to those of the row's.
  Floats weights() const { return exp_of_negative(peak - all(largest(peak))); }
  float sum() const { return ingot::sum(total * weights()); }
};

inline Floats silu(Floats x) { return x * sigmoid(x); }
inline Floats gelu(Floats x) { return x * normal_cdf(x); }
inline Floats gelu_tanh(Floats x) {
  return x * sigmoid(x * fma(x * x, all(0.0713548162f), all(1.59576912f)));
}
inline Floats relu(Floats x) { return max(Floats{}, x); }

// Their derivatives. Beyond 16 those of the curved part are 0, where x^3 might overflow.
inline Floats curved(Floats x) { return min(all(16.0f), max(all(-16.0f), x)); }
inline Floats silu_slope(Floats x) {
  Floats s = sigmoid(x);
  return fma(x * s, all(1.0f) - s, s);
}
inline Floats gelu_slope(Floats x) {
  Floats c = curved(x), density = all(0.398942280f) * exp_of_negative(c * c * all(-0.5f));
  return fma(c, density, normal_cdf(x));
}
inline Floats gelu_tanh_slope(Floats x) {
  Floats c = curved(x), square = c * c;
  Floats s = sigmoid(c * fma(square, all(0.0713548162f), all(1.59576912f)));
  Floats inner = fma(square, all(3 * 0.0713548162f), all(1.59576912f));
  return fma(c * inner, s * (all(1.0f) - s), s);
}
inline Floats relu_slope(Floats x) { return x > Floats{} ? all(1.0f) : Floats{}; }

// Sine and cosine of position * frequency. The product is reduced in double: a position of 1e5
// would leave three digits of it in float. 1.8e-9 after that.
inline void turn(double position, Floats frequency, Floats& sine, Floats& cosine) {
  typedef float Part __attribute__((vector_size(2 * WIDTH)));
  typedef int64_t Longs __attribute__((vector_size(4 * WIDTH)));
  Floats r;
  Ints quadrant;
  for (int half = 0; half < 2; half++) {
    Part part;
    std::memcpy(&part, (const char*)&frequency + half * sizeof part, sizeof part);
    Doubles angle = position * __builtin_convertvector(part, Doubles);
    const double magic = 6755399441055744.0;  // 1.5 * 2^52
    Doubles shifted = angle * 0.63661977236758134 + magic;
    Doubles n = shifted - magic;
    part = __builtin_convertvector(
        (angle - n * 1.5707963267341256) - n * 6.0771005065061922e-11, Part);
    std::memcpy((char*)&r + half * sizeof part, &part, sizeof part);
    typedef int32_t Quadrants __attribute__((vector_size(2 * WIDTH)));
    Quadrants q = __builtin_convertvector((Longs)shifted & 3, Quadrants);
    std::memcpy((char*)&quadrant + half * sizeof q, &q, sizeof q);
  }
  Floats t = r * r;
  Floats s = fma(fma(all(-1.94956352e-4f), t, all(8.33197866e-3f)), t, all(-0.166666507f));
  s = fma(s * t, r, r);
  Floats c = fma(fma(all(2.44384506e-5f), t, all(-1.38873675e-3f)), t, all(4.16666469e-2f));
  c = fma(c * t, t, fma(all(-0.5f), t, all(1.0f)));
  Ints swapped = (quadrant & 1) != 0;
  Floats a = swapped ? c : s, b = swapped ? s : c;
  sine = (Floats)((Ints)a ^ ((quadrant & 2) << 30));
  cosine = (Floats)((Ints)b ^ (((quadrant + 1) & 2) << 30));
}

}  // namespace ingot
