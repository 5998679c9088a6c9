// GEMM of int8 activations and weights of 4 or 8 bits, with float32 results.
//
//   y[m, n] = sum over groups g of x_scale[m, g] * scale[n, g] * (integer dot product of group g)
//
// x is quantized row by row in groups of channels, so a row of y depends on one row of x. The sum
// of a group is an integer without rounding; groups are added in float32 in the order of k. So the
// bits are the same for any number of rows, any split into blocks and every path below:
//
//   few rows    16 rows of the weight are read in place, 64 bytes at a time
//   many rows   16 rows are first transposed into panels, which all rows of x share
//
// With VNNI, an instruction multiplies 64 pairs of bytes. It takes one operand as unsigned, so 8 or
// 128 is added to the weights and, times the sum of x, subtracted again.
#pragma once

#include "groups.h"
#include "matmul.h"

namespace ingot {

constexpr int CHUNK_BYTES = 64;  // of a row of the weight
constexpr int QUARTER_BYTES = 16;

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
inline IntLanes dot4(IntLanes acc, Bytes w, Bytes x) {
  return (IntLanes)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
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
inline IntLanes dot4(IntLanes acc, Bytes w, Bytes x) {
  __m256i parts[3][2];
  std::memcpy(parts[0], &acc, sizeof acc), std::memcpy(parts[1], &w, sizeof w);
  std::memcpy(parts[2], &x, sizeof x);
  for (int i = 0; i < 2; i++) parts[0][i] = dot4(parts[0][i], parts[1][i], parts[2][i]);
  std::memcpy(&acc, parts[0], sizeof acc);
  return acc;
}
#else
inline IntLanes dot4(IntLanes acc, Bytes w, Bytes x) {
  for (int i = 0; i < LANES; i++)
    for (int b = 4 * i; b < 4 * i + 4; b++) acc[i] += int32_t(w[b]) * int8_t(x[b]);
  return acc;
}
#endif

// ---- Formats: how the bytes of a weight become unsigned operands.

// Two channels in a byte, the even one in the lower half. Operands are the even and the odd
// channels.
struct Int4 {
  static constexpr int PLANES = 2, ZERO = 8;
  static void unpack(Bytes raw, Bytes (&planes)[PLANES]) {
    planes[0] = raw & 15;
    planes[1] = raw >> 4;
  }
};

struct Int8 {
  static constexpr int PLANES = 1, ZERO = 128;
  static void unpack(Bytes raw, Bytes (&planes)[PLANES]) { planes[0] = raw ^ 0x80; }
};

// A quantized weight: scale * (q - zero), where `zero` is the format's or one per group, or
// scale * q + minimum.
struct QuantizedWeight {
  const uint8_t* first;
  int64_t first_row, rows, row_bytes;  // of those that the scales belong to
  const GroupValues &scale, &zero_point, &minimum;

  const uint8_t* operator[](int64_t row) const { return first + (first_row + row) * row_bytes; }
};

// ---- Activations.

// The order of the bytes of x, which is that of the weights they are multiplied by.
enum class Order {
  CHUNKS,  // for weights in place: a plane of 64 bytes after the other
  WORDS    // for panels: a plane of 4 bytes after the other
};

constexpr int ROW_BLOCK = 8;  // rows of x that are multiplied by a panel together

// Rows of x in int8, in groups of channels with a scale each, padded with zeros. For panels, the
// words of a block of rows are interleaved: one pointer suffices to read those of all its rows.
struct QuantizedRows {
  int64_t groups, group_quarters, row_bytes, padded_rows;
  int8_t* values;
  float* scales;       // (groups, padded_rows), as the next two
  float* scaled_sums;  // of the values of a group
  int32_t* sums;
};

// Offset of channel k in a row of x.
template <class Format, Order order>
inline int64_t operand_offset(int64_t k) {
  constexpr int64_t PLANE = order == Order::CHUNKS ? CHUNK_BYTES : 4;
  constexpr int64_t UNIT = PLANE * Format::PLANES;
  int64_t in_unit = k % UNIT;
  return k - in_unit + in_unit % Format::PLANES * PLANE + in_unit / Format::PLANES;
}

// Store the int8 values of channels k, k + 1, ...
template <class Format, Order order>
inline void store_operands(int8_t* to, int64_t k, Ints q, int64_t count) {
#if defined(__AVX512F__)
  if (count == WIDTH) {
    __m128i bytes = _mm512_cvtepi32_epi8((__m512i)q);
    if constexpr (Format::PLANES == 1) {
      _mm_storeu_si128((__m128i*)(to + k), bytes);
    } else if constexpr (order == Order::WORDS) {
      const __m128i words = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
      _mm_storeu_si128((__m128i*)(to + k), _mm_shuffle_epi8(bytes, words));
    } else {
      const __m128i planes = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
      bytes = _mm_shuffle_epi8(bytes, planes);
      int8_t* even = to + operand_offset<Format, order>(k);
      _mm_storel_epi64((__m128i*)even, bytes);
      _mm_storel_epi64((__m128i*)(even + CHUNK_BYTES), _mm_unpackhi_epi64(bytes, bytes));
    }
    return;
  }
#endif
  for (int64_t i = 0; i < count; i++) to[operand_offset<Format, order>(k + i)] = int8_t(q[i]);
}

// round(x / scale), ties to even; adding and subtracting 1.5 * 2^23 rounds to an integer.
inline Ints quantize(Floats x, Floats scale) {
  const Floats magic = broadcast(12582912.0f);
  return (Ints)(x / scale + magic) - (Ints)magic;
}

// The channels [begin, end) of a row, a group.
template <class Format, Order order, class T>
void quantize_group(const T* x, int64_t begin, int64_t end, int8_t* to, float& scale,
                    int32_t& sum) {
  constexpr float MIN_MAGNITUDE = 0x1p-100f;  // as in ingot.ops.codec
  Floats largest{};
  for_each_vector(end - begin, [&](int64_t at, auto... tail) {
    Floats values = load(x + begin + at, tail...);
    largest = max(largest, max(values, -values));
  });
  float magnitude = ingot::reduce_max(largest);
  scale = (magnitude < MIN_MAGNITUDE ? MIN_MAGNITUDE : magnitude) / 127.0f;
  Floats divisor = broadcast(scale);
  Ints total{};
  for_each_vector(end - begin, [&](int64_t at, auto... tail) {
    Ints q = quantize(load(x + begin + at, tail...), divisor);
    total += (Ints)((Words)q << 24) >> 24;  // as stored: the integer of a NaN is arbitrary
    store_operands<Format, order>(to, begin + at, q, std::min<int64_t>(WIDTH, end - begin - at));
  });
  sum = 0;
  for (int i = 0; i < WIDTH; i++) sum += total[i];
}

// `group` is the number of channels in a group, 0 for the whole row.
template <class Format, Order order, class T>
QuantizedRows quantize_rows(const Matrix<T>& x, int64_t group) {
  constexpr int64_t QUARTER = QUARTER_BYTES * Format::PLANES;
  constexpr int64_t CHUNK = CHUNK_BYTES * Format::PLANES;
  int64_t quarters = (x.width + QUARTER - 1) / QUARTER;
  QuantizedRows q;
  q.group_quarters = group ? group / QUARTER : quarters;
  q.groups = (quarters + q.group_quarters - 1) / q.group_quarters;
  q.row_bytes = (x.width + CHUNK - 1) / CHUNK * CHUNK;
  // What is beyond the last row is multiplied, and not used; a subnormal scale would be slow.
  int64_t rows = q.padded_rows = (x.rows + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK;
  q.values = scratch<Scratch::QUANTIZED_X, int8_t>(rows * q.row_bytes);
  q.scales = scratch<Scratch::QUANTIZED_X_SCALES, float>(2 * rows * q.groups);
  q.scaled_sums = q.scales + rows * q.groups;
  q.sums = scratch<Scratch::QUANTIZED_X_SUMS, int32_t>(rows * q.groups);
  for (int64_t g = 0; g < 2 * q.groups; g++)
    std::fill(q.scales + g * rows + x.rows, q.scales + (g + 1) * rows, 0.0f);
  for (int64_t g = 0; g < q.groups; g++)
    std::fill(q.sums + g * rows + x.rows, q.sums + (g + 1) * rows, 0);
  int64_t width = q.group_quarters * QUARTER;
  parallel_for(x.rows, 4 * x.width, [&](int64_t begin, int64_t end) {
    int8_t* words = scratch<Scratch::QUANTIZED_ROW, int8_t>(q.row_bytes);
    for (int64_t r = begin; r < end; r++) {
      int8_t* to = order == Order::WORDS ? words : q.values + r * q.row_bytes;
      if (q.row_bytes > x.width) std::memset(to + q.row_bytes - CHUNK, 0, CHUNK);
      for (int64_t g = 0, i = r; g < q.groups; g++, i += rows) {
        quantize_group<Format, order>(x[r], g * width, std::min((g + 1) * width, x.width), to,
                                      q.scales[i], q.sums[i]);
        q.scaled_sums[i] = q.scales[i] * float(q.sums[i]);
      }
      if (order == Order::CHUNKS) continue;
      int8_t* block = q.values + (r - r % ROW_BLOCK) * q.row_bytes + 4 * (r % ROW_BLOCK);
      for (int64_t w = 0; w < q.row_bytes; w += 4)
        std::memcpy(block + w * ROW_BLOCK, words + w, 4);
    }
  });
  return q;
}

// ---- The GEMM.

// The sum of a group before its dot products, -ZERO times the sum of x; without signed overflow.
inline IntLanes initial_sum(int32_t zero, int32_t sum) {
  return broadcast_int(int32_t(uint32_t(zero) * uint32_t(sum)));
}

// Scales of 16 rows of the weight for all groups, in float32, and what is added to scale * q: the
// minimum, or the zero point times -scale. Without offsets, `zero` is subtracted from q.
struct PanelScales {
  const FloatLanes *scale, *offset;

  PanelScales(const QuantizedWeight& w, int64_t groups, int64_t column) {
    int64_t row = w.first_row + column, count = std::min<int64_t>(LANES, w.rows - column);
    FloatLanes* scales = scratch<Scratch::QUANTIZED_SCALES, FloatLanes>(2 * groups);
    FloatLanes* offsets = nullptr;
    w.scale.load(groups, row, count, scales);
    if (w.zero_point || w.minimum) {
      offsets = scales + groups;
      (w.minimum ? w.minimum : w.zero_point).load(groups, row, count, offsets);
      for (int64_t g = 0; g < groups && w.zero_point; g++) offsets[g] *= -scales[g];
    }
    scale = scales, offset = offsets;
  }
};

#if defined(__AVX512F__)
// Sums of each quarter of 16 vectors: from (row, quarter, 4) to (quarter, row).
inline void sum_quarters(const __m512i (&rows)[LANES], IntLanes (&quarters)[4]) {
  __m512i fours[4];  // (quarter, row) of four rows
  for (int i = 0; i < 4; i++) {
    const __m512i* r = rows + 4 * i;
    auto pairs = [](__m512i a, __m512i b) {
      return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    __m512i one = pairs(r[0], r[1]), other = pairs(r[2], r[3]);
    fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(one, other),
                                _mm512_unpackhi_epi64(one, other));
  }
  __m512i a = _mm512_shuffle_i32x4(fours[0], fours[1], 0x44);
  __m512i b = _mm512_shuffle_i32x4(fours[2], fours[3], 0x44);
  __m512i c = _mm512_shuffle_i32x4(fours[0], fours[1], 0xee);
  __m512i d = _mm512_shuffle_i32x4(fours[2], fours[3], 0xee);
  quarters[0] = (IntLanes)_mm512_shuffle_i32x4(a, b, 0x88);
  quarters[1] = (IntLanes)_mm512_shuffle_i32x4(a, b, 0xdd);
  quarters[2] = (IntLanes)_mm512_shuffle_i32x4(c, d, 0x88);
  quarters[3] = (IntLanes)_mm512_shuffle_i32x4(c, d, 0xdd);
}

// One row of x, weights in place.
template <class Format>
[[gnu::noinline]] void multiply_in_place(const QuantizedWeight& w, const PanelScales& scales,
                                         const QuantizedRows& x, int64_t column, int64_t row,
                                         float* out) {
  const uint8_t* rows[LANES];  // those beyond the end repeat the last one
  for (int i = 0; i < LANES; i++) rows[i] = w[std::min<int64_t>(column + i, w.rows - 1)];
  const int8_t* operand = x.values + row * x.row_bytes;
  int64_t i = row;  // of the group in the values of x
  const FloatLanes *scale = scales.scale, *offset = scales.offset;
  const int32_t zero = offset ? 0 : -Format::ZERO;
  const int64_t group_quarters = x.group_quarters;
  int64_t left = group_quarters;
  IntLanes sum = initial_sum(zero, x.sums[i]);
  FloatLanes total{};
  for (int64_t at = 0; at < w.row_bytes; at += CHUNK_BYTES) {
    int64_t bytes = std::min<int64_t>(CHUNK_BYTES, w.row_bytes - at);
    __mmask64 mask = bytes == CHUNK_BYTES ? ~0ull : (1ull << bytes) - 1;
    Bytes operands[Format::PLANES];
    for (int p = 0; p < Format::PLANES; p++, operand += CHUNK_BYTES)
      operands[p] = (Bytes)_mm512_loadu_si512(operand);
    __m512i products[LANES];
    for (int i = 0; i < LANES; i++) {
      // The next 16 rows: the hardware does not follow 16 streams that end after a few lines.
      _mm_prefetch(rows[i] + at + LANES * w.row_bytes, _MM_HINT_T1);
      Bytes planes[Format::PLANES];
      Format::unpack((Bytes)_mm512_maskz_loadu_epi8(mask, rows[i] + at), planes);
      IntLanes product{};
      for (int p = 0; p < Format::PLANES; p++) product = dot4(product, planes[p], operands[p]);
      products[i] = (__m512i)product;
    }
    IntLanes quarters[4];
    sum_quarters(products, quarters);
    int64_t count = (bytes + QUARTER_BYTES - 1) / QUARTER_BYTES;
    bool is_last_chunk = at + CHUNK_BYTES >= w.row_bytes;
    for (int64_t q = 0; q < count; q++) {
      sum += quarters[q];
      bool is_last = is_last_chunk && q + 1 == count;
      if (--left && !is_last) continue;
      total = fma(to_float(sum), *scale++ * broadcast_float(x.scales[i]), total);
      if (offset) total = fma(*offset++, broadcast_float(x.scaled_sums[i]), total);
      if (is_last) break;
      left = group_quarters;
      i += x.padded_rows;
      sum = initial_sum(zero, x.sums[i]);
    }
  }
  std::memcpy(out, &total, sizeof total);
}
#endif

inline int64_t panel_bytes(const QuantizedWeight& w) {
  return (w.row_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES * LANES;
}

// Transpose 16 rows: from (row, word) to (word, row), padded with zeros.
inline void pack_panel(const QuantizedWeight& w, int64_t column, uint8_t* to) {
  const uint8_t* rows[LANES];
  for (int i = 0; i < LANES; i++) rows[i] = w[std::min<int64_t>(column + i, w.rows - 1)];
  for (int64_t at = 0; at < w.row_bytes; at += CHUNK_BYTES, to += CHUNK_BYTES * LANES) {
    int64_t bytes = std::min<int64_t>(CHUNK_BYTES, w.row_bytes - at);
#if defined(__AVX512F__)
    __mmask64 mask = bytes == CHUNK_BYTES ? ~0ull : (1ull << bytes) - 1;
    __m512i tile[LANES];
    for (int i = 0; i < LANES; i++) {
      _mm_prefetch(rows[i] + at + LANES * w.row_bytes, _MM_HINT_T1);
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

// The first R rows of a block of x, weights in a panel.
template <class Format, int R>
[[gnu::noinline]] void multiply_panel(const uint8_t* panel, int64_t words,
                                      const PanelScales& scales, const QuantizedRows& x,
                                      int64_t row, int64_t rows, float (*out)[BLOCK_N]) {
  const int8_t* operand = x.values + row * x.row_bytes;
  const int64_t group_words = 4 * x.group_quarters;
  const FloatLanes* offset = scales.offset;
  const int32_t zero = offset ? 0 : -Format::ZERO;
  FloatLanes totals[R] = {};
  int64_t at = 0;
  for (int64_t g = 0, i = row; g < x.groups; g++, i += x.padded_rows) {
    IntLanes sums[R];
    for (int r = 0; r < R; r++) sums[r] = initial_sum(zero, x.sums[i + r]);
    for (int64_t end = std::min((g + 1) * group_words, words); at < end; at++) {
      Bytes raw, planes[Format::PLANES];
      std::memcpy(&raw, panel + at * CHUNK_BYTES, sizeof raw);
      Format::unpack(raw, planes);
      for (int p = 0; p < Format::PLANES; p++)
        for (int r = 0; r < R; r++) {
          int32_t four;
          std::memcpy(&four, operand + ((at * Format::PLANES + p) * ROW_BLOCK + r) * 4, 4);
          sums[r] = dot4(sums[r], planes[p], (Bytes)broadcast_int(four));
        }
    }
    FloatLanes scale = scales.scale[g];
    for (int r = 0; r < R; r++)
      totals[r] = fma(to_float(sums[r]), scale * broadcast_float(x.scales[i + r]), totals[r]);
    if (!offset) continue;
    for (int r = 0; r < R; r++)
      totals[r] = fma(offset[g], broadcast_float(x.scaled_sums[i + r]), totals[r]);
  }
  for (int r = 0; r < std::min<int64_t>(R, rows); r++)
    std::memcpy(out[r], &totals[r], sizeof totals[r]);
}

template <class Format>
void multiply_panel_rows(const uint8_t* panel, int64_t words, const PanelScales& scales,
                         const QuantizedRows& x, int64_t row, int64_t rows,
                         float (*out)[BLOCK_N]) {
  for (; rows > 4; row += ROW_BLOCK, rows -= ROW_BLOCK, out += ROW_BLOCK)
    multiply_panel<Format, ROW_BLOCK>(panel, words, scales, x, row, rows, out);
  if (rows > 0) multiply_panel<Format, 4>(panel, words, scales, x, row, rows, out);
}

// Up to this many rows of x, weights are read in place.
#if defined(__AVX512F__)
constexpr int64_t MAX_IN_PLACE = 2;
#else
constexpr int64_t MAX_IN_PLACE = 0;
#endif

template <class Format, class T>
QuantizedRows quantize_operands(const Matrix<T>& x, int64_t group) {
  if (x.rows <= MAX_IN_PLACE) return quantize_rows<Format, Order::CHUNKS>(x, group);
  return quantize_rows<Format, Order::WORDS>(x, group);
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
    if (num_rows > MAX_IN_PLACE)
      memory = scratch<Scratch::QUANTIZED_PANELS, uint8_t>(num_weights * PANELS * each);
    for (int64_t g; queue.pop(g);) {
      auto compute = [&](int64_t row, int64_t rows, int p, AccTile& acc) {
        const QuantizedWeight& w = weights[p];
        for (int64_t c = 0; c < groups[g].count; c += LANES) {
          int64_t column = groups[g].begin + c;
          auto out = reinterpret_cast<float(*)[BLOCK_N]>(&acc[0][c]);
          PanelScales scales(w, x.groups, column);
#if defined(__AVX512F__)
          if (!memory) {
            for (int64_t r = 0; r < rows; r++)
              multiply_in_place<Format>(w, scales, x, column, row + r, out[r]);
            continue;
          }
#endif
          // Packed for the first block of rows, between its products, and reused by the others.
          uint8_t* panel = memory + (p * PANELS + c / LANES) * each;
          if (row == 0) pack_panel(w, column, panel);
          multiply_panel_rows<Format>(panel, (w.row_bytes + 3) / 4, scales, x, row, rows, out);
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
