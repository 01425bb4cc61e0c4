// Products of a matrix with few vectors for one instruction set. Compiled once for each, with NC_ISA as its namespace.
//
// The order of every sum is that of kernels/low_rank.py, whatever the instructions: sixteen lanes everywhere.
#include "low_rank_kernels.hpp"

#include <float.h>
#include <string.h>

#include <type_traits>

namespace nc::NC_ISA {

constexpr int LANES = 16;
constexpr int GROUP = 4;              // vectors of a factor that are worked on together
constexpr int64_t CHUNK = 1024;       // columns whose sums lie in the first cache
typedef float V __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t I __attribute__((vector_size(LANES * sizeof(float))));

static inline V load(const float* x) {
  V v;
  memcpy(&v, x, sizeof v);
  return v;
}

static inline V load_some(const float* x, int count) {
  V v = {};
  memcpy(&v, x, sizeof(float) * count);
  return v;
}

static inline void store(float* x, V v, int count) {
  if (count == LANES) {
    memcpy(x, &v, sizeof v);
  } else {
    memcpy(x, &v, sizeof(float) * count);
  }
}

static inline V all(float x) { return x - V{}; }

static inline V magnitude(V x) { return (V)((I)x & 0x7fffffff); }

// `result`, or the largest number of its sign where it overflows although `from` is finite.
static inline V clamped(V result, V from) {
  const V sign = (V)((I)result & int32_t(0x80000000));
  const V largest = (V)((I)sign | (I)all(FLT_MAX));
  const I too_large = (magnitude(result) > FLT_MAX) & (result == result) & (magnitude(from) <= FLT_MAX);
  return (V)((too_large & (I)largest) | (~too_large & (I)result));
}

// What a rank wants to send: a matrix, or one and its residual.
struct Plain {
  const nc_low_rank& job;
  V operator()(int64_t at, int count) const { return count == LANES ? load(job.x + at) : load_some(job.x + at, count); }
};

struct Both {
  const nc_low_rank& job;
  V operator()(int64_t at, int count) const {
    const V x = count == LANES ? load(job.x + at) : load_some(job.x + at, count);
    V more = count == LANES ? load(job.residual + at) : load_some(job.residual + at, count);
    if (job.weight != 1.0f) more = clamped(more * job.weight, more);
    return clamped(x + more, x);
  }
};

static inline int64_t padded(const nc_low_rank& job) { return (job.columns + LANES - 1) / LANES * LANES; }

static inline int some(int64_t left) { return left < LANES ? int(left) : LANES; }

template <class Want, int K>
static void left_group(const nc_low_rank& job, const Want& want, int64_t row, int64_t first) {
  const float* const q = job.right + first * padded(job);
  V sums[K] = {};
  for (int64_t j = 0; j < job.columns; j += LANES) {
    const V w = want(row * job.columns + j, some(job.columns - j));
    for (int k = 0; k < K; k++) sums[k] = sums[k] + w * load(q + k * padded(job) + j);
  }
  for (int k = 0; k < K; k++) {
    float lanes[LANES];
    memcpy(lanes, &sums[k], sizeof lanes);
    for (int half = LANES / 2; half; half /= 2) {
      for (int l = 0; l < half; l++) lanes[l] = lanes[l] + lanes[l + half];
    }
    job.out[(first + k) * job.rows + row] = lanes[0];
  }
}

// visit(count) with the number of vectors of a group as a constant.
template <class Visit>
static void by_groups(int64_t rank, const Visit& visit) {
  for (int64_t first = 0; first < rank; first += GROUP) {
    switch (rank - first) {
      case 1: visit(first, std::integral_constant<int, 1>{}); break;
      case 2: visit(first, std::integral_constant<int, 2>{}); break;
      case 3: visit(first, std::integral_constant<int, 3>{}); break;
      default: visit(first, std::integral_constant<int, 4>{});
    }
  }
}

template <class Want>
static void left_of(const nc_low_rank& job, const Want& want, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    by_groups(job.rank, [&](int64_t first, auto count) { left_group<Want, count>(job, want, row, first); });
  }
}

static void left(const nc_low_rank& job, int64_t begin, int64_t end) {
  job.residual ? left_of(job, Both{job}, begin, end) : left_of(job, Plain{job}, begin, end);
}

// Four rows at a time: their products are added one after another, as if each row were by itself.
template <class Want, int K, int ROWS>
static void right_rows(const nc_low_rank& job, const Want& want, int64_t row, int64_t first, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j += LANES) {
    const int count = some(job.columns - j);
    V w[ROWS];
    for (int r = 0; r < ROWS; r++) w[r] = want((row + r) * job.columns + j, count);
    for (int k = 0; k < K; k++) {
      float* const sum = job.out + (first + k) * padded(job) + j;
      V total = row ? load(sum) : V{};
      for (int r = 0; r < ROWS; r++) total = total + w[r] * job.left[(first + k) * job.rows + row + r];
      store(sum, total, LANES);
    }
  }
}

template <class Want>
static void right_of(const nc_low_rank& job, const Want& want, int64_t begin, int64_t end) {
  for (int64_t low = begin; low < end; low += CHUNK) {
    const int64_t high = low + CHUNK < end ? low + CHUNK : end;
    by_groups(job.rank, [&](int64_t first, auto count) {
      int64_t row = 0;
      for (; row + 4 <= job.rows; row += 4) right_rows<Want, count, 4>(job, want, row, first, low, high);
      for (; row < job.rows; row++) right_rows<Want, count, 1>(job, want, row, first, low, high);
    });
  }
}

static void right(const nc_low_rank& job, int64_t begin, int64_t end) {
  job.residual ? right_of(job, Both{job}, begin, end) : right_of(job, Plain{job}, begin, end);
}

template <int K>
static inline V product(const nc_low_rank& job, int64_t row, int64_t first, int64_t j, V total) {
  for (int k = 0; k < K; k++) {
    const V term = load(job.right + (first + k) * padded(job) + j) * job.left[(first + k) * job.rows + row];
    total = first + k ? total + term : term;
  }
  return total;
}

static inline void keep(const nc_low_rank& job, int64_t at, int count, V sent) {
  const V wanted = Both{job}(at, count);
  V lost = wanted - (job.share == 1.0f ? sent : sent * job.share);
  if (job.unit != 1.0f) lost = lost / job.unit;
  const V before = count == LANES ? load(job.residual + at) : load_some(job.residual + at, count);
  const I finite = magnitude(lost) <= FLT_MAX;
  store(job.residual + at, (V)((finite & (I)lost) | (~finite & (I)before)), count);
}

template <int K>
static void finish_of(const nc_low_rank& job, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    for (int64_t j = 0; j < job.columns; j += LANES) {
      const int64_t at = row * job.columns + j;
      const int count = some(job.columns - j);
      V total = {};
      if (K) {
        total = product<K>(job, row, 0, j, total);
      } else {
        for (int64_t k = 0; k < job.rank; k++) total = product<1>(job, row, k, j, total);
      }
      if (job.residual) keep(job, at, count, total);
      store(job.x + at, total, count);
    }
  }
}

static void finish(const nc_low_rank& job, int64_t begin, int64_t end) {
  switch (job.rank) {
    case 1: return finish_of<1>(job, begin, end);
    case 2: return finish_of<2>(job, begin, end);
    case 4: return finish_of<4>(job, begin, end);
    case 8: return finish_of<8>(job, begin, end);
    default: return finish_of<0>(job, begin, end);
  }
}

const LowRankKernel low_rank_kernel = {left, right, finish};

}  // namespace nc::NC_ISA
