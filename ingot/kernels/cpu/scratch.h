// Memory that a thread keeps from one call to the next.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace ingot {

// Every use of scratch memory has a slot of its own, so that two buffers that are alive at the same
// time cannot overlap. Slots of mutually exclusive paths may be shared where noted.
enum class Scratch {
  // matmul*.h
  GEMM_ACC,
  GEMM_SUM,
  GEMM_PACKED_X,
  GEMM_PACKED_B,
  GEMM_PANEL_ACC,
  GEMM_PADDED_ROWS,  // of the weights with few rows of x, of x with many
  TRANSPOSED_GRAD,   // parallel_transpose_copy()
  // lora.cpp
  LORA_SORTED_ROWS,
  // quantized.h
  QUANTIZED_X,
  QUANTIZED_X_SCALES,
  QUANTIZED_X_SUMS,
  QUANTIZED_ROWS,
  QUANTIZED_ROW_SCALES,
  QUANTIZED_PANELS,
  QUANTIZED_SCALES,
  // loss.cpp
  LOSS_GRAD_HIDDEN,
  // attention
  ATTENTION_STATE,
  ATTENTION_CHUNK_STATES,
  ATTENTION_SCORES,
  ATTENTION_PROBS,
  ATTENTION_TRANSPOSED_KEYS,
  ATTENTION_QUERY_ROWS,
  ATTENTION_PACKED_QUERIES,
  ATTENTION_PADDED_KEYS,
  ATTENTION_PADDED_VALUES,
  ATTENTION_VALUE_PANELS,
  // attention_backward
  BACKWARD_PACKED_KV,
  BACKWARD_GRAD_KV,
  BACKWARD_QUERIES,
  BACKWARD_GRAD_OUTPUT,
  BACKWARD_SCORES,
  BACKWARD_GRAD_PROBS,
  BACKWARD_P,
  BACKWARD_DS,
  BACKWARD_TRANSPOSED,
  BACKWARD_PACKED_B,
  COUNT
};

[[gnu::noinline]] inline void* scratch_memory(Scratch slot, int64_t needed) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  struct Slot {
    std::unique_ptr<void, Free> memory;
    int64_t bytes = 0;
  };
  static thread_local Slot slots[size_t(Scratch::COUNT)];
  auto& [memory, bytes] = slots[size_t(slot)];
  if (needed > bytes) {
    needed = (needed + 4095) / 4096 * 4096;
    memory.reset(std::aligned_alloc(4096, needed));
    bytes = memory ? needed : 0;
    if (!memory) throw std::bad_alloc();
  }
  return memory.get();
}
// At least `count` elements, aligned to a page, with indeterminate values. The pointer is valid
// until this thread asks for more memory in the same slot.
template <Scratch slot, class T>
T* scratch(int64_t count) {
  return static_cast<T*>(scratch_memory(slot, count * int64_t(sizeof(T))));
}

}  // namespace ingot
