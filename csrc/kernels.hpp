// What dispatch.cpp and the compilations of kernels.cpp (one for each instruction set) agree on.
#pragma once

#include <stdint.h>

#include "narrowcast.h"

namespace nc {

// Largest magnitude (as the bits of a float32: 0x7f800000 and above is not finite), smallest and largest value.
struct Extremes {
  uint32_t top;
  float low, high;
};

// The scale of the whole tensor, ready for use: t = (x - low) * inverse. `lost`: the tensor is not finite.
struct TensorScale {
  float scale, inverse, low;
  bool lost;
};

struct EncodeJob {
  const nc_plan* plan;
  const void* x;
  int32_t dtype;
  int64_t n;
  uint8_t* codes;
  uint8_t* scales;
  uint64_t seed, stream, offset;
  TensorScale tensor;  // NC_STORE_NONE, block == 0 and NC_NVFP4
};

// What error feedback still has to send: added to the values times `weight`, and renewed, in units. No residual: none.
struct Owed {
  float* residual;
  float weight, unit;
};

// Decode `world` wires, add them in their order, encode the sum; `out` gets what the result decodes to, or is NULL.
struct ReduceJob {
  EncodeJob encode;
  const uint8_t* const* wires;
  int64_t scales_at;  // in each wire
  int32_t world;
  float divide, multiply;
  Owed owed;
  void* out;
  int32_t out_dtype;
};

// Where the planes of a wire lie that a transform and its inner plan wrote.
struct TransformWire {
  uint8_t *codes, *scales, *side;
};

// Encode x, or decode; `offset` is that of the inner values.
struct TransformJob {
  const nc_transform* transform;
  const void* x;
  int32_t dtype;
  int64_t n;
  TransformWire wire;
  uint64_t seed, stream, offset;
};

// As ReduceJob.
struct TransformSum {
  const uint8_t* const* wires;
  int64_t scales_at, side_at;
  int32_t world;
  float divide, multiply;
  Owed owed;
  void* out;
  int32_t out_dtype;
};

struct DecodeJob {
  const nc_plan* plan;
  const uint8_t* codes;
  const uint8_t* scales;
  float tensor_scale;  // NC_NVFP4
  int64_t n;
  void* out;
  int32_t dtype;
  bool accumulate, streaming;
};

struct CastJob {
  const void* x;
  int32_t dtype;
  int64_t n;
  void* out;
  int32_t out_dtype;
  bool accumulate, streaming;
};

struct RoundJob {
  const nc_format* format;
  const void* x;
  void* out;
  int32_t dtype;
  int64_t n;
  int32_t overflow;
  bool stochastic, streaming;
  uint64_t seed;
};

// Every function works on values begin .. end - 1 in the calling thread; begin is a multiple of `grain`.
struct Kernels {
  const char* name;
  bool (*can_code)(const nc_plan& plan);
  bool (*can_round)(const nc_format& format);
  int64_t (*grain)(const nc_plan& plan);
  // For block == 0: over all values. For NC_NVFP4 only `top`, over finite blocks.
  Extremes (*extremes)(const EncodeJob& job, int64_t begin, int64_t end);
  TensorScale (*tensor_scale)(const EncodeJob& job, const Extremes& extremes, const float* given);
  void (*encode)(const EncodeJob& job, int64_t begin, int64_t end);
  void (*decode)(const DecodeJob& job, int64_t begin, int64_t end);
  void (*round)(const RoundJob& job, int64_t begin, int64_t end);
  void (*cast)(const CastJob& job, int64_t begin, int64_t end);
  // Blocks or a constant scale, and no block beyond a tile; a scale for the whole tensor is not for these two.
  bool (*can_fuse)(const nc_plan& plan);
  void (*encode_owed)(const EncodeJob& job, const Owed& owed, int64_t begin, int64_t end);
  void (*reduce)(const ReduceJob& job, int64_t begin, int64_t end);
  // begin is a multiple of the transform's blocks.
  bool (*can_transform)(const nc_transform& transform);
  void (*encode_transform)(const TransformJob& job, const Owed& owed, int64_t begin, int64_t end);
  void (*decode_transform)(const TransformJob& job, void* out, int32_t dtype, bool accumulate, bool streaming,
                           int64_t begin, int64_t end);
  void (*reduce_transform)(const TransformJob& job, const TransformSum& sum, int64_t begin, int64_t end);
};

namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace nc
