// Losses over a vocabulary, a number a token. Logits come from memory once, or are never there: the
// `linear_` forms take them from the blocks of the product, 256 words of the vocabulary at a time,
// and join the words' parts in their order.
#include "matmul.h"

namespace ingot::kernels {

// log(sum(exp(logits))) of a row: the largest, and what is left of the sum.
struct LogSum {
  double largest, rest;
  double total() const { return largest + rest; }
};

template <class T>
LogSum log_sum(const T* logits, int64_t width) {
  OnlineSoftmax sums;
  auto values = [&](int64_t at, auto... tail) { return load(logits + at, tail...); };
  for (int64_t at = 0; at < width; at += sums.BLOCK)
    sums.update(at, std::min(at + sums.BLOCK, width), values, [](auto...) {});
  float sum = sums.sum();
  if (sum == 0) return {-INF, 0};
  return {reduce_max(sums.row_max), std::log(double(sum))};
}

template <class T>
double mean(const T* logits, int64_t width) {
  return reduce_sum(sum_row(width, [&](Floats acc, int64_t at, auto... tail) {
           return acc + load(logits + at, tail...);
         })) / double(width);
}

void need_targets(const Integers& targets, std::optional<int64_t> ignored, int64_t vocabulary) {
  for (int64_t i = 0; i < targets.count; i++)
    check(targets[i] == ignored || (targets[i] >= 0 && targets[i] < vocabulary),
         "target out of range");
}

Tensor made_for(const Tensor& targets) {
  return allocate({targets.sizes().data(), size_t(targets.dim())}, ScalarType::Float);
}

// The gradient of a loss by a logit: softmax * of_softmax + of_all, and of_target more at the target.
struct Slopes {
  double of_softmax, of_all, of_target;
};

struct Logprob {
  static constexpr bool needs_mean = false;
  double operator()(const LogSum& log, double chosen, double) const {
    return chosen - log.largest - log.rest;
  }
  Slopes slopes(const LogSum&, int64_t) const { return {-1, 0, 1}; }
};

struct CrossEntropy {
  double label_smoothing, z_loss;
  bool needs_mean = label_smoothing != 0;  // not 0 times the mean, which is NaN where a logit is -inf

  double operator()(const LogSum& log, double chosen, double mean) const {
    double likely = chosen;
    if (needs_mean) likely = (1 - label_smoothing) * chosen + label_smoothing * mean;
    return log.largest - likely + log.rest + z_loss * log.total() * log.total();
  }
  Slopes slopes(const LogSum& log, int64_t vocabulary) const {
    return {1 + 2 * z_loss * log.total(), -label_smoothing / double(vocabulary), label_smoothing - 1};
  }
};

// loss(log_sum, chosen, mean) of each row of logits; an ignored one has 0.
template <class Loss>
Tensor by_token(const Tensor& logits, const Tensor& targets, std::optional<int64_t> ignored,
                const Loss& loss) {
  return dispatch_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    check(logits.dim() == targets.dim() + 1, "targets must have one entry per row");
    check(std::equal(targets.sizes().begin(), targets.sizes().end(), logits.sizes().begin()),
         "targets must have one entry per row");
    Integers target(targets);
    int64_t vocabulary = logits.size(logits.dim() - 1);
    need_targets(target, ignored, vocabulary);
    Rows<T> rows(logits);
    Tensor y = made_for(targets);
    float* to = data<float>(y);
    parallel_for(target.count, 4 * vocabulary, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        if (target[i] == ignored) {
          to[i] = 0;
          continue;
        }
        double average = loss.needs_mean ? mean(rows[i], vocabulary) : 0;
        to[i] = float(loss(log_sum(rows[i], vocabulary), widen(rows[i][target[i]]), average));
      }
    });
    return y;
  });
}

// What 256 words contribute to a token's loss.
struct Part {
  float largest, sum, total, chosen;

  // power(at, e^(logit - largest), count...) sees the powers whose sum this takes.
  template <class Power>
  static Part of(const float* logits, int64_t width, int64_t target, bool with_total,
                 const Power& power) {
    auto most = [&](Floats acc, int64_t at, auto... tail) {
      return max(acc, load(logits + at, tail...));
    };
    Part part{};
    auto larger = [](Floats a, Floats b) { return max(a, b); };
    part.largest = ingot::reduce_max(reduce_row(width, broadcast(-INF), most, larger));
    Floats shift = broadcast(std::max(part.largest, -3e38f));
    part.sum = ingot::reduce_sum(sum_row(width, [&](Floats acc, int64_t at, auto... tail) {
      Floats powers = exp_nonpositive(load(logits + at, tail...) - shift);
      power(at, powers, tail...);
      return acc + powers;
    }));
    if (with_total)
      part.total = ingot::reduce_sum(sum_row(width, [&](Floats acc, int64_t at, auto... tail) {
        return acc + load(logits + at, tail...);
      }));
    part.chosen = target >= 0 && target < width ? logits[target] : 0;
    return part;
  }
};

LogSum log_sum(std::span<const Part> parts) {
  float most = -INF;
  double sum = 0;
  for (const Part& part : parts)
    if (!(part.largest <= most)) most = part.largest;  // a NaN too
  for (const Part& part : parts)
    if (part.sum) sum += double(part.sum) * std::exp(double(part.largest) - most);
  return {most, std::log(sum)};
}

template <class Loss>
double joined(std::span<const Part> parts, int64_t vocabulary, const Loss& loss) {
  double total = 0, chosen = 0;
  for (const Part& part : parts) total += part.total, chosen += part.chosen;
  return loss(log_sum(parts), chosen, total / double(vocabulary));
}

void need_fit(const Tensor& hidden, const Tensor& weight, const Tensor& targets) {
  check_same_dtype(weight, hidden);
  check(hidden.dim() == 2 && weight.dim() == 2 && weight.size(1) == hidden.size(1),
       "hidden must be (T, D) and weight (V, D)");
  check(targets.dim() == 1 && targets.size(0) == hidden.size(0), "targets must have one entry per row");
}

template <class Loss>
Tensor by_hidden(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                 std::optional<int64_t> ignored, const Loss& loss) {
  return dispatch_dtype(hidden, [&](auto tag) {
    using T = decltype(tag);
    need_fit(hidden, weight, targets);
    Integers target(targets);
    Rows<T> x(hidden), w(weight);
    int64_t vocabulary = weight.size(0);
    need_targets(target, ignored, vocabulary);
    Tensor y = made_for(targets);
    float* to = data<float>(y);
    std::vector<ColumnRange> groups = fixed_size_columns(vocabulary);
    std::vector<Part> parts(target.count * groups.size());
    std::array<Matrix<T>, 1> weights{Matrix<T>(w)};
    gemm(Matrix<T>(x), weights, groups, [&](const OutputBlock& block) {
      for (int64_t r = 0; r < block.rows; r++) {
        int64_t row = block.row + r, word = target[row] - block.columns.begin;
        parts[row * groups.size() + block.group] =
            Part::of(block.acc_row(0, r), block.columns.count, word, loss.needs_mean, [](auto...) {});
      }
    });
    for (int64_t i = 0; i < target.count; i++)
      to[i] = target[i] == ignored
                  ? 0
                  : float(joined({&parts[i * groups.size()], groups.size()}, vocabulary, loss));
    return y;
  });
}

// ---- Gradients of the `linear_` forms, with dZ that of the logits:
//
//   dH = dZ W    dW = dZ^T H
//
// Of each group of 256 words e^(logit - largest) is kept, in the weight's dtype; when all groups of
// some tokens are done, their sums are known. Then some words at a time become dZ and go into both
// products, while they are in a cache.
constexpr int64_t WORDS = 12 * BLOCK_N;

// The logits of some tokens, WORDS words of all of them after WORDS others: what is done with can be
// given back before the rest is.
template <class T>
class Logits {
 public:
  Logits(T* memory, int64_t tokens, int64_t words) : memory_(memory), tokens_(tokens), words_(words) {}

  // Values that each token takes.
  static int64_t size(int64_t words) {
    return words / WORDS * padded_stride<T>(WORDS) + (words % WORDS ? padded_stride<T>(words % WORDS) : 0);
  }
  T* at(int64_t token, int64_t word) const {
    Matrix<T> some = of_words(word / WORDS * WORDS);
    return const_cast<T*>(some[token]) + word % WORDS;
  }
  // Of those that begin with this one.
  Matrix<T> of_words(int64_t begin) const {
    int64_t count = std::min(WORDS, words_ - begin);
    return {memory_ + tokens_ * size(begin), tokens_, count, padded_stride<T>(count)};
  }

 private:
  T* memory_;
  int64_t tokens_, words_;
};

template <class T>
class LossGradient {
 public:
  // Of rows of hidden states, with a target and a gradient for each; their losses go to `losses`.
  template <class Loss>
  LossGradient(const Matrix<T>& hidden, const Matrix<T>& weight, std::span<const int64_t> targets,
               std::span<const float> grads, T* memory, const Loss& loss, float* losses)
      : targets_(targets),
        groups_(fixed_size_columns(weight.rows)),
        parts_(hidden.rows * groups_.size()),
        logits_(memory, hidden.rows, weight.rows) {
    std::array<Matrix<T>, 1> weights{weight};
    gemm(hidden, weights, groups_, [&](const OutputBlock& block) {
      for (int64_t r = 0; r < block.rows; r++) {
        int64_t token = block.row + r, word = targets_[token] - block.columns.begin;
        T* to = logits_.at(token, block.columns.begin);
        parts_[token * groups_.size() + block.group] =
            Part::of(block.acc_row(0, r), block.columns.count, word, loss.needs_mean,
                     [&](int64_t at, Floats power, auto... tail) { store(to + at, power, tail...); });
      }
    });
    for (int64_t token = 0; token < hidden.rows; token++) {
      LogSum log = log_sum(parts(token));
      Slopes slopes = loss.slopes(log, weight.rows);
      double grad = grads[token];
      slopes_.push_back({grad * slopes.of_softmax, grad * slopes.of_all, grad * slopes.of_target});
      totals_.push_back(log.total());
      losses[token] = float(joined(parts(token), weight.rows, loss));
    }
  }

  // dZ of WORDS words, or of all that are left.
  Matrix<T> of_words(int64_t begin) const {
    Matrix<T> some = logits_.of_words(begin);
    parallel_for(some.rows, some.width, [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; token++)
        for (int64_t word = begin; word < begin + some.width; word += BLOCK_N)
          finish(token, word / BLOCK_N);
    });
    return some;
  }

 private:
  std::span<const Part> parts(int64_t token) const {
    return {&parts_[token * groups_.size()], groups_.size()};
  }

  void finish(int64_t token, int64_t group) const {
    const Slopes& slopes = slopes_[token];
    ColumnRange words = groups_[group];
    T* to = logits_.at(token, words.begin);
    if (slopes.of_softmax == 0) return (void)std::fill_n(to, words.count, T{});
    double share = std::exp(double(parts(token)[group].largest) - totals_[token]);
    Floats scale = broadcast(float(slopes.of_softmax * share)), rest = broadcast(float(slopes.of_all));
    int64_t target = targets_[token] - words.begin;
    bool here = target >= 0 && target < words.count;
    double chosen = here ? widen(to[target]) * double(scale[0]) + slopes.of_all + slopes.of_target : 0;
    for_each_vector(words.count, [&](int64_t at, auto... tail) {
      store(to + at, fma(load(to + at, tail...), scale, rest), tail...);
    });
    if (here) to[target] = round_to<T>(float(chosen));
  }

  std::span<const int64_t> targets_;
  std::vector<ColumnRange> groups_;
  std::vector<Part> parts_;
  Logits<T> logits_;
  std::vector<Slopes> slopes_;
  std::vector<double> totals_;
};

// sums += x W^T, or = that the first time.
template <class T, class Sum>
void add_product(const GemmOperands<T>& factors, bool first, Sum* sums) {
  int64_t width = factors.w.rows;
  gemm_sum<T>({factors}, [&](int64_t row, int64_t column, Floats values, auto... tail) {
    Sum* to = sums + row * width + column;
    if (!first) values += load(to, tail...);
    store(to, values, tail...);
  });
}

// `Sum` is what the weight's gradient is added up in. After the last tokens logits are given back while
// that gradient grows: for GPT-2 124M and 2048 tokens 77 MB are not held beside 206.
template <class T, class Sum, class Loss>
void add_gradients(const Matrix<T>& hidden, const Matrix<T>& weight, std::span<const int64_t> targets,
                   std::span<const float> grads, const Loss& loss, T* memory, bool first, bool last,
                   float* losses, float* of_hidden, Sum* of_weight) {
  LossGradient<T> gradient(hidden, weight, targets, grads, memory, loss, losses);
  for (int64_t begin = 0; begin < weight.rows; begin += WORDS) {
    Matrix<T> logits = gradient.of_words(begin);
    Transposed<T> words(weight.slice_rows(begin, logits.width));
    if (of_hidden) add_product<T>({logits, words}, begin == 0, of_hidden);
    if (of_weight) {
      Matrix<T> turned = parallel_transpose_copy<Scratch::TRANSPOSED_GRAD>(Transposed<T>(logits));
      add_product<T>({turned, Transposed<T>(hidden)}, first, of_weight + begin * hidden.width);
    }
    if (last) advise_memory(logits.first, logits.rows * logits.stride * sizeof(T), Advice::DONT_NEED);
  }
}

template <class T>
void put_narrowed(const float* from, int64_t rows, int64_t width, T* to) {
  parallel_for_each_vector(rows, width, [&](int64_t row, int64_t at, auto... tail) {
    store(to + row * width + at, load(from + row * width + at, tail...), tail...);
  });
}

// Losses, dH and dW; grad(token) is what the loss of a token is multiplied by.
template <class Loss, class Grad>
std::tuple<Tensor, Tensor, Tensor> with_gradients(const Tensor& hidden, const Tensor& weight,
                                                  const Tensor& targets,
                                                  std::optional<int64_t> ignored, const Loss& loss,
                                                  bool needs_hidden, bool needs_weight,
                                                  const Grad& grad) {
  return dispatch_dtype(hidden, [&](auto tag) {
    using T = decltype(tag);
    need_fit(hidden, weight, targets);
    Integers given(targets);
    check(weight.size(0) > 0, "the vocabulary must not be empty");
    need_targets(given, ignored, weight.size(0));
    Rows<T> x(hidden), w(weight);
    std::vector<int64_t> target(x.count);
    std::vector<float> slope(x.count);
    for (int64_t i = 0; i < x.count; i++) {
      target[i] = given[i];
      slope[i] = given[i] == ignored ? 0 : grad(i);
    }
    // As many tokens as 256 MB hold: those of a step of training as a rule.
    int64_t size = Logits<T>::size(w.count), room = (int64_t(256) << 20) / (size * int64_t(sizeof(T)));
    int64_t most = std::min(std::max<int64_t>(256, room), std::max<int64_t>(x.count, 1));
    bool at_once = most >= x.count;
    Tensor memory = allocate(std::array{most, size}, hidden.scalar_type());
    Tensor losses = made_for(targets), of_hidden = allocate_like(hidden), of_weight = allocate_like(weight);
    Tensor sums = allocate(std::array{needs_weight && !at_once ? w.count : 0, w.width}, ScalarType::Float);
    float* to = data<float>(losses);
    for (int64_t begin = 0; begin == 0 || begin < x.count; begin += most) {
      int64_t count = std::min(most, x.count - begin);
      Matrix<T> rows = Matrix<T>(x).slice_rows(begin, count);
      float* added = needs_hidden ? scratch<Scratch::LOSS_GRAD_HIDDEN, float>(count * x.width) : nullptr;
      auto run = [&](auto* sum) {
        add_gradients<T>(rows, w, {target.data() + begin, size_t(count)},
                         {slope.data() + begin, size_t(count)}, loss, data<T>(memory), begin == 0,
                         begin + count == x.count, to + begin, added, needs_weight ? sum : nullptr);
      };
      if (at_once) run(data<T>(of_weight));
      else run(data<float>(sums));
      if (added) put_narrowed<T>(added, count, x.width, data<T>(of_hidden) + begin * x.width);
    }
    if (needs_weight && !at_once)
      put_narrowed<T>(data<float>(sums), w.count, w.width, data<T>(of_weight));
    for (int64_t i = 0; i < x.count; i++)
      if (target[i] == ignored) to[i] = 0;
    return std::tuple(losses, of_hidden, of_weight);
  });
}

template <class Loss>
Tensors by_hidden_backward(const NeedsGrad& needs_grad, const Tensors& grads, const Tensor& hidden,
                           const Tensor& weight, const Tensor& targets,
                           std::optional<int64_t> ignored, const Loss& loss) {
  check(needs_grad.size() >= 3 && grads.size() == 1, "expected one flag per argument and one gradient");
  check(grads[0].is_cpu() && grads[0].scalar_type() == ScalarType::Float, "the gradient must be float32 on the CPU");
  Vector<float> grad(grads[0], hidden.size(0));
  auto [losses, of_hidden, of_weight] = with_gradients(hidden, weight, targets, ignored, loss, needs_grad[0],
                                                       needs_grad[1], [&](int64_t i) { return grad[i]; });
  Tensors found;
  if (needs_grad[0]) found.push_back(of_hidden);
  if (needs_grad[1]) found.push_back(of_weight);
  return found;
}

Tensor token_logprobs(const Tensor& logits, const Tensor& targets) {
  return by_token(logits, targets, std::nullopt, Logprob{});
}
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore_index,
                     double label_smoothing, double z_loss) {
  return by_token(logits, targets, ignore_index, CrossEntropy{label_smoothing, z_loss});
}
Tensor linear_token_logprobs(const Tensor& hidden, const Tensor& weight, const Tensor& targets) {
  return by_hidden(hidden, weight, targets, std::nullopt, Logprob{});
}
Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                            int64_t ignore_index, double label_smoothing, double z_loss) {
  return by_hidden(hidden, weight, targets, ignore_index, CrossEntropy{label_smoothing, z_loss});
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_fwd_bwd(
    const Tensor& hidden, const Tensor& weight, const Tensor& targets, int64_t ignore_index,
    double label_smoothing, double z_loss, double slope) {
  return with_gradients(hidden, weight, targets, ignore_index, CrossEntropy{label_smoothing, z_loss},
                        true, true, [&](int64_t) { return float(slope); });
}

Tensors linear_token_logprobs_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& hidden,
                                       const Tensor& weight, const Tensor& targets) {
  return by_hidden_backward(needs_grad, grads, hidden, weight, targets, std::nullopt, Logprob{});
}
Tensors linear_cross_entropy_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& hidden,
                                      const Tensor& weight, const Tensor& targets,
                                      int64_t ignore_index, double label_smoothing, double z_loss) {
  CrossEntropy loss{label_smoothing, z_loss};
  return by_hidden_backward(needs_grad, grads, hidden, weight, targets, ignore_index, loss);
}

}  // namespace ingot::kernels

REGISTER_OP(token_logprobs)
REGISTER_OP(cross_entropy)
REGISTER_OP(linear_token_logprobs)
REGISTER_OP(linear_cross_entropy)
REGISTER_OP(linear_cross_entropy_fwd_bwd)

REGISTER_BACKWARD(linear_token_logprobs)
REGISTER_BACKWARD(linear_cross_entropy)
