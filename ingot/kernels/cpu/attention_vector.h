// Helpers that the vector kernels of attention share.
#pragma once

#include "attention_common.h"

namespace ingot::kernels {

// Work items with at most this many rows use the decode kernel.
constexpr int VECTOR_DECODE_ROWS = 8;

// Matmuls of bf16 with AVX512-BF16 multiply words of two elements, pairs of channels or of keys, and
// round probabilities to bf16, as AMX does. All others multiply one float32 at a time.
#if defined(__AVX512BF16__)
template <class T>
constexpr int PER_WORD = sizeof(T) == 2 ? 2 : 1;
#else
template <class T>
constexpr int PER_WORD = 1;
#endif

// total + a * b, for words of T.
template <class T>
inline Floats multiply_words(Floats a, Floats b, Floats total) {
#if defined(__AVX512BF16__)
  if constexpr (PER_WORD<T> == 2) return dot_fma((DotOperand)a, (DotOperand)b, total);
#endif
  return fma(a, b, total);
}

template <class T>
class VectorChunkBase {
 public:
  explicit VectorChunkBase(const AttentionInputs<T>& in) : in_(in) {}

 protected:
  static constexpr int64_t LINE = 64 / sizeof(T);
  static constexpr int WORD = PER_WORD<T>;
  using HeadRows = std::array<const T*, CHUNK>;

  // Keys or values of a head, in place or dequantized. The last one is repeated to a full vector.
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
    for (int64_t key = keys; key % WIDTH != 0; key++) result[key] = result[keys - 1];
    return result;
  }

  HeadRows find_keys(const KVChunk& chunk, int64_t head) const {
    return find_rows<Scratch::ATTENTION_PADDED_KEYS>(in_.k, chunk.k, chunk.keys, head);
  }
  HeadRows find_values(const KVChunk& chunk, int64_t head) const {
    return find_rows<Scratch::ATTENTION_PADDED_VALUES>(in_.v, chunk.v, chunk.keys, head);
  }

  static int64_t words(int64_t elements) { return (elements + WORD - 1) / WORD; }

  // Scores of the rows [begin, end) become words of probabilities.
  void softmax(const WorkItem& item, int64_t begin, int64_t end, const KVChunk& chunk, float* s,
               SoftmaxState part) const {
    compute_probs(item, begin, end, chunk, s, part);
    if constexpr (WORD == 2)
      for (int64_t row = begin; row < end; row++, s += CHUNK)
        for (int at = 0; at < CHUNK; at += WIDTH) store((bf16*)s + at, load(s + at));
  }

  void compute_probs(const WorkItem& item, int64_t begin, int64_t end, const KVChunk& chunk,
                     float* s, SoftmaxState part) const {
    bool all_visible = in_.visible_in(item, begin, chunk).end == CHUNK &&
                       in_.visible_in(item, end - 1, chunk).begin == 0;
    if (all_visible) return softmax_unmasked(s, begin, end, part);
    for (int64_t row = begin; row < end; row++, s += CHUNK) {
      Range visible = in_.visible_in(item, row, chunk);
      softmax_row(s, visible, part.row_max[row], part.row_sum[row]);
    }
  }

  // As softmax_row(). One loop for all maxima and one for all exponentials: rows overlap, and the
  // latency of reductions is hidden.
  void softmax_unmasked(float* s, int64_t begin, int64_t end, SoftmaxState part) const {
    const Floats scale = broadcast(in_.shape.scale);
    const float* scores = s;
    for (int64_t row = begin; row < end; row++, scores += CHUNK) {
      Floats max_score = broadcast(-INF);
      for (int at = 0; at < CHUNK; at += WIDTH)
        max_score = max(max_score, load(scores + at) * scale);
      part.row_max[row] = reduce_max(max_score);
    }
    for (int64_t row = begin; row < end; row++, s += CHUNK) {
      Floats shift = broadcast(std::max(part.row_max[row], -3e38f)), sums{};
      for (int at = 0; at < CHUNK; at += WIDTH) {
        Floats prob = exp2_nonpositive(load(s + at) * scale - shift);
        sums += prob;
        store(s + at, prob);
      }
      part.row_sum[row] = reduce_sum(sums);
    }
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

  // From (key, channel) to panels of P keys, each (word of channels, key).
  template <int P>
  void transpose_keys(int64_t head, const HeadRows& rows, int64_t keys, float* to,
                      const KVChunk& next) const {
    int64_t width = in_.shape.width, at = 0;
#if defined(__AVX512F__)
    for (; at + LINE <= width; at += LINE)
      for (int64_t key = 0; key < keys; key += WIDTH) {
        __m512i tile[WIDTH];  // one cache line of each key
        for (int i = 0; i < WIDTH; i++) {
          tile[i] = _mm512_loadu_si512(rows[key + i] + at);
          prefetch(in_.k, next.k, next.keys, key + i, head, at);
        }
        interleave(tile);
        float* panel = to + key / P * P * words(width) + key % P;
        for (int i = 0; i < WIDTH; i++) store_words<P>(tile[i], panel + at / WORD * P, i);
      }
#endif
    for (int64_t key = 0; key < keys && at < width; key++)
      for (int64_t channel = at; channel < width; channel += WORD)
        to[key / P * P * words(width) + channel / WORD * P + key % P] =
            word(rows[key], channel, width);
  }

  // Words of values: a channel of one key, or of two, of which the second is 0 from `keys` on.
  template <class... Tail>
  static Floats load_keys(const HeadRows& rows, int64_t key, int64_t keys, int64_t at,
                          Tail... tail) {
    Floats first = load(rows[key] + at, tail...);
    if constexpr (WORD == 1) return first;
    Words low = (Words)first >> 16;
    return key + 1 < keys ? (Floats)(low | (Words)load(rows[key + 1] + at, tail...)) : (Floats)low;
  }

  // The word of a row that begins at an element; elements from `end` on are 0.
  static float word(const T* row, int64_t at, int64_t end) {
    if constexpr (WORD == 2)
      return bit_cast<float>((at + 1 < end ? uint32_t(row[at + 1].bits) << 16 : 0) | row[at].bits);
    else
      return widen(row[at]);
  }

#if defined(__AVX512F__)
  // A word of 16 keys: one channel in float32, two in bf16, which are multiplied together or not.
  template <int P>
  static void store_words(__m512i words, float* to, int index) {
    if constexpr (sizeof(T) * WORD == 4)
      return _mm512_store_si512(to + index * P, words);
    __m512i upper = _mm512_and_si512(words, _mm512_set1_epi32(0xffff0000));
    _mm512_store_si512(to + 2 * index * P, _mm512_slli_epi32(words, 16));
    _mm512_store_si512(to + (2 * index + 1) * P, upper);
  }
#endif

  // Keys or values of the next chunk.
  static void prefetch(const PagedView& view, const char* const* rows, int64_t keys, int64_t key,
                       int64_t head, int64_t channel) {
    const int64_t offset = head * view.head_stride + channel * view.element_size;
    if (key < keys) __builtin_prefetch(rows[key] + offset, 0, 2);
  }

  const AttentionInputs<T>& in_;
};

}  // namespace ingot::kernels
