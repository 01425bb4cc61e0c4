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

template <class Rule>
static void round_by(const nc_format& format, int32_t overflow, const float* x, const uint32_t* noise, int count,
                     float* out) {
  const Rule rule(format, overflow);
  for (int i = 0; i < count; i += LANES) {
    const VU random = Rule::STOCHASTIC ? load<VU>(noise + i) : VU{};
    store(out + i, rule.values(load<VF>(x + i), random));
  }
}

template <bool STOCHASTIC>
static void round_by_search(const nc_format& format, int32_t, const float* x, const uint32_t* noise, int count,
                            float* out) {
  for (int i = 0; i < count; i++) out[i] = table_value<STOCHASTIC>(format, x[i], STOCHASTIC ? noise[i] : 0);
}

static Round choose_float_round(const nc_format& format, bool stochastic) {
  if (stochastic) return round_by<FloatValue<SmallFloat<true>>>;
  if (RoundingByAddition::serves(format)) return round_by<FloatValue<RoundingByAddition>>;
  return round_by<FloatValue<SmallFloat<false>>>;
}

static Round choose_round(const nc_format& format, bool stochastic) {
  if (format.kind == NC_FLOAT) return choose_float_round(format, stochastic);
  if (format.kind == NC_UNIFORM && format.fraction_bits >= 0) {
    return stochastic ? round_by<UniformValue<true>> : round_by<UniformValue<false>>;
  }
  return stochastic ? round_by_search<true> : round_by_search<false>;
}

struct RoundBuffers {
  alignas(64) float input[CHUNK], values[CHUNK], scratch[CHUNK];
  alignas(64) uint32_t noise[CHUNK + 2 * NOISE_SPAN];
};

static void round_range(const RoundJob& job, int64_t begin, int64_t end) {
  RoundBuffers buffers;
  const Source source = {job.x, job.dtype};
  const Sink sink = {job.out, job.dtype, false, job.streaming, false};
  const Round round = choose_round(*job.format, job.stochastic);
  for (int64_t at = begin; at < end; at += CHUNK) {
    const int count = int(smaller(CHUNK, end - at));
    const float* const x = source.read(at, count, buffers.input);
    const uint32_t* noise = nullptr;
    if (job.stochastic) noise = fill_noise({job.seed, 0}, uint64_t(at), round_up(count), buffers.noise);
    if (sink.is_direct(at, count) && !job.streaming) {
      round(*job.format, job.overflow, x, noise, count, sink.floats(at));
      continue;
    }
    round(*job.format, job.overflow, x, noise, round_up(count), buffers.values);
    sink.write(buffers.values, at, count, buffers.scratch);
  }
  if (job.streaming) end_streaming();
}

}  // namespace nc::NC_ISA
