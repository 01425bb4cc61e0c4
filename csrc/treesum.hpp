// Sums in the order that all implementations share: pad to a power of two, add the halves, repeat.
#pragma once

#include "simd.hpp"

namespace nc::NC_ISA {

// What is summed comes in rows of this many values, or in one shorter row.
constexpr int ROW = 1024;

static inline int64_t power_of_two_above(int64_t count) {
  int64_t width = GROUP;
  while (width < count) width *= 2;
  return width;
}

static inline void add_row(float* row, const float* other, int width) {
  for (int i = 0; i < width; i += LANES) store(row + i, load<VF>(row + i) + load<VF>(other + i));
}

// The sum of the lanes, in halves.
static inline float sum_lanes(VF v) {
  VI lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (int width = LANES / 2; width > 0; width /= 2) v += shuffled(v, v, lane ^ width);
  return v[0];
}

// The sum of n vectors, a power of two of them, first, first + stride, ...: in the halving order the last addition
// joins those of even and of odd index. vector(index) is one.
template <class Vector>
NC_INLINE VF fold_four(const Vector& vector, int first, int stride) {
  return (vector(first) + vector(first + 2 * stride)) + (vector(first + stride) + vector(first + 3 * stride));
}

template <class Vector>
static VF fold_many(const Vector& vector, int first, int stride, int n) {
  if (n == 4) return fold_four(vector, first, stride);
  return fold_many(vector, first, 2 * stride, n / 2) + fold_many(vector, first + stride, 2 * stride, n / 2);
}

template <class Vector>
NC_INLINE VF fold(const Vector& vector, int n) {
  if (n == 1) return vector(0);
  if (n == 2) return vector(0) + vector(1);
  return n == 4 ? fold_four(vector, 0, 1) : fold_many(vector, 0, 1, n);
}

static inline float sum_row(const float* row, int width) {
  return sum_lanes(fold([&](int i) { return load<VF>(row + i * LANES); }, width / LANES));
}

// The same for `rows` rows, element by element. fetch(index, row) writes one.
template <class Fetch>
static void sum_rows(const Fetch& fetch, int64_t first, int64_t stride, int64_t rows, float* sum) {
  if (rows == 1) {
    fetch(first, sum);
    return;
  }
  alignas(64) float other[ROW];
  sum_rows(fetch, first, 2 * stride, rows / 2, sum);
  sum_rows(fetch, first + stride, 2 * stride, rows / 2, other);
  add_row(sum, other, ROW);
}

// The sum of `width` values, a power of two and at least GROUP.
template <class Fetch>
static inline float tree_sum(const Fetch& fetch, int64_t width) {
  alignas(64) float sum[ROW];
  if (width <= ROW) {
    fetch(0, sum);
    return sum_row(sum, int(width));
  }
  sum_rows(fetch, 0, 1, width / ROW, sum);
  return sum_row(sum, ROW);
}

}  // namespace nc::NC_ISA
