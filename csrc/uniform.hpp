// Evenly spaced formats: the code of t is an integer.
#pragma once

#include "narrowcast.h"
#include "simd.hpp"

namespace nc::NC_ISA {

// A size below 2^14 rounded away from zero with a probability that is its fraction, cut to 17 bits.
static inline VI stochastic_integer(VF size, VU noise) {
  return (to_int(size * 131072.0f) + (VI)(2 * noise + 1)) >> 17;
}

template <bool STOCHASTIC_ROUNDING>
struct TwosComplement {
  static constexpr bool STOCHASTIC = STOCHASTIC_ROUNDING;
  VF low, high;

  explicit TwosComplement(const nc_format& format)
      : low(all<VF>(float(format.low))), high(all<VF>(float(format.high))) {}

  // Bits above the width of the format are not clean: packing drops them.

  VI codes(VF t, VU noise) const {
    t = min(max(t, low), high);
    if (!STOCHASTIC) return to_nearest_int(t);
    const VI sign = (VI)t >> 31;
    return (stochastic_integer(magnitude(t), noise) ^ sign) - sign;
  }
};

template <bool STOCHASTIC_ROUNDING>
struct SignMagnitude {
  static constexpr bool STOCHASTIC = STOCHASTIC_ROUNDING;
  VF high;
  Shift shift;
  int32_t sign_bit;

  explicit SignMagnitude(const nc_format& format)
      : high(all<VF>(float(format.high))), shift(shift_by(32 - format.bits)), sign_bit(1 << (format.bits - 1)) {}

  VI codes(VF t, VU noise) const {
    const VF size = min(magnitude(t), high);
    const VI integer = STOCHASTIC ? stochastic_integer(size, noise) : to_nearest_int(size);
    return integer | ((VI)t >> shift & sign_bit);
  }
};

// round_to: an integer times 2^-fraction_bits.
template <bool STOCHASTIC_ROUNDING>
struct UniformValue {
  static constexpr bool STOCHASTIC = STOCHASTIC_ROUNDING;
  VF low, high;
  float steps, step;
  bool signed_zero;

  UniformValue(const nc_format& format, int32_t /*overflow: always saturates*/)
      : low(all<VF>(float(format.low))),
        high(all<VF>(float(format.high))),
        steps(power_of_two(format.fraction_bits)),
        step(power_of_two(-format.fraction_bits)),
        signed_zero(format.neg_zero_code >= 0) {}

  static VF integer_of(VF size, VU noise) {
    if (!STOCHASTIC) return to_float(to_nearest_int(size));
    const VI whole = to_int(size);
    return to_float(whole + stochastic_integer(size - to_float(whole), noise));
  }

  VF values(VF x, VU noise) const {
    // the order of the operands makes a NaN the largest value
    const VF t = max(min(x * steps, high), low);
    const VU sign = (VU)t & SIGN;
    const VF size = magnitude(t);
    const VU value = (VU)(integer_of(size, noise) * step);
    if (signed_zero) return (VF)(value | sign);
    return (VF)(value == 0 ? value : value | sign);
  }
};

}  // namespace nc::NC_ISA
