// Norms, alone and of a sum. A row is read from memory once; the passes that follow find it in
// the cache.
#include "tensor.h"

namespace ingot::kernels {

template <class T>
struct Of {  // a tensor
  Rows<T> x;
  template <class... Part>
  Floats operator()(int64_t row, int64_t at, Part... part) const {
    return load(x[row] + at, part...);
  }
};

template <class T>
struct OfSum {  // a sum, as it is stored: so it does not matter who adds
  Rows<T> x, residual;
  template <class... Part>
  Floats operator()(int64_t row, int64_t at, Part... part) const {
    return rounded<T>(load(x[row] + at, part...) + load(residual[row] + at, part...));
  }
};

template <class T>
struct Scales {
  Vector<T> weight;
  std::optional<Vector<T>> bias;
  float eps;

  Scales(const Tensor& w, const std::optional<Tensor>& b, double eps, const Tensor& x)
      : weight(vector(w, x)), eps(float(eps)) {
    if (b) bias.emplace(vector(*b, x));
  }
  static Vector<T> vector(const Tensor& v, const Tensor& x) {
    need_like(v, x);
    need(x.dim() >= 1, "at least one dimension");
    return Vector<T>(v, x.size(x.dim() - 1));
  }
};

// Calls write(row, at, normalized, part...) for every vector of every row.
template <class T, class From, class Write>
void rms(int64_t rows, int64_t width, const From& from, const Scales<T>& s, const Write& write) {
  parallel(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      Floats squares = summed_row(width, [&](Floats total, int64_t at, auto... part) {
        Floats x = from(row, at, part...);
        return fma(x, x, total);
      });
      Floats scale = all(1.0f / std::sqrt(sum(squares) / width + s.eps));
      along(width, [&](int64_t at, auto... part) {
        Floats x = from(row, at, part...);
        write(row, at, x, x * scale * load(&s.weight[at], part...), part...);
      });
    }
    settle();
  });
}

template <class T, class From, class Write>
void layer(int64_t rows, int64_t width, const From& from, const Scales<T>& s, const Write& write) {
  const T* bias = s.bias ? s.bias->first : nullptr;
  parallel(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      Floats total = summed_row(width, [&](Floats so_far, int64_t at, auto... part) {
        return so_far + from(row, at, part...);
      });
      Floats mean = all(sum(total) / width);
      Floats squares = summed_row(width, [&](Floats so_far, int64_t at, auto... part) {
        Floats centred = from(row, at, part...) - mean;
        return fma(centred, centred, so_far);
      });
      Floats scale = all(1.0f / std::sqrt(sum(squares) / width + s.eps));
      along(width, [&](int64_t at, auto... part) {
        Floats x = from(row, at, part...);
        Floats shift = bias ? load(bias + at, part...) : Floats{};
        Floats y = fma((x - mean) * scale, load(&s.weight[at], part...), shift);
        write(row, at, x, y, part...);
      });
    }
    settle();
  });
}

template <class Norm>
Tensor alone(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, double eps,
             Norm norm) {
  return with_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Scales<T> scales(weight, bias, eps, x);
    Of<T> from{Rows<T>(x)};
    Tensor y = made_like(x);
    Output<T> to(y);
    norm(from.x.count, from.x.width, from, scales,
         [&](int64_t row, int64_t at, Floats, Floats normal, auto... part) {
           to.write(row, at, normal, part...);
         });
    return y;
  });
}

template <class Norm>
std::tuple<Tensor, Tensor> of_sum(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                  const std::optional<Tensor>& bias, double eps, Norm norm) {
  return with_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    need_like(residual, x);
    need(std::ranges::equal(x.sizes(), residual.sizes()), "one shape");
    Scales<T> scales(weight, bias, eps, x);
    OfSum<T> from{Rows<T>(x), Rows<T>(residual)};
    Tensor y = made_like(x), total = made_like(x);
    Output<T> to(y), to_total(total);
    norm(from.x.count, from.x.width, from, scales,
         [&](int64_t row, int64_t at, Floats sum, Floats normal, auto... part) {
           to_total.write(row, at, sum, part...);
           to.write(row, at, normal, part...);
         });
    return std::tuple(y, total);
  });
}

constexpr auto RMS = [](auto&&... args) { rms(args...); };
constexpr auto LAYER = [](auto&&... args) { layer(args...); };

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return alone(x, weight, std::nullopt, eps, RMS);
}
Tensor layer_norm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  double eps) {
  return alone(x, weight, bias, eps, LAYER);
}
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, double eps) {
  return of_sum(x, residual, weight, std::nullopt, eps, RMS);
}
std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                          const Tensor& weight, const std::optional<Tensor>& bias,
                                          double eps) {
  return of_sum(x, residual, weight, bias, eps, LAYER);
}

}  // namespace ingot::kernels

OP(rms_norm)
OP(layer_norm)
OP(add_rms_norm)
OP(add_layer_norm)
