// Attention over packed sequences: one kernel for training, prefill and decode.
//
// A unit of work is a block of queries of one sequence, for some of its key-value heads. Its lanes
// are all (query, head of the group) pairs. Keys are walked in chunks of 128 from the sequence's own
// start. What a chunk gives a lane (largest score, sum of weights, weighted values) depends on that
// lane's query and that chunk's keys alone; the chunks are then joined in their order. So a result
// does not depend on the other lanes, on how many queries came together, on where the keys lie, nor
// on who computed which chunk.
//
//   scores   S = Q K^T      AMX: keys are the left operand, as they lie; or dot products
//   weights  P = exp(scale S - largest), 0 for keys a lane does not see
//   values   O = P V        AMX: values with pairs of keys side by side; or sums of rows
#include <cmath>

#include "matmul.h"

namespace ingot::kernels {

constexpr int CHUNK = 128, MOST_LANES = 64;

// Where the keys (or values) of the sequences lie.
template <class T>
struct Pool {
  Tensor owner;
  const T* first;
  int64_t rows, page, of_page, of_row, of_head;  // page: rows that follow each other; strides

  Pool(const Tensor& x, bool paged) : owner(x) {
    if (x.dim() > 0 && x.stride(x.dim() - 1) != 1) owner = torch::stable::contiguous(x);
    first = data<T>(owner);
    int64_t d = paged;
    page = paged ? x.size(1) : std::max<int64_t>(x.size(0), 1);
    rows = x.size(0);
    of_page = paged ? owner.stride(0) : 0;
    of_row = owner.stride(d);
    of_head = owner.stride(d + 1);
  }
};

struct Sequence {
  int64_t query, queries, keys;  // first query and how many of each
  int64_t first_key;             // where keys are not paged
  const int64_t* pages;          // where they are
};

struct Shape {
  int64_t heads, kv_heads, width, group;
  bool causal;
  int64_t window;  // 0: all
  float scale;

  int64_t padded() const { return (width + 31) / 32 * 32; }
};

// Queries [begin, end) of a sequence, for key-value heads [head, head + heads).
struct Unit {
  int64_t sequence, begin, end, head, heads;
  int64_t first_chunk, last_chunk;

  int64_t chunks() const { return last_chunk - first_chunk; }
};

// Where the rows of a chunk lie, of key-value head 0.
template <class T>
struct Chunk {
  int64_t first = 0, keys = 0;
  const T *k[CHUNK], *v[CHUNK];
};

// The keys a query at `position` sees.
struct Range {
  int64_t begin, end;
};
inline Range seen(const Shape& shape, int64_t position, int64_t keys) {
  Range range{0, shape.causal ? position + 1 : keys};
  if (shape.window) {
    range.begin = std::max<int64_t>(0, position - shape.window + 1);
    range.end = std::min(range.end, position + shape.window);
  }
  return range;
}

// One chunk's part of a block, or several of them joined.
struct State {
  float* largest;  // (lanes)
  float* sum;      // (lanes)
  float* values;   // (lanes, padded width)

  static int64_t size(int64_t lanes, const Shape& shape) { return lanes * (2 + shape.padded()); }
  State(float* memory, int64_t lanes)
      : largest(memory), sum(memory + lanes), values(memory + 2 * lanes) {}
};

template <class T>
class Attention {
 public:
  Attention(const Tensor& q, const Tensor& k, const Tensor& v, bool paged, Shape shape,
            std::vector<Sequence> sequences, const Tensor& out)
      : owner_(q.stride(2) == 1 ? q : torch::stable::contiguous(q)),
        q_(data<T>(owner_)),
        k_(k, paged),
        v_(v, paged),
        shape_(shape),
        sequences_(std::move(sequences)),
        out_(data<T>(out)) {}

  void run() const {
    std::vector<Unit> units = cut();
    int64_t threads = torch::stable::get_num_threads(), chunks = 0;
    for (const Unit& unit : units) chunks += unit.chunks();
    if (int64_t(units.size()) < 2 * threads && chunks >= 4 * threads && few_lanes(units))
      return run_by_chunks(units);
    std::vector<int64_t> bounds = shares(units, threads);
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      [[maybe_unused]] Session session;
      Chunk<T> chunk;
      if (bounds[begin] < bounds[end]) locate(units[bounds[begin]], 0, chunk);
      for (int64_t u = bounds[begin]; u < bounds[end]; u++)
        run_unit(units[u], chunk, u + 1 < bounds[end] ? &units[u + 1] : nullptr);
    });
  }

 private:
#if defined(__AMX_BF16__)
  static constexpr bool AMX = sizeof(T) == 2;
  struct None {};
  using Session = std::conditional_t<AMX, Tiles, None>;
#else
  static constexpr bool AMX = false;
  struct Session {};
#endif

  int64_t lanes(const Unit& unit) const { return (unit.end - unit.begin) * shape_.group; }
  bool few_lanes(const std::vector<Unit>& units) const {
    return std::ranges::all_of(units, [&](const Unit& u) { return lanes(u) <= TILE_LANES; });
  }
  static constexpr int64_t TILE_LANES = 16;

  std::vector<Unit> cut() const {
    std::vector<Unit> units;
    int64_t most = std::max<int64_t>(1, MOST_LANES / shape_.group);
    for (int64_t s = 0; s < int64_t(sequences_.size()); s++) {
      const Sequence& seq = sequences_[s];
      // A decode step takes all heads of a sequence, whose keys lie side by side in memory.
      bool small = seq.queries * shape_.group <= TILE_LANES;
      bool together = small && sequences_.size() >= 2 * torch::stable::get_num_threads();
      int64_t heads = together ? shape_.kv_heads : 1;
      for (int64_t head = 0; head < shape_.kv_heads; head += heads)
        for (int64_t q = 0; q < seq.queries; q += most)
          units.push_back(unit(s, q, std::min(q + most, seq.queries), head, heads));
    }
    return units;
  }

  Unit unit(int64_t s, int64_t begin, int64_t end, int64_t head, int64_t heads) const {
    int64_t keys = sequences_[s].keys, offset = keys - sequences_[s].queries;
    Range first = seen(shape_, offset + begin, keys), last = seen(shape_, offset + end - 1, keys);
    return {s, begin, end, head, heads, first.begin / CHUNK, (last.end + CHUNK - 1) / CHUNK};
  }

  // Where each thread's units begin, so that all have about as many chunks.
  std::vector<int64_t> shares(const std::vector<Unit>& units, int64_t threads) const {
    auto cost = [&](const Unit& u) { return u.heads * u.chunks() * (lanes(u) + TILE_LANES); };
    int64_t total = 0, so_far = 0;
    for (const Unit& u : units) total += cost(u);
    std::vector<int64_t> bounds{0};
    for (int64_t u = 0; u < int64_t(units.size()); u++) {
      while (int64_t(bounds.size()) < threads && so_far * threads >= total * int64_t(bounds.size()))
        bounds.push_back(u);
      so_far += cost(units[u]);
    }
    bounds.resize(threads, units.size());
    bounds.push_back(units.size());
    return bounds;
  }

  // `chunk` is the unit's first, and becomes the first of the next: whose keys are fetched from
  // memory while the ones before are worked on.
  void run_unit(const Unit& unit, Chunk<T>& chunk, const Unit* next) const {
    int64_t count = lanes(unit), size = State::size(count, shape_);
    float* memory = scratch<float, 10>((unit.heads + 1) * size);
    for (int64_t h = 0; h < unit.heads; h++) clear(memory + h * size, count);
    State part(memory + unit.heads * size, count);
    for (int64_t c = 0; c < unit.chunks(); c++) {
      Chunk<T> then;
      if (c + 1 < unit.chunks()) locate(unit, c + 1, then);
      else if (next) locate(*next, 0, then);
      for (int64_t h = 0; h < unit.heads; h++) {
        run_chunk(unit, unit.head + h, chunk, part, count > TILE_LANES ? nullptr : &then);
        join(State(memory + h * size, count), part, count);
      }
      chunk = then;
    }
    for (int64_t h = 0; h < unit.heads; h++)
      finish(unit, unit.head + h, State(memory + h * size, count));
  }

  void clear(float* state, int64_t count) const {
    std::fill_n(state, count, -INF);
    std::fill_n(state + count, State::size(count, shape_) - count, 0.0f);
  }

  void locate(const Unit& unit, int64_t index, Chunk<T>& chunk) const {
    const Sequence& seq = sequences_[unit.sequence];
    int64_t last = seq.keys - seq.queries + unit.end - 1;
    int64_t end = std::min(seen(shape_, last, seq.keys).end, seq.keys);
    chunk.first = (unit.first_chunk + index) * CHUNK;
    chunk.keys = std::min<int64_t>(CHUNK, end - chunk.first);
    rows(k_, seq, chunk.first, chunk.keys, chunk.k);
    rows(v_, seq, chunk.first, chunk.keys, chunk.v);
  }

  static void rows(const Pool<T>& pool, const Sequence& seq, int64_t first, int64_t count,
                   const T** to) {
    const T* row = pool.first + (seq.first_key + first) * pool.of_row;
    int64_t page = 0, left = seq.pages ? 0 : count;
    if (seq.pages) page = first / pool.page;
    for (int64_t key = 0; key < count; key++, left--, row += pool.of_row) {
      if (left == 0) {
        int64_t slot = key ? 0 : first % pool.page;
        row = pool.first + seq.pages[page++] * pool.of_page + slot * pool.of_row;
        left = pool.page - slot;
      }
      to[key] = row;
    }
  }

  // Few lanes, many keys: the chunks are shared out among the threads and joined afterwards.
  void run_by_chunks(const std::vector<Unit>& units) const {
    std::vector<std::array<int64_t, 4>> tasks;  // unit, head, chunk, where its state is
    int64_t total = 0;
    for (int64_t u = 0; u < int64_t(units.size()); u++)
      for (int64_t h = 0; h < units[u].heads; h++)
        for (int64_t c = 0; c < units[u].chunks(); c++) {
          tasks.push_back({u, units[u].head + h, c, total});
          total += State::size(lanes(units[u]), shape_);
        }
    float* memory = scratch<float, 11>(total);
    torch::stable::parallel_for(0, tasks.size(), 1, [&](int64_t begin, int64_t end) {
      [[maybe_unused]] Session session;
      for (int64_t t = begin; t < end; t++) {
        auto [u, head, c, at] = tasks[t];
        Chunk<T> chunk;
        locate(units[u], c, chunk);
        run_chunk(units[u], head, chunk, State(memory + at, lanes(units[u])), nullptr);
      }
    });
    for (size_t t = 0; t < tasks.size();) {
      auto [u, head, first, at] = tasks[t];
      int64_t count = lanes(units[u]);
      float* whole = scratch<float, 10>(State::size(count, shape_));
      clear(whole, count);
      for (int64_t c = 0; c < units[u].chunks(); c++, t++)
        join(State(whole, count), State(memory + tasks[t][3], count), count);
      finish(units[u], head, State(whole, count));
    }
  }

  const T* query(const Unit& unit, int64_t head, int64_t lane) const {
    int64_t token = sequences_[unit.sequence].query + unit.begin + lane / shape_.group;
    int64_t of_group = head * shape_.group + lane % shape_.group;
    return q_ + token * owner_.stride(0) + of_group * owner_.stride(1);
  }

  void run_chunk(const Unit& unit, int64_t head, const Chunk<T>& chunk, State part,
                 const Chunk<T>* then) const {
    const Sequence& seq = sequences_[unit.sequence];
    int64_t count = lanes(unit), offset = seq.keys - seq.queries;
    float* s = scratch<float, 12>(count * CHUNK);
    scores(unit, head, chunk, s);
    for (int64_t lane = 0; lane < count; lane++) {
      Range range = seen(shape_, offset + unit.begin + lane / shape_.group, seq.keys);
      int64_t lo = std::clamp<int64_t>(range.begin - chunk.first, 0, CHUNK);
      int64_t hi = std::clamp<int64_t>(range.end - chunk.first, lo, CHUNK);
      weights(s + lane * CHUNK, lo, hi, part.largest[lane], part.sum[lane]);
    }
    values(unit, head, chunk, s, part.values, then);
  }

  // Scores become weights, in place; 0 outside of [lo, hi). Scores are from here on in powers of 2.
  void weights(float* s, int64_t lo, int64_t hi, float& largest_score, float& total) const {
    Ints lane;
    for (int i = 0; i < WIDTH; i++) lane[i] = i;
    auto masked = [&](int64_t at, Floats score) {
      if (at >= lo && at + WIDTH <= hi) return score;
      Ints key = lane + int(at);
      return (key >= int(lo)) & (key < int(hi)) ? score : all(-INF);
    };
    int64_t begin = lo / WIDTH * WIDTH, end = (hi + WIDTH - 1) / WIDTH * WIDTH;
    Floats most = all(-INF), scale = all(shape_.scale), sums{};
    for (int64_t at = begin; at < end; at += WIDTH)
      most = max(most, masked(at, load(s + at) * scale));
    largest_score = largest(most);
    Floats shift = all(std::max(largest_score, -3e38f));
    for (int64_t at = 0; at < begin; at += WIDTH) store(s + at, Floats{});
    for (int64_t at = begin; at < end; at += WIDTH) {
      Floats weight = exp2_of_negative(masked(at, fma(load(s + at), scale, -shift)));
      sums += weight;
      store(s + at, weight);
    }
    for (int64_t at = end; at < CHUNK; at += WIDTH) store(s + at, Floats{});
    total = sum(sums);
  }

  void join(State whole, const State& part, int64_t count) const {
    int64_t width = shape_.padded();
    for (int64_t lane = 0; lane < count; lane++) {
      if (part.largest[lane] == -INF) continue;  // it saw nothing of this chunk
      float most = std::max(whole.largest[lane], part.largest[lane]);
      float a = std::exp2(whole.largest[lane] - most), b = std::exp2(part.largest[lane] - most);
      whole.largest[lane] = most;
      whole.sum[lane] = whole.sum[lane] * a + part.sum[lane] * b;
      float *to = whole.values + lane * width, *from = part.values + lane * width;
      for (int64_t at = 0; at < width; at += WIDTH)
        store(to + at, fma(load(from + at), all(b), load(to + at) * all(a)));
    }
  }

  void finish(const Unit& unit, int64_t head, State state) const {
    for (int64_t lane = 0; lane < lanes(unit); lane++) {
      int64_t token = sequences_[unit.sequence].query + unit.begin + lane / shape_.group;
      int64_t of_group = head * shape_.group + lane % shape_.group;
      T* to = out_ + (token * shape_.heads + of_group) * shape_.width;
      const float* from = state.values + lane * shape_.padded();
      Floats scale = all(state.sum[lane] > 0 ? 1.0f / state.sum[lane] : 0.0f);
      along(shape_.width, [&](int64_t at, auto... count) {
        store(to + at, load(from + at, count...) * scale, count...);
      });
    }
  }

  void scores(const Unit& unit, int64_t head, const Chunk<T>& chunk, float* s) const {
#if defined(__AMX_BF16__)
    if constexpr (AMX) return amx_scores(unit, head, chunk, s);
#endif
    constexpr int M = 2, N = 4;
    int64_t count = lanes(unit), offset = head * k_.of_head;
    for (int64_t key = 0; key < chunk.keys; key += N) {
      const T* k[N];
      for (int n = 0; n < N; n++) k[n] = chunk.k[std::min(key + n, chunk.keys - 1)] + offset;
      for (int64_t lane = 0; lane < count; lane += M) {
        const T* q[M];
        for (int m = 0; m < M; m++) q[m] = query(unit, head, std::min(lane + m, count - 1));
        float out[M][N];
        dots(q, k, shape_.width, out);
        for (int m = 0; m < M && lane + m < count; m++)
          for (int n = 0; n < N; n++) s[(lane + m) * CHUNK + key + n] = out[m][n];
      }
    }
  }

  void values(const Unit& unit, int64_t head, const Chunk<T>& chunk, const float* p, float* out,
              [[maybe_unused]] const Chunk<T>* then) const {
#if defined(__AMX_BF16__)
    if constexpr (AMX) return amx_values(unit, head, chunk, p, out, then);
#endif
    int64_t count = lanes(unit), width = shape_.padded();
    std::fill_n(out, count * width, 0.0f);
    for (int64_t key = 0; key < chunk.keys; key++) {
      const T* v = chunk.v[key] + head * v_.of_head;
      for (int64_t lane = 0; lane < count; lane++) {
        Floats weight = all(p[lane * CHUNK + key]);
        float* to = out + lane * width;
        along(shape_.width, [&](int64_t at, auto... n) {
          store(to + at, fma(load(v + at, n...), weight, load(to + at)));
        });
      }
    }
  }

#if defined(__AMX_BF16__)
  // 16 keys as a left operand: where they lie, if they lie evenly; else a copy, zeros for the missing.
  Panel panel(const Chunk<T>& chunk, int64_t head, int64_t key, bool paged, bf16* copy) const {
    int64_t count = std::clamp<int64_t>(chunk.keys - key, 0, TILE), bytes = shape_.width * sizeof(bf16);
    if (count == TILE && (!paged || k_.page % TILE == 0))
      return {chunk.k[key] + head * k_.of_head, k_.of_row * int64_t(sizeof(bf16))};
    std::memset(copy, 0, TILE * bytes);
    for (int64_t r = 0; r < count; r++)
      std::memcpy(copy + r * shape_.width, chunk.k[key + r] + head * k_.of_head, bytes);
    return {copy, bytes};
  }

  // The lanes' queries as the right operand.
  const bf16* packed_queries(const Unit& unit, int64_t head) const {
    int64_t count = lanes(unit), size = packed_tile_size(shape_.width);
    bf16* rows = scratch<bf16, 13>(count * shape_.width);
    bf16* to = scratch<bf16, 14>((count + TILE - 1) / TILE * size);
    for (int64_t lane = 0; lane < count; lane++)
      std::memcpy(rows + lane * shape_.width, query(unit, head, lane), shape_.width * sizeof(bf16));
    Matrix<bf16> x(rows, count, shape_.width, shape_.width);
    for (int64_t lane = 0; lane < count; lane += TILE) pack_tile(x, lane, to + lane / TILE * size);
    return to;
  }

  void amx_scores(const Unit& unit, int64_t head, const Chunk<T>& chunk, float* s) const {
    bool paged = sequences_[unit.sequence].pages;
    int64_t count = lanes(unit), size = packed_tile_size(shape_.width);
    const bf16* queries = packed_queries(unit, head);
    bf16* copies = scratch<bf16, 15>(4 * TILE * shape_.width);
    alignas(64) float products[4][TILE][TILE];
    auto block = [&]<int P, int Q>(int64_t key, int64_t lane) {
      Panel k[P];
      const bf16* q[Q];
      float* out[P][Q];
      for (int p = 0; p < P; p++) {
        k[p] = panel(chunk, head, key + p * TILE, paged, copies + p * TILE * shape_.width);
        for (int q = 0; q < Q; q++) out[p][q] = products[p * Q + q][0];
      }
      for (int i = 0; i < Q; i++) q[i] = queries + (lane / TILE + i) * size;
      tiles<P, Q>(k, q, shape_.width, out, 64);
      for (int p = 0; p < P; p++)
        for (int i = 0; i < Q; i++)
          put_transposed(products[p * Q + i], s + (lane + i * TILE) * CHUNK + key + p * TILE,
                         std::min<int64_t>(TILE, count - lane - i * TILE));
    };
    int64_t lane = 0;
    for (; lane + TILE < count; lane += 2 * TILE)
      for (int64_t key = 0; key < chunk.keys; key += 2 * TILE)
        block.template operator()<2, 2>(key, lane);
    for (; lane < count; lane += TILE)
      for (int64_t key = 0; key < chunk.keys; key += 4 * TILE)
        block.template operator()<4, 1>(key, lane);
  }

  static void put_transposed(const float (&from)[TILE][TILE], float* to, int64_t rows) {
    __m512i tile[TILE];
    for (int r = 0; r < TILE; r++) tile[r] = _mm512_load_si512(from[r]);
    transpose(tile);
    for (int64_t r = 0; r < rows; r++) _mm512_store_si512(to + r * CHUNK, tile[r]);
  }

  void fetch(const bf16* from) const {
    for (int64_t at = 0; at < shape_.width; at += 32) _mm_prefetch(from + at, _MM_HINT_T1);
  }

  // Two rows of values with their elements side by side, 16 channels to a tile; zeros for no row.
  static void interleave(const bf16* a, const bf16* b, int64_t width, bf16* to) {
    const __m512i low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35,
        3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t at = 0; at < width; at += 32, to += 2 * TILE * TILE_DEPTH) {
      __mmask32 mask = width - at >= 32 ? ~0u : (1u << (width - at)) - 1;
      __m512i x = _mm512_maskz_loadu_epi16(a ? mask : 0, a + at);
      __m512i y = _mm512_maskz_loadu_epi16(b ? mask : 0, b + at);
      _mm512_store_si512(to, _mm512_permutex2var_epi16(x, low, y));
      _mm512_store_si512(to + TILE * TILE_DEPTH, _mm512_permutex2var_epi16(x, high, y));
    }
  }

  // Values as the right operand: (step of 32 keys, 16 channels, pair of keys, channel, 2).
  const bf16* packed_values(int64_t head, const Chunk<T>& chunk, const Chunk<T>* then) const {
    int64_t width = shape_.padded(), offset = head * v_.of_head;
    bf16* to = scratch<bf16, 16>(CHUNK * width);
    for (int64_t key = 0; key < (chunk.keys + 31) / 32 * 32; key += 2) {
      const bf16* a = key < chunk.keys ? chunk.v[key] + offset : nullptr;
      const bf16* b = key + 1 < chunk.keys ? chunk.v[key + 1] + offset : nullptr;
      int64_t step = key / TILE_DEPTH, pair = key % TILE_DEPTH / 2;
      interleave(a, b, shape_.width, to + (step * width + pair) * TILE_DEPTH);
      for (int64_t k = key; then && k < std::min(key + 2, then->keys); k++)
        fetch(then->k[k] + head * k_.of_head), fetch(then->v[k] + offset);
    }
    return to;
  }

  void amx_values(const Unit& unit, int64_t head, const Chunk<T>& chunk, const float* p, float* out,
                  const Chunk<T>* then) const {
    int64_t count = lanes(unit), width = shape_.padded(), steps = (chunk.keys + 31) / 32;
    const bf16* v = packed_values(head, chunk, then);
    alignas(64) bf16 left[2][TILE][CHUNK];
    auto block = [&]<int P, int Q>(int64_t lane, int64_t at) {
      Panel weights[P];
      const bf16* values[Q];
      float* to[P][Q];
      alignas(64) float products[P * Q][TILE][TILE];
      for (int i = 0; i < P; i++) weights[i] = {left[i][0], CHUNK * sizeof(bf16)};
      for (int q = 0; q < Q; q++) values[q] = v + (at / TILE + q) * TILE * TILE_DEPTH;
      for (int i = 0; i < P * Q; i++) to[i / Q][i % Q] = products[i][0];
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
      for (int64_t s = 0; s < steps; s++) {
        tile_products<P, Q>(weights, values, 1);
        for (int i = 0; i < P; i++) weights[i].first += TILE_DEPTH;
        for (int q = 0; q < Q; q++) values[q] += width * TILE_DEPTH;
      }
      store_tiles<P, Q>(to, 64);
      for (int i = 0; i < P * Q; i++)
        for (int r = 0; r < std::min<int64_t>(TILE, count - lane - i / Q * TILE); r++)
          std::memcpy(out + (lane + i / Q * TILE + r) * width + at + i % Q * TILE, products[i][r], 64);
    };
    for (int64_t lane = 0; lane < count; lane += 2 * TILE) {
      int64_t rows = std::min<int64_t>(2 * TILE, count - lane);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t at = 0; at < steps * TILE_DEPTH; at += WIDTH)
          store(left[r / TILE][r % TILE] + at, load(p + (lane + r) * CHUNK + at));
      for (int64_t at = 0; at < width;) {
        if (rows > TILE) block.template operator()<2, 2>(lane, at), at += 2 * TILE;
        else if (at + 4 * TILE <= width) block.template operator()<1, 4>(lane, at), at += 4 * TILE;
        else block.template operator()<1, 2>(lane, at), at += 2 * TILE;
      }
    }
  }
#endif

  Tensor owner_;
  const T* q_;
  Pool<T> k_, v_;
  Shape shape_;
  std::vector<Sequence> sequences_;
  T* out_;
};

// The sequences, once all that is said about them has been found to be true.
std::vector<Sequence> sequences_of(const Tensor& q, const Tensor& k, const Integers& starts,
                                   const std::optional<Integers>& lengths, int64_t num_pages,
                                   int64_t pages_each, const int64_t* table) {
  need(starts.count >= 1 && starts[0] == 0 && starts[starts.count - 1] == q.size(0),
       "cu_seqlens from 0 to the number of queries");
  int64_t num = starts.count - 1, keys_so_far = 0;
  need(!lengths || lengths->count == num, "as many context_lens as sequences");
  std::vector<Sequence> found(num);
  for (int64_t b = 0; b < num; b++) {
    int64_t queries = starts[b + 1] - starts[b], keys = lengths ? (*lengths)[b] : queries;
    need(queries >= 0 && keys >= queries, "no fewer keys than queries");
    if (table) {
      int64_t used = (keys + k.size(1) - 1) / std::max<int64_t>(k.size(1), 1);
      need(k.size(1) > 0 || keys == 0, "pages of some size");
      need(used <= pages_each, "pages for all keys");
      for (int64_t p = 0; p < used; p++) {
        int64_t page = table[b * pages_each + p];
        need(page >= 0 && page < num_pages, "pages of the pool");
      }
    }
    found[b] = {starts[b], queries, keys, keys_so_far, table ? table + b * pages_each : nullptr};
    keys_so_far += keys;
    need(keys_so_far >= keys, "a sensible number of keys");
  }
  need(table || keys_so_far == k.size(0), "as many keys as the sequences have");
  return found;
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
                 const std::optional<Tensor>& context_lens, const std::optional<Tensor>& block_table,
                 bool causal, std::optional<int64_t> window, std::optional<double> scale) {
  bool paged = block_table.has_value();
  need(q.dim() == 3 && k.dim() == 3 + paged && v.dim() == k.dim(), "q, k, v of right dimensions");
  need(std::ranges::equal(k.sizes(), v.sizes()), "k and v of one shape");
  need(cu_seqlens.dim() == 1 && (!context_lens || context_lens->dim() == 1), "vectors of lengths");
  need(!paged || (context_lens && block_table->dim() == 2), "context_lens and a table of pages");
  need(!window || *window > 0, "a window of some size");
  int64_t d = k.dim(), heads = q.size(1), kv_heads = k.size(d - 2), width = q.size(2);
  need(k.size(d - 1) == width && kv_heads > 0 && heads % kv_heads == 0 && width > 0 && heads > 0,
       "heads and channels that fit");
  return with_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    need_like(k, q), need_like(v, q);
    Integers starts(cu_seqlens);
    std::optional<Integers> lengths;
    if (context_lens) lengths.emplace(*context_lens);
    std::vector<int64_t> table;
    int64_t each = 0;
    if (paged) {
      Integers pages(*block_table);
      each = block_table->size(1);
      need(block_table->size(0) == starts.count - 1, "a row of pages for each sequence");
      table.resize(pages.count + 1);
      for (int64_t i = 0; i < pages.count; i++) table[i] = pages[i];
    }
    float score_scale = scale ? float(*scale) : 1.0f / std::sqrt(float(width));
    score_scale *= 1.44269504f;  // powers of 2
    Shape shape{heads, kv_heads, width, heads / kv_heads, causal, window.value_or(0), score_scale};
    auto sequences = sequences_of(q, k, starts, lengths, k.size(0), each, paged ? table.data() : nullptr);
    Tensor out = made_like(q);
    Attention<T>(q, k, v, paged, shape, std::move(sequences), out).run();
    return out;
  });
}

}  // namespace ingot::kernels

OP(attention)
