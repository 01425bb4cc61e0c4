// Error feedback and reduction in one pass over memory: tiles that stay in the second-level cache go through the same
// encode and decode as everything else, so the bits are those of the separate steps.
#pragma once

#include "decode.hpp"
#include "encode.hpp"
#include "signs.hpp"

namespace nc::NC_ISA {

constexpr int TILE = 8192;
constexpr int MAX_TILE = 16384;  // the largest block that is taken

struct Tile {
  alignas(64) float wanted[MAX_TILE + GROUP];
  alignas(64) float sent[MAX_TILE + GROUP];
};

static int64_t tile_of(int64_t grain) { return grain >= TILE ? grain : TILE / grain * grain; }

static void copy_values(const EncodeJob& job, int64_t begin, int64_t end, float* to) {
  const Source source = {job.x, job.dtype};
  for (int64_t at = begin; at < end; at += CHUNK) {
    source.copy(at, int(smaller(CHUNK, end - at)), to + (at - begin));
  }
}

static void encode_plain(const EncodeJob& job, int64_t begin, int64_t end) {
  const bool signs = job.plan->method == NC_MEANS || job.plan->method == NC_SIGN;
  (signs ? encode_signs : encode_levels)(job, begin, end);
}

// Rotated into the cache and encoded from there.
static void encode_rotated(const EncodeJob& job, int64_t begin, int64_t end) {
  alignas(64) float values[MAX_ROTATED + GROUP];
  const int64_t step = job.plan->block < CHUNK ? CHUNK : job.plan->block;
  EncodeJob rotated = job;
  rotated.dtype = NC_FLOAT32;
  for (int64_t at = begin; at < end; at += step) {
    const int64_t stop = smaller(at + step, end);
    if (job.dtype != NC_FLOAT32) copy_values(job, at, stop, values);
    rotate(*job.plan, job.dtype == NC_FLOAT32 ? static_cast<const float*>(job.x) + at : values, int(stop - at), values);
    rotated.x = values - at;
    encode_plain(rotated, at, stop);
  }
}

static void encode_part(const EncodeJob& job, int64_t begin, int64_t end) {
  (job.plan->signs ? encode_rotated : encode_plain)(job, begin, end);
}

// What a tile of the wire holds, as float32; `to` is where value `begin` goes.
static void decode_tile(const DecodeJob& wire, float* to, int64_t begin, int64_t end, bool accumulate) {
  DecodeJob job = wire;
  job.out = to - begin;
  job.dtype = NC_FLOAT32;
  job.accumulate = accumulate;
  job.streaming = false;
  decode_range(job, begin, end);
}

// wanted = values + residual * weight: two roundings.
static void add_owed(const Owed& owed, int64_t begin, int count, float* wanted) {
  const float* const residual = owed.residual + begin;
  const VF weight = all<VF>(owed.weight);
  combine(
      wanted, residual, count, [=](VF a, VF r) { return a + r * weight; },
      [=](VF a, VF r) { return plus(a, kept_finite(r * weight, is_finite(r))); });
}

// What was wanted and not sent, in units. Where that is not finite the old residual stays.
static void owe(const Owed& owed, int64_t begin, int count, const float* wanted, const float* sent) {
  float* const residual = owed.residual + begin;
  for (int i = 0; i < count; i++) {
    const float lost = (wanted[i] - sent[i]) / owed.unit;
    residual[i] = (bits_of(lost) & MAGNITUDE) < INFINITE ? lost : residual[i];
  }
}

// Encodes tile.wanted into its place on the wire.
static void encode_tile(const EncodeJob& job, const Owed& owed, Tile& tile, int64_t begin, int64_t end) {
  const int count = int(end - begin);
  EncodeJob here = job;
  here.x = tile.wanted - begin;
  here.dtype = NC_FLOAT32;
  if (owed.residual) add_owed(owed, begin, count, tile.wanted);
  encode_part(here, begin, end);
  if (!owed.residual) return;
  const DecodeJob written = {job.plan, job.codes, job.scales, 0, job.n, nullptr, NC_FLOAT32, false, false};
  decode_tile(written, tile.sent, begin, end, false);
  owe(owed, begin, count, tile.wanted, tile.sent);
}

static void encode_owed(const EncodeJob& job, const Owed& owed, int64_t begin, int64_t end) {
  const int64_t step = tile_of(grain(*job.plan));
  Tile tile;
  for (int64_t at = begin; at < end; at += step) {
    const int64_t stop = smaller(at + step, end);
    copy_values(job, at, stop, tile.wanted);
    encode_tile(job, owed, tile, at, stop);
  }
}

static void finish_sum(float by, float times, float* total, int count) {
  const VF divide = all<VF>(by), multiply = all<VF>(times);
  if (by != 1.0f) {
    combine(
        total, total, count, [=](VF a, VF) { return a / divide; },
        [=](VF a, VF) { return kept_finite(a / divide, is_finite(a)); });
  }
  if (times != 1.0f) {
    combine(
        total, total, count, [=](VF a, VF) { return a * multiply; },
        [=](VF a, VF) { return kept_finite(a * multiply, is_finite(a)); });
  }
}

static void reduce_range(const ReduceJob& job, int64_t begin, int64_t end) {
  const EncodeJob& encode = job.encode;
  const int64_t step = tile_of(grain(*encode.plan));
  DecodeJob written = {encode.plan, encode.codes, encode.scales, 0, encode.n, job.out, job.out_dtype, false, false};
  Tile tile;
  for (int64_t at = begin; at < end; at += step) {
    const int64_t stop = smaller(at + step, end);
    for (int32_t rank = 0; rank < job.world; rank++) {
      const uint8_t* const wire = job.wires[rank];
      const DecodeJob theirs = {encode.plan, wire, wire + job.scales_at, 0, encode.n, nullptr, NC_FLOAT32, false, false};
      decode_tile(theirs, tile.wanted, at, stop, rank > 0);
    }
    finish_sum(job.divide, job.multiply, tile.wanted, int(stop - at));
    encode_tile(encode, job.owed, tile, at, stop);
    if (job.out) decode_range(written, at, stop);
  }
}

}  // namespace nc::NC_ISA
