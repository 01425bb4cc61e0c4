// The input of a kernel as chunks of float32 that stay in the first-level cache.
#pragma once

#include "halves.hpp"
#include "narrowcast.h"
#include "simd.hpp"

namespace nc::NC_ISA {

constexpr int CHUNK = 1024;  // with the buffers beside it, what the first-level cache holds

static inline int round_up(int count) { return (count + GROUP - 1) / GROUP * GROUP; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// One number for each block to one for each GROUP values; writes up to LANES - 1 numbers too many.
static inline void expand(const float* of_block, int n_blocks, int64_t block, float* of_group) {
  const int groups = int(block / GROUP);
  for (int b = 0; b < n_blocks; b++, of_group += groups) {
    for (int g = 0; g < groups; g += LANES) store(of_group + g, all<VF>(of_block[b]));
  }
}

struct Source {
  const void* x;
  int32_t dtype;

  // Values begin .. begin + count - 1 as float32, followed by zeros up to a multiple of GROUP: where they lie, or a
  // copy in `buffer`.
  const float* read(int64_t begin, int count, float* buffer) const {
    if (dtype == NC_FLOAT32 && count % GROUP == 0) return static_cast<const float*>(x) + begin;
    return copy(begin, count, buffer);
  }

  const float* copy(int64_t begin, int count, float* buffer) const {
    if (dtype == NC_FLOAT32) {
      __builtin_memcpy(buffer, static_cast<const float*>(x) + begin, sizeof(float) * count);
    } else {
      widen(static_cast<const uint16_t*>(x) + begin, dtype, count, buffer);
    }
    for (int i = count; i < round_up(count); i++) buffer[i] = 0;
    return buffer;
  }
};

// Bits of the largest magnitude, one for each lane. count is a multiple of GROUP.
static inline VI magnitude_lanes(const float* x, int count) {
  VI top = {};
  for (int i = 0; i < count; i += LANES) top = max(top, load<VI>(x + i) & int32_t(MAGNITUDE));
  return top;
}

// Bits of the largest magnitude; INFINITE and above where a value is not finite.
static inline uint32_t largest_magnitude(const float* x, int count) {
  return uint32_t(largest_lane(magnitude_lanes(x, count)));
}

}  // namespace nc::NC_ISA
