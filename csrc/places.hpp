// Which k of m places are taken, in bytes: see src/narrowcast/codecs/places.py.
#pragma once

#include "fused.hpp"

namespace nc::NC_ISA {

struct PlaceCode {
  int k, m, low;  // low: bits of a place that stand apart
  bool bitmap;

  int low_bytes() const { return (k * low + 7) / 8; }
  int high_bytes() const {
    if (k == m) return 0;
    return ((bitmap ? m : k + ((m - 1) >> low)) + 7) / 8;
  }
  int nbytes() const { return low_bytes() + high_bytes(); }
};

// The smaller way to write k of m places, 1 <= k <= m.
static PlaceCode place_code(int k, int m) {
  const PlaceCode code = {k, m, 31 - __builtin_clz(unsigned(m / k)), false}, bitmap = {k, m, 0, true};
  return k == m || bitmap.nbytes() <= code.nbytes() ? bitmap : code;
}

struct PlaceBuffers {
  alignas(64) int32_t place[MAX_TILE + LANES];
  alignas(64) uint64_t high[MAX_TILE / 64 + 2];  // k + (m >> low) is below m where there is no bitmap
  alignas(64) uint8_t low[MAX_TILE / 4 + 16];    // k * low is, too
};

// The lower `bits` bits of k numbers, as codes.
static void write_low(const int32_t* number, int k, int bits, uint8_t* to) {
  const uint64_t mask = (uint64_t(1) << bits) - 1;
  uint64_t word = 0;
  int filled = 0;
  for (int j = 0; j < k; j++) {
    word |= (uint64_t(number[j]) & mask) << filled;
    filled += bits;
    if (filled >= 32) {
      __builtin_memcpy(to, &word, 4);
      to += 4;
      word >>= 32;
      filled -= 32;
    }
  }
  // not memcpy: a call for a few bytes
  for (; filled > 0; filled -= 8, word >>= 8) *to++ = uint8_t(word);
}

// Code j of such; eight bytes from where it begins can be read.
static inline int read_low(const uint8_t* from, int j, int bits) {
  uint64_t eight;
  __builtin_memcpy(&eight, from + j * bits / 8, sizeof eight);
  return int(eight >> j * bits % 8 & ((uint64_t(1) << bits) - 1));
}

// Ascending places to bytes.
static void write_places(const PlaceCode& code, PlaceBuffers& buffers, uint8_t* to) {
  if (code.k == code.m) return;
  const int high_bytes = code.high_bytes(), shift = code.bitmap ? 0 : code.low;
  __builtin_memset(buffers.high, 0, high_bytes + 8);
  for (int j = 0; j < code.k; j++) {
    const unsigned bit = unsigned(buffers.place[j] >> shift) + (code.bitmap ? 0 : j);
    buffers.high[bit / 64] |= uint64_t(1) << bit % 64;
  }
  if (code.low) write_low(buffers.place, code.k, code.low, to);
  __builtin_memcpy(to + code.low_bytes(), buffers.high, high_bytes);
}

// The inverse. Bytes come from a peer: false where they do not hold k ascending places below m.
static bool read_places(const PlaceCode& code, const uint8_t* from, PlaceBuffers& buffers) {
  if (code.k == code.m) {
    for (int j = 0; j < code.k; j++) buffers.place[j] = j;
    return true;
  }
  const int high_bytes = code.high_bytes(), words = (high_bytes + 7) / 8, low = code.low;
  buffers.high[words - 1] = 0;
  __builtin_memcpy(buffers.low, from, code.low_bytes());
  __builtin_memcpy(buffers.high, from + code.low_bytes(), high_bytes);
  int set = 0;
  for (int w = 0; w < words; w++) set += __builtin_popcountll(buffers.high[w]);
  if (set != code.k) return false;
  int j = 0, before = -1;
  bool ascends = true;
  for (int w = 0; w < words; w++) {
    for (uint64_t bits = buffers.high[w]; bits; bits &= bits - 1, j++) {
      int place = 64 * w + __builtin_ctzll(bits);
      if (!code.bitmap) place = ((place - j) << low) | read_low(buffers.low, j, low);
      ascends &= place > before;
      buffers.place[j] = before = place;
    }
  }
  return ascends && before < code.m;
}

}  // namespace nc::NC_ISA
