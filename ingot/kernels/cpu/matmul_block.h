// Blocks of a matmul's result, and the loops over them.
#pragma once

#include "scratch.h"
#include "tensor.h"

namespace ingot {

constexpr int BLOCK_M = 32, BLOCK_N = 256;

using AccTile = float[BLOCK_M][BLOCK_N];

struct ColumnRange {
  int64_t begin, count;
};

struct OutputBlock {
  int64_t row, rows;
  ColumnRange columns;
  int64_t group;  // index of the column range
  AccTile* acc;

  float* acc_row(int weight, int64_t r) const { return acc[weight][r]; }
};

using Epilogue = FunctionRef<void(const OutputBlock&)>;

// The same number of ranges for each thread, of equal size up to the granularity of tiles.
inline std::vector<ColumnRange> balanced_columns(int64_t count) {
  constexpr int64_t UNIT = 32;
  int64_t threads = num_threads(), units = (count + UNIT - 1) / UNIT;
  int64_t each = (units + threads - 1) / threads * UNIT;
  int64_t groups = std::min(units, threads * ((each + BLOCK_N - 1) / BLOCK_N));
  std::vector<ColumnRange> ranges(groups);
  for (int64_t g = 0; g < groups; g++) {
    int64_t begin = units * g / groups * UNIT, end = units * (g + 1) / groups * UNIT;
    ranges[g] = {begin, std::min(end, count) - begin};
  }
  return ranges;
}

// Ranges of a fixed size, independent of the number of threads.
inline std::vector<ColumnRange> fixed_size_columns(int64_t count) {
  std::vector<ColumnRange> ranges;
  for (int64_t begin = 0; begin < count; begin += BLOCK_N)
    ranges.push_back({begin, std::min<int64_t>(BLOCK_N, count - begin)});
  return ranges;
}

// For each block of a column range, call compute(row, rows, weight, acc) and then the epilogue.
template <int NUM_WEIGHTS, class Compute>
void for_each_block(int64_t row, int64_t rows, ColumnRange columns, int64_t group,
                    const Compute& compute, const Epilogue& epilogue) {
  AccTile* acc = scratch<Scratch::GEMM_ACC, AccTile>(NUM_WEIGHTS);
  for (int64_t end = row + rows; row < end; row += BLOCK_M) {
    int64_t count = std::min<int64_t>(BLOCK_M, end - row);
    for (int p = 0; p < NUM_WEIGHTS; p++) compute(row, count, p, acc[p]);
    epilogue(OutputBlock{row, count, columns, group, acc});
  }
}

}  // namespace ingot
