// Vectors of floats in the widest registers of the ISA tier this file is compiled for.
//
//   amx, avx512*   16 floats
//   avx2            8
//   portable        4, with the compiler's vector extension only
//
// GCC's and clang's vector types have elementwise + - * /, comparisons and ?:. This file adds loads
// and stores of both dtypes, full and partial, fma, reductions and elementary functions. All files
// are compiled with -ffp-contract=off, so that a multiplication and an addition are rounded
// separately wherever the compiler inlines them; fma() rounds once where the tier has it. Batch
// invariance depends on this: within a tier, an expression has one result.
#pragma once

#include <algorithm>
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
typedef double Doubles __attribute__((vector_size(4 * WIDTH)));  // half as many lanes

struct bf16 {
  uint16_t bits;
};

constexpr float INF = std::numeric_limits<float>::infinity();

template <class To, class From>
inline To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

// All lanes equal to `value`: x - 0 is x for every x, also for -0.
inline Floats broadcast(float value) { return value - Floats{}; }

inline float widen(float value) { return value; }
inline float widen(bf16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

// Round to nearest, ties to even; a NaN stays a NaN.
inline bf16 narrow(float value) {
  uint32_t bits = bit_cast<uint32_t>(value);
  if (value != value) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <class T>
inline T round_to(float value) {
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
  // The upper half of each word in one shuffle; a shift and vpmovdw would be three instructions.
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

// GCC 12's __builtin_convertvector takes five instructions instead of two.
inline Floats widen(Halves values) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)values), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)values), 16);
#else
  return (Floats)(__builtin_convertvector(values, Words) << 16);
#endif
}

// Full vectors.
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
inline Floats load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  Floats values;
  for (int i = 0; i < WIDTH; i++) values[i] = from[i];
  return values;
#endif
}
inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }
inline void store(bf16* to, Floats values) {
  Halves narrowed = narrow(values);
  std::memcpy(to, &narrowed, sizeof narrowed);
}

// The first `count` elements, 0 < count < WIDTH; the others are loaded as 0 and not stored.
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
inline Floats load(const int8_t* from, int64_t count) {
  int8_t bytes[WIDTH] = {};
  std::memcpy(bytes, from, count);
  return load(bytes);
}
inline void store(float* to, Floats values, int64_t count) { std::memcpy(to, &values, 4 * count); }
inline void store(bf16* to, Floats values, int64_t count) {
  Halves narrowed = narrow(values);
  std::memcpy(to, &narrowed, 2 * count);
}

// Integers from -128 to 127.
inline void store(int8_t* to, Ints values) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)values));
#else
  for (int i = 0; i < WIDTH; i++) to[i] = int8_t(values[i]);
#endif
}
inline void store(int8_t* to, Ints values, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] = int8_t(values[i]);
}

inline Ints lane_indices() {
  Ints lane;
  for (int i = 0; i < WIDTH; i++) lane[i] = i;
  return lane;
}
// The first `count` lanes of `values`, the others of `rest`.
inline Floats blend_first(Floats values, int64_t count, Floats rest) {
  return lane_indices() < int(count) ? values : rest;
}
// `set` where the flag is true, `unset` elsewhere and beyond `count`.
inline Floats where(const bool* flags, Floats set, Floats unset, int64_t count = WIDTH) {
  typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
  Bytes bytes{};
  std::memcpy(&bytes, flags, count);
  // GCC 12's __builtin_convertvector converts bytes one by one.
#if defined(__AVX512F__)
  Ints wide = (Ints)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
  Ints wide = (Ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bit_cast<long long>(bytes)));
#else
  Ints wide;
  for (int i = 0; i < WIDTH; i++) wide[i] = bytes[i];
#endif
  return wide != 0 ? set : unset;
}
// One bit per lane of a comparison; lane 0 is the lowest bit.
inline uint32_t movemask(Ints comparison) {
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

// If either is NaN, the second is returned: max(acc, x) propagates a NaN in x.
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

// While it is alive, this thread takes subnormal numbers for 0, as AMX does. An instruction that
// reads or writes one takes 150 cycles: without this, the gradient of attention with probabilities
// that small took up to 22 times as long.
class FlushSubnormals {
 public:
  FlushSubnormals(const FlushSubnormals&) = delete;
#if defined(__SSE2__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FlushSubnormals() {}
#endif
};

// Pairwise reduction of elements half the width apart, then a quarter, ...: a fixed order per
// width.
template <class Combine>
inline float reduce(Floats values, Combine combine) {
  float lanes[WIDTH];
  std::memcpy(lanes, &values, sizeof lanes);
  for (int half = WIDTH / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] = combine(lanes[i], lanes[i + half]);
  return lanes[0];
}
inline float reduce_sum(Floats values) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)values);
#else
  return reduce(values, [](float a, float b) { return a + b; });
#endif
}
inline float reduce_max(Floats values) {
#if defined(__AVX512F__)
  if (_mm512_cmp_ps_mask((__m512)values, (__m512)values, _CMP_UNORD_Q)) return NAN;
  return _mm512_reduce_max_ps((__m512)values);
#else
  return reduce(values, [](float a, float b) { return a > b || a != a ? a : b; });
#endif
}

// Rows that are quantized to int8 have at least this magnitude, so that their scale is a normal
// number: as in ingot.ops.codec.
constexpr float MIN_MAGNITUDE = 0x1p-100f;

// round(x / scale), ties to even; adding and subtracting 1.5 * 2^23 rounds to an integer.
inline Ints quantize(Floats x, Floats scale) {
  const Floats magic = broadcast(12582912.0f);
  return (Ints)(x / scale + magic) - (Ints)magic;
}

// Run body(at) for every full vector of a row, body(at, count) for the tail.
template <class Body>
inline void for_each_vector(int64_t width, const Body& body) {
  int64_t at = 0;
  for (; at + WIDTH <= width; at += WIDTH) body(at);
  if (at < width) body(at, width - at);
}

// Reduce a row to one vector: step(acc, at) or step(acc, at, count) adds a vector of the row,
// combine(a, b) merges accumulators. Four independent accumulators hide the latency of a step; in
// the tail, lanes beyond the end keep their value.
template <class Step, class Combine>
inline Floats reduce_row(int64_t width, Floats init, const Step& step, const Combine& combine) {
  Floats chain[4] = {init, init, init, init};
  int64_t at = 0;
  for (; at + 4 * WIDTH <= width; at += 4 * WIDTH)
    for (int i = 0; i < 4; i++) chain[i] = step(chain[i], at + i * WIDTH);
  for (; at + WIDTH <= width; at += WIDTH) chain[0] = step(chain[0], at);
  if (at < width) chain[1] = blend_first(step(chain[1], at, width - at), width - at, chain[1]);
  return combine(combine(chain[0], chain[1]), combine(chain[2], chain[3]));
}
template <class Step>
inline Floats sum_row(int64_t width, const Step& step) {
  return reduce_row(width, Floats{}, step, [](Floats a, Floats b) { return a + b; });
}

#if defined(__AVX512F__)
// From (row, word) to (word, row); with 16 rows this is a transpose. Each round interleaves the
// first half of all words with the second.
template <int ROWS>
inline void interleave(__m512i (&rows)[ROWS]) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int round = 1; round < ROWS; round *= 2) {
    __m512i shuffled[ROWS];
    for (int i = 0; i < ROWS / 2; i++) {
      shuffled[2 * i] = _mm512_permutex2var_epi32(rows[i], low, rows[i + ROWS / 2]);
      shuffled[2 * i + 1] = _mm512_permutex2var_epi32(rows[i], high, rows[i + ROWS / 2]);
    }
    std::copy_n(shuffled, ROWS, rows);
  }
}
#endif

// Coefficients below are minimax fits; errors are those of the polynomial without rounding.

// 2^x for x <= 0, as a softmax needs it: relative error 2.0e-9, and 0 below 2^-126. Subnormal
// results are flushed because such a vector takes 70 ns instead of 0.5; -inf (masked) gives 0.
inline Floats exp2_nonpositive(Floats x) {
  const Floats magic = broadcast(12582912.0f);
#if defined(__AVX512F__)
  Floats clamped = x;
#else
  Floats clamped = max(broadcast(-126.0f), x);
#endif
  Floats shifted = clamped + magic;
  Floats n = shifted - magic;
  Floats r = clamped - n;
  Floats p = broadcast(1.5353362e-4f);
  p = fma(p, r, broadcast(1.33988747e-3f));
  p = fma(p, r, broadcast(9.61843736e-3f));
  p = fma(p, r, broadcast(5.55033247e-2f));
  p = fma(p, r, broadcast(0.240226479f));
  p = fma(p, r, broadcast(0.693147203f));
  p = fma(p, r, broadcast(1.0f));
#if defined(__AVX512F__)
  __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
  Floats exps = (Floats)(((Ints)shifted - (Ints)magic + 127) << 23);
  return x < broadcast(-126.0f) ? Floats{} : p * exps;
#endif
}
inline Floats exp_nonpositive(Floats x) { return exp2_nonpositive(x * broadcast(1.44269504f)); }

// 1 / x for normal x. With AVX-512 a refined estimate, twice as fast as a division.
inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  Floats y = (Floats)_mm512_rcp14_ps((__m512)x);
  return fma(y, fma(-x, y, broadcast(1.0f)), y);
#else
  return 1.0f / x;
#endif
}

inline Floats sigmoid(Floats x) {
  Floats e = exp_nonpositive(x > Floats{} ? -x : x);  // at most 1
  Floats r = reciprocal(broadcast(1.0f) + e);
  return x < Floats{} ? e * r : r;
}

// sigmoid(x) and 1 - sigmoid(x), each with a small relative error.
struct SigmoidPair {
  Floats value, rest;
};
inline SigmoidPair sigmoid_pair(Floats x) {
  Floats e = exp_nonpositive(x > Floats{} ? -x : x);
  Floats r = reciprocal(broadcast(1.0f) + e);
  Floats rest = e * r;
  return {x < Floats{} ? rest : r, x < Floats{} ? r : rest};
}

// Hyperbolic tangent: near 0 an odd polynomial, relative error 1.0e-9, as 1 - e would cancel.
inline Floats tanh(Floats x) {
  Floats magnitude = max(x, -x), t = x * x;
  Floats e = exp_nonpositive(broadcast(-2.0f) * magnitude);
  Floats large = (broadcast(1.0f) - e) * reciprocal(broadcast(1.0f) + e);
  Floats p = broadcast(-6.27423291e-3f);
  p = fma(p, t, broadcast(2.10716740e-2f));
  p = fma(p, t, broadcast(-5.38523085e-2f));
  p = fma(p, t, broadcast(0.133325861f));
  p = fma(p, t, broadcast(-0.333333176f));
  Floats small = fma(x * t, p, x);
  return magnitude < broadcast(0.55f) ? small : x < Floats{} ? -large : large;
}

// Cumulative normal distribution: absolute error 5.5e-9 for |x| <= 5.4, 0 or 1 beyond.
inline Floats normal_cdf(Floats x) {
  Floats clamped = min(broadcast(5.4f), max(broadcast(-5.4f), x));
  Floats t = clamped * clamped;
  Floats p = broadcast(2.33867961e-8f);
  p = fma(p, t, broadcast(6.36001945e-6f));
  p = fma(p, t, broadcast(1.64321183e-4f));
  p = fma(p, t, broadcast(4.65084802e-3f));
  p = fma(p, t, broadcast(3.33721752e-2f));
  p = fma(p, t, broadcast(0.398942245f));
  Floats q = broadcast(1.21659276e-6f);
  q = fma(q, t, broadcast(7.24000382e-5f));
  q = fma(q, t, broadcast(1.85897854e-3f));
  q = fma(q, t, broadcast(2.83786572e-2f));
  q = fma(q, t, broadcast(0.250317727f));
  q = fma(q, t, broadcast(1.0f));
  Floats cdf = fma(clamped * p, reciprocal(q), broadcast(0.5f));
  return x < broadcast(-5.4f) ? Floats{} : cdf;
}

// Online softmax, per lane: the running max of a row and the sum of e^(x - max). A row is processed
// in blocks that stay in L1, so it is read from memory once. A lane that has only seen -inf has the
// lowest float as its max and a sum of 0.
struct OnlineSoftmax {
  static constexpr int64_t BLOCK = 64 * WIDTH;
  Floats row_max = broadcast(std::numeric_limits<float>::lowest());
  Floats row_sum{};

  // x(at) or x(at, count) loads a vector; visit(at, e^(x - row_max so far)) receives its
  // exponentials.
  template <class Load, class Visit>
  void update(int64_t begin, int64_t end, const Load& x, const Visit& visit) {
    Floats previous = row_max;
    row_max = reduce_row(end - begin, row_max, [&](Floats acc, int64_t at, auto... tail) {
      return max(acc, x(begin + at, tail...));
    }, max);
    Floats block_sum = sum_row(end - begin, [&](Floats acc, int64_t at, auto... tail) {
      Floats exps = exp_nonpositive(x(begin + at, tail...) - row_max);
      visit(begin + at, exps, tail...);
      return acc + exps;
    });
    row_sum = fma(row_sum, exp_nonpositive(previous - row_max), block_sum);
  }
  // Factor from exponentials relative to a lane's max to those relative to the max of the row.
  Floats rescale() const { return exp_nonpositive(row_max - broadcast(reduce_max(row_max))); }
  float sum() const { return ingot::reduce_sum(row_sum * rescale()); }
};

inline Floats silu(Floats x) { return x * sigmoid(x); }
inline Floats gelu(Floats x) { return x * normal_cdf(x); }
inline Floats gelu_tanh(Floats x) {
  return x * sigmoid(x * fma(x * x, broadcast(0.0713548162f), broadcast(1.59576912f)));
}
inline Floats relu(Floats x) { return max(Floats{}, x); }

// Derivatives. Beyond |x| = 16 they are constant; clamping keeps x^3 from overflowing.
inline Floats clamp16(Floats x) { return min(broadcast(16.0f), max(broadcast(-16.0f), x)); }
inline Floats silu_grad(Floats x) {
  Floats s = sigmoid(x);
  return fma(x * s, broadcast(1.0f) - s, s);
}
inline Floats gelu_grad(Floats x) {
  Floats c = clamp16(x);
  Floats density = broadcast(0.398942280f) * exp_nonpositive(c * c * broadcast(-0.5f));
  return fma(c, density, normal_cdf(x));
}
inline Floats gelu_tanh_grad(Floats x) {
  Floats c = clamp16(x), square = c * c;
  Floats s = sigmoid(c * fma(square, broadcast(0.0713548162f), broadcast(1.59576912f)));
  Floats inner = fma(square, broadcast(3 * 0.0713548162f), broadcast(1.59576912f));
  return fma(c * inner, s * (broadcast(1.0f) - s), s);
}
inline Floats relu_grad(Floats x) { return x > Floats{} ? broadcast(1.0f) : Floats{}; }

// Sine and cosine of position * frequency. The angle is reduced in double: in float, a position of
// 1e5 would leave three digits of it. Absolute error 1.8e-9 after the reduction.
inline void rope_sincos(double position, Floats frequency, Floats& sine, Floats& cosine) {
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
  Floats s = fma(fma(broadcast(-1.94956352e-4f), t, broadcast(8.33197866e-3f)), t,
                 broadcast(-0.166666507f));
  s = fma(s * t, r, r);
  Floats c = fma(fma(broadcast(2.44384506e-5f), t, broadcast(-1.38873675e-3f)), t,
                 broadcast(4.16666469e-2f));
  c = fma(c * t, t, fma(broadcast(-0.5f), t, broadcast(1.0f)));
  Ints swapped = (quadrant & 1) != 0;
  Floats a = swapped ? c : s, b = swapped ? s : c;
  sine = (Floats)((Ints)a ^ ((quadrant & 2) << 30));
  cosine = (Floats)((Ints)b ^ (((quadrant + 1) & 2) << 30));
}

}  // namespace ingot
