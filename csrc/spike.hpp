// The few largest values of each block apart: see src/narrowcast/codecs/spike.py.
#pragma once

#include "top.hpp"

namespace nc::NC_ISA {

constexpr int MAX_SPIKES = 16;

struct SpikeBuffers {
  alignas(64) int32_t magnitude[MAX_TILE + GROUP];
};

// The first place of the largest number, which is not negative; takes it out.
static int take_largest(int32_t* magnitude, int vectors) {
  VI top = load<VI>(magnitude);
  for (int v = 1; v < vectors; v++) top = max(top, load<VI>(magnitude + v * LANES));
  const int32_t largest = largest_lane(top);
  int place = 0;
  while (magnitude[place] != largest) place++;
  magnitude[place] = -1;
  return place;
}

// The places of the k largest, ascending, one after another.
static void find_spikes(const float* x, int vectors, int k, SpikeBuffers& buffers, int32_t* place) {
  for (int v = 0; v < vectors; v++) store(buffers.magnitude + v * LANES, magnitude_at(x, v));
  for (int s = 0; s < k; s++) {
    const int32_t found = take_largest(buffers.magnitude, vectors);
    int at = s;
    for (; at > 0 && place[at - 1] > found; at--) place[at] = place[at - 1];
    place[at] = found;
  }
}

// Of each lane the two largest numbers that came by.
struct TwoLargest {
  VI first = all<VI>(-1), second = all<VI>(-1);

  void add(VI number) {
    second = max(second, min(first, number));
    first = max(first, number);
  }

  // The k-th largest of all of them, which at least k of the numbers reach.
  int32_t kth(int k) const {
    VI lane, here = first, next = second;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (; k > 1; k--) {
      const VI largest = here == all<VI>(int32_t(largest_lane(here)));
      const VI taken = lane == all<VI>(int32_t(__builtin_ctz(lane_bits(largest))));
      here = taken ? next : here;
      next = taken ? all<VI>(-1) : next;
    }
    return largest_lane(here);
  }
};

// The places of exactly k bits of two words, in order, without a branch that depends on where they are.
static inline void places_of(uint64_t low, uint64_t high, int k, int32_t* place) {
  for (int s = 0; s < k; s++) {
    const bool is_low = low != 0;
    place[s] = __builtin_ctzll(is_low ? low : high) + (is_low ? 0 : 64);
    low &= low - 1;
    high = is_low ? high : high & (high - 1);
  }
}

// The same where exactly k values reach the k-th of the lanes' largest ones, which where k is small is so but for ties;
// else false, and `place` holds anything. Nothing in it depends on the values but that.
static inline bool find_few_spikes(const float* x, int vectors, int k, const TwoLargest& top, int32_t* place) {
  const VI least = all<VI>(top.kth(k));
  if (vectors == 2 * PER_WORD) {
    const uint64_t low = reached_bits(x, PER_WORD, least), high = reached_bits(x + 64, PER_WORD, least);
    if (__builtin_popcountll(low) + __builtin_popcountll(high) != k) return false;
    places_of(low, high, k, place);
    return true;
  }
  int found = 0;
  return each_reached(x, vectors, least, [&](int here) {
    if (found == k) return false;
    place[found++] = here;
    return true;
  });
}

// bfloat16 as a cast has it: what is finite stays finite.
static inline uint16_t narrowed(float value) {
  const uint32_t bits = bits_of(value), size = bits & MAGNITUDE;
  if (size >= INFINITE) return size > INFINITE ? QUIET_NAN >> 16 : uint16_t(bits >> 16);
  const uint32_t rounded = (size + 0x7fff + (size >> 16 & 1)) >> 16, largest = (INFINITE >> 16) - 1;
  return uint16_t((rounded < largest ? rounded : largest) | (bits & SIGN) >> 16);
}

struct Spike {
  using Buffers = SpikeBuffers;
  static constexpr bool IN_PLACE = true;  // as many values as before
  int64_t size;
  int most, bits;

  explicit Spike(const nc_transform& transform)
      : size(transform.size), most(int(transform.number)), bits(32 - __builtin_clz(unsigned(size - 1))) {}

  int count(int m) const { return m; }
  int spikes(int m) const { return m < most ? m : most; }
  int side_bytes(int m) const { return 2 * spikes(m) + (spikes(m) * bits + 7) / 8; }

  void forward(const float* x, int m, float* kept, uint8_t* side, Buffers& buffers) const {
    constexpr int FEW = 4;
    const int vectors = round_up(m) / LANES, k = spikes(m);
    TwoLargest top;
    for (int v = 0; v < vectors; v++) {
      top.add(magnitude_at(x, v));
      store(kept + v * LANES, load<VF>(x + v * LANES));
    }
    int32_t place[MAX_SPIKES];
    // a block of zeros up to a multiple of GROUP: those are no places
    const bool few = k <= FEW && m % GROUP == 0 && find_few_spikes(x, vectors, k, top, place);
    if (!few) find_spikes(x, vectors, k, buffers, place);
    for (int s = 0; s < k; s++) {
      const uint16_t value = narrowed(x[place[s]]);
      __builtin_memcpy(side + 2 * s, &value, sizeof value);
      kept[place[s]] = 0;
    }
    write_low(place, k, bits, side + 2 * k);
  }

  // out holds what the inner plan gave.
  void inverse(const float*, const uint8_t* side, int m, float* out, Buffers&) const {
    const int k = spikes(m);
    uint8_t codes[2 * MAX_SPIKES + 8] = {};
    for (int i = 0; i < (k * bits + 7) / 8; i++) codes[i] = side[2 * k + i];
    int32_t place[MAX_SPIKES];
    bool right = true;
    for (int s = 0, before = -1; s < k; s++) {
      place[s] = read_low(codes, s, bits);
      right &= place[s] > before;
      before = place[s];
    }
    if (!right || place[k - 1] >= m) {
      for (int i = 0; i < m; i++) out[i] = float_of(QUIET_NAN);
      return;
    }
    for (int s = 0; s < k; s++) {
      uint16_t value;
      __builtin_memcpy(&value, side + 2 * s, sizeof value);
      const uint32_t wide = uint32_t(value) << 16;
      out[place[s]] = float_of((wide & MAGNITUDE) > INFINITE ? QUIET_NAN : wide);
    }
  }
};

}  // namespace nc::NC_ISA
