// A chunk of codes, one a byte, and their scales to values.
#pragma once

#include "narrowcast.h"
#include "simd.hpp"

namespace nc::NC_ISA {

// What a dequantiser works on. count is a multiple of GROUP.
struct Coded {
  const uint8_t* codes;
  int count;
  const float* scale;  // one for each GROUP values
  const float* low;    // likewise, for the methods that have a second number
  const uint8_t* planes;  // where a dequantiser needs them: see fill_planes
};

// STREAMING: out is aligned and written past the caches.
using Dequantise = void (*)(const nc_format& format, const Coded& coded, float* out);

template <class Levels, bool STREAMING>
static void dequantise_by(const nc_format& format, const Coded& from, float* out) {
  const Coded coded = from;  // its own copy: stores cannot change it
  const Levels levels(format);
  for (int i = 0; i < coded.count; i += LANES) {
    put<STREAMING>(out + i, levels.of(load_bytes(coded.codes + i)) * coded.scale[i / GROUP]);
  }
}

struct UnsignedLevels {
  explicit UnsignedLevels(const nc_format&) {}
  VF of(VI codes) const { return to_float(codes); }
};

struct TwosComplementLevels {
  Shift unused;
  explicit TwosComplementLevels(const nc_format& format) : unused(shift_by(32 - format.bits)) {}
  VF of(VI codes) const { return to_float(codes << unused >> unused); }
};

struct SignMagnitudeLevels {
  Shift unused;
  int32_t mask;
  explicit SignMagnitudeLevels(const nc_format& format)
      : unused(shift_by(32 - format.bits)), mask((1 << (format.bits - 1)) - 1) {}
  VF of(VI codes) const { return (VF)((VI)to_float(codes & mask) | (codes << unused & int32_t(SIGN))); }
};

// ---- tables in registers ------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int REGISTER_TABLE_BITS = 5;
constexpr int LANE_BITS = 4;
static inline VF lookup_vector(const VF* table, VI codes) { return _mm512_permutexvar_ps((__m512i)codes, table[0]); }
// two registers are one look-up here
static inline VF lookup_pair(const VF* table, VI codes) {
  return _mm512_permutex2var_ps(table[0], (__m512i)codes, table[1]);
}
static inline VF choose(int bit, VI codes, VF without, VF with) {
  return _mm512_mask_blend_ps(_mm512_test_epi32_mask((__m512i)codes, _mm512_set1_epi32(1 << bit)), without, with);
}
#elif defined(__AVX2__)
constexpr int REGISTER_TABLE_BITS = 5;
constexpr int LANE_BITS = 3;
static inline VF lookup_vector(const VF* table, VI codes) {
  return _mm256_permutevar8x32_ps(table[0], (__m256i)codes);
}
static inline VF choose(int bit, VI codes, VF without, VF with) {
  return _mm256_blendv_ps(without, with, (VF)(codes << (31 - bit)));
}
static inline VF lookup_pair(const VF* table, VI codes) {
  return choose(LANE_BITS, codes, lookup_vector(table, codes), lookup_vector(table + 1, codes));
}
#else
constexpr int REGISTER_TABLE_BITS = 0;
#endif

#if defined(__AVX2__)
template <int BITS>
static inline VF lookup(const VF* table, VI codes) {
  if constexpr (BITS <= LANE_BITS) {
    return lookup_vector(table, codes);
  } else if constexpr (BITS == LANE_BITS + 1) {
    return lookup_pair(table, codes);
  } else {
    constexpr int half = 1 << (BITS - 1 - LANE_BITS);
    return choose(BITS - 1, codes, lookup<BITS - 1>(table, codes), lookup<BITS - 1>(table + half, codes));
  }
}

template <int BITS>
struct RegisterLevels {
  static constexpr int VECTORS = BITS <= LANE_BITS ? 1 : 1 << (BITS - LANE_BITS);
  VF table[VECTORS];

  explicit RegisterLevels(const nc_format& format) {
    float levels[VECTORS * LANES] = {};
    __builtin_memcpy(levels, format.levels, sizeof(float) << format.bits);
    for (int v = 0; v < VECTORS; v++) table[v] = load<VF>(levels + v * LANES);
  }

  VF of(VI codes) const { return lookup<BITS>(table, codes); }
};

template <int BITS, bool STREAMING>
static Dequantise choose_register_table(int bits) {
  if (bits <= BITS) return dequantise_by<RegisterLevels<BITS>, STREAMING>;
  if constexpr (BITS < REGISTER_TABLE_BITS) return choose_register_table<BITS + 1, STREAMING>(bits);
  return nullptr;
}
#endif

// Through integer registers and in pairs, which is faster than a gather instruction and than one by one.
static inline void look_up_eight(const float* table, const uint8_t* codes, float* levels) {
  uint64_t eight;
  __builtin_memcpy(&eight, codes, sizeof eight);
  for (int i = 0; i < 8; i += 2, eight >>= 16) {
    const uint64_t pair = bits_of(table[eight & 0xff]) | uint64_t(bits_of(table[eight >> 8 & 0xff])) << 32;
    __builtin_memcpy(levels + i, &pair, sizeof pair);
  }
}

template <bool STREAMING>
static void dequantise_by_table(const nc_format& format, const Coded& coded, float* out) {
  constexpr int PIECE = 256;
  alignas(64) float levels[PIECE];
  for (int begin = 0; begin < coded.count; begin += PIECE) {
    const int size = begin + PIECE < coded.count ? PIECE : coded.count - begin;
    for (int i = 0; i < size; i += 8) look_up_eight(format.levels, coded.codes + begin + i, levels + i);
    for (int i = 0; i < size; i += LANES) {
      put<STREAMING>(out + begin + i, load<VF>(levels + i) * coded.scale[(begin + i) / GROUP]);
    }
  }
}

constexpr int PLANE = 256;

// The bytes of the levels, lowest byte of all codes first.
static void fill_planes(const nc_format& format, uint8_t* planes) {
  for (int code = 0; code < 1 << format.bits; code++) {
    const uint32_t level = bits_of(format.levels[code]);
    for (int p = 0; p < 4; p++) planes[p * PLANE + code] = uint8_t(level >> 8 * p);
  }
}

#if defined(__AVX512F__)
// The four bytes of 64 levels at once: four tables of 256 bytes, each in four registers.
struct BytePlanes {
  __m512i table[4][4];

  explicit BytePlanes(const uint8_t* planes) {
    for (int part = 0; part < 16; part++) table[part / 4][part % 4] = _mm512_loadu_si512(planes + 64 * part);
  }

  __m512i plane(int p, __m512i codes, __mmask64 upper) const {
    const __m512i low = _mm512_permutex2var_epi8(table[p][0], codes, table[p][1]);
    return _mm512_mask_blend_epi8(upper, low, _mm512_permutex2var_epi8(table[p][2], codes, table[p][3]));
  }

  // levels[j] are those of codes 16 * j .. 16 * j + 15.
  void look_up(const uint8_t* p, VF* levels) const {
    // interleaving works within quarters of a register: deal out fours of codes so that the results come in order
    const __m512i deal = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i codes = _mm512_permutexvar_epi32(deal, _mm512_loadu_si512(p));
    const __mmask64 upper = _mm512_movepi8_mask(codes);
    const __m512i b0 = plane(0, codes, upper), b1 = plane(1, codes, upper);
    const __m512i b2 = plane(2, codes, upper), b3 = plane(3, codes, upper);
    const __m512i low01 = _mm512_unpacklo_epi8(b0, b1), high01 = _mm512_unpackhi_epi8(b0, b1);
    const __m512i low23 = _mm512_unpacklo_epi8(b2, b3), high23 = _mm512_unpackhi_epi8(b2, b3);
    levels[0] = (VF)_mm512_unpacklo_epi16(low01, low23);
    levels[1] = (VF)_mm512_unpackhi_epi16(low01, low23);
    levels[2] = (VF)_mm512_unpacklo_epi16(high01, high23);
    levels[3] = (VF)_mm512_unpackhi_epi16(high01, high23);
  }
};

template <bool STREAMING>
static void dequantise_by_planes(const nc_format& format, const Coded& coded, float* out) {
  const BytePlanes planes(coded.planes);
  const int whole = coded.count / 64 * 64;
  for (int i = 0; i < whole; i += 64) {
    VF levels[4];
    planes.look_up(coded.codes + i, levels);
    for (int j = 0; j < 4; j++) put<STREAMING>(out + i + GROUP * j, levels[j] * coded.scale[i / GROUP + j]);
  }
  const Coded rest = {coded.codes + whole, coded.count - whole, coded.scale + whole / GROUP, nullptr, nullptr};
  dequantise_by_table<STREAMING>(format, rest, out + whole);
}
#endif

static bool needs_planes(const nc_format& format) {
  return LANES == 16 && format.kind != NC_UNIFORM && format.bits > REGISTER_TABLE_BITS;
}

template <bool STREAMING>
static Dequantise choose_dequantise(const nc_format& format) {
  if (format.kind == NC_UNIFORM) {
    if (format.coding == NC_UNSIGNED) return dequantise_by<UnsignedLevels, STREAMING>;
    if (format.coding == NC_SIGN_MAGNITUDE) return dequantise_by<SignMagnitudeLevels, STREAMING>;
    return dequantise_by<TwosComplementLevels, STREAMING>;
  }
#if defined(__AVX2__)
  if (format.bits <= REGISTER_TABLE_BITS) return choose_register_table<LANE_BITS, STREAMING>(format.bits);
#endif
#if defined(__AVX512F__)
  return dequantise_by_planes<STREAMING>;
#endif
  return dequantise_by_table<STREAMING>;
}

// ---- other than level times scale ---------------------------------------------------------------------------------

// NC_AFFINE: minimum + code * step, two roundings.
template <bool STREAMING>
static void dequantise_affine(const nc_format&, const Coded& coded, float* out) {
  for (int i = 0; i < coded.count; i += LANES) {
    const VF product = to_float(load_bytes(coded.codes + i)) * coded.scale[i / GROUP];
    put<STREAMING>(out + i, coded.low[i / GROUP] + product);
  }
}

// NC_MEANS, NC_SIGN: one of two values.
template <bool STREAMING>
static void dequantise_signs(const nc_format&, const Coded& coded, float* out) {
  for (int i = 0; i < coded.count; i += LANES) {
    const VF high = all<VF>(coded.scale[i / GROUP]), low = all<VF>(coded.low[i / GROUP]);
    put<STREAMING>(out + i, load_bytes(coded.codes + i) != 0 ? high : low);
  }
}

template <bool STREAMING>
static Dequantise choose_decoder(const nc_plan& plan) {
  if (plan.method == NC_AFFINE) return dequantise_affine<STREAMING>;
  if (plan.method == NC_MEANS || plan.method == NC_SIGN) return dequantise_signs<STREAMING>;
  return choose_dequantise<STREAMING>(plan.format);
}

}  // namespace nc::NC_ISA
