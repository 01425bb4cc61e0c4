// The exported functions: arguments, choice of the instruction set, threads. Compiled for the baseline.
#include <string.h>

#include <atomic>

#include "kernels.hpp"
#include "threads.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

using nc::DefaultFloats;
using nc::Kernels;
using nc::MAX_THREADS;
using nc::Parts;
using nc::run;

constexpr int64_t STREAMING_BYTES = 4 << 20;  // outputs above this would only sweep the caches
constexpr int64_t VALUES_GRAIN = 4096;  // a multiple of every chunk and of the values that share a counter
enum Refusal { NOT_SUPPORTED = -1, BAD_ARGUMENT = -2 };

// ---- which instruction set ----------------------------------------------------------------------------------------

#if defined(NC_HAVE_AVX512)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
}
#endif

#if defined(NC_HAVE_AVX2)
// The two that clang's __builtin_cpu_supports does not know.
bool has_f16c_and_lzcnt() {
  constexpr unsigned F16C = 1u << 29, LZCNT = 1u << 5;  // in ecx
  unsigned eax, ebx, basic, extended, edx;
  return __get_cpuid(1, &eax, &ebx, &basic, &edx) && (basic & F16C) &&
         __get_cpuid(0x80000001, &eax, &ebx, &extended, &edx) && (extended & LZCNT);
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && has_f16c_and_lzcnt();
}
#endif

// The kernels called `name`, or the best ones for NULL; NULL where this machine or build lacks them.
const Kernels* find_kernels(const char* name) {
  const auto wanted = [&](const Kernels& kernels) { return !name || strcmp(name, kernels.name) == 0; };
#if defined(NC_HAVE_AVX512)
  if (wanted(nc::avx512::kernels) && has_avx2() && has_avx512()) return &nc::avx512::kernels;
#endif
#if defined(NC_HAVE_AVX2)
  if (wanted(nc::avx2::kernels) && has_avx2()) return &nc::avx2::kernels;
#endif
  return wanted(nc::baseline::kernels) ? &nc::baseline::kernels : nullptr;
}

std::atomic<const Kernels*> forced{nullptr};

const Kernels& kernels() {
  static const Kernels* const best = find_kernels(nullptr);
  const Kernels* const chosen = forced.load(std::memory_order_relaxed);
  return chosen ? *chosen : *best;
}

int64_t size_of(int32_t dtype) { return dtype == NC_FLOAT32 ? 4 : 2; }

bool is_dtype(int32_t dtype) { return dtype == NC_FLOAT32 || dtype == NC_BFLOAT16 || dtype == NC_FLOAT16; }

// ---- a scale for the whole tensor ---------------------------------------------------------------------------------

nc::Extremes joined(const nc::Extremes& a, const nc::Extremes& b) {
  return {a.top > b.top ? a.top : b.top, a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}

nc::TensorScale tensor_scale(const Kernels& kernels, const nc::EncodeJob& job, const Parts& parts, const float* given) {
  nc::Extremes found[MAX_THREADS] = {};
  if (job.plan->store != NC_STORE_NONE) {
    run(parts, [&](int part, int64_t begin, int64_t end) { found[part] = kernels.extremes(job, begin, end); });
  }
  for (int part = 1; part < parts.count; part++) found[0] = joined(found[0], found[part]);
  const DefaultFloats floats;
  return kernels.tensor_scale(job, found[0], given);
}

bool needs_tensor_scale(const nc_plan& plan) {
  return plan.store == NC_STORE_NONE || plan.method == NC_NVFP4 || plan.block == 0;
}

}  // namespace

#define NC_EXPORT extern "C" __attribute__((visibility("default")))

NC_EXPORT int nc_encode(const nc_plan* plan, const void* x, int32_t dtype, int64_t n, uint8_t* codes, uint8_t* scales,
                        uint8_t* tensor_scale_plane, const float* given_scale, uint64_t seed, uint64_t stream,
                        uint64_t offset, int32_t threads) {
  if (n == 0) return 0;
  if (!plan || !x || !codes || n < 0 || !is_dtype(dtype) || offset % 16 != 0) return BAD_ARGUMENT;
  const Kernels& chosen = kernels();
  if (!chosen.can_code(*plan)) return NOT_SUPPORTED;
  nc::EncodeJob job = {plan, x, dtype, n, codes, scales, seed, stream, offset, {}};
  const Parts parts(n, chosen.grain(*plan), size_of(dtype), threads);
  if (needs_tensor_scale(*plan)) job.tensor = tensor_scale(chosen, job, parts, given_scale);
  if (plan->method == NC_NVFP4) memcpy(tensor_scale_plane, &job.tensor.scale, sizeof job.tensor.scale);
  run(parts, [&](int, int64_t begin, int64_t end) { chosen.encode(job, begin, end); });
  return 0;
}

NC_EXPORT int nc_decode(const nc_plan* plan, const uint8_t* codes, const uint8_t* scales,
                        const uint8_t* tensor_scale_plane, int64_t n, void* out, int32_t dtype, int32_t accumulate,
                        int32_t threads) {
  if (n == 0) return 0;
  if (!plan || !codes || !out || n < 0 || !is_dtype(dtype)) return BAD_ARGUMENT;
  const Kernels& chosen = kernels();
  if (!chosen.can_code(*plan)) return NOT_SUPPORTED;
  nc::DecodeJob job = {plan, codes, scales, 0, n, out, dtype, accumulate != 0, false};
  if (plan->method == NC_NVFP4) memcpy(&job.tensor_scale, tensor_scale_plane, sizeof job.tensor_scale);
  job.streaming = dtype == NC_FLOAT32 && !accumulate && n * size_of(dtype) >= STREAMING_BYTES;
  const Parts parts(n, chosen.grain(*plan), size_of(dtype), threads);
  run(parts, [&](int, int64_t begin, int64_t end) { chosen.decode(job, begin, end); });
  return 0;
}

NC_EXPORT int nc_encode_owed(const nc_plan* plan, const void* x, int32_t dtype, int64_t n, float* residual, float weight, float unit,
                             uint8_t* codes, uint8_t* scales, uint64_t seed, uint64_t stream, uint64_t offset,
                             int32_t threads) {
  if (n == 0) return 0;
  if (!plan || !x || !codes || !residual || n < 0 || !is_dtype(dtype) || offset % 16 != 0) return BAD_ARGUMENT;
  const Kernels& chosen = kernels();
  if (!chosen.can_fuse(*plan)) return NOT_SUPPORTED;
  nc::EncodeJob job = {plan, x, dtype, n, codes, scales, seed, stream, offset, {}};
  if (plan->store == NC_STORE_NONE) job.tensor = chosen.tensor_scale(job, {}, nullptr);
  const Parts parts(n, chosen.grain(*plan), sizeof(float), threads);
  run(parts, [&](int, int64_t begin, int64_t end) { chosen.encode_owed(job, {residual, weight, unit}, begin, end); });
  return 0;
}

NC_EXPORT int nc_reduce(const nc_plan* plan, const uint8_t* const* wires, int32_t world, int64_t scales_at, int64_t n,
                        float* residual, float weight, float unit, float divide, float multiply, uint8_t* codes, uint8_t* scales,
                        void* out, int32_t dtype, uint64_t seed, uint64_t stream, uint64_t offset, int32_t threads) {
  if (n == 0) return 0;
  if (!plan || !wires || world < 1 || !codes || n < 0 || !is_dtype(dtype) || offset % 16 != 0) return BAD_ARGUMENT;
  const Kernels& chosen = kernels();
  if (!chosen.can_fuse(*plan)) return NOT_SUPPORTED;
  nc::EncodeJob encode = {plan, nullptr, NC_FLOAT32, n, codes, scales, seed, stream, offset, {}};
  if (plan->store == NC_STORE_NONE) encode.tensor = chosen.tensor_scale(encode, {}, nullptr);
  const nc::ReduceJob job = {encode, wires, scales_at, world, divide, multiply, {residual, weight, unit}, out, dtype};
  const Parts parts(n, chosen.grain(*plan), sizeof(float), threads);
  run(parts, [&](int, int64_t begin, int64_t end) { chosen.reduce(job, begin, end); });
  return 0;
}

NC_EXPORT int nc_encode_transform(const nc_transform* transform, const void* x, int32_t dtype, int64_t n,
                                  float* residual, float weight, float unit, uint8_t* codes, uint8_t* scales, uint8_t* side,
                                  uint64_t seed, uint64_t stream, uint64_t offset, int32_t threads) {
  if (n == 0) return 0;
  if (!transform || !x || !codes || n < 0 || !is_dtype(dtype) || offset % 16 != 0) return BAD_ARGUMENT;
  const Kernels& chosen = kernels();
  if (!chosen.can_transform(*transform)) return NOT_SUPPORTED;
  const nc::TransformJob job = {transform, x, dtype, n, {codes, scales, side}, seed, stream, offset};
  const Parts parts(n, transform->size, size_of(dtype), threads);
  run(parts, [&](int, int64_t begin, int64_t end) { chosen.encode_transform(job, {residual, weight, unit}, begin, end); });
  return 0;
}

NC_EXPORT int nc_decode_transform(const nc_transform* transform, const uint8_t* codes, const uint8_t* scales,
                                  const uint8_t* side, int64_t n, void* out, int32_t dtype, int32_t accumulate,
                                  int32_t threads) {
  if (n == 0) return 0;
  if (!transform || !codes || !out || n < 0 || !is_dtype(dtype)) return BAD_ARGUMENT;
  const Kernels& chosen = kernels();
  if (!chosen.can_transform(*transform)) return NOT_SUPPORTED;
  const nc::TransformWire wire = {const_cast<uint8_t*>(codes), const_cast<uint8_t*>(scales), const_cast<uint8_t*>(side)};
  const nc::TransformJob job = {transform, nullptr, dtype, n, wire, 0, 0, 0};
  const bool streaming = dtype == NC_FLOAT32 && !accumulate && n * size_of(dtype) >= STREAMING_BYTES;
  const Parts parts(n, transform->size, size_of(dtype), threads);
  run(parts, [&](int, int64_t begin, int64_t end) {
    chosen.decode_transform(job, out, dtype, accumulate != 0, streaming, begin, end);
  });
  return 0;
}

NC_EXPORT int nc_reduce_transform(const nc_transform* transform, const uint8_t* const* wires, int32_t world,
                                  int64_t scales_at, int64_t side_at, int64_t n, float* residual, float weight, float unit,
                                  float divide, float multiply, uint8_t* codes, uint8_t* scales, uint8_t* side,
                                  void* out, int32_t dtype, uint64_t seed, uint64_t stream, uint64_t offset,
                                  int32_t threads) {
  if (n == 0) return 0;
  if (!transform || !wires || world < 1 || !codes || n < 0 || !is_dtype(dtype) || offset % 16 != 0) return BAD_ARGUMENT;
  const Kernels& chosen = kernels();
  if (!chosen.can_transform(*transform)) return NOT_SUPPORTED;
  const nc::TransformJob job = {transform, nullptr, NC_FLOAT32, n, {codes, scales, side}, seed, stream, offset};
  const nc::TransformSum sum = {wires, scales_at, side_at, world, divide, multiply, {residual, weight, unit}, out, dtype};
  const Parts parts(n, transform->size, sizeof(float), threads);
  run(parts, [&](int, int64_t begin, int64_t end) { chosen.reduce_transform(job, sum, begin, end); });
  return 0;
}

NC_EXPORT int nc_cast(const void* x, int32_t dtype, int64_t n, void* out, int32_t out_dtype, int32_t accumulate,
                      int32_t threads) {
  if (n == 0) return 0;
  if (!x || !out || n < 0 || !is_dtype(dtype) || !is_dtype(out_dtype)) return BAD_ARGUMENT;
  const Kernels& chosen = kernels();
  const bool streaming = out_dtype == NC_FLOAT32 && !accumulate && n * size_of(out_dtype) >= STREAMING_BYTES;
  const nc::CastJob job = {x, dtype, n, out, out_dtype, accumulate != 0, streaming};
  const Parts parts(n, VALUES_GRAIN, size_of(dtype), threads);
  run(parts, [&](int, int64_t begin, int64_t end) { chosen.cast(job, begin, end); });
  return 0;
}

NC_EXPORT int nc_round(const nc_format* format, const void* x, void* out, int32_t dtype, int64_t n, int32_t overflow,
                       int32_t stochastic, uint64_t seed, int32_t threads) {
  if (n == 0) return 0;
  if (!format || !x || !out || n < 0 || !is_dtype(dtype)) return BAD_ARGUMENT;
  const Kernels& chosen = kernels();
  if (!chosen.can_round(*format)) return NOT_SUPPORTED;
  const bool streaming = dtype == NC_FLOAT32 && x != out && n * size_of(dtype) >= STREAMING_BYTES;
  const nc::RoundJob job = {format, x, out, dtype, n, overflow, stochastic != 0, streaming, seed};
  const Parts parts(n, VALUES_GRAIN, size_of(dtype), threads);
  run(parts, [&](int, int64_t begin, int64_t end) { chosen.round(job, begin, end); });
  return 0;
}

NC_EXPORT const char* nc_isa(void) { return kernels().name; }

NC_EXPORT int nc_set_isa(const char* name) {
  const Kernels* const found = name ? find_kernels(name) : nullptr;
  if (!found) return -1;
  forced.store(found, std::memory_order_relaxed);
  return 0;
}

NC_EXPORT int nc_abi(void) { return NC_ABI; }
