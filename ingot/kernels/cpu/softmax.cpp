// Softmax and its logarithm. A row comes from memory once and is exponentiated once: softmax
// keeps the powers of each block, relative to the largest so far, and corrects them at the end.
#include "tensor.h"

namespace ingot::kernels {

// Which entries of a row take part: a mask is broadcast to x.
struct Mask {
  Tensor owner;
  const bool* first = nullptr;
  bool by_row = false;  // one flag for all of it
  std::vector<int64_t> sizes, strides;  // of x without the last dimension, the last one first

  Mask(const std::optional<Tensor>& mask, const Tensor& x) : owner(mask ? *mask : x) {
    if (!mask) return;
    check(mask->is_cpu() && mask->scalar_type() == ScalarType::Bool, "mask must be bool on the CPU");
    check(mask->dim() <= x.dim(), "mask must not have more dimensions than x");
    owner = torch::stable::contiguous(*mask);
    first = data<bool>(owner);
    int64_t stride = 1;
    for (int64_t back = 1; back <= x.dim(); back++) {
      int64_t size = x.size(x.dim() - back);
      int64_t own = back <= mask->dim() ? mask->size(mask->dim() - back) : 1;
      check(own == 1 || own == size, "mask must be broadcastable to x");
      if (back == 1) by_row = own == 1 && size > 1;
      else sizes.push_back(size), strides.push_back(own == 1 ? 0 : stride);
      stride *= own;
    }
  }
  const bool* operator[](int64_t row) const {
    int64_t offset = 0;
    for (size_t i = 0; i < sizes.size(); row /= sizes[i++]) offset += row % sizes[i] * strides[i];
    return first + offset;
  }
};

// Scaled scores of a row, -inf where they do not take part.
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

// Runs body(row, scores) for each row, and nothing(row) for those that are masked altogether.
template <class T, class Body, class Nothing>
void scored(const Tensor& x, double scale, const std::optional<Tensor>& mask, const Body& body,
            const Nothing& nothing) {
  Rows<T> rows(x);
  Mask masks(mask, x);
  parallel_for(rows.count, 4 * rows.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const bool* flags = masks.first ? masks[row] : nullptr;
      if (flags && masks.by_row && !*flags) nothing(row);
      else body(row, Scores<T>{rows[row], broadcast(float(scale)), masks.by_row ? nullptr : flags});
    }
  });
}

template <class T>
void fill(const Output<T>& to, int64_t row, float value) {
  for_each_vector(to.width, [&](int64_t at, auto... tail) { to.write(row, at, broadcast(value), tail...); });
}

// A row whose entries are all -inf: the masked ones get theirs, the others are 0 / 0.
template <class T>
void no_softmax(const Scores<T>& scores, const Output<T>& to, int64_t row, float masked) {
  for_each_vector(to.width, [&](int64_t at, auto... tail) {
    Floats nan = broadcast(NAN);
    Floats y = scores.mask ? where(scores.mask + at, nan, broadcast(masked), tail...) : nan;
    to.write(row, at, y, tail...);
  });
}

// The powers of a row, and what they were relative to, block by block.
struct Scratch {
  std::vector<float> powers, peaks;
  explicit Scratch(int64_t width)
      : powers(width), peaks((width / OnlineSoftmax::BLOCK + 1) * WIDTH) {}
};

template <class T>
void softmax_row(const Scores<T>& scores, Scratch& scratch, const Output<T>& to, int64_t row) {
  constexpr int64_t BLOCK = OnlineSoftmax::BLOCK;
  float* powers = scratch.powers.data();
  float* peaks = scratch.peaks.data();
  OnlineSoftmax sums;
  for (int64_t at = 0; at < to.width; at += BLOCK) {
    sums.update(at, std::min(at + BLOCK, to.width), scores, [&](int64_t at, Floats power, auto... tail) {
      store(powers + at, power, tail...);
    });
    store(peaks + at / BLOCK * WIDTH, sums.row_max);
  }
  float sum = sums.sum(), factor = 1 / sum;
  if (sum == 0) return no_softmax(scores, to, row, 0);
  Floats peak = broadcast(reduce_max(sums.row_max));
  for (int64_t at = 0; at < to.width; at += BLOCK) {
    Floats correction = exp_nonpositive(load(peaks + at / BLOCK * WIDTH) - peak) * factor;
    for_each_vector(std::min(BLOCK, to.width - at), [&](int64_t i, auto... tail) {
      to.write(row, at + i, load(powers + at + i, tail...) * correction, tail...);
    });
  }
}

template <class T>
void log_softmax_row(const Scores<T>& scores, const Output<T>& to, int64_t row) {
  OnlineSoftmax sums;
  for (int64_t at = 0; at < to.width; at += sums.BLOCK)
    sums.update(at, std::min(at + sums.BLOCK, to.width), scores, [](auto...) {});
  float sum = sums.sum();
  if (sum == 0) return no_softmax(scores, to, row, -INF);
  Floats peak = broadcast(reduce_max(sums.row_max)), log_sum = broadcast(std::log(sum));
  for_each_vector(to.width, [&](int64_t at, auto... tail) {
    to.write(row, at, scores(at, tail...) - peak - log_sum, tail...);
  });
}

Tensor softmax(const Tensor& x, double scale, const std::optional<Tensor>& mask) {
  return dispatch_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    check(x.dim() >= 1, "x must have at least one dimension");
    Tensor y = allocate_like(x);
    Output<T> to(y);
    scored<T>(x, scale, mask, [&](int64_t row, const Scores<T>& scores) {
      thread_local Scratch scratch(0);
      if (int64_t(scratch.powers.size()) < to.width) scratch = Scratch(to.width);
      softmax_row(scores, scratch, to, row);
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
    scored<T>(x, scale, mask, [&](int64_t row, const Scores<T>& scores) {
      log_softmax_row(scores, to, row);
    }, [&](int64_t row) { fill(to, row, -INF); });
    return y;
  });
}

}  // namespace ingot::kernels

REGISTER_OP(softmax)
REGISTER_OP(log_softmax)
