// Tile helpers that the AMX kernels of attention share.
#pragma once

#include "attention_common.h"

#if defined(__AMX_BF16__)
namespace ingot::kernels {

// Work items with at most this many rows use the decode kernel.
constexpr int DECODE_ROWS = 4;

class AmxChunkBase {
 public:
  explicit AmxChunkBase(const AttentionInputs<bf16>& in) : in_(in) {}

 protected:
  // 16 keys or values in place if they are evenly spaced, else copied and padded with zeros.
  Panel panel(const PagedView<bf16>& view, const bf16* const* rows, int64_t keys, int64_t head,
              int64_t key, bool paged, bf16* copy) const {
    int64_t count = std::clamp<int64_t>(keys - key, 0, TILE);
    int64_t bytes = in_.shape.width * sizeof(bf16);
    if (count == TILE && (!paged || view.block_size % TILE == 0))
      return {rows[key] + head * view.head_stride, view.row_stride * int64_t(sizeof(bf16))};
    std::memset(copy, 0, TILE * bytes);
    for (int64_t r = 0; r < count; r++)
      std::memcpy(copy + r * in_.shape.width, rows[key + r] + head * view.head_stride, bytes);
    return {copy, bytes};
  }

  // The same with the width padded to a multiple of 32 channels.
  Panel padded_panel(const PagedView<bf16>& view, const bf16* const* rows, int64_t keys,
                     int64_t head, int64_t key, bool paged, bf16* copy) const {
    int64_t width = in_.shape.padded();
    if (width == in_.shape.width) return panel(view, rows, keys, head, key, paged, copy);
    std::memset(copy, 0, TILE * width * sizeof(bf16));
    for (int64_t r = 0; r < std::min<int64_t>(TILE, keys - key); r++)
      std::memcpy(copy + r * width, rows[key + r] + head * view.head_stride,
                  in_.shape.width * sizeof(bf16));
    return {copy, width * int64_t(sizeof(bf16))};
  }

  static void store_rows(float* to, Floats values, int64_t rows) {
    _mm512_mask_storeu_ps(to, (1u << rows) - 1, (__m512)values);
  }

  const AttentionInputs<bf16>& in_;
};

}  // namespace ingot::kernels
#endif
