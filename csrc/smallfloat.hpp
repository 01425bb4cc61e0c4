// Small floats: rounding is integer arithmetic on the pattern of the float32.
//
// At and above the smallest normal number, dropping the low 23 - man_bits bits of the pattern leaves the code (but for
// a constant: the biases differ), and adding a number below the first kept bit before that rounds. Below the smallest
// normal number all steps are equal.
#pragma once

#include "narrowcast.h"
#include "simd.hpp"

namespace nc::NC_ISA {

// Formats whose normal numbers are normal in float32, too.
static bool has_float32_normals(const nc_format& format) { return format.bias <= 127; }

template <bool STOCHASTIC_ROUNDING>
struct SmallFloat {
  static constexpr bool STOCHASTIC = STOCHASTIC_ROUNDING;
  int dropped;
  Shift drop;
  uint32_t half_less_one;
  int32_t parity, rebias;
  VI max, min_normal;
  float magic, quantum, to_steps, to_17_bits;

  explicit SmallFloat(const nc_format& format)
      : dropped(23 - format.man_bits),
        drop(shift_by(dropped)),
        half_less_one((1u << (dropped - 1)) - 1),
        parity((127 - format.bias) << format.man_bits & 1),
        rebias((127 - format.bias) << format.man_bits),
        max(all<VI>(int32_t(bits_of(format.max_level)))),
        min_normal(all<VI>((128 - format.bias) << 23)),
        magic(power_of_two(24 - format.bias - format.man_bits)),
        quantum(power_of_two(1 - format.bias - format.man_bits)),
        // 2^17 / quantum may be too large for one float
        to_steps(power_of_two(format.bias - 1)),
        to_17_bits(power_of_two(format.man_bits + 17)) {}

  // The pattern of a magnitude with what decides the rounding added; the dropped bits are not yet cleared. Unsigned,
  // since that of a NaN (whose result is not used) may be carried past the sign.
  VU nudged(VI u, VU noise) const {
    // 17 random bits, the last of them 1, aligned with the top of the dropped bits
    const VU odd = 2 * noise + 1;
    if (STOCHASTIC) return (VU)u + (dropped >= 17 ? odd << (dropped - 17) : odd >> (17 - dropped));
    // ties go to the even code, whose parity is that of the pattern unless there is no mantissa
    return (VU)u + half_less_one + (VU)((u >> drop ^ parity) & 1);
  }

  // A magnitude below the smallest normal, in steps.
  VI subnormal_steps(VI u, VU noise) const {
    if (!STOCHASTIC) return (VI)((VF)u + magic) - int32_t(bits_of(magic));
    // unsigned, since for a magnitude that is not below (whose result is not used) the integer may be anything
    return (VI)((VU)to_int((VF)u * to_steps * to_17_bits) + 2 * noise + 1) >> 17;
  }

  // The rounded magnitude as a pattern; beyond the largest value too.
  VI rounded(VI u, VU noise) const {
    const VI normal = (VI)(nudged(u, noise) >> dropped << dropped);
    const VF subnormal = STOCHASTIC ? to_float(subnormal_steps(u, noise)) * quantum : ((VF)u + magic) - magic;
    return u < min_normal ? (VI)subnormal : normal;
  }
};

template <bool STOCHASTIC_ROUNDING>
struct FloatCode : SmallFloat<STOCHASTIC_ROUNDING> {
  Shift sign_shift;
  int32_t sign_bit;
  bool signed_zero;

  explicit FloatCode(const nc_format& format)
      : SmallFloat<STOCHASTIC_ROUNDING>(format),
        sign_shift(shift_by(32 - format.bits)),
        sign_bit(1 << (format.bits - 1)),
        signed_zero(format.neg_zero_code >= 0) {}

  VI codes(VF t, VU noise) const {
    const VI u = min((VI)t & int32_t(MAGNITUDE), this->max);
    const VI normal = (VI)(this->nudged(u, noise) >> this->drop) - this->rebias;
    const VI code = u < this->min_normal ? this->subnormal_steps(u, noise) : normal;
    const VI sign = (VI)t >> sign_shift & sign_bit;
    if (signed_zero) return code | sign;
    return code == 0 ? code : code | sign;
  }
};

// Nearest rounding in fewer steps, for formats with a mantissa: adding the power of two whose unit in the last place is
// that of the format's binade leaves the rounded significand in the low bits of the sum.
struct RoundingByAddition {
  static constexpr bool STOCHASTIC = false;
  int32_t to_addend;
  VI max, min_normal, beyond;

  explicit RoundingByAddition(const nc_format& format)
      : to_addend((23 - format.man_bits) << 23),
        max(all<VI>(int32_t(bits_of(format.max_level)))),
        min_normal(all<VI>((128 - format.bias) << 23)),
        beyond(max + (1 << (23 - format.man_bits))) {}

  static bool serves(const nc_format& format) {
    const int max_binade = int(bits_of(format.max_level) >> 23) + 1;  // of `beyond`
    return format.man_bits > 0 && max_binade + 23 - format.man_bits < 255;
  }

  VI binade_of(VI u) const { return nc::NC_ISA::max(u & int32_t(INFINITE), min_normal); }

  VI rounded(VI u, VU) const {
    u = min(u, beyond);
    const VF addend = (VF)(binade_of(u) + to_addend);
    return (VI)(((VF)u + addend) - addend);
  }
};

template <bool SIGNED_ZERO>
struct FloatCodeByAddition : RoundingByAddition {
  Shift drop, sign_shift;
  int32_t sign_bit;

  explicit FloatCodeByAddition(const nc_format& format)
      : RoundingByAddition(format),
        drop(shift_by(23 - format.man_bits)),
        sign_shift(shift_by(32 - format.bits)),
        sign_bit(1 << (format.bits - 1)) {
    // The significand starts at 2^man_bits in every binade but the lowest. That and the bias are made good in advance:
    // an even number of units in the last place of the addend, modulo the 256 that a byte counts.
    to_addend += -((128 - format.bias) << format.man_bits) & 0xff;
  }

  // Without the sign. Bits 8 and up are not clean.
  VI magnitude_codes(VF t) const {
    const VI u = clamped_magnitude(t, max), binade = binade_of(u);
    return (VI)((VF)u + (VF)(binade + to_addend)) + (binade >> drop);
  }

  VI codes(VF t, VU) const {
    const VI code = magnitude_codes(t), sign = (VI)t >> sign_shift & sign_bit;
    if (SIGNED_ZERO) return code | sign;
    return (code & 0xff) == 0 ? code : code | sign;
  }

#if defined(__AVX512VBMI__)
  // Four vectors, where the signs are put in when codes are bytes already.
  __m512i bytes(VF a, VF b, VF c, VF d) const {
    const __m512i code = bytes_of<0>(magnitude_codes(a), magnitude_codes(b), magnitude_codes(c), magnitude_codes(d));
    const __m512i top = bytes_of<3>((VI)a, (VI)b, (VI)c, (VI)d);
    const __m512i shifted = _mm512_srl_epi16(top, _mm_cvtsi32_si128(8 - __builtin_ctz(sign_bit) - 1));
    const __m512i sign = _mm512_and_si512(shifted, _mm512_set1_epi8(char(sign_bit)));
    const __mmask64 nonzero = SIGNED_ZERO ? ~__mmask64(0) : _mm512_test_epi8_mask(code, code);
    return _mm512_mask_add_epi8(code, nonzero, code, sign);
  }
#endif
};

// round_to: the value instead of the code, and three ways to overflow.
template <class Rounding>
struct FloatValue {
  static constexpr bool STOCHASTIC = Rounding::STOCHASTIC;
  Rounding rounding;
  bool signed_zero, to_nan;
  VI max, lost, nan, positive, negative;

  static VI special(const nc_format& format, int32_t code, int32_t otherwise) {
    return all<VI>(int32_t(bits_of(format.levels[code >= 0 ? code : otherwise])));
  }

  FloatValue(const nc_format& format, int32_t overflow)
      : rounding(format),
        signed_zero(format.neg_zero_code >= 0),
        to_nan(overflow == NC_TO_NAN),
        max(rounding.max),
        lost(overflow == NC_SATURATE ? max : all<VI>(int32_t(to_nan ? QUIET_NAN : INFINITE))),
        nan(special(format, format.nan_code, format.max_code)),
        positive(special(format, format.inf_code, format.max_code)),
        negative(special(format, format.neg_inf_code, format.min_code)) {}

  VF values(VF x, VU noise) const {
    const VI u = (VI)x & int32_t(MAGNITUDE), sign = (VI)x & int32_t(SIGN);
    const VI finite = rounding.rounded(u, noise);
    const VI size = finite > max ? lost : finite;
    VI value = size | sign;
    if (!signed_zero) value = size == 0 ? size : value;
    if (to_nan) value = size > int32_t(INFINITE) ? size : value;
    if (__builtin_expect(any(u >= int32_t(INFINITE)), false)) {
      value = u == int32_t(INFINITE) ? (sign < 0 ? negative : positive) : value;
      value = u > int32_t(INFINITE) ? nan : value;
    }
    return (VF)value;
  }
};

}  // namespace nc::NC_ISA
