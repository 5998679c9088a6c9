// From logits to the next token. Top-k, top-p and min-p always keep the most likely tokens of a
// row, ties broken by index. The kept set is therefore described by its last token, a `Threshold`,
// and only tokens that may belong to it are sorted.
#include "logsum.h"
#include "philox.h"
#include "tensor.h"

namespace ingot::kernels {

using Doubles = double __attribute__((vector_size(sizeof(double) * WIDTH)));

// A sampling parameter, one value per row, of any dtype.
struct RowOption {
  Tensor owner;
  std::optional<Integers> integers;
  const float* floats = nullptr;

  [[gnu::noinline]] RowOption(const Tensor& x, int64_t rows) : owner(x) {
    check(x.is_cpu() && x.dim() == 1 && x.size(0) == rows,
          "sampling parameters must be vectors with one entry per row");
    switch (x.scalar_type()) {
      case ScalarType::Half:
      case ScalarType::Double: throw Unsupported();
      case ScalarType::BFloat16: owner = to_dtype(x, ScalarType::Float); break;
      case ScalarType::Float: break;
      default: integers.emplace(x); return;
    }
    if (!owner.is_contiguous()) owner = contiguous(owner);
    floats = data<float>(owner);
  }
  double operator[](int64_t row) const { return floats ? floats[row] : double((*integers)[row]); }
};

// Keeps the tokens above a logit, and of those equal to it the ones up to an index.
struct Threshold {
  float min_logit;
  int32_t last;

  Ints keeps(Floats logits, int64_t at) const {
    Ints after_last = lane_indices() + int32_t(at) > last;
    return ~((logits < min_logit) | ((logits == min_logit) & after_last));
  }
  bool keeps(float logit, int64_t at) const {
    return !(logit < min_logit || (logit == min_logit && at > last));
  }
};

// Tokens in descending order of their logits, sorted lazily. A token is stored as one integer: its
// logit, mapped so that a larger logit is a smaller integer, above its index.
struct Ranking {
  std::vector<uint64_t> tokens;
  size_t ordered = 0;

  void clear() { tokens.clear(), ordered = 0; }
  void add(float logit, int32_t index) {
    uint32_t bits = logit == 0 ? 0 : logit != logit ? 0x7fffffff : bit_cast<uint32_t>(logit);
    uint32_t descending = bits >> 31 ? bits : bits ^ 0x7fffffff;
    tokens.push_back(uint64_t(descending) << 32 | uint32_t(index));
  }
  int32_t operator[](size_t rank) {
    if (rank >= ordered) {
      size_t next = std::min(tokens.size(), std::max<size_t>(4 * rank, 64));
      if (next < tokens.size())
        std::nth_element(tokens.begin() + ordered, tokens.begin() + next, tokens.end());
      std::sort(tokens.begin() + ordered, tokens.begin() + next);
      ordered = next;
    }
    return int32_t(tokens[rank]);
  }
};

// Buffers that a thread reuses from row to row.
struct Workspace {
  Ranking ranking;
  std::vector<float> maxima;
  std::vector<double> sums;
};

struct RowParams {
  double temperature, top_k, top_p, min_p;
  bool greedy() const { return temperature <= 0; }
  // Clamped to a finite float: the max logit has a score of 0 times the rate.
  double rate() const { return temperature > 0 ? std::min(1 / temperature, 3e38) : 1; }
};

struct SamplingParams {
  RowOption temperature, top_k, top_p, min_p;
  RowParams operator[](int64_t row) const {
    return {temperature[row], top_k[row], top_p[row], min_p[row]};
  }
};

template <class T>
struct Row {
  const T* logits;
  int64_t width;
  float row_max;
  double rate;

  [[gnu::noinline]] Row(const T* logits, int64_t width, double rate)
      : logits(logits), width(width), rate(rate) {
    row_max = reduce_max(reduce_row(width, broadcast(-INF),
                                    [&](Floats acc, int64_t at, auto... tail) {
      return max(acc, load(logits + at, tail...));
    }, max));
  }

  template <class... Tail>
  Floats scores(int64_t at, Tail... tail) const {
    return (load(logits + at, tail...) - broadcast(row_max)) * broadcast(float(rate));
  }
  // As reported: at temperature 1 the logits themselves, so that they have the model's
  // log-probabilities, bit for bit.
  template <class... Tail>
  Floats processed(int64_t at, Tail... tail) const {
    return rate == 1 ? load(logits + at, tail...) : scores(at, tail...);
  }
  double weight(int64_t token) const {
    return std::exp((double(widen(logits[token])) - row_max) * rate);
  }
  // Exponentials of the kept tokens, 0 elsewhere.
  template <class... Tail>
  Floats exps(const Threshold& threshold, int64_t at, Tail... tail) const {
    Ints kept = threshold.keeps(load(logits + at, tail...), at);
    if (!movemask(kept)) return Floats{};
    return kept ? exp_nonpositive(scores(at, tail...)) : Floats{};
  }
  [[gnu::noinline]] float sum(const Threshold& threshold, int64_t begin, int64_t end) const {
    return ingot::reduce_sum(sum_row(end - begin, [&](Floats acc, int64_t at, auto... tail) {
      return acc + exps(threshold, begin + at, tail...);
    }));
  }
  Threshold everything() const { return {-INF, int32_t(width)}; }
  Threshold most_likely() const {
    int64_t at = 0;
    while (at < width - 1 && widen(logits[at]) != row_max) at++;
    return {row_max, int32_t(at)};
  }
};

// Reorders the values.
[[gnu::noinline]] float kth_largest(std::vector<float>& values, int64_t k) {
  std::nth_element(values.begin(), values.begin() + k - 1, values.end(), std::greater<float>());
  return values[k - 1];
}

// Lower bound of the k-th largest logit: the k-th largest of the maxima of the columns. -inf if
// there are fewer than k columns.
template <class T>
float lower_bound_of_top_k(int64_t k, const Row<T>& row, std::vector<float>& maxima) {
  constexpr int64_t COLUMNS = 1024;
  if (k > COLUMNS || row.width < 4 * COLUMNS || k < 1) return -INF;
  maxima.assign(COLUMNS, -INF);
  for (int64_t begin = 0; begin + COLUMNS <= row.width; begin += COLUMNS)
    for_each_vector(COLUMNS, [&](int64_t at, auto...) {
      store(&maxima[at], max(load(&maxima[at]), load(row.logits + begin + at)));
    });
  return kth_largest(maxima, k);
}

// Lower bound of the logits of tokens with at least this weight, with a margin for rounding.
template <class T>
float lower_bound_of_weight(double weight, const Row<T>& row) {
  double score = std::log(weight);
  double slack = 1e-4 * (1 + std::abs(score)) / row.rate + 1e-6 * std::abs(row.row_max);
  return float(row.row_max + score / row.rate - slack);
}

template <class T>
void rank(const Row<T>& row, float min_logit, Ranking& ranking) {
  ranking.clear();
  for_each_vector(row.width, [&](int64_t at, auto... tail) {
    uint32_t bits = movemask(~(load(row.logits + at, tail...) < min_logit));
    if constexpr (sizeof...(tail)) bits &= (1u << (tail, ...)) - 1;
    for (; bits; bits &= bits - 1) {
      int64_t token = at + __builtin_ctz(bits);
      ranking.add(widen(row.logits[token]), int32_t(token));
    }
  });
}

template <class T>
Threshold find_threshold(const Row<T>& row, const RowParams& params, Workspace& workspace) {
  if (params.greedy()) return row.most_likely();
  bool by_k = !(params.top_k >= double(row.width)), by_p = !(params.top_p >= 1);
  bool by_min = !(params.min_p <= 0);
  if (!by_k && !by_p && !by_min) return row.everything();

  int64_t k = by_k ? int64_t(std::ceil(std::max(1.0, params.top_k))) : row.width;
  float min_logit = by_k ? lower_bound_of_top_k(k, row, workspace.maxima) : -INF;
  double total = 0;  // weight of the tokens that top_p refers to
  if (by_p && !by_k) {
    total = row.sum(row.everything(), 0, row.width);
    // All tokens below this bound together have less than half of 1 - p.
    min_logit = std::max(min_logit,
                         lower_bound_of_weight((1 - params.top_p) * total / (2 * row.width), row));
  }
  if (by_min && !(by_p && by_k))
    min_logit = std::max(min_logit, lower_bound_of_weight(params.min_p, row));
  rank(row, std::min(min_logit, row.row_max), workspace.ranking);
  k = std::min<int64_t>(k, workspace.ranking.tokens.size());
  if (by_p && by_k)
    for (int64_t i = 0; i < k; i++) total += row.weight(workspace.ranking[i]);

  int32_t last = workspace.ranking[0];
  double before = row.weight(last);
  for (int64_t i = 1; i < k; i++) {
    int32_t token = workspace.ranking[i];
    double weight = row.weight(token);
    if ((by_p && !(before < params.top_p * total)) || (by_min && !(weight >= params.min_p))) break;
    before += weight, last = token;
  }
  return {widen(row.logits[last]), last};
}

// The first token at which the cumulative weight of the kept tokens exceeds `share` of their sum.
template <class T>
int64_t sample_token(const Row<T>& row, const Threshold& threshold, float share,
                     std::vector<double>& sums) {
  constexpr int64_t BLOCK = 64 * WIDTH;
  double total = 0;
  sums.clear();
  for (int64_t at = 0; at < row.width; at += BLOCK) {
    sums.push_back(row.sum(threshold, at, std::min(at + BLOCK, row.width)));
    total += sums.back();
  }
  double target = share * total, before = 0;
  size_t block = 0;
  while (block < sums.size() && !(before + sums[block] > target)) before += sums[block++];
  if (block == sums.size()) return row.width - 1;  // only if a logit is NaN

  float exps[BLOCK];
  int64_t begin = block * BLOCK, size = std::min(BLOCK, row.width - begin), last = 0;
  for_each_vector(size, [&](int64_t at, auto... tail) {
    store(exps + at, row.exps(threshold, begin + at, tail...), tail...);
  });
  for (int64_t i = 0; i < size; i++) {
    before += exps[i];
    if (before > target) return begin + i;
    if (exps[i] > 0) last = i;
  }
  return begin + last;  // the block's sum was rounded up
}

// Run body(row index, row, threshold, workspace) for each row of logits.
template <class T, class Body>
void for_each_row(const Rows<T>& rows, const SamplingParams& all_params, const Body& body) {
  parallel_for(rows.count, 8 * rows.width, [&](int64_t begin, int64_t end) {
    Workspace workspace;
    for (int64_t i = begin; i < end; i++) {
      RowParams params = all_params[i];
      Row<T> row(rows[i], rows.width, params.rate());
      body(i, row, find_threshold(row, params, workspace), workspace);
    }
  });
}

// The distribution over the kept tokens of a row.
template <class T>
struct KeptRow {
  const Row<T>& row;
  const Threshold& threshold;
  LogSum log;

  [[gnu::noinline]] KeptRow(const Row<T>& row, const Threshold& threshold)
      : row(row), threshold(threshold),
        log(log_sum(row.width, [&](int64_t at, auto... tail) { return scores(at, tail...); })) {}

  template <class... Tail>
  Ints keeps(int64_t at, Tail... tail) const {
    return threshold.keeps(load(row.logits + at, tail...), at);
  }
  // -inf for excluded tokens.
  template <class... Tail>
  Floats scores(int64_t at, Tail... tail) const {
    return keeps(at, tail...) ? row.processed(at, tail...) : broadcast(-INF);
  }
  template <class... Tail>
  Floats logprobs(int64_t at, Tail... tail) const {
    Doubles logprobs = __builtin_convertvector(scores(at, tail...), Doubles);
    return __builtin_convertvector(logprobs - log.row_max - log.rest, Floats);
  }

  // (g - p * sum(g)) / temperature, with p the probabilities and g the gradients of the kept tokens.
  void write_gradient(const float* grads, const Output<T>& to, int64_t i) const {
    Floats sum = sum_row(row.width, [&](Floats acc, int64_t at, auto... tail) {
      return keeps(at, tail...) ? acc + load(grads + at, tail...) : acc;
    });
    float total = ingot::reduce_sum(sum);
    for_each_vector(row.width, [&](int64_t at, auto... tail) {
      Floats p = exp_nonpositive(logprobs(at, tail...));
      Floats g = (load(grads + at, tail...) - p * total) * float(row.rate);
      to.write(i, at, keeps(at, tail...) ? g : Floats{}, tail...);
    });
  }
  // -sum(g * (s - sum(p * s))) / temperature, with s the logits / temperature of the kept tokens.
  double temperature_gradient(const float* grads) const {
    double weights = 0, weighted = 0, grad = 0, product = 0;
    for (int64_t token = 0; token < row.width; token++) {
      if (!threshold.keeps(widen(row.logits[token]), token)) continue;
      double score = (double(widen(row.logits[token])) - row.row_max) * row.rate;
      weights += std::exp(score), weighted += std::exp(score) * score;
      grad += grads[token], product += grads[token] * score;
    }
    return (grad * weighted / weights - product) * row.rate;
  }
};

void check_logits(const Tensor& logits) {
  check(logits.dim() == 2, "logits must be (T, V)");
  check(logits.size(1) > 0 || logits.size(0) == 0, "the vocabulary must not be empty");
  check(logits.size(1) < std::numeric_limits<int32_t>::max(),
        "the vocabulary must be smaller than 2**31");
}

Tensor sampling_logprobs(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                         const Tensor& top_p, const Tensor& min_p) {
  return dispatch_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    check_logits(logits);
    int64_t count = logits.size(0);
    SamplingParams params{{temperature, count}, {top_k, count}, {top_p, count}, {min_p, count}};
    Tensor y = allocate({logits.sizes().data(), 2}, ScalarType::Float);
    Output<float> to(y);
    for_each_row(Rows<T>(logits), params,
                 [&](int64_t i, const Row<T>& row, const Threshold& threshold, Workspace&) {
      KeptRow<T> kept(row, threshold);
      for_each_vector(row.width, [&](int64_t at, auto... tail) {
        to.write(i, at, kept.logprobs(at, tail...), tail...);
      });
    });
    return y;
  });
}

Tensors sampling_logprobs_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& logits,
                                   const Tensor& temperature, const Tensor& top_k,
                                   const Tensor& top_p, const Tensor& min_p) {
  check(needs_grad.size() == 5 && grads.size() == 1 && grads[0].is_cpu() &&
            grads[0].scalar_type() == ScalarType::Float,
        "expected one flag per argument and one float32 gradient");
  return dispatch_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    check_logits(logits);
    check(same_sizes(grads[0], logits),
          "the gradient must have the shape of the logits");
    int64_t count = logits.size(0);
    SamplingParams params{{temperature, count}, {top_k, count}, {top_p, count}, {min_p, count}};
    Rows<float> grad_rows(grads[0]);
    Tensor grad_logits = allocate_like(logits);
    Tensor grad_temperature = allocate({&count, 1}, ScalarType::Float);
    Output<T> to(grad_logits);
    float* to_temperature = data<float>(grad_temperature);
    for_each_row(Rows<T>(logits), params,
                 [&](int64_t i, const Row<T>& row, const Threshold& threshold, Workspace&) {
      KeptRow<T> kept(row, threshold);
      if (needs_grad[0]) kept.write_gradient(grad_rows[i], to, i);
      bool constant = params[i].greedy() || !needs_grad[1];
      to_temperature[i] = constant ? 0 : float(kept.temperature_gradient(grad_rows[i]));
    });
    Tensor grad_option = allocate({&count, 1}, ScalarType::Float);
    std::fill_n(data<float>(grad_option), count, 0.0f);
    Tensors result;
    if (needs_grad[0]) result.push_back(grad_logits);
    if (needs_grad[1])
      result.push_back(to_dtype(grad_temperature, temperature.scalar_type()));
    if (needs_grad[3]) result.push_back(to_dtype(grad_option, top_p.scalar_type()));
    if (needs_grad[4]) result.push_back(to_dtype(grad_option, min_p.scalar_type()));
    return result;
  });
}

Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
              const Tensor& top_p, const Tensor& min_p, const Tensor& seeds,
              const Tensor& positions) {
  return dispatch_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    check_logits(logits);
    int64_t count = logits.size(0);
    SamplingParams params{{temperature, count}, {top_k, count}, {top_p, count}, {min_p, count}};
    check(seeds.dim() == 1 && seeds.size(0) == count, "seeds must have one entry per row");
    check(positions.dim() == 1 && positions.size(0) == count,
          "positions must have one entry per row");
    Integers seed(seeds), position(positions);
    Tensor y = allocate({&count, 1}, ScalarType::Long);
    int64_t* tokens = data<int64_t>(y);
    for_each_row(Rows<T>(logits), params,
                 [&](int64_t i, const Row<T>& row, const Threshold& threshold,
                     Workspace& workspace) {
                   float share = uniform_at(seed[i], position[i]);
                   bool greedy = params[i].greedy();
                   tokens[i] = greedy ? threshold.last : sample_token(row, threshold, share,
                                                                      workspace.sums);
                 });
    return y;
  });
}

Tensor philox_uniform(const Tensor& seeds, const Tensor& positions) {
  check(same_sizes(seeds, positions),
        "all inputs must have the same shape");
  Integers seed(seeds), position(positions);
  Tensor y = allocate({seeds.sizes().data(), size_t(seeds.dim())}, ScalarType::Float);
  float* to = data<float>(y);
  parallel_for(seed.count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) to[i] = uniform_at(seed[i], position[i]);
  });
  return y;
}

inline Floats counts_at(const float* from, auto... tail) { return load(from, tail...); }
inline Floats counts_at(const int32_t* from, int64_t count = WIDTH) {
  Ints counts{};
  std::memcpy(&counts, from, 4 * count);
  return __builtin_convertvector(counts, Floats);
}

template <class T, class Count>
Tensor penalize_rows(const Tensor& logits, const Tensor& prompt, const Tensor& counts,
                     const RowOption& repetition, const RowOption& presence,
                     const RowOption& frequency) {
  Rows<T> rows(logits);
  Rows<bool> prompts(prompt);
  Rows<Count> count_rows(counts);
  Tensor y = allocate_like(logits);
  Output<T> to(y);
  parallel_for(rows.count, rows.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      Floats factor = broadcast(float(repetition[row])),
          presence_penalty = broadcast(float(presence[row]));
      Floats frequency_penalty = broadcast(float(frequency[row])), one = broadcast(1), none{};
      for_each_vector(rows.width, [&](int64_t at, auto... tail) {
        Floats x = load(rows[row] + at, tail...);
        Floats count = counts_at(count_rows[row] + at, tail...);
        Floats generated = count > none ? one : none;
        Floats occurred = where(prompts[row] + at, one, generated, tail...);
        Floats repeated = x > none ? x / factor : x * factor;
        Floats penalty = presence_penalty * generated + frequency_penalty * count;
        to.write(row, at, (occurred > none ? repeated : x) - penalty, tail...);
      });
    }
  });
  return y;
}

Tensor apply_penalties(const Tensor& logits, const Tensor& prompt_mask, const Tensor& output_counts,
                       const Tensor& repetition_penalty, const Tensor& presence_penalty,
                       const Tensor& frequency_penalty) {
  return dispatch_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    check(logits.dim() == 2, "logits must be (T, V)");
    check(prompt_mask.is_cpu() && prompt_mask.scalar_type() == ScalarType::Bool,
          "prompt_mask must be bool on the CPU");
    check(same_sizes(prompt_mask, logits),
          "all inputs must have the same shape");
    check(same_sizes(output_counts, logits),
          "all inputs must have the same shape");
    int64_t rows = logits.size(0);
    RowOption repetition(repetition_penalty, rows), presence(presence_penalty, rows),
        frequency(frequency_penalty, rows);
    check(output_counts.is_cpu(), "output_counts must be on the CPU");
    switch (output_counts.scalar_type()) {
      case ScalarType::Half:
      case ScalarType::Double: throw Unsupported();
      case ScalarType::ComplexHalf:
      case ScalarType::ComplexFloat:
      case ScalarType::ComplexDouble: throw InvalidArgument("output_counts must be real");
      case ScalarType::Int:
        return penalize_rows<T, int32_t>(logits, prompt_mask, output_counts, repetition, presence,
                                         frequency);
      default:
        return penalize_rows<T, float>(logits, prompt_mask,
                                       to_dtype(output_counts, ScalarType::Float),
                                       repetition, presence, frequency);
    }
  });
}

}  // namespace ingot::kernels

REGISTER_OP(sampling_logprobs)
REGISTER_OP(sample)
REGISTER_OP(philox_uniform)
REGISTER_OP(apply_penalties)

REGISTER_BACKWARD(sampling_logprobs)
