// Data structures of attention that its kernels and its gradient share.
#pragma once

#include "kv_cache.h"
#include "matmul.h"

namespace ingot::kernels {

// Keys are processed in chunks of this size, counted from the start of a sequence.
constexpr int CHUNK = 128;

struct Sequence {
  int64_t query, queries, keys;  // first query, number of queries, number of keys
  int64_t first_key;             // if the keys are packed
  const int64_t* block_table;    // if the keys are in a KV cache, else null
};

struct Shape {
  int64_t heads, kv_heads, width, group;
  bool causal;
  int64_t window;  // 0: unlimited
  float scale;     // of the scores, for base-2 exponentials

  int64_t padded() const { return (width + 31) / 32 * 32; }
};

// The keys visible to the query at `position`.
struct Range {
  int64_t begin, end;
};
inline Range visible_range(const Shape& shape, int64_t position, int64_t keys) {
  Range range{0, shape.causal ? position + 1 : keys};
  if (shape.window) {
    range.begin = std::max<int64_t>(0, position - shape.window + 1);
    range.end = std::min(range.end, position + shape.window);
  }
  return range;
}

// Keys or values of all sequences, packed or in the blocks of a KV cache. Strides are in bytes.
struct PagedView {
  Tensor owner;
  const char* first;
  bool paged, quantized;  // a cache in int8: see kv_cache.h
  int64_t element_size, block_size, block_stride, row_stride, head_stride;

  [[gnu::noinline]] PagedView(const Tensor& x, bool paged)
      : owner(x), paged(paged), quantized(x.scalar_type() == ScalarType::Char) {
    if (x.dim() > 0 && x.stride(x.dim() - 1) != 1) owner = contiguous(x);
    first = data<char>(owner);
    element_size = owner.element_size();
    int64_t d = paged;
    block_size = paged ? x.size(1) : std::max<int64_t>(x.size(0), 1);
    block_stride = paged ? owner.stride(0) * element_size : 0;
    row_stride = owner.stride(d) * element_size;
    head_stride = owner.stride(d + 1) * element_size;
  }

  // Addresses of the rows [first_key, first_key + count) of a sequence, for head 0.
  void locate(const Sequence& seq, int64_t first_key, int64_t count, const char** to) const {
    const char* row = first + (seq.first_key + first_key) * row_stride;
    int64_t block = 0, left = seq.block_table ? 0 : count;
    if (seq.block_table) block = first_key / block_size;
    for (int64_t key = 0; key < count; key++, left--, row += row_stride) {
      if (left == 0) {
        int64_t slot = key ? 0 : first_key % block_size;
        row = first + seq.block_table[block++] * block_stride + slot * row_stride;
        left = block_size - slot;
      }
      to[key] = row;
    }
  }

  // Copy a row of a head, in the dtype of the queries.
  template <class T>
  void copy_row(const char* row, int64_t head, int64_t width, T* to) const {
    row += head * head_stride;
    if (quantized) dequantize_kv_row(reinterpret_cast<const int8_t*>(row), width, to);
    else std::memcpy(to, row, width * sizeof(T));
  }
};

// Queries [begin, end) of a sequence, for key-value heads [head, head + heads).
struct WorkItem {
  int64_t sequence, begin, end, head, heads;
  int64_t first_chunk, last_chunk;

  int64_t chunks() const { return last_chunk - first_chunk; }
};

// Addresses of the keys and values of a chunk, for key-value head 0.
struct KVChunk {
  int64_t first = 0, keys = 0;
  const char *k[CHUNK], *v[CHUNK];
};

// Result of one chunk, or of several merged ones: m, l and O of FlashAttention.
struct SoftmaxState {
  float* row_max;  // (rows)
  float* row_sum;  // (rows)
  float* acc;      // (rows, padded width)

  static int64_t size(int64_t rows, const Shape& shape) { return rows * (2 + shape.padded()); }
  SoftmaxState(float* memory, int64_t rows)
      : row_max(memory), row_sum(memory + rows), acc(memory + 2 * rows) {}
};

// The inputs of a call. The rows of a work item are its (query, head of the group) pairs.
template <class T>
struct AttentionInputs {
  Tensor q_owner;
  const T* q;
  PagedView k, v;
  Shape shape;
  std::vector<Sequence> sequences;

  AttentionInputs(const Tensor& q, const Tensor& k, const Tensor& v, bool paged, Shape shape,
                  std::vector<Sequence> sequences)
      : q_owner(q.stride(2) == 1 ? q : contiguous(q)),
        q(data<T>(q_owner)),
        k(k, paged),
        v(v, paged),
        shape(shape),
        sequences(std::move(sequences)) {}

  int64_t num_rows(const WorkItem& item) const { return (item.end - item.begin) * shape.group; }

  const T* query(const WorkItem& item, int64_t head, int64_t row) const {
    int64_t token = sequences[item.sequence].query + item.begin + row / shape.group;
    int64_t query_head = head * shape.group + row % shape.group;
    return q + token * q_owner.stride(0) + query_head * q_owner.stride(1);
  }

  // The keys of a chunk that are visible to a row, relative to the chunk's first.
  Range visible_in(const WorkItem& item, int64_t row, const KVChunk& chunk) const {
    const Sequence& seq = sequences[item.sequence];
    int64_t position = seq.keys - seq.queries + item.begin + row / shape.group;
    Range range = visible_range(shape, position, seq.keys);
    int64_t begin = std::clamp<int64_t>(range.begin - chunk.first, 0, CHUNK);
    return {begin, std::clamp<int64_t>(range.end - chunk.first, begin, CHUNK)};
  }

  [[gnu::noinline]] void locate(const WorkItem& item, int64_t index, KVChunk& chunk) const {
    const Sequence& seq = sequences[item.sequence];
    int64_t last = seq.keys - seq.queries + item.end - 1;
    int64_t end = std::min(visible_range(shape, last, seq.keys).end, seq.keys);
    chunk.first = (item.first_chunk + index) * CHUNK;
    chunk.keys = std::min<int64_t>(CHUNK, end - chunk.first);
    k.locate(seq, chunk.first, chunk.keys, chunk.k);
    v.locate(seq, chunk.first, chunk.keys, chunk.v);
  }
};

}  // namespace ingot::kernels
