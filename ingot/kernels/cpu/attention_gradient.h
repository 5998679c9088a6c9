// The gradient of attention over packed sequences. With P the weights of the values, dO the gradient:
//
//   dV = P^T dO    dP = dO V^T    dS = P (dP - the sum of P dP along the keys) scale
//   dQ = dS K      dK = dS^T Q
//
// A piece of work is all queries of a sequence for one key-value head, so what is added up over
// queries is added by one thread, in one order. Lanes, (query, head of the group) pairs, are taken 256
// at a time: their P and dS are there as a whole, in the tensors' dtype, and nothing larger is.
#pragma once

#include "attention.h"

namespace ingot::kernels {

// A tensor of (token, head, channel); a copy where channels do not lie side by side.
template <class T>
struct Heads {
  Tensor owner;
  T* first;
  int64_t of_token, of_head, width;

  explicit Heads(const Tensor& x)
      : owner(x.stride(2) == 1 ? x : torch::stable::contiguous(x)),
        first(data<T>(owner)),
        of_token(owner.stride(0)),
        of_head(owner.stride(1)),
        width(x.size(2)) {}
  T* at(int64_t token, int64_t head) const { return first + token * of_token + head * of_head; }
  Matrix<T> rows(int64_t token, int64_t count, int64_t head) const {
    return {at(token, head), count, width, of_token};
  }
};

template <class T>
struct AttentionTensors {
  Heads<T> q, k, v;
};

template <class T>
class AttentionGradient {
 public:
  AttentionGradient(const AttentionTensors<T>& of, const Heads<T>& grad,
                    const AttentionTensors<T>& to, const Shape& shape, double scale,
                    const std::vector<Sequence>& sequences)
      : of_(of), grad_(grad), to_(to), shape_(shape), scale_(float(scale)), sequences_(sequences) {}

  void run() const {
    parallel_for_dynamic(sequences_.size() * shape_.kv_heads, [&](TaskQueue& queue) {
      [[maybe_unused]] typename PackedB<T>::TileState tile_state;
      for (int64_t piece; queue.pop(piece);)
        run_head(sequences_[piece / shape_.kv_heads], piece % shape_.kv_heads);
    });
  }

 private:
  static constexpr int64_t LANES = 256;

  // Keys and values of a head, as they lie and as right operands of 256 each; sums of their gradients.
  struct Side {
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
    Side k{of_.k.rows(seq.first_key, seq.keys, head), {}, sums};
    Side v{of_.v.rows(seq.first_key, seq.keys, head), {}, sums + seq.keys * width};
    for (Side* side : {&k, &v})
      for (int64_t key = 0; key < seq.keys; key += BLOCK_N, memory += each) {
        int64_t count = std::min<int64_t>(BLOCK_N, seq.keys - key);
        side->groups.emplace_back(side->rows.slice_rows(key, count), memory);
      }
    int64_t lanes = seq.queries * shape_.group;
    for (int64_t lane = 0; lane < lanes; lane += LANES)
      run_lanes(seq, head, lane, std::min(LANES, lanes - lane), k, v);
    put(to_.k.rows(seq.first_key, seq.keys, head), k.sums);
    put(to_.v.rows(seq.first_key, seq.keys, head), v.sums);
  }

  static void put(const Matrix<T>& to, const float* sums) {
    for (int64_t row = 0; row < to.rows; row++)
      for_each_vector(to.width, [&](int64_t at, auto... tail) {
        store(const_cast<T*>(to[row]) + at, load(sums + row * to.width + at, tail...), tail...);
      });
  }

  T* of_lane(const Heads<T>& x, const Sequence& seq, int64_t head, int64_t lane) const {
    return x.at(seq.query + lane / shape_.group, head * shape_.group + lane % shape_.group);
  }

  template <Scratch slot>
  Matrix<T> gathered(const Heads<T>& x, const Sequence& seq, int64_t head, int64_t first,
                     int64_t count) const {
    T* rows = scratch<slot, T>(LANES * shape_.width);
    for (int64_t lane = 0; lane < count; lane++)
      std::copy_n(of_lane(x, seq, head, first + lane), shape_.width, rows + lane * shape_.width);
    return {rows, count, shape_.width, shape_.width};
  }

  Range seen_by(const Sequence& seq, int64_t lane) const {
    int64_t position = seq.keys - seq.queries + lane / shape_.group;
    Range range = seen(shape_, position, seq.keys);
    return {range.begin, std::min(range.end, seq.keys)};
  }

  void run_lanes(const Sequence& seq, int64_t head, int64_t first, int64_t count, const Side& k,
                 const Side& v) const {
    Matrix<T> q = gathered<Scratch::BACKWARD_QUERIES>(of_.q, seq, head, first, count);
    Matrix<T> grad = gathered<Scratch::BACKWARD_GRAD_OUTPUT>(grad_, seq, head, first, count);
    // Later queries see later keys. From a whole group on, as scores are computed by groups.
    int64_t begin = seen_by(seq, first).begin / BLOCK_N * BLOCK_N;
    int64_t keys = seen_by(seq, first + count - 1).end - begin, stride = padded_stride<T>(keys);
    Matrix<T> p(scratch<Scratch::BACKWARD_P, T>(LANES * stride), count, keys, stride);
    Matrix<T> ds(scratch<Scratch::BACKWARD_DS, T>(LANES * stride), count, keys, stride);
    for (int64_t lane = 0; lane < count; lane += BLOCK_M) {
      int64_t rows = std::min<int64_t>(BLOCK_M, count - lane);
      run_rows(seq, first, lane, rows, begin, q, grad, k, v, p, ds);
    }
    product(ds, Transposed<T>(k.rows.slice_rows(begin, keys)),
            [&](int64_t row, int64_t at, Floats values, auto... tail) {
              store(of_lane(to_.q, seq, head, first + row) + at, values, tail...);
            });
    add_transposed(ds, q, k.sums + begin * shape_.width);
    add_transposed(p, grad, v.sums + begin * shape_.width);
  }

  // P and dS of at most 32 lanes.
  void run_rows(const Sequence& seq, int64_t first, int64_t lane, int64_t rows, int64_t begin,
                const Matrix<T>& q, const Matrix<T>& grad, const Side& k, const Side& v,
                const Matrix<T>& p, const Matrix<T>& ds) const {
    int64_t group = begin / BLOCK_N;
    int64_t end = seen_by(seq, first + lane + rows - 1).end;
    int64_t num = (end - begin + BLOCK_N - 1) / BLOCK_N;
    AccTile *s = scratch<Scratch::BACKWARD_SCORES, AccTile>(num), *dp = scratch<Scratch::BACKWARD_GRAD_PROBS, AccTile>(num);
    for (int64_t g = 0; g < num; g++) {
      k.groups[group + g].multiply(q, lane, rows, s[g]);
      v.groups[group + g].multiply(grad, lane, rows, dp[g]);
    }
    for (int64_t r = 0; r < rows; r++) {
      Range here = seen_by(seq, first + lane + r);
      T *to_p = const_cast<T*>(p[lane + r]), *to_ds = const_cast<T*>(ds[lane + r]);
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
    Floats scale = broadcast(shape_.scale), most = broadcast(-INF), sums{}, dots{};
    each([&](float* score, float*, int64_t, auto... tail) {
      Floats values = load(score, tail...) * scale;
      if constexpr (sizeof...(tail) > 0) values = blend_first(values, tail..., broadcast(-INF));
      most = max(most, values);
    });
    Floats shift = broadcast(std::max(reduce_max(most), -3e38f));
    each([&](float* score, float* by, int64_t, auto... tail) {
      // Not fma: of the largest it is 1 then, and who sees one key alone has a dS of 0.
      Floats weight = exp2_nonpositive(load(score, tail...) * scale - shift);
      if constexpr (sizeof...(tail) > 0) weight = blend_first(weight, tail..., Floats{});
      sums += weight;
      dots = fma(weight, load(by, tail...), dots);
      store(score, weight, tail...);
    });
    float total = reduce_sum(sums), one = total > 0 ? 1.0f / total : 0.0f;
    Floats share = broadcast(one), middle = broadcast(reduce_sum(dots) * one), slope = broadcast(one * scale_);
    each([&](float* weight, float* by, int64_t key, auto... tail) {
      Floats weights = load(weight, tail...);
      store(p + key, weights * share, tail...);
      store(ds + key, weights * slope * (load(by, tail...) - middle), tail...);
    });
  }

  // x W^T, by this thread alone: store(row, column, values, count...) gets it.
  template <class Store>
  static void product(const Matrix<T>& x, const Transposed<T>& w, const Store& put) {
    T* memory = scratch<Scratch::BACKWARD_PACKED_B, T>(PackedB<T>::size(BLOCK_N, x.width));
    for (const ColumnRange& columns : fixed_size_columns(w.rows)) {
      PackedB<T> right(w.slice_rows(columns.begin, columns.count), memory);
      auto compute = [&](int64_t row, int64_t rows, int, AccTile& values) {
        right.multiply(x, row, rows, values);
      };
      for_each_block<1>(0, x.rows, columns, 0, compute, [&](const OutputBlock& block) {
        for (int64_t r = 0; r < block.rows; r++)
          for_each_vector(columns.count, [&](int64_t at, auto... tail) {
            put(block.row + r, columns.begin + at, load(block.acc_row(0, r) + at, tail...), tail...);
          });
      });
    }
  }

  // sums += x^T y
  void add_transposed(const Matrix<T>& x, const Matrix<T>& y, float* sums) const {
    int64_t stride = padded_stride<T>(x.rows);
    T* turned = scratch<Scratch::BACKWARD_TRANSPOSED, T>(x.width * stride);
    transpose_copy(Transposed<T>(x), 0, x.width, turned, stride);
    Matrix<T> rows(turned, x.width, x.rows, stride);
    product(rows, Transposed<T>(y), [&](int64_t row, int64_t at, Floats values, auto... tail) {
      float* sum = sums + row * shape_.width + at;
      store(sum, load(sum, tail...) + values, tail...);
    });
  }

  AttentionTensors<T> of_;
  Heads<T> grad_;
  AttentionTensors<T> to_;
  Shape shape_;
  float scale_;
  const std::vector<Sequence>& sequences_;
};

}  // namespace ingot::kernels
