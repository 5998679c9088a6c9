// One chunk of attention with AMX, for more than DECODE_ROWS rows.
//
//   S = Q K^T   keys are the A operand, in place, and the queries are packed
//   O = P V     values are the B operand, in place
//
// AMX's B operand has pairs of k interleaved, so values, with keys as k, would have to be packed.
// Instead they are loaded in place: a pair is then two channels of one key. A row of the A operand
// has the probability of a key at the even positions and 0 at the odd ones, or vice versa, and
// gives the even or the odd channels. Eight rows of probabilities make 16 such rows.
#pragma once

#include "attention_amx.h"

#if defined(__AMX_BF16__)
namespace ingot::kernels {

class AmxPrefillKernel : AmxChunkBase {
 public:
  using AmxChunkBase::AmxChunkBase;

  int64_t packed_size(int64_t count) const {
    return (count + TILE - 1) / TILE * packed_tile_size(in_.shape.width);
  }

  // The queries of all rows as B operands.
  void pack_queries(const WorkItem& item, int64_t head, bf16* to) const {
    int64_t count = in_.num_rows(item), width = in_.shape.width;
    bf16* rows = scratch<Scratch::ATTENTION_QUERY_ROWS, bf16>(count * width);
    for (int64_t row = 0; row < count; row++)
      std::memcpy(rows + row * width, in_.query(item, head, row), width * sizeof(bf16));
    Matrix<bf16> x(rows, count, width, width);
    for (int64_t row = 0; row < count; row += TILE)
      pack_tile(x, row, to + row / TILE * packed_tile_size(width));
  }

  void run(const WorkItem& item, int64_t head, const KVChunk& chunk, const bf16* queries,
           SoftmaxState part) const {
    TileConfig tile_state;
    int64_t count = in_.num_rows(item), row_tiles = (count + TILE - 1) / TILE;
    Scores* s = scratch<Scratch::ATTENTION_SCORES, Scores>(row_tiles);
    Probs* p = scratch<Scratch::ATTENTION_PROBS, Probs>(2 * row_tiles);
    compute_scores(count, head, chunk, queries, s);
    for (int64_t row = 0; row < count; row += TILE) {
      int64_t rows = std::min<int64_t>(TILE, count - row);
      softmax_tile(item, row, rows, chunk, s[row / TILE], part, p + row / HALF_TILE);
    }
    accumulate_values(count, head, chunk, p, part.acc);
  }

 private:
  // Scores are (tile of rows, key, row), probabilities (eight rows, 16 keys, row, pair).
  using Scores = float[CHUNK][TILE];
  using Probs = uint32_t[CHUNK / TILE][TILE][TILE];
  static constexpr int HALF_TILE = TILE / 2;

  void compute_scores(int64_t count, int64_t head, const KVChunk& chunk, const bf16* queries,
                      Scores* s) const {
    int64_t width = in_.shape.width, size = packed_tile_size(width);
    bf16* copies = scratch<Scratch::ATTENTION_PADDED_KEYS, bf16>(CHUNK * width);
    Panel panels[CHUNK / TILE];
    constexpr int64_t STEP = 4 * TILE;  // the most keys of a block
    for (int64_t t = 0; t < (chunk.keys + STEP - 1) / STEP * 4; t++)
      panels[t] = panel(in_.k, chunk.k, chunk.keys, head, t * TILE, width,
                        copies + t * TILE * width);
    auto block = [&]<int P, int Q>(int64_t key, int64_t tile) {
      Panel k[P];
      const bf16* q[Q];
      float* out[P][Q];
      for (int i = 0; i < Q; i++) q[i] = queries + (tile + i) * size;
      for (int p = 0; p < P; p++) {
        k[p] = panels[key / TILE + p];
        for (int i = 0; i < Q; i++) out[p][i] = s[tile + i][key + p * TILE];
      }
      tile_gemm<P, Q>(k, q, width, out, 64);
    };
    int64_t tile = 0;
    for (; (tile + 1) * TILE < count; tile += 2)
      for (int64_t key = 0; key < chunk.keys; key += 2 * TILE)
        block.template operator()<2, 2>(key, tile);
    for (; tile * TILE < count; tile++)
      for (int64_t key = 0; key < chunk.keys; key += 4 * TILE)
        block.template operator()<4, 1>(key, tile);
  }

  // Rounded to bf16, in the upper half of each word.
  static __m512i narrow_in_place(const float* from) {
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)narrow(load(from))), 16);
  }
  static void store_probs(__m512i upper, uint32_t (&to)[TILE][TILE], int64_t row) {
    _mm512_store_si512(to[row], _mm512_srli_epi32(upper, 16));
    _mm512_store_si512(to[HALF_TILE + row], upper);
  }

  // Softmax of 16 rows, one key after the other. The order of the sum is that of the other kernels:
  // keys 16 apart first, then a pairwise reduction.
  void softmax_tile(const WorkItem& item, int64_t first, int64_t rows, const KVChunk& chunk,
                    Scores& s, SoftmaxState part, Probs* p) const {
    Ints lo{}, hi{};
    for (int64_t r = 0; r < rows; r++) {
      Range here = in_.visible_in(item, first + r, chunk);
      lo[r] = here.begin, hi[r] = here.end;
    }
    int64_t steps = (chunk.keys + TILE - 1) / TILE * TILE;
    bool masked = steps > chunk.keys;
    for (int64_t r = 0; r < rows; r++) masked |= lo[r] > 0 || hi[r] < chunk.keys;
    auto visible = [&](int64_t key, Floats score) {
      if (!masked) return score;
      return (lo <= int(key)) & (hi > int(key)) ? score : broadcast(-INF);
    };
    Floats scale = broadcast(in_.shape.scale);
    Floats max_scores[4] = {broadcast(-INF), broadcast(-INF), broadcast(-INF), broadcast(-INF)};
    for (int64_t key = 0; key < steps; key += 4)
      for (int i = 0; i < 4; i++)
        max_scores[i] = max(max_scores[i], visible(key + i, load(s[key + i]) * scale));
    Floats row_max = max(max(max_scores[0], max_scores[1]), max(max_scores[2], max_scores[3]));
    Floats shift = max(broadcast(-3e38f), row_max), sums[TILE];
    for (int i = 0; i < TILE; i++) {
      sums[i] = Floats{};
      for (int64_t key = i; key < steps; key += TILE) {
        Floats prob = exp2_nonpositive(visible(key, load(s[key]) * scale - shift));
        sums[i] += prob;
        store(s[key], prob);
      }
    }
    for (int half = TILE / 2; half; half /= 2)
      for (int i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
    store_rows(part.row_max + first, row_max, rows);
    store_rows(part.row_sum + first, sums[0], rows);
    for (int64_t t = 0; t * TILE < steps; t++) {
      __m512i tile[TILE];
      for (int r = 0; r < TILE; r++) tile[r] = narrow_in_place(s[t * TILE + r]);
      interleave(tile);
      for (int r = 0; r < TILE; r++) store_probs(tile[r], p[r / HALF_TILE][t], r % HALF_TILE);
    }
  }

  // P times eight rows by Q times 32 channels.
  template <int P, int Q>
  static void multiply_values(const Probs* p, const Panel* v, int64_t count, int64_t at) {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int64_t t = 0; t < count; t++) {
      tile_load<4>(v[t].first + at, v[t].stride);
      tile_load<6>(p[0][t], 64);
      tile_dpbf16<0, 6, 4>();
      if constexpr (Q > 1) {
        tile_load<5>(v[t].first + at + TILE_DEPTH, v[t].stride);
        tile_dpbf16<1, 6, 5>();
      }
      if constexpr (P > 1) {
        tile_load<7>(p[1][t], 64);
        tile_dpbf16<Q, 7, 4>();
        if constexpr (Q > 1) tile_dpbf16<3, 7, 5>();
      }
    }
  }

  void accumulate_values(int64_t count, int64_t head, const KVChunk& chunk, const Probs* p,
                         float* out) const {
    int64_t width = in_.shape.padded(), num = (chunk.keys + TILE - 1) / TILE;
    bf16* copies = scratch<Scratch::ATTENTION_PADDED_VALUES, bf16>(CHUNK * width);
    Panel v[CHUNK / TILE];
    for (int64_t t = 0; t < num; t++)
      v[t] = panel(in_.v, chunk.v, chunk.keys, head, t * TILE, width, copies + t * TILE * width);
    alignas(64) float products[4][TILE][TILE];
    auto block = [&]<int P, int Q>(int64_t row, int64_t at) {
      float* to[P][Q];
      for (int i = 0; i < P * Q; i++) to[i / Q][i % Q] = products[i][0];
      multiply_values<P, Q>(p + row / HALF_TILE, v, num, at);
      store_tiles<P, Q>(to, 64);
      for (int i = 0; i < P * Q; i++) {
        int64_t first = row + i / Q * HALF_TILE;
        for (int64_t r = 0; r < std::min<int64_t>(HALF_TILE, count - first); r++) {
          float* dest = out + (first + r) * width + at + i % Q * 2 * TILE;
          store(dest, load(products[i][r]));
          store(dest + TILE, load(products[i][HALF_TILE + r]));
        }
      }
    };
    for (int64_t row = 0; row < count; row += 2 * HALF_TILE)
      for (int64_t at = 0; at < width; at += 2 * TILE_DEPTH) {
        bool two = row + HALF_TILE < count, wide = at + TILE_DEPTH < width;
        if (two && wide) block.template operator()<2, 2>(row, at);
        else if (two) block.template operator()<2, 1>(row, at);
        else if (wide) block.template operator()<1, 2>(row, at);
        else block.template operator()<1, 1>(row, at);
      }
  }
};

}  // namespace ingot::kernels
#endif
