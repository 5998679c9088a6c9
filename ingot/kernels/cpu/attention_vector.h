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
                             const KVChunk&) const {
    int64_t count = in_.num_rows(item), size = SoftmaxState::size(count, in_.shape);
    float* s = scratch<Scratch::ATTENTION_SCORES, float>(count * CHUNK);
    for (int64_t h = 0; h < heads; h++) {
      SoftmaxState part(parts + h * size, count);
      HeadRows k = find_rows<Scratch::ATTENTION_PADDED_KEYS>(in_.k, chunk.k, chunk.keys, head + h);
      compute_scores(item, head + h, k, chunk.keys, s);
      for (int64_t row = 0; row < count; row++) {
        Range visible = in_.visible_in(item, row, chunk);
        softmax_row(s + row * CHUNK, visible, part.row_max[row], part.row_sum[row]);
      }
      HeadRows v =
          find_rows<Scratch::ATTENTION_PADDED_VALUES>(in_.v, chunk.v, chunk.keys, head + h);
      accumulate_values(item, v, chunk.keys, s, part.acc);
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
  // with 64 channels such sums would cost more than the matmul.
  void compute_scores(const WorkItem& item, int64_t head, const HeadRows& rows, int64_t keys,
                      float* s) const {
    int64_t count = in_.num_rows(item), padded = (keys + WIDTH - 1) / WIDTH * WIDTH;
    float* k = scratch<Scratch::ATTENTION_TRANSPOSED_KEYS, float>(in_.shape.width * CHUNK);
    transpose_keys(rows, keys, padded, k);
    for (int64_t row = 0; row < count; row += ROWS) {
      const T* q[ROWS];  // rows beyond the end repeat the last one
      for (int i = 0; i < ROWS; i++) q[i] = in_.query(item, head, std::min(row + i, count - 1));
      for (int64_t key = 0; key < padded; key += VECTORS * WIDTH) {
        int64_t vectors = std::min<int64_t>(VECTORS, (padded - key) / WIDTH);
        Floats total[ROWS][VECTORS] = {};
        for (int64_t at = 0; at < in_.shape.width; at++)
          accumulate_outer(total, [&](int i) { return widen(q[i][at]); },
                           [&](int64_t j) { return load(k + at * CHUNK + key + j * WIDTH); },
                           vectors);
        for (int i = 0; i < ROWS && row + i < count; i++)
          for (int64_t j = 0; j < vectors; j++)
            store(s + (row + i) * CHUNK + key + j * WIDTH, total[i][j]);
      }
    }
  }

  // From (key, channel) to (channel, key); those after the last key repeat it.
  void transpose_keys(const HeadRows& rows, int64_t keys, int64_t padded, float* to) const {
    auto row = [&](int64_t key) { return rows[std::min(key, keys - 1)]; };
    int64_t width = in_.shape.width, at = 0;
#if defined(__AVX512F__)
    for (; at + WIDTH <= width; at += WIDTH)
      for (int64_t key = 0; key < padded; key += WIDTH) {
        __m512i tile[WIDTH];
        for (int i = 0; i < WIDTH; i++) tile[i] = (__m512i)load(row(key + i) + at);
        interleave(tile);
        for (int i = 0; i < WIDTH; i++)
          _mm512_store_si512(to + (at + i) * CHUNK + key, tile[i]);
      }
#endif
    for (int64_t key = 0; key < padded && at < width; key++)
      for (int64_t channel = at; channel < width; channel++)
        to[channel * CHUNK + key] = widen(row(key)[channel]);
  }

  void accumulate_values(const WorkItem& item, const HeadRows& rows, int64_t keys, const float* p,
                         float* out) const {
    int64_t count = in_.num_rows(item), width = in_.shape.width;
    for (int64_t row = 0; row < count; row += ROWS)
      for (int64_t at = 0; at < width; at += VECTORS * WIDTH) {
        int64_t vectors = std::min<int64_t>(VECTORS, (width - at + WIDTH - 1) / WIDTH);
        Floats total[ROWS][VECTORS] = {};
        for (int64_t key = 0; key < keys; key++) {
          const T* v = rows[key] + at;
          accumulate_outer(
              total, [&](int i) { return p[std::min(row + i, count - 1) * CHUNK + key]; },
              [&](int64_t j) {
                int64_t left = width - at - j * WIDTH;
                return left >= WIDTH ? load(v + j * WIDTH) : load(v + j * WIDTH, left);
              },
              vectors);
        }
        for (int i = 0; i < ROWS && row + i < count; i++)
          for (int64_t j = 0; j < vectors; j++)
            store(out + (row + i) * in_.shape.padded() + at + j * WIDTH, total[i][j]);
      }
  }

  // As many accumulators as registers hold.
  static constexpr int ROWS = WIDTH == 16 ? 4 : 2, VECTORS = 4;

  template <class Scalar, class Vector>
  static void accumulate_outer(Floats (&total)[ROWS][VECTORS], const Scalar& scalar,
                               const Vector& vector, int64_t vectors) {
    Floats factors[ROWS];
    for (int i = 0; i < ROWS; i++) factors[i] = broadcast(scalar(i));
    auto add = [&](int64_t j) {
      Floats values = vector(j);
      for (int i = 0; i < ROWS; i++) total[i][j] = fma(values, factors[i], total[i][j]);
    };
    if (vectors == VECTORS)
      for (int j = 0; j < VECTORS; j++) add(j);  // unrolled: accumulators stay in registers
    else
      for (int64_t j = 0; j < vectors; j++) add(j);
  }

  const AttentionInputs<T>& in_;
};

}  // namespace ingot::kernels
