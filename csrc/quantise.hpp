// A chunk of values and the inverse scales of its blocks to codes, one a byte.
#pragma once

#include "narrowcast.h"
#include "simd.hpp"
#include "smallfloat.hpp"
#include "source.hpp"
#include "table.hpp"
#include "uniform.hpp"

namespace nc::NC_ISA {

// What a quantiser works on. count is a multiple of GROUP and at most CHUNK.
struct Unscaled {
  const float* x;
  int count;
  const float* inverse;   // one for each GROUP values
  const uint32_t* noise;  // where rounding is stochastic
};

using Quantise = void (*)(const nc_format& format, const Unscaled& values, uint8_t* codes);

// The LANES scaled values from i on.
static inline VF scaled(const Unscaled& values, int i) {
  return load<VF>(values.x + i) * values.inverse[unsigned(i) / GROUP];
}

// Asks memory for values that will be read, wherever they are: to the second level, since the first has no room.
static inline void fetch(const float* x, int count) {
  constexpr int LINE = 64 / sizeof(float), SECOND_LEVEL = 2;
  for (int at = 0; at < count; at += LINE) __builtin_prefetch(x + at, 0, SECOND_LEVEL);
}

// What the next chunk will read, while this one is computed.
static inline void fetch_ahead(const Unscaled& values, int i, int count) {
  fetch(values.x + values.count + i, count);
}

// Four vectors at a time, since that is how lanes become bytes.
template <class Rule>
static void quantise_by(const nc_format& format, const Unscaled& from, uint8_t* codes) {
  const Rule rule(format);
  const Unscaled values = from;  // a copy: gcc cannot know that stores to codes do not change the original
  const auto code = [&](int i) {
    return rule.codes(scaled(values, i), Rule::STOCHASTIC ? load<VU>(values.noise + i) : VU{});
  };
  int i = 0;
  for (; i + 4 * LANES <= values.count; i += 4 * LANES) {
    fetch_ahead(values, i, 4 * LANES);
    store_bytes(codes + i, code(i), code(i + LANES), code(i + 2 * LANES), code(i + 3 * LANES));
  }
  for (; i < values.count; i += LANES) store_bytes(codes + i, code(i));
}

#if defined(__AVX512VBMI__)
// The same for a rule that makes 64 bytes itself.
template <class Rule>
static void quantise_64_by(const nc_format& format, const Unscaled& from, uint8_t* codes) {
  const Rule rule(format);
  const Unscaled values = from;
  const auto t = [&](int i) { return scaled(values, i); };
  const int whole = values.count / 64 * 64;
  for (int i = 0; i < whole; i += 64) {
    fetch_ahead(values, i, 64);
    _mm512_storeu_si512(codes + i, rule.bytes(t(i), t(i + LANES), t(i + 2 * LANES), t(i + 3 * LANES)));
  }
  const Unscaled rest = {values.x + whole, values.count - whole, values.inverse + whole / GROUP, nullptr};
  quantise_by<Rule>(format, rest, codes + whole);
}
#endif

// entries[i] = table[t[i] >> 16], one by one: loads and stores only, which no gather instruction beats.
static inline void look_up(const uint32_t* table, const uint32_t* t, int count, uint32_t* entries) {
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) {
    uint32_t bin = t[i] >> 16;
    asm("" : "+r"(bin));  // or gcc loads vectors and takes them apart again
    entries[i] = table[bin];
  }
}

// Where every bin holds at most one start: one load and one compare a value.
static void quantise_packed(const nc_format& format, const Unscaled& values, uint8_t* codes) {
  constexpr int PIECE = 256;
  alignas(64) uint32_t t[PIECE], entries[PIECE];
  for (int begin = 0; begin < values.count; begin += PIECE) {
    const int end = int(smaller(begin + PIECE, values.count));
    for (int i = begin; i < end; i += LANES) {
      fetch_ahead(values, i, LANES);
      store(t + (i - begin), scaled(values, i));
    }
    look_up(format.packed, t, end - begin, entries);
    for (int i = 0; i < end - begin; i += LANES) {
      const VI entry = load<VI>(entries + i), low = load<VI>(t + i) & 0xffff;
      const VU code = low >= (entry & 0xffff) ? (VU)entry >> 24 : (VU)entry >> 16 & 0xff;
      store_bytes(codes + begin + i, (VI)code);
    }
  }
}

template <bool STOCHASTIC>
static void quantise_by_search(const nc_format& format, const Unscaled& values, uint8_t* codes) {
  alignas(64) float t[CHUNK];
  for (int i = 0; i < values.count; i += LANES) store(t + i, scaled(values, i));
  for (int i = 0; i < values.count; i++) {
    codes[i] = uint8_t(table_code<STOCHASTIC>(format, t[i], STOCHASTIC ? values.noise[i] : 0));
  }
}

template <bool SIGNED_ZERO>
static Quantise choose_addition() {
#if defined(__AVX512VBMI__)
  return quantise_64_by<FloatCodeByAddition<SIGNED_ZERO>>;
#else
  return quantise_by<FloatCodeByAddition<SIGNED_ZERO>>;
#endif
}

static Quantise choose_float(const nc_format& format, bool stochastic) {
  if (stochastic) return quantise_by<FloatCode<true>>;
  if (!RoundingByAddition::serves(format)) return quantise_by<FloatCode<false>>;
  return format.neg_zero_code >= 0 ? choose_addition<true>() : choose_addition<false>();
}

static Quantise choose_quantise(const nc_format& format, bool stochastic) {
  if (format.kind == NC_FLOAT) return choose_float(format, stochastic);
  if (format.kind == NC_TABLE) {
    if (stochastic) return quantise_by_search<true>;
    return format.packed ? quantise_packed : quantise_by_search<false>;
  }
  if (format.coding == NC_SIGN_MAGNITUDE) {
    return stochastic ? quantise_by<SignMagnitude<true>> : quantise_by<SignMagnitude<false>>;
  }
  return stochastic ? quantise_by<TwosComplement<true>> : quantise_by<TwosComplement<false>>;
}

// With a constant scale x may hold NaN and Inf: they have codes of their own.
static void put_special_codes(const nc_format& format, const float* x, int count, uint8_t* codes) {
  const auto code = [&](int32_t special, int32_t otherwise) { return uint8_t(special >= 0 ? special : otherwise); };
  for (int i = 0; i < count; i++) {
    const uint32_t bits = bits_of(x[i]);
    if ((bits & MAGNITUDE) > INFINITE) codes[i] = code(format.nan_code, format.max_code);
    if (bits == INFINITE) codes[i] = code(format.inf_code, format.max_code);
    if (bits == (INFINITE | SIGN)) codes[i] = code(format.neg_inf_code, format.min_code);
  }
}

}  // namespace nc::NC_ISA
