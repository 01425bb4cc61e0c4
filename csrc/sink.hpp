// The output of decoding and rounding: a chunk of float32 to where it belongs.
#pragma once

#include "halves.hpp"
#include "narrowcast.h"
#include "simd.hpp"
#include "source.hpp"

namespace nc::NC_ISA {

// Buffers at a place that suits an output written past the caches. A load waits for an older store whose address has
// the same low 12 bits until that has left, and such stores leave slowly. A chunk of output fills a page, so its last
// stores always lie at the end of one, seen from where the output begins; the next chunk's first loads must not. (Seen:
// half the speed in every process whose stack happened to lie so.)
template <class Buffers>
class Placed {
  static constexpr uintptr_t PAGE = 4096, LINE = 64;
  alignas(LINE) uint8_t room[sizeof(Buffers) + PAGE];
  uintptr_t offset;

 public:
  explicit Placed(uintptr_t out) : offset((out + 4 * LINE - uintptr_t(room)) % PAGE / LINE * LINE) {}
  Buffers& buffers() { return *reinterpret_cast<Buffers*>(room + offset); }
};

struct Sink {
  void* out;
  int32_t dtype;
  bool accumulate;
  bool streaming;  // past the caches
  bool saturate;   // a finite value stays finite in 16 bits, too

  float* floats(int64_t begin) const { return static_cast<float*>(out) + begin; }
  uint16_t* halves(int64_t begin) const { return static_cast<uint16_t*>(out) + begin; }

  // Whether a chunk can be computed where it belongs; else it is computed in a buffer, from which `write` takes it.
  bool is_direct(int64_t begin, int count) const {
    if (dtype != NC_FLOAT32 || accumulate || count % GROUP != 0) return false;
    return !streaming || is_aligned(floats(begin));
  }

  void write(const float* values, int64_t begin, int count, float* scratch) const;
};

// What finite numbers give stays finite: a result that is too large becomes the largest number.
static inline VF kept_finite(VF result, VI given_finite) {
  const VF largest = all<VF>(float_of(INFINITE - 1));
  return given_finite & (result == result) ? min(max(result, -largest), largest) : result;
}

static inline VI is_finite(VF value) { return (VI)((VU)value & MAGNITUDE) < int32_t(INFINITE); }

static inline VF plus(VF a, VF b) { return kept_finite(a + b, is_finite(a) & is_finite(b)); }

// to[i] = step(to[i], from[i]), where `fast` does the same unless its result is not finite: rare, whatever the reason,
// and looked into only then. Nothing past count is read or written.
template <class Fast, class Step>
static inline void combine(float* to, const float* from, int count, const Fast& fast, const Step& step) {
  constexpr int TOGETHER = 4;
  int i = 0;
  for (; i + TOGETHER * LANES <= count; i += TOGETHER * LANES) {
    VF result[TOGETHER];
    VI top = {};
    for (int v = 0; v < TOGETHER; v++) {
      result[v] = fast(load<VF>(to + i + v * LANES), load<VF>(from + i + v * LANES));
      top = max(top, (VI)((VU)result[v] & MAGNITUDE));
    }
    if (__builtin_expect(any(top >= int32_t(INFINITE)), 0)) {
      for (int v = 0; v < TOGETHER; v++) {
        result[v] = step(load<VF>(to + i + v * LANES), load<VF>(from + i + v * LANES));
      }
    }
    for (int v = 0; v < TOGETHER; v++) store(to + i + v * LANES, result[v]);
  }
  for (; i < count; i += LANES) {
    const int size = int(sizeof(float) * smaller(LANES, count - i));
    VF a = {}, b = {};
    __builtin_memcpy(&a, to + i, size);
    __builtin_memcpy(&b, from + i, size);
    a = step(a, b);
    __builtin_memcpy(to + i, &a, size);
  }
}

static void add_to(float* out, const float* values, int count) {
  combine(out, values, count, [](VF a, VF b) { return a + b; }, [](VF a, VF b) { return plus(a, b); });
}

static void saturate_all(float* values, int32_t dtype, int count) {
  const VF limit = all<VF>(float_of(dtype == NC_BFLOAT16 ? 0x7f7f0000 : 0x477fe000));
  for (int i = 0; i < count; i += LANES) {
    const VF value = load<VF>(values + i);
    const VI finite = (VI)((VU)value & MAGNITUDE) < int32_t(INFINITE);
    store(values + i, finite ? min(max(value, -limit), limit) : value);
  }
}

// scratch has room for a chunk and is not where values lie.
inline void Sink::write(const float* values, int64_t begin, int count, float* scratch) const {
  if (dtype == NC_FLOAT32) {
    float* const to = floats(begin);
    if (accumulate) {
      add_to(to, values, count);
    } else if (streaming) {
      stream_bytes(reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(values),
                   int(sizeof(float)) * count);
    } else {
      __builtin_memcpy(to, values, sizeof(float) * count);
    }
    return;
  }
  if (accumulate) {
    widen(halves(begin), dtype, count, scratch);
    add_to(scratch, values, count);
  } else {
    __builtin_memcpy(scratch, values, sizeof(float) * count);
  }
  if (saturate) saturate_all(scratch, dtype, round_up(count));
  narrow(scratch, dtype, count, halves(begin));
}

}  // namespace nc::NC_ISA
