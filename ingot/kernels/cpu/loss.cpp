// Losses over a vocabulary, one value per token. Logits are read once or never stored: the
// `linear_` forms take them from the blocks of the GEMM, 256 entries of the vocabulary at a time,
// and combine the partial results in a fixed order.
#include "logsum.h"
#include "matmul.h"

namespace ingot::kernels {

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

void check_targets(const Integers& targets, std::optional<int64_t> ignored, int64_t vocab_size) {
  for (int64_t i = 0; i < targets.count; i++)
    check(targets[i] == ignored || (targets[i] >= 0 && targets[i] < vocab_size),
          "target out of range");
}

Tensor allocate_losses(const Tensor& targets) {
  return allocate({targets.sizes().data(), size_t(targets.dim())}, ScalarType::Float);
}

// Gradient of a loss: p * softmax + constant for all logits with probability p, plus target at the
// target.
struct LogitGrads {
  double softmax, constant, target;
};

// A loss, or the log-probability of the target. One type for both, chosen at run time: as template
// arguments they doubled the code of this file.
struct Loss {
  bool is_logprob = false;
  double label_smoothing = 0, z_loss = 0;
  bool needs_mean = label_smoothing != 0;  // 0 * mean would be NaN if a logit is -inf

  double operator()(const LogSum& log, double chosen, double mean) const {
    if (is_logprob) return chosen - log.row_max - log.rest;
    double likely = chosen;
    if (needs_mean) likely = (1 - label_smoothing) * chosen + label_smoothing * mean;
    return log.row_max - likely + log.rest + z_loss * log.total() * log.total();
  }
  LogitGrads logit_grads(const LogSum& log, int64_t vocab_size) const {
    if (is_logprob) return {-1, 0, 1};
    double softmax = 1 + 2 * z_loss * log.total();
    return {softmax, -label_smoothing / double(vocab_size), label_smoothing - 1};
  }
};

template <class T>
void write_logit_grads(const T* logits, int64_t vocab_size, int64_t target, double grad,
                       const Loss& loss, T* to) {
  LogSum log = log_sum(logits, vocab_size);
  LogitGrads of = loss.logit_grads(log, vocab_size);
  float factor = float(grad * of.softmax * std::exp(-log.rest));
  Floats scale = broadcast(factor), shift = broadcast(float(log.row_max)),
      constant = broadcast(float(grad * of.constant));
  auto exps = [&](int64_t at, auto... tail) {
    return exp_nonpositive(load(logits + at, tail...) - shift);
  };
  for_each_vector(vocab_size, [&](int64_t at, auto... tail) {
    store(to + at, fma(exps(at, tail...), scale, constant), tail...);
  });
  double prob = double(exps(target, 1)[0]) * factor;
  to[target] = round_to<T>(float(prob + grad * (of.constant + of.target)));
}

// The loss of each row of logits; 0 if its target is ignored.
Tensor loss_of_logits(const Tensor& logits, const Tensor& targets, std::optional<int64_t> ignored,
                      const Loss& loss) {
  return dispatch_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    check(logits.dim() == targets.dim() + 1, "targets must have one entry per row");
    check(std::equal(targets.sizes().begin(), targets.sizes().end(), logits.sizes().begin()),
          "targets must have one entry per row");
    Integers target(targets);
    int64_t vocab_size = logits.size(logits.dim() - 1);
    check_targets(target, ignored, vocab_size);
    Rows<T> rows(logits);
    Tensor y = allocate_losses(targets);
    float* to = data<float>(y);
    parallel_for(target.count, 4 * vocab_size, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        if (target[i] == ignored) {
          to[i] = 0;
          continue;
        }
        double average = loss.needs_mean ? mean(rows[i], vocab_size) : 0;
        // For log-probabilities by the parts of `linear_token_logprobs`, to which those of float32
        // logits are bitwise equal; a loss that is not compared reads the logits once.
        LogSum log = loss.is_logprob ? log_sum(vocab_size, [&](int64_t at, auto... tail) {
          return load(rows[i] + at, tail...);
        }) : log_sum(rows[i], vocab_size);
        to[i] = float(loss(log, widen(rows[i][target[i]]), average));
      }
    });
    return y;
  });
}

// The gradient of the logits; 0 for a row whose target is ignored.
Tensors logits_backward(const NeedsGrad& needs_grad, const Tensors& grads, const Tensor& logits,
                        const Tensor& targets, std::optional<int64_t> ignored, const Loss& loss) {
  check(!needs_grad.empty() && grads.size() == 1, "expected one flag per argument and one gradient");
  if (!needs_grad[0]) return {};
  Tensor of_losses = contiguous(grads[0]);
  Integers target(targets);
  check(of_losses.is_cpu() && of_losses.scalar_type() == ScalarType::Float &&
            of_losses.numel() == target.count,
        "the gradient must be float32 on the CPU, one for each target");
  return dispatch_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    int64_t vocab_size = logits.size(logits.dim() - 1);
    check(logits.numel() == target.count * vocab_size, "targets must have one entry per row");
    check_targets(target, ignored, vocab_size);
    Rows<T> rows(logits);
    Tensor y = allocate_like(logits);
    const float* from = data<float>(of_losses);
    parallel_for(target.count, 8 * vocab_size, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        T* to = data<T>(y) + i * vocab_size;
        if (target[i] == ignored) std::fill_n(to, vocab_size, T{});
        else write_logit_grads(rows[i], vocab_size, target[i], from[i], loss, to);
      }
    });
    return Tensors{y};
  });
}

double total_loss(std::span<const LossPart> parts, int64_t vocab_size, const Loss& loss) {
  double total = 0, chosen = 0;
  for (const LossPart& part : parts) total += part.total, chosen += part.chosen;
  return loss(log_sum(parts), chosen, total / double(vocab_size));
}

void check_shapes(const Tensor& hidden, const Tensor& weight, const Tensor& targets) {
  check_same_dtype(weight, hidden);
  check(hidden.dim() == 2 && weight.dim() == 2 && weight.size(1) == hidden.size(1),
        "hidden must be (T, D) and weight (V, D)");
  check(targets.dim() == 1 && targets.size(0) == hidden.size(0),
        "targets must have one entry per row");
}

void gemm_logits(const Tensor& hidden, const Tensor& weight, const std::vector<ColumnRange>& groups,
                 const Epilogue& epilogue) {
  dispatch_dtype(hidden, [&](auto tag) {
    using T = decltype(tag);
    Rows<T> x(hidden), w(weight);
    std::array<Matrix<T>, 1> weights{Matrix<T>(w)};
    gemm(Matrix<T>(x), weights, groups, epilogue);
  });
}

Tensor linear_loss(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                   std::optional<int64_t> ignored, const Loss& loss) {
  check_supported(hidden);
  check_shapes(hidden, weight, targets);
  Integers target(targets);
  int64_t vocab_size = weight.size(0);
  check_targets(target, ignored, vocab_size);
  Tensor y = allocate_losses(targets);
  float* to = data<float>(y);
  std::vector<ColumnRange> groups = fixed_size_columns(vocab_size);
  std::vector<LossPart> parts(target.count * groups.size());
  gemm_logits(hidden, weight, groups, [&](const OutputBlock& block) {
    for (int64_t r = 0; r < block.rows; r++) {
      int64_t row = block.row + r, token_id = target[row] - block.columns.begin;
      parts[row * groups.size() + block.group] =
          loss_part(block.acc_row(0, r), block.columns.count, token_id, loss.needs_mean);
    }
  });
  for (int64_t i = 0; i < target.count; i++)
    to[i] = target[i] == ignored
                ? 0
                : float(total_loss({&parts[i * groups.size()], groups.size()}, vocab_size, loss));
  return y;
}

// The accumulators of the GEMM as they are: bitwise those that `linear_loss` reads.
Tensor linear_logits(const Tensor& hidden, const Tensor& weight) {
  check_supported(hidden);
  check_same_dtype(weight, hidden);
  check(hidden.dim() == 2 && weight.dim() == 2 && weight.size(1) == hidden.size(1),
        "hidden must be (T, D) and weight (V, D)");
  int64_t vocab_size = weight.size(0);
  Tensor y = allocate(std::array{hidden.size(0), vocab_size}, ScalarType::Float);
  float* to = data<float>(y);
  gemm_logits(hidden, weight, balanced_columns(vocab_size), [&](const OutputBlock& block) {
    for (int64_t r = 0; r < block.rows; r++)
      std::copy_n(block.acc_row(0, r), block.columns.count,
                  to + (block.row + r) * vocab_size + block.columns.begin);
  });
  return y;
}

// ---- Gradients of the `linear_` forms, with dZ the gradient of the logits:
//
//   dH = dZ W    dW = dZ^T H
//
// The forward pass stores e^(logit - max of its 256 entries) in the weight's dtype. Once the sums
// of some tokens are known, chunks of the vocabulary are converted to dZ and used in both GEMMs
// while they are in cache.
constexpr int64_t VOCAB_CHUNK = 12 * BLOCK_N;

// The logits of some tokens, stored chunk by chunk of the vocabulary, so that the memory of
// processed chunks can be released early.
template <class T>
class Logits {
 public:
  Logits(T* memory, int64_t tokens, int64_t vocab) : memory_(memory), tokens_(tokens),
      vocab_(vocab) {}

  // Number of elements per token.
  static int64_t size(int64_t vocab) {
    int64_t rest = vocab % VOCAB_CHUNK;
    return vocab / VOCAB_CHUNK * padded_stride<T>(VOCAB_CHUNK) + (rest ? padded_stride<T>(rest) : 0);
  }
  T* at(int64_t token, int64_t token_id) const {
    Matrix<T> some = chunk(token_id / VOCAB_CHUNK * VOCAB_CHUNK);
    return const_cast<T*>(some[token]) + token_id % VOCAB_CHUNK;
  }
  // The chunk that starts at this vocabulary entry.
  Matrix<T> chunk(int64_t begin) const {
    int64_t count = std::min(VOCAB_CHUNK, vocab_ - begin);
    return {memory_ + tokens_ * size(begin), tokens_, count, padded_stride<T>(count)};
  }

 private:
  T* memory_;
  int64_t tokens_, vocab_;
};

template <class T>
class LossGradient {
 public:
  // Computes the losses of rows of hidden states, each with a target and an output gradient.
    LossGradient(const Matrix<T>& hidden, const Matrix<T>& weight, std::span<const int64_t> targets,
                 std::span<const float> grads, T* memory, const Loss& loss, float* losses)
      : targets_(targets),
        groups_(fixed_size_columns(weight.rows)),
        parts_(hidden.rows * groups_.size()),
        logits_(memory, hidden.rows, weight.rows) {
    std::array<Matrix<T>, 1> weights{weight};
    gemm(hidden, weights, groups_, [&](const OutputBlock& block) {
      for (int64_t r = 0; r < block.rows; r++) {
        int64_t token = block.row + r, token_id = targets_[token] - block.columns.begin;
        T* to = logits_.at(token, block.columns.begin);
        parts_[token * groups_.size() + block.group] =
            LossPart::of(block.acc_row(0, r), block.columns.count, token_id, loss.needs_mean,
                         [&](int64_t at, Floats exps,
                             auto... tail) { store(to + at, exps, tail...); });
      }
    });
    for (int64_t token = 0; token < hidden.rows; token++) {
      LogSum log = log_sum(parts(token));
      LogitGrads logit_grads = loss.logit_grads(log, weight.rows);
      double grad = grads[token];
      logit_grads_.push_back({grad * logit_grads.softmax, grad * logit_grads.constant,
          grad * logit_grads.target});
      totals_.push_back(log.total());
      losses[token] = float(total_loss(parts(token), weight.rows, loss));
    }
  }

  // dZ of the chunk that starts at `begin`.
  Matrix<T> chunk(int64_t begin) const {
    Matrix<T> some = logits_.chunk(begin);
    parallel_for(some.rows, some.width, [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; token++)
        for (int64_t token_id = begin; token_id < begin + some.width; token_id += BLOCK_N)
          finish(token, token_id / BLOCK_N);
    });
    return some;
  }

 private:
  std::span<const LossPart> parts(int64_t token) const {
    return {&parts_[token * groups_.size()], groups_.size()};
  }

  void finish(int64_t token, int64_t group) const {
    const LogitGrads& logit_grads = logit_grads_[token];
    ColumnRange vocab = groups_[group];
    T* to = logits_.at(token, vocab.begin);
    if (logit_grads.softmax == 0) return (void)std::fill_n(to, vocab.count, T{});
    double share = std::exp(double(parts(token)[group].row_max) - totals_[token]);
    Floats scale = broadcast(float(logit_grads.softmax * share)),
        rest = broadcast(float(logit_grads.constant));
    int64_t target = targets_[token] - vocab.begin;
    bool here = target >= 0 && target < vocab.count;
    double chosen = here ? widen(to[target]) * double(scale[0]) : 0;
    chosen = chosen + logit_grads.constant + logit_grads.target;
    for_each_vector(vocab.count, [&](int64_t at, auto... tail) {
      store(to + at, fma(load(to + at, tail...), scale, rest), tail...);
    });
    if (here) to[target] = round_to<T>(float(chosen));
  }

  std::span<const int64_t> targets_;
  std::vector<ColumnRange> groups_;
  std::vector<LossPart> parts_;
  Logits<T> logits_;
  std::vector<LogitGrads> logit_grads_;
  std::vector<double> totals_;
};

// sums += x W^T, or sums = x W^T if `first`.
template <class T, class Sum>
void gemm_add(const GemmOperands<T>& operands, bool first, Sum* sums) {
  int64_t width = operands.w.rows;
  gemm_sum<T>({operands}, [&](int64_t row, ColumnRange columns, const float* values) {
    Sum* to = sums + row * width + columns.begin;
    for_each_vector(columns.count, [&](int64_t at, auto... tail) {
      Floats sum = load(values + at, tail...);
      if (!first) sum += load(to + at, tail...);
      store(to + at, sum, tail...);
    });
  });
}

// `Sum` is the accumulation dtype of dW. In the last pass the logits are released while dW is
// written: with GPT-2 124M and 2048 tokens, 77 MB of dW are not held in addition to 206 MB of
// logits.
template <class T, class Sum>
void add_gradients(const Matrix<T>& hidden, const Matrix<T>& weight,
                   std::span<const int64_t> targets,
                   std::span<const float> grads, const Loss& loss, T* memory, bool first, bool last,
                   float* losses, float* grad_hidden, Sum* grad_weight) {
  LossGradient<T> gradient(hidden, weight, targets, grads, memory, loss, losses);
  for (int64_t begin = 0; begin < weight.rows; begin += VOCAB_CHUNK) {
    Matrix<T> logits = gradient.chunk(begin);
    Transposed<T> vocab(weight.slice_rows(begin, logits.width));
    if (grad_hidden) gemm_add<T>({logits, vocab}, begin == 0, grad_hidden);
    if (grad_weight) {
      Matrix<T> logits_t = parallel_transpose_copy<Scratch::TRANSPOSED_GRAD>(Transposed<T>(logits));
      gemm_add<T>({logits_t, Transposed<T>(hidden)}, first, grad_weight + begin * hidden.width);
    }
    if (last)
      advise_memory(logits.first, logits.rows * logits.stride * sizeof(T), Advice::DONT_NEED);
  }
}

template <class T>
void store_rounded(const float* from, int64_t rows, int64_t width, T* to) {
  parallel_for_each_vector(rows, width, [&](int64_t row, int64_t at, auto... tail) {
    store(to + row * width + at, load(from + row * width + at, tail...), tail...);
  });
}

// Losses, dH and dW; grad(token) is the gradient of a token's loss.
std::tuple<Tensor, Tensor, Tensor> loss_and_gradients(const Tensor& hidden, const Tensor& weight,
                                                      const Tensor& targets,
                                                      std::optional<int64_t> ignored,
                                                      const Loss& loss,
                                                      bool needs_hidden, bool needs_weight,
                                                      FunctionRef<float(int64_t)> grad) {
  return dispatch_dtype(hidden, [&](auto tag) {
    using T = decltype(tag);
    check_shapes(hidden, weight, targets);
    Integers given(targets);
    check(weight.size(0) > 0, "the vocab_size must not be empty");
    check_targets(given, ignored, weight.size(0));
    Rows<T> x(hidden), w(weight);
    std::vector<int64_t> target(x.count);
    std::vector<float> grad_output(x.count);
    for (int64_t i = 0; i < x.count; i++) {
      target[i] = given[i];
      grad_output[i] = given[i] == ignored ? 0 : grad(i);
    }
    // Logits use at most 256 MB at a time, usually enough for all tokens of a training step.
    int64_t size = Logits<T>::size(w.count),
        capacity = (int64_t(256) << 20) / (size * int64_t(sizeof(T)));
    int64_t max_tokens = std::min(std::max<int64_t>(256, capacity), std::max<int64_t>(x.count, 1));
    bool single_pass = max_tokens >= x.count;
    Tensor memory = allocate(std::array{max_tokens, size}, hidden.scalar_type());
    Tensor losses = allocate_losses(targets), grad_hidden = allocate_like(hidden),
        grad_weight = allocate(std::array{needs_weight ? w.count : 0, w.width},
                               weight.scalar_type());
    Tensor sums = allocate(std::array{needs_weight && !single_pass ? w.count : 0, w.width},
                           ScalarType::Float);
    float* to = data<float>(losses);
    for (int64_t begin = 0; begin == 0 || begin < x.count; begin += max_tokens) {
      int64_t count = std::min(max_tokens, x.count - begin);
      Matrix<T> rows = Matrix<T>(x).slice_rows(begin, count);
      float* added = nullptr;
      if (needs_hidden) added = scratch<Scratch::LOSS_GRAD_HIDDEN, float>(count * x.width);
      auto run = [&](auto* sum) {
        add_gradients<T>(rows, w, {target.data() + begin, size_t(count)},
                         {grad_output.data() + begin, size_t(count)}, loss, data<T>(memory),
                         begin == 0,
                         begin + count == x.count, to + begin, added, needs_weight ? sum : nullptr);
      };
      if (single_pass) run(data<T>(grad_weight));
      else run(data<float>(sums));
      if (added) store_rounded<T>(added, count, x.width, data<T>(grad_hidden) + begin * x.width);
    }
    if (needs_weight && !single_pass)
      store_rounded<T>(data<float>(sums), w.count, w.width, data<T>(grad_weight));
    for (int64_t i = 0; i < x.count; i++)
      if (target[i] == ignored) to[i] = 0;
    return std::tuple(losses, grad_hidden, grad_weight);
  });
}

Tensors linear_loss_backward(const NeedsGrad& needs_grad, const Tensors& grads,
                             const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                             std::optional<int64_t> ignored, const Loss& loss) {
  check(needs_grad.size() >= 3 && grads.size() == 1,
        "expected one flag per argument and one gradient");
  check(grads[0].is_cpu() && grads[0].scalar_type() == ScalarType::Float,
        "the gradient must be float32 on the CPU");
  Vector<float> grad(grads[0], hidden.size(0));
  auto [losses, grad_hidden, grad_weight] = loss_and_gradients(hidden, weight, targets, ignored,
                                                               loss, needs_grad[0],
                                                               needs_grad[1],
                                                               [&](int64_t i) { return grad[i]; });
  Tensors result;
  if (needs_grad[0]) result.push_back(grad_hidden);
  if (needs_grad[1]) result.push_back(grad_weight);
  return result;
}

Loss cross_entropy_loss(double label_smoothing, double z_loss) {
  check(label_smoothing >= 0 && label_smoothing <= 1, "label_smoothing must be from 0 to 1");
  return {.label_smoothing = label_smoothing, .z_loss = z_loss};
}

Tensor token_logprobs(const Tensor& logits, const Tensor& targets) {
  return loss_of_logits(logits, targets, std::nullopt, Loss{.is_logprob = true});
}
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore_index,
                     double label_smoothing, double z_loss) {
  return loss_of_logits(logits, targets, ignore_index, cross_entropy_loss(label_smoothing, z_loss));
}
Tensor linear_token_logprobs(const Tensor& hidden, const Tensor& weight, const Tensor& targets) {
  return linear_loss(hidden, weight, targets, std::nullopt, Loss{.is_logprob = true});
}
Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                            int64_t ignore_index, double label_smoothing, double z_loss) {
  return linear_loss(hidden, weight, targets, ignore_index,
                     cross_entropy_loss(label_smoothing, z_loss));
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_fwd_bwd(
    const Tensor& hidden, const Tensor& weight, const Tensor& targets, int64_t ignore_index,
    double label_smoothing, double z_loss, double grad_output, bool weight_grad) {
  return loss_and_gradients(hidden, weight, targets, ignore_index,
                            cross_entropy_loss(label_smoothing, z_loss),
                            true, weight_grad, [&](int64_t) { return float(grad_output); });
}

Tensors token_logprobs_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& logits,
                                const Tensor& targets) {
  return logits_backward(needs_grad, grads, logits, targets, std::nullopt,
                         Loss{.is_logprob = true});
}
Tensors cross_entropy_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& logits,
                               const Tensor& targets, int64_t ignore_index, double label_smoothing,
                               double z_loss) {
  return logits_backward(needs_grad, grads, logits, targets, ignore_index,
                         cross_entropy_loss(label_smoothing, z_loss));
}
Tensors linear_token_logprobs_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& hidden,
                                       const Tensor& weight, const Tensor& targets) {
  return linear_loss_backward(needs_grad, grads, hidden, weight, targets, std::nullopt,
                              Loss{.is_logprob = true});
}
Tensors linear_cross_entropy_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& hidden,
                                      const Tensor& weight, const Tensor& targets,
                                      int64_t ignore_index, double label_smoothing, double z_loss) {
  return linear_loss_backward(needs_grad, grads, hidden, weight, targets, ignore_index,
                              cross_entropy_loss(label_smoothing, z_loss));
}

}  // namespace ingot::kernels

REGISTER_OP(token_logprobs)
REGISTER_OP(cross_entropy)
REGISTER_OP(linear_logits)
REGISTER_OP(linear_token_logprobs)
REGISTER_OP(linear_cross_entropy)
REGISTER_OP(linear_cross_entropy_fwd_bwd)

REGISTER_BACKWARD(token_logprobs)
REGISTER_BACKWARD(cross_entropy)
REGISTER_BACKWARD(linear_token_logprobs)
REGISTER_BACKWARD(linear_cross_entropy)
