// AdamW of many tensors: one pass over memory. What there is to do is cut into pieces of about as
// many elements, across all tensors, so that threads share few large ones as well as many small.
//
// Every element is computed on its own, so its bits depend neither on threads nor on the pieces.
#include "tensor.h"

namespace ingot {

template <>
struct ReturnValue<void> {
  static void from_stack(StableIValue*) {}
};

namespace kernels {

typedef int16_t Shorts __attribute__((vector_size(2 * WIDTH)));

inline Floats root(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < WIDTH; i++) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

// The moments of a word that no text has shrink until they are subnormal, and stay that for good: by
// rounding, 0.95 times the least of them is the least of them. Such a vector takes 12 times as long. While
// this is there they count as 0, and become it.
struct Flushing {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  Flushing() { _mm_setcsr(before | 0x8040); }
  ~Flushing() { _mm_setcsr(before); }
#endif
};

// A parameter as it lies in memory, in one dtype.
template <class T>
struct Plain {
  T* first;

  explicit Plain(const Tensor& param) : first(data<T>(param)) {}
  template <class... Tail>
  Floats read(int64_t at, Tail... tail) const { return load(first + at, tail...); }
  template <class... Tail>
  void write(int64_t at, Floats values, Tail... tail) const { store(first + at, values, tail...); }
};

// A float32 parameter in two parts, (high << 16) + low: bfloat16, rounded, and what that lacks.
struct Split {
  uint16_t* high;
  int16_t* low;

  Split(const Tensor& param, const Tensor& low) : high(data<uint16_t>(param)), low(data<int16_t>(low)) {}
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

struct Update {
  Floats factor, beta1, rest1, beta2, rest2, rate, scale, eps, shrink;

  Update(int64_t step, double lr, double beta1, double beta2, double eps, double decay, double factor)
      : factor(broadcast(float(factor))),
        beta1(broadcast(float(beta1))),
        rest1(broadcast(float(1 - beta1))),
        beta2(broadcast(float(beta2))),
        rest2(broadcast(float(1 - beta2))),
        rate(broadcast(float(lr / (1 - std::pow(beta1, double(step)))))),
        scale(broadcast(float(1 / std::sqrt(1 - std::pow(beta2, double(step)))))),
        eps(broadcast(float(eps))),
        shrink(broadcast(float(lr * decay))) {}

  template <class P, class G, class M>
  void operator()(const P& param, const G* grad, M* first, M* second, int64_t begin, int64_t end) const {
    Update u = *this;  // in registers: what is written below might be this one
    for_each_vector(end - begin, [=](int64_t from, auto... tail) {
      int64_t at = begin + from;
      Floats g = u.factor * load(grad + at, tail...);
      Floats m = fma(u.beta1, load(first + at, tail...), u.rest1 * g);
      Floats v = fma(u.beta2, load(second + at, tail...), u.rest2 * g * g);
      store(first + at, m, tail...);
      store(second + at, v, tail...);
      Floats p = param.read(at, tail...), move = u.rate * m / fma(root(v), u.scale, u.eps);
      // A factor of 1 - lr * decay would be rounded: 1 - 1e-6 by 1.3 % of what it takes.
      param.write(at, p - fma(u.shrink, p, move), tail...);
    });
  }
};

// Tensors without gaps: those that have some are copied, and copied back when all is done.
struct Packed {
  Tensors given, packed;

  explicit Packed(const Tensors& tensors) : given(tensors), packed(tensors) {
    for (Tensor& t : packed)
      if (!t.is_contiguous()) t = torch::stable::contiguous(t);
  }
  const Tensor& operator[](size_t at) const { return packed[at]; }
  void write_back() {
    for (size_t i = 0; i < given.size(); i++)
      if (!given[i].is_contiguous()) torch::stable::copy_(given[i], packed[i]);
  }
};

// Pieces of all tensors: each is some parts that lie one behind the other in the list.
struct Pieces {
  static constexpr int64_t SIZE = 1 << 16;
  struct Part {
    size_t tensor;
    int64_t begin, end;
  };
  std::vector<Part> parts;
  std::vector<size_t> starts;  // of the pieces, and the end of the last

  explicit Pieces(const Tensors& tensors) {
    int64_t held = SIZE;
    for (size_t i = 0; i < tensors.size(); i++)
      for (int64_t begin = 0, size = tensors[i].numel(); begin < size; begin += SIZE) {
        if (held >= SIZE) starts.push_back(parts.size()), held = 0;
        parts.push_back({i, begin, std::min(begin + SIZE, size)});
        held += parts.back().end - begin;
      }
    starts.push_back(parts.size());
  }
  template <class Body>
  void each(const Body& body) const {
    parallel_for_dynamic(int64_t(starts.size()) - 1, [&](TaskQueue& queue) {
      [[maybe_unused]] Flushing flushing;
      for (int64_t piece; queue.pop(piece);)
        for (size_t i = starts[piece]; i < starts[piece + 1]; i++) body(parts[i]);
    });
  }
};

void need_all(const Tensors& tensors, const Tensors& params, ScalarType dtype, ScalarType other) {
  check(tensors.size() == params.size(), "all lists must have one tensor per parameter");
  for (size_t i = 0; i < params.size(); i++) {
    check(tensors[i].is_cpu(), "all tensors must be on the CPU");
    check(tensors[i].scalar_type() == dtype || tensors[i].scalar_type() == other, "unsupported combination of dtypes");
    check(std::ranges::equal(tensors[i].sizes(), params[i].sizes()), "gradients and state must have the shapes of their parameters");
  }
}

// `low` is empty, or has the lower half of each parameter.
void adamw(const Tensors& params, const Tensors& grads, const Tensors& first, const Tensors& second,
           const Tensors& low, int64_t step, double lr, double beta1, double beta2, double eps,
           double decay, double factor) {
  check(!params.empty() && !first.empty(), "params must not be empty");
  check(step >= 1 && beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "step must be at least 1, betas must be in [0, 1)");
  dispatch_dtype(params[0], [&](auto param_tag) {
    using P = decltype(param_tag);
    ScalarType dtype = params[0].scalar_type();
    ScalarType moment = first[0].scalar_type() == ScalarType::Float ? ScalarType::Float : ScalarType::BFloat16;
    need_all(params, params, dtype, dtype);
    need_all(grads, params, dtype, ScalarType::Float);
    need_all(first, params, moment, moment);
    need_all(second, params, moment, moment);
    bool split = !low.empty();
    check(!split || dtype == ScalarType::BFloat16, "master_lo requires bfloat16 parameters");
    if (split) need_all(low, params, ScalarType::Short, ScalarType::Short);

    Packed p(params), g(grads), m(first), v(second), l(low);
    Update update(step, lr, beta1, beta2, eps, decay, factor);
    dispatch_dtype(first[0], [&](auto moment_tag) {
      using M = decltype(moment_tag);
      Pieces(params).each([&](const Pieces::Part& part) {
        size_t i = part.tensor;
        dispatch_dtype(grads[i], [&](auto grad_tag) {
          using G = decltype(grad_tag);
          auto run = [&](auto param) {
            update(param, data<G>(g[i]), data<M>(m[i]), data<M>(v[i]), part.begin, part.end);
          };
          if (split) run(Split(p[i], l[i]));
          else run(Plain<P>(p[i]));
        });
      });
    });
    for (Packed* written : {&p, &m, &v, &l}) written->write_back();
  });
}

}  // namespace kernels
}  // namespace ingot

REGISTER_OP(adamw)
