// The kernels for one instruction set. Compiled once for each, with NC_ISA as the name of its namespace.
#include "kernels.hpp"

#include "cast.hpp"
#include "fused.hpp"
#include "round.hpp"
#include "transform.hpp"

namespace nc::NC_ISA {

static bool can_round(const nc_format& format) {
  if (format.kind == NC_FLOAT) return has_float32_normals(format);
  return (format.kind == NC_UNIFORM && format.fraction_bits >= 0) || has_table(format);
}

// Largest magnitude of the blocks that are finite; of x, which holds count values.
static uint32_t finite_top(const float* x, int count, int block) {
  const uint32_t top = largest_magnitude(x, count);
  if (top < INFINITE) return top;
  uint32_t found = 0;
  for (int at = 0; at < count; at += block) {
    const uint32_t here = largest_magnitude(x + at, int(smaller(block, count - at)));
    if (here < INFINITE && here > found) found = here;
  }
  return found;
}

static Extremes finite_extremes(const EncodeJob& job, int64_t begin, int64_t end) {
  const Source source = {job.x, job.dtype};
  const int64_t chunk = grain(*job.plan);
  alignas(64) float buffer[CHUNK];
  Extremes found = {0, 0, 0};
  for (int64_t at = begin; at < end; at += chunk) {
    const int count = int(smaller(chunk, end - at));
    const uint32_t top = finite_top(source.read(at, count, buffer), round_up(count), int(job.plan->block));
    found.top = top > found.top ? top : found.top;
  }
  return found;
}

static Extremes extremes(const EncodeJob& job, int64_t begin, int64_t end) {
  if (job.plan->method == NC_NVFP4) return finite_extremes(job, begin, end);
  return extremes_of({job.x, job.dtype}, begin, end, job.plan->method == NC_AFFINE);
}

// So that the largest block scale is the largest e4m3fn number; capped so that nothing decodes to Inf.
static TensorScale nvfp4_scale(const nc_plan& plan, uint32_t top) {
  const float scale = float_of(top) / (plan.target * E4M3FN_LARGEST);
  return scaled_scale(float_of(top) < TINY ? 0.0f : scale < plan.max_scale ? scale : plan.max_scale);
}

static TensorScale tensor_scale(const EncodeJob& job, const Extremes& extremes, const float* given) {
  const nc_plan& plan = *job.plan;
  if (plan.store == NC_STORE_NONE) return scaled_scale(plan.constant);
  if (plan.method == NC_NVFP4) return nvfp4_scale(plan, extremes.top);
  TensorScale scale = scale_of_many(plan, {job.x, job.dtype}, 0, job.n, extremes);
  if (given && plan.method == NC_SCALED && !scale.lost) scale = scaled_scale(*given);
  write_block_scale(job, scale, 0);
  return scale;
}

#define NC_TEXT_OF(name) #name
#define NC_TEXT(name) NC_TEXT_OF(name)

const Kernels kernels = {NC_TEXT(NC_ISA), can_code,    can_round, grain,    extremes,    tensor_scale,
                         encode_part,     decode_range, round_range, cast_range, can_fuse, encode_owed, reduce_range,
                         can_transform,   encode_transform, decode_transform, reduce_transform};

}  // namespace nc::NC_ISA
