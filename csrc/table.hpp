// Formats given by a table of values: search. A bin (the top 16 bits of a float32) brackets the answer.
#pragma once

#include "narrowcast.h"
#include "simd.hpp"

namespace nc::NC_ISA {

// How many starts are <= t: the index of the level nearest to t.
static inline int nearest_index(const nc_format& format, float t) {
  const uint32_t bin = bits_of(t) >> 16;
  const int a = format.prefix[bin], b = format.prefix[bin + 1];
  int low = a < b ? a : b, length = a < b ? b - a : a - b;
  // the answer lies from low to low + length; no branch depends on t, which could not be predicted
  while (length > 0) {
    const int half = (length + 1) / 2;
    low += format.starts[low + half - 1] <= t ? half : 0;
    length -= half;
  }
  return low;
}

// The neighbour of t on zero's side, or the one away from zero with a probability that is the fraction, cut to 17 bits.
static inline int stochastic_index(const nc_format& format, float t, uint32_t noise) {
  const int last = format.n_grid - 1;
  // in this order a NaN (whose code is not used) stays inside the table, too
  t = t > format.grid[0] ? t : format.grid[0];
  t = t < format.grid[last] ? t : format.grid[last];
  const int nearest = nearest_index(format, t);
  const int below = format.grid[nearest] <= t ? nearest : nearest - 1;
  if (format.grid[below] == t) return below;
  const int near = t < 0 ? below + 1 : below, far = t < 0 ? below : below + 1;
  const double away = double(t) - double(format.grid[near]);
  const double fraction = (away < 0 ? -away : away) * format.inverse_gap[below];
  return int64_t(fraction * 131072.0) + 2 * noise + 1 >= 131072 ? far : near;
}

template <bool STOCHASTIC>
static inline int table_index(const nc_format& format, float t, uint32_t noise) {
  return STOCHASTIC ? stochastic_index(format, t, noise) : nearest_index(format, t);
}

static inline bool is_negative_zero(const nc_format& format, int index, float t) {
  return format.neg_zero_code >= 0 && format.grid[index] == 0 && bits_of(t) & SIGN;
}

template <bool STOCHASTIC>
static inline int table_code(const nc_format& format, float t, uint32_t noise) {
  const int index = table_index<STOCHASTIC>(format, t, noise);
  return is_negative_zero(format, index, t) ? format.neg_zero_code : format.grid_codes[index];
}

// round_to.
template <bool STOCHASTIC>
static inline float table_value(const nc_format& format, float x, uint32_t noise) {
  const uint32_t size = bits_of(x) & MAGNITUDE;
  const int last = format.n_grid - 1;
  if (size > INFINITE) return format.nan_code >= 0 ? format.levels[format.nan_code] : format.grid[last];
  if (size == INFINITE) {
    const int32_t code = x > 0 ? format.inf_code : format.neg_inf_code;
    return code >= 0 ? format.levels[code] : format.grid[x > 0 ? last : 0];
  }
  const int index = table_index<STOCHASTIC>(format, x, noise);
  return is_negative_zero(format, index, x) ? -0.0f : format.grid[index];
}

}  // namespace nc::NC_ISA
