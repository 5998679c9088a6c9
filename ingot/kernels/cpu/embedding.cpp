// Embedding lookup and its gradient; lookup in quantized tables.
#include "quantized_tensors.h"

namespace ingot::kernels {

// The sizes of a tensor with one more dimension.
[[gnu::noinline]] std::vector<int64_t> append_size(const Tensor& x, int64_t size) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.push_back(size);
  return sizes;
}

Tensor embedding(const Tensor& tokens, const Tensor& weight) {
  return dispatch_dtype(weight, [&](auto tag) {
    using T = decltype(tag);
    check(weight.dim() == 2, "weight must be a matrix");
    check(tokens.scalar_type() != ScalarType::Bool, "tokens must be integers");
    Integers token(tokens);
    int64_t vocabulary = weight.size(0), width = weight.size(1);
    for (int64_t i = 0; i < token.count; i++)
      check(token[i] >= 0 && token[i] < vocabulary, "token id out of range");
    const T* table = data<T>(weight);
    int64_t row_stride = weight.stride(0), stride = weight.stride(1);
    Tensor y = allocate(append_size(tokens, width), weight.scalar_type());
    T* rows = data<T>(y);
    parallel_for(token.count, width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const T* from = table + token[i] * row_stride;
        T* to = rows + i * width;
        if (stride == 1) std::copy_n(from, width, to);
        else for (int64_t at = 0; at < width; at++) to[at] = from[at * stride];
      }
    });
    return y;
  });
}

using Occurrence = std::pair<int64_t, int64_t>;  // token id, position

[[gnu::noinline]] std::vector<Occurrence> sort_occurrences(const Integers& tokens,
                                                           int64_t vocabulary) {
  std::vector<Occurrence> result(tokens.count);
  for (int64_t i = 0; i < tokens.count; i++) result[i] = {tokens[i], i};
  std::sort(result.begin(), result.end());
  check(result.empty() || (result[0].first >= 0 && result.back().first < vocabulary),
        "token id out of range");
  return result;
}

// Gradients of a row are summed in float32 in the order of its tokens.
Tensors embedding_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& tokens,
                           const Tensor& weight) {
  check(needs_grad.size() == 2 && grads.size() == 1 && needs_grad[1] && !needs_grad[0],
        "only the weight has a gradient");
  return dispatch_dtype(weight, [&](auto tag) {
    using T = decltype(tag);
    check(weight.dim() == 2, "weight must be a matrix");
    check_same_dtype(grads[0], weight);
    check(same_sizes(grads[0], append_size(tokens, weight.size(1))),
          "the gradient must have the shape of the output");
    int64_t vocabulary = weight.size(0), width = weight.size(1);
    std::vector<Occurrence> occurrences = sort_occurrences(Integers(tokens), vocabulary);
    Rows<T> grad(grads[0]);
    Tensor grad_weight = allocate_like(weight);
    parallel_for(vocabulary, width, [&](int64_t begin, int64_t end) {
      std::vector<float> sums(width);
      auto occurrence = std::lower_bound(occurrences.begin(), occurrences.end(),
                                         Occurrence(begin, 0));
      for (int64_t id = begin; id < end; id++) {
        T* to = data<T>(grad_weight) + id * width;
        if (occurrence == occurrences.end() || occurrence->first != id) {
          std::memset(to, 0, width * sizeof(T));
          continue;
        }
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (; occurrence != occurrences.end() && occurrence->first == id; occurrence++)
          for_each_vector(width, [&](int64_t at, auto... tail) {
            Floats row = load(grad[occurrence->second] + at, tail...);
            store(sums.data() + at, load(sums.data() + at, tail...) + row, tail...);
          });
        for_each_vector(width, [&](int64_t at, auto... tail) {
          store(to + at, load(sums.data() + at, tail...), tail...);
        });
      }
    });
    return Tensors{grad_weight};
  });
}

// ---- Quantized tables.

struct TableArgs {
  const Tensor &tokens, &scale;
  const std::optional<Tensor>&zero_point, &minimum;
};

// The rows of a table. `channels` are those of a row, `value(row, k)` the integer of a channel minus
// the format's zero.
template <class T, class Value>
Tensor run_embedding(const TableArgs& args, int64_t rows, int64_t channels, int zero,
                     const Value& value) {
  check(args.tokens.scalar_type() != ScalarType::Bool, "tokens must be integers");
  Integers token(args.tokens);
  int64_t groups = args.scale.dim() > 1 ? args.scale.size(1) : 1;
  check(groups > 0 && channels % groups == 0, "scale must have one entry per group");
  for (int64_t i = 0; i < token.count; i++)
    check(token[i] >= 0 && token[i] < rows, "token id out of range");
  GroupValues scale(args.scale, rows, groups), zero_point, minimum;
  if (args.zero_point) zero_point = GroupValues(*args.zero_point, rows, groups);
  if (args.minimum) minimum = GroupValues(*args.minimum, rows, groups);
  check(!args.zero_point || !args.minimum, "zero_point and minimum exclude each other");
  Tensor y = allocate(append_size(args.tokens, channels),
                      sizeof(T) == 4 ? ScalarType::Float : ScalarType::BFloat16);
  int64_t group = channels / groups;
  parallel_for(token.count, 4 * channels, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      for (int64_t g = 0; g < groups; g++) {
        int64_t row = token[i];
        float s = scale.at(g, row), m = minimum ? minimum.at(g, row) : 0;
        float z = minimum ? 0 : zero_point ? zero_point.at(g, row) : zero;
        T* to = data<T>(y) + i * channels;
        for (int64_t k = g * group; k < (g + 1) * group; k++)
          to[k] = round_to<T>((float(value(row, k)) - z) * s + m);
      }
  });
  return y;
}

template <class Value>
Tensor dispatch_embedding(const TableArgs& args, int64_t rows, int64_t channels, int zero,
                          bool bf16_output, const Value& value) {
  if (bf16_output) return run_embedding<bf16>(args, rows, channels, zero, value);
  return run_embedding<float>(args, rows, channels, zero, value);
}

Tensor embedding_int8(const Tensor& tokens, const Tensor& weight, const Tensor& scale,
                      bool bf16_output) {
  WeightBytes table(weight, ScalarType::Char);
  return dispatch_embedding({tokens, scale, std::nullopt, std::nullopt}, table.rows,
                            table.row_bytes, 0, bf16_output,
                            [&](int64_t row, int64_t k) { return int8_t(table.at(row, k)); });
}

Tensor embedding_int4(const Tensor& tokens, const Tensor& weight, const Tensor& scale,
                      const std::optional<Tensor>& zero_point,
                      const std::optional<Tensor>& minimum, bool bf16_output) {
  WeightBytes table(weight, ScalarType::Byte);
  return dispatch_embedding({tokens, scale, zero_point, minimum}, table.rows, 2 * table.row_bytes,
                            8, bf16_output, [&](int64_t row, int64_t k) {
                              return table.at(row, k / 2) >> (4 * (k % 2)) & 15;
                            });
}

}  // namespace ingot::kernels

REGISTER_OP(embedding)
REGISTER_BACKWARD(embedding)
REGISTER_OP(embedding_int8)
REGISTER_OP(embedding_int4)
