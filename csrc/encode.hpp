// n floats to codes and scales, chunk by chunk.
#pragma once

#include "kernels.hpp"
#include "pack.hpp"
#include "philox.hpp"
#include "quantise.hpp"
#include "scale.hpp"
#include "source.hpp"

namespace nc::NC_ISA {

constexpr int MAX_BLOCKS = CHUNK / GROUP;  // in a chunk

struct EncodeBuffers {
  alignas(64) float values[CHUNK];
  alignas(64) float inverse[MAX_BLOCKS + LANES];  // for each GROUP values
  alignas(64) uint32_t noise[CHUNK + 2 * NOISE_SPAN];
  alignas(64) uint8_t codes[CHUNK + PACK_SLACK];
  alignas(64) uint8_t packed[CHUNK + PACK_SLACK];
};

// One scale and its inverse for each block of a chunk.
struct BlockScales {
  alignas(64) uint32_t top[MAX_BLOCKS];
  alignas(64) float scale[MAX_BLOCKS];
  alignas(64) float inverse[MAX_BLOCKS];
  alignas(64) float low[MAX_BLOCKS];  // NC_AFFINE
};

// Packed codes of a chunk to their place.
static void write_packed(const EncodeJob& job, const uint8_t* packed, int64_t begin, int count) {
  const int bits = job.plan->format.bits;
  __builtin_memcpy(job.codes + begin * bits / 8, packed, (count * bits + 7) / 8);
}

static void write_codes(const EncodeJob& job, EncodeBuffers& buffers, int64_t begin, int count) {
  const int bits = job.plan->format.bits;
  if (bits == 8) return write_packed(job, buffers.codes, begin, count);
  for (int i = count; i < round_up(count); i++) buffers.codes[i] = 0;
  pack(buffers.codes, bits, round_up(count), buffers.packed);
  write_packed(job, buffers.packed, begin, count);
}

// A chunk whose inverse scales stand in the buffers.
static void encode_chunk(const EncodeJob& job, EncodeBuffers& buffers, const float* x, int64_t begin, int count) {
  const nc_plan& plan = *job.plan;
  const int whole = round_up(count);
  const bool in_place = plan.format.bits == 8 && count == whole;
  uint8_t* const codes = in_place ? job.codes + begin : buffers.codes;
  Unscaled values = {x, whole, buffers.inverse, nullptr};
  if (plan.stochastic) {
    values.noise = fill_noise({job.seed, job.stream}, job.offset + uint64_t(begin), whole, buffers.noise);
  }
  choose_quantise(plan.format, plan.stochastic)(plan.format, values, codes);
  if (plan.store == NC_STORE_NONE && largest_magnitude(x, whole) >= INFINITE) {
    put_special_codes(plan.format, x, count, codes);
  }
  if (!in_place) write_codes(job, buffers, begin, count);
}

// ---- one scale for many chunks: large blocks, whole tensors, constants --------------------------------------------

// Takes smallest and largest value of x into account; a NaN may get lost.
static void extend(Extremes& found, const float* x, int count) {
  VF low = all<VF>(found.low), high = all<VF>(found.high);
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    low = min(load<VF>(x + i), low);
    high = max(load<VF>(x + i), high);
  }
  found.low = -largest_lane(-low);
  found.high = largest_lane(high);
  for (; i < count; i++) {
    found.low = x[i] < found.low ? x[i] : found.low;
    found.high = x[i] > found.high ? x[i] : found.high;
  }
}

static Extremes extremes_of(const Source& source, int64_t begin, int64_t end, bool affine) {
  alignas(64) float buffer[CHUNK];
  Extremes found = {0, float_of(INFINITE), -float_of(INFINITE)};
  for (int64_t at = begin; at < end; at += CHUNK) {
    const int count = int(smaller(CHUNK, end - at));
    const float* const x = source.read(at, count, buffer);
    const uint32_t top = largest_magnitude(x, round_up(count));
    found.top = top > found.top ? top : found.top;
    if (affine) extend(found, x, count);
  }
  return found;
}

static inline float within_affine_range(float x) {
  constexpr float limit = 0x1p126f;  // so that high - low and code * step stay finite
  return x < -limit ? -limit : x > limit ? limit : x;
}

static TensorScale affine_scale(const nc_plan& plan, const Extremes& extremes) {
  if (extremes.top >= INFINITE) return {float_of(QUIET_NAN), 0, float_of(QUIET_NAN), true};
  const float low = within_affine_range(extremes.low) + 0.0f;  // no minimum of -0
  const float span = within_affine_range(extremes.high) - low;
  const float step = span >= TINY ? span / plan.target : 0.0f;
  return {step, step == 0 ? 0.0f : 1.0f / step, low, false};
}

static TensorScale scaled_scale(float scale) {
  const bool lost = scale != scale;
  return {scale, inverse_of(all<VF>(scale))[0], 0, lost};
}

static TensorScale scale_of_many(const nc_plan& plan, const Source& source, int64_t begin, int64_t count,
                                 const Extremes& extremes) {
  if (plan.method == NC_AFFINE) return affine_scale(plan, extremes);
  float quotient[LANES];
  if (plan.l2) store(quotient, all<VF>(norm_quotient(plan, source, begin, count, extremes.top)));
  return scaled_scale(scale_of(plan, all<VU>(extremes.top), plan.l2 ? quotient : nullptr)[0]);
}

static void write_block_scale(const EncodeJob& job, const TensorScale& scale, int64_t index) {
  const int32_t store = job.plan->store;
  if (job.plan->method == NC_AFFINE) {
    write_scale(store, scale.low, job.scales, 2 * index);
    write_scale(store, scale.scale, job.scales, 2 * index + 1);
  } else {
    write_scale(store, scale.scale, job.scales, index);
  }
}

// x - low into the buffer.
static const float* shifted(const float* x, float low, int count, float* buffer) {
  for (int i = 0; i < count; i += LANES) store(buffer + i, load<VF>(x + i) - low);
  return buffer;
}

static void encode_span(const EncodeJob& job, EncodeBuffers& buffers, int64_t begin, int64_t end,
                        const TensorScale& scale) {
  const Source source = {job.x, job.dtype};
  expand(&scale.inverse, 1, CHUNK, buffers.inverse);
  for (int64_t at = begin; at < end; at += CHUNK) {
    const int count = int(smaller(CHUNK, end - at));
    const float* x = source.read(at, count, buffers.values);
    if (scale.lost) {
      // the codes say nothing: the scale tells
      __builtin_memset(buffers.values, 0, sizeof buffers.values);
      x = buffers.values;
    } else if (job.plan->method == NC_AFFINE) {
      x = shifted(x, scale.low, round_up(count), buffers.values);
    }
    encode_chunk(job, buffers, x, at, count);
  }
}

static void encode_large_blocks(const EncodeJob& job, EncodeBuffers& buffers, int64_t begin, int64_t end) {
  const nc_plan& plan = *job.plan;
  const Source source = {job.x, job.dtype};
  for (int64_t at = begin; at < end; at += plan.block) {
    const int64_t stop = smaller(at + plan.block, end);
    const Extremes extremes = extremes_of(source, at, stop, plan.method == NC_AFFINE);
    const TensorScale scale = scale_of_many(plan, source, at, stop - at, extremes);
    write_block_scale(job, scale, at / plan.block);
    encode_span(job, buffers, at, stop, scale);
  }
}

// ---- many scales in a chunk ---------------------------------------------------------------------------------------

constexpr uint8_t E4M3FN_NAN = 0x7f;
constexpr float E4M3FN_LARGEST = 448.0f, E4M3FN_SMALLEST = 0x1p-9f;

// e4m3fn, in which NVFP4 writes the scales of its blocks.
static nc_format e4m3fn() {
  nc_format format = {};
  format.kind = NC_FLOAT;
  format.bits = 8;
  format.exp_bits = 4;
  format.man_bits = 3;
  format.bias = 7;
  format.max_level = E4M3FN_LARGEST;
  format.neg_zero_code = 0x80;
  return format;
}

// Writes the codes of the block scales; `scale` becomes their value times the scale of the tensor.
static void find_nvfp4_scales(const EncodeJob& job, BlockScales& blocks, int n_blocks, int64_t first) {
  const nc_plan& plan = *job.plan;
  const nc_format format = e4m3fn();
  const FloatCode<false> rule(format);
  for (int b = 0; b < n_blocks; b += LANES) {
    const VU top = load<VU>(blocks.top + b);
    const VF size = (VF)((VI)top < int32_t(INFINITE) ? top : VU{});
    // never below the smallest: a block much weaker than the rest keeps something
    const VF wanted = max(size / plan.target * job.tensor.inverse, all<VF>(E4M3FN_SMALLEST));
    uint8_t codes[LANES];
    store_bytes(codes, rule.codes(wanted, VU{}));
    for (int i = 0; i < LANES && b + i < n_blocks; i++) {
      blocks.scale[b + i] = plan.block_scale_levels[codes[i]] * job.tensor.scale;
      job.scales[first + b + i] = top[i] < INFINITE ? codes[i] : E4M3FN_NAN;
    }
    store(blocks.inverse + b, inverse_of(load<VF>(blocks.scale + b)));
  }
}

static void find_scales(const EncodeJob& job, BlockScales& blocks, const float* x, int n_blocks, int count,
                        int64_t begin) {
  const nc_plan& plan = *job.plan;
  const Source source = {x, NC_FLOAT32};
  const int64_t first = begin / plan.block;
  const int block = int(plan.block);
  alignas(64) float quotient[MAX_BLOCKS];
  for (int b = 0; plan.l2 && b < n_blocks; b++) {
    const int64_t here = smaller(block, count - b * block);
    quotient[b] = norm_quotient(plan, source, b * block, here, blocks.top[b]);
  }
  for (int b = 0; b < n_blocks; b += LANES) {
    const VF scale = scale_of(plan, load<VU>(blocks.top + b), plan.l2 ? quotient + b : nullptr);
    store(blocks.scale + b, scale);
    store(blocks.inverse + b, inverse_of(scale));
  }
  write_scales(plan.store, blocks.scale, n_blocks, job.scales, first);
}

static void find_affine_scales(const EncodeJob& job, BlockScales& blocks, const float* x, int n_blocks, int count,
                               int64_t begin) {
  const int block = int(job.plan->block);
  const Source source = {x, NC_FLOAT32};
  for (int b = 0; b < n_blocks; b++) {
    const int64_t stop = smaller((b + 1) * block, count);
    const TensorScale scale = affine_scale(*job.plan, extremes_of(source, b * block, stop, true));
    write_block_scale(job, scale, begin / block + b);
    blocks.inverse[b] = scale.inverse;
    blocks.low[b] = scale.low;
  }
}

// Of each block of a chunk. count is a multiple of GROUP.
static void find_tops(BlockScales& blocks, const float* x, int block, int count) {
  const int whole = count / block;
  int b = 0;
  for (; b + LANES <= whole; b += LANES) {
    VI lanes[LANES];  // filled in the order of x, which may still have to come from memory
    for (int i = 0; i < LANES; i++) lanes[i] = magnitude_lanes(x + (b + i) * block, block);
    store(blocks.top + b, reduce_lanes([&](int i) { return lanes[i]; }, [](VI p, VI q) { return max(p, q); }));
  }
  for (; b * block < count; b++) {
    blocks.top[b] = largest_magnitude(x + b * block, int(smaller(block, count - b * block)));
  }
}

static bool any_lost(const BlockScales& blocks, int n_blocks) {
  uint32_t highest = 0;
  for (int b = 0; b < n_blocks; b++) highest = blocks.top[b] > highest ? blocks.top[b] : highest;
  return highest >= INFINITE;
}

// A copy of x in which blocks that are not finite are zeros and minima are subtracted.
static const float* prepared(const BlockScales& blocks, const float* x, int block, int count, bool affine,
                             float* buffer) {
  for (int b = 0; b * block < count; b++) {
    const int here = int(smaller(block, count - b * block));
    float* const to = buffer + b * block;
    if (blocks.top[b] >= INFINITE) {
      __builtin_memset(to, 0, sizeof(float) * here);
    } else {
      shifted(x + b * block, affine ? blocks.low[b] : 0.0f, here, to);
    }
  }
  return buffer;
}

static void encode_blocks(const EncodeJob& job, EncodeBuffers& buffers, int64_t begin, int count) {
  const nc_plan& plan = *job.plan;
  const bool affine = plan.method == NC_AFFINE;
  const int block = int(plan.block), whole = round_up(count), n_blocks = (count + block - 1) / block;
  const float* x = Source{job.x, job.dtype}.read(begin, count, buffers.values);
  BlockScales blocks;
  find_tops(blocks, x, block, whole);
  if (plan.method == NC_NVFP4) {
    find_nvfp4_scales(job, blocks, n_blocks, begin / block);
  } else if (affine) {
    find_affine_scales(job, blocks, x, n_blocks, count, begin);
  } else {
    find_scales(job, blocks, x, n_blocks, count, begin);
  }
  if (affine || any_lost(blocks, n_blocks)) x = prepared(blocks, x, block, whole, affine, buffers.values);
  expand(blocks.inverse, n_blocks, block, buffers.inverse);
  encode_chunk(job, buffers, x, begin, count);
}

static void encode_small_blocks(const EncodeJob& job, EncodeBuffers& buffers, int64_t begin, int64_t end) {
  const int64_t chunk = CHUNK / job.plan->block * job.plan->block;
  for (int64_t at = begin; at < end; at += chunk) encode_blocks(job, buffers, at, int(smaller(chunk, end - at)));
}

// Where parts may be cut: chunks that hold whole blocks, or whole large blocks.
static int64_t grain(const nc_plan& plan) {
  if (plan.block == 0 || plan.store == NC_STORE_NONE) return CHUNK;
  return plan.block <= CHUNK ? CHUNK / plan.block * plan.block : plan.block;
}

static void encode_levels(const EncodeJob& job, int64_t begin, int64_t end) {
  EncodeBuffers buffers;
  if (job.plan->block == 0 || job.plan->store == NC_STORE_NONE) {
    encode_span(job, buffers, begin, end, job.tensor);
  } else if (job.plan->block > CHUNK) {
    encode_large_blocks(job, buffers, begin, end);
  } else {
    encode_small_blocks(job, buffers, begin, end);
  }
}

}  // namespace nc::NC_ISA
