// Rotary position embedding. Sine and cosine of a token are computed once, for all its heads.
#include "tensor.h"

namespace ingot::kernels {

// A tensor (T, N, H) whose channels are adjacent: a slice of a fused projection is taken as it is.
template <class T>
struct Heads {
  Tensor owner;
  int64_t tokens, heads, channels, token_stride, head_stride;
  T* first;

  explicit Heads(const Tensor& x)
      : owner(x), tokens(x.size(0)), heads(x.size(1)), channels(x.size(2)) {
    if (x.stride(2) != 1) owner = torch::stable::contiguous(x);
    token_stride = owner.stride(0), head_stride = owner.stride(1);
    first = data<T>(owner);
  }
  T* operator()(int64_t token, int64_t head) const {
    return first + token * token_stride + head * head_stride;
  }
};

// The turn of one token: sine and cosine of each pair, or of each channel if they alternate.
struct Turn {
  std::vector<float> sine, cosine;

  void halves(int64_t position, const Vector<float>& freqs, int64_t count, float scale) {
    sine.resize(count), cosine.resize(count);
    for_each_vector(count, [&](int64_t at, auto... tail) {
      Floats s, c;
      rope_sincos(double(position), load(&freqs[at], tail...), s, c);
      store(sine.data() + at, s * scale, tail...);
      store(cosine.data() + at, c * scale, tail...);
    });
  }
  // (a, b) becomes (a, b) cosine + (b, a) (-sine, sine)
  void alternating(int64_t position, const Vector<float>& freqs, int64_t count, float scale) {
    halves(position, freqs, count, scale);
    sine.resize(2 * count), cosine.resize(2 * count);
    for (int64_t i = count; i--;) {
      float s = sine[i], c = cosine[i];
      sine[2 * i] = -s, sine[2 * i + 1] = s;
      cosine[2 * i] = cosine[2 * i + 1] = c;
    }
  }
};

template <class T>
void rotate_halves(const T* from, T* to, const Turn& turn, int64_t count) {
  for_each_vector(count, [&](int64_t at, auto... tail) {
    Floats a = load(from + at, tail...), b = load(from + count + at, tail...);
    Floats s = load(&turn.sine[at], tail...), c = load(&turn.cosine[at], tail...);
    store(to + at, fma(a, c, -(b * s)), tail...);
    store(to + count + at, fma(b, c, a * s), tail...);
  });
}

inline Floats swapped_pairs(Floats values) {
  Ints neighbour;
  for (int i = 0; i < WIDTH; i++) neighbour[i] = i ^ 1;
  return __builtin_shuffle(values, neighbour);
}

template <class T>
void rotate_alternating(const T* from, T* to, const Turn& turn, int64_t count) {
  for_each_vector(2 * count, [&](int64_t at, auto... tail) {
    Floats x = load(from + at, tail...);
    Floats s = load(&turn.sine[at], tail...), c = load(&turn.cosine[at], tail...);
    store(to + at, fma(x, c, swapped_pairs(x) * s), tail...);
  });
}

// What all tokens of a call have in common.
struct Turning {
  Integers position;
  int64_t count;
  Vector<float> frequency;
  bool interleaved;
  float scale;

  Turning(const Tensor& positions, const Tensor& freqs, const Tensor& x, bool interleaved, double scale)
      : position((checked(positions, freqs, x), positions)),
        count(freqs.size(0)),
        frequency(freqs, count),
        interleaved(interleaved),
        scale(float(scale)) {
    need_countable();
  }

  void set(Turn& turn, int64_t token) const {
    if (interleaved) turn.alternating(position[token], frequency, count, scale);
    else turn.halves(position[token], frequency, count, scale);
  }
  template <class T>
  void head(const T* from, T* to, const Turn& turn, int64_t channels) const {
    if (interleaved) rotate_alternating(from, to, turn, count);
    else rotate_halves(from, to, turn, count);
    std::copy(from + 2 * count, from + channels, to + 2 * count);
  }

 private:
  static void checked(const Tensor& positions, const Tensor& freqs, const Tensor& x) {
    check(x.dim() == 3, "x must be (T, N, H)");
    check(positions.dim() == 1 && positions.size(0) == x.size(0), "positions must have one entry per token");
    check(freqs.dim() == 1 && 2 * freqs.size(0) <= x.size(2), "freqs must be a vector of at most half the head size");
    if (freqs.scalar_type() == ScalarType::Double) throw Unsupported();
    check(freqs.is_cpu() && freqs.scalar_type() == ScalarType::Float, "freqs must be float32 on the CPU");
  }
  // Beyond 2^40, turn() loses count of the turns.
  void need_countable() const {
    constexpr double FAR = 0x1p40;
    double furthest = 0, fastest = 1;
    for (int64_t i = 0; i < position.count; i++)
      furthest = std::max(furthest, std::abs(double(position[i])));
    for (int64_t i = 0; i < count; i++)
      fastest = std::max(fastest, std::abs(double(frequency[i])));  // a NaN is not larger, and stays
    check(furthest * fastest < FAR, "positions and angles (positions times freqs) must be below 2**40");
  }
};

Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& freqs, bool interleaved,
            double scale) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Turning turning(positions, freqs, x, interleaved, scale);
    Heads<T> in(x);
    Tensor y = allocate_like(x);
    Heads<T> out(y);
    parallel_for(in.tokens, in.heads * in.channels, [&](int64_t begin, int64_t end) {
      Turn turn;
      for (int64_t token = begin; token < end; token++) {
        turning.set(turn, token);
        for (int64_t head = 0; head < in.heads; head++)
          turning.head(in(token, head), out(token, head), turn, in.channels);
      }
    });
    return y;
  });
}

// Where a token's keys (or values) belong.
template <class T>
struct Slots {
  Tensor pool;
  Integers slot;
  int64_t page;

  Slots(const Tensor& pool, const Tensor& slots, const Tensor& k)
      : pool(pool), slot(slots), page(pool.dim() == 4 ? pool.size(1) : 0) {
    check(pool.dim() == 4 && pool.size(2) == k.size(1) && pool.size(3) == k.size(2),
         "the KV cache must be (blocks, block size, K, H)");
    check(pool.stride(3) == 1, "the KV cache must be contiguous in its last dimension");
    check(slots.dim() == 1 && slot.count == k.size(0), "slot_mapping must have one entry per token");
    for (int64_t i = 0; i < slot.count; i++)
      check(slot[i] >= 0 && slot[i] < pool.size(0) * page, "slot out of range");
  }
  T* operator()(int64_t token, int64_t head) const {
    int64_t at = slot[token];
    return data<T>(pool) + at / page * pool.stride(0) + at % page * pool.stride(1) +
           head * pool.stride(2);
  }
};

Tensor rope_and_cache(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions,
                  const Tensor& freqs, const Tensor& k_pool, const Tensor& v_pool,
                  const Tensor& slots, bool interleaved, double scale) {
  return dispatch_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    for (const Tensor* other : {&k, &v, &k_pool, &v_pool}) check_same_dtype(*other, q);
    Turning turning(positions, freqs, q, interleaved, scale);
    check(k.dim() == 3 && k.size(0) == q.size(0) && k.size(2) == q.size(2), "k must be (T, K, H) with the tokens and head size of q");
    check(std::ranges::equal(k.sizes(), v.sizes()), "k and v must have the same shape");
    check(std::ranges::equal(k_pool.sizes(), v_pool.sizes()), "the caches of k and v must have the same shape");
    Slots<T> k_to(k_pool, slots, k), v_to(v_pool, slots, v);
    Heads<T> q_in(q), k_in(k), v_in(v);
    Tensor turned = allocate_like(q);
    Heads<T> q_out(turned);
    parallel_for(q_in.tokens, (q_in.heads + 2 * k_in.heads) * q_in.channels,
             [&](int64_t begin, int64_t end) {
               Turn turn;
               for (int64_t token = begin; token < end; token++) {
                 turning.set(turn, token);
                 for (int64_t head = 0; head < q_in.heads; head++)
                   turning.head(q_in(token, head), q_out(token, head), turn, q_in.channels);
                 for (int64_t head = 0; head < k_in.heads; head++) {
                   turning.head(k_in(token, head), k_to(token, head), turn, k_in.channels);
                   std::copy_n(v_in(token, head), v_in.channels, v_to(token, head));
                 }
               }
             });
    return turned;
  });
}

}  // namespace ingot::kernels

REGISTER_OP(rope)
REGISTER_OP(rope_and_cache)
