// One chunk of attention in vectors: float32 on all tiers, bf16 on all but AMX.
#pragma once

#include "attention_common.h"

namespace ingot::kernels {

template <class T>
class VectorChunkKernel {
 public:
  explicit VectorChunkKernel(const AttentionInputs<T>& in) : in_(in) {}

  const T* pack_queries(const WorkItem&, int64_t, int64_t) const { return nullptr; }

  // One state per head goes to `parts`.
  [[gnu::noinline]] void run(const WorkItem& item, int64_t head, int64_t heads,
                             const KVChunk& chunk, const T*, float* parts,
                             const KVChunk& next) const {
    int64_t count = in_.num_rows(item), size = SoftmaxState::size(count, in_.shape);
    float* s = scratch<Scratch::ATTENTION_SCORES, float>(count * CHUNK);
    for (int64_t h = 0; h < heads; h++) {
      SoftmaxState part(parts + h * size, count);
      HeadRows k = find_rows<Scratch::ATTENTION_PADDED_KEYS>(in_.k, chunk.k, chunk.keys, head + h);
      compute_scores(item, head + h, k, chunk.keys, s, next);
      for (int64_t row = 0; row < count; row++) {
        Range visible = in_.visible_in(item, row, chunk);
        softmax_row(s + row * CHUNK, visible, part.row_max[row], part.row_sum[row]);
      }
      HeadRows v = find_rows<Scratch::ATTENTION_PADDED_VALUES>(in_.v, chunk.v, chunk.keys, head + h);
      accumulate_values(item, head + h, v, chunk.keys, s, part.acc, next);
    }
  }

  void store_row(const float* acc, Floats scale, T* to) const {
    for_each_vector(in_.shape.width, [&](int64_t at, auto... tail) {
      store(to + at, load(acc + at, tail...) * scale, tail...);
    });
  }

 private:
  using HeadRows = std::array<const T*, CHUNK>;

  // Keys or values of a head, in place or dequantized.
  template <Scratch slot>
  HeadRows find_rows(const PagedView& view, const char* const* rows, int64_t keys,
                     int64_t head) const {
    HeadRows result;
    int64_t width = in_.shape.width;
    T* copies = view.quantized ? scratch<slot, T>(CHUNK * width) : nullptr;
    for (int64_t key = 0; key < keys; key++)
      if (view.quantized) {
        view.copy_row(rows[key], head, width, copies + key * width);
        result[key] = copies + key * width;
      } else {
        result[key] = reinterpret_cast<const T*>(rows[key] + head * view.head_stride);
      }
    return result;
  }

  // Replace scores by probabilities relative to the row's max, with 0 for masked keys.
  void softmax_row(float* s, Range here, float& row_max, float& row_sum) const {
    int64_t lo = here.begin, hi = here.end;
    auto masked = [&](int64_t at, Floats score) {
      if (at >= lo && at + WIDTH <= hi) return score;
      Ints key = lane_indices() + int(at);
      return (key >= int(lo)) & (key < int(hi)) ? score : broadcast(-INF);
    };
    int64_t begin = lo / WIDTH * WIDTH, end = (hi + WIDTH - 1) / WIDTH * WIDTH;
    Floats max_score = broadcast(-INF), scale = broadcast(in_.shape.scale), sums{};
    for (int64_t at = begin; at < end; at += WIDTH)
      max_score = max(max_score, masked(at, load(s + at) * scale));
    row_max = reduce_max(max_score);
    Floats shift = broadcast(std::max(row_max, -3e38f));
    for (int64_t at = 0; at < begin; at += WIDTH) store(s + at, Floats{});
    for (int64_t at = begin; at < end; at += WIDTH) {
      Floats prob = exp2_nonpositive(masked(at, load(s + at) * scale - shift));
      sums += prob;
      store(s + at, prob);
    }
    for (int64_t at = end; at < CHUNK; at += WIDTH) store(s + at, Floats{});
    row_sum = reduce_sum(sums);
  }

  // S = Q K^T. Keys are transposed so that a vector holds 16 keys and no sum crosses its lanes:
  // with 64 channels such sums would cost more than the matmul. Scores of the last vectors may be
  // those of no key; they are masked.
  void compute_scores(const WorkItem& item, int64_t head, const HeadRows& rows, int64_t keys,
                      float* s, const KVChunk& next) const {
    float* k = scratch<Scratch::ATTENTION_TRANSPOSED_KEYS, float>(in_.shape.width * CHUNK);
    transpose_keys(head, rows, keys, k, next);
    for_each_block<ROWS>(in_.num_rows(item), [&](int64_t row, auto count) {
      constexpr int R = count;
      const T* q[R];
      for (int i = 0; i < R; i++) q[i] = in_.query(item, head, row + i);
      for (int64_t key = 0; key < keys; key += VECTORS * WIDTH) {
        Floats total[R][VECTORS] = {};
        for (int64_t at = 0; at < in_.shape.width; at++)
          accumulate_outer(total, [&](int i) { return widen(q[i][at]); },
                           [&](int j) { return load(k + at * CHUNK + key + j * WIDTH); });
        for (int i = 0; i < R; i++)
          for (int j = 0; j < VECTORS; j++)
            store(s + (row + i) * CHUNK + key + j * WIDTH, total[i][j]);
      }
    });
  }

  // From (key, channel) to (channel, key); those after the last key repeat it.
  void transpose_keys(int64_t head, const HeadRows& rows, int64_t keys, float* to,
                      const KVChunk& next) const {
    auto row = [&](int64_t key) { return rows[std::min(key, keys - 1)]; };
    int64_t width = in_.shape.width, at = 0;
#if defined(__AVX512F__)
    for (; at + LINE <= width; at += LINE)
      for (int64_t key = 0; key < keys; key += WIDTH) {
        __m512i tile[WIDTH];  // one cache line of each key
        for (int i = 0; i < WIDTH; i++) {
          tile[i] = _mm512_loadu_si512(row(key + i) + at);
          prefetch(in_.k, next.k, next.keys, key + i, head, at);
        }
        interleave(tile);
        for (int i = 0; i < WIDTH; i++) store_words(tile[i], to + at * CHUNK + key, i);
      }
#endif
    for (int64_t key = 0; key < keys && at < width; key++)
      for (int64_t channel = at; channel < width; channel++)
        to[channel * CHUNK + key] = widen(row(key)[channel]);
  }

#if defined(__AVX512F__)
  // A word of 16 keys: one channel in float32, two in bf16.
  static void store_words(__m512i words, float* to, int index) {
    if constexpr (sizeof(T) == 4) return _mm512_store_si512(to + index * CHUNK, words);
    __m512i upper = _mm512_and_si512(words, _mm512_set1_epi32(0xffff0000));
    _mm512_store_si512(to + 2 * index * CHUNK, _mm512_slli_epi32(words, 16));
    _mm512_store_si512(to + (2 * index + 1) * CHUNK, upper);
  }
#endif

  // O = P V.
  void accumulate_values(const WorkItem& item, int64_t head, const HeadRows& rows, int64_t keys,
                         const float* p, float* out, const KVChunk& next) const {
    int64_t width = in_.shape.width;
    for_each_block<ROWS>(in_.num_rows(item), [&](int64_t row, auto count) {
      auto add = [&](int64_t at, auto vectors, auto... tail) {
        auto prefetch_values = [&](int64_t key) {
          for (int64_t line = at; row == 0 && line < at + vectors * WIDTH; line += LINE)
            prefetch(in_.v, next.v, next.keys, key, head, line);
        };
        float* to = out + row * in_.shape.padded() + at;
        add_values<count, vectors>(rows, keys, at, p + row * CHUNK, to, prefetch_values, tail...);
      };
      int64_t at = 0;
      for (; at + VECTORS * WIDTH <= width; at += VECTORS * WIDTH) add(at, Count<VECTORS>());
      for (; at + WIDTH <= width; at += WIDTH) add(at, Count<1>());
      if (at < width) add(at, Count<1>(), width - at);
    });
  }

  template <int R, int V, class Prefetch, class... Tail>
  void add_values(const HeadRows& rows, int64_t keys, int64_t at, const float* probs, float* to,
                  const Prefetch& prefetch_values, Tail... tail) const {
    Floats total[R][V] = {};
    for (int64_t key = 0; key < keys; key++) {
      const T* v = rows[key] + at;
      prefetch_values(key);
      accumulate_outer(total, [&](int i) { return probs[i * CHUNK + key]; },
                       [&](int j) { return load(v + j * WIDTH, tail...); });
    }
    for (int i = 0; i < R; i++)
      for (int j = 0; j < V; j++) store(to + i * in_.shape.padded() + j * WIDTH, total[i][j]);
  }

  // Keys or values of the next chunk.
  static void prefetch(const PagedView& view, const char* const* rows, int64_t keys, int64_t key,
                       int64_t head, int64_t channel) {
    const int64_t offset = head * view.head_stride + channel * view.element_size;
    if (key < keys) __builtin_prefetch(rows[key] + offset, 0, 2);
  }

  // As many accumulators as registers hold.
  static constexpr int ROWS = WIDTH == 16 ? 4 : 2, VECTORS = 4;
  static constexpr int64_t LINE = 64 / sizeof(T);
  template <int N>
  using Count = std::integral_constant<int, N>;

  // body(row, number of rows) for blocks of R rows, and for the last, which may have fewer.
  template <int R, class Body>
  static void for_each_block(int64_t count, const Body& body, int64_t row = 0) {
    for (; row + R <= count; row += R) body(row, Count<R>());
    if constexpr (R > 1)
      if (row < count) for_each_block<R - 1>(count, body, row);
  }

  // Sizes are constants: otherwise the accumulators would be in memory.
  template <int R, int V, class Scalar, class Vector>
  static void accumulate_outer(Floats (&total)[R][V], const Scalar& scalar, const Vector& vector) {
    Floats factors[R];
    for (int i = 0; i < R; i++) factors[i] = broadcast(scalar(i));
    for (int j = 0; j < V; j++) {
      Floats values = vector(j);
      for (int i = 0; i < R; i++) total[i][j] = fma(values, factors[i], total[i][j]);
    }
  }

  const AttentionInputs<T>& in_;
};

}  // namespace ingot::kernels
