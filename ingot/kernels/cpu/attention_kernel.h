// The kernel that computes one chunk of attention, chosen by dtype and tier.
#pragma once

#include "attention_amx_decode.h"
#include "attention_amx_prefill.h"
#include "attention_vector_decode.h"
#include "attention_vector_prefill.h"

namespace ingot::kernels {

// float32 on all tiers, bf16 on all but AMX.
template <class T>
class VectorChunkKernel {
 public:
  // Rows of a work item. The keys are packed for each item: in a long sequence, half as often.
  static constexpr int64_t max_rows(int64_t rows_of_sequence) {
    return rows_of_sequence < 16 * 384 ? 192 : 384;
  }

  explicit VectorChunkKernel(const AttentionInputs<T>& in) : in_(in), prefill_(in), decode_(in) {}

  const float* pack_queries(const WorkItem& item, int64_t head, int64_t heads) const {
    int64_t size = prefill_.packed_size(in_.num_rows(item));
    float* to = scratch<Scratch::ATTENTION_PACKED_QUERIES, float>(heads * size);
    for (int64_t h = 0; h < heads; h++) prefill_.pack_queries(item, head + h, to + h * size);
    return to;
  }

  // One state per head goes to `parts`.
  [[gnu::noinline]] void run(const WorkItem& item, int64_t head, int64_t heads,
                             const KVChunk& chunk, const float* queries, float* parts,
                             const KVChunk& next) const {
    int64_t count = in_.num_rows(item), size = SoftmaxState::size(count, in_.shape);
    if (count <= VECTOR_DECODE_ROWS)
      return decode_.run(item, head, heads, chunk, queries, parts, next);
    for (int64_t h = 0; h < heads; h++)
      prefill_.run(item, head + h, chunk, queries + h * prefill_.packed_size(count),
                   SoftmaxState(parts + h * size, count), next);
  }

  void store_row(const float* acc, Floats scale, T* to) const {
    for_each_vector(in_.shape.width, [&](int64_t at, auto... tail) {
      store(to + at, load(acc + at, tail...) * scale, tail...);
    });
  }

 private:
  const AttentionInputs<T>& in_;
  VectorPrefillKernel<T> prefill_;
  VectorDecodeKernel<T> decode_;
};

#if defined(__AMX_BF16__)
class AmxChunkKernel {
 public:
  static constexpr int64_t max_rows(int64_t) { return 64; }

  explicit AmxChunkKernel(const AttentionInputs<bf16>& in) : in_(in), prefill_(in), decode_(in) {}

  const bf16* pack_queries(const WorkItem& item, int64_t head, int64_t heads) const {
    bool decode = in_.num_rows(item) <= DECODE_ROWS;
    int64_t size = decode ? decode_.packed_size() : prefill_.packed_size(in_.num_rows(item));
    bf16* to = scratch<Scratch::ATTENTION_PACKED_QUERIES, bf16>(heads * size);
    for (int64_t h = 0; h < heads; h++)
      if (decode) decode_.pack_queries(item, head + h, to + h * size);
      else prefill_.pack_queries(item, head + h, to + h * size);
    return to;
  }

  [[gnu::noinline]] void run(const WorkItem& item, int64_t head, int64_t heads,
                             const KVChunk& chunk, const bf16* queries, float* parts,
                             const KVChunk& next) const {
    int64_t count = in_.num_rows(item), size = SoftmaxState::size(count, in_.shape);
    if (count <= DECODE_ROWS)
      return decode_.run(item, head, heads, chunk, queries, parts, next);
    for (int64_t h = 0; h < heads; h++)
      prefill_.run(item, head + h, chunk, queries + h * prefill_.packed_size(count),
                   SoftmaxState(parts + h * size, count));
  }

  // In every 32 channels of `acc` the even ones come first.
  void store_row(const float* from, Floats scale, bf16* to) const {
    for (int64_t at = 0; at < in_.shape.width; at += TILE_DEPTH) {
      Floats even = load(from + at) * scale, odd = load(from + at + TILE) * scale;
      __m512i low = _mm512_cvtepu16_epi32((__m256i)narrow(even));
      __m512i high = _mm512_cvtepu16_epi32((__m256i)narrow(odd));
      int64_t left = in_.shape.width - at;
      __mmask32 mask = left >= TILE_DEPTH ? ~0u : (1u << left) - 1;
      _mm512_mask_storeu_epi16(to + at, mask, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }

 private:
  const AttentionInputs<bf16>& in_;
  AmxPrefillKernel prefill_;
  AmxDecodeKernel decode_;
};
template <class T>
using ChunkKernel = std::conditional_t<sizeof(T) == 2, AmxChunkKernel, VectorChunkKernel<float>>;
#else
template <class T>
using ChunkKernel = VectorChunkKernel<T>;
#endif

}  // namespace ingot::kernels
