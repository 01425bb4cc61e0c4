// A tile of the output: T vectors that go through k = 0, 1, ... together, so that their chains of roundings overlap.
#pragma once

#include "matmul_kernels.hpp"
#include "matmul_round.hpp"
#include "philox.hpp"

namespace nc::NC_ISA {

// Which rounding of a step this is: each has random bits of its own, under the stream 8 * step + slot.
enum Slot { PRODUCT = 0, TERM = 1, SUM = 2, GAIN = 3, CARRY = 4, SLOTS = 8 };

// Nearest rounding, in float32 or float64. ODD: sums are rounded to odd before.
template <class Real, bool ODD>
struct NearestTile {
  using V = typename Lanes<Real>::V;
  static constexpr int ROWS = 4, VECTORS = 2, COUNT = ROWS * VECTORS;
  static constexpr int COLUMNS = VECTORS * Lanes<Real>::COUNT;
  bool careful;

  NearestTile(const nc_accumulator& accumulator, const nc_matrices&, const MatmulItem&, int64_t)
      : careful(accumulator.careful) {}

  void draw(int64_t, Slot) {}
  V round(const Rounder<Real>& rounder, V x, int) const {
    if (rounder.number.exact) return x;
    const V rounded = rounder.nearest(x);
    return careful ? rounder.with_specials(x, rounded) : rounded;
  }
  V round_sum(const Rounder<Real>& rounder, V a, V b, int t) const {
    if constexpr (ODD) {
      return round(rounder, odd_sum(a, b), t);
    } else {
      return round(rounder, a + b, t);
    }
  }
};

// Stochastic rounding: a row of the 128 columns whose random bits are drawn together. In the numbering of random bits
// rows are padded to whole spans.
template <class Real>
struct StochasticTile {
  using V = typename Lanes<Real>::V;
  static constexpr int ROWS = 1, COLUMNS = NOISE_SPAN, VECTORS = NOISE_SPAN / Lanes<Real>::COUNT, COUNT = VECTORS;
  uint64_t seed, group;
  alignas(64) uint32_t noise[NOISE_SPAN];

  StochasticTile(const nc_accumulator& accumulator, const nc_matrices& matrices, const MatmulItem& item, int64_t row)
      : seed(accumulator.seed),
        group(uint64_t(item.batch * matrices.m + row) * uint64_t((matrices.n + NOISE_SPAN - 1) / NOISE_SPAN) +
              uint64_t(item.column / NOISE_SPAN)) {}

  auto random(int t) const {
    if constexpr (sizeof(Real) == 8) {
      return load<VUHalf>(noise + t * Lanes<Real>::COUNT);
    } else {
      return load<VU>(noise + t * Lanes<Real>::COUNT);
    }
  }

  void draw(int64_t step, Slot slot) { noise_of_group({seed, uint64_t(step * SLOTS + slot)}, group, noise); }
  V round(const Rounder<Real>& rounder, V x, int t) const {
    return rounder.number.exact ? x : stochastic(rounder, x, random(t));
  }
  V round_sum(const Rounder<Real>& rounder, V a, V b, int t) const {
    if constexpr (sizeof(Real) == 8) {
      return round(rounder, odd_sum(a, b), t);
    } else {
      const V sum = a + b;
      if (__builtin_expect(is_inexact(a, b, sum), false)) return stochastic_long_sum(rounder.number, a, b, random(t));
      return round(rounder, sum, t);
    }
  }
};

// A running sum of T vectors, and with Kahan's method what it still owes.
template <class Tile>
struct Running {
  typename Tile::V sum[Tile::COUNT], owed[Tile::COUNT];

  void clear() {
    for (int t = 0; t < Tile::COUNT; t++) sum[t] = owed[t] = typename Tile::V{};
  }
};

template <class Tile, bool KAHAN, class Rounder>
NC_INLINE void add_terms(Tile& tile, const Rounder& rounder, Running<Tile>& to, const typename Tile::V* terms,
                         int64_t step) {
  using V = typename Tile::V;
  if (!KAHAN) {
    tile.draw(step, SUM);
#pragma GCC unroll 8
    for (int t = 0; t < Tile::COUNT; t++) to.sum[t] = tile.round_sum(rounder, to.sum[t], terms[t], t);
    return;
  }
  V before[Tile::COUNT], term[Tile::COUNT];
  tile.draw(step, TERM);
#pragma GCC unroll 8
  for (int t = 0; t < Tile::COUNT; t++) term[t] = tile.round_sum(rounder, terms[t], -to.owed[t], t);
  tile.draw(step, SUM);
#pragma GCC unroll 8
  for (int t = 0; t < Tile::COUNT; t++) {
    before[t] = to.sum[t];
    to.sum[t] = tile.round_sum(rounder, before[t], term[t], t);
  }
  tile.draw(step, GAIN);
#pragma GCC unroll 8
  for (int t = 0; t < Tile::COUNT; t++) to.owed[t] = tile.round_sum(rounder, to.sum[t], -before[t], t);
  tile.draw(step, CARRY);
#pragma GCC unroll 8
  for (int t = 0; t < Tile::COUNT; t++) to.owed[t] = tile.round_sum(rounder, to.owed[t], -term[t], t);
}

// What a tile reads: rows of a as they lie, and the panel of b, packed. A row past the end repeats the last one.
template <class Tile, class Real>
struct Operands {
  const float* a[Tile::ROWS];
  int64_t a_column;
  const Real* panel;

  inline __attribute__((always_inline)) void products(const nc_accumulator& accumulator, Tile& tile,
                                                      const Rounder<Real>& rounder, int64_t k,
                                                      typename Tile::V* p) const {
    using V = typename Tile::V;
    const Real* const b = panel + k * Tile::COLUMNS;
    tile.draw(k, PRODUCT);
#pragma GCC unroll 4
    for (int r = 0; r < Tile::ROWS; r++) {
      const V x = all<V>(Real(a[r][k * a_column]));
#pragma GCC unroll 8
      for (int v = 0; v < Tile::VECTORS; v++) {
        const V y = load<V>(b + v * Lanes<Real>::COUNT);
        const V product = accumulator.multiply == NC_MOGAMI ? mogami_product<Real>(x, y) : x * y;
        p[r * Tile::VECTORS + v] = tile.round(rounder, product, r * Tile::VECTORS + v);
      }
    }
  }
};

template <class Tile, class Real, bool KAHAN>
struct TileWork {
  using V = typename Tile::V;
  const nc_accumulator& accumulator;
  const Rounder<Real> product, sum, outer;
  const int64_t k;
  Running<Tile> total;

  TileWork(const nc_accumulator& accumulator, int64_t k)
      : accumulator(accumulator), product(accumulator.product), sum(accumulator.sum), outer(accumulator.outer), k(k) {}

  // Not inlined: its loop has then all registers to itself, in every order of sums.
  __attribute__((noinline)) void add_range(Tile& tile, const Operands<Tile, Real>& operands, int64_t begin, int64_t end,
                                           Running<Tile>& to) const {
    Running<Tile> running = to;
    V terms[Tile::COUNT];
    for (int64_t i = begin; i < end; i++) {
      operands.products(accumulator, tile, product, i, terms);
      add_terms<Tile, KAHAN>(tile, sum, running, terms, i);
    }
    to = running;
  }

  void sequential(Tile& tile, const Operands<Tile, Real>& operands) { add_range(tile, operands, 0, k, total); }

  void blocked(Tile& tile, const Operands<Tile, Real>& operands) {
    Running<Tile> part;
    int64_t step = k;
    for (int64_t begin = 0; begin < k; begin += accumulator.block, step++) {
      part.clear();
      const int64_t end = k - begin < accumulator.block ? k : begin + accumulator.block;
      add_range(tile, operands, begin, end, part);
      add_terms<Tile, KAHAN>(tile, outer, total, part.sum, step);
    }
  }

  // A counter in binary: when bit i falls, the sums of 2^i neighbours are added. What is left at the end is added from
  // the smallest.
  void pairwise(Tile& tile, const Operands<Tile, Real>& operands, Running<Tile>* stack) {
    int64_t step = k;
    int depth = 0;
    const auto merge = [&] {
      depth--;
      add_terms<Tile, false>(tile, sum, stack[depth - 1], stack[depth].sum, step++);
    };
    for (int64_t i = 0; i < k; i++) {
      stack[depth].clear();
      add_range(tile, operands, i, i + 1, stack[depth++]);
      for (int64_t done = i + 1; done % 2 == 0; done /= 2) merge();
    }
    while (depth > 1) merge();
    if (depth == 1) total = stack[0];
  }

  void run(Tile& tile, const Operands<Tile, Real>& operands, Running<Tile>* stack) {
    total.clear();
    if (accumulator.order == NC_SEQUENTIAL) sequential(tile, operands);
    if (accumulator.order == NC_BLOCKED) blocked(tile, operands);
    if (accumulator.order == NC_PAIRWISE) pairwise(tile, operands, stack);
  }
};

constexpr int MAX_DEPTH = 65;  // of pairwise sums

template <class Tile, class Real, bool KAHAN>
struct Worker {
  static int64_t panel_bytes(int64_t k) { return (k * Tile::COLUMNS * int64_t(sizeof(Real)) + 63) / 64 * 64; }
  static int64_t scratch_bytes(int64_t k) { return panel_bytes(k) + MAX_DEPTH * int64_t(sizeof(Running<Tile>)); }

  static void pack(const nc_matrices& matrices, const MatmulItem& item, Real* panel) {
    const int64_t rest = matrices.n - item.column, columns = rest < Tile::COLUMNS ? rest : Tile::COLUMNS;
    const float* const b = matrices.b + item.batch * matrices.b_batch + item.column * matrices.b_column;
    for (int64_t k = 0; k < matrices.k; k++) {
      Real* const row = panel + k * Tile::COLUMNS;
      for (int64_t j = 0; j < columns; j++) row[j] = Real(b[k * matrices.b_row + j * matrices.b_column]);
      for (int64_t j = columns; j < Tile::COLUMNS; j++) row[j] = 0;
    }
  }

  static void write(const nc_matrices& matrices, const MatmulItem& item, int64_t row, const Running<Tile>& total) {
    const int64_t rest = matrices.n - item.column, columns = rest < Tile::COLUMNS ? rest : Tile::COLUMNS;
    for (int r = 0; r < Tile::ROWS && row + r < item.row + item.rows; r++) {
      alignas(64) float values[Tile::COLUMNS];
      for (int v = 0; v < Tile::VECTORS; v++) {
        const auto value = total.sum[r * Tile::VECTORS + v];
        Lanes<Real>::store_floats(values + v * Lanes<Real>::COUNT, value);
      }
      float* const out = matrices.out + item.batch * matrices.out_batch + (row + r) * matrices.out_row;
      for (int64_t j = 0; j < columns; j++) {
        // a NaN has one pattern
        out[(item.column + j) * matrices.out_column] = values[j] != values[j] ? float_of(QUIET_NAN) : values[j];
      }
    }
  }

  static void work(const nc_accumulator& accumulator, const nc_matrices& matrices, const MatmulItem& item,
                   void* scratch) {
    Real* const panel = static_cast<Real*>(scratch);
    Running<Tile>* const stack =
        reinterpret_cast<Running<Tile>*>(static_cast<uint8_t*>(scratch) + panel_bytes(matrices.k));
    pack(matrices, item, panel);
    TileWork<Tile, Real, KAHAN> tile_work(accumulator, matrices.k);
    const int64_t last = item.row + item.rows - 1;
    for (int64_t row = item.row; row <= last; row += Tile::ROWS) {
      Tile tile(accumulator, matrices, item, row);
      Operands<Tile, Real> operands;
      operands.a_column = matrices.a_column;
      operands.panel = panel;
      for (int r = 0; r < Tile::ROWS; r++) {
        const int64_t here = row + r < last ? row + r : last;
        operands.a[r] = matrices.a + item.batch * matrices.a_batch + here * matrices.a_row;
      }
      tile_work.run(tile, operands, stack);
      write(matrices, item, row, tile_work.total);
    }
  }
};

}  // namespace nc::NC_ISA
