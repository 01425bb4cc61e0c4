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

  U exponents, to_addend, keep_sign, kept_bits, half_noise;
  V least, high, low, lost_high, lost_low;
  int noise_left, noise_right;
  bool is_float32;
  nc_number number;

  // Bits of a pattern below the last one that is kept.
  static int dropped(const nc_number& number) { return number.exact ? 0 : L::MANTISSA - number.man_bits; }
  static int positive(int n) { return n > 0 ? n : 0; }
  static V power(int exponent) { return (V)all<U>(Word(exponent + L::BIAS) << L::MANTISSA); }

  explicit Rounder(const nc_number& number)
      : exponents(all<U>(number.even_steps ? Word(0) : L::INFINITY_BITS)),
        to_addend(all<U>((Word(L::MANTISSA - number.man_bits) << L::MANTISSA) + (Word(1) << (L::MANTISSA - 1)))),
        keep_sign(all<U>(number.signed_zero ? L::SIGN_BIT : Word(0))),
        kept_bits(all<U>(~((Word(1) << dropped(number)) - 1))),
        half_noise(all<U>(dropped(number) > 16 ? Word(1) << (dropped(number) - 17) : Word(0))),
        least(power(number.min_exponent)),
        high(all<V>(Real(number.high))),
        low(all<V>(Real(number.low))),
        lost_high(all<V>(Real(number.lost_high))),
        lost_low(all<V>(Real(number.lost_low))),
        noise_left(positive(dropped(number) - 16)),
        noise_right(positive(16 - dropped(number))),
        is_float32(number.man_bits == 23 && number.min_exponent == -126 && number.lost_high > __FLT_MAX__ &&
                   !number.even_steps),
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
    if constexpr (sizeof(Real) == 8) {
      if (is_float32) return __builtin_convertvector(__builtin_convertvector(x, VFHalf), VD);
    }
    if (number.even_steps) x = min(nc::NC_ISA::max(x, low), high);
    if (number.parity >= 0) x = settled(x);
    const V addend = (V)((U)binade_of(x) + to_addend);
    const V rounded = (x + addend) - addend;
    const V value = (V)((U)rounded | ((U)x & keep_sign));
    return number.even_steps ? value : limited(value);  // what is clamped before it is rounded does not leave the range
  }

  // Stochastic, for floats whose numbers are not subnormal: 2 R + 1 is added to the pattern, 17 bits below the last bit
  // that is kept, and carries. R is 16 random bits; a pattern that is too short for the lowest of them has zeros there.
  V nudged(V x, U random) const {
    const U nudge = ((random << noise_left) >> noise_right) + half_noise;
    return (V)(((U)x + nudge) & kept_bits);
  }

  V signed_or_zero(V rounded) const {
    if (number.signed_zero) return rounded;
    return rounded == Real(0) ? V{} : rounded;
  }
};

static inline VD floor_of(VD x) {
  const VD whole = (x + 0x1p52) - 0x1p52;  // x is not negative and below 2^51
  return whole > x ? whole - 1.0 : whole;
}

// Stochastic rounding of any x, by counting steps. odd: 2 R + 1, R being 16 random bits.
static inline VD stochastic_by_steps(const Rounder<double>& rounder, VD x, VD odd) {
  const nc_number& number = rounder.number;
  VD t = number.even_steps ? min(max(x, rounder.low), rounder.high) : x;
  const VD size = (VD)((VU64)t & ~Lanes<double>::SIGN_BIT);
  const VD step = (VD)((VU64)rounder.binade_of(size) - (uint64_t(number.man_bits) << 52));
  const VD per_step = (VD)((uint64_t(2046) << 52) - (VU64)step);
  const VD steps = floor_of((floor_of(size * per_step * 131072.0) + odd) * (1 / 131072.0));
  const VD rounded = rounder.signed_or_zero((VD)((VU64)(steps * step) | ((VU64)x & Lanes<double>::SIGN_BIT)));
  return rounder.with_specials(x, rounder.limited(rounded));
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

// Stochastic rounding of x, or of a float64 sum to odd. The rare vector with a subnormal or non-finite number takes the
// long way.
static inline VD stochastic(const Rounder<double>& rounder, VD x, VUHalf random) {
  const VD size = (VD)((VU64)x & ~Lanes<double>::SIGN_BIT);
  const VL ordinary = (size >= rounder.least) & (size <= __DBL_MAX__);
  if (rounder.number.even_steps || any_lane(!(ordinary | (size == 0.0)))) {
    return stochastic_by_steps(rounder, x, __builtin_convertvector(2 * random + 1, VD));
  }
  return rounder.limited(rounder.signed_or_zero(rounder.nudged(x, __builtin_convertvector(random, VU64))));
}

// The same of a finite float32 x.
static inline VF stochastic(const Rounder<float>& rounder, VF x, VU random) {
  const nc_number& number = rounder.number;
  VF rounded = rounder.nudged(x, random);
  const VF size = magnitude(x);
  // in formats with float32's exponents the pattern of a subnormal number is rounded like any other
  if (number.min_exponent > 1 - Lanes<float>::BIAS && any_lane((size < rounder.least) & (size != 0.0f))) {
    const VF small = min(size, rounder.least);
    const VI counted = to_int(small * power_of_two(number.man_bits + 17 - number.min_exponent));
    const VI steps = (counted + (VI)(2 * random + 1)) >> 17;
    const VF value = to_float(steps) * power_of_two(number.min_exponent - number.man_bits);
    rounded = size < rounder.least ? (VF)((VU)value | ((VU)x & SIGN)) : rounded;
  }
  return rounder.limited(rounder.signed_or_zero(rounded));
}

// Stochastic rounding of a + b where float32 cannot hold it.
static __attribute__((noinline)) VF stochastic_long_sum(const nc_number& number, VF a, VF b, VU random) {
  constexpr int HALF = LANES / 2;
  const Rounder<double> rounder(number);
  VFHalf x[2], y[2], sums[2];
  VUHalf bits[2];
  __builtin_memcpy(x, &a, sizeof a);
  __builtin_memcpy(y, &b, sizeof b);
  __builtin_memcpy(bits, &random, sizeof random);
  static_assert(sizeof x == HALF * 2 * sizeof(float), "two halves");
  for (int i = 0; i < 2; i++) {
    const VD sum = odd_sum(__builtin_convertvector(x[i], VD), __builtin_convertvector(y[i], VD));
    sums[i] = __builtin_convertvector(stochastic(rounder, sum, bits[i]), VFHalf);
  }
  return load<VF>((const float*)sums);
}

// Whether `sum`, the float32 sum of a and b, is rounded or not finite. Its difference from the larger of the two is
// exact, so that one of these tells.
static inline bool is_inexact(VF a, VF b, VF sum) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(sum - a, b, _CMP_NEQ_UQ) | _mm512_cmp_ps_mask(sum - b, a, _CMP_NEQ_UQ);
#else
  return any((sum - a != b) | (sum - b != a));
#endif
}

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
