// AdamW of many tensors in one pass over memory. Work is split into tasks of about the same number
// of elements across all tensors, so that few large tensors are balanced as well as many small
// ones.
//
// Every element is computed independently, so its bits do not depend on threads or tasks.
#include "tensor.h"

namespace ingot {
namespace kernels {

typedef int16_t Shorts __attribute__((vector_size(2 * WIDTH)));

inline Floats sqrt_of(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < WIDTH; i++) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

// Flushes subnormal moments to zero during its lifetime. The embeddings of tokens that never occur
// would otherwise keep subnormal moments forever (0.95 times the smallest subnormal rounds to
// itself), and a vector with subnormals takes 12x as long.
struct FlushDenormals {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before); }
#endif
};

// A parameter stored in one dtype.
template <class T>
struct PlainParam {
  T* first;

  explicit PlainParam(const Tensor& param) : first(data<T>(param)) {}
  template <class... Tail>
  Floats read(int64_t at, Tail... tail) const { return load(first + at, tail...); }
  template <class... Tail>
  void write(int64_t at, Floats values, Tail... tail) const { store(first + at, values, tail...); }
};

// A float32 parameter as (high << 16) + low: its bfloat16 rounding and the remainder.
struct SplitParam {
  uint16_t* high;
  int16_t* low;

  SplitParam(const Tensor& param, const Tensor& low) : high(data<uint16_t>(param)),
      low(data<int16_t>(low)) {}
  Floats read(int64_t at, int64_t count = WIDTH) const {
    Halves upper{};
    Shorts lower{};
    std::memcpy(&upper, high + at, 2 * count);
    std::memcpy(&lower, low + at, 2 * count);
    Words bits = __builtin_convertvector(upper, Words) << 16;
    return (Floats)(bits + (Words)__builtin_convertvector(lower, Ints));
  }
  void write(int64_t at, Floats values, int64_t count = WIDTH) const {
    Words bits = (Words)values;
    Halves upper = __builtin_convertvector((bits + 0x8000) >> 16, Halves);
    Halves lower = __builtin_convertvector(bits & 0xffff, Halves);
    std::memcpy(high + at, &upper, 2 * count);
    std::memcpy(low + at, &lower, 2 * count);
  }
};

class AdamWStep {
  Floats factor, beta1, rest1, beta2, rest2, rate, scale, eps, decay_rate;

 public:
  AdamWStep(int64_t step, double lr, double beta1, double beta2, double eps, double decay,
            double factor)
      : factor(broadcast(float(factor))),
        beta1(broadcast(float(beta1))),
        rest1(broadcast(float(1 - beta1))),
        beta2(broadcast(float(beta2))),
        rest2(broadcast(float(1 - beta2))),
        rate(broadcast(float(lr / (1 - std::pow(beta1, double(step)))))),
        scale(broadcast(float(1 / std::sqrt(1 - std::pow(beta2, double(step)))))),
        eps(broadcast(float(eps))),
        decay_rate(broadcast(float(lr * decay))) {}

  // The sums of a row in `stats`, if it is not null: the columns of ops.adamw.ROW_STATS.
  template <class P, class G, class M>
  void operator()(const P& param, const G* grad, M* exp_avg, M* exp_avg_sq, int64_t begin,
                  int64_t end, float* stats = nullptr) const {
    if (stats) update<true>(param, grad, exp_avg, exp_avg_sq, begin, end, stats);
    else update<false>(param, grad, exp_avg, exp_avg_sq, begin, end, stats);
  }

 private:
  template <bool STATS, class P, class G, class M>
  void update(const P& param, const G* grad, M* exp_avg, M* exp_avg_sq, int64_t begin, int64_t end,
              float* stats) const {
    AdamWStep u = *this;  // a copy in registers: the stores below may alias *this
    Floats gg{}, gm{}, mm{}, uu{}, pp{}, gu{}, roots{};
    for_each_vector(end - begin, [=, &gg, &gm, &mm, &uu, &pp, &gu, &roots](int64_t from,
                                                                         auto... tail) {
      int64_t at = begin + from;
      Floats g = u.factor * load(grad + at, tail...), before = load(exp_avg + at, tail...);
      Floats m = fma(u.beta1, before, u.rest1 * g);
      Floats v = fma(u.beta2, load(exp_avg_sq + at, tail...), u.rest2 * g * g);
      store(exp_avg + at, m, tail...);
      store(exp_avg_sq + at, v, tail...);
      Floats root = sqrt_of(v);
      Floats p = param.read(at, tail...), update = u.rate * m / fma(root, u.scale, u.eps);
      // Not p * (1 - lr * decay): 1 - 1e-6 in float32 is off by 1.3 % of the decay.
      Floats change = fma(u.decay_rate, p, update);
      param.write(at, p - change, tail...);
      if constexpr (STATS) {  // beyond the end all values are 0, except with an eps of 0
        if constexpr (sizeof...(tail) > 0) change = blend_first(change, tail..., Floats{});
        gg = fma(g, g, gg), gm = fma(g, before, gm), mm = fma(before, before, mm);
        uu = fma(change, change, uu), pp = fma(p, p, pp), gu = fma(g, change, gu);
        roots = roots + root;
      }
    });
    if constexpr (STATS) {
      Floats sums[] = {gg, gm, mm, uu, pp, gu, roots};
      for (int i = 0; i < 7; i++) stats[i] = reduce_sum(sums[i]);
    }
  }
};

// Contiguous versions of tensors; write_back() copies the results to non-contiguous ones.
struct ContiguousTensors {
  Tensors given, contiguous;

  explicit ContiguousTensors(const Tensors& tensors) : given(tensors), contiguous(tensors) {
    for (Tensor& t : contiguous)
      if (!t.is_contiguous()) t = ingot::contiguous(t);
  }
  const Tensor& operator[](size_t at) const { return contiguous[at]; }
  void write_back() {
    for (size_t i = 0; i < given.size(); i++)
      if (!given[i].is_contiguous()) copy_to(given[i], contiguous[i]);
  }
};

inline int64_t num_rows(const Tensor& x) { return x.dim() ? x.size(0) : 1; }
inline int64_t row_size(const Tensor& x) { return num_rows(x) ? x.numel() / num_rows(x) : 0; }

// Tasks over all tensors; each is a run of consecutive spans.
struct Tasks {
  static constexpr int64_t SIZE = 1 << 16;
  struct Span {
    size_t tensor;
    int64_t begin, end;
  };
  std::vector<Span> spans;
  std::vector<size_t> starts;  // first span of each task, and the number of spans

  // With `whole_rows`, a span has no part of a row.
  Tasks(const Tensors& tensors, bool whole_rows) {
    int64_t size_of_task = SIZE;
    for (size_t i = 0; i < tensors.size(); i++) {
      int64_t row = whole_rows ? std::max<int64_t>(row_size(tensors[i]), 1) : 1;
      int64_t step = (SIZE + row - 1) / row * row;
      for (int64_t begin = 0, size = tensors[i].numel(); begin < size; begin += step) {
        if (size_of_task >= SIZE) starts.push_back(spans.size()), size_of_task = 0;
        spans.push_back({i, begin, std::min(begin + step, size)});
        size_of_task += spans.back().end - begin;
      }
    }
    starts.push_back(spans.size());
  }
  template <class Body>
  void each(const Body& body) const {
    parallel_for_dynamic(int64_t(starts.size()) - 1, [&](TaskQueue& queue) {
      [[maybe_unused]] FlushDenormals flush;
      for (int64_t task; queue.pop(task);)
        for (size_t i = starts[task]; i < starts[task + 1]; i++) body(spans[i]);
    });
  }
};

void check_all(const Tensors& tensors, const Tensors& params, ScalarType dtype, ScalarType other) {
  check(tensors.size() == params.size(), "all lists must have one tensor per parameter");
  for (size_t i = 0; i < params.size(); i++) {
    check(tensors[i].is_cpu(), "all tensors must be on the CPU");
    check(tensors[i].scalar_type() == dtype || tensors[i].scalar_type() == other,
          "unsupported combination of dtypes");
    check(same_sizes(tensors[i], params[i]),
          "gradients and state must have the shapes of their parameters");
  }
}

// `low` is empty or has the lower half of each master weight.
void adamw(const Tensors& params, const Tensors& grads, const Tensors& exp_avg,
           const Tensors& exp_avg_sq,
           const Tensors& low, int64_t step, double lr, double beta1, double beta2, double eps,
           double decay, double factor, const std::optional<Tensor>& row_stats) {
  check(!params.empty() && !exp_avg.empty(), "params must not be empty");
  check(step >= 1 && beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
        "step must be at least 1, betas must be in [0, 1)");
  dispatch_dtype(params[0], [&](auto param_tag) {
    using P = decltype(param_tag);
    ScalarType dtype = params[0].scalar_type();
    bool is_float = exp_avg[0].scalar_type() == ScalarType::Float;
    ScalarType state_dtype = is_float ? ScalarType::Float : ScalarType::BFloat16;
    check_all(params, params, dtype, dtype);
    check_all(grads, params, dtype, ScalarType::Float);
    check_all(exp_avg, params, state_dtype, state_dtype);
    check_all(exp_avg_sq, params, state_dtype, state_dtype);
    bool split = !low.empty();
    check(!split || dtype == ScalarType::BFloat16, "master_lo requires bfloat16 parameters");
    if (split) check_all(low, params, ScalarType::Short, ScalarType::Short);

    ContiguousTensors p(params), g(grads), m(exp_avg), v(exp_avg_sq), l(low);
    std::vector<int64_t> first_rows(params.size() + 1);
    for (size_t i = 0; i < params.size(); i++)
      first_rows[i + 1] = first_rows[i] + num_rows(params[i]);
    if (row_stats) {
      check(row_stats->is_cpu() && row_stats->scalar_type() == ScalarType::Float &&
                row_stats->is_contiguous() &&
                same_sizes(*row_stats, std::array<int64_t, 2>{first_rows.back(), 7}),
            "row_stats must be contiguous float32 with 7 values per row");
      // Rows without elements are not part of a task.
      std::fill_n(data<float>(*row_stats), row_stats->numel(), 0.0f);
    }
    AdamWStep update(step, lr, beta1, beta2, eps, decay, factor);
    dispatch_dtype(exp_avg[0], [&](auto state_tag) {
      using M = decltype(state_tag);
      Tasks(params, row_stats.has_value()).each([&](const Tasks::Span& part) {
        size_t i = part.tensor;
        dispatch_dtype(grads[i], [&](auto grad_tag) {
          using G = decltype(grad_tag);
          auto run = [&](auto param) {
            auto [grad, first, second] = std::tuple{data<G>(g[i]), data<M>(m[i]), data<M>(v[i])};
            if (!row_stats) return update(param, grad, first, second, part.begin, part.end);
            int64_t width = row_size(params[i]);
            for (int64_t at = part.begin; at < part.end; at += width)
              update(param, grad, first, second, at, at + width,
                     data<float>(*row_stats) + 7 * (first_rows[i] + at / width));
          };
          if (split) run(SplitParam(p[i], l[i]));
          else run(PlainParam<P>(p[i]));
        });
      });
    });
    for (ContiguousTensors* written : {&p, &m, &v, &l}) written->write_back();
  });
}

}  // namespace kernels
}  // namespace ingot

REGISTER_OP(adamw)
