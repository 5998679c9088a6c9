// Rows of x times rows of weights, in float: the product that `linear` and the losses finish.
//
//   multiply(x, {w}, even_columns(n), finish)
//
// computes x W^T in blocks of at most 32 rows by 256 columns and hands each block, row-major and
// in float, to finish(block). With two weights it computes two products of one x. A weight may lie
// turned round, as a gradient's does: dY W is multiply(dY, {Turned(W)}, ...).
//
// Exact: an element is the dot product of one row of x and one row of W in one fixed order. Blocks
// are cut along rows and columns, never along k.
//
// No second copy of the weights is kept, so there is nothing to renew when training changes them.
#pragma once

#include <bit>
#include <cstdlib>
#include <functional>
#include <memory>

#include "amx.h"
#include "turned.h"

namespace ingot {

constexpr int BLOCK_ROWS = 32, BLOCK_COLUMNS = 256;

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
  constexpr int64_t UNIT = 32;
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
void dot_block(const Matrix<T>& x, const Matrix<T>& w, int64_t row, int64_t rows, Values& values) {
  constexpr int N = 4;
  for (int64_t c = 0; c < w.rows; c += N) {
    const T* b[N];  // past the end the last row again, whose products are not kept
    for (int n = 0; n < N; n++) b[n] = w[std::min<int64_t>(c + n, w.rows - 1)];
    for (int64_t r = 0; r < rows; r += M) {
      const T* a[M];
      for (int m = 0; m < M; m++) a[m] = x[row + std::min<int64_t>(r + m, rows - 1)];
      float out[M][N];
      dots(a, b, x.width, out);
      for (int m = 0; m < std::min<int64_t>(M, rows - r); m++)
        for (int n = 0; n < std::min<int64_t>(N, w.rows - c); n++)
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

// At most 256 columns of a product, made ready by one thread. `memory` is of `size` elements.
template <class T>
class Right {
 public:
  using Session = char;  // what a thread has while it computes: nothing

  static int64_t size(int64_t columns, int64_t depth) { return columns * depth; }

  Right(const Matrix<T>& w, T*) : w_(w) {}
  Right(const Turned<T>& w, T* memory) : w_(memory, w.rows, w.width, w.width) {
    copy_turned(w, 0, w.rows, memory, w.width);
  }
  void times(const Matrix<T>& x, int64_t row, int64_t rows, Values& values) const {
    constexpr int M = WIDTH == 16 ? 4 : 2;  // as many sums as registers hold
    if (rows == 1) dot_block<1>(x, w_, row, rows, values);
    else dot_block<M>(x, w_, row, rows, values);
  }

 private:
  Matrix<T> w_;
};

// ---- AMX, for bf16. Which operand is packed depends on how many rows x has; the products do not.

#if defined(__AMX_BF16__)

// A matrix as right operands: 16 rows to each, or as few as there are, rounded up to a power of 2.
// One row then takes 6 us less of a call than when it was padded to 16.
struct Packed {
  const bf16* first;
  int64_t columns, size;

  const bf16* operator[](int64_t tile) const { return first + tile * size; }
};

inline int64_t columns_for(int64_t rows) {
  return rows >= TILE ? TILE : std::bit_ceil(uint64_t(std::max<int64_t>(rows, 1)));
}

inline Packed packed(const Matrix<bf16>& x) {
  int64_t columns = columns_for(x.rows), size = packed_tile_size(x.width, columns);
  int64_t count = (x.rows + TILE - 1) / TILE;
  bf16* to = scratch<bf16, 1>(count * size);
  switch (columns) {
    case 1: pack_tile<1>(x, 0, to); break;
    case 2: pack_tile<2>(x, 0, to); break;
    case 4: pack_tile<4>(x, 0, to); break;
    case 8: pack_tile<8>(x, 0, to); break;
    default:
      parallel(count, size, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) pack_tile(x, t * TILE, to + t * size);
      });
  }
  return {to, columns, size};
}

// Few rows: the weights are the left operand, where they lie. The 16 rows of a panel are not
// neighbours but `whole` apart, so that panel j + 1 goes on where panel j ended and memory sees 16
// sequential streams, which hardware prefetches best: 36-40 GB/s, where 16 neighbouring rows, or
// packed weights, gave 27-31 (2 cores; plain reading 37-42).
struct Panels {
  const Matrix<bf16>& w;
  Columns columns;
  int64_t whole, rest;
  const bf16* padded = nullptr;  // what is left of 16 rows, with zeros for the others

  Panels(const Matrix<bf16>& w, Columns columns, int product)
      : w(w), columns(columns), whole(columns.count / TILE), rest(columns.count % TILE) {
    if (!rest) return;
    bf16* to = scratch<bf16, 3>(2 * TILE * w.width) + product * TILE * w.width;
    padded = copy_rows(w, columns.begin + whole * TILE, rest, to);
  }
  int64_t count() const { return whole + (rest > 0); }
  Panel operator[](int64_t j) const {
    if (j == whole) return {padded, w.width * int64_t(sizeof(bf16))};
    return {w[columns.begin + j], whole * w.stride * int64_t(sizeof(bf16))};
  }
};

constexpr int MOST_PANELS = BLOCK_COLUMNS / TILE + 1;
using Products = float[MOST_PANELS][2][TILE * TILE];

// From (panel, tile of x, row of the panel, row of x) to (row of x, column).
inline void unpack(const Products& products, const Panels& panels, int64_t rows, int64_t columns,
                   Values& values) {
  int64_t whole = panels.whole;
  for (int64_t q = 0; q * TILE < rows; q++) {
    int64_t count = std::min<int64_t>(TILE, rows - q * TILE);
    for (int64_t at = 0; at < TILE * columns && whole; at += TILE) {
      __m512i tile[TILE] = {};
      for (int64_t j = 0; j < whole; j++) tile[j] = _mm512_load_si512(products[j][q] + at);
      interleave(tile);
      for (int64_t i = 0; i < TILE; i++) {
        int64_t of_panel = (at + i) / columns, m = (at + i) % columns;
        if (m < count)
          _mm512_mask_storeu_epi32(&values[q * TILE + m][of_panel * whole], (1u << whole) - 1, tile[i]);
      }
    }
    for (int64_t r = 0; r < panels.rest; r++)
      for (int64_t m = 0; m < count; m++)
        values[q * TILE + m][whole * TILE + r] = products[whole][q][r * columns + m];
  }
}

template <int Q>
void weights_left(const Panels& panels, const Packed& x, int64_t row, int64_t rows, Values& values) {
  Products& products = *scratch<Products, 2>(1);
  int64_t j = 0;
  const bf16* right[Q];
  for (int q = 0; q < Q; q++) right[q] = x[row / TILE + q];
  auto run = [&]<int P>() {
    Panel left[P];
    float* out[P][Q];
    for (int p = 0; p < P; p++) {
      left[p] = panels[j + p];
      for (int q = 0; q < Q; q++) out[p][q] = products[j + p][q];
    }
    constexpr Passing passing = P == 2 ? Passing::left : Passing::none;
    tiles<P, Q, passing>(left, right, panels.w.width, out, 4 * x.columns, x.columns);
    j += P;
  };
  // The first pass comes from memory, one panel at a time; the others from the cache.
  while (row > 0 && j + 2 <= panels.count()) run.template operator()<2>();
  while (j < panels.count()) run.template operator()<1>();
  unpack(products, panels, rows, x.columns, values);
}

template <size_t PRODUCTS>
void multiply_few(const Matrix<bf16>& x, const std::array<Matrix<bf16>, PRODUCTS>& weights,
                  const std::vector<Columns>& groups, const Finish& finish) {
  std::optional<Packed> once;  // few rows each thread packs for itself, where its caches are
  if (x.rows > TILE) once = packed(x);
  shared(groups.size(), [&](Next& next) {
    Packed right = once ? *once : packed(x);
    uint8_t bytes = 4 * right.columns;
    Tiles tiles({16, 16, 16, 16, 16, 16, 16, 16}, {bytes, bytes, bytes, bytes, bytes, bytes, 64, 64});
    for (int64_t g; next(g);) {
      std::vector<Panels> panels;
      for (size_t p = 0; p < PRODUCTS; p++) panels.emplace_back(weights[p], groups[g], p);
      by_blocks<PRODUCTS>(
          0, x.rows, groups[g], g,
          [&](int64_t row, int64_t count, int p, Values& values) {
            if (count <= TILE) weights_left<1>(panels[p], right, row, count, values);
            else weights_left<2>(panels[p], right, row, count, values);
          },
          finish);
    }
  });
}

// Many rows: x is the left operand, where it lies, and the weights of a group are packed. Their
// products need no turning round, which pays for the packing.
template <>
class Right<bf16> {
 public:
  using Session = Tiles;

  static int64_t size(int64_t columns, int64_t depth) {
    return (columns + 2 * TILE - 1) / (2 * TILE) * 2 * packed_tile_size(depth);
  }

  template <class Weights>
  Right(const Weights& w, bf16* memory) : first_(memory), columns_(w.rows) {
    for (int64_t c = 0; c < columns_; c += 2 * TILE)
      for (int64_t half = c; half <= c + TILE; half += TILE)
        pack_tile(w, half, memory + half / TILE * packed_tile_size(w.width));
  }

  void times(const Matrix<bf16>& x, int64_t row, int64_t rows, Values& values) const {
    Panel left[2];
    for (int p = 0; p < 2; p++) {
      int64_t first = row + p * TILE, count = std::clamp<int64_t>(rows - p * TILE, 0, TILE);
      left[p] = {x[first], x.stride * int64_t(sizeof(bf16))};
      if (count == TILE) continue;
      bf16* to = scratch<bf16, 3>(2 * TILE * x.width) + p * TILE * x.width;
      left[p] = {copy_rows(x, first, count, to), x.width * int64_t(sizeof(bf16))};
    }
    // A part of k at a time, so that of x something stays in the nearest cache: 1.1 times as fast.
    constexpr int64_t DEPTH = 768;
    for (int64_t k = 0; k == 0 || k < x.width; k += DEPTH) {
      for (int64_t c = 0; c < columns_; c += 2 * TILE) {
        const bf16* tile = first_ + c / TILE * packed_tile_size(x.width) + k * TILE;
        const bf16* right[2] = {tile, tile + packed_tile_size(x.width)};
        float* out[2][2] = {{&values[0][c], &values[0][c + TILE]},
                            {&values[TILE][c], &values[TILE][c + TILE]}};
        int64_t depth = std::min(DEPTH, x.width - k);
        tiles<2, 2, Passing::right>(left, right, depth, out, sizeof values[0], TILE, k > 0);
      }
      for (Panel& panel : left) panel.first += DEPTH;
    }
  }

 private:
  const bf16* first_;
  int64_t columns_;
};
#endif

template <class T, class Weights, size_t PRODUCTS>
void multiply_many(const Matrix<T>& x, const std::array<Weights, PRODUCTS>& weights,
                   const std::vector<Columns>& groups, const Finish& finish) {
  shared(groups.size(), [&](Next& next) {
    [[maybe_unused]] typename Right<T>::Session session;
    int64_t each = Right<T>::size(BLOCK_COLUMNS, x.width);
    T* memory = scratch<T, 4>(PRODUCTS * each);
    for (int64_t g; next(g);) {
      std::vector<Right<T>> right;
      for (size_t p = 0; p < PRODUCTS; p++)
        right.emplace_back(weights[p].some_rows(groups[g].begin, groups[g].count), memory + p * each);
      by_blocks<PRODUCTS>(
          0, x.rows, groups[g], g,
          [&](int64_t row, int64_t rows, int p, Values& values) {
            right[p].times(x, row, rows, values);
          },
          finish);
    }
  });
}

template <class T, class Weights, size_t PRODUCTS>
void multiply(const Matrix<T>& x, const std::array<Weights, PRODUCTS>& weights,
              const std::vector<Columns>& groups, const Finish& finish) {
  if (x.rows == 0) return;
#if defined(__AMX_BF16__)
  constexpr int64_t MANY = 512;
  if constexpr (std::is_same_v<Weights, Matrix<bf16>>)
    if (x.rows < MANY) return multiply_few(x, weights, groups, finish);
#endif
  multiply_many(x, weights, groups, finish);
}

// The product of two, one of several whose sum is wanted.
template <class T>
struct Factors {
  Matrix<T> x;
  Turned<T> w;
};

// Hands store(row, column, values, count...) each element of the sum of all x W^T. Long ones are
// added up in float, 3072 of k at a time: what is packed for them stays in the second cache.
template <class T, class Store>
void add_products(const std::vector<Factors<T>>& all, const Store& store) {
  constexpr int64_t DEEP = 3072;
  std::vector<Factors<T>> parts;
  for (const Factors<T>& each : all)
    for (int64_t k = 0; k == 0 || k < each.x.width; k += DEEP) {
      int64_t count = std::min(DEEP, each.x.width - k);
      parts.push_back({each.x.some_columns(k, count), each.w.some_columns(k, count)});
    }
  int64_t rows = all[0].x.rows, columns = all[0].w.rows;
  bool several = parts.size() > 1;
  float* sums = several ? scratch<float, 5>(rows * columns) : nullptr;
  for (size_t i = 0; i < parts.size(); i++) {
    std::array<Turned<T>, 1> weights{parts[i].w};
    multiply(parts[i].x, weights, even_columns(columns), [&](const Block& block) {
      for (int64_t r = 0; r < block.rows; r++)
        along(block.columns.count, [&](int64_t at, auto... count) {
          int64_t row = block.row + r, column = block.columns.begin + at;
          Floats values = load(block.of(0, r) + at, count...);
          if (several) {
            float* sum = sums + row * columns + column;
            if (i > 0) values += load(sum, count...);
            if (i + 1 < parts.size()) return ingot::store(sum, values, count...);
          }
          store(row, column, values, count...);
        });
    });
  }
}

// A copy of the transpose, which lives until the next call with the same `use`.
template <int use, class T>
Matrix<T> turned_copy(const Turned<T>& x) {
  constexpr int64_t STRIP = 64;
  int64_t stride = odd_stride<T>(x.width), strips = (x.rows + STRIP - 1) / STRIP;
  T* to = scratch<T, use>(x.rows * stride);
  parallel(strips, STRIP * x.width, [&](int64_t begin, int64_t end) {
    copy_turned(x, begin * STRIP, std::min(end * STRIP, x.rows), to, stride);
  });
  return {to, x.rows, x.width, stride};
}

}  // namespace ingot
