// log(sum(exp(x))) over a vocabulary, from parts of 256 entries that are combined in a fixed order.
// The losses of a linear layer compute a part from each block of the GEMM, sampling computes them
// from stored logits: the same parts give bitwise equal log-probabilities.
#pragma once

#include "tensor.h"

namespace ingot::kernels {

constexpr int64_t PART_SIZE = 256;

// log(sum(exp(logits))) of a row, as its max plus the rest.
struct LogSum {
  double row_max, rest;
  double total() const { return row_max + rest; }
};

// Contribution of PART_SIZE vocabulary entries to the loss of a token.
struct LossPart {
  float row_max, sum, total, chosen;

  // visit(at, e^(logit - row_max), count...) receives the exponentials.
  template <class Visit>
  static LossPart of(const float* logits, int64_t width, int64_t target, bool with_total,
                     const Visit& visit) {
    auto step = [&](Floats acc, int64_t at, auto... tail) {
      return max(acc, load(logits + at, tail...));
    };
    LossPart part{};
    auto larger = [](Floats a, Floats b) { return max(a, b); };
    part.row_max = ingot::reduce_max(reduce_row(width, broadcast(-INF), step, larger));
    Floats shift = broadcast(std::max(part.row_max, -3e38f));
    part.sum = ingot::reduce_sum(sum_row(width, [&](Floats acc, int64_t at, auto... tail) {
      Floats exps = exp_nonpositive(load(logits + at, tail...) - shift);
      visit(at, exps, tail...);
      return acc + exps;
    }));
    if (with_total)
      part.total = ingot::reduce_sum(sum_row(width, [&](Floats acc, int64_t at, auto... tail) {
        return acc + load(logits + at, tail...);
      }));
    part.chosen = target >= 0 && target < width ? logits[target] : 0;
    return part;
  }
};

// The same without a visitor.
INGOT_NOINLINE LossPart loss_part(const float* logits, int64_t width, int64_t target,
                                  bool with_total) {
  return LossPart::of(logits, width, target, with_total, [](auto...) {});
}

INGOT_NOINLINE LogSum log_sum(std::span<const LossPart> parts) {
  float row_max = -INF;
  double sum = 0;
  for (const LossPart& part : parts)
    if (!(part.row_max <= row_max)) row_max = part.row_max;  // also if it is NaN
  for (const LossPart& part : parts)
    if (part.sum) sum += double(part.sum) * std::exp(double(part.row_max) - row_max);
  return {row_max, std::log(sum)};
}

// The same for a row of `width` values; value(at) or value(at, count) returns a vector of them.
template <class Value>
LogSum log_sum(int64_t width, const Value& value) {
  std::vector<LossPart> parts;
  parts.reserve((width + PART_SIZE - 1) / PART_SIZE);
  alignas(64) float values[PART_SIZE];
  for (int64_t begin = 0; begin < width; begin += PART_SIZE) {
    int64_t count = std::min(PART_SIZE, width - begin);
    for_each_vector(count, [&](int64_t at, auto... tail) {
      store(values + at, value(begin + at, tail...), tail...);
    });
    parts.push_back(loss_part(values, count, -1, false));
  }
  return log_sum(parts);
}

}  // namespace ingot::kernels
