// From the largest magnitude of a block to its scale, and scales as bytes.
#pragma once

#include "halves.hpp"
#include "narrowcast.h"
#include "simd.hpp"
#include "source.hpp"
#include "treesum.hpp"

namespace nc::NC_ISA {

constexpr float TINY = 0x1p-100f;  // a block below this is a block of zeros

static inline VI exponent_of(VF x) { return ((VI)x >> 23) - 127; }

static inline VI ceil_exponent_of(VF x) { return exponent_of(x) - (((VI)x & 0x7fffff) != 0); }

// 2^exponent for exponents from -127 to 127.
static inline VF powers_of_two(VI exponent) {
  return (VF)(exponent == -127 ? all<VI>(0x400000) : (exponent + 127) << 23);
}

static inline VI clamped(VI exponent, int low, int high) { return min(max(exponent, all<VI>(low)), all<VI>(high)); }

static inline VF power_scale(const nc_plan& plan, VF top) {
  const int highest = int(bits_of(plan.max_scale) >> 23) - 127;  // beyond, the largest level would turn infinite
  if (plan.rule == NC_POW_APS)
    return powers_of_two(clamped(ceil_exponent_of(top) - plan.target_exponent, -126, highest));
  if (plan.rule == NC_POW_RCEIL) return powers_of_two(clamped(ceil_exponent_of(top / plan.target), -127, highest));
  return powers_of_two(clamped(exponent_of(top) - plan.target_exponent, -127, highest));
}

// A quotient of the rule NC_DIVIDE, as it will be stored.
static inline VF storable(const nc_plan& plan, VF scale) {
  if (plan.store == NC_STORE_BF16) scale = round_to_bfloat16(scale);
  return min(scale, all<VF>(plan.max_scale));
}

static inline VF inverse_of(VF scale) {
  const VI none = (scale == 0) | (scale != scale);
  return none ? VF{} : 1.0f / scale;
}

// The scale from the bits of the largest magnitude: 0 for a block of zeros, NaN for one that is not finite. With
// `quotient`, that in place of top / target.
static inline VF scale_of(const nc_plan& plan, VU top, const float* quotient) {
  VI live = (VF)top >= TINY;
  const VI finite = (VI)top < int32_t(INFINITE);
  const VF safe = live & finite ? (VF)top : all<VF>(1.0f);
  VF scale;
  if (plan.rule == NC_DIVIDE) {
    scale = storable(plan, quotient ? load<VF>(quotient) : safe / plan.target);
    // rounded down, the largest value may come back as less than what counts as zero
    if (plan.store == NC_STORE_BF16) live = live & (scale * plan.target >= TINY);
  } else {
    scale = power_scale(plan, safe);
  }
  return finite ? (live ? scale : VF{}) : all<VF>(float_of(QUIET_NAN));
}

// L2 norm / target of a block, from its largest magnitude. Scaled by a power of two first, so that squares neither
// overflow nor vanish.
static float norm_quotient(const nc_plan& plan, const Source& source, int64_t begin, int64_t count, uint32_t top) {
  if (top >= INFINITE || float_of(top) < TINY) return 1.0f;
  const int exponent = int(top >> 23) - 127;  // -101 at least
  const float down = power_of_two(-(exponent < 126 ? exponent : 126));
  const int64_t width = power_of_two_above(count);
  const int row_width = int(smaller(width, ROW));
  const auto squares = [&](int64_t row, float* out) {
    const int64_t from = row * ROW;
    const int here = from < count ? int(smaller(count - from, row_width)) : 0;
    const float* const x = here ? source.read(begin + from, here, out) : out;
    int i = 0;
    for (; i < round_up(here); i += LANES) {
      const VF small = load<VF>(x + i) * down;
      store(out + i, small * small);
    }
    for (; i < row_width; i += LANES) store(out + i, VF{});
  };
  const float norm = sqrt(all<VF>(tree_sum(squares, width)))[0];
  return norm / plan.target * (1.0f / down);
}

static inline int store_size(int32_t store_as) {
  return store_as == NC_STORE_FP32 ? 4 : store_as == NC_STORE_BF16 ? 2 : 1;
}

// A scale that has been rounded to what the plane holds, as number `index`.
static inline void write_scale(int32_t store, float scale, uint8_t* plane, int64_t index) {
  const uint32_t bits = scale == scale ? bits_of(scale) : QUIET_NAN;
  if (store == NC_STORE_FP32) {
    __builtin_memcpy(plane + 4 * index, &bits, 4);
  } else if (store == NC_STORE_BF16) {
    const uint16_t half = uint16_t(bits >> 16);
    __builtin_memcpy(plane + 2 * index, &half, 2);
  } else {
    plane[index] = uint8_t(bits > INFINITE ? 255 : bits >> 23);
  }
}

// Scales whose NaN is QUIET_NAN, from `first` on. There is room for a vector more.
static void write_scales(int32_t store_as, const float* scales, int count, uint8_t* plane, int64_t first) {
  alignas(64) uint8_t bytes[4 * CHUNK / GROUP];
  const int size = store_size(store_as);
  for (int i = 0; i < count; i += LANES) {
    const VU bits = load<VU>(scales + i);
    if (store_as == NC_STORE_FP32) store(bytes + 4 * i, bits);
    if (store_as == NC_STORE_BF16) store_halves(reinterpret_cast<uint16_t*>(bytes) + i, bits >> 16);
    if (store_as == NC_STORE_E8M0) store_bytes(bytes + i, (VI)(bits >> 23));  // 255 for NaN
  }
  __builtin_memcpy(plane + size * first, bytes, size * count);
}

static inline VF scales_of_exponents(VI code) {
  const VI power = code == 0 ? all<VI>(0x400000) : code << 23;  // 2^-127 is subnormal
  return (VF)(code == 255 ? all<VI>(int32_t(QUIET_NAN)) : power);
}

// LANES scales at p, the first of them.
static inline VF load_scales(int32_t store_as, const uint8_t* p) {
  if (store_as == NC_STORE_FP32) return load<VF>(p);
  if (store_as == NC_STORE_BF16) return widen_bfloat16(reinterpret_cast<const uint16_t*>(p));
  return scales_of_exponents(load_bytes(p));
}

// Scales first .. first + count - 1. There is room for a vector more.
static inline void read_scales(int32_t store_as, const uint8_t* plane, int64_t first, int count, float* scales) {
  const int size = store_size(store_as);
  const uint8_t* p = plane + size * first;
  int i = 0;
  for (; i + LANES <= count; i += LANES, p += size * LANES) store(scales + i, load_scales(store_as, p));
  uint8_t tail[4 * LANES] = {};
  __builtin_memcpy(tail, p, size * (count - i));
  if (i < count) store(scales + i, load_scales(store_as, tail));
}

}  // namespace nc::NC_ISA
