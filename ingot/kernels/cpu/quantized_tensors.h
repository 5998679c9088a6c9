// The tensors of a quantized weight: its bytes, and a float per row and group of channels (scales,
// zero points, minima).
#pragma once

#include "tensor.h"
#include "vector.h"

namespace ingot {

constexpr int LANES = 16;  // rows of the weight that are computed together

typedef int32_t IntLanes __attribute__((vector_size(4 * LANES)));
typedef float FloatLanes __attribute__((vector_size(4 * LANES)));

// The bytes of a weight: rows, (rows, bytes), or panels, (rows / 16, bytes / 4, 16, 4), where 4 bytes
// of each of 16 rows are adjacent.
struct WeightBytes {
  Tensor owner;
  bool is_panels;
  int64_t rows, row_bytes;
  const uint8_t* first;

  WeightBytes(const Tensor& weight, ScalarType dtype)
      : owner(weight.is_contiguous() ? weight : contiguous(weight)), is_panels(weight.dim() == 4) {
    check(weight.is_cpu() && weight.scalar_type() == dtype && (is_panels || weight.dim() == 2),
          "weight must have rows or panels of bytes");
    check(!is_panels || (weight.size(2) == LANES && weight.size(3) == 4),
          "panels must have words of 16 rows");
    rows = weight.size(0) * (is_panels ? LANES : 1);
    row_bytes = weight.size(1) * (is_panels ? 4 : 1);
    first = static_cast<const uint8_t*>(owner.data_ptr());
  }

  uint8_t at(int64_t row, int64_t byte) const {
    if (!is_panels) return first[row * row_bytes + byte];
    int64_t word = row / LANES * (row_bytes / 4) + byte / 4;
    return first[(word * LANES + row % LANES) * 4 + byte % 4];
  }
};

inline float half_to_float(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16, bits = half & 0x7fff;
  // Scaled by 2^112, which also normalizes subnormals; infinities and NaNs need the full exponent.
  float value = bit_cast<float>(bits << 13) * bit_cast<float>(0x77800000u);
  if (bits >= 0x7c00) value = bit_cast<float>(0x7f800000u | bits << 13);
  return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
}

typedef uint16_t HalfLanes __attribute__((vector_size(2 * LANES)));

// 16 values in float32.
inline FloatLanes widen_bf16(HalfLanes values) {
#if defined(__AVX512F__)  // five instructions with __builtin_convertvector and GCC 12
  return (FloatLanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)values), 16);
#else
  return (FloatLanes)(__builtin_convertvector(values, IntLanes) << 16);
#endif
}
inline FloatLanes widen_half(HalfLanes values) {
#if defined(__AVX512F__)
  return (FloatLanes)_mm512_cvtph_ps((__m256i)values);
#else
  FloatLanes floats;
  for (int i = 0; i < LANES; i++) floats[i] = half_to_float(values[i]);
  return floats;
#endif
}

// The values of 16 rows where they are: a vector for each group, `stride` elements apart.
struct GroupLanes {
  const uint16_t* first;
  int64_t stride;
};

// A float per group and row of the weight (a scale, say), of any floating dtype; the values of
// adjacent rows are adjacent.
class GroupValues {
 public:
  GroupValues() = default;

  // `values` is (rows, groups), (rows,) for one group, or panels, (rows / 16, groups, 16). Rows are
  // copied unless columns are contiguous.
  GroupValues(const Tensor& values, int64_t rows, int64_t groups)
      : owner_(values.dim() == 3 && !values.is_contiguous() ? contiguous(values) : values) {
    bool is_panels = values.dim() == 3;
    check(values.is_cpu() && values.dim() >= 1 && values.dim() <= 3 &&
              values.size(0) * (is_panels ? LANES : 1) == rows &&
              (values.dim() == 1 || values.size(1) == groups) &&
              (!is_panels || values.size(2) == LANES),
          "scales must be (out_features,), (out_features, groups) or panels of them");
    type_ = values.scalar_type();
    if (type_ != ScalarType::Float && type_ != ScalarType::BFloat16 && type_ != ScalarType::Half)
      throw_unsupported();
    element_ = type_ == ScalarType::Float ? 4 : 2;
    stride_ = values.dim() == 1 || values.size(1) == 1 ? 0 : values.stride(1);
    first_ = static_cast<const char*>(owner_->data_ptr());
    if (is_panels) stride_ = LANES, panel_stride_ = groups * LANES;
    else if (rows > 1 && values.stride(0) != 1) copy(values, rows, values.dim() == 1 ? 1 : groups);
  }

  explicit operator bool() const { return first_ != nullptr; }

  float at(int64_t group, int64_t row) const {
    const char* from = first_ + offset(group, row);
    if (type_ == ScalarType::Float) return read<float>(from);
    uint16_t bits = read<uint16_t>(from);
    return type_ == ScalarType::BFloat16 ? widen(bf16{bits}) : half_to_float(bits);
  }

  // The values of up to 16 rows in float32, (groups, 16), padded with zeros.
  [[gnu::noinline]] void load(int64_t groups, int64_t row, int64_t count, FloatLanes* to) const {
    auto convert_each = [&](auto convert) {
      for (int64_t g = 0; g < groups; g++) {
        const char* from = first_ + offset(g, row);
        alignas(64) char padded[4 * LANES];
        if (count < LANES) {
          std::memset(padded, 0, sizeof padded);
          from = static_cast<char*>(std::memcpy(padded, from, count * element_));
        }
        to[g] = convert(from);
      }
    };
    if (type_ == ScalarType::Float)
      convert_each([](const char* from) { return read<FloatLanes>(from); });
    else if (type_ == ScalarType::BFloat16)
      convert_each([](const char* from) { return widen_bf16(read<HalfLanes>(from)); });
    else
      convert_each([](const char* from) { return widen_half(read<HalfLanes>(from)); });
  }

  ScalarType type() const { return type_; }
  GroupLanes lanes(int64_t row) const {  // of a dtype of 16 bits
    return {reinterpret_cast<const uint16_t*>(first_ + offset(0, row)), stride_};
  }

 private:
  template <class V>
  static V read(const char* from) {
    V values;
    std::memcpy(&values, from, sizeof values);
    return values;
  }
  int64_t offset(int64_t group, int64_t row) const {  // in bytes
    return (row / LANES * panel_stride_ + group * stride_ + row % LANES) * element_;
  }
  void copy(const Tensor& values, int64_t rows, int64_t groups) {
    copied_.resize(rows * groups * element_);
    int64_t row_stride = values.stride(0), group_stride = groups > 1 ? values.stride(1) : 0;
    for (int64_t g = 0; g < groups; g++)
      for (int64_t r = 0; r < rows; r++)
        std::memcpy(&copied_[(g * rows + r) * element_],
                    first_ + (r * row_stride + g * group_stride) * element_, element_);
    first_ = copied_.data();
    stride_ = groups > 1 ? rows : 0;
  }

  std::optional<Tensor> owner_;
  std::vector<char> copied_;
  const char* first_ = nullptr;
  ScalarType type_ = ScalarType::Float;
  int64_t element_ = 4, stride_ = 0;   // of a group
  int64_t panel_stride_ = LANES;  // of 16 rows
};

}  // namespace ingot
