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
//   values   O = P V        AMX: values are the right operand, as they lie; or sums of rows
#include <cmath>

#include "attention.h"
#include "attention_gradient.h"

namespace ingot::kernels {

constexpr int CHUNK = 128, MOST_LANES = 64;

// Where the keys (or values) of the sequences lie.
template <class T>
struct Pool {
  Tensor owner;
  const T* first;
  int64_t page, of_page, of_row, of_head;  // page: rows that follow each other; strides

  Pool(const Tensor& x, bool paged) : owner(x) {
    if (x.dim() > 0 && x.stride(x.dim() - 1) != 1) owner = torch::stable::contiguous(x);
    first = data<T>(owner);
    int64_t d = paged;
    page = paged ? x.size(1) : std::max<int64_t>(x.size(0), 1);
    of_page = paged ? owner.stride(0) : 0;
    of_row = owner.stride(d);
    of_head = owner.stride(d + 1);
  }
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
    int64_t parts = threads == 1 ? 1 : std::min<int64_t>(4 * threads, units.size());
    std::vector<int64_t> bounds = shares(units, parts);
    parallel_for_dynamic(parts, [&](TaskQueue& queue) {
      for (int64_t p; queue.pop(p);) {
        int64_t begin = bounds[p], end = bounds[p + 1];
        Chunk<T> chunk;
        if (begin < end) locate(units[begin], 0, chunk);
        for (int64_t u = begin; u < end; u++)
          run_unit(units[u], chunk, u + 1 < end ? &units[u + 1] : nullptr);
      }
    });
  }

 private:
#if defined(__AMX_BF16__)
  static constexpr bool AMX = sizeof(T) == 2;
#else
  static constexpr bool AMX = false;
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

  // Where each part's units begin, so that all have about as many chunks.
  std::vector<int64_t> shares(const std::vector<Unit>& units, int64_t parts) const {
    auto cost = [&](const Unit& u) { return u.heads * u.chunks() * (lanes(u) + TILE_LANES); };
    int64_t total = 0, acc = 0;
    for (const Unit& u : units) total += cost(u);
    std::vector<int64_t> bounds{0};
    for (int64_t u = 0; u < int64_t(units.size()); u++) {
      while (int64_t(bounds.size()) < parts && acc * parts >= total * int64_t(bounds.size()))
        bounds.push_back(u);
      acc += cost(units[u]);
    }
    bounds.resize(parts, units.size());
    bounds.push_back(units.size());
    return bounds;
  }

  // `chunk` is the unit's first, and becomes the first of the next: whose keys are fetched from
  // memory while the ones before are worked on.
  void run_unit(const Unit& unit, Chunk<T>& chunk, const Unit* next) const {
    int64_t count = lanes(unit), size = State::size(count, shape_);
    float* memory = scratch<Scratch::ATTENTION_STATE, float>(2 * unit.heads * size);
    if (unit.chunks() == 0)
      for (int64_t h = 0; h < unit.heads; h++) clear(memory + h * size, count);
    float* parts = memory + unit.heads * size;
    const T* queries = prepared(unit, unit.head, unit.heads);
    for (int64_t c = 0; c < unit.chunks(); c++) {
      Chunk<T> then;
      if (c + 1 < unit.chunks()) locate(unit, c + 1, then);
      else if (next) locate(*next, 0, then);
      run_chunk(unit, unit.head, unit.heads, chunk, queries, c ? parts : memory, then);
      for (int64_t h = 0; h < unit.heads; h++) {
        State whole(memory + h * size, count);
        if (c) join(whole, State(parts + h * size, count), count);
        else begin(whole, count);
      }
      chunk = then;
    }
    for (int64_t h = 0; h < unit.heads; h++)
      finish(unit, unit.head + h, State(memory + h * size, count));
  }

  // What the queries of a block become before the first chunk.
  const T* prepared([[maybe_unused]] const Unit& unit, [[maybe_unused]] int64_t head,
                    [[maybe_unused]] int64_t heads) const {
#if defined(__AMX_BF16__)
    if constexpr (AMX) {
      int64_t size = packed_size(lanes(unit));
      bf16* to = scratch<Scratch::ATTENTION_PACKED_QUERIES, bf16>(heads * size);
      for (int64_t h = 0; h < heads; h++) pack_queries(unit, head + h, to + h * size);
      return to;
    }
#endif
    return nullptr;
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
    float* memory = scratch<Scratch::ATTENTION_CHUNK_STATES, float>(total);
    parallel_for_dynamic(tasks.size(), [&](TaskQueue& queue) {
      for (int64_t t; queue.pop(t);) {
        auto [u, head, c, at] = tasks[t];
        Chunk<T> chunk;
        locate(units[u], c, chunk);
        run_chunk(units[u], head, 1, chunk, prepared(units[u], head, 1), memory + at, {});
      }
    });
    for (size_t t = 0; t < tasks.size();) {
      auto [u, head, first, at] = tasks[t];
      int64_t count = lanes(units[u]);
      float* whole = scratch<Scratch::ATTENTION_STATE, float>(State::size(count, shape_));
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

  // The keys of a chunk that a lane sees, counted from the chunk's first.
  Range seen_here(const Unit& unit, int64_t lane, const Chunk<T>& chunk) const {
    const Sequence& seq = sequences_[unit.sequence];
    int64_t position = seq.keys - seq.queries + unit.begin + lane / shape_.group;
    Range range = seen(shape_, position, seq.keys);
    int64_t begin = std::clamp<int64_t>(range.begin - chunk.first, 0, CHUNK);
    return {begin, std::clamp<int64_t>(range.end - chunk.first, begin, CHUNK)};
  }

  // `queries` and `parts` have one after the other what belongs to each head.
  void run_chunk(const Unit& unit, int64_t head, int64_t heads, const Chunk<T>& chunk,
                 [[maybe_unused]] const T* queries, float* parts,
                 [[maybe_unused]] const Chunk<T>& then) const {
    int64_t count = lanes(unit), size = State::size(count, shape_);
#if defined(__AMX_BF16__)
    if constexpr (AMX) {
      if (count <= FEW) return few_chunk(unit, head, heads, chunk, queries, parts, then);
      for (int64_t h = 0; h < heads; h++)
        many_chunk(unit, head + h, chunk, queries + h * packed_size(count),
                   State(parts + h * size, count));
      return;
    }
#endif
    float* s = scratch<Scratch::ATTENTION_SCORES, float>(count * CHUNK);
    for (int64_t h = 0; h < heads; h++) {
      State part(parts + h * size, count);
      scores(unit, head + h, chunk, s);
      for (int64_t lane = 0; lane < count; lane++)
        weights(s + lane * CHUNK, seen_here(unit, lane, chunk), part.largest[lane], part.sum[lane]);
      values(unit, head + h, chunk, s, part.values);
    }
  }

  // Scores become weights, in place; 0 for keys that are not seen. Scores are from here on in powers of 2.
  void weights(float* s, Range here, float& largest_score, float& total) const {
    int64_t lo = here.begin, hi = here.end;
    Ints lane;
    for (int i = 0; i < WIDTH; i++) lane[i] = i;
    auto masked = [&](int64_t at, Floats score) {
      if (at >= lo && at + WIDTH <= hi) return score;
      Ints key = lane + int(at);
      return (key >= int(lo)) & (key < int(hi)) ? score : broadcast(-INF);
    };
    int64_t begin = lo / WIDTH * WIDTH, end = (hi + WIDTH - 1) / WIDTH * WIDTH;
    Floats most = broadcast(-INF), scale = broadcast(shape_.scale), sums{};
    for (int64_t at = begin; at < end; at += WIDTH)
      most = max(most, masked(at, load(s + at) * scale));
    largest_score = reduce_max(most);
    Floats shift = broadcast(std::max(largest_score, -3e38f));
    for (int64_t at = 0; at < begin; at += WIDTH) store(s + at, Floats{});
    for (int64_t at = begin; at < end; at += WIDTH) {
      Floats weight = exp2_nonpositive(masked(at, load(s + at) * scale - shift));
      sums += weight;
      store(s + at, weight);
    }
    for (int64_t at = end; at < CHUNK; at += WIDTH) store(s + at, Floats{});
    total = reduce_sum(sums);
  }

  // Of the first chunk, what joining it to an empty state would give.
  void begin(State whole, int64_t count) const {
    int64_t width = shape_.padded();
    for (int64_t lane = 0; lane < count; lane++)
      if (whole.largest[lane] == -INF)
        whole.sum[lane] = 0, std::fill_n(whole.values + lane * width, width, 0.0f);
  }

  void join(State whole, const State& part, int64_t count) const {
    int64_t width = shape_.padded();
    for (int64_t lane = 0; lane < count; lane++) {
      if (part.largest[lane] == -INF) continue;  // it saw nothing of this chunk
      float most = std::max(whole.largest[lane], part.largest[lane]);
      Floats a = exp2_nonpositive(broadcast(whole.largest[lane] - most));
      Floats b = exp2_nonpositive(broadcast(part.largest[lane] - most));
      whole.largest[lane] = most;
      whole.sum[lane] = whole.sum[lane] * a[0] + part.sum[lane] * b[0];
      float *to = whole.values + lane * width, *from = part.values + lane * width;
      for (int64_t at = 0; at < width; at += WIDTH)
        store(to + at, fma(load(from + at), b, load(to + at) * a));
    }
  }

  void finish(const Unit& unit, int64_t head, State state) const {
    for (int64_t lane = 0; lane < lanes(unit); lane++) {
      int64_t token = sequences_[unit.sequence].query + unit.begin + lane / shape_.group;
      int64_t of_group = head * shape_.group + lane % shape_.group;
      T* to = out_ + (token * shape_.heads + of_group) * shape_.width;
      const float* from = state.values + lane * shape_.padded();
      Floats scale = broadcast(state.sum[lane] > 0 ? 1.0f / state.sum[lane] : 0.0f);
#if defined(__AMX_BF16__)
      if constexpr (AMX) {
        put_side_by_side(from, scale, to);
        continue;
      }
#endif
      for_each_vector(shape_.width, [&](int64_t at, auto... tail) {
        store(to + at, load(from + at, tail...) * scale, tail...);
      });
    }
  }

  // Keys become columns, so that a vector is 16 keys and nothing is summed across it: with 64 channels
  // such sums would cost more than the products.
  void scores(const Unit& unit, int64_t head, const Chunk<T>& chunk, float* s) const {
    int64_t count = lanes(unit), padded = (chunk.keys + WIDTH - 1) / WIDTH * WIDTH;
    float* k = scratch<Scratch::ATTENTION_TRANSPOSED_KEYS, float>(shape_.width * CHUNK);
    for (int64_t key = 0; key < padded; key++) {
      const T* from = chunk.k[std::min(key, chunk.keys - 1)] + head * k_.of_head;
      for (int64_t at = 0; at < shape_.width; at++) k[at * CHUNK + key] = widen(from[at]);
    }
    for (int64_t lane = 0; lane < count; lane += LANES) {
      const T* q[LANES];  // past the end the last again, whose scores are not kept
      for (int i = 0; i < LANES; i++) q[i] = query(unit, head, std::min(lane + i, count - 1));
      for (int64_t key = 0; key < padded; key += VECTORS * WIDTH) {
        int64_t vectors = std::min<int64_t>(VECTORS, (padded - key) / WIDTH);
        Floats total[LANES][VECTORS] = {};
        for (int64_t at = 0; at < shape_.width; at++)
          accumulate_outer(total, [&](int i) { return widen(q[i][at]); },
                       [&](int64_t j) { return load(k + at * CHUNK + key + j * WIDTH); }, vectors);
        for (int i = 0; i < LANES && lane + i < count; i++)
          for (int64_t j = 0; j < vectors; j++)
            store(s + (lane + i) * CHUNK + key + j * WIDTH, total[i][j]);
      }
    }
  }

  void values(const Unit& unit, int64_t head, const Chunk<T>& chunk, const float* p,
              float* out) const {
    int64_t count = lanes(unit), width = shape_.width;
    for (int64_t lane = 0; lane < count; lane += LANES)
      for (int64_t at = 0; at < width; at += VECTORS * WIDTH) {
        int64_t vectors = std::min<int64_t>(VECTORS, (width - at + WIDTH - 1) / WIDTH);
        Floats total[LANES][VECTORS] = {};
        for (int64_t key = 0; key < chunk.keys; key++) {
          const T* v = chunk.v[key] + head * v_.of_head + at;
          accumulate_outer(
              total, [&](int i) { return p[std::min(lane + i, count - 1) * CHUNK + key]; },
              [&](int64_t j) {
                int64_t left = width - at - j * WIDTH;
                return left >= WIDTH ? load(v + j * WIDTH) : load(v + j * WIDTH, left);
              },
              vectors);
        }
        for (int i = 0; i < LANES && lane + i < count; i++)
          for (int64_t j = 0; j < vectors; j++)
            store(out + (lane + i) * shape_.padded() + at + j * WIDTH, total[i][j]);
      }
  }

  // As many sums as registers hold.
  static constexpr int LANES = WIDTH == 16 ? 4 : 2, VECTORS = 4;

  template <class Scalar, class Vector>
  static void accumulate_outer(Floats (&total)[LANES][VECTORS], const Scalar& scalar,
                           const Vector& vector, int64_t vectors) {
    Floats factors[LANES];
    for (int i = 0; i < LANES; i++) factors[i] = broadcast(scalar(i));
    auto add = [&](int64_t j) {
      Floats values = vector(j);
      for (int i = 0; i < LANES; i++) total[i][j] = fma(values, factors[i], total[i][j]);
    };
    if (vectors == VECTORS)
      for (int j = 0; j < VECTORS; j++) add(j);  // unrolled, so that the sums stay in registers
    else
      for (int64_t j = 0; j < vectors; j++) add(j);
  }

#if defined(__AMX_BF16__)
  // 16 keys, or values, where they lie if they lie evenly; else a copy, with zeros for the missing.
  Panel panel(const Pool<T>& pool, const T* const* rows, int64_t keys, int64_t head, int64_t key,
              bool paged, bf16* copy) const {
    int64_t count = std::clamp<int64_t>(keys - key, 0, TILE), bytes = shape_.width * sizeof(bf16);
    if (count == TILE && (!paged || pool.page % TILE == 0))
      return {rows[key] + head * pool.of_head, pool.of_row * int64_t(sizeof(bf16))};
    std::memset(copy, 0, TILE * bytes);
    for (int64_t r = 0; r < count; r++)
      std::memcpy(copy + r * shape_.width, rows[key + r] + head * pool.of_head, bytes);
    return {copy, bytes};
  }

  int64_t packed_size(int64_t count) const {
    if (count <= FEW) return shape_.padded() * FEW;
    return (count + TILE - 1) / TILE * packed_tile_size(shape_.width);
  }

  // The lanes' queries as right operands.
  void pack_queries(const Unit& unit, int64_t head, bf16* to) const {
    int64_t count = lanes(unit);
    if (count <= FEW) return pack_few_queries(unit, head, to);
    bf16* rows = scratch<Scratch::ATTENTION_QUERY_ROWS, bf16>(count * shape_.width);
    for (int64_t lane = 0; lane < count; lane++)
      std::memcpy(rows + lane * shape_.width, query(unit, head, lane), shape_.width * sizeof(bf16));
    Matrix<bf16> x(rows, count, shape_.width, shape_.width);
    for (int64_t lane = 0; lane < count; lane += TILE)
      pack_tile(x, lane, to + lane / TILE * packed_tile_size(shape_.width));
  }

  // AMX's right operand has pairs of k side by side: values, with keys as k, would have to be packed.
  // Instead they are taken as they lie. A pair is then two channels of one key, and a row of the left
  // operand has a key's weight at the even places and 0 at the odd ones, or the other way round: it
  // gives the even channels, or the odd ones. Eight lanes make 16 such rows.
  //
  // Scores come as (tile of lanes, key, lane), weights go as (eight lanes, 16 keys, row, pair).
  using Scores = float[CHUNK][TILE];
  using Weights = uint32_t[CHUNK / TILE][TILE][TILE];
  static constexpr int EIGHT = TILE / 2;

  void many_chunk(const Unit& unit, int64_t head, const Chunk<T>& chunk, const T* queries,
                  State part) const {
    TileConfig tile_state;
    int64_t count = lanes(unit), tiles_of_lanes = (count + TILE - 1) / TILE;
    bool paged = sequences_[unit.sequence].pages;
    Scores* s = scratch<Scratch::ATTENTION_SCORES, Scores>(tiles_of_lanes);
    Weights* p = scratch<Scratch::ATTENTION_PROBS, Weights>(2 * tiles_of_lanes);
    amx_scores(count, head, chunk, paged, queries, s);
    for (int64_t lane = 0; lane < count; lane += TILE) {
      int64_t rows = std::min<int64_t>(TILE, count - lane);
      weigh(unit, lane, rows, chunk, s[lane / TILE], part, p + lane / EIGHT);
    }
    amx_values(count, head, chunk, paged, p, part.values);
  }

  void amx_scores(int64_t count, int64_t head, const Chunk<T>& chunk, bool paged, const T* queries,
                  Scores* s) const {
    int64_t size = packed_tile_size(shape_.width);
    bf16* copies = scratch<Scratch::ATTENTION_PADDED_KEYS, bf16>(4 * TILE * shape_.width);
    auto block = [&]<int P, int Q>(int64_t key, int64_t tile) {
      Panel k[P];
      const bf16* q[Q];
      float* out[P][Q];
      for (int i = 0; i < Q; i++) q[i] = queries + (tile + i) * size;
      for (int p = 0; p < P; p++) {
        bf16* copy = copies + p * TILE * shape_.width;
        k[p] = panel(k_, chunk.k, chunk.keys, head, key + p * TILE, paged, copy);
        for (int i = 0; i < Q; i++) out[p][i] = s[tile + i][key + p * TILE];
      }
      tile_gemm<P, Q>(k, q, shape_.width, out, 64);
    };
    int64_t tile = 0;
    for (; (tile + 1) * TILE < count; tile += 2)
      for (int64_t key = 0; key < chunk.keys; key += 2 * TILE)
        block.template operator()<2, 2>(key, tile);
    for (; tile * TILE < count; tile++)
      for (int64_t key = 0; key < chunk.keys; key += 4 * TILE)
        block.template operator()<4, 1>(key, tile);
  }

  // As bf16 in the upper half of each word.
  static __m512i narrow_in_place(const float* from) {
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)narrow(load(from))), 16);
  }
  static void put_weights(__m512i upper, uint32_t (&to)[TILE][TILE], int64_t lane) {
    _mm512_store_si512(to[lane], _mm512_srli_epi32(upper, 16));
    _mm512_store_si512(to[EIGHT + lane], upper);
  }

  // All 16 lanes at a time, a key after the other. In the order of weights(): sums of the keys 16
  // apart, then these 16 folded.
  void weigh(const Unit& unit, int64_t first, int64_t rows, const Chunk<T>& chunk, Scores& s,
             State part, Weights* p) const {
    Ints lo{}, hi{};
    for (int64_t r = 0; r < rows; r++) {
      Range here = seen_here(unit, first + r, chunk);
      lo[r] = here.begin, hi[r] = here.end;
    }
    int64_t steps = (chunk.keys + TILE - 1) / TILE * TILE;
    bool masked = steps > chunk.keys;
    for (int64_t r = 0; r < rows; r++) masked |= lo[r] > 0 || hi[r] < chunk.keys;
    auto visible = [&](int64_t key, Floats score) {
      if (!masked) return score;
      return (lo <= int(key)) & (hi > int(key)) ? score : broadcast(-INF);
    };
    Floats scale = broadcast(shape_.scale), most[4] = {broadcast(-INF), broadcast(-INF), broadcast(-INF), broadcast(-INF)};
    for (int64_t key = 0; key < steps; key += 4)
      for (int i = 0; i < 4; i++)
        most[i] = max(most[i], visible(key + i, load(s[key + i]) * scale));
    Floats largest_scores = max(max(most[0], most[1]), max(most[2], most[3]));
    Floats shift = max(broadcast(-3e38f), largest_scores), sums[TILE];
    for (int i = 0; i < TILE; i++) {
      sums[i] = Floats{};
      for (int64_t key = i; key < steps; key += TILE) {
        Floats weight = exp2_nonpositive(visible(key, load(s[key]) * scale - shift));
        sums[i] += weight;
        store(s[key], weight);
      }
    }
    for (int half = TILE / 2; half; half /= 2)
      for (int i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
    store_part(part.largest + first, largest_scores, rows);
    store_part(part.sum + first, sums[0], rows);
    for (int64_t t = 0; t * TILE < steps; t++) {
      __m512i tile[TILE];
      for (int r = 0; r < TILE; r++) tile[r] = narrow_in_place(s[t * TILE + r]);
      interleave(tile);
      for (int r = 0; r < TILE; r++) put_weights(tile[r], p[r / EIGHT][t], r % EIGHT);
    }
  }
  static void store_part(float* to, Floats values, int64_t rows) {
    _mm512_mask_storeu_ps(to, (1u << rows) - 1, (__m512)values);
  }

  // P times eight lanes by Q times 32 channels.
  template <int P, int Q>
  static void value_products(const Weights* p, const Panel* v, int64_t count, int64_t at) {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int64_t t = 0; t < count; t++) {
      tile_load<4>(v[t].first + at, v[t].stride);
      tile_load<6>(p[0][t], 64);
      tile_dpbf16<0, 6, 4>();
      if constexpr (Q > 1) {
        tile_load<5>(v[t].first + at + TILE_DEPTH, v[t].stride);
        tile_dpbf16<1, 6, 5>();
      }
      if constexpr (P > 1) {
        tile_load<7>(p[1][t], 64);
        tile_dpbf16<Q, 7, 4>();
        if constexpr (Q > 1) tile_dpbf16<3, 7, 5>();
      }
    }
  }

  void amx_values(int64_t count, int64_t head, const Chunk<T>& chunk, bool paged, const Weights* p,
                  float* out) const {
    int64_t width = shape_.padded(), num = (chunk.keys + TILE - 1) / TILE;
    bf16* copies = scratch<Scratch::ATTENTION_PADDED_VALUES, bf16>(CHUNK * width);
    Panel v[CHUNK / TILE];
    for (int64_t t = 0; t < num; t++)
      v[t] = padded_panel(v_, chunk.v, chunk.keys, head, t * TILE, paged, copies + t * TILE * width);
    alignas(64) float products[4][TILE][TILE];
    auto block = [&]<int P, int Q>(int64_t lane, int64_t at) {
      float* to[P][Q];
      for (int i = 0; i < P * Q; i++) to[i / Q][i % Q] = products[i][0];
      value_products<P, Q>(p + lane / EIGHT, v, num, at);
      store_tiles<P, Q>(to, 64);
      for (int i = 0; i < P * Q; i++) {
        int64_t first = lane + i / Q * EIGHT;
        for (int64_t r = 0; r < std::min<int64_t>(EIGHT, count - first); r++) {
          float* row = out + (first + r) * width + at + i % Q * 2 * TILE;
          store(row, load(products[i][r]));
          store(row + TILE, load(products[i][EIGHT + r]));
        }
      }
    };
    for (int64_t lane = 0; lane < count; lane += 2 * EIGHT)
      for (int64_t at = 0; at < width; at += 2 * TILE_DEPTH) {
        bool two = lane + EIGHT < count, wide = at + TILE_DEPTH < width;
        if (two && wide) block.template operator()<2, 2>(lane, at);
        else if (two) block.template operator()<2, 1>(lane, at);
        else if (wide) block.template operator()<1, 2>(lane, at);
        else block.template operator()<1, 1>(lane, at);
      }
  }

  // The same in whole steps of 32 channels: a copy where there are fewer.
  Panel padded_panel(const Pool<T>& pool, const T* const* rows, int64_t keys, int64_t head,
                     int64_t key, bool paged, bf16* copy) const {
    int64_t width = shape_.padded();
    if (width == shape_.width) return panel(pool, rows, keys, head, key, paged, copy);
    std::memset(copy, 0, TILE * width * sizeof(bf16));
    for (int64_t r = 0; r < std::min<int64_t>(TILE, keys - key); r++)
      std::memcpy(copy + r * width, rows[key + r] + head * pool.of_head, shape_.width * sizeof(bf16));
    return {copy, width * int64_t(sizeof(bf16))};
  }

  // A decode step has few lanes, so tiles are cut to them: 0 holds the scores of 16 keys for FEW lanes,
  // 1 their queries, 2-5 sums of values and 6 weights in two rows a lane, 7 keys or values. All heads
  // of 16 keys are read together: they lie side by side in memory, which then sees one stream.
  static constexpr int FEW = 4;
  using FewScores = float[CHUNK][FEW];
  using FewWeights = uint32_t[CHUNK / TILE][2 * FEW][TILE];

  // (step, pair of channels, lane, 2)
  void pack_few_queries(const Unit& unit, int64_t head, bf16* to) const {
    std::fill_n(to, packed_size(FEW), bf16{});
    for (int64_t lane = 0; lane < lanes(unit); lane++) {
      const bf16* from = query(unit, head, lane);
      for (int64_t at = 0; at < shape_.width; at++) to[(at / 2 * FEW + lane) * 2 + at % 2] = from[at];
    }
  }

  void few_chunk(const Unit& unit, int64_t head, int64_t heads, const Chunk<T>& chunk,
                 const T* queries, float* parts, const Chunk<T>& then) const {
    constexpr int NARROW = FEW * sizeof(float);
    TileConfig tile_state({16, 16, 2 * FEW, 2 * FEW, 2 * FEW, 2 * FEW, 2 * FEW, 16},
                  {NARROW, NARROW, 64, 64, 64, 64, 64, 64});
    int64_t count = lanes(unit), size = State::size(count, shape_);
    FewScores* s = scratch<Scratch::ATTENTION_SCORES, FewScores>(heads);
    FewWeights* p = scratch<Scratch::ATTENTION_PROBS, FewWeights>(heads);
    few_scores(unit, head, heads, chunk, queries, s, then);
    for (int64_t h = 0; h < heads; h++)
      few_weights(unit, chunk, s[h], State(parts + h * size, count), p[h]);
    few_values(unit, head, heads, chunk, p, parts, then);
  }

  // Asks memory for 16 rows of the next chunk while the same ones of this chunk are worked on. A tile
  // at a time: 0.77 of plain reading, where a burst for each head gave 0.7, and not asking 0.6.
  static void fetch(const T* const* rows, int64_t keys, int64_t key, int64_t offset) {
    for (int64_t end = std::min(key + TILE, keys); key < end; key++)
      _mm_prefetch(rows[key] + offset, _MM_HINT_T1);
  }

  void few_scores(const Unit& unit, int64_t head, int64_t heads, const Chunk<T>& chunk,
                  const T* queries, FewScores* s, const Chunk<T>& then) const {
    bool paged = sequences_[unit.sequence].pages;
    bf16* copy = scratch<Scratch::ATTENTION_PADDED_KEYS, bf16>(TILE * shape_.padded());
    for (int64_t key = 0; key < chunk.keys; key += TILE)
      for (int64_t h = 0; h < heads; h++) {
        Panel k = padded_panel(k_, chunk.k, chunk.keys, head + h, key, paged, copy);
        const bf16* q = queries + h * packed_size(FEW);
        tile_zero<0>();
        for (int64_t at = 0; at < shape_.padded(); at += TILE_DEPTH) {
          tile_load<1>(q + at * FEW, FEW * 4);
          tile_load<7>(k.first + at, k.stride);
          tile_dpbf16<0, 7, 1>();
          fetch(then.k, then.keys, key, (head + h) * k_.of_head + at);
        }
        tile_store<0>(s[h][key], sizeof s[h][key]);
      }
  }

  // A vector is four lanes of four keys. In the order of weights(): sums of the keys 16 apart, then
  // these 16 folded.
  void few_weights(const Unit& unit, const Chunk<T>& chunk, FewScores& s, State part,
                   FewWeights& p) const {
    constexpr int KEYS = TILE / FEW;
    int64_t count = lanes(unit), steps = (chunk.keys + TILE - 1) / TILE * TILE;
    Ints key_of{}, lo{}, hi{};
    bool masked = steps > chunk.keys;
    for (int i = 0; i < TILE; i++) {
      Range here = seen_here(unit, std::min<int64_t>(i % FEW, count - 1), chunk);
      key_of[i] = i / FEW, lo[i] = here.begin, hi[i] = here.end;
      masked |= here.begin > 0 || here.end < chunk.keys;
    }
    auto visible = [&](int64_t first, Floats score) {
      if (!masked) return score;
      Ints key = key_of + int(first);
      return (lo <= key) & (hi > key) ? score : broadcast(-INF);
    };
    Floats scale = broadcast(shape_.scale), most = broadcast(-INF), sums[FEW] = {};
    for (int64_t key = 0; key < steps; key += KEYS)
      most = max(most, visible(key, load(s[key]) * scale));
    most = max(most, (Floats)_mm512_shuffle_f32x4((__m512)most, (__m512)most, 0x4e));
    most = max(most, (Floats)_mm512_shuffle_f32x4((__m512)most, (__m512)most, 0xb1));
    Floats shift = max(broadcast(-3e38f), most);
    for (int64_t t = 0; t * TILE < steps; t++) {
      Floats w[FEW];
      for (int i = 0; i < FEW; i++) {
        int64_t key = t * TILE + i * KEYS;
        w[i] = exp2_nonpositive(visible(key, load(s[key]) * scale - shift));
        sums[i] += w[i];
      }
      put_few_weights(w, p[t]);
    }
    Floats total = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    total += (Floats)_mm512_shuffle_f32x4((__m512)total, (__m512)total, 0x4e);
    total += (Floats)_mm512_shuffle_f32x4((__m512)total, (__m512)total, 0xb1);
    store_part(part.largest, most, count);
    store_part(part.sum, total, count);
  }

  // From four times (key, lane) to (lane, key), each twice: see put_weights.
  static void put_few_weights(const Floats (&w)[FEW], uint32_t (&to)[2 * FEW][TILE]) {
    auto low = [](Floats a, Floats b) { return _mm512_unpacklo_ps((__m512)a, (__m512)b); };
    auto high = [](Floats a, Floats b) { return _mm512_unpackhi_ps((__m512)a, (__m512)b); };
    __m512 a = low(w[0], w[1]), b = low(w[2], w[3]), c = high(w[0], w[1]), d = high(w[2], w[3]);
    __m512 lanes[FEW] = {_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee),
                         _mm512_shuffle_ps(c, d, 0x44), _mm512_shuffle_ps(c, d, 0xee)};
    // A lane has now keys 0 4 8 12, 1 5 9 13, ...
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int r = 0; r < FEW; r++) {
      __m512 sorted = _mm512_permutexvar_ps(order, lanes[r]);
      __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)narrow((Floats)sorted)), 16);
      _mm512_store_si512(to[r], _mm512_srli_epi32(upper, 16));
      _mm512_store_si512(to[FEW + r], upper);
    }
  }

  void few_values(const Unit& unit, int64_t head, int64_t heads, const Chunk<T>& chunk,
                  const FewWeights* p, float* parts, const Chunk<T>& then) const {
    int64_t count = lanes(unit), width = shape_.padded(), num = (chunk.keys + TILE - 1) / TILE;
    int64_t each = width / TILE_DEPTH, size = State::size(count, shape_);
    bool paged = sequences_[unit.sequence].pages;
    bf16* copies = scratch<Scratch::ATTENTION_PADDED_VALUES, bf16>(heads * CHUNK * width);
    Panel* v = scratch<Scratch::ATTENTION_VALUE_PANELS, Panel>(heads * num);
    for (int64_t i = 0; i < heads * num; i++)
      v[i] = padded_panel(v_, chunk.v, chunk.keys, head + i / num, i % num * TILE, paged,
                          copies + i * TILE * width);
    // The sums of N times 32 channels, of one head or of several.
    auto block = [&]<int N>(int64_t first) {
      tile_zero<2>(), tile_zero<3>(), tile_zero<4>(), tile_zero<5>();
      for (int64_t t = 0; t < num; t++) {
        auto step = [&]<int i>() {
          int64_t h = (first + i) / each, at = (first + i) % each * TILE_DEPTH;
          if (i == 0 || at == 0) tile_load<6>(p[h][t], 64);
          tile_load<7>(v[h * num + t].first + at, v[h * num + t].stride);
          tile_dpbf16<2 + i, 6, 7>();
          fetch(then.v, then.keys, t * TILE, (head + h) * v_.of_head + at);
        };
        step.template operator()<0>();
        if constexpr (N > 1) step.template operator()<1>();
        if constexpr (N > 2) step.template operator()<2>();
        if constexpr (N > 3) step.template operator()<3>();
      }
      auto keep = [&]<int i>() {
        alignas(64) float sums[2 * FEW][TILE];
        tile_store<2 + i>(sums, 64);
        int64_t h = (first + i) / each, at = (first + i) % each * TILE_DEPTH;
        for (int64_t lane = 0; lane < count; lane++) {
          float* to = State(parts + h * size, count).values + lane * width + at;
          store(to, load(sums[lane]));
          store(to + TILE, load(sums[FEW + lane]));
        }
      };
      keep.template operator()<0>();
      if constexpr (N > 1) keep.template operator()<1>();
      if constexpr (N > 2) keep.template operator()<2>();
      if constexpr (N > 3) keep.template operator()<3>();
    };
    int64_t first = 0;
    for (; first + 4 <= heads * each; first += 4) block.template operator()<4>(first);
    for (; first < heads * each; first++) block.template operator()<1>(first);
  }

  // Of every 32 channels the even ones came first.
  void put_side_by_side(const float* from, Floats scale, bf16* to) const {
    for (int64_t at = 0; at < shape_.width; at += TILE_DEPTH) {
      Floats even = load(from + at) * scale, odd = load(from + at + TILE) * scale;
      __m512i low = _mm512_cvtepu16_epi32((__m256i)narrow(even));
      __m512i high = _mm512_cvtepu16_epi32((__m256i)narrow(odd));
      int64_t left = shape_.width - at;
      __mmask32 mask = left >= TILE_DEPTH ? ~0u : (1u << left) - 1;
      _mm512_mask_storeu_epi16(to + at, mask, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
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
  check(starts.count >= 1 && starts[0] == 0 && starts[starts.count - 1] == q.size(0),
       "cu_seqlens must run from 0 to the number of queries");
  int64_t num = starts.count - 1, keys_so_far = 0;
  check(!lengths || lengths->count == num, "context_lens must have one entry per sequence");
  std::vector<Sequence> found(num);
  for (int64_t b = 0; b < num; b++) {
    int64_t queries = starts[b + 1] - starts[b], keys = lengths ? (*lengths)[b] : queries;
    check(queries >= 0 && keys >= queries, "cu_seqlens must be non-decreasing, and a sequence must have at least as many keys as queries");
    if (table) {
      int64_t used = (keys + k.size(1) - 1) / std::max<int64_t>(k.size(1), 1);
      check(k.size(1) > 0 || keys == 0, "block size must be positive");
      check(used <= pages_each, "block_table must have enough blocks for all keys");
      for (int64_t p = 0; p < used; p++) {
        int64_t page = table[b * pages_each + p];
        check(page >= 0 && page < num_pages, "block_table has a block index out of range");
      }
    }
    found[b] = {starts[b], queries, keys, keys_so_far, table ? table + b * pages_each : nullptr};
    keys_so_far += keys;
    check(keys_so_far >= keys, "context_lens is too large");
  }
  check(table || keys_so_far == k.size(0), "k must have one row per key of the sequences");
  return found;
}

// The arguments of a call, found to fit together.
struct Call {
  std::vector<int64_t> table;
  std::vector<Sequence> sequences;
  Shape shape;
  double scale;
  bool paged;

  Call(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
       const std::optional<Tensor>& context_lens, const std::optional<Tensor>& block_table,
       bool causal, std::optional<int64_t> window, std::optional<double> given_scale)
      : paged(block_table.has_value()) {
    check(q.dim() == 3 && k.dim() == 3 + paged && v.dim() == k.dim(), "q must be (T, N, H), k and v (T, K, H), or (blocks, block size, K, H) with a block_table");
    check(std::ranges::equal(k.sizes(), v.sizes()), "k and v must have the same shape");
    check(cu_seqlens.dim() == 1 && (!context_lens || context_lens->dim() == 1), "cu_seqlens and context_lens must be vectors");
    check(!paged || (context_lens && block_table->dim() == 2), "block_table must be a matrix and requires context_lens");
    check(!window || *window > 0, "window must be positive");
    int64_t d = k.dim(), heads = q.size(1), kv_heads = k.size(d - 2), width = q.size(2);
    check(k.size(d - 1) == width && kv_heads > 0 && heads % kv_heads == 0 && width > 0 && heads > 0,
         "q and k must have the same head size, and the number of query heads must be a multiple of the key-value heads");
    check_same_dtype(k, q), check_same_dtype(v, q);
    Integers starts(cu_seqlens);
    std::optional<Integers> lengths;
    if (context_lens) lengths.emplace(*context_lens);
    int64_t each = 0;
    if (paged) {
      Integers pages(*block_table);
      each = block_table->size(1);
      check(block_table->size(0) == starts.count - 1, "block_table must have one row per sequence");
      table.resize(pages.count + 1);
      for (int64_t i = 0; i < pages.count; i++) table[i] = pages[i];
    }
    scale = given_scale ? *given_scale : 1.0 / std::sqrt(double(width));
    float in_powers_of_2 = float(scale) * 1.44269504f;
    shape = {heads, kv_heads, width, heads / kv_heads, causal, window.value_or(0), in_powers_of_2};
    const int64_t* pages = paged ? table.data() : nullptr;
    sequences = sequences_of(q, k, starts, lengths, k.size(0), each, pages);
  }
};

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
                 const std::optional<Tensor>& context_lens, const std::optional<Tensor>& block_table,
                 bool causal, std::optional<int64_t> window, std::optional<double> scale) {
  return dispatch_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    Call call(q, k, v, cu_seqlens, context_lens, block_table, causal, window, scale);
    Tensor out = allocate_like(q);
    Attention<T>(q, k, v, call.paged, call.shape, std::move(call.sequences), out).run();
    return out;
  });
}

Tensors attention_backward(NeedsGrad needs_grad, Tensors grads, const Tensor& q, const Tensor& k,
                           const Tensor& v, const Tensor& cu_seqlens,
                           const std::optional<Tensor>& context_lens,
                           const std::optional<Tensor>& block_table, bool causal,
                           std::optional<int64_t> window, std::optional<double> scale) {
  check(needs_grad.size() == 9 && grads.size() == 1, "expected one flag per argument and one gradient");
  return dispatch_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    Call call(q, k, v, cu_seqlens, context_lens, block_table, causal, window, scale);
    check(!call.paged, "the gradient is not implemented for a block_table");
    check_same_dtype(grads[0], q);
    check(std::ranges::equal(grads[0].sizes(), q.sizes()), "the gradient must have the shape of the output");
    Tensors all{allocate_like(q), allocate_like(k), allocate_like(v)}, found;
    AttentionTensors<T> of{Heads<T>(q), Heads<T>(k), Heads<T>(v)};
    AttentionTensors<T> to{Heads<T>(all[0]), Heads<T>(all[1]), Heads<T>(all[2])};
    AttentionGradient<T>(of, Heads<T>(grads[0]), to, call.shape, call.scale, call.sequences).run();
    for (size_t i = 0; i < all.size(); i++)
      if (needs_grad[i]) found.push_back(all[i]);
    return found;
  });
}

}  // namespace ingot::kernels

REGISTER_OP(attention)
REGISTER_BACKWARD(attention)
