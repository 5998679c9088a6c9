// From logits to the next token. What is left of a row after top-k, top-p and min-p is always its
// likeliest tokens, of equals the first: so it is told by the last of them, a `Cut`, and only
// tokens that may be among them are put in order.
#include "tensor.h"

namespace ingot::kernels {

// An option of each row, of any dtype.
struct Option {
  Tensor owner;
  std::optional<Integers> integers;
  const float* floats = nullptr;

  Option(const Tensor& x, int64_t rows) : owner(x) {
    check(x.is_cpu() && x.dim() == 1 && x.size(0) == rows, "sampling parameters must be vectors with one entry per row");
    switch (x.scalar_type()) {
      case ScalarType::Half:
      case ScalarType::Double: throw Unsupported();
      case ScalarType::BFloat16: owner = torch::stable::to(x, ScalarType::Float); break;
      case ScalarType::Float: break;
      default: integers.emplace(x); return;
    }
    if (!owner.is_contiguous()) owner = torch::stable::contiguous(owner);
    floats = data<float>(owner);
  }
  double operator[](int64_t row) const { return floats ? floats[row] : double((*integers)[row]); }
};

// The first word of Philox4x32-10, of a counter whose upper half is 0.
uint32_t philox(uint64_t counter, uint64_t key) {
  uint32_t a = uint32_t(counter), b = uint32_t(counter >> 32), c = 0, d = 0;
  uint32_t key_0 = uint32_t(key), key_1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t first = 0xD2511F53ull * a, second = 0xCD9E8D57ull * c;
    a = uint32_t(second >> 32) ^ b ^ key_0, b = uint32_t(second);
    c = uint32_t(first >> 32) ^ d ^ key_1, d = uint32_t(first);
    key_0 += 0x9E3779B9, key_1 += 0xBB67AE85;
  }
  return a;
}
float uniform_of(int64_t seed, int64_t position) {
  return float(philox(uint64_t(position), uint64_t(seed)) >> 8) * 0x1p-24f;
}

// Which tokens are left: those above a logit, of those equal to it the first up to an index.
struct Cut {
  float least;
  int32_t last;

  Ints keeps(Floats logits, int64_t at) const {
    Ints behind = lane_indices() + int32_t(at) > last;
    return ~((logits < least) | ((logits == least) & behind));
  }
};

// Tokens from likely to unlikely, put in order as far as somebody asks. A token is its logit,
// made an integer that is smaller where the logit is larger, above its index.
struct Ranking {
  std::vector<uint64_t> tokens;
  size_t ordered = 0;

  void clear() { tokens.clear(), ordered = 0; }
  void add(float logit, int32_t index) {
    uint32_t bits = logit == 0 ? 0 : logit != logit ? 0x7fffffff : bit_cast<uint32_t>(logit);
    uint32_t upside_down = bits >> 31 ? bits : bits ^ 0x7fffffff;
    tokens.push_back(uint64_t(upside_down) << 32 | uint32_t(index));
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

// What a thread keeps from row to row.
struct Desk {
  Ranking ranking;
  std::vector<float> maxima;
  std::vector<double> sums;
};

struct Wish {
  double temperature, top_k, top_p, min_p;
  bool greedy() const { return temperature <= 0; }
  // At most a float, since the largest logit has a score of 0 times it.
  double rate() const { return temperature > 0 ? std::min(1 / temperature, 3e38) : 1; }
};

struct Wishes {
  Option temperature, top_k, top_p, min_p;
  Wish operator[](int64_t row) const {
    return {temperature[row], top_k[row], top_p[row], min_p[row]};
  }
};

template <class T>
struct Row {
  const T* logits;
  int64_t width;
  float peak;
  double rate;

  Row(const T* logits, int64_t width, double rate) : logits(logits), width(width), rate(rate) {
    peak = reduce_max(reduce_row(width, broadcast(-INF), [&](Floats acc, int64_t at, auto... tail) {
      return max(acc, load(logits + at, tail...));
    }, max));
  }

  template <class... Tail>
  Floats scores(int64_t at, Tail... tail) const {
    return (load(logits + at, tail...) - broadcast(peak)) * broadcast(float(rate));
  }
  double weight(int64_t token) const {
    return std::exp((double(widen(logits[token])) - peak) * rate);
  }
  // The powers of what is left, 0 elsewhere.
  template <class... Tail>
  Floats powers(const Cut& cut, int64_t at, Tail... tail) const {
    Ints kept = cut.keeps(load(logits + at, tail...), at);
    if (!movemask(kept)) return Floats{};
    return kept ? exp_nonpositive(scores(at, tail...)) : Floats{};
  }
  float sum(const Cut& cut, int64_t begin, int64_t end) const {
    return ingot::reduce_sum(sum_row(end - begin, [&](Floats acc, int64_t at, auto... tail) {
      return acc + powers(cut, begin + at, tail...);
    }));
  }
  Cut everything() const { return {-INF, int32_t(width)}; }
  Cut likeliest() const {
    int64_t at = 0;
    while (at < width - 1 && widen(logits[at]) != peak) at++;
    return {peak, int32_t(at)};
  }
};

// A logit that at least k tokens reach: of the largest of each column, the k-th. -inf where
// there are fewer columns.
template <class T>
float reached_by(int64_t k, const Row<T>& row, std::vector<float>& maxima) {
  constexpr int64_t COLUMNS = 1024;
  if (k > COLUMNS || row.width < 4 * COLUMNS || k < 1) return -INF;
  maxima.assign(COLUMNS, -INF);
  for (int64_t begin = 0; begin + COLUMNS <= row.width; begin += COLUMNS)
    for_each_vector(COLUMNS, [&](int64_t at, auto...) {
      store(&maxima[at], max(load(&maxima[at]), load(row.logits + begin + at)));
    });
  std::nth_element(maxima.begin(), maxima.begin() + k - 1, maxima.end(), std::greater<float>());
  return maxima[k - 1];
}

// A logit that no token is below whose weight is at least this, whatever is rounded how.
template <class T>
float reached_with(double weight, const Row<T>& row) {
  double score = std::log(weight);
  double slack = 1e-4 * (1 + std::abs(score)) / row.rate + 1e-6 * std::abs(row.peak);
  return float(row.peak + score / row.rate - slack);
}

template <class T>
void rank(const Row<T>& row, float least, Ranking& ranking) {
  ranking.clear();
  for_each_vector(row.width, [&](int64_t at, auto... tail) {
    uint32_t bits = movemask(~(load(row.logits + at, tail...) < least));
    if constexpr (sizeof...(tail)) bits &= (1u << (tail, ...)) - 1;
    for (; bits; bits &= bits - 1) {
      int64_t token = at + __builtin_ctz(bits);
      ranking.add(widen(row.logits[token]), int32_t(token));
    }
  });
}

template <class T>
Cut cut(const Row<T>& row, const Wish& wish, Desk& desk) {
  if (wish.greedy()) return row.likeliest();
  bool by_k = !(wish.top_k >= double(row.width)), by_p = !(wish.top_p >= 1);
  bool by_min = !(wish.min_p <= 0);
  if (!by_k && !by_p && !by_min) return row.everything();

  int64_t k = by_k ? int64_t(std::ceil(std::max(1.0, wish.top_k))) : row.width;
  float least = by_k ? reached_by(k, row, desk.maxima) : -INF;
  double total = 0;  // of those that top_p is a share of
  if (by_p && !by_k) {
    total = row.sum(row.everything(), 0, row.width);
    // Those less likely than this have less than half of 1 - p together.
    least = std::max(least, reached_with((1 - wish.top_p) * total / (2 * row.width), row));
  }
  if (by_min && !(by_p && by_k)) least = std::max(least, reached_with(wish.min_p, row));
  rank(row, std::min(least, row.peak), desk.ranking);
  k = std::min<int64_t>(k, desk.ranking.tokens.size());
  if (by_p && by_k)
    for (int64_t i = 0; i < k; i++) total += row.weight(desk.ranking[i]);

  int32_t last = desk.ranking[0];
  double before = row.weight(last);
  for (int64_t i = 1; i < k; i++) {
    int32_t token = desk.ranking[i];
    double weight = row.weight(token);
    if ((by_p && !(before < wish.top_p * total)) || (by_min && !(weight >= wish.min_p))) break;
    before += weight, last = token;
  }
  return {widen(row.logits[last]), last};
}

// The first token at which the weights of those left add up to more than a share of their sum.
template <class T>
int64_t drawn(const Row<T>& row, const Cut& cut, float share, std::vector<double>& sums) {
  constexpr int64_t BLOCK = 64 * WIDTH;
  double total = 0;
  sums.clear();
  for (int64_t at = 0; at < row.width; at += BLOCK) {
    sums.push_back(row.sum(cut, at, std::min(at + BLOCK, row.width)));
    total += sums.back();
  }
  double threshold = share * total, before = 0;
  size_t block = 0;
  while (block < sums.size() && !(before + sums[block] > threshold)) before += sums[block++];
  if (block == sums.size()) return row.width - 1;  // only where a logit is NaN

  float powers[BLOCK];
  int64_t begin = block * BLOCK, size = std::min(BLOCK, row.width - begin), last = 0;
  for_each_vector(size, [&](int64_t at, auto... tail) {
    store(powers + at, row.powers(cut, begin + at, tail...), tail...);
  });
  for (int64_t i = 0; i < size; i++) {
    before += powers[i];
    if (before > threshold) return begin + i;
    if (powers[i] > 0) last = i;
  }
  return begin + last;  // the block's sum was rounded up
}

// Runs body(row index, row, cut, desk) for each row of logits.
template <class T, class Body>
void each_cut(const Rows<T>& rows, const Wishes& wishes, const Body& body) {
  parallel_for(rows.count, 8 * rows.width, [&](int64_t begin, int64_t end) {
    Desk desk;
    for (int64_t i = begin; i < end; i++) {
      Wish wish = wishes[i];
      Row<T> row(rows[i], rows.width, wish.rate());
      body(i, row, cut(row, wish, desk), desk);
    }
  });
}

void need_logits(const Tensor& logits) {
  check(logits.dim() == 2, "logits must be (T, V)");
  check(logits.size(1) > 0 || logits.size(0) == 0, "the vocabulary must not be empty");
  check(logits.size(1) < std::numeric_limits<int32_t>::max(), "the vocabulary must be smaller than 2**31");
}

Tensor sampling_logprobs(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                const Tensor& top_p, const Tensor& min_p) {
  return dispatch_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    need_logits(logits);
    int64_t count = logits.size(0);
    Wishes wishes{{temperature, count}, {top_k, count}, {top_p, count}, {min_p, count}};
    Tensor y = allocate({logits.sizes().data(), 2}, ScalarType::Float);
    Output<float> to(y);
    each_cut(Rows<T>(logits), wishes, [&](int64_t i, const Row<T>& row, const Cut& cut, Desk&) {
      Floats log_sum = broadcast(std::log(row.sum(cut, 0, row.width)));
      for_each_vector(row.width, [&](int64_t at, auto... tail) {
        Ints kept = cut.keeps(load(row.logits + at, tail...), at);
        to.write(i, at, kept ? row.scores(at, tail...) - log_sum : broadcast(-INF), tail...);
      });
    });
    return y;
  });
}

Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
              const Tensor& top_p, const Tensor& min_p, const Tensor& seeds,
              const Tensor& positions) {
  return dispatch_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    need_logits(logits);
    int64_t count = logits.size(0);
    Wishes wishes{{temperature, count}, {top_k, count}, {top_p, count}, {min_p, count}};
    check(seeds.dim() == 1 && seeds.size(0) == count, "seeds must have one entry per row");
    check(positions.dim() == 1 && positions.size(0) == count, "positions must have one entry per row");
    Integers seed(seeds), position(positions);
    Tensor y = allocate({&count, 1}, ScalarType::Long);
    int64_t* tokens = data<int64_t>(y);
    each_cut(Rows<T>(logits), wishes,
             [&](int64_t i, const Row<T>& row, const Cut& cut, Desk& desk) {
               float share = uniform_of(seed[i], position[i]);
               bool greedy = wishes[i].greedy();
               tokens[i] = greedy ? cut.last : drawn(row, cut, share, desk.sums);
             });
    return y;
  });
}

Tensor philox_uniform(const Tensor& seeds, const Tensor& positions) {
  check(std::ranges::equal(seeds.sizes(), positions.sizes()), "all inputs must have the same shape");
  Integers seed(seeds), position(positions);
  Tensor y = allocate({seeds.sizes().data(), size_t(seeds.dim())}, ScalarType::Float);
  float* to = data<float>(y);
  parallel_for(seed.count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) to[i] = uniform_of(seed[i], position[i]);
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
Tensor penalized(const Tensor& logits, const Tensor& prompt, const Tensor& counts,
                 const Option& repetition, const Option& presence, const Option& frequency) {
  Rows<T> rows(logits);
  Rows<bool> prompts(prompt);
  Rows<Count> count_rows(counts);
  Tensor y = allocate_like(logits);
  Output<T> to(y);
  parallel_for(rows.count, rows.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      Floats factor = broadcast(float(repetition[row])), once = broadcast(float(presence[row]));
      Floats each_time = broadcast(float(frequency[row])), one = broadcast(1), none{};
      for_each_vector(rows.width, [&](int64_t at, auto... tail) {
        Floats x = load(rows[row] + at, tail...);
        Floats count = counts_at(count_rows[row] + at, tail...);
        Floats generated = count > none ? one : none;
        Floats seen = where(prompts[row] + at, one, generated, tail...);
        Floats repeated = x > none ? x / factor : x * factor;
        Floats penalty = once * generated + each_time * count;
        to.write(row, at, (seen > none ? repeated : x) - penalty, tail...);
      });
    }
  });
  return y;
}

Tensor apply_penalties(const Tensor& logits, const Tensor& prompt, const Tensor& counts,
                const Tensor& repetition, const Tensor& presence, const Tensor& frequency) {
  return dispatch_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    check(logits.dim() == 2, "logits must be (T, V)");
    check(prompt.is_cpu() && prompt.scalar_type() == ScalarType::Bool, "prompt must be bool on the CPU");
    check(std::ranges::equal(prompt.sizes(), logits.sizes()), "all inputs must have the same shape");
    check(std::ranges::equal(counts.sizes(), logits.sizes()), "all inputs must have the same shape");
    int64_t rows = logits.size(0);
    Option times(repetition, rows), once(presence, rows), each_time(frequency, rows);
    check(counts.is_cpu(), "counts must be on the CPU");
    switch (counts.scalar_type()) {
      case ScalarType::Half:
      case ScalarType::Double: throw Unsupported();
      case ScalarType::ComplexHalf:
      case ScalarType::ComplexFloat:
      case ScalarType::ComplexDouble: throw InvalidArgument("counts must be real");
      case ScalarType::Int:
        return penalized<T, int32_t>(logits, prompt, counts, times, once, each_time);
      default:
        return penalized<T, float>(logits, prompt, torch::stable::to(counts, ScalarType::Float),
                                   times, once, each_time);
    }
  });
}

}  // namespace ingot::kernels

REGISTER_OP(sampling_logprobs)
REGISTER_OP(sample)
REGISTER_OP(philox_uniform)
REGISTER_OP(apply_penalties)
