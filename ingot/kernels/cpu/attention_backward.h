// The gradient of attention over packed sequences. With P the weights of the values, dO the
// gradient:
//
//   dV = P^T dO    dP = dO V^T    dS = P (dP - the sum of P dP along the keys) scale
//   dQ = dS K      dK = dS^T Q
//
// A job is all queries of a sequence for one key-value head, so sums over queries are computed by
// one thread, in one order. Lanes, (query, head of the group) pairs, are processed 256 at a time:
// their P and dS are stored in the tensors' dtype, and no temporary is larger.
#pragma once

#include "attention_common.h"

namespace ingot::kernels {

// A tensor of (token, head, channel); a copy where channels do not lie side by side.
template <class T>
struct Heads {
  Tensor owner;
  T* first;
  int64_t token_stride, head_stride, width;

  [[gnu::noinline]] explicit Heads(const Tensor& x)
      : owner(x.stride(2) == 1 ? x : contiguous(x)),
        first(data<T>(owner)),
        token_stride(owner.stride(0)),
        head_stride(owner.stride(1)),
        width(x.size(2)) {}
  T* at(int64_t token,
        int64_t head) const { return first + token * token_stride + head * head_stride; }
  Matrix<T> rows(int64_t token, int64_t count, int64_t head) const {
    return {at(token, head), count, width, token_stride};
  }
};

template <class T>
struct AttentionTensors {
  Heads<T> q, k, v;
};

template <class T>
class AttentionBackward {
 public:
  AttentionBackward(const AttentionTensors<T>& in, const Heads<T>& grad,
                    const AttentionTensors<T>& to, const Shape& shape, double scale,
                    const std::vector<Sequence>& sequences)
      : in_(in), grad_(grad), grads_(to), shape_(shape), scale_(float(scale)),
          sequences_(sequences) {}

  void run() const {
    parallel_for_dynamic(sequences_.size() * shape_.kv_heads, [&](TaskQueue& queue) {
      FlushSubnormals flush;  // probabilities and their gradients
      [[maybe_unused]] typename PackedB<T>::TileState tile_state;
      for (int64_t task; queue.pop(task);)
        run_head(sequences_[task / shape_.kv_heads], task % shape_.kv_heads);
    });
  }

 private:
  static constexpr int64_t MAX_ROWS = 256;

  // Keys and values of a head, as they lie and as right operands of 256 each; sums of their
  // gradients.
  struct KVSide {
    Matrix<T> rows;
    std::vector<PackedB<T>> groups;
    float* sums;
  };

  void run_head(const Sequence& seq, int64_t head) const {
    int64_t num = (seq.keys + BLOCK_N - 1) / BLOCK_N, width = shape_.width;
    int64_t each = PackedB<T>::size(BLOCK_N, width);
    T* memory = scratch<Scratch::BACKWARD_PACKED_KV, T>(2 * num * each);
    float* sums = scratch<Scratch::BACKWARD_GRAD_KV, float>(2 * seq.keys * width);
    std::fill_n(sums, 2 * seq.keys * width, 0.0f);
    KVSide k{in_.k.rows(seq.first_key, seq.keys, head), {}, sums};
    KVSide v{in_.v.rows(seq.first_key, seq.keys, head), {}, sums + seq.keys * width};
    int64_t num_rows = seq.queries * shape_.group;
    for (KVSide* side : {&k, &v})
      for (int64_t key = 0; key < seq.keys; key += BLOCK_N, memory += each) {
        int64_t count = std::min<int64_t>(BLOCK_N, seq.keys - key);
        side->groups.emplace_back(side->rows.slice_rows(key, count), memory, num_rows);
      }
    for (int64_t row = 0; row < num_rows; row += MAX_ROWS)
      run_block(seq, head, row, std::min(MAX_ROWS, num_rows - row), k, v);
    store_rounded(grads_.k.rows(seq.first_key, seq.keys, head), k.sums);
    store_rounded(grads_.v.rows(seq.first_key, seq.keys, head), v.sums);
  }

  static void store_rounded(const Matrix<T>& to, const float* sums) {
    for (int64_t row = 0; row < to.rows; row++)
      for_each_vector(to.width, [&](int64_t at, auto... tail) {
        store(const_cast<T*>(to[row]) + at, load(sums + row * to.width + at, tail...), tail...);
      });
  }

  T* row_of(const Heads<T>& x, const Sequence& seq, int64_t head, int64_t row) const {
    return x.at(seq.query + row / shape_.group, head * shape_.group + row % shape_.group);
  }

  template <Scratch slot>
  Matrix<T> gather_rows(const Heads<T>& x, const Sequence& seq, int64_t head, int64_t first,
                        int64_t count) const {
    T* rows = scratch<slot, T>(MAX_ROWS * shape_.width);
    for (int64_t row = 0; row < count; row++)
      std::copy_n(row_of(x, seq, head, first + row), shape_.width, rows + row * shape_.width);
    return {rows, count, shape_.width, shape_.width};
  }

  Range visible_to(const Sequence& seq, int64_t row) const {
    int64_t position = seq.keys - seq.queries + row / shape_.group;
    Range range = visible_range(shape_, position, seq.keys);
    return {range.begin, std::min(range.end, seq.keys)};
  }

  void run_block(const Sequence& seq, int64_t head, int64_t first, int64_t count, const KVSide& k,
                 const KVSide& v) const {
    Matrix<T> q = gather_rows<Scratch::BACKWARD_QUERIES>(in_.q, seq, head, first, count);
    Matrix<T> grad = gather_rows<Scratch::BACKWARD_GRAD_OUTPUT>(grad_, seq, head, first, count);
    // Later queries see later keys. From a whole group on, as scores are computed by groups.
    int64_t begin = visible_to(seq, first).begin / BLOCK_N * BLOCK_N;
    int64_t keys = visible_to(seq, first + count - 1).end - begin, stride = padded_stride<T>(keys);
    Matrix<T> p(scratch<Scratch::BACKWARD_P, T>(MAX_ROWS * stride), count, keys, stride);
    Matrix<T> ds(scratch<Scratch::BACKWARD_DS, T>(MAX_ROWS * stride), count, keys, stride);
    for (int64_t row = 0; row < count; row += BLOCK_M) {
      int64_t rows = std::min<int64_t>(BLOCK_M, count - row);
      run_rows(seq, first, row, rows, begin, q, grad, k, v, p, ds);
    }
    gemm_rows(ds, Transposed<T>(k.rows.slice_rows(begin, keys)),
              [&](int64_t row, ColumnRange columns, const float* values) {
                T* to = row_of(grads_.q, seq, head, first + row) + columns.begin;
                for_each_vector(columns.count, [&](int64_t at, auto... tail) {
                  store(to + at, load(values + at, tail...), tail...);
                });
              });
    add_transposed(ds, q, k.sums + begin * shape_.width);
    add_transposed(p, grad, v.sums + begin * shape_.width);
  }

  // P and dS of at most 32 lanes.
  void run_rows(const Sequence& seq, int64_t first, int64_t row, int64_t rows, int64_t begin,
                const Matrix<T>& q, const Matrix<T>& grad, const KVSide& k, const KVSide& v,
                const Matrix<T>& p, const Matrix<T>& ds) const {
    int64_t group = begin / BLOCK_N;
    int64_t end = visible_to(seq, first + row + rows - 1).end;
    int64_t num = (end - begin + BLOCK_N - 1) / BLOCK_N;
    AccTile *s = scratch<Scratch::BACKWARD_SCORES, AccTile>(num),
        *dp = scratch<Scratch::BACKWARD_GRAD_PROBS, AccTile>(num);
    for (int64_t g = 0; g < num; g++) {
      k.groups[group + g].multiply(q, row, rows, s[g]);
      v.groups[group + g].multiply(grad, row, rows, dp[g]);
    }
    for (int64_t r = 0; r < rows; r++) {
      Range here = visible_to(seq, first + row + r);
      T *to_p = const_cast<T*>(p[row + r]), *to_ds = const_cast<T*>(ds[row + r]);
      run_row({here.begin - begin, here.end - begin}, r, s, dp, to_p, to_ds);
      std::fill_n(to_p, here.begin - begin, T{}), std::fill_n(to_ds, here.begin - begin, T{});
      int64_t after = here.end - begin, rest = p.width - after;
      std::fill_n(to_p + after, rest, T{}), std::fill_n(to_ds + after, rest, T{});
    }
  }

  void run_row(Range here, int64_t r, AccTile* s, AccTile* dp, T* p, T* ds) const {
    // Vectors of the keys that are seen; none lies in two groups.
    auto each = [&](const auto& body) {
      for (int64_t key = here.begin; key < here.end;) {
        int64_t at = key % BLOCK_N, g = key / BLOCK_N;
        int64_t count = std::min(here.end - key, BLOCK_N - at);
        for_each_vector(count, [&](int64_t by, auto... tail) {
          body(s[g][r] + at + by, dp[g][r] + at + by, key + by, tail...);
        });
        key += count;
      }
    };
    Floats scale = broadcast(shape_.scale), max_scores = broadcast(-INF), sums{}, dots{};
    each([&](float* score, float*, int64_t, auto... tail) {
      Floats values = load(score, tail...) * scale;
      if constexpr (sizeof...(tail) > 0) values = blend_first(values, tail..., broadcast(-INF));
      max_scores = max(max_scores, values);
    });
    Floats shift = broadcast(std::max(reduce_max(max_scores), -3e38f));
    each([&](float* score, float* by, int64_t, auto... tail) {
      // Not fma: of the largest it is 1 then, and who sees one key alone has a dS of 0.
      Floats prob = exp2_nonpositive(load(score, tail...) * scale - shift);
      if constexpr (sizeof...(tail) > 0) prob = blend_first(prob, tail..., Floats{});
      sums += prob;
      dots = fma(prob, load(by, tail...), dots);
      store(score, prob, tail...);
    });
    float total = reduce_sum(sums), one = total > 0 ? 1.0f / total : 0.0f;
    Floats p_scale = broadcast(one), mean_dp = broadcast(reduce_sum(dots) * one),
        ds_scale = broadcast(one * scale_);
    each([&](float* prob, float* by, int64_t key, auto... tail) {
      Floats probs = load(prob, tail...);
      store(p + key, probs * p_scale, tail...);
      store(ds + key, probs * ds_scale * (load(by, tail...) - mean_dp), tail...);
    });
  }

  // x W^T, by this thread alone: `store` gets it.
  [[gnu::noinline]] static void gemm_rows(const Matrix<T>& x, const Transposed<T>& w,
                                          const RowStore& store) {
    T* memory = scratch<Scratch::BACKWARD_PACKED_B, T>(PackedB<T>::size(BLOCK_N, x.width));
    for (const ColumnRange& columns : fixed_size_columns(w.rows)) {
      PackedB<T> right(w.slice_rows(columns.begin, columns.count), memory, x.rows);
      auto compute = [&](int64_t row, int64_t rows, int, AccTile& values) {
        right.multiply(x, row, rows, values);
      };
      for_each_block<1>(0, x.rows, columns, 0, compute, [&](const OutputBlock& block) {
        for (int64_t r = 0; r < block.rows; r++)
          store(block.row + r, columns, block.acc_row(0, r));
      });
    }
  }

  // sums += x^T y
  [[gnu::noinline]] void add_transposed(const Matrix<T>& x, const Matrix<T>& y, float* sums) const {
    int64_t stride = padded_stride<T>(x.rows);
    T* x_t = scratch<Scratch::BACKWARD_TRANSPOSED, T>(x.width * stride);
    transpose_copy(Transposed<T>(x), 0, x.width, x_t, stride);
    Matrix<T> rows(x_t, x.width, x.rows, stride);
    gemm_rows(rows, Transposed<T>(y), [&](int64_t row, ColumnRange columns, const float* values) {
      float* sum = sums + row * shape_.width + columns.begin;
      for_each_vector(columns.count, [&](int64_t at, auto... tail) {
        store(sum + at, load(sum + at, tail...) + load(values + at, tail...), tail...);
      });
    });
  }

  AttentionTensors<T> in_;
  Heads<T> grad_;
  AttentionTensors<T> grads_;
  Shape shape_;
  float scale_;
  const std::vector<Sequence>& sequences_;
};

}  // namespace ingot::kernels
