// Gated recurrent units: the step of a block of rows, packed sequences, and their gradient.
//
//   r, z = sigmoid(x sums + h sums)    n = tanh(x sums + r * h sums)    h' = (1 - z) n + z h
//
// `x sums` are the matmul of the input with w_ih, plus the bias, `h sums` that of the
// state with w_hh; both are (r, z, n) in float32. With reset_after = false the h sums of n are that of
// r * h, which is rounded like a state. States are stored in the dtype of the arguments.
#pragma once

#include "gradient.h"

namespace ingot {

template <class T>
struct GruWeights {
  Matrix<T> ih, hh;
  const T *b_ih, *b_hh;
  bool reset_after;

  int64_t hidden() const { return hh.width; }
  int64_t sums() const { return hh.rows; }
};

struct Gates {
  SigmoidPair r, z;
  Floats n_sum, n, hn;  // n is tanh(n_sum)

  // The derivative of n, accurate also where n is close to 1.
  Floats n_slope() const {
    SigmoidPair half = sigmoid_pair(n_sum + n_sum);
    return broadcast(4.0f) * half.value * half.rest;
  }
};

// The gates of a row from its sums, at a vector of channels. The bias of each sum is added here.
template <class T, class... Tail>
inline Gates gates_at(const GruWeights<T>& w, const float* x_sums, const float* h_sums, int64_t at,
                      Tail... tail) {
  auto x_sum = [&](int gate) {
    int64_t from = gate * w.hidden() + at;
    return load(x_sums + from, tail...) + load(w.b_ih + from, tail...);
  };
  auto h_sum = [&](int gate) {
    int64_t from = gate * w.hidden() + at;
    return load(h_sums + from, tail...) + load(w.b_hh + from, tail...);
  };
  Gates g;
  g.r = sigmoid_pair(x_sum(0) + h_sum(0)), g.z = sigmoid_pair(x_sum(1) + h_sum(1));
  g.hn = h_sum(2);
  g.n_sum = w.reset_after ? fma(g.r.value, g.hn, x_sum(2)) : x_sum(2) + g.hn;
  g.n = tanh(g.n_sum);
  return g;
}

// r * h of a row, for reset_after = false; the h sums of n are not known yet.
template <class T>
inline void reset_row(const GruWeights<T>& w, const float* x_sums, const float* h_sums, const T* h,
                      T* to) {
  for_each_vector(w.hidden(), [&](int64_t at, auto... tail) {
    Floats sum = load(x_sums + at, tail...) + load(w.b_ih + at, tail...);
    sum = sum + (load(h_sums + at, tail...) + load(w.b_hh + at, tail...));
    store(to + at, sigmoid_pair(sum).value * load(h + at, tail...), tail...);
  });
}

// The next state of a row, in place.
template <class T>
inline void next_state(const GruWeights<T>& w, const float* x_sums, const float* h_sums, T* h) {
  for_each_vector(w.hidden(), [&](int64_t at, auto... tail) {
    Gates g = gates_at(w, x_sums, h_sums, at, tail...);
    Floats next = fma(g.z.value, load(h + at, tail...), g.z.rest * g.n);
    store(h + at, next, tail...);
  });
}

// The step of rows of states, in place. `multiply(x, w, to)` computes the dot products of rows of x with
// rows of w into columns of `to`, whose rows are w.sums() apart; x_sums(row) are those of a row.
template <class T, class Multiply, class XSums>
inline void gru_step(const GruWeights<T>& w, T* h, int64_t rows, float* h_sums, T* reset,
                     const XSums& x_sums, const Multiply& multiply) {
  int64_t hidden = w.hidden(), sums = w.sums(), first = w.reset_after ? sums : 2 * hidden;
  Matrix<T> states(h, rows, hidden, hidden);
  auto each_row = [&](const auto& body) {
    parallel_for(rows, 16 * hidden, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) body(row);
    });
  };
  multiply(states, w.hh.slice_rows(0, first), h_sums);
  if (!w.reset_after) {
    each_row([&](int64_t row) {
      reset_row(w, x_sums(row), h_sums + row * sums, h + row * hidden, reset + row * hidden);
    });
    Matrix<T> kept(reset, rows, hidden, hidden);
    multiply(kept, w.hh.slice_rows(first, hidden), h_sums + first);
  }
  each_row([&](int64_t row) {
    next_state(w, x_sums(row), h_sums + row * sums, h + row * hidden);
  });
}

// A matmul on all threads, into rows that are `stride` apart.
template <class T>
[[gnu::noinline]] void multiply_rows(const Matrix<T>& x, const Matrix<T>& w, float* to,
                                     int64_t stride) {
  std::array<Matrix<T>, 1> weights{w};
  gemm(x, weights, balanced_columns(w.rows), [&](const OutputBlock& block) {
    for (int64_t r = 0; r < block.rows; r++)
      std::copy_n(block.acc_row(0, r), block.columns.count,
                  to + (block.row + r) * stride + block.columns.begin);
  });
}

// Packed sequences, the longest first: those that have a token at some step are the first ones.
struct Packing {
  std::vector<int64_t> order, starts, lengths;

  // Sequence i is the tokens from starts[i] to starts[i + 1].
  template <class Starts>
  Packing(int64_t count, const Starts& first) : order(count), starts(count), lengths(count) {
    for (int64_t i = 0; i < count; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return first(a + 1) - first(a) > first(b + 1) - first(b);
    });
    for (int64_t i = 0; i < count; i++)
      starts[i] = first(order[i]), lengths[i] = first(order[i] + 1) - starts[i];
  }
  int64_t count() const { return order.size(); }
  int64_t steps() const { return lengths.empty() ? 0 : lengths[0]; }
  // How many sequences have a token at this step.
  int64_t active(int64_t step) const {
    auto end = std::partition_point(lengths.begin(), lengths.end(),
                                    [&](int64_t length) { return length > step; });
    return end - lengths.begin();
  }
};

template <class T>
using Buffer = std::unique_ptr<T[]>;
template <class T>
inline Buffer<T> make_buffer(int64_t count) {
  return Buffer<T>(new T[std::max<int64_t>(count, 1)]);
}

// The states of all tokens of x, from initial states h.
template <class T>
[[gnu::noinline]] void gru_states(const GruWeights<T>& w, const Matrix<T>& x, const Matrix<T>& h,
                                  const Packing& packing, T* out) {
  int64_t hidden = w.hidden(), sums = w.sums(), count = packing.count();
  Buffer<float> x_sums = make_buffer<float>(x.rows * sums);
  Buffer<float> h_sums = make_buffer<float>(count * sums);
  Buffer<T> states = make_buffer<T>(count * hidden), reset = make_buffer<T>(count * hidden);
  for (int64_t i = 0; i < count; i++)
    std::copy_n(h[packing.order[i]], hidden, &states[i * hidden]);
  multiply_rows(x, w.ih, x_sums.get(), sums);
  for (int64_t step = 0; step < packing.steps(); step++) {
    int64_t active = packing.active(step);
    gru_step(w, states.get(), active, h_sums.get(), reset.get(),
             [&](int64_t i) { return &x_sums[(packing.starts[i] + step) * sums]; },
             [&](const Matrix<T>& rows, const Matrix<T>& weight, float* to) {
      multiply_rows(rows, weight, to, sums);
    });
    for (int64_t i = 0; i < active; i++)
      std::copy_n(&states[i * hidden], hidden, out + (packing.starts[i] + step) * hidden);
  }
}

// ---- Gradient. The gates of all tokens are recomputed at once from the states before them, then the
// gradient of the state is followed from the last step to the first, and the gradients of the weights
// are matmuls over all tokens.

// A transposed copy of a matrix, packed for gemm().
template <class T>
struct TransposedCopy {
  int64_t stride;
  Buffer<T> memory;
  Matrix<T> matrix;

  explicit TransposedCopy(const Matrix<T>& x)
      : stride(padded_stride<T>(x.rows)),
        memory(make_buffer<T>(x.width * stride)),
        matrix(memory.get(), x.width, x.rows, stride) {
    transpose_copy(Transposed<T>(x), 0, x.width, memory.get(), stride);
  }
};

// to += x w, for the transpose of w; the rows of `to` are `stride` apart.
template <class T>
[[gnu::noinline]] void add_product(const Matrix<T>& x, const Matrix<T>& transposed, float* to,
                                   int64_t stride) {
  std::array<Matrix<T>, 1> weights{transposed};
  gemm(x, weights, balanced_columns(transposed.rows), [&](const OutputBlock& block) {
    for (int64_t r = 0; r < block.rows; r++) {
      float* sum = to + (block.row + r) * stride + block.columns.begin;
      const float* acc = block.acc_row(0, r);
      for_each_vector(block.columns.count, [&](int64_t at, auto... tail) {
        store(sum + at, load(sum + at, tail...) + load(acc + at, tail...), tail...);
      });
    }
  });
}

// grad^T x into `to`, the gradient of a weight whose rows are the columns of `grad`.
template <class T>
[[gnu::noinline]] void store_grad_weight(const Matrix<T>& grad, const Matrix<T>& x, T* to) {
  Matrix<T> grad_t = parallel_transpose_copy<Scratch::TRANSPOSED_GRAD>(Transposed<T>(grad));
  std::vector<GemmOperands<T>> operands{{grad_t, Transposed<T>(x)}};
  gemm_sum<T>(operands, [&](int64_t row, ColumnRange columns, const float* values) {
    for_each_vector(columns.count, [&](int64_t at, auto... tail) {
      store(to + row * x.width + columns.begin + at, load(values + at, tail...), tail...);
    });
  });
}

template <class T>
class GruBackward {
 public:
  GruBackward(const GruWeights<T>& weights, const Matrix<T>& x, const Matrix<T>& h,
              const Packing& packing, const T* out)
      : w(weights), tokens(x.rows), hidden(w.hidden()), sums(w.sums()), x_(x), packing_(packing),
        hh_(w.hh), before_(make_buffer<T>(tokens * hidden)),
        reset_(make_buffer<T>(w.reset_after ? 0 : tokens * hidden)),
        x_sums_(make_buffer<float>(tokens * sums)), h_sums_(make_buffer<float>(tokens * sums)),
        grad_x_sums_(make_buffer<T>(tokens * sums)), grad_h_sums_(make_buffer<T>(tokens * sums)),
        step_grads_(make_buffer<T>(packing.count() * sums)),
        grad_states_(make_buffer<float>(packing.count() * hidden)),
        grad_reset_(make_buffer<float>(w.reset_after ? 0 : packing.count() * hidden)) {
    std::fill_n(grad_states_.get(), packing.count() * hidden, 0.0f);
    for (int64_t i = 0; i < packing.count(); i++)
      for (int64_t step = 0; step < packing.lengths[i]; step++) {
        int64_t token = packing.starts[i] + step;
        const T* from = step ? out + (token - 1) * hidden : h[packing.order[i]];
        std::copy_n(from, hidden, &before_[token * hidden]);
      }
    recompute_sums();
  }

  // Gradient of the state of each sequence, in the order of the packing: after run() the initial one.
  float* grad_state(int64_t i) const { return &grad_states_[i * hidden]; }
  Matrix<T> grad_x_sums() const { return {grad_x_sums_.get(), tokens, sums, sums}; }
  Matrix<T> grad_h_sums() const { return {grad_h_sums_.get(), tokens, sums, sums}; }

  // `add(step, active)` adds the gradients of the states of a step to grad_state(), `done(step,
  // active)` is called when its rows of grad_x_sums() are known.
  template <class Add, class Done>
  void run(const Add& add, const Done& done) {
    for (int64_t step = packing_.steps(); step-- > 0;) {
      int64_t active = packing_.active(step);
      add(step, active);
      step_back(step, active);
      done(step, active);
    }
  }

  void store_grad_w_ih(T* to) const { store_grad_weight<T>(grad_x_sums(), x_, to); }
  void store_grad_w_hh(T* to) const {
    Matrix<T> grad = grad_h_sums(), before(before_.get(), tokens, hidden, hidden);
    if (w.reset_after) return store_grad_weight<T>(grad, before, to);
    Matrix<T> reset(reset_.get(), tokens, hidden, hidden);
    store_grad_weight<T>(grad.slice_columns(0, 2 * hidden), before, to);
    store_grad_weight<T>(grad.slice_columns(2 * hidden, hidden), reset, to + 2 * hidden * hidden);
  }

 private:
  void recompute_sums() {
    Matrix<T> before(before_.get(), tokens, hidden, hidden);
    multiply_rows(x_, w.ih, x_sums_.get(), sums);
    int64_t first = w.reset_after ? sums : 2 * hidden;
    multiply_rows(before, w.hh.slice_rows(0, first), h_sums_.get(), sums);
    if (w.reset_after) return;
    parallel_for(tokens, 16 * hidden, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        reset_row(w, &x_sums_[i * sums], &h_sums_[i * sums], before[i], &reset_[i * hidden]);
    });
    Matrix<T> reset(reset_.get(), tokens, hidden, hidden);
    multiply_rows(reset, w.hh.slice_rows(first, hidden), h_sums_.get() + first, sums);
  }

  // Gradients of the sums of a step, and of the states before it.
  void step_back(int64_t step, int64_t active) {
    each_row(step, active, [&](int64_t i, int64_t token) { gate_grads(i, token); });
    Matrix<T> grads(step_grads_.get(), active, sums, sums);
    int64_t first = 2 * hidden;
    if (!w.reset_after) {
      std::fill_n(grad_reset_.get(), active * hidden, 0.0f);
      add_product(grads.slice_columns(first, hidden), hh_.matrix.slice_columns(first, hidden),
                  grad_reset_.get(), hidden);
      each_row(step, active, [&](int64_t i, int64_t token) { reset_grads(i, token); });
      add_product(grads.slice_columns(0, first), hh_.matrix.slice_columns(0, first),
                  grad_states_.get(), hidden);
    } else {
      add_product(grads, hh_.matrix, grad_states_.get(), hidden);
    }
    each_row(step, active, [&](int64_t i, int64_t token) {
      std::copy_n(&step_grads_[i * sums], sums, &grad_h_sums_[token * sums]);
    });
  }
  template <class Body>
  void each_row(int64_t step, int64_t active, const Body& body) const {
    parallel_for(active, 16 * hidden, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) body(i, packing_.starts[i] + step);
    });
  }

  // With reset_after = false all but the gradient of r, which reset_grads() adds.
  void gate_grads(int64_t i, int64_t token) const {
    T *of_x = &grad_x_sums_[token * sums], *of_h = &step_grads_[i * sums];
    for_each_vector(hidden, [&](int64_t at, auto... tail) {
      Gates g = gates_at(w, &x_sums_[token * sums], &h_sums_[token * sums], at, tail...);
      Floats grad = load(grad_state(i) + at, tail...), h = load(&before_[token * hidden + at], tail...);
      Floats of_n = grad * g.z.rest * g.n_slope();
      Floats of_z = grad * (h - g.n) * g.z.value * g.z.rest;
      Floats of_r = of_n * g.hn * g.r.value * g.r.rest;
      Floats of_hn = w.reset_after ? of_n * g.r.value : of_n;
      store(grad_state(i) + at, grad * g.z.value, tail...);
      store(of_x + at, of_r, tail...), store(of_h + at, of_r, tail...);
      store(of_x + hidden + at, of_z, tail...), store(of_h + hidden + at, of_z, tail...);
      store(of_x + 2 * hidden + at, of_n, tail...);
      store(of_h + 2 * hidden + at, of_hn, tail...);
    });
  }
  void reset_grads(int64_t i, int64_t token) const {
    T *of_x = &grad_x_sums_[token * sums], *of_h = &step_grads_[i * sums];
    for_each_vector(hidden, [&](int64_t at, auto... tail) {
      Gates g = gates_at(w, &x_sums_[token * sums], &h_sums_[token * sums], at, tail...);
      Floats grad = load(&grad_reset_[i * hidden + at], tail...);
      Floats h = load(&before_[token * hidden + at], tail...);
      Floats of_r = grad * h * g.r.value * g.r.rest;
      Floats of_h_before = load(grad_state(i) + at, tail...) + grad * g.r.value;
      store(grad_state(i) + at, of_h_before, tail...);
      store(of_x + at, of_r, tail...), store(of_h + at, of_r, tail...);
    });
  }

  GruWeights<T> w;
  int64_t tokens, hidden, sums;
  Matrix<T> x_;
  const Packing& packing_;
  TransposedCopy<T> hh_;
  Buffer<T> before_, reset_;  // states before each token, and r times these
  Buffer<float> x_sums_, h_sums_;
  Buffer<T> grad_x_sums_, grad_h_sums_, step_grads_;
  Buffer<float> grad_states_, grad_reset_;
};

}  // namespace ingot
