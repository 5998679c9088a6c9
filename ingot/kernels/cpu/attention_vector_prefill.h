// One chunk of attention for many rows, in vectors.
//
// Both matmuls are computed in tiles of ROWS rows and VECTORS vectors, with sums in registers. The
// keys and the values of a chunk are packed in float32, or in words of two bf16, in panels of as many
// columns as a tile has, and each panel stays in L1 while BLOCK rows are computed.
#pragma once

#include "attention_vector.h"

namespace ingot::kernels {

template <class T>
class VectorPrefillKernel : VectorChunkBase<T> {
  using Base = VectorChunkBase<T>;
  using Base::in_, Base::LINE, Base::prefetch, Base::WORD, Base::words;
  using typename Base::HeadRows;

 public:
  using Base::Base;

  int64_t packed_size(int64_t rows) const { return rows * words(in_.shape.width); }

  // The queries of a head in words.
  void pack_queries(const WorkItem& item, int64_t head, float* to) const {
    int64_t width = in_.shape.width;
    for (int64_t row = 0; row < in_.num_rows(item); row++, to += words(width)) {
      const T* query = in_.query(item, head, row);
      if constexpr (WORD == 2) {
        to[width / 2] = 0;  // of an odd width, or of the next row
        std::memcpy(to, query, width * sizeof(T));
      } else {
        for_each_vector(width, [&](int64_t at, auto... tail) {
          store(to + at, load(query + at, tail...), tail...);
        });
      }
    }
  }

  void run(const WorkItem& item, int64_t head, const KVChunk& chunk, const float* queries,
           SoftmaxState part, const KVChunk& next) const {
    int64_t count = in_.num_rows(item), width = in_.shape.width;
    float* k = scratch<Scratch::ATTENTION_TRANSPOSED_KEYS, float>(words(width) * CHUNK);
    float* v = scratch<Scratch::ATTENTION_VALUE_PANELS, float>(panels() * PANEL * CHUNK / WORD);
    float* s = scratch<Scratch::ATTENTION_SCORES, float>(BLOCK * CHUNK);
    this->template transpose_keys<PANEL>(head, this->find_keys(chunk, head), chunk.keys, k, next);
    pack_values(head, this->find_values(chunk, head), chunk.keys, v, next);
    for (int64_t row = 0; row < count; row += BLOCK) {
      int64_t rows = std::min(BLOCK, count - row);
      int64_t keys = std::min(chunk.keys, in_.visible_in(item, row + rows - 1, chunk).end);
      compute_scores(queries + row * words(width), rows, k, keys, s);
      this->softmax(item, row, row + rows, chunk, s, part);
      accumulate_values(s, rows, v, keys, part.acc + row * in_.shape.padded());
    }
  }

 private:
  static constexpr int ROWS = 6, VECTORS = WIDTH == 16 ? 4 : 2, PANEL = VECTORS * WIDTH;
  static constexpr int64_t BLOCK = 8 * ROWS;  // rows whose scores stay in L1
  static constexpr int64_t KEYS = CHUNK / 2;  // of a panel of values in L1
  int64_t panels() const { return (in_.shape.width + PANEL - 1) / PANEL; }

  // S = Q K^T, with scores after the last key and after the last row, which are not used.
  [[gnu::noinline]] void compute_scores(const float* queries, int64_t count, const float* k,
                                        int64_t keys, float* s) const {
    int64_t depth = words(in_.shape.width);
    for_each_column<VECTORS>(0, keys, [&](int64_t key, auto vectors) {
      const float* panel = k + key / PANEL * PANEL * depth + key % PANEL;
      for (int64_t row = 0; row < count; row += ROWS) {
        const float* q[ROWS];
        for (int i = 0; i < ROWS; i++) q[i] = queries + std::min(row + i, count - 1) * depth;
        Floats total[ROWS][vectors] = {};
        for (int64_t at = 0; at < depth; at++)
          add_outer(total, panel + at * PANEL, [&](int i) { return q[i][at]; });
        for (int i = 0; i < ROWS; i++)
          for (int j = 0; j < vectors; j++)
            store(s + (row + i) * CHUNK + key + j * WIDTH, total[i][j]);
      }
    });
  }

  // To panels of (word of keys, channel).
  void pack_values(int64_t head, const HeadRows& rows, int64_t keys, float* to,
                   const KVChunk& next) const {
    int64_t width = in_.shape.width;
    for (int64_t key = 0; key < keys; key++)
      for (int64_t line = 0; line < width; line += LINE)
        prefetch(in_.v, next.v, next.keys, key, head, line);
    for (int64_t first = 0; first < width; first += PANEL, to += PANEL * CHUNK / WORD)
      for (int64_t key = 0; key < keys; key += WORD)
        for_each_vector(std::min<int64_t>(PANEL, width - first), [&](int64_t at, auto... tail) {
          store(to + key / WORD * PANEL + at, this->load_keys(rows, key, keys, first + at, tail...));
        });
  }

  // O = P V.
  [[gnu::noinline]] void accumulate_values(const float* probs, int64_t count, const float* v,
                                           int64_t keys, float* out) const {
    int64_t stride = in_.shape.padded();
    for (int64_t first = 0; first < keys; first += KEYS)
      for_each_column<VECTORS>(0, in_.shape.width, [&](int64_t at, auto vectors) {
        const float* panel = v + at / PANEL * PANEL * CHUNK / WORD + at % PANEL;
        int64_t end = words(std::min(keys, first + KEYS));
        for (int64_t row = 0; row < count; row += ROWS) {
          Floats total[ROWS][vectors] = {};
          float* to = out + row * stride + at;
          for (int i = 0; first > 0 && i < ROWS; i++)
            for (int j = 0; j < vectors; j++)
              if (row + i < count) total[i][j] = load(to + i * stride + j * WIDTH);
          const float* p = probs + row * CHUNK;
          for (int64_t key = first / WORD; key < end; key++)
            add_outer(total, panel + key * PANEL, [&](int i) { return p[i * CHUNK + key]; });
          for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < vectors; j++)
              if (row + i < count) store(to + i * stride + j * WIDTH, total[i][j]);
        }
      });
  }

  // body(column, number of vectors) for V vectors at a time, then for V / 2, ..., to the end.
  template <int V, class Body>
  static void for_each_column(int64_t at, int64_t end, const Body& body) {
    for (; at + (V - 1) * WIDTH < end; at += V * WIDTH) body(at, std::integral_constant<int, V>());
    if constexpr (V > 1) for_each_column<V / 2>(at, end, body);
  }

  // Sizes are constants: otherwise the accumulators would be in memory.
  template <int V, class Scalar>
  static void add_outer(Floats (&total)[ROWS][V], const float* vectors, const Scalar& scalar) {
    Floats values[V];
    for (int j = 0; j < V; j++) values[j] = load(vectors + j * WIDTH);
    for (int i = 0; i < ROWS; i++) {
      Floats factor = broadcast(scalar(i));
      for (int j = 0; j < V; j++)
        total[i][j] = multiply_words<T>(values[j], factor, total[i][j]);
    }
  }
};

}  // namespace ingot::kernels
