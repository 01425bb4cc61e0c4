// The random bits: Philox4x32-7, 16 bits a value. src/narrowcast/kernels/reference/rounding.py says which bits are whose.
#pragma once

#include "simd.hpp"

namespace nc::NC_ISA {

constexpr int NOISE_SPAN = 128;  // values that 16 neighbouring counters serve

struct Philox {
  uint64_t seed, stream;
};

struct Words {
  VU64 word[4];
};

// The output words of the counters in 64-bit lanes, in the low halves; the high halves are not clean.
static inline Words philox_words(const Philox& key, VU64 counter) {
  const VU64 m0 = all<VU64>(uint64_t(0xD2511F53)), m1 = all<VU64>(uint64_t(0xCD9E8D57));
  VU64 c0 = counter, c1 = counter >> 32;
  VU64 c2 = all<VU64>(key.stream), c3 = all<VU64>(key.stream >> 32);
  uint32_t k0 = uint32_t(key.seed), k1 = uint32_t(key.seed >> 32);
#pragma GCC unroll 7
  for (int round = 0; round < 7; round++) {
    const VU64 p0 = multiply_low(c0, m0), p1 = multiply_low(c2, m1);
    c0 = (p1 >> 32) ^ c1 ^ uint64_t(k0);
    c2 = (p0 >> 32) ^ c3 ^ uint64_t(k1);
    c1 = p1;
    c3 = p0;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// The bits of values 128 * group .. 128 * group + 127.
static inline void noise_of_group(const Philox& key, uint64_t group, uint32_t* noise) {
  for (int lane = 0; lane < GROUP; lane += LANES) {
    VU64 even;
    for (int i = 0; i < LANES / 2; i++) even[i] = 2 * i;
    even += GROUP * group + lane;
    const Words a = philox_words(key, even), b = philox_words(key, even + 1);
    for (int w = 0; w < 4; w++) {
      const VU word = (VU)((a.word[w] & 0xffffffffu) | b.word[w] << 32);
      store(noise + 2 * w * GROUP + lane, word & 0xffff);
      store(noise + (2 * w + 1) * GROUP + lane, word >> 16);
    }
  }
}

// The bits of values first .. first + count - 1, first being a multiple of 16. The buffer has room for
// count + 2 * NOISE_SPAN; the answer points into it.
static const uint32_t* fill_noise(const Philox& key, uint64_t first, int count, uint32_t* buffer) {
  const int skip = int(first % NOISE_SPAN);
  for (int i = 0; i < skip + count; i += NOISE_SPAN) noise_of_group(key, (first - skip + i) / NOISE_SPAN, buffer + i);
  return buffer + skip;
}

}  // namespace nc::NC_ISA
