// Matmuls of bf16 with AMX. The number of rows decides which operand is packed; the bits are the
// same.
#pragma once

#include <bit>

#include "amx.h"
#include "matmul_block.h"

#if defined(__AMX_BF16__)

namespace ingot {

// A matrix as B operands of 16 rows each, or of the next power of 2 if it has fewer. For a single
// row this saves 6 us per call compared with padding to 16.
struct PackedTiles {
  const bf16* first;
  int64_t columns, size;

  const bf16* operator[](int64_t tile) const { return first + tile * size; }
};

inline int64_t tile_columns(int64_t rows) {
  return rows >= TILE ? TILE : std::bit_ceil(uint64_t(std::max<int64_t>(rows, 1)));
}

inline PackedTiles pack_x(const Matrix<bf16>& x) {
  int64_t columns = tile_columns(x.rows), size = packed_tile_size(x.width, columns);
  int64_t count = (x.rows + TILE - 1) / TILE;
  bf16* to = scratch<Scratch::GEMM_PACKED_X, bf16>(count * size);
  switch (columns) {
    case 1: pack_tile<1>(x, 0, to); break;
    case 2: pack_tile<2>(x, 0, to); break;
    case 4: pack_tile<4>(x, 0, to); break;
    case 8: pack_tile<8>(x, 0, to); break;
    default:
      parallel_for(count, size, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) pack_tile(x, t * TILE, to + t * size);
      });
  }
  return {to, columns, size};
}

// Few rows: the weights are the A operand, read in place. The 16 rows of a panel are not adjacent
// but `whole` apart, so that panel j + 1 continues where panel j ended and memory sees 16
// sequential streams, which the hardware prefetches best: 36-40 GB/s, compared with 27-31 for 16
// adjacent rows or packed weights (2 cores; a plain read reaches 37-42).
struct WeightPanels {
  const Matrix<bf16>& w;
  ColumnRange columns;
  int64_t whole, rest;
  const bf16* padded = nullptr;  // the last `rest` rows, padded with zeros to 16

  WeightPanels(const Matrix<bf16>& w, ColumnRange columns, int weight)
      : w(w), columns(columns), whole(columns.count / TILE), rest(columns.count % TILE) {
    if (!rest) return;
    bf16* to = scratch<Scratch::GEMM_PADDED_ROWS, bf16>(2 * TILE * w.width);
    to += weight * TILE * w.width;
    padded = copy_rows_padded(w, columns.begin + whole * TILE, rest, to);
  }
  int64_t count() const { return whole + (rest > 0); }
  Panel operator[](int64_t j) const {
    if (j == whole) return {padded, w.width * int64_t(sizeof(bf16))};
    return {w[columns.begin + j], whole * w.stride * int64_t(sizeof(bf16))};
  }
};

constexpr int MAX_PANELS = BLOCK_N / TILE + 1;
using PanelAcc = float[MAX_PANELS][2][TILE * TILE];

// Convert (panel, tile of x, row of the panel, row of x) to (row of x, column).
inline void unpack_panels(const PanelAcc& panel_acc, const WeightPanels& panels, int64_t rows,
                          int64_t columns, AccTile& acc) {
  int64_t whole = panels.whole;
  for (int64_t q = 0; q * TILE < rows; q++) {
    int64_t count = std::min<int64_t>(TILE, rows - q * TILE);
    for (int64_t at = 0; at < TILE * columns && whole; at += TILE) {
      __m512i tile[TILE] = {};
      for (int64_t j = 0; j < whole; j++) tile[j] = _mm512_load_si512(panel_acc[j][q] + at);
      interleave(tile);
      for (int64_t i = 0; i < TILE; i++) {
        int64_t of_panel = (at + i) / columns, m = (at + i) % columns;
        if (m < count)
          _mm512_mask_storeu_epi32(&acc[q * TILE + m][of_panel * whole], (1u << whole) - 1,
                                   tile[i]);
      }
    }
    for (int64_t r = 0; r < panels.rest; r++)
      for (int64_t m = 0; m < count; m++)
        acc[q * TILE + m][whole * TILE + r] = panel_acc[whole][q][r * columns + m];
  }
}

template <int Q>
void gemm_block_small_m(const WeightPanels& panels, const PackedTiles& x, int64_t row, int64_t rows,
                        AccTile& acc) {
  PanelAcc& panel_acc = *scratch<Scratch::GEMM_PANEL_ACC, PanelAcc>(1);
  int64_t j = 0;
  const bf16* b[Q];
  for (int q = 0; q < Q; q++) b[q] = x[row / TILE + q];
  auto run = [&]<int P>() {
    Panel a[P];
    float* out[P][Q];
    for (int p = 0; p < P; p++) {
      a[p] = panels[j + p];
      for (int q = 0; q < Q; q++) out[p][q] = panel_acc[j + p][q];
    }
    constexpr CacheHint hint = P == 2 ? CacheHint::STREAM_A : CacheHint::NONE;
    tile_gemm<P, Q, hint>(a, b, panels.w.width, out, 4 * x.columns, x.columns);
    j += P;
  };
  // The first row block reads the weights from memory, one panel at a time; later ones from cache.
  while (row > 0 && j + 2 <= panels.count()) run.template operator()<2>();
  while (j < panels.count()) run.template operator()<1>();
  unpack_panels(panel_acc, panels, rows, x.columns, acc);
}

template <size_t NUM_WEIGHTS>
void gemm_small_m(const Matrix<bf16>& x, const std::array<Matrix<bf16>, NUM_WEIGHTS>& weights,
                  const std::vector<ColumnRange>& groups, const Epilogue& epilogue) {
  // With at most 16 rows, each thread packs x into its own cache instead.
  std::optional<PackedTiles> shared_b;
  if (x.rows > TILE) shared_b = pack_x(x);
  parallel_for_dynamic(groups.size(), [&](TaskQueue& queue) {
    PackedTiles b = shared_b ? *shared_b : pack_x(x);
    uint8_t bytes = 4 * b.columns;
    TileConfig config({16, 16, 16, 16, 16, 16, 16, 16},
                      {bytes, bytes, bytes, bytes, bytes, bytes, 64, 64});
    for (int64_t g; queue.pop(g);) {
      std::vector<WeightPanels> panels;
      for (size_t p = 0; p < NUM_WEIGHTS; p++) panels.emplace_back(weights[p], groups[g], p);
      for_each_block<NUM_WEIGHTS>(
          0, x.rows, groups[g], g,
          [&](int64_t row, int64_t count, int p, AccTile& acc) {
            if (count <= TILE) gemm_block_small_m<1>(panels[p], b, row, count, acc);
            else gemm_block_small_m<2>(panels[p], b, row, count, acc);
          },
          epilogue);
    }
  });
}

}  // namespace ingot
#endif
