// Gated recurrent units over rows, packed sequences and ensembles, and the latent step of a recurrent
// state-space model. The arithmetic is in gru.h.
//
// A rollout has too few rows for a GEMM: one task computes all steps of a member, whose weights stay
// in the cache if they fit, and reads each weight once per step for all rows.
#include "gru.h"
#include "philox.h"

namespace ingot::kernels {

// ---- Arguments

// The weights of one or all members; biases are contiguous.
template <class T>
struct GruArgs {
  Rows<T> ih, hh;
  Tensor ih_bias, hh_bias;
  int64_t members, hidden;
  bool reset_after;

  // `leading` dimensions are the members: 0 or 1.
  [[gnu::noinline]] GruArgs(const Tensor& like, int64_t leading, const Tensor& w_ih,
                            const Tensor& w_hh, const Tensor& b_ih, const Tensor& b_hh,
                            bool reset_after)
      : ih(w_ih), hh(w_hh), ih_bias(contiguous(b_ih)), hh_bias(contiguous(b_hh)),
        members(leading ? like.size(0) : 1), hidden(hh.width), reset_after(reset_after) {
    for (const Tensor* weight : {&w_ih, &w_hh, &b_ih, &b_hh}) check_same_dtype(*weight, like);
    auto has_sizes = [&](const Tensor& x, std::initializer_list<int64_t> rest) {
      std::vector<int64_t> sizes(leading, members);
      sizes.insert(sizes.end(), rest);
      return same_sizes(x, sizes);
    };
    int64_t sums = 3 * hidden;
    check(has_sizes(w_ih, {sums, ih.width}) && has_sizes(w_hh, {sums, hidden}) &&
              has_sizes(b_ih, {sums}) && has_sizes(b_hh, {sums}),
          "weights and biases must have 3 rows per hidden channel");
  }
  GruWeights<T> operator[](int64_t member) const {
    int64_t sums = 3 * hidden, row = member * sums;
    return {Matrix<T>(ih).slice_rows(row, sums), Matrix<T>(hh).slice_rows(row, sums),
            data<T>(ih_bias) + row, data<T>(hh_bias) + row, reset_after};
  }
};

// Rows of x and of h, and which of them belong together.
template <class T>
struct SequenceArgs {
  Rows<T> x, h;
  GruArgs<T> weights;
  Packing packing;

  SequenceArgs(const Tensor& x, const Tensor& h, Packing packing, const Tensor& w_ih,
               const Tensor& w_hh, const Tensor& b_ih, const Tensor& b_hh, bool reset_after)
      : x(x), h(h), weights(x, 0, w_ih, w_hh, b_ih, b_hh, reset_after), packing(packing) {
    check_same_dtype(h, x);
    check(x.dim() == 2 && h.dim() == 2, "x and h must have two dimensions");
    check(weights.ih.width == this->x.width && weights.hidden == this->h.width,
          "the weights must match the channels of x and h");
  }
};

Packing single_tokens(const Tensor& x, const Tensor& h) {
  check(x.dim() == 2 && h.dim() == 2 && x.size(0) == h.size(0),
        "x and h must have the same number of rows");
  return Packing(x.size(0), [](int64_t i) { return i; });
}
Packing sequences(const Tensor& x, const Tensor& h, const Tensor& cu_seqlens) {
  Integers starts(cu_seqlens);
  check(x.dim() == 2 && h.dim() == 2 && cu_seqlens.dim() == 1 && starts.count == h.size(0) + 1,
        "cu_seqlens must have one entry more than h has rows");
  check(starts[0] == 0 && starts[starts.count - 1] == x.size(0),
        "cu_seqlens must run from 0 to the number of tokens");
  for (int64_t i = 0; i + 1 < starts.count; i++)
    check(starts[i] <= starts[i + 1], "cu_seqlens must be non-decreasing");
  return Packing(h.size(0), [&](int64_t i) { return starts[i]; });
}

// ---- gru_cell and gru: a cell is a sequence of one token per row.

template <class T>
Tensor gru_forward(const SequenceArgs<T>& args, ScalarType dtype) {
  Tensor out = allocate(std::array{args.x.count, args.h.width}, dtype);
  gru_states<T>(args.weights[0], args.x, args.h, args.packing, data<T>(out));
  return out;
}

Tensor gru_cell(const Tensor& x, const Tensor& h, const Tensor& w_ih, const Tensor& w_hh,
                const Tensor& b_ih, const Tensor& b_hh, bool reset_after) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    SequenceArgs<T> args(x, h, single_tokens(x, h), w_ih, w_hh, b_ih, b_hh, reset_after);
    return gru_forward(args, x.scalar_type());
  });
}

Tensor gru(const Tensor& x, const Tensor& h, const Tensor& cu_seqlens, const Tensor& w_ih,
           const Tensor& w_hh, const Tensor& b_ih, const Tensor& b_hh, bool reset_after) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    SequenceArgs<T> args(x, h, sequences(x, h, cu_seqlens), w_ih, w_hh, b_ih, b_hh, reset_after);
    return gru_forward(args, x.scalar_type());
  });
}

// Gradients of x, h, w_ih, w_hh, b_ih and b_hh, as far as they are needed.
template <class T>
Tensors gru_grads(const std::array<bool, 6>& needs, const Tensor& grad,
                  const std::array<const Tensor*, 6>& given, const SequenceArgs<T>& args) {
  int64_t hidden = args.h.width;
  check_same_dtype(grad, *given[0]);
  check(same_sizes(grad, std::array{args.x.count, hidden}),
        "the gradient must have the shape of the output");
  Rows<T> of_out(grad);
  Tensor out = gru_forward(args, grad.scalar_type());
  GruWeights<T> w = args.weights[0];
  GruBackward<T> back(w, args.x, args.h, args.packing, data<T>(out));
  back.run([&](int64_t step, int64_t active) {
    for (int64_t i = 0; i < active; i++) {
      const T* from = of_out[args.packing.starts[i] + step];
      float* to = back.grad_state(i);
      for_each_vector(hidden, [&](int64_t at, auto... tail) {
        store(to + at, load(to + at, tail...) + load(from + at, tail...), tail...);
      });
    }
  }, [](int64_t, int64_t) {});
  Tensors result;
  auto next = [&](int index) {
    result.push_back(allocate_like(*given[index]));
    return data<T>(result.back());
  };
  if (needs[0])
    result.push_back(gemm_tensor<T>({given[0]->sizes().data(), 2}, *given[0],
                                    {{back.grad_x_sums(), Transposed<T>(w.ih)}}));
  if (needs[1]) {
    T* to = next(1);
    for (int64_t i = 0; i < args.packing.count(); i++)
      for_each_vector(hidden, [&](int64_t at, auto... tail) {
        store(to + args.packing.order[i] * hidden + at, load(back.grad_state(i) + at, tail...),
              tail...);
      });
  }
  if (needs[2]) back.store_grad_w_ih(next(2));
  if (needs[3]) back.store_grad_w_hh(next(3));
  if (needs[4]) sum_columns(back.grad_x_sums(), next(4));
  if (needs[5]) sum_columns(back.grad_h_sums(), next(5));
  return result;
}

inline const Tensor& checked_grad(const NeedsGrad& needs, size_t arguments, const Tensors& grads) {
  check(needs.size() == arguments && grads.size() == 1, "expected one flag per argument");
  return grads[0];
}

Tensors gru_cell_backward(NeedsGrad needs, Tensors grads, const Tensor& x, const Tensor& h,
                          const Tensor& w_ih, const Tensor& w_hh, const Tensor& b_ih,
                          const Tensor& b_hh, bool reset_after) {
  const Tensor& grad = checked_grad(needs, 7, grads);
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    SequenceArgs<T> args(x, h, single_tokens(x, h), w_ih, w_hh, b_ih, b_hh, reset_after);
    return gru_grads<T>({needs[0], needs[1], needs[2], needs[3], needs[4], needs[5]}, grad,
                        {&x, &h, &w_ih, &w_hh, &b_ih, &b_hh}, args);
  });
}

Tensors gru_backward(NeedsGrad needs, Tensors grads, const Tensor& x, const Tensor& h,
                     const Tensor& cu_seqlens, const Tensor& w_ih, const Tensor& w_hh,
                     const Tensor& b_ih, const Tensor& b_hh, bool reset_after) {
  const Tensor& grad = checked_grad(needs, 8, grads);
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    SequenceArgs<T> args(x, h, sequences(x, h, cu_seqlens), w_ih, w_hh, b_ih, b_hh, reset_after);
    return gru_grads<T>({needs[0], needs[1], needs[3], needs[4], needs[5], needs[6]}, grad,
                        {&x, &h, &w_ih, &w_hh, &b_ih, &b_hh}, args);
  });
}

// ---- gru_rollout

// A matmul of a few rows on this thread. The additions are those of gemm() in float32, whatever the
// tile. PREFETCHED rows of W are prefetched, those of the next tile.
template <int M, int N, int PREFETCHED, class T>
void multiply_tiles(const Matrix<T>& x, const Matrix<T>& w, float* to, int64_t stride) {
  for (int64_t c = 0; c < w.rows; c += N) {
    const T* b[N];
    for (int n = 0; n < N; n++) b[n] = w[std::min<int64_t>(c + n, w.rows - 1)];
    for (int64_t r = 0; r < x.rows; r += M) {
      const T* a[M];
      for (int m = 0; m < M; m++) a[m] = x[std::min<int64_t>(r + m, x.rows - 1)];
      float out[M][N];
      if (r == 0) dot_tile<PREFETCHED>(a, b, x.width, N * w.stride, out);
      else dot_tile<0>(a, b, x.width, 0, out);
      for (int m = 0; m < std::min<int64_t>(M, x.rows - r); m++)
        std::copy_n(out[m], std::min<int64_t>(N, w.rows - c), to + (r + m) * stride + c);
    }
  }
}
template <class T>
[[gnu::noinline]] void multiply_few(const Matrix<T>& x, const Matrix<T>& w, float* to,
                                    int64_t stride) {
  constexpr int ACCUMULATORS = WIDTH == 16 ? 16 : 8, HALF = ACCUMULATORS / 2;
  constexpr int64_t L2_BYTES = 1 << 20;
  if (x.rows > 2) return multiply_tiles<4, HALF / 2, HALF / 2>(x, w, to, stride);
  if (x.rows == 2) return multiply_tiles<2, HALF, HALF>(x, w, to, stride);
  // From L2, prefetches take the place of loads: a rollout with 256 channels took 4 % longer. From
  // memory, eight streams with prefetches were the fastest of 8 or 16, with or without.
  bool in_l2 = w.rows * w.width * int64_t(sizeof(T)) <= L2_BYTES;
  if (in_l2) multiply_tiles<1, ACCUMULATORS, 0>(x, w, to, stride);
  else multiply_tiles<1, HALF, HALF>(x, w, to, stride);
}

template <class T>
struct RolloutArgs {
  Rows<T> h, y, actions, w_out;
  Tensor b_out;
  int64_t members, rows, steps, num_actions, outputs, inputs;
  GruArgs<T> weights;

  RolloutArgs(const Tensor& h, const Tensor& y, const Tensor& actions, const Tensor& w_ih,
              const Tensor& w_hh, const Tensor& b_ih, const Tensor& b_hh, const Tensor& w_out,
              const Tensor& b_out, bool reset_after)
      : h(checked(h)), y(y), actions(actions), w_out(w_out), b_out(contiguous(b_out)),
        members(h.size(0)), rows(h.size(1)), steps(checked_steps(actions)),
        num_actions(actions.size(3)), outputs(this->y.width), inputs(outputs + num_actions),
        weights(h, 1, w_ih, w_hh, b_ih, b_hh, reset_after) {
    for (const Tensor* other : {&y, &actions, &w_out, &b_out}) check_same_dtype(*other, h);
    check(same_sizes(y, std::array{members, rows, outputs}) &&
              same_sizes(actions, std::array{members, rows, steps, num_actions}) &&
              same_sizes(w_out, std::array{members, outputs, weights.hidden}) &&
              same_sizes(b_out, std::array{members, outputs}),
          "states, outputs, actions and weights must have the same members and rows");
    check(weights.ih.width == inputs && weights.hidden == this->h.width,
          "the weights must match the outputs, the actions and the states");
  }
  static const Tensor& checked(const Tensor& h) {
    check(h.dim() == 3, "h must be (members, rows, channels)");
    return h;
  }
  static int64_t checked_steps(const Tensor& actions) {
    check(actions.dim() == 4 && actions.size(2) > 0, "actions must have at least one step");
    return actions.size(2);
  }
  int64_t hidden() const { return weights.hidden; }
  int64_t sums() const { return 3 * hidden(); }
  Matrix<T> head(int64_t member) const {
    return Matrix<T>(w_out).slice_rows(member * outputs, outputs);
  }
  const T* head_bias(int64_t member) const { return data<T>(b_out) + member * outputs; }
  const T* action(int64_t member, int64_t row, int64_t step) const {
    return actions[(member * rows + row) * steps + step];
  }
};

// All steps of some rows of a member. out(row, step) is where an output goes; after each step
// visit(step, inputs, states) sees the inputs and the new states.
template <class T, class Out, class Visit>
void rollout_rows(const RolloutArgs<T>& args, int64_t member, int64_t first, int64_t rows, T* states,
                  const Out& out, const Visit& visit) {
  int64_t hidden = args.hidden(), sums = args.sums(), inputs = args.inputs, outputs = args.outputs;
  GruWeights<T> w = args.weights[member];
  Matrix<T> head = args.head(member);
  const T* bias = args.head_bias(member);
  Buffer<T> x = make_buffer<T>(rows * inputs), reset = make_buffer<T>(rows * hidden);
  Buffer<float> x_sums = make_buffer<float>(rows * sums), h_sums = make_buffer<float>(rows * sums);
  Buffer<float> y = make_buffer<float>(rows * outputs);
  for (int64_t i = 0; i < rows; i++) {
    std::copy_n(args.h[member * args.rows + first + i], hidden, states + i * hidden);
    std::copy_n(args.y[member * args.rows + first + i], outputs, &x[i * inputs]);
  }
  for (int64_t step = 0; step < args.steps; step++) {
    for (int64_t i = 0; i < rows; i++)
      std::copy_n(args.action(member, first + i, step), args.num_actions,
                  &x[i * inputs + outputs]);
    multiply_few(Matrix<T>(x.get(), rows, inputs, inputs), w.ih, x_sums.get(), sums);
    gru_step(w, states, rows, h_sums.get(), reset.get(),
             [&](int64_t i) { return &x_sums[i * sums]; },
             [&](const Matrix<T>& some, const Matrix<T>& weight, float* to) {
      multiply_few(some, weight, to, sums);
    });
    visit(step, x.get(), states);
    multiply_few(Matrix<T>(states, rows, hidden, hidden), head, y.get(), outputs);
    for (int64_t i = 0; i < rows; i++)
      for_each_vector(outputs, [&](int64_t at, auto... tail) {
        Floats values = load(&y[i * outputs + at], tail...) + load(bias + at, tail...);
        store(&x[i * inputs + at], values, tail...);
        store(out(first + i, step) + at, values, tail...);
      });
  }
}

std::tuple<Tensor, Tensor> gru_rollout(const Tensor& h, const Tensor& y, const Tensor& actions,
                                       const Tensor& w_ih, const Tensor& w_hh, const Tensor& b_ih,
                                       const Tensor& b_hh, const Tensor& w_out, const Tensor& b_out,
                                       bool reset_after) {
  return dispatch_dtype(h, [&](auto tag) {
    using T = decltype(tag);
    constexpr int64_t BLOCK = 32;
    RolloutArgs<T> args(h, y, actions, w_ih, w_hh, b_ih, b_hh, w_out, b_out, reset_after);
    Tensor out = allocate(std::array{args.members, args.rows, args.steps, args.outputs},
                          h.scalar_type());
    Tensor states = allocate_like(h);
    int64_t blocks = (args.rows + BLOCK - 1) / BLOCK;
    parallel_for_dynamic(args.members * blocks, [&](TaskQueue& queue) {
      for (int64_t task; queue.pop(task);) {
        int64_t member = task / blocks, first = task % blocks * BLOCK;
        T* to = data<T>(states) + (member * args.rows + first) * args.hidden();
        rollout_rows(args, member, first, std::min(BLOCK, args.rows - first), to,
                     [&](int64_t row, int64_t step) {
          return data<T>(out) + ((member * args.rows + row) * args.steps + step) * args.outputs;
        }, [](auto...) {});
      }
    });
    return std::tuple{out, states};
  });
}

// Gradients of all arguments of a rollout; those that are not needed are computed, but not returned.
template <class T>
struct RolloutGrads {
  Tensor h, y, actions, w_ih, w_hh, b_ih, b_hh, w_out, b_out;

  // Follow the gradient of a member back through its steps; token row * steps + step is the step of a
  // row, as in packed sequences of equal lengths.
  void add_member(const RolloutArgs<T>& args, int64_t member, const Rows<T>& grad_out,
                  const Rows<T>& grad_h) {
    int64_t rows = args.rows, steps = args.steps, tokens = rows * steps, hidden = args.hidden();
    int64_t outputs = args.outputs, inputs = args.inputs, sums = args.sums();
    Buffer<T> x = make_buffer<T>(tokens * inputs), after = make_buffer<T>(tokens * hidden);
    Buffer<T> last = make_buffer<T>(rows * hidden), out = make_buffer<T>(outputs);
    rollout_rows(args, member, 0, rows, last.get(), [&](int64_t, int64_t) { return out.get(); },
                 [&](int64_t step, const T* x_step, const T* states) {
      for (int64_t i = 0; i < rows; i++) {
        std::copy_n(x_step + i * inputs, inputs, &x[(i * steps + step) * inputs]);
        std::copy_n(states + i * hidden, hidden, &after[(i * steps + step) * hidden]);
      }
    });
    Packing packing(rows, [&](int64_t i) { return i * steps; });
    GruWeights<T> w = args.weights[member];
    Matrix<T> inputs_of(x.get(), tokens, inputs, inputs);
    Matrix<T> first = Matrix<T>(args.h).slice_rows(member * rows, rows);
    GruBackward<T> back(w, inputs_of, first, packing, after.get());
    TransposedCopy<T> head(args.head(member)), ih(w.ih);
    Buffer<T> grad_y = make_buffer<T>(tokens * outputs), step_y = make_buffer<T>(rows * outputs);
    Buffer<T> step_sums = make_buffer<T>(rows * sums);
    Buffer<float> grad_x = make_buffer<float>(rows * inputs);
    std::fill_n(grad_x.get(), rows * inputs, 0.0f);
    for (int64_t i = 0; i < rows; i++) widen_row(grad_h[member * rows + i], back.grad_state(i), hidden);
    back.run([&](int64_t step, int64_t) {
      for (int64_t i = 0; i < rows; i++) {  // of this step's output, as an output and as an input
        int64_t token = i * steps + step;
        const T* from = grad_out[member * tokens + token];
        for_each_vector(outputs, [&](int64_t at, auto... tail) {
          Floats sum = load(&grad_x[i * inputs + at], tail...) + load(from + at, tail...);
          store(&step_y[i * outputs + at], sum, tail...);
          store(&grad_y[token * outputs + at], sum, tail...);
        });
      }
      add_product(Matrix<T>(step_y.get(), rows, outputs, outputs), head.matrix, back.grad_state(0),
                  hidden);
    }, [&](int64_t step, int64_t) {
      for (int64_t i = 0; i < rows; i++)
        std::copy_n(back.grad_x_sums()[i * steps + step], sums, &step_sums[i * sums]);
      std::fill_n(grad_x.get(), rows * inputs, 0.0f);
      add_product(Matrix<T>(step_sums.get(), rows, sums, sums), ih.matrix, grad_x.get(), inputs);
      for (int64_t i = 0; i < rows; i++)
        narrow_row(&grad_x[i * inputs + outputs],
                   at(actions, (member * rows + i) * steps + step), args.num_actions);
    });
    for (int64_t i = 0; i < rows; i++) {
      narrow_row(back.grad_state(i), at(h, member * rows + i), hidden);
      narrow_row(&grad_x[i * inputs], at(y, member * rows + i), outputs);
    }
    Matrix<T> of_y(grad_y.get(), tokens, outputs, outputs);
    back.store_grad_w_ih(at(w_ih, member * sums));
    back.store_grad_w_hh(at(w_hh, member * sums));
    sum_columns(back.grad_x_sums(), at(b_ih, member));
    sum_columns(back.grad_h_sums(), at(b_hh, member));
    store_grad_weight<T>(of_y, Matrix<T>(after.get(), tokens, hidden, hidden),
                         at(w_out, member * outputs));
    sum_columns(of_y, at(b_out, member));
  }

  static T* at(const Tensor& x, int64_t row) { return data<T>(x) + row * x.size(x.dim() - 1); }
  static void widen_row(const T* from, float* to, int64_t count) {
    for_each_vector(count, [&](int64_t at, auto... tail) {
      store(to + at, load(from + at, tail...), tail...);
    });
  }
  static void narrow_row(const float* from, T* to, int64_t count) {
    for_each_vector(count, [&](int64_t at, auto... tail) {
      store(to + at, load(from + at, tail...), tail...);
    });
  }
};

Tensors gru_rollout_backward(NeedsGrad needs, Tensors grads, const Tensor& h, const Tensor& y,
                             const Tensor& actions, const Tensor& w_ih, const Tensor& w_hh,
                             const Tensor& b_ih, const Tensor& b_hh, const Tensor& w_out,
                             const Tensor& b_out, bool reset_after) {
  check(needs.size() == 10 && grads.size() == 2, "expected one flag per argument");
  return dispatch_dtype(h, [&](auto tag) {
    using T = decltype(tag);
    RolloutArgs<T> args(h, y, actions, w_ih, w_hh, b_ih, b_hh, w_out, b_out, reset_after);
    for (const Tensor& grad : grads) check_same_dtype(grad, h);
    check(same_sizes(grads[0], std::array{args.members, args.rows, args.steps, args.outputs}) &&
              same_sizes(grads[1], h),
          "gradients must have the shapes of the outputs");
    Rows<T> grad_out(grads[0]), grad_h(grads[1]);
    RolloutGrads<T> result{allocate_like(h),    allocate_like(y),    allocate_like(actions),
                           allocate_like(w_ih), allocate_like(w_hh), allocate_like(b_ih),
                           allocate_like(b_hh), allocate_like(w_out), allocate_like(b_out)};
    for (int64_t member = 0; member < args.members; member++)
      result.add_member(args, member, grad_out, grad_h);
    Tensors needed;
    const Tensor* all[] = {&result.h,    &result.y,    &result.actions, &result.w_ih, &result.w_hh,
                           &result.b_ih, &result.b_hh, &result.w_out,   &result.b_out};
    for (size_t i = 0; i < std::size(all); i++)
      if (needs[i]) needed.push_back(*all[i]);
    return needed;
  });
}

// ---- rssm_step

// The probabilities of a group are (1 - unimix) softmax + unimix / count, in float32.
struct Unimix {
  Floats kept, uniform;
  Unimix(float unimix, int64_t count)
      : kept(broadcast(1 - unimix)), uniform(broadcast(unimix / float(count))) {}
  Floats operator()(Floats softmax) const { return fma(softmax, kept, uniform); }
};

template <class T>
void softmax_group(const T* logits, int64_t count, float* to) {
  float row_max = reduce_max(reduce_row(
      count, broadcast(-INF),
      [&](Floats acc, int64_t at, auto... tail) { return max(acc, load(logits + at, tail...)); }, max));
  float sum = reduce_sum(sum_row(count, [&](Floats acc, int64_t at, auto... tail) {
    Floats exps = exp_nonpositive(load(logits + at, tail...) - broadcast(row_max));
    store(to + at, exps, tail...);
    return acc + exps;
  }));
  Floats factor = broadcast(1 / sum);
  for_each_vector(count, [&](int64_t at, auto... tail) {
    store(to + at, load(to + at, tail...) * factor, tail...);
  });
}

template <class T>
void mixed_probs(const T* logits, int64_t count, float unimix, float* to) {
  Unimix mixed(unimix, count);
  softmax_group(logits, count, to);
  for_each_vector(count, [&](int64_t at, auto... tail) {
    store(to + at, mixed(load(to + at, tail...)), tail...);
  });
}

// The first category whose cumulative probability exceeds a random share of the whole.
inline int64_t draw(const float* probs, int64_t count, float uniform) {
  double total = 0, cumulative = 0;
  for (int64_t i = 0; i < count; i++) total += probs[i];
  for (int64_t i = 0; i + 1 < count; i++)
    if ((cumulative += probs[i]) > uniform * total) return i;
  return count - 1;
}

inline void store_logs(const float* probs, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i++) to[i] = std::log(probs[i]);
}

inline void check_rssm(const Tensor& prior, const std::optional<Tensor>& posterior,
                       const Tensor& seeds, const Tensor& positions, double unimix) {
  check(prior.dim() == 3 && prior.size(2) > 0, "prior must be (rows, groups, categories)");
  check(unimix > 0 && unimix < 1, "unimix must be between 0 and 1");
  if (posterior) {
    check_same_dtype(*posterior, prior);
    check(same_sizes(*posterior, prior), "prior and posterior must have the same shape");
  }
  for (const Tensor* noise : {&seeds, &positions})
    check(noise->dim() == 1 && noise->size(0) == prior.size(0),
          "seeds and positions must have one entry per row");
}

std::tuple<Tensor, Tensor, Tensor> rssm_step(const Tensor& prior,
                                             const std::optional<Tensor>& posterior,
                                             const Tensor& seeds, const Tensor& positions,
                                             double unimix) {
  return dispatch_dtype(prior, [&](auto tag) {
    using T = decltype(tag);
    check_rssm(prior, posterior, seeds, positions, unimix);
    Rows<T> prior_rows(prior);
    std::optional<Rows<T>> posterior_rows;
    if (posterior) posterior_rows.emplace(*posterior);
    Integers seed(seeds), position(positions);
    int64_t groups = prior.size(1), count = prior.size(2);
    std::span<const int64_t> sizes = prior.sizes();
    Tensor sample = allocate(sizes, prior.scalar_type());
    Tensor logs = allocate(sizes, ScalarType::Float), other = allocate(sizes, ScalarType::Float);
    parallel_for(prior_rows.count, 16 * count, [&](int64_t begin, int64_t end) {
      Buffer<float> probs = make_buffer<float>(count);
      for (int64_t i = begin; i < end; i++) {
        int64_t row = i / groups;
        mixed_probs(prior_rows[i], count, float(unimix), probs.get());
        store_logs(probs.get(), count, data<float>(logs) + i * count);
        if (posterior) mixed_probs((*posterior_rows)[i], count, float(unimix), probs.get());
        store_logs(probs.get(), count, data<float>(other) + i * count);
        float uniform = uniform_at(seed[row], position[row], uint32_t(i % groups));
        T* to = data<T>(sample) + i * count;
        std::fill_n(to, count, round_to<T>(0.0f));
        to[draw(probs.get(), count, uniform)] = round_to<T>(1.0f);
      }
    });
    return std::tuple{sample, logs, other};
  });
}

// The gradient of a group's logits from those of its probabilities, and of their logarithms:
//
//   dp = grad_p + grad_log / p    ds = (1 - unimix) dp    dlogits = s (ds - sum(s ds))
//
// where s is the softmax. `grad_p` and `grad_logs` may be null.
template <class T>
void store_logits_grad(const T* logits, const T* grad_p, const float* const (&grad_logs)[2],
                       int64_t count, float unimix, float* softmax, float* grads, T* to) {
  Unimix mixed(unimix, count);
  softmax_group(logits, count, softmax);
  Floats weighted = sum_row(count, [&](Floats acc, int64_t at, auto... tail) {
    Floats s = load(softmax + at, tail...), grad{};
    for (const float* some : grad_logs)
      if (some) grad = grad + load(some + at, tail...);
    grad = grad / mixed(s);
    if (grad_p) grad = grad + load(grad_p + at, tail...);
    store(grads + at, grad, tail...);
    return fma(s, grad, acc);
  });
  Floats mean = broadcast(reduce_sum(weighted));
  for_each_vector(count, [&](int64_t at, auto... tail) {
    Floats s = load(softmax + at, tail...);
    store(to + at, mixed.kept * s * (load(grads + at, tail...) - mean), tail...);
  });
}

Tensors rssm_step_backward(NeedsGrad needs, Tensors grads, const Tensor& prior,
                           const std::optional<Tensor>& posterior, const Tensor& seeds,
                           const Tensor& positions, double unimix) {
  check(needs.size() == 5 && grads.size() == 3, "expected one flag per argument");
  return dispatch_dtype(prior, [&](auto tag) {
    using T = decltype(tag);
    check_rssm(prior, posterior, seeds, positions, unimix);
    check(posterior || !needs[1], "expected no gradient of the posterior");
    check_same_dtype(grads[0], prior);
    for (const Tensor& grad : grads)
      check(same_sizes(grad, prior), "gradients must have the shape of the logits");
    check(grads[1].scalar_type() == ScalarType::Float && grads[2].scalar_type() == ScalarType::Float,
          "gradients of log-probabilities must be float32");
    Rows<T> of_sample(grads[0]);
    Rows<float> of_prior(grads[1]), of_posterior(grads[2]);
    int64_t count = prior.size(2);
    Tensors result;
    auto compute = [&](const Tensor& logits, bool drawn, bool first, bool second) {
      Rows<T> rows(logits);
      Tensor grad = allocate_like(logits);
      parallel_for(rows.count, 16 * count, [&](int64_t begin, int64_t end) {
        Buffer<float> probs = make_buffer<float>(count), sums = make_buffer<float>(count);
        for (int64_t i = begin; i < end; i++)
          store_logits_grad(rows[i], drawn ? of_sample[i] : nullptr,
                            {first ? of_prior[i] : nullptr, second ? of_posterior[i] : nullptr},
                            count, float(unimix), probs.get(), sums.get(),
                            data<T>(grad) + i * count);
      });
      result.push_back(grad);
    };
    if (needs[0]) compute(prior, !posterior, true, !posterior);
    if (needs[1]) compute(*posterior, true, false, true);
    return result;
  });
}

}  // namespace ingot::kernels

REGISTER_OP(gru_cell)
REGISTER_OP(gru)
REGISTER_OP(gru_rollout)
REGISTER_OP(rssm_step)

REGISTER_BACKWARD(gru_cell)
REGISTER_BACKWARD(gru)
REGISTER_BACKWARD(gru_rollout)
REGISTER_BACKWARD(rssm_step)
