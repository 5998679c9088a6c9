// Rotary position embedding. Sine and cosine are computed once per token, for all its heads.
#include "kv_cache.h"
#include "tensor.h"

namespace ingot::kernels {

// A tensor (T, N, H) with adjacent channels; a slice of a fused projection is not copied.
template <class T>
struct Heads {
  Tensor owner;
  int64_t tokens, heads, channels, token_stride, head_stride;
  T* first;

  explicit Heads(const Tensor& x)
      : owner(x), tokens(x.size(0)), heads(x.size(1)), channels(x.size(2)) {
    if (x.stride(2) != 1) owner = contiguous(x);
    token_stride = owner.stride(0), head_stride = owner.stride(1);
    first = data<T>(owner);
  }
  T* operator()(int64_t token, int64_t head) const {
    return first + token * token_stride + head * head_stride;
  }
};

// Sine and cosine for one token, per pair, or per channel if pairs are interleaved.
struct SinCos {
  std::vector<float> sin, cos;

  void set_halves(int64_t position, const Vector<float>& freqs, int64_t count, float scale) {
    sin.resize(count), cos.resize(count);
    for_each_vector(count, [&](int64_t at, auto... tail) {
      Floats s, c;
      rope_sincos(double(position), load(&freqs[at], tail...), s, c);
      store(sin.data() + at, s * scale, tail...);
      store(cos.data() + at, c * scale, tail...);
    });
  }
  // (a, b) becomes (a, b) cos + (b, a) (-sin, sin)
  void set_interleaved(int64_t position, const Vector<float>& freqs, int64_t count, float scale) {
    set_halves(position, freqs, count, scale);
    sin.resize(2 * count), cos.resize(2 * count);
    for (int64_t i = count; i--;) {
      float s = sin[i], c = cos[i];
      sin[2 * i] = -s, sin[2 * i + 1] = s;
      cos[2 * i] = cos[2 * i + 1] = c;
    }
  }
};

template <class T>
void rotate_halves(const T* from, T* to, const SinCos& sincos, int64_t count) {
  for_each_vector(count, [&](int64_t at, auto... tail) {
    Floats a = load(from + at, tail...), b = load(from + count + at, tail...);
    Floats s = load(&sincos.sin[at], tail...), c = load(&sincos.cos[at], tail...);
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
void rotate_interleaved(const T* from, T* to, const SinCos& sincos, int64_t count) {
  for_each_vector(2 * count, [&](int64_t at, auto... tail) {
    Floats x = load(from + at, tail...);
    Floats s = load(&sincos.sin[at], tail...), c = load(&sincos.cos[at], tail...);
    store(to + at, fma(x, c, swapped_pairs(x) * s), tail...);
  });
}

// Parameters of a call that all tokens share.
struct Rotation {
  Integers position;
  int64_t count;
  Vector<float> frequency;
  bool interleaved;
  float scale;

  Rotation(const Tensor& positions, const Tensor& freqs, const Tensor& x, bool interleaved,
           double scale)
      : position((check_args(positions, freqs, x), positions)),
        count(freqs.size(0)),
        frequency(freqs, count),
        interleaved(interleaved),
        scale(float(scale)) {
    check_angles();
  }

  [[gnu::noinline]] void compute(SinCos& sincos, int64_t token) const {
    if (interleaved) sincos.set_interleaved(position[token], frequency, count, scale);
    else sincos.set_halves(position[token], frequency, count, scale);
  }
  template <class T>
  [[gnu::noinline]] void rotate(const T* from, T* to, const SinCos& sincos,
                                int64_t channels) const {
    if (interleaved) rotate_interleaved(from, to, sincos, count);
    else rotate_halves(from, to, sincos, count);
    std::copy(from + 2 * count, from + channels, to + 2 * count);
  }

 private:
  static void check_args(const Tensor& positions, const Tensor& freqs, const Tensor& x) {
    check(x.dim() == 3, "x must be (T, N, H)");
    check(positions.dim() == 1 && positions.size(0) == x.size(0),
          "positions must have one entry per token");
    check(freqs.dim() == 1 && 2 * freqs.size(0) <= x.size(2),
          "freqs must be a vector of at most half the head size");
    if (freqs.scalar_type() == ScalarType::Double) throw Unsupported();
    check(freqs.is_cpu() && freqs.scalar_type() == ScalarType::Float,
          "freqs must be float32 on the CPU");
  }
  // Beyond 2^40, the range reduction of rope_sincos() loses precision.
  void check_angles() const {
    constexpr double MAX_ANGLE = 0x1p40;
    double max_position = 0, max_frequency = 1;
    for (int64_t i = 0; i < position.count; i++)
      max_position = std::max(max_position, std::abs(double(position[i])));
    for (int64_t i = 0; i < count; i++)
      max_frequency = std::max(max_frequency, std::abs(double(frequency[i])));  // ignores NaN
    check(max_position * max_frequency < MAX_ANGLE,
          "positions and angles (positions times freqs) must be below 2**40");
  }
};

Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& freqs, bool interleaved,
            double scale) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Rotation rotation(positions, freqs, x, interleaved, scale);
    Heads<T> in(x);
    Tensor y = allocate_like(x);
    Heads<T> out(y);
    parallel_for(in.tokens, in.heads * in.channels, [&](int64_t begin, int64_t end) {
      SinCos sincos;
      for (int64_t token = begin; token < end; token++) {
        rotation.compute(sincos, token);
        for (int64_t head = 0; head < in.heads; head++)
          rotation.rotate(in(token, head), out(token, head), sincos, in.channels);
      }
    });
    return y;
  });
}

// Slots of the KV cache that the tokens are written to.
struct CacheSlots {
  Tensor cache;
  Integers slot;
  int64_t block_size;
  bool quantized;  // int8: see kv_cache.h

  CacheSlots(const Tensor& cache, const Tensor& slot_mapping, const Tensor& k)
      : cache(cache),
        slot(slot_mapping),
        block_size(cache.dim() == 4 ? cache.size(1) : 0),
        quantized(cache.scalar_type() == ScalarType::Char) {
    int64_t width = k.size(2) + (quantized ? KV_SCALE_BYTES : 0);
    check(cache.is_cpu() && (quantized || cache.scalar_type() == k.scalar_type()),
          "the KV cache must be on the CPU, in the dtype of k or in int8");
    check(cache.dim() == 4 && cache.size(2) == k.size(1) && cache.size(3) == width,
          "the KV cache must be (blocks, block size, K, H), with a scale after H in int8");
    check(cache.stride(3) == 1, "the KV cache must be contiguous in its last dimension");
    check(slot_mapping.dim() == 1 && slot.count == k.size(0),
          "slot_mapping must have one entry per token");
    for (int64_t i = 0; i < slot.count; i++)
      check(slot[i] >= 0 && slot[i] < cache.size(0) * block_size, "slot out of range");
  }
  template <class T>
  T* row(int64_t token, int64_t head) const {
    int64_t at = slot[token];
    return data<T>(cache) + at / block_size * cache.stride(0) + at % block_size * cache.stride(1) +
           head * cache.stride(2);
  }
};

Tensor rope_and_cache(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions,
                      const Tensor& freqs, const Tensor& k_cache, const Tensor& v_cache,
                      const Tensor& slot_mapping, bool interleaved, double scale) {
  return dispatch_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    check_same_dtype(k, q), check_same_dtype(v, q), check_same_dtype(v_cache, k_cache);
    Rotation rotation(positions, freqs, q, interleaved, scale);
    check(k.dim() == 3 && k.size(0) == q.size(0) && k.size(2) == q.size(2),
          "k must be (T, K, H) with the tokens and head size of q");
    check(same_sizes(k, v), "k and v must have the same shape");
    check(same_sizes(k_cache, v_cache),
          "the caches of k and v must have the same shape");
    CacheSlots k_to(k_cache, slot_mapping, k), v_to(v_cache, slot_mapping, v);
    Heads<T> q_in(q), k_in(k), v_in(v);
    Tensor rotated = allocate_like(q);
    Heads<T> q_out(rotated);
    int64_t width = q_in.channels;
    parallel_for(q_in.tokens, (q_in.heads + 2 * k_in.heads) * q_in.channels,
                 [&](int64_t begin, int64_t end) {
                   SinCos sincos;
                   std::vector<T> row(k_to.quantized ? width : 0);
                   for (int64_t token = begin; token < end; token++) {
                     rotation.compute(sincos, token);
                     for (int64_t head = 0; head < q_in.heads; head++)
                       rotation.rotate(q_in(token, head), q_out(token, head), sincos, width);
                     for (int64_t head = 0; head < k_in.heads; head++)
                       if (k_to.quantized) {
                         rotation.rotate(k_in(token, head), row.data(), sincos, width);
                         quantize_kv_row(row.data(), width, k_to.row<int8_t>(token, head));
                         quantize_kv_row(v_in(token, head), width, v_to.row<int8_t>(token, head));
                       } else {
                         T* to = k_to.row<T>(token, head);
                         rotation.rotate(k_in(token, head), to, sincos, width);
                         std::copy_n(v_in(token, head), width, v_to.row<T>(token, head));
                       }
                   }
                 });
    return rotated;
  });
}

}  // namespace ingot::kernels

REGISTER_OP(rope)
REGISTER_OP(rope_and_cache)
