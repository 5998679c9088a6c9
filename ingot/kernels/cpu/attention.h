// What attention and its gradient know of a call.
#pragma once

#include "matmul.h"

namespace ingot::kernels {

struct Sequence {
  int64_t query, queries, keys;  // first query and how many of each
  int64_t first_key;             // where keys are not paged
  const int64_t* pages;          // where they are
};

struct Shape {
  int64_t heads, kv_heads, width, group;
  bool causal;
  int64_t window;  // 0: all
  float scale;

  int64_t padded() const { return (width + 31) / 32 * 32; }
};

// The keys a query at `position` sees.
struct Range {
  int64_t begin, end;
};
inline Range seen(const Shape& shape, int64_t position, int64_t keys) {
  Range range{0, shape.causal ? position + 1 : keys};
  if (shape.window) {
    range.begin = std::max<int64_t>(0, position - shape.window + 1);
    range.end = std::min(range.end, position + shape.window);
  }
  return range;
}

}  // namespace ingot::kernels
