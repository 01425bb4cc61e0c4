// A block times its random signs and the Hadamard matrix, in the order of sums that all implementations share: neighbours
// first, then 2, 4, 8 ... values apart; a + b in the lower place, a - b in the upper one.
//
// A block goes through registers in panels of eight vectors, and what lies further apart than a panel in passes over
// the first-level cache.
#pragma once

#include "sink.hpp"

namespace nc::NC_ISA {

constexpr int PANEL = 8;  // vectors
constexpr int MAX_ROTATED = 4096;

struct PlainSum {
  VF operator()(VF a, VF b) const { return a + b; }
};

// A finite sum that is too large becomes the largest number.
struct CarefulSum {
  VF operator()(VF a, VF b) const { return plus(a, b); }
};

static inline VF negated_where(VF v, VU sign) { return (VF)((VU)v ^ sign); }

// The stage of lanes H apart.
template <int H, class Sum>
NC_INLINE VF mixed_lanes(VF v, const Sum& sum) {
  VI lane;
  VU upper;
  for (int i = 0; i < LANES; i++) {
    lane[i] = i ^ H;
    upper[i] = i & H ? SIGN : 0;
  }
  return sum(shuffled(v, v, lane), negated_where(v, upper));
}

template <class Sum>
NC_INLINE VF mixed_vector(VF v, const Sum& sum) {
  v = mixed_lanes<2>(mixed_lanes<1>(v, sum), sum);
  if constexpr (LANES > 4) v = mixed_lanes<4>(v, sum);
  if constexpr (LANES > 8) v = mixed_lanes<8>(v, sum);
  return v;
}

// The stages of V vectors, neighbours first.
template <int V, class Sum>
NC_INLINE void mixed_vectors(VF* v, const Sum& sum) {
#pragma GCC unroll 4
  for (int h = 1; h < V; h *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) {
      if (i & h) continue;
      const VF a = v[i], b = v[i + h];
      v[i] = sum(a, b);
      v[i + h] = sum(a, -b);
    }
  }
}

// V vectors that lie `apart` values from each other, from in(place) to out(place, vector).
template <int V, bool LANES_TOO, class In, class Out, class Sum>
NC_INLINE void mix(const In& in, const Out& out, int first, int apart, const Sum& sum) {
  VF v[V];
#pragma GCC unroll 8
  for (int i = 0; i < V; i++) v[i] = LANES_TOO ? mixed_vector(in(first + i * apart), sum) : in(first + i * apart);
  mixed_vectors<V>(v, sum);
#pragma GCC unroll 8
  for (int i = 0; i < V; i++) out(first + i * apart, v[i]);
}

template <int V, class In, class Out, class Sum>
static void mix_far(const In& in, const Out& out, int block, int apart, const Sum& sum) {
  for (int first = 0; first < block; first += V * apart) {
    for (int i = 0; i < apart; i += LANES) mix<V, false>(in, out, first + i, apart, sum);
  }
}

// The stages from `apart` on.
template <class In, class Out, class Sum>
static void mix_rest(const In& in, const Out& out, float* scratch, int block, int apart, const Sum& sum) {
  const auto keep = [=](int i, VF v) { store(scratch + i, v); };
  for (; block / apart > PANEL; apart *= PANEL) mix_far<PANEL>(in, keep, block, apart, sum);
  switch (block / apart) {
    case 2: return mix_far<2>(in, out, block, apart, sum);
    case 4: return mix_far<4>(in, out, block, apart, sum);
    default: return mix_far<8>(in, out, block, apart, sum);
  }
}

// All stages of a whole block; scratch has room for it.
template <class In, class Out, class Sum>
NC_INLINE void mix_block(const In& in, const Out& out, float* scratch, int block, const Sum& sum) {
  switch (block / LANES) {
    case 1: return mix<1, true>(in, out, 0, LANES, sum);
    case 2: return mix<2, true>(in, out, 0, LANES, sum);
    case 4: return mix<4, true>(in, out, 0, LANES, sum);
    case 8: return mix<8, true>(in, out, 0, LANES, sum);
  }
  const auto keep = [=](int i, VF v) { store(scratch + i, v); };
  for (int i = 0; i < block; i += PANEL * LANES) mix<PANEL, true>(in, keep, i, LANES, sum);
  mix_rest([=](int i) { return load<VF>(scratch + i); }, out, scratch, block, PANEL * LANES, sum);
}

// ---- a last block of fewer values: pieces whose sizes are powers of two, the largest first ---------------------------

static inline int log2_of(int power) { return __builtin_ctz(unsigned(power)); }

static inline float plus_one(float a, float b) { return plus(all<VF>(a), all<VF>(b))[0]; }

static void mix_piece(float* x, int size) {
  if (size >= GROUP) {
    mix_block([=](int i) { return load<VF>(x + i); }, [=](int i, VF v) { store(x + i, v); }, x, size, CarefulSum{});
    return;
  }
  for (int apart = 1; apart < size; apart *= 2) {
    for (int i = 0; i < size; i++) {
      if (i & apart) continue;
      const float a = x[i], b = x[i + apart];
      x[i] = plus_one(a, b);
      x[i + apart] = plus_one(a, -b);
    }
  }
}

// step(first, size) for each piece of `count` values, fewer than `block`.
template <class Step>
static void for_pieces(int count, int block, const Step& step) {
  int first = 0;
  for (int size = block / 2; size > 0; size /= 2) {
    if (!(count & size)) continue;
    step(first, size);
    first += size;
  }
}

// The power of two by which a piece is made smaller before it is mixed: whatever its size, what comes out is about as
// large as in a whole block.
static inline int exponent_before(int size, int block) { return (log2_of(block) + log2_of(size) + 1) / 2; }

static inline float turned(float v, uint32_t sign) { return float_of(bits_of(v) ^ sign); }

static void rotate_pieces(const nc_plan& plan, float* x, int count) {
  const int block = int(plan.block);
  for_pieces(count, block, [&](int first, int size) {
    const float factor = power_of_two(-exponent_before(size, block));
    for (int i = first; i < first + size; i++) x[i] = turned(x[i] * factor, plan.signs[i]);
    mix_piece(x + first, size);
  });
}

static void unrotate_pieces(const nc_plan& plan, float* x, int count) {
  const int block = int(plan.block);
  for_pieces(count, block, [&](int first, int size) {
    const VF factor = all<VF>(power_of_two(exponent_before(size, block) - log2_of(size)));
    mix_piece(x + first, size);
    for (int i = first; i < first + size; i++) {
      const VF v = all<VF>(x[i]);
      x[i] = turned(kept_finite(v * factor, is_finite(v))[0], plan.signs[i]);
    }
  });
}

// ---- chunks -----------------------------------------------------------------------------------------------------------

// x, whose first value begins a block, into `to`; both may be the same.
static void rotate(const nc_plan& plan, const float* x, int count, float* to) {
  const int block = int(plan.block), whole = count / block * block;
  const VF factor = all<VF>(power_of_two(-log2_of(block)));
  for (int b = 0; b < whole; b += block) {
    const auto in = [=, &plan](int i) { return negated_where(load<VF>(x + b + i) * factor, load<VU>(plan.signs + i)); };
    const auto out = [=](int i, VF v) { store(to + b + i, v); };
    mix_block(in, out, to + b, block, PlainSum{});
  }
  if (whole == count) return;
  if (x != to) __builtin_memcpy(to + whole, x + whole, sizeof(float) * (count - whole));
  rotate_pieces(plan, to + whole, count - whole);
}

// The inverse, of values that lie in scratch.
template <bool STREAMING, class Sum>
static void unrotate_whole(const nc_plan& plan, float* scratch, int count, float* to, const Sum& sum) {
  const int block = int(plan.block);
  for (int b = 0; b < count; b += block) {
    const auto in = [=](int i) { return load<VF>(scratch + b + i); };
    const auto out = [=, &plan](int i, VF v) { put<STREAMING>(to + b + i, negated_where(v, load<VU>(plan.signs + i))); };
    mix_block(in, out, scratch + b, block, sum);
  }
}

// careful: sums of finite numbers may be too large for float32.
template <bool STREAMING>
static void unrotate(const nc_plan& plan, float* scratch, int count, float* to, bool careful) {
  const int whole = count / int(plan.block) * int(plan.block);
  if (careful) {
    unrotate_whole<STREAMING>(plan, scratch, whole, to, CarefulSum{});
  } else {
    unrotate_whole<STREAMING>(plan, scratch, whole, to, PlainSum{});
  }
  if (whole == count) return;
  if (scratch != to) __builtin_memcpy(to + whole, scratch + whole, sizeof(float) * (count - whole));
  unrotate_pieces(plan, to + whole, count - whole);
}

}  // namespace nc::NC_ISA
