// Attention over packed sequences: one kernel for training, prefill and decode.
//
// A work item is a block of queries of one sequence for some of its key-value heads. Its rows are
// all (query, head of the group) pairs. Keys are processed in chunks of 128 from the start of the
// sequence. The result of a chunk for a row (row_max, row_sum, acc) depends only on the row's query
// and the chunk's keys; chunks are merged in order. So an output does not depend on the other rows,
// on how many queries were computed together, on where the keys are stored, or on the threads.
//
//   scores   S = Q K^T
//   probs    P = exp(scale S - row_max), 0 for masked keys
//   values   O = P V
#include <cmath>

#include "attention_backward.h"
#include "attention_kernel.h"

namespace ingot::kernels {

// Rows of a work item that is small.
constexpr int64_t SMALL_ROWS = 16;

// Work items, and their distribution to tasks.
template <class Kernel>
class WorkSplit {
 public:
  WorkSplit(const Shape& shape, const std::vector<Sequence>& sequences)
      : shape_(shape), sequences_(sequences) {}

  bool all_small(const std::vector<WorkItem>& items) const {
    return std::all_of(items.begin(), items.end(),
                       [&](const WorkItem& u) { return num_rows(u) <= SMALL_ROWS; });
  }

  std::vector<WorkItem> split() const {
    std::vector<WorkItem> items;
    for (int64_t s = 0; s < int64_t(sequences_.size()); s++) {
      const Sequence& seq = sequences_[s];
      // A decode step processes all heads of a sequence together: they are adjacent in memory.
      int64_t rows = seq.queries * shape_.group;
      int64_t max_queries = std::max<int64_t>(1, Kernel::max_rows(rows) / shape_.group);
      bool small = rows <= SMALL_ROWS;
      bool together = small && int64_t(sequences_.size()) >= 2 * num_threads();
      int64_t heads = together ? shape_.kv_heads : 1;
      for (int64_t head = 0; head < shape_.kv_heads; head += heads)
        for (int64_t q = 0; q < seq.queries; q += max_queries)
          items.push_back(make_item(s, q, std::min(q + max_queries, seq.queries), head, heads));
    }
    return items;
  }

  // First item of each task, such that all tasks have about the same cost.
  std::vector<int64_t> balance(const std::vector<WorkItem>& items, int64_t parts) const {
    auto cost = [&](const WorkItem& u) {
      return u.heads * u.chunks() * (num_rows(u) + SMALL_ROWS);
    };
    int64_t total = 0, acc = 0;
    for (const WorkItem& u : items) total += cost(u);
    std::vector<int64_t> bounds{0};
    for (int64_t u = 0; u < int64_t(items.size()); u++) {
      while (int64_t(bounds.size()) < parts && acc * parts >= total * int64_t(bounds.size()))
        bounds.push_back(u);
      acc += cost(items[u]);
    }
    bounds.resize(parts, items.size());
    bounds.push_back(items.size());
    return bounds;
  }

 private:
  int64_t num_rows(const WorkItem& item) const { return (item.end - item.begin) * shape_.group; }

  WorkItem make_item(int64_t s, int64_t begin, int64_t end, int64_t head, int64_t heads) const {
    int64_t keys = sequences_[s].keys, offset = keys - sequences_[s].queries;
    Range first = visible_range(shape_, offset + begin, keys),
        last = visible_range(shape_, offset + end - 1, keys);
    return {s, begin, end, head, heads, first.begin / CHUNK, (last.end + CHUNK - 1) / CHUNK};
  }

  const Shape& shape_;
  const std::vector<Sequence>& sequences_;
};

template <class T>
class Attention {
 public:
  Attention(AttentionInputs<T> in, const Tensor& out)
      : in_(std::move(in)), kernel_(in_), out_(data<T>(out)) {}
  Attention(const Attention&) = delete;

  void run() const {
    WorkSplit<ChunkKernel<T>> work(in_.shape, in_.sequences);
    std::vector<WorkItem> items = work.split();
    int64_t threads = num_threads(), chunks = 0;
    for (const WorkItem& item : items) chunks += item.chunks();
    if (int64_t(items.size()) < 2 * threads && chunks >= 4 * threads && work.all_small(items))
      return run_by_chunks(items);
    int64_t parts = threads == 1 ? 1 : std::min<int64_t>(4 * threads, items.size());
    std::vector<int64_t> bounds = work.balance(items, parts);
    parallel_for_dynamic(parts, [&](TaskQueue& queue) {
      for (int64_t p; queue.pop(p);) {
        int64_t begin = bounds[p], end = bounds[p + 1];
        KVChunk chunk;
        if (begin < end) in_.locate(items[begin], 0, chunk);
        for (int64_t u = begin; u < end; u++)
          run_item(items[u], chunk, u + 1 < end ? &items[u + 1] : nullptr);
      }
    });
  }

 private:
  // `chunk` is the first of this item and becomes the first of the next one, whose keys are
  // prefetched while earlier ones are processed.
  void run_item(const WorkItem& item, KVChunk& chunk, const WorkItem* next_item) const {
    int64_t count = in_.num_rows(item), size = SoftmaxState::size(count, in_.shape);
    float* memory = scratch<Scratch::ATTENTION_STATE, float>(2 * item.heads * size);
    if (item.chunks() == 0)
      for (int64_t h = 0; h < item.heads; h++) clear(memory + h * size, count);
    float* parts = memory + item.heads * size;
    const auto* queries = kernel_.pack_queries(item, item.head, item.heads);
    for (int64_t c = 0; c < item.chunks(); c++) {
      KVChunk next;
      if (c + 1 < item.chunks()) in_.locate(item, c + 1, next);
      else if (next_item) in_.locate(*next_item, 0, next);
      kernel_.run(item, item.head, item.heads, chunk, queries, c ? parts : memory, next);
      for (int64_t h = 0; h < item.heads; h++) {
        SoftmaxState whole(memory + h * size, count);
        if (c) merge(whole, SoftmaxState(parts + h * size, count), count);
        else begin(whole, count);
      }
      chunk = next;
    }
    for (int64_t h = 0; h < item.heads; h++)
      finish(item, item.head + h, SoftmaxState(memory + h * size, count));
  }

  void clear(float* state, int64_t count) const {
    std::fill_n(state, count, -INF);
    std::fill_n(state + count, SoftmaxState::size(count, in_.shape) - count, 0.0f);
  }

  // Few rows, many keys (split-KV): threads compute chunks, which are merged afterwards.
  void run_by_chunks(const std::vector<WorkItem>& items) const {
    std::vector<std::array<int64_t, 4>> tasks;  // item, head, chunk, offset of its state
    int64_t total = 0;
    for (int64_t u = 0; u < int64_t(items.size()); u++)
      for (int64_t h = 0; h < items[u].heads; h++)
        for (int64_t c = 0; c < items[u].chunks(); c++) {
          tasks.push_back({u, items[u].head + h, c, total});
          total += SoftmaxState::size(in_.num_rows(items[u]), in_.shape);
        }
    float* memory = scratch<Scratch::ATTENTION_CHUNK_STATES, float>(total);
    parallel_for_dynamic(tasks.size(), [&](TaskQueue& queue) {
      for (int64_t t; queue.pop(t);) {
        auto [u, head, c, at] = tasks[t];
        KVChunk chunk;
        in_.locate(items[u], c, chunk);
        kernel_.run(items[u], head, 1, chunk, kernel_.pack_queries(items[u], head, 1), memory + at,
                    {});
      }
    });
    for (size_t t = 0; t < tasks.size();) {
      auto [u, head, first, at] = tasks[t];
      int64_t count = in_.num_rows(items[u]);
      float* whole = scratch<Scratch::ATTENTION_STATE, float>(SoftmaxState::size(count, in_.shape));
      clear(whole, count);
      for (int64_t c = 0; c < items[u].chunks(); c++, t++)
        merge(SoftmaxState(whole, count), SoftmaxState(memory + tasks[t][3], count), count);
      finish(items[u], head, SoftmaxState(whole, count));
    }
  }

  // Normalize the state of the first chunk as if it had been merged into an empty one.
  void begin(SoftmaxState whole, int64_t count) const {
    int64_t width = in_.shape.padded();
    for (int64_t row = 0; row < count; row++)
      if (whole.row_max[row] == -INF)
        whole.row_sum[row] = 0, std::fill_n(whole.acc + row * width, width, 0.0f);
  }

  [[gnu::noinline]] void merge(SoftmaxState whole, const SoftmaxState& part, int64_t count) const {
    int64_t width = in_.shape.padded();
    for (int64_t row = 0; row < count; row++) {
      if (part.row_max[row] == -INF) continue;  // the whole chunk is masked
      float row_max = std::max(whole.row_max[row], part.row_max[row]);
      Floats a = exp2_nonpositive(broadcast(whole.row_max[row] - row_max));
      Floats b = exp2_nonpositive(broadcast(part.row_max[row] - row_max));
      whole.row_max[row] = row_max;
      whole.row_sum[row] = whole.row_sum[row] * a[0] + part.row_sum[row] * b[0];
      float *to = whole.acc + row * width, *from = part.acc + row * width;
      for (int64_t at = 0; at < width; at += WIDTH)
        store(to + at, fma(load(from + at), b, load(to + at) * a));
    }
  }

  [[gnu::noinline]] void finish(const WorkItem& item, int64_t head, SoftmaxState state) const {
    const Shape& shape = in_.shape;
    for (int64_t row = 0; row < in_.num_rows(item); row++) {
      int64_t token = in_.sequences[item.sequence].query + item.begin + row / shape.group;
      int64_t query_head = head * shape.group + row % shape.group;
      T* to = out_ + (token * shape.heads + query_head) * shape.width;
      Floats scale = broadcast(state.row_sum[row] > 0 ? 1.0f / state.row_sum[row] : 0.0f);
      kernel_.store_row(state.acc + row * shape.padded(), scale, to);
    }
  }

  AttentionInputs<T> in_;
  ChunkKernel<T> kernel_;
  T* out_;
};

// Validate the lengths and the block table and return the sequences.
std::vector<Sequence> check_sequences(const Tensor& q, const Tensor& k, const Integers& starts,
                                      const std::optional<Integers>& lengths, int64_t num_blocks,
                                      int64_t blocks_per_seq, const int64_t* table) {
  check(starts.count >= 1 && starts[0] == 0 && starts[starts.count - 1] == q.size(0),
        "cu_seqlens must run from 0 to the number of queries");
  int64_t num = starts.count - 1, num_keys = 0;
  check(!lengths || lengths->count == num, "context_lens must have one entry per sequence");
  std::vector<Sequence> result(num);
  for (int64_t b = 0; b < num; b++) {
    int64_t queries = starts[b + 1] - starts[b], keys = lengths ? (*lengths)[b] : queries;
    check(queries >= 0 && keys >= queries,
          "cu_seqlens must be non-decreasing, context_lens at least the numbers of queries");
    if (table) {
      int64_t used = (keys + k.size(1) - 1) / std::max<int64_t>(k.size(1), 1);
      check(k.size(1) > 0 || keys == 0, "block size must be positive");
      check(used <= blocks_per_seq, "block_table must have enough blocks for all keys");
      for (int64_t p = 0; p < used; p++) {
        int64_t block = table[b * blocks_per_seq + p];
        check(block >= 0 && block < num_blocks, "block_table has a block index out of range");
      }
    }
    result[b] = {starts[b], queries, keys, num_keys, table ? table + b * blocks_per_seq : nullptr};
    num_keys += keys;
    check(num_keys >= keys, "context_lens is too large");
  }
  check(table || num_keys == k.size(0), "k must have one row per key of the sequences");
  return result;
}

// The validated arguments of a call.
struct AttentionArgs {
  std::vector<int64_t> table;
  std::vector<Sequence> sequences;
  Shape shape;
  double scale;
  bool paged;

  AttentionArgs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
                const std::optional<Tensor>& context_lens, const std::optional<Tensor>& block_table,
                bool causal, std::optional<int64_t> window, std::optional<double> given_scale)
      : paged(block_table.has_value()) {
    check(q.dim() == 3 && k.dim() == 3 + paged && v.dim() == k.dim(),
        "q must be (T, N, H), k and v (T, K, H), or (blocks, block size, K, H) with a block_table");
    check(same_sizes(k, v), "k and v must have the same shape");
    check(cu_seqlens.dim() == 1 && (!context_lens || context_lens->dim() == 1),
          "cu_seqlens and context_lens must be vectors");
    check(!paged || (context_lens && block_table->dim() == 2),
          "block_table must be a matrix and requires context_lens");
    check(!window || *window > 0, "window must be positive");
    int64_t d = k.dim(), heads = q.size(1), kv_heads = k.size(d - 2), width = q.size(2);
    bool quantized = paged && k.scalar_type() == ScalarType::Char;
    check(k.size(d - 1) == width + (quantized ? KV_SCALE_BYTES : 0) && kv_heads > 0 &&
              heads % kv_heads == 0 && width > 0 && heads > 0,
          "q and k must have the same head size, and heads must be a multiple of kv_heads");
    check_same_dtype(k, quantized ? k : q), check_same_dtype(v, quantized ? k : q);
    Integers starts(cu_seqlens);
    std::optional<Integers> lengths;
    if (context_lens) lengths.emplace(*context_lens);
    int64_t blocks_per_seq = 0;
    if (paged) {
      Integers blocks(*block_table);
      blocks_per_seq = block_table->size(1);
      check(block_table->size(0) == starts.count - 1, "block_table must have one row per sequence");
      table.resize(blocks.count + 1);
      for (int64_t i = 0; i < blocks.count; i++) table[i] = blocks[i];
    }
    scale = given_scale ? *given_scale : 1.0 / std::sqrt(double(width));
    float log2_scale = float(scale) * 1.44269504f;
    shape = {heads, kv_heads, width, heads / kv_heads, causal, window.value_or(0), log2_scale};
    const int64_t* blocks = paged ? table.data() : nullptr;
    sequences = check_sequences(q, k, starts, lengths, k.size(0), blocks_per_seq, blocks);
  }
};

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
                 const std::optional<Tensor>& context_lens,
                 const std::optional<Tensor>& block_table,
                 bool causal, std::optional<int64_t> window, std::optional<double> scale) {
  return dispatch_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    AttentionArgs args(q, k, v, cu_seqlens, context_lens, block_table, causal, window, scale);
    Tensor out = allocate_like(q);
    AttentionInputs<T> in(q, k, v, args.paged, args.shape, std::move(args.sequences));
    Attention<T>(std::move(in), out).run();
    return out;
  });
}

Tensors attention_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& q, const Tensor& k,
                           const Tensor& v, const Tensor& cu_seqlens,
                           const std::optional<Tensor>& context_lens,
                           const std::optional<Tensor>& block_table, bool causal,
                           std::optional<int64_t> window, std::optional<double> scale) {
  check(needs_grad.size() == 9 && grads.size() == 1,
        "expected one flag per argument and one gradient");
  return dispatch_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    AttentionArgs args(q, k, v, cu_seqlens, context_lens, block_table, causal, window, scale);
    check(!args.paged, "the gradient is not implemented for a block_table");
    check_same_dtype(grads[0], q);
    check(same_sizes(grads[0], q),
          "the gradient must have the shape of the output");
    Tensors all{allocate_like(q), allocate_like(k), allocate_like(v)}, result;
    AttentionTensors<T> of{Heads<T>(q), Heads<T>(k), Heads<T>(v)};
    AttentionTensors<T> to{Heads<T>(all[0]), Heads<T>(all[1]), Heads<T>(all[2])};
    AttentionBackward<T>(of, Heads<T>(grads[0]), to, args.shape, args.scale, args.sequences).run();
    for (size_t i = 0; i < all.size(); i++)
      if (needs_grad[i]) result.push_back(all[i]);
    return result;
  });
}

}  // namespace ingot::kernels

REGISTER_OP(attention)
REGISTER_BACKWARD(attention)
