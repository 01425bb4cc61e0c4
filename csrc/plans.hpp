// Which plans these kernels can run.
#pragma once

#include "fused.hpp"

namespace nc::NC_ISA {

static bool has_table(const nc_format& format) { return format.starts && format.grid && format.prefix; }

static bool can_quantise(const nc_format& format, bool stochastic) {
  if (format.kind == NC_FLOAT) return has_float32_normals(format);
  return format.kind != NC_TABLE || has_table(format) || (format.packed && !stochastic);
}

static bool can_rotate(const nc_plan& plan) {
  const bool of_blocks = plan.store != NC_STORE_NONE && plan.method != NC_NVFP4 && plan.method != NC_AFFINE;
  const bool is_power = plan.block >= GROUP && (plan.block & (plan.block - 1)) == 0;
  return of_blocks && is_power && plan.block <= MAX_ROTATED;
}

static bool can_code(const nc_plan& plan) {
  if (plan.signs && !can_rotate(plan)) return false;
  if (plan.format.bits < 1 || plan.format.bits > 8 || plan.block < 0 || plan.block % GROUP != 0) return false;
  if (plan.method == NC_MEANS || plan.method == NC_SIGN) {
    return plan.block > 0 && plan.block <= INT32_MAX && plan.format.bits == 1;
  }
  if (plan.method == NC_NVFP4 && (plan.block == 0 || plan.block > CHUNK)) return false;
  return can_quantise(plan.format, plan.stochastic);
}

static bool can_fuse(const nc_plan& plan) {
  const bool whole = plan.block == 0 && plan.store != NC_STORE_NONE;
  return can_code(plan) && !whole && plan.method != NC_NVFP4 && grain(plan) <= MAX_TILE;
}

}  // namespace nc::NC_ISA
