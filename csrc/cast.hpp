// Plain casts: values of one type to another, or added to what is there.
#pragma once

#include "kernels.hpp"
#include "sink.hpp"
#include "source.hpp"

namespace nc::NC_ISA {

struct CastBuffers {
  alignas(64) float input[CHUNK], values[CHUNK], scratch[CHUNK];
};

// STREAMING: out is aligned and written past the caches.
template <bool STREAMING>
static void copy_with_one_nan(const float* x, int count, float* out) {
  for (int i = 0; i < count; i += LANES) put<STREAMING>(out + i, with_one_nan(load<VF>(x + i)));
}

static void cast_chunk(const CastJob& job, CastBuffers& buffers, int64_t begin, int count) {
  const Sink sink = {job.out, job.out_dtype, job.accumulate, job.streaming, true};
  const float* const x = Source{job.x, job.dtype}.read(begin, count, buffers.input);
  if (sink.is_direct(begin, count)) {
    (job.streaming ? copy_with_one_nan<true> : copy_with_one_nan<false>)(x, count, sink.floats(begin));
  } else {
    copy_with_one_nan<false>(x, round_up(count), buffers.values);
    sink.write(buffers.values, begin, count, buffers.scratch);
  }
}

static void cast_range(const CastJob& job, int64_t begin, int64_t end) {
  Placed<CastBuffers> place(uintptr_t(job.out) + sizeof(float) * begin);
  for (int64_t at = begin; at < end; at += CHUNK) {
    cast_chunk(job, place.buffers(), at, int(smaller(CHUNK, end - at)));
  }
  if (job.streaming) end_streaming();
}

}  // namespace nc::NC_ISA
