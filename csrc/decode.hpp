// Codes and scales to n values, chunk by chunk.
#pragma once

#include "dequantise.hpp"
#include "kernels.hpp"
#include "pack.hpp"
#include "rotate.hpp"
#include "scale.hpp"
#include "sink.hpp"
#include "source.hpp"

namespace nc::NC_ISA {

struct DecodeBuffers {
  // what every chunk reads comes first: see Placed
  alignas(64) float block_scale[CHUNK / GROUP], block_low[CHUNK / GROUP];  // for each block
  alignas(64) float scale[CHUNK / GROUP + LANES], low[CHUNK / GROUP + LANES];  // for each GROUP values
  alignas(64) uint8_t planes[4 * PLANE];
  alignas(64) uint8_t codes[CHUNK + PACK_SLACK];
  alignas(64) uint8_t packed[CHUNK + PACK_SLACK];
  alignas(64) float values[CHUNK];
  alignas(64) float scratch[CHUNK];
};

// The codes of a chunk, one a byte, with room up to a multiple of GROUP.
static const uint8_t* read_codes(const DecodeJob& job, DecodeBuffers& buffers, int64_t begin, int count) {
  const int bits = job.plan->format.bits;
  const uint8_t* const packed = job.codes + begin * bits / 8;
  if (bits == 8 && count % GROUP == 0) return packed;
  // near the end, a copy that can be read past
  const bool last = begin + count + 8 * PACK_SLACK > job.n;
  if (last) __builtin_memcpy(buffers.packed, packed, (int64_t(count) * bits + 7) / 8);
  if (bits == 8) return buffers.packed;
  unpack(last ? buffers.packed : packed, bits, round_up(count), buffers.codes);
  return buffers.codes;
}

// The scale of each block; `low` is NC_AFFINE's minimum, or what bit 0 stands for.
static void read_block_scales(const DecodeJob& job, int64_t first, int count, float* scale, float* low) {
  const nc_plan& plan = *job.plan;
  if (plan.store == NC_STORE_NONE) {
    scale[0] = plan.constant;
  } else if (plan.method == NC_NVFP4) {
    for (int b = 0; b < count; b++) scale[b] = plan.block_scale_levels[job.scales[first + b]] * job.tensor_scale;
  } else if (plan.method == NC_AFFINE || plan.method == NC_MEANS) {
    float pairs[2 * CHUNK / GROUP];
    read_scales(plan.store, job.scales, 2 * first, 2 * count, pairs);
    for (int b = 0; b < count; b++) {
      low[b] = pairs[2 * b];
      scale[b] = pairs[2 * b + 1];
    }
  } else {
    read_scales(plan.store, job.scales, first, count, scale);
    for (int b = 0; plan.method == NC_SIGN && b < count; b++) low[b] = -scale[b];
  }
}

// The scales of a chunk, which holds whole blocks or lies within one.
static void read_chunk_scales(const DecodeJob& job, DecodeBuffers& buffers, int64_t begin, int count, int64_t block) {
  const int64_t first = begin / block, within = smaller(block, CHUNK);
  const int n_blocks = int((begin + count - 1) / block - first) + 1;
  read_block_scales(job, first, n_blocks, buffers.block_scale, buffers.block_low);
  expand(buffers.block_scale, n_blocks, within, buffers.scale);
  if (job.plan->method != NC_SCALED && job.plan->method != NC_NVFP4) {
    expand(buffers.block_low, n_blocks, within, buffers.low);
  }
}

static void decode_chunk(const DecodeJob& job, DecodeBuffers& buffers, int64_t begin, int count, int64_t block) {
  const nc_plan& plan = *job.plan;
  const Sink sink = {job.out, job.dtype, job.accumulate, job.streaming, true};
  read_chunk_scales(job, buffers, begin, count, block);
  const Coded coded = {read_codes(job, buffers, begin, count), round_up(count), buffers.scale, buffers.low,
                       buffers.planes};
  if (sink.is_direct(begin, count)) {
    const Dequantise dequantise = job.streaming ? choose_decoder<true>(plan) : choose_decoder<false>(plan);
    dequantise(plan.format, coded, sink.floats(begin));
  } else {
    choose_decoder<false>(plan)(plan.format, coded, buffers.values);
    sink.write(buffers.values, begin, count, buffers.scratch);
  }
}

// From begin to end, no chunk crossing a block unless it holds whole ones.
static void decode_span(const DecodeJob& job, DecodeBuffers& buffers, int64_t begin, int64_t end, int64_t block) {
  const int64_t chunk = block < CHUNK ? CHUNK / block * block : CHUNK;
  for (int64_t at = begin; at < end; at += chunk) {
    decode_chunk(job, buffers, at, int(smaller(chunk, end - at)), block);
  }
}

static void decode_levels(const DecodeJob& job, DecodeBuffers& buffers, int64_t begin, int64_t end) {
  const nc_plan& plan = *job.plan;
  if (plan.block == 0 || plan.store == NC_STORE_NONE) {
    decode_span(job, buffers, begin, end, (job.n + CHUNK) / CHUNK * CHUNK);
  } else {
    const int64_t step = plan.block < CHUNK ? end - begin : plan.block;
    for (int64_t at = begin; at < end; at += step) decode_span(job, buffers, at, smaller(at + step, end), plan.block);
  }
}

// Whether sums over a block may be too large for float32.
static bool needs_care(const DecodeJob& job, int64_t begin, int count) {
  const nc_plan& plan = *job.plan;
  const int n_blocks = int((count + plan.block - 1) / plan.block);
  float scale[CHUNK / GROUP], low[CHUNK / GROUP];
  read_block_scales(job, begin / plan.block, n_blocks, scale, low);
  const float level = plan.format.max_level > -plan.format.min_level ? plan.format.max_level : -plan.format.min_level;
  const float most = 0x1p126f / float(plan.block) / (level > 1 ? level : 1.0f);
  bool large = false;
  for (int b = 0; b < n_blocks; b++) large |= __builtin_fabsf(scale[b]) > most;
  for (int b = 0; plan.method == NC_MEANS && b < n_blocks; b++) large |= __builtin_fabsf(low[b]) > most;
  return large;
}

struct RotateBuffers {
  alignas(64) float values[MAX_ROTATED];  // first, and so a little ahead of the output: see Placed
  alignas(64) float scratch[CHUNK];
};

// Decoded into the cache and rotated back from there.
static void decode_rotated(const DecodeJob& job, DecodeBuffers& buffers, int64_t begin, int64_t end) {
  Placed<RotateBuffers> place(uintptr_t(job.out) + sizeof(float) * begin);
  float* const values = place.buffers().values;
  const nc_plan& plan = *job.plan;
  const Sink sink = {job.out, job.dtype, job.accumulate, job.streaming, true};
  const int64_t step = plan.block < CHUNK ? CHUNK : plan.block;
  DecodeJob rotated = job;
  rotated.dtype = NC_FLOAT32;
  rotated.accumulate = rotated.streaming = false;
  for (int64_t at = begin; at < end; at += step) {
    const int count = int(smaller(step, end - at));
    rotated.out = values - at;
    decode_levels(rotated, buffers, at, at + count);
    const bool careful = needs_care(job, at, count);
    if (sink.is_direct(at, count)) {
      (job.streaming ? unrotate<true> : unrotate<false>)(plan, values, count, sink.floats(at), careful);
      continue;
    }
    unrotate<false>(plan, values, count, values, careful);
    for (int i = 0; i < count; i += CHUNK) {
      sink.write(values + i, at + i, int(smaller(CHUNK, count - i)), place.buffers().scratch);
    }
  }
}

static void decode_range(const DecodeJob& job, int64_t begin, int64_t end) {
  Placed<DecodeBuffers> place(uintptr_t(job.out) + sizeof(float) * begin);
  DecodeBuffers& buffers = place.buffers();
  if (needs_planes(job.plan->format)) fill_planes(job.plan->format, buffers.planes);
  (job.plan->signs ? decode_rotated : decode_levels)(job, buffers, begin, end);
  if (job.streaming) end_streaming();
}

}  // namespace nc::NC_ISA
