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

// Beyond 2^40, turn() loses count of the turns.
void need_countable(const Integers& positions, const Vector<float>& freqs, int64_t count) {
  constexpr double FAR = 0x1p40;
  double furthest = 0, fastest = 1;
  for (int64_t i = 0; i < positions.count; i++)
    furthest = std::max(furthest, std::abs(double(positions[i])));
  for (int64_t i = 0; i < count; i++)
    fastest = std::max(fastest, std::abs(double(freqs[i])));  // a NaN is not larger, and stays one
  need(furthest * fastest < FAR, "positions and angles (positions times frequencies) below 2**40");
}

Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& freqs, bool interleaved,
            double scale) {
  return with_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    need(x.dim() == 3, "(tokens, heads, channels)");
    need(positions.dim() == 1 && positions.size(0) == x.size(0), "a position for each token");
    need(freqs.dim() == 1 && 2 * freqs.size(0) <= x.size(2), "frequencies for the channels");
    if (freqs.scalar_type() == ScalarType::Double) throw Elsewhere();
    need(freqs.is_cpu() && freqs.scalar_type() == ScalarType::Float, "frequencies in float32");
    int64_t count = freqs.size(0);
    Integers position(positions);
    Vector<float> frequency(freqs, count);
    need_countable(position, frequency, count);
    Heads<T> in(x);
    Tensor y = made_like(x);
    Heads<T> out(y);
    parallel(in.tokens, in.heads * in.channels, [&](int64_t begin, int64_t end) {
      Turn turn;
      for (int64_t token = begin; token < end; token++) {
        if (interleaved) turn.alternating(position[token], frequency, count, float(scale));
        else turn.halves(position[token], frequency, count, float(scale));
        for (int64_t head = 0; head < in.heads; head++) {
          const T* from = in(token, head);
          T* to = out(token, head);
          if (interleaved) rotate_alternating(from, to, turn, count);
          else rotate_halves(from, to, turn, count);
          std::copy(from + 2 * count, from + in.channels, to + 2 * count);
        }
      }
    });
    return y;
  });
}

}  // namespace ingot::kernels

OP(rope)
