// The k largest magnitudes of a block that lies in the first-level cache, exactly, in one pass and a half.
//
// A lower bound comes first: of the largest values of many small groups the k-th is no larger than the k-th of all. What
// reaches it are few candidates, among which the k-th is found by bisection of the integer that a magnitude is.
#pragma once

#include "places.hpp"

namespace nc::NC_ISA {

struct TopBuffers {
  alignas(64) int32_t magnitude[MAX_TILE + GROUP];  // of groups, then of candidates
  alignas(64) int32_t candidate[MAX_TILE + GROUP];  // their places
  PlaceBuffers places;
};

// How many of `vectors` vectors' numbers are above `limit`.
static inline int count_above(const int32_t* values, int vectors, int32_t limit) {
  const VI limits = all<VI>(limit);
  VI found = {};
  for (int v = 0; v < vectors; v++) found -= load<VI>(values + v * LANES) > limits;
  int sum = 0;
  for (int i = 0; i < LANES; i++) sum += found[i];
  return sum;
}

// The largest number with zeros below `lowest_bit` that at least k of the numbers reach; they are not negative.
static int32_t kth_largest(const int32_t* values, int vectors, int k, int lowest_bit) {
  int32_t found = 0;
  for (int bit = 30; bit >= lowest_bit; bit--) {
    const int32_t tried = found | int32_t(1) << bit;
    if (count_above(values, vectors, tried - 1) >= k) found = tried;
  }
  return found;
}

// What is not finite is the largest, all of it alike: what a NaN holds besides differs between machines.
static inline VI magnitude_at(const float* x, int vector) {
  return min(load<VI>(x + vector * LANES) & int32_t(MAGNITUDE), all<VI>(int32_t(INFINITE)));
}

// A number that at least k magnitudes of x reach.
static int32_t lower_bound(const float* x, int vectors, int k, TopBuffers& buffers) {
  constexpr int ENOUGH = 4;     // groups for each value that is kept
  constexpr int COARSE = 19;    // an exponent and four bits
  int together = vectors * LANES / (ENOUGH * k);
  if (together < 2) together = 1;
  int groups = 0;
  for (int v = 0; v < vectors; groups++) {
    const int stop = v + together < vectors ? v + together : vectors;
    VI top = magnitude_at(x, v++);
    for (; v < stop; v++) top = max(top, magnitude_at(x, v));
    store(buffers.magnitude + groups * LANES, top);
  }
  return kth_largest(buffers.magnitude, groups, k, together == 1 ? 0 : COARSE);
}

constexpr int PER_WORD = 64 / LANES;  // vectors whose lanes are the bits of a word

// One bit for each value of some vectors: which magnitudes reach `least`.
NC_INLINE uint64_t reached_bits(const float* x, int vectors, VI least) {
  uint64_t reached = 0;
#pragma GCC unroll 16
  for (int v = 0; v < PER_WORD; v++) {
    if (v == vectors) break;
#if defined(__AVX512F__)
    const unsigned bits = _mm512_cmpge_epi32_mask((__m512i)magnitude_at(x, v), (__m512i)least);
#else
    const unsigned bits = lane_bits(magnitude_at(x, v) >= least);
#endif
    reached |= uint64_t(bits) << v * LANES;
  }
  return reached;
}

// Calls found(place) for each value that reaches `least`, in order, until it says no.
template <class Found>
NC_INLINE bool each_reached(const float* x, int vectors, VI least, const Found& found) {
  for (int first = 0; first < vectors; first += PER_WORD) {
    const float* const here = x + first * LANES;
    uint64_t reached = vectors - first >= PER_WORD ? reached_bits(here, PER_WORD, least)
                                                   : reached_bits(here, vectors - first, least);
    for (; reached; reached &= reached - 1) {
      if (!found(first * LANES + __builtin_ctzll(reached))) return false;
    }
  }
  return true;
}

// All that reach `least`, in order; returns how many.
static int find_candidates(const float* x, int vectors, int32_t least, TopBuffers& buffers) {
  int found = 0;
  each_reached(x, vectors, all<VI>(least), [&](int place) {
    buffers.candidate[found++] = place;
    return true;
  });
  return found;
}

// Places (ascending) and values of the k largest of x, whose m values are followed by zeros up to a multiple of GROUP.
static void select_top(const float* x, int m, int k, TopBuffers& buffers, float* kept) {
  const int vectors = round_up(m) / LANES;
  const int found = find_candidates(x, vectors, lower_bound(x, vectors, k, buffers), buffers);
  for (int c = 0; c < found; c++) {
    const uint32_t magnitude = bits_of(x[buffers.candidate[c]]) & MAGNITUDE;
    buffers.magnitude[c] = int32_t(magnitude < INFINITE ? magnitude : INFINITE);
  }
  int filled = (found + LANES - 1) / LANES;
  for (int c = found; c < filled * LANES; c++) buffers.magnitude[c] = -1;
  const int32_t least = found == k ? 0 : kth_largest(buffers.magnitude, filled, k, 0);
  // of equal ones the first
  int equal = k - count_above(buffers.magnitude, filled, least);
  for (int c = 0, j = 0; j < k; c++) {
    const int32_t magnitude = buffers.magnitude[c];
    const bool taken = magnitude > least || (magnitude == least && equal-- > 0);
    buffers.places.place[j] = buffers.candidate[c];
    kept[j] = x[buffers.candidate[c]];
    j += taken;
  }
}

struct Top {
  using Buffers = TopBuffers;
  static constexpr bool IN_PLACE = false;
  int64_t size;
  int most;
  PlaceCode whole;

  explicit Top(const nc_transform& transform)
      : size(transform.size), most(int(transform.number)), whole(place_code(most, int(size))) {}

  PlaceCode code(int m) const { return m == size ? whole : place_code(count(m), m); }
  int count(int m) const { return m < most ? m : most; }
  int side_bytes(int m) const { return code(m).nbytes(); }

  void forward(const float* x, int m, float* kept, uint8_t* side, Buffers& buffers) const {
    select_top(x, m, count(m), buffers, kept);
    write_places(code(m), buffers.places, side);
  }

  // Everything else is zero; or NaN, where more of the block may have been lost than was kept.
  void inverse(const float* kept, const uint8_t* side, int m, float* out, Buffers& buffers) const {
    const PlaceCode places = code(m);
    const bool right = read_places(places, side, buffers.places);
    bool lost = true;
    for (int j = 0; lost && j < places.k; j++) lost = (bits_of(kept[j]) & MAGNITUDE) >= INFINITE;
    if (right && !lost) {
      __builtin_memset(out, 0, sizeof(float) * m);
    } else {
      for (int i = 0; i < m; i++) out[i] = float_of(QUIET_NAN);
    }
    for (int j = 0; right && j < places.k; j++) out[buffers.places.place[j]] = kept[j];
  }
};

}  // namespace nc::NC_ISA
