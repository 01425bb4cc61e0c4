// Codes of 1 to 8 bits, one a byte, to a little-endian string of bits and back: eight codes become `bits` bytes.
#pragma once

#include "simd.hpp"

namespace nc::NC_ISA {

// Room that both functions need past the end of the bytes they write (and, but for AVX-512, past those they read).
constexpr int PACK_SLACK = 64;

#if defined(__AVX512VBMI__)

// Which byte goes where, for every width.
struct PackOrder {
  uint8_t gather[8][64], spread[8][64], shifts[8][64];

  constexpr PackOrder() : gather(), spread(), shifts() {
    for (int bits = 1; bits < 8; bits++) {
      for (int i = 0; i < 64; i++) {
        gather[bits][i] = uint8_t(i / bits * 8 + i % bits);
        spread[bits][i] = uint8_t(i / 8 * bits + i % 8);
        shifts[bits][i] = uint8_t(i % 8 * bits);
      }
    }
  }
};

static constexpr PackOrder PACK_ORDER;

// 64 codes at a time: each eight of them become a 64-bit word with `bits` packed bytes, and these move together.
struct SixtyFourCodes {
  int bits;
  __m512i low, pair, pair_of_pairs, fours, gather, spread, shifts;

  explicit SixtyFourCodes(int bits)
      : bits(bits),
        low(_mm512_set1_epi8(char((1 << bits) - 1))),
        pair(_mm512_set1_epi16(short(1 | 1 << (8 + bits)))),
        pair_of_pairs(_mm512_set1_epi32(1 | 1 << (16 + 2 * bits))),
        fours(_mm512_set1_epi64((1ll << 4 * bits) - 1)),
        gather(_mm512_loadu_si512(PACK_ORDER.gather[bits])),
        spread(_mm512_loadu_si512(PACK_ORDER.spread[bits])),
        shifts(_mm512_loadu_si512(PACK_ORDER.shifts[bits])) {}

  __m512i pack(__m512i codes) const {
    // a + b * 2^bits of neighbours (the factors are the unsigned operand: 128 for 7 bits), then likewise of pairs
    const __m512i pairs = _mm512_maddubs_epi16(pair, _mm512_and_si512(codes, low));
    const __m512i quads = _mm512_madd_epi16(pairs, pair_of_pairs);
    const __m512i upper = _mm512_srl_epi64(quads, _mm_cvtsi32_si128(32 - 4 * bits));
    const __m512i words = _mm512_or_si512(_mm512_and_si512(fours, quads), _mm512_andnot_si512(fours, upper));
    return _mm512_permutexvar_epi8(gather, words);
  }

  __m512i unpack(__m512i packed) const {
    return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, _mm512_permutexvar_epi8(spread, packed)), low);
  }
};

// count is a multiple of 8.
static void pack(const uint8_t* codes, int bits, int count, uint8_t* packed) {
  const SixtyFourCodes block(bits);
  for (int i = 0; i < count; i += 64, packed += 8 * bits) {
    _mm512_storeu_si512(packed, block.pack(_mm512_loadu_si512(codes + i)));
  }
}

static void unpack(const uint8_t* packed, int bits, int count, uint8_t* codes) {
  const SixtyFourCodes block(bits);
  for (int i = 0; i < count; i += 64, packed += 8 * bits) {
    const int bytes = count - i < 64 ? (count - i) / 8 * bits : 8 * bits;
    _mm512_storeu_si512(codes + i, block.unpack(_mm512_maskz_loadu_epi8((1ull << bytes) - 1, packed)));
  }
}

#else

static inline uint64_t load_word(const uint8_t* p) {
  uint64_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return word;
}

static inline void store_word(uint8_t* p, uint64_t word) { __builtin_memcpy(p, &word, sizeof word); }

// Eight codes in a word: close the gaps between neighbours, then between pairs, then between fours; or open them. (pext
// and pdep would do that in one instruction, but are very slow on the first processors with AVX2.)
struct EightCodes {
  int gap;  // unused bits above each code
  uint64_t low1, low2, low4, high1, high2, high4;

  explicit EightCodes(int bits)
      : gap(8 - bits),
        low1(0x0001000100010001u * ((1u << bits) - 1)),
        low2(0x0000000100000001u * ((1u << 2 * bits) - 1)),
        low4((1ull << 4 * bits) - 1),
        high1(low1 << bits),
        high2(low2 << 2 * bits),
        high4(low4 << 4 * bits) {}

  uint64_t pack(uint64_t x) const {
    x = (x & low1) | (x >> gap & high1);
    x = (x & low2) | (x >> 2 * gap & high2);
    return (x & low4) | (x >> 4 * gap & high4);
  }

  uint64_t unpack(uint64_t x) const {
    x = (x & low4) | (x & high4) << 4 * gap;
    x = (x & low2) | (x & high2) << 2 * gap;
    return (x & low1) | (x & high1) << gap;
  }
};

// count is a multiple of 8.
static void pack(const uint8_t* codes, int bits, int count, uint8_t* packed) {
  const EightCodes eight(bits);
  for (int i = 0; i < count; i += 8, packed += bits) store_word(packed, eight.pack(load_word(codes + i)));
}

static void unpack(const uint8_t* packed, int bits, int count, uint8_t* codes) {
  const EightCodes eight(bits);
  for (int i = 0; i < count; i += 8, packed += bits) store_word(codes + i, eight.unpack(load_word(packed)));
}

#endif

}  // namespace nc::NC_ISA
