// One chunk of attention with AMX, for the few rows of a decode step.
//
// Tiles are configured for DECODE_ROWS rows: tile 0 holds the scores of 16 keys, 1 the queries, 2-5
// accumulators of values, 6 probabilities in two rows per row, 7 keys or values. All heads of 16
// keys are read together: they are adjacent in memory, which then sees one sequential stream.
#pragma once

#include "attention_amx.h"

#if defined(__AMX_BF16__)
namespace ingot::kernels {

class AmxDecodeKernel : AmxChunkBase {
 public:
  using AmxChunkBase::AmxChunkBase;

  int64_t packed_size() const { return in_.shape.padded() * DECODE_ROWS; }

  // The queries as (step, pair of channels, row, 2).
  void pack_queries(const WorkItem& item, int64_t head, bf16* to) const {
    std::fill_n(to, packed_size(), bf16{});
    for (int64_t row = 0; row < in_.num_rows(item); row++) {
      const bf16* from = in_.query(item, head, row);
      for (int64_t at = 0; at < in_.shape.width; at++)
        to[(at / 2 * DECODE_ROWS + row) * 2 + at % 2] = from[at];
    }
  }

  void run(const WorkItem& item, int64_t head, int64_t heads, const KVChunk& chunk,
           const bf16* queries, float* parts, const KVChunk& next) const {
    constexpr int ROW_BYTES = DECODE_ROWS * sizeof(float);
    constexpr int PAIRS = 2 * DECODE_ROWS;
    TileConfig tile_state({16, 16, PAIRS, PAIRS, PAIRS, PAIRS, PAIRS, 16},
                          {ROW_BYTES, ROW_BYTES, 64, 64, 64, 64, 64, 64});
    int64_t count = in_.num_rows(item), size = SoftmaxState::size(count, in_.shape);
    Scores* s = scratch<Scratch::ATTENTION_SCORES, Scores>(heads);
    Probs* p = scratch<Scratch::ATTENTION_PROBS, Probs>(heads);
    compute_scores(head, heads, chunk, queries, s, next);
    for (int64_t h = 0; h < heads; h++)
      compute_probs(item, chunk, s[h], SoftmaxState(parts + h * size, count), p[h]);
    accumulate_values(item, head, heads, chunk, p, parts, next);
  }

 private:
  using Scores = float[CHUNK][DECODE_ROWS];
  using Probs = uint32_t[CHUNK / TILE][2 * DECODE_ROWS][TILE];

  // Prefetch 16 rows of the next chunk while the same rows of this one are processed. Tile by tile
  // this reaches 77 % of the bandwidth of a plain read; per head 70 %; without prefetching 60 %.
  static void prefetch_rows(const PagedView& view, const char* const* rows, int64_t keys,
                            int64_t key, int64_t head, int64_t channel) {
    int64_t offset = channel * view.element_size;
    if (offset % 64) return;  // a cache line of int8 has the channels of two tiles
    for (int64_t end = std::min(key + TILE, keys); key < end; key++)
      _mm_prefetch(rows[key] + head * view.head_stride + offset, _MM_HINT_T1);
  }

  void compute_scores(int64_t head, int64_t heads, const KVChunk& chunk, const bf16* queries,
                      Scores* s, const KVChunk& next) const {
    int64_t width = in_.shape.padded();
    bf16* copy = scratch<Scratch::ATTENTION_PADDED_KEYS, bf16>(TILE * width);
    for (int64_t key = 0; key < chunk.keys; key += TILE)
      for (int64_t h = 0; h < heads; h++) {
        Panel k = panel(in_.k, chunk.k, chunk.keys, head + h, key, width, copy);
        const bf16* q = queries + h * packed_size();
        tile_zero<0>();
        for (int64_t at = 0; at < width; at += TILE_DEPTH) {
          tile_load<1>(q + at * DECODE_ROWS, DECODE_ROWS * 4);
          tile_load<7>(k.first + at, k.stride);
          tile_dpbf16<0, 7, 1>();
          prefetch_rows(in_.k, next.k, next.keys, key, head + h, at);
        }
        tile_store<0>(s[h][key], sizeof s[h][key]);
      }
  }

  // A vector holds four rows of four keys. The order of the sum is that of the other kernels: keys
  // 16 apart first, then a pairwise reduction.
  void compute_probs(const WorkItem& item, const KVChunk& chunk, Scores& s, SoftmaxState part,
                     Probs& p) const {
    constexpr int KEYS = TILE / DECODE_ROWS;
    int64_t count = in_.num_rows(item), steps = (chunk.keys + TILE - 1) / TILE * TILE;
    Ints key_of{}, lo{}, hi{};
    bool masked = steps > chunk.keys;
    for (int i = 0; i < TILE; i++) {
      Range here = in_.visible_in(item, std::min<int64_t>(i % DECODE_ROWS, count - 1), chunk);
      key_of[i] = i / DECODE_ROWS, lo[i] = here.begin, hi[i] = here.end;
      masked |= here.begin > 0 || here.end < chunk.keys;
    }
    auto visible = [&](int64_t first, Floats score) {
      if (!masked) return score;
      Ints key = key_of + int(first);
      return (lo <= key) & (hi > key) ? score : broadcast(-INF);
    };
    Floats scale = broadcast(in_.shape.scale), max_score = broadcast(-INF), sums[DECODE_ROWS] = {};
    for (int64_t key = 0; key < steps; key += KEYS)
      max_score = max(max_score, visible(key, load(s[key]) * scale));
    max_score = max(max_score,
                    (Floats)_mm512_shuffle_f32x4((__m512)max_score, (__m512)max_score, 0x4e));
    max_score = max(max_score,
                    (Floats)_mm512_shuffle_f32x4((__m512)max_score, (__m512)max_score, 0xb1));
    Floats shift = max(broadcast(-3e38f), max_score);
    for (int64_t t = 0; t * TILE < steps; t++) {
      Floats w[DECODE_ROWS];
      for (int i = 0; i < DECODE_ROWS; i++) {
        int64_t key = t * TILE + i * KEYS;
        w[i] = exp2_nonpositive(visible(key, load(s[key]) * scale - shift));
        sums[i] += w[i];
      }
      store_probs(w, p[t]);
    }
    Floats total = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    total += (Floats)_mm512_shuffle_f32x4((__m512)total, (__m512)total, 0x4e);
    total += (Floats)_mm512_shuffle_f32x4((__m512)total, (__m512)total, 0xb1);
    store_rows(part.row_max, max_score, count);
    store_rows(part.row_sum, total, count);
  }

  // Transpose four times (key, row) to (row, key), each stored twice as in the prefill kernel.
  static void store_probs(const Floats (&w)[DECODE_ROWS], uint32_t (&to)[2 * DECODE_ROWS][TILE]) {
    auto low = [](Floats a, Floats b) { return _mm512_unpacklo_ps((__m512)a, (__m512)b); };
    auto high = [](Floats a, Floats b) { return _mm512_unpackhi_ps((__m512)a, (__m512)b); };
    __m512 a = low(w[0], w[1]), b = low(w[2], w[3]), c = high(w[0], w[1]), d = high(w[2], w[3]);
    __m512 lanes[DECODE_ROWS] = {_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee),
                                 _mm512_shuffle_ps(c, d, 0x44), _mm512_shuffle_ps(c, d, 0xee)};
    // The keys of a row are now in the order 0 4 8 12, 1 5 9 13, ...
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int r = 0; r < DECODE_ROWS; r++) {
      __m512 sorted = _mm512_permutexvar_ps(order, lanes[r]);
      __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)narrow((Floats)sorted)), 16);
      _mm512_store_si512(to[r], _mm512_srli_epi32(upper, 16));
      _mm512_store_si512(to[DECODE_ROWS + r], upper);
    }
  }

  void accumulate_values(const WorkItem& item, int64_t head, int64_t heads,
                         const KVChunk& chunk, const Probs* p, float* parts,
                         const KVChunk& next) const {
    int64_t count = in_.num_rows(item), width = in_.shape.padded();
    int64_t num = (chunk.keys + TILE - 1) / TILE;
    int64_t tiles_per_head = width / TILE_DEPTH, size = SoftmaxState::size(count, in_.shape);
    bf16* copies = scratch<Scratch::ATTENTION_PADDED_VALUES, bf16>(heads * CHUNK * width);
    Panel* v = scratch<Scratch::ATTENTION_VALUE_PANELS, Panel>(heads * num);
    for (int64_t i = 0; i < heads * num; i++)
      v[i] = panel(in_.v, chunk.v, chunk.keys, head + i / num, i % num * TILE, width,
                   copies + i * TILE * width);
    // Accumulate N times 32 channels, of one head or of several.
    auto block = [&]<int N>(int64_t first) {
      tile_zero<2>(), tile_zero<3>(), tile_zero<4>(), tile_zero<5>();
      for (int64_t t = 0; t < num; t++) {
        auto step = [&]<int i>() {
          int64_t h = (first + i) / tiles_per_head, at = (first + i) % tiles_per_head * TILE_DEPTH;
          if (i == 0 || at == 0) tile_load<6>(p[h][t], 64);
          tile_load<7>(v[h * num + t].first + at, v[h * num + t].stride);
          tile_dpbf16<2 + i, 6, 7>();
          prefetch_rows(in_.v, next.v, next.keys, t * TILE, head + h, at);
        };
        step.template operator()<0>();
        if constexpr (N > 1) step.template operator()<1>();
        if constexpr (N > 2) step.template operator()<2>();
        if constexpr (N > 3) step.template operator()<3>();
      }
      auto store_acc = [&]<int i>() {
        alignas(64) float sums[2 * DECODE_ROWS][TILE];
        tile_store<2 + i>(sums, 64);
        int64_t h = (first + i) / tiles_per_head, at = (first + i) % tiles_per_head * TILE_DEPTH;
        for (int64_t row = 0; row < count; row++) {
          float* to = SoftmaxState(parts + h * size, count).acc + row * width + at;
          store(to, load(sums[row]));
          store(to + TILE, load(sums[DECODE_ROWS + row]));
        }
      };
      store_acc.template operator()<0>();
      if constexpr (N > 1) store_acc.template operator()<1>();
      if constexpr (N > 2) store_acc.template operator()<2>();
      if constexpr (N > 3) store_acc.template operator()<3>();
    };
    int64_t first = 0;
    for (; first + 4 <= heads * tiles_per_head; first += 4) block.template operator()<4>(first);
    for (; first < heads * tiles_per_head; first++) block.template operator()<1>(first);
  }
};

}  // namespace ingot::kernels
#endif
