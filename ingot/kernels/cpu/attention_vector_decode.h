// One chunk of attention for few rows, in vectors.
#pragma once

#include "attention_vector.h"

namespace ingot::kernels {

template <class T>
class VectorDecodeKernel : VectorChunkBase<T> {
  using Base = VectorChunkBase<T>;
  using Base::in_, Base::LINE, Base::prefetch, Base::WORD, Base::words;
  using typename Base::HeadRows;
  template <int N>
  using Count = std::integral_constant<int, N>;

 public:
  using Base::Base;

  // One state per head goes to `parts`. The queries are those of VectorPrefillKernel.
  void run(const WorkItem& item, int64_t head, int64_t heads, const KVChunk& chunk,
           const float* queries, float* parts, const KVChunk& next) const {
    int64_t count = in_.num_rows(item), size = SoftmaxState::size(count, in_.shape);
    float* s = scratch<Scratch::ATTENTION_SCORES, float>(count * CHUNK);
    for (int64_t h = 0; h < heads; h++) {
      SoftmaxState part(parts + h * size, count);
      HeadRows k = this->find_keys(chunk, head + h), v = this->find_values(chunk, head + h);
      const float* q = queries + h * count * words(in_.shape.width);
      compute_scores(q, count, head + h, k, chunk.keys, s, next);
      this->softmax(item, 0, count, chunk, s, part);
      accumulate_values(item, head + h, v, chunk.keys, s, part.acc, next);
    }
  }

 private:
  // S = Q K^T. Keys are transposed so that a vector holds 16 keys and no sum crosses its lanes:
  // with 64 channels such sums would cost more than the matmul. Scores of the last vectors may be
  // those of no key; they are masked.
#if defined(__AVX512F__)
  void compute_scores(const float* queries, int64_t count, int64_t head, const HeadRows& rows,
                      int64_t keys, float* s, const KVChunk& next) const {
    int64_t row = 0, depth = words(in_.shape.width);
    for (; row + 8 <= count; row += 8)
      score_rows<8>(queries + row * depth, head, rows, keys, s + row * CHUNK, next);
    for_each_block<4>(count, [&](int64_t row, auto number) {
      score_rows<number>(queries + row * depth, head, rows, keys, s + row * CHUNK, next);
    }, row);
  }

  // For R rows, with the keys transposed in registers.
  template <int R>
  [[gnu::noinline]] void score_rows(const float* q, int64_t head, const HeadRows& rows,
                                    int64_t keys, float* s, const KVChunk& next) const {
    int64_t width = in_.shape.width;
    for (int64_t key = 0; key < keys; key += WIDTH) {
      Floats total[R] = {};
      auto add = [&](Floats k, int64_t word) {
        for (int r = 0; r < R; r++)
          total[r] = multiply_words<T>(k, broadcast(q[r * words(width) + word]), total[r]);
      };
      int64_t at = 0;
      for (; at + LINE <= width; at += LINE) {
        __m512i tile[WIDTH];  // one cache line of each key
        for (int i = 0; i < WIDTH; i++) {
          tile[i] = _mm512_loadu_si512(rows[key + i] + at);
          prefetch(in_.k, next.k, next.keys, key + i, head, at);
        }
        interleave(tile);
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) {  // a word of each key: two channels in bf16
          if constexpr (sizeof(T) * WORD == 4) {
            add((Floats)tile[i], at / WORD + i);
          } else {
            add((Floats)_mm512_slli_epi32(tile[i], 16), at + 2 * i);
            add((Floats)_mm512_and_si512(tile[i], _mm512_set1_epi32(0xffff0000)), at + 2 * i + 1);
          }
        }
      }
      for (; at < width; at += WORD) {
        Floats k;
        for (int i = 0; i < WIDTH; i++) k[i] = this->word(rows[key + i], at, width);
        add(k, at / WORD);
      }
      for (int r = 0; r < R; r++) store(s + r * CHUNK + key, total[r]);
    }
  }
#else
  void compute_scores(const float* queries, int64_t count, int64_t head, const HeadRows& rows,
                      int64_t keys, float* s, const KVChunk& next) const {
    int64_t width = in_.shape.width;
    float* k = scratch<Scratch::ATTENTION_TRANSPOSED_KEYS, float>(width * CHUNK);
    this->template transpose_keys<CHUNK>(head, rows, keys, k, next);
    for_each_block<ROWS>(count, [&](int64_t row, auto number) {
      constexpr int R = number;
      const float* q = queries + row * width;
      for (int64_t key = 0; key < keys; key += VECTORS * WIDTH) {
        Floats total[R][VECTORS] = {};
        for (int64_t at = 0; at < width; at++)
          accumulate_outer(total, [&](int i) { return q[i * width + at]; },
                           [&](int j) { return load(k + at * CHUNK + key + j * WIDTH); });
        for (int i = 0; i < R; i++)
          for (int j = 0; j < VECTORS; j++)
            store(s + (row + i) * CHUNK + key + j * WIDTH, total[i][j]);
      }
    });
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
    for (int64_t key = 0; key < keys; key += WORD) {
      for (int i = 0; i < WORD; i++) prefetch_values(key + i);
      accumulate_outer(total, [&](int i) { return probs[i * CHUNK + key / WORD]; }, [&](int j) {
        return this->load_keys(rows, key, keys, at + j * WIDTH, tail...);
      });
    }
    for (int i = 0; i < R; i++)
      for (int j = 0; j < V; j++) store(to + i * in_.shape.padded() + j * WIDTH, total[i][j]);
  }

  // As many accumulators as registers hold.
  static constexpr int ROWS = WIDTH == 16 ? 4 : 2, VECTORS = 4;

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
      for (int i = 0; i < R; i++)
        total[i][j] = multiply_words<T>(values, factors[i], total[i][j]);
    }
  }
};

}  // namespace ingot::kernels
