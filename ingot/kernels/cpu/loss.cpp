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
  Exponentials sums;
  auto values = [&](int64_t at, auto... part) { return load(logits + at, part...); };
  for (int64_t at = 0; at < width; at += sums.BLOCK)
    sums.take(at, std::min(at + sums.BLOCK, width), values, [](auto...) {});
  float sum = sums.sum();
  if (sum == 0) return {-INF, 0};
  return {largest(sums.peak), std::log(double(sum))};
}

template <class T>
double mean(const T* logits, int64_t width) {
  return sum(summed_row(width, [&](Floats so_far, int64_t at, auto... part) {
           return so_far + load(logits + at, part...);
         })) / double(width);
}

void need_targets(const Integers& targets, std::optional<int64_t> ignored, int64_t vocabulary) {
  for (int64_t i = 0; i < targets.count; i++)
    need(targets[i] == ignored || (targets[i] >= 0 && targets[i] < vocabulary),
         "targets of the vocabulary");
}

Tensor made_for(const Tensor& targets) {
  return made({targets.sizes().data(), size_t(targets.dim())}, ScalarType::Float);
}

struct Logprob {
  static constexpr bool needs_mean = false;
  double operator()(const LogSum& log, double chosen, double) const {
    return chosen - log.largest - log.rest;
  }
};

struct CrossEntropy {
  double label_smoothing, z_loss;
  bool needs_mean = label_smoothing != 0;  // not 0 times the mean, which is NaN where a logit is -inf

  double operator()(const LogSum& log, double chosen, double mean) const {
    double likely = chosen;
    if (needs_mean) likely = (1 - label_smoothing) * chosen + label_smoothing * mean;
    return log.largest - likely + log.rest + z_loss * log.total() * log.total();
  }
};

// loss(log_sum, chosen, mean) of each row of logits; an ignored one has 0.
template <class Loss>
Tensor by_token(const Tensor& logits, const Tensor& targets, std::optional<int64_t> ignored,
                const Loss& loss) {
  return with_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    need(logits.dim() == targets.dim() + 1, "a target for each row");
    need(std::equal(targets.sizes().begin(), targets.sizes().end(), logits.sizes().begin()),
         "a target for each row");
    Integers target(targets);
    int64_t vocabulary = logits.size(logits.dim() - 1);
    need_targets(target, ignored, vocabulary);
    Rows<T> rows(logits);
    Tensor y = made_for(targets);
    float* to = data<float>(y);
    parallel(target.count, 4 * vocabulary, [&](int64_t begin, int64_t end) {
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

  static Part of(const float* logits, int64_t width, int64_t target, bool with_total) {
    auto most = [&](Floats so_far, int64_t at, auto... part) {
      return max(so_far, load(logits + at, part...));
    };
    Part part{};
    auto larger = [](Floats a, Floats b) { return max(a, b); };
    part.largest = ingot::largest(folded_row(width, all(-INF), most, larger));
    Floats shift = all(std::max(part.largest, -3e38f));
    part.sum = ingot::sum(summed_row(width, [&](Floats so_far, int64_t at, auto... count) {
      return so_far + exp_of_negative(load(logits + at, count...) - shift);
    }));
    if (with_total)
      part.total = ingot::sum(summed_row(width, [&](Floats so_far, int64_t at, auto... count) {
        return so_far + load(logits + at, count...);
      }));
    part.chosen = target >= 0 && target < width ? logits[target] : 0;
    return part;
  }
};

template <class Loss>
double joined(const Part* parts, int64_t count, int64_t vocabulary, const Loss& loss) {
  float most = -INF;
  double sum = 0, total = 0, chosen = 0;
  for (int64_t g = 0; g < count; g++)
    if (!(parts[g].largest <= most)) most = parts[g].largest;  // a NaN too
  for (int64_t g = 0; g < count; g++) {
    if (parts[g].sum) sum += double(parts[g].sum) * std::exp(double(parts[g].largest) - most);
    total += parts[g].total;
    chosen += parts[g].chosen;
  }
  return loss(LogSum{most, std::log(sum)}, chosen, total / double(vocabulary));
}

template <class Loss>
Tensor by_hidden(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                 std::optional<int64_t> ignored, const Loss& loss) {
  return with_dtype(hidden, [&](auto tag) {
    using T = decltype(tag);
    need_like(weight, hidden);
    need(hidden.dim() == 2 && weight.dim() == 2 && weight.size(1) == hidden.size(1),
         "hidden and weight of as many channels");
    need(targets.dim() == 1 && targets.size(0) == hidden.size(0), "a target for each row");
    Integers target(targets);
    Rows<T> x(hidden), w(weight);
    int64_t vocabulary = weight.size(0);
    need_targets(target, ignored, vocabulary);
    Tensor y = made_for(targets);
    float* to = data<float>(y);
    std::vector<Columns> groups = fixed_columns(vocabulary);
    std::vector<Part> parts(target.count * groups.size());
    std::array<Matrix<T>, 1> weights{Matrix<T>(w)};
    multiply(Matrix<T>(x), weights, groups, [&](const Block& block) {
      for (int64_t r = 0; r < block.rows; r++) {
        int64_t row = block.row + r, word = target[row] - block.columns.begin;
        parts[row * groups.size() + block.group] =
            Part::of(block.of(0, r), block.columns.count, word, loss.needs_mean);
      }
    });
    for (int64_t i = 0; i < target.count; i++)
      to[i] = target[i] == ignored
                  ? 0
                  : float(joined(&parts[i * groups.size()], groups.size(), vocabulary, loss));
    return y;
  });
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

}  // namespace ingot::kernels

OP(token_logprobs)
OP(cross_entropy)
OP(linear_token_logprobs)
OP(linear_cross_entropy)
