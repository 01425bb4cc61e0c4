// One vector of the widest kind this compilation has. gcc's vector types carry +, *, &, <, ?: for every instruction
// set; intrinsics stand only where gcc does not find the instruction.
//
// Everything in the included files is static inside the namespace of the instruction set, and nothing of std:: is used:
// a function that the linker merges across compilations could bring AVX-512 into the baseline.
#pragma once

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// For what must not become a call in a loop.
#define NC_INLINE static inline __attribute__((always_inline))

namespace nc::NC_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// The unit of all loops: LANES divides it, blocks are multiples of it, and 16 codes fill whole bytes at any width.
constexpr int GROUP = 16;

typedef float VF __attribute__((vector_size(4 * LANES)));
typedef int32_t VI __attribute__((vector_size(4 * LANES)));
typedef uint32_t VU __attribute__((vector_size(4 * LANES)));
typedef uint64_t VU64 __attribute__((vector_size(4 * LANES)));
typedef uint16_t VHalf __attribute__((vector_size(2 * LANES)));
typedef uint8_t VByte __attribute__((vector_size(LANES)));
typedef uint8_t VByteOf64 __attribute__((vector_size(64)));

// How far all lanes are shifted: a vector where the processor has such shifts, which then are the faster ones.
#if defined(__AVX2__)
typedef VI Shift;
#else
typedef int Shift;
#endif

constexpr uint32_t SIGN = 0x80000000u;
constexpr uint32_t MAGNITUDE = 0x7fffffffu;
constexpr uint32_t INFINITE = 0x7f800000u;
constexpr uint32_t QUIET_NAN = 0x7fc00000u;

template <class V, class T>
static inline V load(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// Lane i of the answer is lane number lane[i] of a followed by b.
template <class V>
static inline V shuffled(V a, V b, VI lane) {
#if defined(__clang__)
  V both[2] = {a, b}, found;
  for (int i = 0; i < LANES; i++) found[i] = both[lane[i] / LANES][lane[i] % LANES];
  return found;
#else
  return __builtin_shuffle(a, b, lane);
#endif
}

template <class V, class T>
static inline void store(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

// value in every lane: gcc sees a broadcast in the difference (and -0 - 0 is -0).
template <class V, class T>
static inline V all(T value) {
  return decltype(V{}[0] + 0)(value) - V{};
}

static inline Shift shift_by(int count) {
#if defined(__AVX2__)
  return all<VI>(count);
#else
  return count;
#endif
}

static inline uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}

static inline float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}

// 2^exponent, exact from -149 to 127.
static inline float power_of_two(int exponent) {
  return float_of(exponent >= -126 ? uint32_t(exponent + 127) << 23 : 1u << (exponent + 149));
}

static inline VF min(VF a, VF b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

static inline VF max(VF a, VF b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

static inline VI min(VI a, VI b) {
#if defined(__AVX512F__)
  return (VI)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (VI)_mm256_min_epi32((__m256i)a, (__m256i)b);
#else
  return a < b ? a : b;
#endif
}

static inline VI max(VI a, VI b) {
#if defined(__AVX512F__)
  return (VI)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (VI)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}

static inline VF sqrt(VF a) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(a);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(a);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(a);
#else
  for (int i = 0; i < LANES; i++) a[i] = __builtin_sqrtf(a[i]);
  return a;
#endif
}

// Truncates. What does not fit gives any number.
static inline VI to_int(VF a) { return __builtin_convertvector(a, VI); }
// The nearest integer, ties to even, of numbers below 2^22.
static inline VI to_nearest_int(VF a) {
#if defined(__AVX512F__)
  return (VI)_mm512_cvtps_epi32(a);
#elif defined(__AVX2__)
  return (VI)_mm256_cvtps_epi32(a);
#elif defined(__SSE2__)
  return (VI)_mm_cvtps_epi32(a);
#else
  return (VI)(a + 12582912.0f) - 0x4b400000;  // 1.5 * 2^23
#endif
}
static inline VF to_float(VI a) { return __builtin_convertvector(a, VF); }
static inline VF magnitude(VF a) { return (VF)((VU)a & MAGNITUDE); }

// One bit a lane: where a comparison holds.
static inline unsigned lane_bits(VI mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return unsigned(_mm256_movemask_ps((VF)mask));
#elif defined(__SSE2__)
  return unsigned(_mm_movemask_ps((VF)mask));
#else
  unsigned bits = 0;
  for (int i = 0; i < LANES; i++) bits |= unsigned(mask[i] & 1) << i;
  return bits;
#endif
}

static inline bool any(VI mask) { return lane_bits(mask) != 0; }

// Bits of the magnitude, at most `limit`.
static inline VI clamped_magnitude(VF a, VI limit) {
#if defined(__AVX512DQ__)
  return (VI)_mm512_range_ps(a, (VF)limit, 0b1010);  // the smaller magnitude, without its sign
#else
  return min((VI)a & int32_t(MAGNITUDE), limit);
#endif
}

template <class V>
static inline auto largest_lane(V v) {
  auto top = v[0];
  for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
  return top;
}

#if defined(__AVX512F__)
static inline int32_t largest_lane(VI v) { return _mm512_reduce_max_epi32((__m512i)v); }
#elif defined(__AVX2__)
static inline int32_t largest_lane(VI v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtsi128_si32(m);
}
#endif

// Of two vectors cut into pieces of SIZE lanes: the pieces of a and b in turn, even ones or odd ones.
template <int SIZE, int ODD, class V>
static inline V pieces(V a, V b) {
  VI lane;
  for (int i = 0; i < LANES; i++) {
    const int piece = i / SIZE;
    lane[i] = (piece / 2 * 2 + ODD) * SIZE + i % SIZE + (piece % 2) * LANES;
  }
  return shuffled(a, b, lane);
}

// Lane j of the answer is the reduction of all lanes of vector(first + j * stride), by halves: lanes i and
// i + LANES / 2 first, neighbours last. Each shuffle serves many vectors.
template <int N = LANES, class Vector, class Join>
NC_INLINE auto reduce_lanes(const Vector& vector, const Join& join, int first = 0, int stride = 1) {
  if constexpr (N == 1) {
    return vector(first);
  } else {
    const auto a = reduce_lanes<N / 2>(vector, join, first, 2 * stride);
    const auto b = reduce_lanes<N / 2>(vector, join, first + stride, 2 * stride);
    return join(pieces<LANES / N, 0>(a, b), pieces<LANES / N, 1>(a, b));
  }
}

// a * b of the low halves of 64-bit lanes, whatever the high halves hold.
static inline VU64 multiply_low(VU64 a, VU64 b) {
#if defined(__AVX512F__)
  return (VU64)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (VU64)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (VU64)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// The low byte of each lane.
static inline void store_bytes(uint8_t* p, VI codes) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)codes));
#elif defined(__AVX2__)
  codes &= 0xff;  // packing saturates
  const __m128i upper = _mm256_extracti128_si256((__m256i)codes, 1);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)codes), upper);
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(halves, halves));
#elif defined(__SSE2__)
  codes &= 0xff;
  __m128i halves = _mm_packs_epi32((__m128i)codes, (__m128i)codes);
  int32_t bytes = _mm_cvtsi128_si32(_mm_packus_epi16(halves, halves));
  __builtin_memcpy(p, &bytes, sizeof bytes);
#else
  store(p, __builtin_convertvector(codes, VByte));
#endif
}

#if defined(__AVX512VBMI__)
// Byte number BYTE of every lane of four vectors.
template <int BYTE>
static inline __m512i bytes_of(VI a, VI b, VI c, VI d) {
  VByteOf64 order;
  for (int i = 0; i < 64; i++) order[i] = uint8_t(4 * i + BYTE);  // counts on through both registers, and again
  const __m512i ab = _mm512_permutex2var_epi8((__m512i)a, (__m512i)order, (__m512i)b);
  const __m512i cd = _mm512_permutex2var_epi8((__m512i)c, (__m512i)order, (__m512i)d);
  return _mm512_mask_blend_epi32(0xff00, ab, cd);
}
#endif

// The low bytes of four vectors.
static inline void store_bytes(uint8_t* p, VI a, VI b, VI c, VI d) {
#if defined(__AVX512VBMI__)
  _mm512_storeu_si512(p, bytes_of<0>(a, b, c, d));
#elif defined(__AVX2__)
  const __m256i ab = _mm256_packus_epi32((__m256i)(a & 0xff), (__m256i)(b & 0xff));
  const __m256i cd = _mm256_packus_epi32((__m256i)(c & 0xff), (__m256i)(d & 0xff));
  // packing works within halves of a register, which leaves fours of bytes to be put in order
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order));
#elif defined(__SSE2__)
  const __m128i ab = _mm_packs_epi32((__m128i)(a & 0xff), (__m128i)(b & 0xff));
  const __m128i cd = _mm_packs_epi32((__m128i)(c & 0xff), (__m128i)(d & 0xff));
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(ab, cd));
#else
  store_bytes(p, a);
  store_bytes(p + LANES, b);
  store_bytes(p + 2 * LANES, c);
  store_bytes(p + 3 * LANES, d);
#endif
}

static inline VI load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (VI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(__SSE2__)
  int32_t bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  __m128i halves = _mm_unpacklo_epi8(_mm_cvtsi32_si128(bytes), _mm_setzero_si128());
  return (VI)_mm_unpacklo_epi16(halves, _mm_setzero_si128());
#else
  return __builtin_convertvector(load<VByte>(p), VI);
#endif
}

static inline VU load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return (VU)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (VU)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__SSE2__)
  return (VU)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)p), _mm_setzero_si128());
#else
  return __builtin_convertvector(load<VHalf>(p), VU);
#endif
}

// Lanes below 65536 to 16 bits each.
static inline void store_halves(uint16_t* p, VU v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p,
                   _mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1)));
#elif defined(__SSE2__)
  // SSE2 packs with signed saturation only: sign-extend the low half first
  __m128i extended = _mm_srai_epi32(_mm_slli_epi32((__m128i)v, 16), 16);
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi32(extended, extended));
#else
  store(p, __builtin_convertvector(v, VHalf));
#endif
}

// Past the caches: p is aligned to the size of a vector.
static inline void stream(float* p, VF v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, v);
#elif defined(__SSE2__)
  _mm_stream_ps(p, v);
#else
  store(p, v);
#endif
}

template <bool STREAMING>
static inline void put(float* p, VF v) {
  STREAMING ? stream(p, v) : store(p, v);
}

// size bytes past the caches, but for the ends, where a line may be shared.
static void stream_bytes(uint8_t* to, const uint8_t* from, int size) {
  constexpr int width = sizeof(VF);
  const int misaligned = int(reinterpret_cast<uintptr_t>(to) % width);
  int i = misaligned ? width - misaligned : 0;
  if (i > size) i = size;
  __builtin_memcpy(to, from, i);
  for (; i + width <= size; i += width) stream(reinterpret_cast<float*>(to + i), load<VF>(from + i));
  __builtin_memcpy(to + i, from + i, size - i);
}

static inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % sizeof(VF) == 0; }

static inline void end_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace nc::NC_ISA
