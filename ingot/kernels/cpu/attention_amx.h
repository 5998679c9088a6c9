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
  // 16 keys or values of `width` channels, in place if they are evenly spaced and need no padding;
  // else copied, dequantized if necessary, and padded with zeros.
  Panel panel(const PagedView& view, const char* const* rows, int64_t keys, int64_t head,
              int64_t key, int64_t width, bf16* copy) const {
    int64_t count = std::clamp<int64_t>(keys - key, 0, TILE), stride = width * sizeof(bf16);
    bool full = count == TILE && width == in_.shape.width;
    if (full && !view.quantized && (!view.paged || view.block_size % TILE == 0))
      return {reinterpret_cast<const bf16*>(rows[key] + head * view.head_stride), view.row_stride};
    if (!full) std::memset(copy, 0, TILE * stride);
    for (int64_t r = 0; r < count; r++)
      view.copy_row(rows[key + r], head, in_.shape.width, copy + r * width);
    return {copy, stride};
  }

  static void store_rows(float* to, Floats values, int64_t rows) {
    _mm512_mask_storeu_ps(to, (1u << rows) - 1, (__m512)values);
  }

  const AttentionInputs<bf16>& in_;
};

}  // namespace ingot::kernels
#endif
