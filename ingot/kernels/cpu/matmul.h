// Rows of x times rows of weights, in float: the product that `linear` and the losses finish.
//
//   multiply(x, {w}, even_columns(n), finish)
//
// computes x W^T in blocks of at most 32 rows by 256 columns and hands each block, row-major and
// in float, to finish(block). With two weights it computes two products of one x.
//
// Exact: an element is the dot product of one row of x and one row of W in one fixed order. Blocks
// are cut along rows and columns, never along k.
//
// With AMX the weights are the left operand, straight from memory as they lie; x is packed. So there
// is no second copy of the weights, and nothing to renew when training changes them. It is faster
// than packed weights too: see `Panel`.
#pragma once

#include <cstdlib>
#include <functional>
#include <memory>

#include "amx.h"
#include "tensor.h"

namespace ingot {

constexpr int BLOCK_ROWS = 32, BLOCK_COLUMNS = 256;

template <class T>
struct Matrix {
  const T* first;
  int64_t rows, width, stride;

  Matrix(const T* first, int64_t rows, int64_t width, int64_t stride)
      : first(first), rows(rows), width(width), stride(stride) {}
  Matrix(const Rows<T>& r) : first(r.first), rows(r.count), width(r.width), stride(r.stride) {}
  const T* operator[](int64_t row) const { return first + row * stride; }
};

using Values = float[BLOCK_ROWS][BLOCK_COLUMNS];

struct Columns {
  int64_t begin, count;
};

struct Block {
  int64_t row, rows;
  Columns columns;
  int64_t group;  // which of the column groups this is
  const Values* values;

  const float* of(int product, int64_t r) const { return values[product][r]; }
};

using Finish = std::function<void(const Block&)>;

// As many groups for each thread, of one size as nearly as tiles allow.
inline std::vector<Columns> even_columns(int64_t count) {
  constexpr int64_t UNIT = 16;
  int64_t threads = torch::stable::get_num_threads(), units = (count + UNIT - 1) / UNIT;
  int64_t each = (units + threads - 1) / threads * UNIT;
  int64_t groups = std::min(units, threads * ((each + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS));
  std::vector<Columns> found(groups);
  for (int64_t g = 0; g < groups; g++) {
    int64_t begin = units * g / groups * UNIT, end = units * (g + 1) / groups * UNIT;
    found[g] = {begin, std::min(end, count) - begin};
  }
  return found;
}

// Of one size whatever the number of threads.
inline std::vector<Columns> fixed_columns(int64_t count) {
  std::vector<Columns> found;
  for (int64_t begin = 0; begin < count; begin += BLOCK_COLUMNS)
    found.push_back({begin, std::min<int64_t>(BLOCK_COLUMNS, count - begin)});
  return found;
}

// Memory that a thread keeps for the next call. Each `use` has its own.
template <class T, int use>
T* scratch(int64_t count) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  static thread_local std::unique_ptr<void, Free> memory;
  static thread_local int64_t bytes = 0;
  int64_t needed = (count * int64_t(sizeof(T)) + 4095) / 4096 * 4096;
  if (needed > bytes) {
    memory.reset(std::aligned_alloc(4096, needed));
    bytes = memory ? needed : 0;
    if (!memory) throw std::bad_alloc();
  }
  return static_cast<T*>(memory.get());
}

// ---- Dot products, in vectors: every tier, and float32 on all of them.

// A part of a row. bf16 comes as two vectors, of the even and the odd elements.
struct Pair {
  Floats even, odd;
};
inline Floats part(const float* from) { return load(from); }
inline Floats part(const float* from, int64_t count) { return load(from, count); }

#if defined(__AVX512BF16__)
typedef __m512bh Part;
inline Part part(const bf16* from) { return (Part)_mm512_loadu_si512(from); }
inline Floats add_product(Part a, Part b, Floats so_far) {
  return (Floats)_mm512_dpbf16_ps((__m512)so_far, a, b);
}
#else
typedef Pair Part;
inline Part part(const bf16* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return {(Floats)(words << 16), (Floats)(words & 0xffff0000)};
}
inline Floats add_product(Part a, Part b, Floats so_far) {
  return fma(a.odd, b.odd, fma(a.even, b.even, so_far));
}
#endif
inline Part part(const bf16* from, int64_t count) {
  bf16 padded[2 * WIDTH] = {};
  std::memcpy(padded, from, 2 * count);
  return part(padded);
}
inline Floats add_product(Floats a, Floats b, Floats so_far) { return fma(a, b, so_far); }

template <int M, int N, class T>
inline void dots(const T* const (&x)[M], const T* const (&w)[N], int64_t width, float (&out)[M][N]) {
  constexpr int64_t STEP = 4 * WIDTH / sizeof(T);
  Floats total[M][N] = {};
  auto step = [&](int64_t at, auto... count) {
    decltype(part(w[0])) b[N];
    for (int n = 0; n < N; n++) b[n] = part(w[n] + at, count...);
    for (int m = 0; m < M; m++) {
      auto a = part(x[m] + at, count...);
      for (int n = 0; n < N; n++) total[m][n] = add_product(a, b[n], total[m][n]);
    }
  };
  int64_t at = 0;
  for (; at + STEP <= width; at += STEP) step(at);
  if (at < width) step(at, width - at);
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) out[m][n] = sum(total[m][n]);
}

template <int M, class T>
void dot_block(const Matrix<T>& x, const Matrix<T>& w, int64_t row, int64_t rows, Columns columns,
               Values& values) {
  constexpr int N = 4;
  for (int64_t c = 0; c < columns.count; c += N) {
    const T* b[N];  // past the end the last row again, whose products are not kept
    for (int n = 0; n < N; n++) b[n] = w[columns.begin + std::min<int64_t>(c + n, columns.count - 1)];
    for (int64_t r = 0; r < rows; r += M) {
      const T* a[M];
      for (int m = 0; m < M; m++) a[m] = x[row + std::min<int64_t>(r + m, rows - 1)];
      float out[M][N];
      dots(a, b, x.width, out);
      for (int m = 0; m < std::min<int64_t>(M, rows - r); m++)
        for (int n = 0; n < std::min<int64_t>(N, columns.count - c); n++)
          values[r + m][c + n] = out[m][n];
    }
  }
}

// Calls finish for every block of a group, once compute(row, rows, product, values) has filled it.
template <int PRODUCTS, class Compute>
void by_blocks(int64_t row, int64_t rows, Columns columns, int64_t group, const Compute& compute,
               const Finish& finish) {
  Values* values = scratch<Values, 0>(PRODUCTS);
  for (int64_t end = row + rows; row < end; row += BLOCK_ROWS) {
    int64_t count = std::min<int64_t>(BLOCK_ROWS, end - row);
    for (int p = 0; p < PRODUCTS; p++) compute(row, count, p, values[p]);
    finish(Block{row, count, columns, group, values});
  }
}

template <class T, size_t PRODUCTS>
void multiply_dots(const Matrix<T>& x, const std::array<Matrix<T>, PRODUCTS>& weights,
                   const std::vector<Columns>& groups, const Finish& finish) {
  torch::stable::parallel_for(0, groups.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; g++)
      by_blocks<PRODUCTS>(
          0, x.rows, groups[g], g,
          [&](int64_t row, int64_t rows, int p, Values& values) {
            constexpr int M = WIDTH == 16 ? 4 : 2;  // as many sums as registers hold
            if (rows == 1) dot_block<1>(x, weights[p], row, rows, groups[g], values);
            else dot_block<M>(x, weights[p], row, rows, groups[g], values);
          },
          finish);
  });
}

// ---- AMX, for bf16.

#if defined(__AMX_BF16__)

// 16 rows of weights, the left operand. They are not neighbours: `rows_apart` is so large that the 16
// rows of a group's panels are 16 streams, and panel j + 1 goes on where panel j ended. The memory
// then reads 16 sequential streams a core, which hardware prefetches best: 36-40 GB/s where 16
// neighbouring rows, or packed weights, gave 27-31 (2 cores; plain reading 37-42).
struct Panel {
  const bf16* first;
  int64_t stride;  // between its rows, in bytes
};

// P panels by Q tiles of x: 2 x 2, 4 x 1, 1 x 4 or less. Sums in tiles 0-3, x in 4 and 5, w in 6 and 7.
template <int P, int Q>
inline void tile_products(const Panel (&w)[P], const bf16* const (&x)[Q], int64_t steps) {
  for (int64_t s = 0; s < steps; s++) {
    auto load_x = [&]<int q>() { tile_load<4 + q % 2>(x[q] + s * TILE * TILE_DEPTH, 64); };
    auto load_w = [&]<int p>() { tile_load<6 + p % 2>(w[p].first + s * TILE_DEPTH, w[p].stride); };
    load_x.template operator()<0>();
    load_w.template operator()<0>();
    tile_multiply<0, 6, 4>();
    if constexpr (Q > 1) {
      load_x.template operator()<1>();
      tile_multiply<1, 6, 5>();
    }
    if constexpr (P > 1) {
      load_w.template operator()<1>();
      tile_multiply<Q, 7, 4>();
      if constexpr (Q > 1) tile_multiply<3, 7, 5>();
    }
    if constexpr (Q > 2) {
      load_x.template operator()<2>();
      tile_multiply<2, 6, 4>();
      load_x.template operator()<3>();
      tile_multiply<3, 6, 5>();
    }
    if constexpr (P > 2) {
      load_w.template operator()<2>();
      tile_multiply<2, 6, 4>();
      load_w.template operator()<3>();
      tile_multiply<3, 7, 4>();
    }
  }
}

template <int P, int Q>
inline void store_tiles(float* const (&out)[P][Q]) {
  tile_store<0>(out[0][0], 64);
  if constexpr (Q > 1) tile_store<1>(out[0][1], 64);
  if constexpr (P > 1) tile_store<Q>(out[1][0], 64);
  if constexpr (P > 1 && Q > 1) tile_store<3>(out[1][1], 64);
  if constexpr (Q > 2) tile_store<2>(out[0][2], 64), tile_store<3>(out[0][3], 64);
  if constexpr (P > 2) tile_store<2>(out[2][0], 64), tile_store<3>(out[3][0], 64);
}

template <int P, int Q>
inline void tiles(const Panel (&w)[P], const bf16* const (&x)[Q], int64_t width, float* const (&out)[P][Q]) {
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  int64_t steps = width / TILE_DEPTH, rest = width % TILE_DEPTH;
  tile_products<P, Q>(w, x, steps);
  if (rest) {
    alignas(64) bf16 padded[P][TILE][TILE_DEPTH] = {};
    Panel ends[P];
    for (int p = 0; p < P; p++) {
      for (int r = 0; r < TILE; r++) {
        const bf16* row = w[p].first + r * (w[p].stride / int64_t(sizeof(bf16)));
        std::memcpy(padded[p][r], row + steps * TILE_DEPTH, rest * sizeof(bf16));
      }
      ends[p] = {padded[p][0], 64};
    }
    const bf16* last[Q];
    for (int q = 0; q < Q; q++) last[q] = x[q] + steps * TILE * TILE_DEPTH;
    tile_products<P, Q>(ends, last, 1);
  }
  store_tiles<P, Q>(out);
}

inline int64_t packed_tile_size(int64_t width) {
  return (width + TILE_DEPTH - 1) / TILE_DEPTH * TILE * TILE_DEPTH;
}

// 16 rows of x as the right operand: (step, pair of k, row, 2), with zeros for what is missing.
inline void pack_tile(const Matrix<bf16>& x, int64_t row, bf16* to) {
  for (int64_t at = 0; at < x.width; at += TILE_DEPTH, to += TILE * TILE_DEPTH) {
    int64_t count = std::min<int64_t>(TILE_DEPTH, x.width - at);
    __mmask32 mask = count == TILE_DEPTH ? ~0u : (1u << count) - 1;
    __m512i tile[TILE] = {};
    for (int r = 0; r < std::min<int64_t>(TILE, x.rows - row); r++)
      tile[r] = _mm512_maskz_loadu_epi16(mask, x[row + r] + at);
    transpose(tile);
    for (int r = 0; r < TILE; r++) _mm512_store_si512(to + r * TILE_DEPTH, tile[r]);
  }
}

inline const bf16* packed(const Matrix<bf16>& x, int64_t row, int64_t rows) {
  int64_t size = packed_tile_size(x.width), count = (rows + TILE - 1) / TILE;
  bf16* to = scratch<bf16, 1>(count * size);
  parallel(count, size, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) pack_tile(x, row + t * TILE, to + t * size);
  });
  return to;
}

// The weights of a group of columns, as panels; what is left of 16 is padded with zeros.
struct Panels {
  Matrix<bf16> w;
  Columns columns;
  int64_t whole, rest;
  const bf16* padded = nullptr;

  template <int use>
  static Panels of(const Matrix<bf16>& w, Columns columns) {
    Panels panels{w, columns, columns.count / TILE, columns.count % TILE};
    if (panels.rest) {
      bf16* to = scratch<bf16, use>(TILE * w.width);
      std::memset(to, 0, TILE * w.width * sizeof(bf16));
      for (int64_t r = 0; r < panels.rest; r++)
        std::memcpy(to + r * w.width, w[columns.begin + panels.whole * TILE + r], w.width * sizeof(bf16));
      panels.padded = to;
    }
    return panels;
  }
  int64_t count() const { return whole + (rest > 0); }
  Panel operator[](int64_t j) const {
    if (j == whole) return {padded, w.width * int64_t(sizeof(bf16))};
    return {w[columns.begin + j], whole * w.stride * int64_t(sizeof(bf16))};
  }
};

constexpr int MOST_PANELS = BLOCK_COLUMNS / TILE + 1;
using Products = float[MOST_PANELS][2][TILE][TILE];

// From (panel, tile of x, row of the panel, row of x) to (row of x, column).
inline void unpack(const Products& products, const Panels& panels, int64_t rows, Values& values) {
  int64_t whole = panels.whole;
  for (int64_t q = 0; q * TILE < rows; q++) {
    int64_t count = std::min<int64_t>(TILE, rows - q * TILE);
    for (int i = 0; i < TILE && whole; i++) {
      if (count <= 2) {
        for (int64_t m = 0; m < count; m++)
          for (int64_t j = 0; j < whole; j++)
            values[q * TILE + m][i * whole + j] = products[j][q][i][m];
        continue;
      }
      __m512i tile[TILE] = {};
      for (int64_t j = 0; j < whole; j++) tile[j] = _mm512_load_si512(products[j][q][i]);
      transpose(tile);
      for (int64_t m = 0; m < count; m++)
        _mm512_mask_storeu_epi32(&values[q * TILE + m][i * whole], (1u << whole) - 1, tile[m]);
    }
    for (int64_t r = 0; r < panels.rest; r++)
      for (int64_t m = 0; m < count; m++)
        values[q * TILE + m][whole * TILE + r] = products[whole][q][r][m];
  }
}

template <int Q>
void amx_block(const Panels& panels, const bf16* x, int64_t rows, bool first, Values& values) {
  Products& products = *scratch<Products, 2>(1);
  int64_t size = packed_tile_size(panels.w.width), j = 0;
  const bf16* tiles_of_x[Q];
  for (int q = 0; q < Q; q++) tiles_of_x[q] = x + q * size;
  auto run = [&]<int P>() {
    Panel w[P];
    float* out[P][Q];
    for (int p = 0; p < P; p++) {
      w[p] = panels[j + p];
      for (int q = 0; q < Q; q++) out[p][q] = products[j + p][q][0];
    }
    tiles<P, Q>(w, tiles_of_x, panels.w.width, out);
    j += P;
  };
  // The first pass comes from memory, one panel at a time; the others from the cache.
  while (!first && j + 2 <= panels.count()) run.template operator()<2>();
  while (j < panels.count()) run.template operator()<1>();
  unpack(products, panels, rows, values);
}

template <size_t PRODUCTS>
void multiply_amx(const Matrix<bf16>& x, const std::array<Matrix<bf16>, PRODUCTS>& weights,
                  const std::vector<Columns>& groups, const Finish& finish) {
  constexpr int64_t MOST_ROWS = 4096;  // packed at one time
  int64_t size = packed_tile_size(x.width);
  for (int64_t start = 0; start < x.rows; start += MOST_ROWS) {
    int64_t rows = std::min(MOST_ROWS, x.rows - start);
    const bf16* right = packed(x, start, rows);
    torch::stable::parallel_for(0, groups.size(), 1, [&](int64_t begin, int64_t end) {
      Tiles tiles;
      for (int64_t g = begin; g < end; g++) {
        std::vector<Panels> panels;
        panels.push_back(Panels::of<3>(weights[0], groups[g]));
        if (PRODUCTS > 1) panels.push_back(Panels::of<4>(weights[PRODUCTS - 1], groups[g]));
        by_blocks<PRODUCTS>(
            start, rows, groups[g], g,
            [&](int64_t row, int64_t count, int p, Values& values) {
              const bf16* tiles_of_x = right + (row - start) / TILE * size;
              bool first = row == start;
              if (count <= TILE) amx_block<1>(panels[p], tiles_of_x, count, first, values);
              else amx_block<2>(panels[p], tiles_of_x, count, first, values);
            },
            finish);
      }
    });
  }
}
#endif

template <class T, size_t PRODUCTS>
void multiply(const Matrix<T>& x, const std::array<Matrix<T>, PRODUCTS>& weights,
              const std::vector<Columns>& groups, const Finish& finish) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(T) == 2) return multiply_amx(x, weights, groups, finish);
#endif
  multiply_dots(x, weights, groups, finish);
}

}  // namespace ingot
