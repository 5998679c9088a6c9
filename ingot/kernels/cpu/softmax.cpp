// Softmax and log-softmax. A row is read and exponentiated once: softmax stores the exponentials of
// each block relative to the running max and rescales them at the end.
#include "tensor.h"

namespace ingot::kernels {

// A mask, broadcast to x; false entries are excluded.
struct Mask {
  Tensor owner;
  const bool* first = nullptr;
  bool per_row = false;  // one flag per row
  std::vector<int64_t> sizes, strides;  // of the leading dimensions, innermost first

  Mask(const std::optional<Tensor>& mask, const Tensor& x) : owner(mask ? *mask : x) {
    if (!mask) return;
    check(mask->is_cpu() && mask->scalar_type() == ScalarType::Bool,
          "mask must be bool on the CPU");
    check(mask->dim() <= x.dim(), "mask must not have more dimensions than x");
    owner = contiguous(*mask);
    first = data<bool>(owner);
    int64_t stride = 1;
    for (int64_t back = 1; back <= x.dim(); back++) {
      int64_t size = x.size(x.dim() - back);
      int64_t mask_size = back <= mask->dim() ? mask->size(mask->dim() - back) : 1;
      check(mask_size == 1 || mask_size == size, "mask must be broadcastable to x");
      if (back == 1) per_row = mask_size == 1 && size > 1;
      else sizes.push_back(size), strides.push_back(mask_size == 1 ? 0 : stride);
      stride *= mask_size;
    }
  }
  const bool* operator[](int64_t row) const {
    int64_t offset = 0;
    for (size_t i = 0; i < sizes.size(); row /= sizes[i++]) offset += row % sizes[i] * strides[i];
    return first + offset;
  }
};

// Scaled scores of a row, -inf where masked.
template <class T>
struct Scores {
  const T* x;
  Floats scale;
  const bool* mask;

  Floats operator()(int64_t at) const {
    Floats scores = load(x + at) * scale;
    return mask ? where(mask + at, scores, broadcast(-INF)) : scores;
  }
  Floats operator()(int64_t at, int64_t count) const {
    Floats scores = load(x + at, count) * scale;
    return mask ? where(mask + at, scores, broadcast(-INF), count) : scores;
  }
};

// Run body(row, scores) for each row, masked(row) for fully masked ones.
template <class T, class Body, class Masked>
void for_each_row(const Tensor& x, double scale, const std::optional<Tensor>& mask,
                  const Body& body, const Masked& masked) {
  Rows<T> rows(x);
  Mask masks(mask, x);
  parallel_for(rows.count, 4 * rows.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const bool* flags = masks.first ? masks[row] : nullptr;
      if (flags && masks.per_row && !*flags) masked(row);
      else body(row,
                Scores<T>{rows[row], broadcast(float(scale)), masks.per_row ? nullptr : flags});
    }
  });
}

template <class T>
void fill(const Output<T>& to, int64_t row, float value) {
  for_each_vector(to.width,
                  [&](int64_t at, auto... tail) { to.write(row, at, broadcast(value), tail...); });
}

// A row whose scores are all -inf: masked entries get `masked`, the others 0 / 0 = NaN.
template <class T>
void write_undefined(const Scores<T>& scores, const Output<T>& to, int64_t row, float masked) {
  for_each_vector(to.width, [&](int64_t at, auto... tail) {
    Floats nan = broadcast(NAN);
    Floats y = scores.mask ? where(scores.mask + at, nan, broadcast(masked), tail...) : nan;
    to.write(row, at, y, tail...);
  });
}

// The exponentials of a row and, per block, the max that they are relative to.
struct RowBuffers {
  std::vector<float> exps, maxima;
  explicit RowBuffers(int64_t width)
      : exps(width), maxima((width / OnlineSoftmax::BLOCK + 1) * WIDTH) {}
};

template <class T>
void softmax_row(const Scores<T>& scores, RowBuffers& buffers, const Output<T>& to, int64_t row) {
  constexpr int64_t BLOCK = OnlineSoftmax::BLOCK;
  float* exps = buffers.exps.data();
  float* maxima = buffers.maxima.data();
  OnlineSoftmax sums;
  for (int64_t at = 0; at < to.width; at += BLOCK) {
    sums.update(at, std::min(at + BLOCK, to.width), scores,
                [&](int64_t at, Floats exps_at, auto... tail) {
      store(exps + at, exps_at, tail...);
    });
    store(maxima + at / BLOCK * WIDTH, sums.row_max);
  }
  float sum = sums.sum(), factor = 1 / sum;
  if (sum == 0) return write_undefined(scores, to, row, 0);
  Floats row_max = broadcast(reduce_max(sums.row_max));
  for (int64_t at = 0; at < to.width; at += BLOCK) {
    Floats correction = exp_nonpositive(load(maxima + at / BLOCK * WIDTH) - row_max) * factor;
    for_each_vector(std::min(BLOCK, to.width - at), [&](int64_t i, auto... tail) {
      to.write(row, at + i, load(exps + at + i, tail...) * correction, tail...);
    });
  }
}

template <class T>
void log_softmax_row(const Scores<T>& scores, const Output<T>& to, int64_t row) {
  OnlineSoftmax sums;
  for (int64_t at = 0; at < to.width; at += sums.BLOCK)
    sums.update(at, std::min(at + sums.BLOCK, to.width), scores, [](auto...) {});
  float sum = sums.sum();
  if (sum == 0) return write_undefined(scores, to, row, -INF);
  Floats row_max = broadcast(reduce_max(sums.row_max)), log_sum = broadcast(std::log(sum));
  for_each_vector(to.width, [&](int64_t at, auto... tail) {
    to.write(row, at, scores(at, tail...) - row_max - log_sum, tail...);
  });
}

Tensor softmax(const Tensor& x, double scale, const std::optional<Tensor>& mask) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    check(x.dim() >= 1, "x must have at least one dimension");
    Tensor y = allocate_like(x);
    Output<T> to(y);
    for_each_row<T>(x, scale, mask, [&](int64_t row, const Scores<T>& scores) {
      thread_local RowBuffers buffers(0);
      if (int64_t(buffers.exps.size()) < to.width) buffers = RowBuffers(to.width);
      softmax_row(scores, buffers, to, row);
    }, [&](int64_t row) { fill(to, row, 0); });
    return y;
  });
}

Tensor log_softmax(const Tensor& x, double scale, const std::optional<Tensor>& mask) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    check(x.dim() >= 1, "x must have at least one dimension");
    Tensor y = allocate_like(x);
    Output<T> to(y);
    for_each_row<T>(x, scale, mask, [&](int64_t row, const Scores<T>& scores) {
      log_softmax_row(scores, to, row);
    }, [&](int64_t row) { fill(to, row, -INF); });
    return y;
  });
}

}  // namespace ingot::kernels

REGISTER_OP(softmax)
REGISTER_OP(log_softmax)
