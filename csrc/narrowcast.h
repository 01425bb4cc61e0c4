/* The CPU kernels of narrowcast, behind a plain C interface: no Python and no torch headers.
 *
 * Semantics are those of src/narrowcast/kernels/reference, bit for bit; docs/wire-format.md says them in words.
 * Nothing here keeps state, allocates for the caller or touches the floating-point environment of the caller.
 */
#ifndef NARROWCAST_H
#define NARROWCAST_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NC_ABI 6

enum nc_dtype { NC_FLOAT32 = 0, NC_BFLOAT16 = 1, NC_FLOAT16 = 2 };
enum nc_method { NC_SCALED = 0, NC_AFFINE = 1, NC_MEANS = 2, NC_SIGN = 3, NC_NVFP4 = 4 };
enum nc_kind { NC_FLOAT = 0, NC_UNIFORM = 1, NC_TABLE = 2 };
enum nc_store { NC_STORE_FP32 = 0, NC_STORE_BF16 = 1, NC_STORE_E8M0 = 2, NC_STORE_NONE = 3 /* constant scale */ };
enum nc_rule { NC_DIVIDE = 0, NC_POW_FLOOR = 1, NC_POW_RCEIL = 2, NC_POW_APS = 3 };
enum nc_coding { NC_TWOS_COMPLEMENT = 0, NC_SIGN_MAGNITUDE = 1, NC_UNSIGNED = 2 };
enum nc_overflow { NC_SATURATE = 0, NC_TO_INF = 1, NC_TO_NAN = 2 };

/* A number format, as kernels see it. Codes that do not exist are -1. */
typedef struct {
  int32_t kind;         /* nc_kind */
  int32_t bits;         /* 1..16 */
  int32_t nan_code;     /* code of a NaN in x, where the format has one (else Inf's, else -1) */
  int32_t inf_code;     /* code of +Inf in x (NaN's where there is no Inf), or -1: then the largest value */
  int32_t neg_inf_code; /* likewise for -Inf */
  int32_t neg_zero_code;
  int32_t max_code;     /* code of the largest value */
  int32_t min_code;     /* code of the smallest (most negative) value */
  float max_level;      /* largest and smallest level: where t is clamped */
  float min_level;
  /* NC_FLOAT: sign | exp_bits | man_bits */
  int32_t exp_bits, man_bits, bias;
  /* NC_UNIFORM: integers low..high; round_to: value = integer * 2^-fraction_bits */
  int32_t coding; /* nc_coding */
  int32_t low, high, fraction_bits;
  /* NC_TABLE and decoding. levels: 2^bits float32, by code. */
  const float* levels;
  const float* starts;        /* n_grid - 1: index = number of starts <= t */
  const float* grid;          /* n_grid rising levels */
  const double* inverse_gap;  /* n_grid - 1: 1 / (grid[i+1] - grid[i]) in double */
  const uint16_t* grid_codes; /* n_grid */
  int32_t n_grid;
  /* bin = bits of t >> 16: prefix[bin] .. prefix[bin + 1] brackets the index for every t in the bin (65537 entries),
   * in the order of the bit pattern; packed[bin] = threshold(16) | code_below << 16 | code_above << 24 where every
   * bin holds at most one start (bits <= 8), else NULL: code = (bits & 0xffff) >= threshold ? above : below. For a
   * negative pattern "above" means a larger pattern, that is, a smaller t. threshold 0 with equal codes: no start. */
  const uint16_t* prefix;
  const uint32_t* packed;
} nc_format;

/* A codec, as kernels see it. */
typedef struct {
  nc_format format;
  int32_t method; /* nc_method */
  int32_t store;  /* nc_store */
  int32_t rule;   /* nc_rule */
  int32_t l2;
  int32_t stochastic;
  int32_t target_exponent; /* floor(log2 target) for FLOOR, floor(log2 max) for APS */
  int64_t block;           /* 0: the whole tensor */
  float target;
  float max_scale;
  float constant; /* the scale where store is NONE */
  const float* block_scale_levels; /* NVFP4: 256 values of e4m3fn */
  /* NULL, or for blocks of 16, 32, ... 4096 values: each is rotated before it is encoded. For each place of a block its
   * sign, as the bit that turns a float32. */
  const uint32_t* signs;
} nc_plan;

/* Encode n values at x (dtype) into planes. codes: ceil(n*bits/8) bytes. scales: as store says, for each block (two
 * float32 for AFFINE and MEANS, one e4m3fn byte for NVFP4). tensor_scale: one float32 (NVFP4), else unused.
 * given_scale: NULL, or one float32 to use in place of the tensor's own (block == 0). offset: index of x[0] for the
 * random bits, a multiple of 16. Planes need no alignment. Returns 0, or a negative number for an argument that this
 * build cannot take (the caller then uses the reference and says so). */
int nc_encode(const nc_plan* plan, const void* x, int32_t dtype, int64_t n, uint8_t* codes, uint8_t* scales,
              uint8_t* tensor_scale, const float* given_scale, uint64_t seed, uint64_t stream, uint64_t offset,
              int32_t threads);

/* Decode n values into out (dtype), adding to what is there if accumulate. */
int nc_decode(const nc_plan* plan, const uint8_t* codes, const uint8_t* scales, const uint8_t* tensor_scale, int64_t n,
              void* out, int32_t dtype, int32_t accumulate, int32_t threads);

/* Encode x + residual * weight, in float32; then residual = (that - what comes back) / unit where this is finite. For plans
 * with blocks of at most 16384 values or a constant scale, NVFP4 apart; others are refused with a negative number. */
int nc_encode_owed(const nc_plan* plan, const void* x, int32_t dtype, int64_t n, float* residual, float weight, float unit,
                   uint8_t* codes, uint8_t* scales, uint64_t seed, uint64_t stream, uint64_t offset, int32_t threads);

/* Decode `world` wires of n values (each with its scales `scales_at` bytes from its start), add them in float32 in their
 * order (a finite sum that is too large becomes the largest number), divide, multiply, and encode the sum as nc_encode_owed does (residual may be NULL). out: NULL, or n values of
 * dtype that get what the result decodes to. Plans as for nc_encode_owed. */
int nc_reduce(const nc_plan* plan, const uint8_t* const* wires, int32_t world, int64_t scales_at, int64_t n,
              float* residual, float weight, float unit, float divide, float multiply, uint8_t* codes, uint8_t* scales, void* out,
              int32_t dtype, uint64_t seed, uint64_t stream, uint64_t offset, int32_t threads);

/* What is done to each block of `size` values before they are encoded, by `inner`, or where that is NULL by a cast to the
 * type `stored`. NC_TOP: `number` values are kept; NC_SPIKE: as many, up to 16, travel apart. src/narrowcast/codecs/top.py
 * and spike.py say which, and what the side plane is. */
enum nc_transform_kind { NC_TOP = 0, NC_SPIKE = 1 };
typedef struct {
  int32_t kind;   /* nc_transform_kind */
  int32_t stored; /* nc_dtype */
  int64_t size, number;
  const nc_plan* inner;
} nc_transform;

/* As nc_encode, nc_decode and nc_reduce; a residual may be NULL. `side` is the transform's own plane, and `offset` counts
 * what the inner plan gets. For blocks of up to 16384 values around a plan that nc_encode_owed takes, with blocks. */
int nc_encode_transform(const nc_transform* transform, const void* x, int32_t dtype, int64_t n, float* residual,
                        float weight, float unit, uint8_t* codes, uint8_t* scales, uint8_t* side, uint64_t seed,
                        uint64_t stream, uint64_t offset, int32_t threads);
int nc_decode_transform(const nc_transform* transform, const uint8_t* codes, const uint8_t* scales, const uint8_t* side,
                        int64_t n, void* out, int32_t dtype, int32_t accumulate, int32_t threads);
int nc_reduce_transform(const nc_transform* transform, const uint8_t* const* wires, int32_t world, int64_t scales_at,
                        int64_t side_at, int64_t n, float* residual, float weight, float unit, float divide, float multiply,
                        uint8_t* codes, uint8_t* scales, uint8_t* side, void* out, int32_t dtype, uint64_t seed,
                        uint64_t stream, uint64_t offset, int32_t threads);

/* out[i] = x[i] in another type, or out[i] + x[i]: a finite number stays finite, and every NaN is the quiet one without
 * sign and payload. x and out are aligned as their types ask for. */
int nc_cast(const void* x, int32_t dtype, int64_t n, void* out, int32_t out_dtype, int32_t accumulate, int32_t threads);

/* out[i] = x[i] rounded to the format: nearest even, or stochastic with 16 bits of Philox(seed, stream 0, i).
 * x == out is allowed. */
int nc_round(const nc_format* format, const void* x, void* out, int32_t dtype, int64_t n, int32_t overflow,
             int32_t stochastic, uint64_t seed, int32_t threads);

/* Which instruction set runs: "avx512", "avx2" or "baseline". */
const char* nc_isa(void);
/* Force one (tests, benchmarks); returns 0, or -1 where this machine or build lacks it. */
int nc_set_isa(const char* name);
int nc_abi(void);

#ifdef __cplusplus
}
#endif
#endif
