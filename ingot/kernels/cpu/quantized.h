// GEMM of int8 activations and weights of 4 or 8 bits, with float32 results.
//
//   y[m, n] = sum over groups g of x_scale[m, g] * scale[n, g] * (integer dot product of group g)
//
// x is quantized row by row in groups of channels, so a row of y depends on one row of x. The sum
// of a group is an integer without rounding; groups are added in float32 in the order of k. So the
// bits are the same for any number of rows and any split into blocks.
//
// 16 rows of the weight are computed together. In a panel, 4 bytes of each of them are adjacent, so
// that a vector has the operands of 16 dot products. Weights in rows are transposed into panels at
// each call; those that are panels already are read at the speed of memory.
//
// With VNNI, an instruction multiplies 64 pairs of bytes. It takes one operand as unsigned, so 8 or
// 128 is added to the weights and, times the sum of x, subtracted again.
#pragma once

#include "matmul.h"
#include "quantized_tensors.h"

namespace ingot {

constexpr int CHUNK_BYTES = 64;  // of a vector

typedef uint8_t Bytes __attribute__((vector_size(CHUNK_BYTES)));

#if !defined(__AVX512F__)  // there, these are the vectors of vector.h
inline FloatLanes fma(FloatLanes a, FloatLanes b, FloatLanes c) {
  constexpr int PARTS = LANES / WIDTH;
  Floats parts[3][PARTS];
  std::memcpy(parts[0], &a, sizeof a), std::memcpy(parts[1], &b, sizeof b);
  std::memcpy(parts[2], &c, sizeof c);
  for (int i = 0; i < PARTS; i++) parts[2][i] = fma(parts[0][i], parts[1][i], parts[2][i]);
  std::memcpy(&c, parts[2], sizeof c);
  return c;
}
#endif
inline FloatLanes to_float(IntLanes values) { return __builtin_convertvector(values, FloatLanes); }
inline FloatLanes broadcast_float(float value) { return value - FloatLanes{}; }
inline IntLanes broadcast_int(int32_t value) { return value - IntLanes{}; }

// acc[i] + the sum of four products w[4i + b] * x[4i + b], of unsigned w and signed x.
#if defined(__AVX512VNNI__)
inline IntLanes dot4(IntLanes acc, Bytes w, IntLanes x) {
  return (IntLanes)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}
inline IntLanes dot4(IntLanes acc, Bytes w, const int8_t* x) {
  // As an intrinsic, GCC 12 broadcasts x to a register first: 1.5 instead of 2.2 products per ns.
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const int8_t(*)[4])x));
  return acc;
}
#elif defined(__AVX2__)
// In 16 bits: vpmaddubsw would saturate.
inline __m256i dot4(__m256i acc, __m256i w, __m256i x) {
  const __m256i low = _mm256_set1_epi16(0xff);
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, low),
                                   _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
inline IntLanes dot4(IntLanes acc, Bytes w, IntLanes x) {
  __m256i parts[3][2];
  std::memcpy(parts[0], &acc, sizeof acc), std::memcpy(parts[1], &w, sizeof w);
  std::memcpy(parts[2], &x, sizeof x);
  for (int i = 0; i < 2; i++) parts[0][i] = dot4(parts[0][i], parts[1][i], parts[2][i]);
  std::memcpy(&acc, parts[0], sizeof acc);
  return acc;
}
#else
inline IntLanes dot4(IntLanes acc, Bytes w, IntLanes x) {
  typedef int8_t SignedBytes __attribute__((vector_size(CHUNK_BYTES)));
  SignedBytes bytes = (SignedBytes)x;
  for (int i = 0; i < LANES; i++)
    for (int b = 0; b < 4; b++) acc[i] += int32_t(w[4 * i + b]) * bytes[4 * i + b];
  return acc;
}
#endif
inline IntLanes load_word(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, sizeof word);
  return broadcast_int(word);
}
#if !defined(__AVX512VNNI__)
inline IntLanes dot4(IntLanes acc, Bytes w, const int8_t* x) { return dot4(acc, w, load_word(x)); }
#endif

// ---- Formats: how the bytes of a weight become unsigned operands.

// Two channels in a byte, the even one in the lower half. Operands are the even and the odd
// channels.
struct Int4 {
  static constexpr int PLANES = 2, ZERO = 8;
  static constexpr bool MAY_HAVE_OFFSETS = true;
  static void unpack(Bytes raw, Bytes (&planes)[PLANES]) {
    planes[0] = raw & 15;
    planes[1] = raw >> 4;
  }
};

struct Int8 {
  static constexpr int PLANES = 1, ZERO = 128;
  static constexpr bool MAY_HAVE_OFFSETS = false;
  static void unpack(Bytes raw, Bytes (&planes)[PLANES]) { planes[0] = raw ^ 0x80; }
};

// A quantized weight: scale * (q - zero), where `zero` is the format's or one per group, or
// scale * q + minimum.
struct QuantizedWeight {
  const WeightBytes& bytes;
  int64_t first_row, rows;  // of the bytes and of the scales
  const GroupValues &scale, &zero_point, &minimum;

  // A row, or the panel that begins with it.
  const uint8_t* operator[](int64_t row) const {
    return bytes.first + (first_row + row) * bytes.row_bytes;
  }
};

// ---- Activations.

constexpr int ROW_BLOCK = 8;  // rows of x that are multiplied by a panel together

// Rows of x in int8, in groups of channels with a scale each. Words (4 bytes, channels of one plane)
// of a block of rows are interleaved: one pointer suffices to read those of all its rows.
struct QuantizedRows {
  int64_t block;  // rows in a block
  int64_t groups, group_words, words;
  int8_t* values;
  float* scales;       // (blocks, groups, block), as the next two
  float* scaled_sums;  // of the values of a group
  int32_t* initial;    // of the sum of a group's products: what the format's zero adds

  // Where the first group of a row is in these; the next ones are `block` apart.
  int64_t first_group(int64_t row) const { return row / block * block * groups + row % block; }
};

// Store the int8 values of channels k, k + 1, ...: those of a plane in a word.
template <class Format>
inline void store_operands(int8_t* to, int64_t k, Ints q, int64_t count) {
#if defined(__AVX512F__)
  if (count == WIDTH) {
    __m128i bytes = _mm512_cvtepi32_epi8((__m512i)q);
    const __m128i words = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    if (Format::PLANES == 2) bytes = _mm_shuffle_epi8(bytes, words);
    _mm_storeu_si128((__m128i*)(to + k), bytes);
    return;
  }
#endif
  constexpr int64_t UNIT = 4 * Format::PLANES;
  for (int64_t i = k; i < k + count; i++) {
    int64_t in_unit = i % UNIT;
    to[i - in_unit + in_unit % Format::PLANES * 4 + in_unit / Format::PLANES] = int8_t(q[i - k]);
  }
}

// A row in groups of `group` channels: its values, and the scale and the sum of each group. One step
// after the other for all groups, because each has a long latency.
template <class Format, class T>
void quantize_row(const T* x, int64_t width, int64_t group, int8_t* to, float* scales,
                  int32_t* sums) {
  int64_t groups = (width + group - 1) / group;
  auto size = [&](int64_t g) { return std::min(group, width - g * group); };
  for (int64_t g = 0; g < groups; g++) {
    Floats largest{};
    for_each_vector(size(g), [&](int64_t at, auto... tail) {
      Floats values = load(x + g * group + at, tail...);
      largest = max(largest, max(values, -values));
    });
    scales[g] = ingot::reduce_max(largest);
  }
  for (int64_t g = 0; g < groups; g++)
    scales[g] = (scales[g] < MIN_MAGNITUDE ? MIN_MAGNITUDE : scales[g]) / 127.0f;
  for (int64_t g = 0; g < groups; g++) {
    Floats divisor = broadcast(scales[g]);
    for_each_vector(size(g), [&](int64_t at, auto... tail) {
      Ints q = quantize(load(x + g * group + at, tail...), divisor);
      store_operands<Format>(to, g * group + at, q, std::min<int64_t>(WIDTH, size(g) - at));
    });
  }
  for (int64_t g = 0; g < groups; g++) {
    int32_t sum = 0;
    for (int64_t k = g * group, end = k + size(g); k < end; k++) sum += to[k];
    sums[g] = sum;
  }
}

// From (row, word) to (word, row).
inline void interleave_rows(const int8_t* from, int64_t rows, int64_t row_bytes, int8_t* to) {
  if (rows == 1) {
    std::memcpy(to, from, row_bytes);
    return;
  }
  for (int64_t at = 0; at < row_bytes; at += 4)
    for (int64_t r = 0; r < rows; r++, to += 4) std::memcpy(to, from + r * row_bytes + at, 4);
}

// `group` is the number of channels in a group, 0 for the whole row. `zero` is subtracted
// from the operands of the weight.
template <class Format, class T>
QuantizedRows quantize_rows(const Matrix<T>& x, int64_t group, int32_t zero) {
  constexpr int64_t UNIT = 4 * Format::PLANES;  // channels of a word of each plane
  QuantizedRows q;
  q.words = (x.width + UNIT - 1) / UNIT;
  q.group_words = group ? group / UNIT : q.words;
  q.groups = (q.words + q.group_words - 1) / q.group_words;
  q.block = std::min<int64_t>(ROW_BLOCK, std::bit_ceil(uint64_t(x.rows)));
  // What is beyond the last row is multiplied, and not used; a subnormal scale would be slow.
  int64_t rows = (x.rows + q.block - 1) / q.block * q.block;
  int64_t row_bytes = q.words * UNIT;
  q.values = scratch<Scratch::QUANTIZED_X, int8_t>(rows * row_bytes);
  q.scales = scratch<Scratch::QUANTIZED_X_SCALES, float>(2 * rows * q.groups);
  q.scaled_sums = q.scales + rows * q.groups;
  q.initial = scratch<Scratch::QUANTIZED_X_SUMS, int32_t>(rows * q.groups);
  for (int64_t r = x.rows; r < rows; r++)
    for (int64_t g = 0, i = q.first_group(r); g < q.groups; g++, i += q.block)
      q.scales[i] = q.scaled_sums[i] = 0, q.initial[i] = 0;
  int64_t width = q.group_words * UNIT;
  parallel_for(rows / q.block, 4 * q.block * x.width, [&](int64_t begin, int64_t end) {
    int8_t* block = scratch<Scratch::QUANTIZED_ROWS, int8_t>(q.block * row_bytes);
    float* scales = scratch<Scratch::QUANTIZED_ROW_SCALES, float>(2 * q.groups);
    int32_t* sums = reinterpret_cast<int32_t*>(scales + q.groups);
    for (int64_t first = begin * q.block; first < end * q.block; first += q.block) {
      for (int64_t r = first; r < std::min(first + q.block, x.rows); r++) {
        int8_t* values = block + (r - first) * row_bytes;
        std::memset(values + row_bytes - UNIT, 0, UNIT);
        quantize_row<Format>(x[r], x.width, width, values, scales, sums);
        for (int64_t g = 0, i = q.first_group(r); g < q.groups; g++, i += q.block) {
          q.scales[i] = scales[g];
          q.scaled_sums[i] = scales[g] * float(sums[g]);
          q.initial[i] = int32_t(-uint32_t(zero) * uint32_t(sums[g]));  // without signed overflow
        }
      }
      interleave_rows(block, q.block, row_bytes, q.values + first * row_bytes);
    }
  });
  return q;
}

// ---- The GEMM.

// Panels that are multiplied together. A product takes 5 cycles, and two begin in each: 16 sums, of 8
// rows and 2 panels, keep both units busy (8 do not), and each word of x is loaded once for two.
#if defined(__AVX512F__)
constexpr int PANEL_BLOCK = 2;
#else
constexpr int PANEL_BLOCK = 1;
#endif

// 16 rows of the weight: their scales in float32 and what is added to scale * q (the minimum, or the
// zero point times -scale), for all groups.
struct IntPanel {
  const uint8_t* bytes;
  const FloatLanes *scale, *offset;

  IntPanel(const QuantizedWeight& w, const uint8_t* bytes, int64_t column, int64_t groups,
        FloatLanes* memory)
      : bytes(bytes), scale(memory), offset(nullptr) {
    int64_t row = w.first_row + column, count = std::min<int64_t>(LANES, w.rows - column);
    w.scale.load(groups, row, count, memory);
    if (!w.zero_point && !w.minimum) return;
    FloatLanes* offsets = memory + groups;
    (w.minimum ? w.minimum : w.zero_point).load(groups, row, count, offsets);
    for (int64_t g = 0; g < groups && w.zero_point; g++) offsets[g] *= -scale[g];
    offset = offsets;
  }
};

inline int64_t panel_bytes(const QuantizedWeight& w) {
  return (w.bytes.row_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES * LANES;
}

// Transpose 16 rows: from (row, word) to (word, row), padded with zeros.
inline void pack_panel(const QuantizedWeight& w, int64_t column, uint8_t* to) {
  const uint8_t* rows[LANES];
  for (int i = 0; i < LANES; i++) rows[i] = w[std::min<int64_t>(column + i, w.rows - 1)];
  for (int64_t at = 0; at < w.bytes.row_bytes; at += CHUNK_BYTES, to += CHUNK_BYTES * LANES) {
    int64_t bytes = std::min<int64_t>(CHUNK_BYTES, w.bytes.row_bytes - at);
#if defined(__AVX512F__)
    __mmask64 mask = bytes == CHUNK_BYTES ? ~0ull : (1ull << bytes) - 1;
    __m512i tile[LANES];
    for (int i = 0; i < LANES; i++) {
      _mm_prefetch(rows[i] + at + LANES * w.bytes.row_bytes, _MM_HINT_T1);
      tile[i] = _mm512_maskz_loadu_epi8(mask, rows[i] + at);
    }
    interleave(tile);
    for (int i = 0; i < LANES; i++) _mm512_store_si512(to + i * CHUNK_BYTES, tile[i]);
#else
    std::memset(to, 0, CHUNK_BYTES * LANES);
    for (int64_t i = 0; i < LANES; i++)
      for (int64_t b = 0; b < bytes; b++)
        to[b / 4 * CHUNK_BYTES + 4 * i + b % 4] = rows[i][at + b];
#endif
  }
}

enum class Offset { NONE, ZERO_POINT, MINIMUM };

// The only row of x times a panel. Reading is the limit, so scales of 16 bits are prefetched, too, and
// converted where they are used.
template <class Format, bool IS_BF16, Offset OFFSET>
[[gnu::noinline]] FloatLanes multiply_row(const uint8_t* bytes, GroupLanes scale, GroupLanes offset,
                                          const QuantizedRows& x) {
  const int64_t ahead = tunable(Tunable::INT_PREFETCH);  // the hardware alone does it too late
  const int64_t scales_ahead = tunable(Tunable::INT_SCALE_PREFETCH);
  auto load = [=](GroupLanes& lanes) {
    HalfLanes values;
    __builtin_prefetch(lanes.first + scales_ahead * LANES);
    std::memcpy(&values, lanes.first, sizeof values);
    lanes.first += lanes.stride;
    return IS_BF16 ? widen_bf16(values) : widen_half(values);
  };
  const int8_t* operand = x.values;
  FloatLanes total{};
  int64_t at = 0;
  for (int64_t g = 0; g < x.groups; g++) {
    IntLanes sum = broadcast_int(x.initial[g]), odd{};
    const int64_t end = std::min((g + 1) * x.group_words, x.words);
#pragma GCC unroll 4
    for (; at < end; at++, bytes += CHUNK_BYTES, operand += 4 * Format::PLANES) {
      Bytes raw, planes[Format::PLANES];
      __builtin_prefetch(bytes + ahead);
      std::memcpy(&raw, bytes, sizeof raw);
      if (Format::PLANES == 2) {  // odd channels times 16: an operation less, and two chains
        sum = dot4(sum, raw & 15, operand);
        odd = dot4(odd, raw & 0xf0, operand + 4);
      } else {
        Format::unpack(raw, planes);
        sum = dot4(sum, planes[0], operand);
      }
    }
    if (Format::PLANES == 2) sum += odd >> 4;
    FloatLanes w_scale = load(scale);
    total = fma(to_float(sum), w_scale * broadcast_float(x.scales[g]), total);
    if (OFFSET == Offset::NONE) continue;
    FloatLanes added = load(offset);
    if (OFFSET == Offset::ZERO_POINT) added *= -w_scale;
    total = fma(added, broadcast_float(x.scaled_sums[g]), total);
  }
  return total;
}

// Whether `multiply_row` has a kernel for a panel; if so, its results are in `out`.
template <class Format>
bool multiply_row(const QuantizedWeight& w, int64_t column, const uint8_t* bytes,
                  const QuantizedRows& x, float* out) {
  bool is_bf16 = w.scale.type() == ScalarType::BFloat16;
  if (w.rows - column < LANES || !(is_bf16 || w.scale.type() == ScalarType::Half)) return false;
  auto run = [&]<Offset OFFSET>(const GroupValues& offset) {
    int64_t row = w.first_row + column;
    GroupLanes scales = w.scale.lanes(row), offsets = offset ? offset.lanes(row) : scales;
    FloatLanes total = is_bf16 ? multiply_row<Format, true, OFFSET>(bytes, scales, offsets, x)
                               : multiply_row<Format, false, OFFSET>(bytes, scales, offsets, x);
    std::memcpy(out, &total, sizeof total);
  };
  if constexpr (Format::MAY_HAVE_OFFSETS) {
    if (w.zero_point) return run.template operator()<Offset::ZERO_POINT>(w.zero_point), true;
    if (w.minimum) return run.template operator()<Offset::MINIMUM>(w.minimum), true;
  }
  return run.template operator()<Offset::NONE>({}), true;
}

// The first R rows of a block of x times C panels.
template <class Format, int R, int C, bool HAS_OFFSETS>
[[gnu::noinline]] void multiply_panels(const IntPanel* panels, const QuantizedRows& x, int64_t row,
                                       FloatLanes (&totals)[C][R]) {
  const int8_t* operand = x.values + row * x.words * 4 * Format::PLANES;
  const int64_t stride = 4 * x.block, ahead = tunable(Tunable::INT_PREFETCH);
  const uint8_t* bytes[C];
  for (int c = 0; c < C; c++) bytes[c] = panels[c].bytes;
  int64_t at = 0;
  // Unless these loops are unrolled, the sums are in memory.
  for (int64_t g = 0, i = x.first_group(row); g < x.groups; g++, i += x.block) {
    IntLanes sums[C][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) sums[c][r] = broadcast_int(x.initial[i + r]);
    const int64_t end = std::min((g + 1) * x.group_words, x.words);
#pragma GCC unroll 4
    for (; at < end; at++) {
      Bytes planes[C][Format::PLANES];
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) {
        Bytes raw;
        __builtin_prefetch(bytes[c] + ahead);
        std::memcpy(&raw, bytes[c], sizeof raw);
        bytes[c] += CHUNK_BYTES;
        Format::unpack(raw, planes[c]);
      }
#pragma GCC unroll 2
      for (int p = 0; p < Format::PLANES; p++, operand += stride)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          if (C == 1) {
            sums[0][r] = dot4(sums[0][r], planes[0][p], operand + 4 * r);
            continue;
          }
          IntLanes word = load_word(operand + 4 * r);
#pragma GCC unroll 2
          for (int c = 0; c < C; c++) sums[c][r] = dot4(sums[c][r], planes[c][p], word);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) {
        FloatLanes scale = panels[c].scale[g] * broadcast_float(x.scales[i + r]);
        FloatLanes total = fma(to_float(sums[c][r]), scale, totals[c][r]);
        if (HAS_OFFSETS)
          total = fma(panels[c].offset[g], broadcast_float(x.scaled_sums[i + r]), total);
        totals[c][r] = total;
      }
  }
}

template <class Format, int R, int C>
void multiply_block(const IntPanel* panels, int num_panels, const QuantizedRows& x, int64_t row,
                    int64_t rows, float (*out)[BLOCK_N]) {
  FloatLanes totals[C][R] = {};
  if (Format::MAY_HAVE_OFFSETS && panels[0].offset)
    multiply_panels<Format, R, C, Format::MAY_HAVE_OFFSETS>(panels, x, row, totals);
  else
    multiply_panels<Format, R, C, false>(panels, x, row, totals);
  for (int r = 0; r < std::min<int64_t>(R, rows); r++)
    for (int c = 0; c < num_panels; c++)
      std::memcpy(out[r] + c * LANES, &totals[c][r], sizeof totals[c][r]);
}

// The first rows are multiplied by one panel at a time: it is read from memory, for which two are
// slower. So are the last four or fewer, for which smaller kernels do less work. The others find the
// panels in a cache.
template <class Format>
void multiply_rows(const IntPanel* panels, int num_panels, const QuantizedRows& x, int64_t row,
                   int64_t rows, float (*out)[BLOCK_N]) {
  int64_t r = 0;
  auto multiply_each = [&] {
    int64_t left = rows - r;
    for (int p = 0; p < num_panels; p++) {
      auto to = reinterpret_cast<float(*)[BLOCK_N]>(&out[r][p * LANES]);
      if (left > 4) multiply_block<Format, ROW_BLOCK, 1>(panels + p, 1, x, row + r, left, to);
      else if (left > 2) multiply_block<Format, 4, 1>(panels + p, 1, x, row + r, left, to);
      else if (left == 2) multiply_block<Format, 2, 1>(panels + p, 1, x, row + r, left, to);
      else multiply_block<Format, 1, 1>(panels + p, 1, x, row + r, left, to);
    }
    r += ROW_BLOCK;
  };
  if (row == 0) multiply_each();
  for (; rows - r > 4; r += ROW_BLOCK)
    multiply_block<Format, ROW_BLOCK, PANEL_BLOCK>(panels, num_panels, x, row + r, rows - r,
                                                   out + r);
  if (r < rows) multiply_each();
}

// x W^T for each weight, in blocks of at most 32 rows by 256 columns, each passed to `epilogue`.
template <class Format>
void quantized_gemm(const QuantizedRows& x, int64_t num_rows,
                    const std::vector<QuantizedWeight>& weights, const Epilogue& epilogue) {
  if (num_rows == 0) return;
  int64_t num_weights = weights.size();
  constexpr int64_t PANELS = BLOCK_N / LANES;
  std::vector<ColumnRange> groups = balanced_columns(weights[0].rows);
  parallel_for_dynamic(groups.size(), [&](TaskQueue& queue) {
    int64_t each = panel_bytes(weights[0]);
    uint8_t* memory = nullptr;
    if (!weights[0].bytes.is_panels)
      memory = scratch<Scratch::QUANTIZED_PANELS, uint8_t>(num_weights * PANELS * each);
    FloatLanes* scales = scratch<Scratch::QUANTIZED_SCALES, FloatLanes>(4 * x.groups);
    for (int64_t g; queue.pop(g);) {
      auto compute = [&](int64_t row, int64_t rows, int p, AccTile& acc) {
        const QuantizedWeight& w = weights[p];
        auto panel_bytes = [&](int64_t c) {
          int64_t column = groups[g].begin + c;
          if (!memory) return w[column];
          // Packed for the first block of rows, between its products, and reused by the others.
          uint8_t* packed = memory + (p * PANELS + c / LANES) * each;
          if (row == 0) pack_panel(w, column, packed);
          return static_cast<const uint8_t*>(packed);
        };
        auto panel = [&](int64_t c, int i) {
          return IntPanel(w, panel_bytes(c), groups[g].begin + c, x.groups, scales + 2 * x.groups * i);
        };
        int64_t c = 0;
        for (; num_rows == 1 && c < groups[g].count; c += LANES)
          if (!multiply_row<Format>(w, groups[g].begin + c, panel_bytes(c), x, &acc[0][c])) break;
        for (; c < groups[g].count; c += PANEL_BLOCK * LANES) {
          bool full = PANEL_BLOCK > 1 && c + LANES < groups[g].count;
          IntPanel first = panel(c, 0), panels[2] = {first, full ? panel(c + LANES, 1) : first};
          auto out = reinterpret_cast<float(*)[BLOCK_N]>(&acc[0][c]);
          multiply_rows<Format>(panels, full ? 2 : 1, x, row, rows, out);
        }
      };
      AccTile* acc = scratch<Scratch::GEMM_ACC, AccTile>(num_weights);
      for (int64_t row = 0; row < num_rows; row += BLOCK_M) {
        int64_t rows = std::min<int64_t>(BLOCK_M, num_rows - row);
        for (int64_t p = 0; p < num_weights; p++) compute(row, rows, p, acc[p]);
        epilogue(OutputBlock{row, rows, groups[g], g, acc});
      }
    }
  });
}

}  // namespace ingot
