// One rounding of a vector to an nc_number, and exact sums and products before it.
//
// Adding 1.5 * 2^(e + MANTISSA - man_bits), whose unit in the last place is the step of x's binade, and taking it away
// again rounds x to nearest even, subnormals included, since e is at least min_exponent.
#pragma once

#include "matmul.h"
#include "wide.hpp"

namespace nc::NC_ISA {

template <class Real>
struct Rounder {
  using L = Lanes<Real>;
  using V = typename L::V;
  using U = typename L::U;
  using Word = typename L::Word;

  U exponents, to_addend, keep_sign;
  V least, high, low, lost_high, lost_low;
  nc_number number;

  static V power(int exponent) { return (V)all<U>(Word(exponent + L::BIAS) << L::MANTISSA); }

  explicit Rounder(const nc_number& number)
      : exponents(all<U>(number.even_steps ? Word(0) : L::INFINITY_BITS)),
        to_addend(all<U>((Word(L::MANTISSA - number.man_bits) << L::MANTISSA) + (Word(1) << (L::MANTISSA - 1)))),
        keep_sign(all<U>(number.signed_zero ? L::SIGN_BIT : Word(0))),
        least(power(number.min_exponent)),
        high(all<V>(Real(number.high))),
        low(all<V>(Real(number.low))),
        lost_high(all<V>(Real(number.lost_high))),
        lost_low(all<V>(Real(number.lost_low))),
        number(number) {}

  V binade_of(V x) const { return nc::NC_ISA::max((V)((U)x & exponents), least); }

  // Without mantissa bits the neighbours of a tie are codes, not multiples: the even code may be the lower one.
  V settled(V x) const {
    const U mantissa = (U)x << (8 * int(sizeof(Word)) - L::MANTISSA);
    const U middle = all<U>(Word(1) << (8 * sizeof(Word) - 1));
    const U exponent = ((U)x >> L::MANTISSA) - Word(L::BIAS);
    const U odd = (exponent ^ Word(number.parity)) & Word(1);
    const auto down = (mantissa == middle) & (odd == Word(0)) & ((V)((U)x & ~L::SIGN_BIT) >= least);
    return down ? (V)((U)x & ~((Word(1) << L::MANTISSA) - 1)) : x;
  }

  V limited(V rounded) const {
    rounded = rounded > high ? lost_high : rounded;
    return rounded < low ? lost_low : rounded;
  }

  V with_specials(V x, V rounded) const {
    const V size = (V)((U)x & ~L::SIGN_BIT), infinite = (V)all<U>(L::INFINITY_BITS);
    if (__builtin_expect(!any_lane(!(size < infinite)), true)) return rounded;
    rounded = x == infinite ? all<V>(Real(number.inf)) : rounded;
    rounded = x == -infinite ? all<V>(Real(number.neg_inf)) : rounded;
    return x != x ? all<V>(Real(number.nan)) : rounded;
  }

  V nearest(V x) const {
    if (number.even_steps) x = min(nc::NC_ISA::max(x, low), high);
    if (number.parity >= 0) x = settled(x);
    const V addend = (V)((U)binade_of(x) + to_addend);
    const V rounded = (x + addend) - addend;
    return limited((V)((U)rounded | ((U)x & keep_sign)));
  }
};

static inline VD floor_of(VD x) {
  const VD whole = (x + 0x1p52) - 0x1p52;  // x is not negative and below 2^51
  return whole > x ? whole - 1.0 : whole;
}

// odd: 2 R + 1, R being 16 random bits.
static inline VD stochastic(const Rounder<double>& rounder, VD x, VD odd) {
  const nc_number& number = rounder.number;
  VD t = number.even_steps ? min(max(x, rounder.low), rounder.high) : x;
  const VD size = (VD)((VU64)t & ~Lanes<double>::SIGN_BIT);
  const VD step = (VD)((VU64)rounder.binade_of(size) - (uint64_t(number.man_bits) << 52));
  const VD per_step = (VD)((uint64_t(2046) << 52) - (VU64)step);
  const VD steps = floor_of((floor_of(size * per_step * 131072.0) + odd) * (1 / 131072.0));
  const VU64 rounded = (VU64)(steps * step);
  const VU64 sign = (VU64)x & Lanes<double>::SIGN_BIT;
  const VU64 signed_value = number.signed_zero ? rounded | sign : ((VD)rounded == 0.0 ? rounded : rounded | sign);
  return rounder.with_specials(x, rounder.limited((VD)signed_value));
}

// a + b to odd: where it is not exact, the neighbour whose last bit is 1. Rounding that once more to 50 bits or fewer is
// rounding the exact sum.
static inline VD odd_sum(VD a, VD b) {
  const VD sum = a + b, part = sum - a;
  const VD error = (a - (sum - part)) + (b - part);
  const VL inexact = (error < 0.0) | (error > 0.0);
  const VL is_even = ((VL)sum & 1) - 1;
  const VL step = (((VL)error ^ (VL)sum) < 0) | 1;
  return (VD)((VL)sum + (step & inexact & is_even));
}

static inline VF exact_sum(VF a, VF b) { return a + b; }  // the caller knows that this is as good
static inline VD exact_sum(VD a, VD b) { return odd_sum(a, b); }

static inline VF negated(VF a) { return -a; }
static inline VD negated(VD a) { return -a; }

// Mogami 2020: the sum of the patterns, that is, of the logarithms as Mitchell approximates them. What leaves float32's
// normal numbers is zero or Inf; the caller has made subnormal operands zero.
template <class Real>
static inline typename Lanes<Real>::V mogami_product(typename Lanes<Real>::V a, typename Lanes<Real>::V b) {
  using L = Lanes<Real>;
  using U = typename L::U;
  using V = typename L::V;
  const U size_a = (U)a & ~L::SIGN_BIT, size_b = (U)b & ~L::SIGN_BIT;
  const U sign = ((U)a ^ (U)b) & L::SIGN_BIT;
  U product = size_a + size_b - (typename L::Word(L::BIAS) << L::MANTISSA);
  const auto zero = (size_a == 0) | (size_b == 0);
  if constexpr (sizeof(Real) == 8) {  // in float32 the caller knows that no product leaves the range
    product = (V)product < 0x1p-126 ? U{} : product;
    product = (V)product >= 0x1p128 ? all<U>(L::INFINITY_BITS) : product;
    product = zero ? U{} : product;
    const auto special = (size_a >= L::INFINITY_BITS) | (size_b >= L::INFINITY_BITS);
    return special ? a * b : (V)(product | sign);
  } else {
    return (V)((zero ? U{} : product) | sign);
  }
}

}  // namespace nc::NC_ISA
