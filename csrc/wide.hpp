// Vectors of float32 or of float64, whichever a kernel computes in: Lanes<float>, Lanes<double>.
#pragma once

#include "simd.hpp"

namespace nc::NC_ISA {

typedef double VD __attribute__((vector_size(4 * LANES)));
typedef int64_t VL __attribute__((vector_size(4 * LANES)));
typedef float VFHalf __attribute__((vector_size(2 * LANES)));
typedef uint32_t VUHalf __attribute__((vector_size(2 * LANES)));

static inline VD max(VD a, VD b) {
#if defined(__AVX512F__)
  return _mm512_max_pd(a, b);
#elif defined(__AVX2__)
  return _mm256_max_pd(a, b);
#elif defined(__SSE2__)
  return _mm_max_pd(a, b);
#else
  return a > b ? a : b;
#endif
}

static inline VD min(VD a, VD b) {
#if defined(__AVX512F__)
  return _mm512_min_pd(a, b);
#elif defined(__AVX2__)
  return _mm256_min_pd(a, b);
#elif defined(__SSE2__)
  return _mm_min_pd(a, b);
#else
  return a < b ? a : b;
#endif
}

template <class Real>
struct Lanes;

template <>
struct Lanes<float> {
  using V = VF;
  using I = VI;
  using U = VU;
  using Word = uint32_t;
  static constexpr int COUNT = LANES, MANTISSA = 23, BIAS = 127;
  static constexpr Word SIGN_BIT = SIGN, INFINITY_BITS = INFINITE;

  static void store_floats(float* p, V v) { store(p, v); }
};

template <>
struct Lanes<double> {
  using V = VD;
  using I = VL;
  using U = VU64;
  using Word = uint64_t;
  static constexpr int COUNT = LANES / 2, MANTISSA = 52, BIAS = 1023;
  static constexpr Word SIGN_BIT = Word(1) << 63, INFINITY_BITS = Word(2047) << 52;

  static void store_floats(float* p, V v) { store(p, __builtin_convertvector(v, VFHalf)); }
};

template <class Real>
static inline typename Lanes<Real>::Word bits_of_real(Real x) {
  typename Lanes<Real>::Word u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}

// Whether a comparison holds in any lane.
static inline bool any_lane(VI mask) { return any(mask); }
static inline bool any_lane(VL mask) { return any((VI)mask); }

}  // namespace nc::NC_ISA
