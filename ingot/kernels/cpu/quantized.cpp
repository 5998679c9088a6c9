// Linear layers with quantized weights and activations: see quantized.h.
#include "quantized.h"

#include "epilogue.h"

namespace ingot::kernels {

struct QuantizedArgs {
  const Tensor &x, &weight, &scale;
  const std::optional<Tensor>&zero_point, &minimum, &bias;
  int64_t activation;
  const std::optional<Tensor>& residual;
  int64_t x_group;
  bool gated;
  const std::optional<Tensor>&lora_h, &lora_b, &lora_index;
  bool to_float32;
};

constexpr int64_t MAX_DEPTH = 131072;  // a dot product of int8 vectors fits int32

// The number of channels that share a scale of x: those of a group of the weight, or `x_group` if
// the weight has a scale per row; 0 is the whole row.
inline int64_t group_size(const QuantizedArgs& args, int64_t depth) {
  int64_t group = args.x_group;
  if (args.scale.dim() > 1) {
    check(group == 0, "x_group needs a scale per row");
    int64_t groups = args.scale.size(1);
    check(groups > 0 && depth % groups == 0, "scale must have one entry per group");
    group = depth / groups;
    check(group != 0, "a group must have channels");
  }
  check(group == 0 || group == 16 || group == 32 || group == 64 || group == 128,
        "groups must have 16, 32, 64 or 128 channels");
  return group;
}

template <class Format>
WeightBytes checked_weight(const QuantizedArgs& args, int64_t depth) {
  WeightBytes weight(args.weight, Format::PLANES == 2 ? ScalarType::Byte : ScalarType::Char);
  check(weight.row_bytes * Format::PLANES == depth, "weight must have the channels of x");
  check(depth > 0 && depth <= MAX_DEPTH, "x must have 1 to 131072 channels");
  check(!args.gated || (weight.rows % (weight.is_panels ? 2 * LANES : 2) == 0 && !args.bias),
        "a gated weight has the rows of gate and up, and no bias");
  return weight;
}

template <class Format, class T>
Tensor run_quantized(const QuantizedArgs& args) {
  const Tensor& x = args.x;
  Rows<T> rows(x);
  int64_t num_weights = args.gated ? 2 : 1;
  int64_t depth = rows.width;
  WeightBytes weight = checked_weight<Format>(args, depth);
  int64_t width = weight.rows / num_weights;
  int64_t group = group_size(args, depth), groups = group ? depth / group : 1;
  GroupValues scale(args.scale, weight.rows, groups), zero_point, minimum;
  if (args.zero_point) zero_point = GroupValues(*args.zero_point, weight.rows, groups);
  if (args.minimum) minimum = GroupValues(*args.minimum, weight.rows, groups);
  check(!args.zero_point || !args.minimum, "zero_point and minimum exclude each other");
  for (const std::optional<Tensor>& offset : {args.zero_point, args.minimum})
    check(!offset || offset->scalar_type() == args.scale.scalar_type(),
          "zero_point and minimum must have the dtype of scale");

  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = width;
  Tensor y = allocate(sizes, args.to_float32 ? ScalarType::Float : x.scalar_type());
  LinearEpilogue<T> epilogue{data<T>(y), width, checked_activation(args.activation), args.gated};
  if (args.to_float32) epilogue.float32_out = data<float>(y);
  if (args.bias) check_same_dtype(*args.bias, x), epilogue.bias.emplace(*args.bias, width);
  if (args.residual)
    check_output_like(*args.residual, x, width), epilogue.residual.emplace(*args.residual);
  check(args.lora_h.has_value() == args.lora_b.has_value() && (args.lora_h || !args.lora_index),
        "lora_h and lora_b must be given together");
  std::vector<QuantizedWeight> weights;
  for (int64_t p = 0; p < num_weights; p++) {
    if (args.lora_h)
      epilogue.lora[p].emplace(*args.lora_h, *args.lora_b, args.lora_index, x, width, num_weights,
                               p, true);
    weights.push_back({weight, p * width, width, scale, zero_point, minimum});
  }
  int32_t zero = zero_point || minimum ? 0 : Format::ZERO;
  QuantizedRows quantized = quantize_rows<Format, T>(rows, group, zero);
  quantized_gemm<Format>(quantized, rows.count, weights, epilogue);
  return y;
}

template <class Format>
Tensor dispatch_quantized(const QuantizedArgs& args) {
  return dispatch_dtype(args.x, [&](auto tag) {
    using T = decltype(tag);
    check(args.x.dim() >= 1, "x must have at least one dimension");
    return run_quantized<Format, T>(args);
  });
}

Tensor linear_int8_dynamic(const Tensor& x, const Tensor& weight, const Tensor& scale,
                           const std::optional<Tensor>& bias, int64_t activation,
                           const std::optional<Tensor>& residual, int64_t x_group, bool gated,
                           const std::optional<Tensor>& lora_h, const std::optional<Tensor>& lora_b,
                           const std::optional<Tensor>& lora_index, bool to_float32) {
  return dispatch_quantized<Int8>({x, weight, scale, std::nullopt, std::nullopt, bias, activation,
                                   residual, x_group, gated, lora_h, lora_b, lora_index,
                                   to_float32});
}

Tensor linear_int4_dynamic(const Tensor& x, const Tensor& weight, const Tensor& scale,
                           const std::optional<Tensor>& zero_point,
                           const std::optional<Tensor>& minimum, const std::optional<Tensor>& bias,
                           int64_t activation, const std::optional<Tensor>& residual, bool gated,
                           const std::optional<Tensor>& lora_h, const std::optional<Tensor>& lora_b,
                           const std::optional<Tensor>& lora_index, bool to_float32) {
  check(scale.dim() > 1, "int4 weights have a scale per row and group");
  return dispatch_quantized<Int4>({x, weight, scale, zero_point, minimum, bias, activation,
                                   residual, 0, gated, lora_h, lora_b, lora_index, to_float32});
}

}  // namespace ingot::kernels

REGISTER_OP(linear_int8_dynamic)
REGISTER_OP(linear_int4_dynamic)
