// One bit a value: the means of the negatives and of the rest (NC_MEANS), or the mean magnitude (NC_SIGN).
#pragma once

#include "encode.hpp"

namespace nc::NC_ISA {

// The parts of a block that are summed: types, so that they are compiled into the loops.
struct Negatives {
  VF operator()(VF x) const { return x < 0 ? x : VF{}; }
};
struct Others {
  VF operator()(VF x) const { return x < 0 ? VF{} : x; }
};
struct Magnitudes {
  VF operator()(VF x) const { return magnitude(x); }
};

// Lanes: one block each.
struct SignSums {
  VI top;        // bits of the largest magnitude
  VI negatives;  // how many
  VF low, high;  // sums of the parts (NC_SIGN: `high` is that of the magnitudes), divided by the width
};

struct Means {
  float low[LANES], high[LANES];
  unsigned finite;  // one bit a lane
};

static inline VF mean_of(VF sum, VI parts, float width) {
  const VF mean = sum / to_float(max(parts, all<VI>(1))) * width;  // an empty part counts as one value
  const VF limit = all<VF>(0x1.fffffep127f);
  return min(max(mean, -limit), limit);
}

static inline Means means_of(const nc_plan& plan, const SignSums& sums, VI count) {
  const float width = float(power_of_two_above(plan.block));
  const VI finite = sums.top < int32_t(INFINITE), live = (VF)sums.top >= TINY;
  const VF nan = all<VF>(float_of(QUIET_NAN));
  const VI others = plan.method == NC_SIGN ? count : count - sums.negatives;
  const VF low = mean_of(sums.low, sums.negatives, width), high = mean_of(sums.high, others, width);
  Means means;
  store(means.low, finite ? (live ? low : VF{}) : nan);
  store(means.high, finite ? (live ? high : VF{}) : nan);
  means.finite = lane_bits(finite);
  return means;
}

static inline void write_means(const EncodeJob& job, const Means& means, int lane, int64_t index) {
  if (job.plan->method == NC_SIGN) {
    write_scale(job.plan->store, means.high[lane], job.scales, index);
  } else {
    write_scale(job.plan->store, means.low[lane], job.scales, 2 * index);
    write_scale(job.plan->store, means.high[lane], job.scales, 2 * index + 1);
  }
}

// The bits of GROUP values: 1 for what is not negative.
static inline uint16_t sign_bits(const float* x) {
  unsigned bits = 0;
  for (int i = 0; i < GROUP; i += LANES) bits |= lane_bits(load<VF>(x + i) >= 0) << i;
  return uint16_t(bits);
}

// count values of one block; nothing but zeros where it is not finite.
static inline void pack_signs(const float* x, int count, bool finite, uint8_t* packed) {
  for (int i = 0; i < count; i += GROUP) {
    const int left = count - i;
    const uint16_t real = left < GROUP ? uint16_t((1 << left) - 1) : 0xffff;
    const uint16_t bits = finite ? sign_bits(x + i) & real : 0;
    __builtin_memcpy(packed + i / 8, &bits, sizeof bits);
  }
}

// ---- LANES blocks at once, each of a power of two of values -------------------------------------------------------

static inline VI negative_lanes(const float* x, int count) {
  VI found = {};
  for (int i = 0; i < count; i += LANES) found -= load<VF>(x + i) < 0;
  return found;
}

template <class Part>
NC_INLINE VF partial_sums(const float* x, int block) {
  const float down = 1.0f / float(block);  // before summing, so that no sum overflows
  return fold([&](int v) { return Part{}(load<VF>(x + v * LANES)) * down; }, block / LANES);
}

static SignSums sums_of_blocks(const nc_plan& plan, const float* x) {
  const int block = int(plan.block);
  const bool one_part = plan.method == NC_SIGN;
  VI tops[LANES], negatives[LANES];
  VF low[LANES], high[LANES];
  for (int b = 0; b < LANES; b++, x += block) {
    tops[b] = magnitude_lanes(x, block);
    negatives[b] = one_part ? VI{} : negative_lanes(x, block);
    low[b] = one_part ? VF{} : partial_sums<Negatives>(x, block);
    high[b] = one_part ? partial_sums<Magnitudes>(x, block) : partial_sums<Others>(x, block);
  }
  const auto add = [](auto p, auto q) { return p + q; };
  return {reduce_lanes([&](int b) { return tops[b]; }, [](VI p, VI q) { return max(p, q); }),
          reduce_lanes([&](int b) { return negatives[b]; }, add), reduce_lanes([&](int b) { return low[b]; }, add),
          reduce_lanes([&](int b) { return high[b]; }, add)};
}

// ---- one block of any size -----------------------------------------------------------------------------------------

template <class Part>
static float sum_of_block(const Part& part, const Source& source, int64_t begin, int64_t count, int64_t width) {
  const int row_width = int(smaller(width, ROW));
  const float down = 1.0f / float(width);
  const auto rows = [&](int64_t row, float* out) {
    const int64_t from = row * ROW;
    const int here = from < count ? int(smaller(count - from, row_width)) : 0;
    const float* const x = here ? source.read(begin + from, here, out) : out;
    int i = 0;
    for (; i < round_up(here); i += LANES) store(out + i, part(load<VF>(x + i)) * down);
    for (; i < row_width; i += LANES) store(out + i, VF{});
  };
  return tree_sum(rows, width);
}

// In every lane.
static SignSums sums_of_block(const nc_plan& plan, const Source& source, int64_t begin, int64_t count, float* buffer) {
  uint32_t top = 0;
  int64_t negatives = 0;
  for (int64_t at = 0; at < count; at += CHUNK) {
    const int here = int(smaller(CHUNK, count - at));
    const float* const x = source.read(begin + at, here, buffer);
    const uint32_t found = largest_magnitude(x, round_up(here));
    top = found > top ? found : top;
    negatives += int64_t(sum_lanes(to_float(negative_lanes(x, round_up(here)))));
  }
  const int64_t width = power_of_two_above(plan.block);
  const auto sum = [&](auto part) { return all<VF>(sum_of_block(part, source, begin, count, width)); };
  SignSums sums = {all<VI>(int32_t(top)), all<VI>(int32_t(negatives)), {}, {}};
  if (top >= INFINITE) return sums;
  if (plan.method == NC_SIGN) {
    sums.high = sum(Magnitudes{});
  } else {
    sums.low = sum(Negatives{});
    sums.high = sum(Others{});
  }
  return sums;
}

// ---- chunks -------------------------------------------------------------------------------------------------------

static void encode_large_signs(const EncodeJob& job, EncodeBuffers& buffers, int64_t begin, int64_t end) {
  const Source source = {job.x, job.dtype};
  const int64_t block = job.plan->block;
  for (int64_t first = begin; first < end; first += block) {
    const int64_t stop = smaller(first + block, end);
    const SignSums sums = sums_of_block(*job.plan, source, first, stop - first, buffers.values);
    const Means means = means_of(*job.plan, sums, all<VI>(int32_t(stop - first)));
    write_means(job, means, 0, first / block);
    for (int64_t at = first; at < stop; at += CHUNK) {
      const int count = int(smaller(CHUNK, stop - at));
      pack_signs(source.read(at, count, buffers.values), count, means.finite & 1, buffers.packed);
      write_packed(job, buffers.packed, at, count);
    }
  }
}

// Whole blocks of a chunk, LANES at a time; the answer is how many were done.
static int encode_sign_blocks(const EncodeJob& job, EncodeBuffers& buffers, const float* x, int64_t begin, int count) {
  const int block = int(job.plan->block), n_blocks = count / block;
  if (power_of_two_above(block) != block) return 0;
  int done = 0;
  for (; done + LANES <= n_blocks; done += LANES) {
    const float* const here = x + done * block;
    const Means means = means_of(*job.plan, sums_of_blocks(*job.plan, here), all<VI>(block));
    for (int b = 0; b < LANES; b++) {
      write_means(job, means, b, begin / block + done + b);
      pack_signs(here + b * block, block, means.finite >> b & 1, buffers.packed + (done + b) * block / 8);
    }
  }
  return done;
}

static void encode_small_signs(const EncodeJob& job, EncodeBuffers& buffers, int64_t begin, int64_t end) {
  const Source source = {job.x, job.dtype};
  const int block = int(job.plan->block), chunk = CHUNK / block * block;
  for (int64_t at = begin; at < end; at += chunk) {
    const int count = int(smaller(chunk, end - at));
    const float* const x = source.read(at, count, buffers.values);
    for (int b = encode_sign_blocks(job, buffers, x, at, count); b * block < count; b++) {
      alignas(64) float tail[CHUNK];
      const int size = int(smaller(block, count - b * block));
      const SignSums sums = sums_of_block(*job.plan, {x, NC_FLOAT32}, b * block, size, tail);
      const Means means = means_of(*job.plan, sums, all<VI>(size));
      write_means(job, means, 0, at / block + b);
      pack_signs(x + b * block, size, means.finite & 1, buffers.packed + b * block / 8);
    }
    write_packed(job, buffers.packed, at, count);
  }
}

static void encode_signs(const EncodeJob& job, int64_t begin, int64_t end) {
  EncodeBuffers buffers;
  if (job.plan->block > CHUNK) {
    encode_large_signs(job, buffers, begin, end);
  } else {
    encode_small_signs(job, buffers, begin, end);
  }
}

}  // namespace nc::NC_ISA
