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

static void add_to(float* out, const float* values, int count) {
  for (int i = 0; i < count; i++) out[i] += values[i];
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
