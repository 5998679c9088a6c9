// Embedding: rows copied.
#include "tensor.h"

namespace ingot::kernels {

// The sizes of one tensor, and one more.
std::vector<int64_t> extended(const Tensor& x, int64_t size) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.push_back(size);
  return sizes;
}

Tensor embedding(const Tensor& tokens, const Tensor& weight) {
  return with_dtype(weight, [&](auto tag) {
    using T = decltype(tag);
    need(weight.dim() == 2, "a matrix");
    need(tokens.scalar_type() != ScalarType::Bool, "token ids");
    Integers token(tokens);
    int64_t vocabulary = weight.size(0), width = weight.size(1);
    for (int64_t i = 0; i < token.count; i++)
      need(token[i] >= 0 && token[i] < vocabulary, "tokens of the vocabulary");
    const T* table = data<T>(weight);
    int64_t row_stride = weight.stride(0), stride = weight.stride(1);
    Tensor y = made(extended(tokens, width), weight.scalar_type());
    T* rows = data<T>(y);
    parallel(token.count, width, [&](int64_t begin, int64_t end) {
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

}  // namespace ingot::kernels

OP(embedding)
