// bfloat16 and float16 to float32 and back, round to nearest even. F16C where there is one, else by hand.
#pragma once

#include "narrowcast.h"
#include "simd.hpp"

namespace nc::NC_ISA {

static inline VF widen_bfloat16(const uint16_t* p) { return (VF)(load_halves(p) << 16); }

static inline VF widen_float16(const uint16_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  VU half = load_halves(p);
  // exponent and mantissa into place; the product corrects the bias and normalises what is subnormal
  VF value = (VF)((half & 0x7fff) << 13) * power_of_two(112);
  VU bits = (half & 0x7fff) >= 0x7c00 ? (VU)value | INFINITE : (VU)value;
  return (VF)(bits | (half & 0x8000) << 16);
#endif
}

// Every NaN as the quiet one without sign and payload: processors differ in what they keep of them.
static inline VF with_one_nan(VF value) {
  return (VF)(((VU)value & MAGNITUDE) > INFINITE ? all<VU>(QUIET_NAN) : (VU)value);
}

static inline VU bfloat16_bits(VF value) {
  VU u = (VU)value;
  VU rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return (u & MAGNITUDE) > INFINITE ? all<VU>(QUIET_NAN >> 16) : rounded;
}

static inline VF round_to_bfloat16(VF value) { return (VF)(bfloat16_bits(value) << 16); }

static inline void narrow_bfloat16(uint16_t* p, VF value) { store_halves(p, bfloat16_bits(value)); }

static inline void narrow_float16(uint16_t* p, VF value) {
  value = with_one_nan(value);
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#else
  constexpr uint32_t smallest_normal = (127 - 14) << 23, overflow = 0x477ff000;  // 2^-14 and 65520
  const VU u = (VU)value & MAGNITUDE;
  const VU normal = (u + 0xfff + (u >> 13 & 1) - ((127 - 15) << 23)) >> 13;
  // below 2^-14 the quantum is 2^-24, which is that of 0.5 in float32
  const VU subnormal = (VU)((VF)u + 0.5f) - bits_of(0.5f);
  VU half = u < smallest_normal ? subnormal : normal;
  half = u >= overflow ? all<VU>(0x7c00u) : half;
  half = u > INFINITE ? all<VU>(0x7e00u) : half;
  store_halves(p, half | ((VU)value & SIGN) >> 16);
#endif
}

// count values to float32; nothing past them is read or written.
template <VF (*widen_vector)(const uint16_t*)>
static void widen_all(const uint16_t* x, int count, float* out) {
  int i = 0;
  for (; i + LANES <= count; i += LANES) store(out + i, widen_vector(x + i));
  if (i == count) return;
  uint16_t tail[LANES] = {};
  float wide[LANES];
  __builtin_memcpy(tail, x + i, 2 * (count - i));
  store(wide, widen_vector(tail));
  __builtin_memcpy(out + i, wide, 4 * (count - i));
}

static void widen(const uint16_t* x, int32_t dtype, int count, float* out) {
  (dtype == NC_BFLOAT16 ? widen_all<widen_bfloat16> : widen_all<widen_float16>)(x, count, out);
}

template <void (*narrow_vector)(uint16_t*, VF)>
static void narrow_all(const float* x, int count, uint16_t* out) {
  int i = 0;
  for (; i + LANES <= count; i += LANES) narrow_vector(out + i, load<VF>(x + i));
  if (i == count) return;
  float tail[LANES] = {};
  uint16_t half[LANES];
  __builtin_memcpy(tail, x + i, 4 * (count - i));
  narrow_vector(half, load<VF>(tail));
  __builtin_memcpy(out + i, half, 2 * (count - i));
}

static void narrow(const float* x, int32_t dtype, int count, uint16_t* out) {
  (dtype == NC_BFLOAT16 ? narrow_all<narrow_bfloat16> : narrow_all<narrow_float16>)(x, count, out);
}

}  // namespace nc::NC_ISA
