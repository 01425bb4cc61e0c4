// round_to: values to values of a format.
#pragma once

#include "kernels.hpp"
#include "philox.hpp"
#include "sink.hpp"
#include "smallfloat.hpp"
#include "source.hpp"
#include "table.hpp"
#include "uniform.hpp"

namespace nc::NC_ISA {

// count is a multiple of GROUP; x and out may be the same.
using Round = void (*)(const nc_format& format, int32_t overflow, const float* x, const uint32_t* noise, int count,
                       float* out);

// STREAMING: out is aligned and written past the caches.
template <class Rule, bool STREAMING>
static void round_by(const nc_format& format, int32_t overflow, const float* x, const uint32_t* noise, int count,
                     float* out) {
  const Rule rule(format, overflow);
  for (int i = 0; i < count; i += LANES) {
    const VU random = Rule::STOCHASTIC ? load<VU>(noise + i) : VU{};
    put<STREAMING>(out + i, rule.values(load<VF>(x + i), random));
  }
}

template <bool STOCHASTIC, bool STREAMING>
static void round_by_search(const nc_format& format, int32_t, const float* x, const uint32_t* noise, int count,
                            float* out) {
  for (int i = 0; i < count; i += LANES) {
    float values[LANES];
    for (int j = 0; j < LANES; j++) {
      values[j] = table_value<STOCHASTIC>(format, x[i + j], STOCHASTIC ? noise[i + j] : 0);
    }
    put<STREAMING>(out + i, load<VF>(values));
  }
}

template <bool STREAMING>
static Round choose_float_round(const nc_format& format, bool stochastic) {
  if (stochastic) return round_by<FloatValue<SmallFloat<true>>, STREAMING>;
  if (RoundingByAddition::serves(format)) return round_by<FloatValue<RoundingByAddition>, STREAMING>;
  return round_by<FloatValue<SmallFloat<false>>, STREAMING>;
}

template <bool STREAMING>
static Round choose_round(const nc_format& format, bool stochastic) {
  if (format.kind == NC_FLOAT) return choose_float_round<STREAMING>(format, stochastic);
  if (format.kind == NC_UNIFORM && format.fraction_bits >= 0) {
    return stochastic ? round_by<UniformValue<true>, STREAMING> : round_by<UniformValue<false>, STREAMING>;
  }
  return stochastic ? round_by_search<true, STREAMING> : round_by_search<false, STREAMING>;
}

struct RoundBuffers {
  alignas(64) uint32_t noise[CHUNK + 2 * NOISE_SPAN];
  alignas(64) float input[CHUNK], values[CHUNK], scratch[CHUNK];
};

static void round_chunk(const RoundJob& job, RoundBuffers& buffers, int64_t begin, int count) {
  const nc_format& format = *job.format;
  const Sink sink = {job.out, job.dtype, false, job.streaming, false};
  const float* const x = Source{job.x, job.dtype}.read(begin, count, buffers.input);
  const uint32_t* noise = nullptr;
  if (job.stochastic) noise = fill_noise({job.seed, 0}, uint64_t(begin), round_up(count), buffers.noise);
  if (sink.is_direct(begin, count)) {
    const Round round = (job.streaming ? choose_round<true> : choose_round<false>)(format, job.stochastic);
    round(format, job.overflow, x, noise, count, sink.floats(begin));
  } else {
    choose_round<false>(format, job.stochastic)(format, job.overflow, x, noise, round_up(count), buffers.values);
    sink.write(buffers.values, begin, count, buffers.scratch);
  }
}

static void round_range(const RoundJob& job, int64_t begin, int64_t end) {
  Placed<RoundBuffers> place(uintptr_t(job.out) + sizeof(float) * begin);
  for (int64_t at = begin; at < end; at += CHUNK) {
    round_chunk(job, place.buffers(), at, int(smaller(CHUNK, end - at)));
  }
  if (job.streaming) end_streaming();
}

}  // namespace nc::NC_ISA
