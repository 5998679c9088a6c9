// Norms, alone and of a sum. A row is read from memory once; the passes that follow find it in
// the cache, in float32: widening a bfloat16 costs as much as the arithmetic on it.
#include "tensor.h"

#include <memory>

namespace ingot::kernels {

// Values in float32: those of a float32 tensor itself, else a copy.
template <class T>
struct Widened {
  std::unique_ptr<float[]> copy;
  const float* first = nullptr;

  Widened(int64_t width) {
    if constexpr (sizeof(T) == 2) copy = std::make_unique_for_overwrite<float[]>(width);
  }
  const float* take(const T* from, int64_t width) {
    if constexpr (sizeof(T) == 4) return first = from;
    else
      along(width, [&](int64_t at, auto... part) {
        store(copy.get() + at, load(from + at, part...), part...);
      });
    return first = copy.get();
  }
};

template <class T>
struct Scales {
  Vector<T> weight;
  std::optional<Vector<T>> bias;
  float eps;

  Scales(const Tensor& w, const std::optional<Tensor>& b, double eps, const Tensor& x)
      : weight(vector(w, x)), eps(float(eps)) {
    need(eps >= 0, "an eps of 0 or more");
    if (b) bias.emplace(vector(*b, x));
  }
  static Vector<T> vector(const Tensor& v, const Tensor& x) {
    need_like(v, x);
    need(x.dim() >= 1, "at least one dimension");
    return Vector<T>(v, x.size(x.dim() - 1));
  }
};

// What a thread works with, from row to row.
template <class T>
struct Desk {
  Widened<T> x, weight, bias;
  float eps;

  Desk(const Scales<T>& scales, int64_t width)
      : x(width), weight(width), bias(scales.bias ? width : 0), eps(scales.eps) {
    weight.take(scales.weight.first, width);
    if (scales.bias) bias.take(scales.bias->first, width);
  }
};

template <class T>
void rms(const Desk<T>& desk, const Output<T>& to, int64_t row) {
  const float *x = desk.x.first, *weight = desk.weight.first;
  Floats squares = summed_row(to.width, [&](Floats so_far, int64_t at, auto... part) {
    Floats values = load(x + at, part...);
    return fma(values, values, so_far);
  });
  Floats scale = all(1.0f / std::sqrt(sum(squares) / to.width + desk.eps));
  along(to.width, [&](int64_t at, auto... part) {
    to.write(row, at, load(x + at, part...) * scale * load(weight + at, part...), part...);
  });
}

template <class T>
void layer(const Desk<T>& desk, const Output<T>& to, int64_t row) {
  const float *x = desk.x.first, *weight = desk.weight.first, *bias = desk.bias.first;
  Floats total = summed_row(to.width, [&](Floats so_far, int64_t at, auto... part) {
    return so_far + load(x + at, part...);
  });
  Floats mean = all(sum(total) / to.width);
  Floats squares = summed_row(to.width, [&](Floats so_far, int64_t at, auto... part) {
    Floats centred = load(x + at, part...) - mean;
    return fma(centred, centred, so_far);
  });
  Floats scale = all(1.0f / std::sqrt(sum(squares) / to.width + desk.eps));
  along(to.width, [&](int64_t at, auto... part) {
    Floats normal = (load(x + at, part...) - mean) * scale;
    Floats shift = bias ? load(bias + at, part...) : Floats{};
    to.write(row, at, fma(normal, load(weight + at, part...), shift), part...);
  });
}

template <class Norm>
Tensor alone(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, double eps,
             Norm norm) {
  return with_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Scales<T> scales(weight, bias, eps, x);
    Rows<T> rows(x);
    Tensor y = made_like(x);
    Output<T> to(y);
    parallel(rows.count, rows.width, [&](int64_t begin, int64_t end) {
      Desk<T> desk(scales, rows.width);
      for (int64_t row = begin; row < end; row++) {
        desk.x.take(rows[row], rows.width);
        norm(desk, to, row);
      }
    });
    return y;
  });
}

// The norm of a sum is that of the sum as it is stored: so it does not matter who adds.
template <class Norm>
std::tuple<Tensor, Tensor> of_sum(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                  const std::optional<Tensor>& bias, double eps, Norm norm) {
  return with_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    need_like(residual, x);
    need(std::ranges::equal(x.sizes(), residual.sizes()), "one shape");
    Scales<T> scales(weight, bias, eps, x);
    Rows<T> a(x), b(residual);
    Tensor y = made_like(x), total = made_like(x);
    Output<T> to(y), sums(total);
    parallel(a.count, a.width, [&](int64_t begin, int64_t end) {
      Desk<T> desk(scales, a.width);
      for (int64_t row = begin; row < end; row++) {
        along(a.width, [&](int64_t at, auto... part) {
          Floats sum = load(a[row] + at, part...) + load(b[row] + at, part...);
          store(sums[row] + at, sum, part...);
        });
        desk.x.take(sums[row], a.width);
        norm(desk, to, row);
      }
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
