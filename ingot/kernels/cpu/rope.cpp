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
    along(count, [&](int64_t at, auto... part) {
      Floats s, c;
      turn(double(position), load(&freqs[at], part...), s, c);
      store(sine.data() + at, s * scale, part...);
      store(cosine.data() + at, c * scale, part...);
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
  along(count, [&](int64_t at, auto... part) {
    Floats a = load(from + at, part...), b = load(from + count + at, part...);
    Floats s = load(&turn.sine[at], part...), c = load(&turn.cosine[at], part...);
    store(to + at, fma(a, c, -(b * s)), part...);
    store(to + count + at, fma(b, c, a * s), part...);
  });
}

inline Floats swapped_pairs(Floats values) {
  Ints neighbour;
  for (int i = 0; i < WIDTH; i++) neighbour[i] = i ^ 1;
  return __builtin_shuffle(values, neighbour);
}

template <class T>
void rotate_alternating(const T* from, T* to, const Turn& turn, int64_t count) {
  along(2 * count, [&](int64_t at, auto... part) {
    Floats x = load(from + at, part...);
    Floats s = load(&turn.sine[at], part...), c = load(&turn.cosine[at], part...);
    store(to + at, fma(x, c, swapped_pairs(x) * s), part...);
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
    need(x.dim() == 3, "(tokens, heads, channels)");
    need(positions.dim() == 1 && positions.size(0) == x.size(0), "a position for each token");
    need(freqs.dim() == 1 && 2 * freqs.size(0) <= x.size(2), "frequencies for the channels");
    if (freqs.scalar_type() == ScalarType::Double) throw Elsewhere();
    need(freqs.is_cpu() && freqs.scalar_type() == ScalarType::Float, "frequencies in float32");
  }
  // Beyond 2^40, turn() loses count of the turns.
  void need_countable() const {
    constexpr double FAR = 0x1p40;
    double furthest = 0, fastest = 1;
    for (int64_t i = 0; i < position.count; i++)
      furthest = std::max(furthest, std::abs(double(position[i])));
    for (int64_t i = 0; i < count; i++)
      fastest = std::max(fastest, std::abs(double(frequency[i])));  // a NaN is not larger, and stays
    need(furthest * fastest < FAR, "positions and angles (positions times frequencies) below 2**40");
  }
};

Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& freqs, bool interleaved,
            double scale) {
  return with_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Turning turning(positions, freqs, x, interleaved, scale);
    Heads<T> in(x);
    Tensor y = made_like(x);
    Heads<T> out(y);
    parallel(in.tokens, in.heads * in.channels, [&](int64_t begin, int64_t end) {
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
    need(pool.dim() == 4 && pool.size(2) == k.size(1) && pool.size(3) == k.size(2),
         "a pool of (pages, slots, heads, channels)");
    need(pool.stride(3) == 1, "channels side by side");
    need(slots.dim() == 1 && slot.count == k.size(0), "a slot for each token");
    for (int64_t i = 0; i < slot.count; i++)
      need(slot[i] >= 0 && slot[i] < pool.size(0) * page, "slots of the pool");
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
  return with_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    for (const Tensor* other : {&k, &v, &k_pool, &v_pool}) need_like(*other, q);
    Turning turning(positions, freqs, q, interleaved, scale);
    need(k.dim() == 3 && k.size(0) == q.size(0) && k.size(2) == q.size(2), "keys like the queries");
    need(std::ranges::equal(k.sizes(), v.sizes()), "k and v of one shape");
    need(std::ranges::equal(k_pool.sizes(), v_pool.sizes()), "pools of one shape");
    Slots<T> k_to(k_pool, slots, k), v_to(v_pool, slots, v);
    Heads<T> q_in(q), k_in(k), v_in(v);
    Tensor turned = made_like(q);
    Heads<T> q_out(turned);
    parallel(q_in.tokens, (q_in.heads + 2 * k_in.heads) * q_in.channels,
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

OP(rope)
OP(rope_and_cache)
