/* Matrix products with a chosen accumulator. src/narrowcast/kernels/accumulator.py says in words what each field means;
 * semantics are those of src/narrowcast/kernels/reference/matmul.py, bit for bit. */
#ifndef NARROWCAST_MATMUL_H
#define NARROWCAST_MATMUL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum nc_order { NC_SEQUENTIAL = 0, NC_BLOCKED = 1, NC_PAIRWISE = 2 };
enum nc_multiply { NC_IEEE = 0, NC_MOGAMI = 1 };
/* What gives the bits of the definition: float64 with sums rounded to odd (always), float32, or float64 as it is. */
enum nc_arithmetic { NC_ODD_DOUBLE = 0, NC_SINGLE = 1, NC_DOUBLE = 2 };

/* Numbers to round to: multiples of 2^(e - man_bits), e being the exponent of x, at least min_exponent, or always
 * min_exponent where the steps are even. */
typedef struct {
  double high, low;           /* largest and smallest number */
  double lost_high, lost_low; /* what takes the place of a finite x beyond them */
  double inf, neg_inf, nan;   /* what takes the place of a non-finite x */
  int32_t man_bits, min_exponent;
  int32_t even_steps; /* fixed point */
  int32_t signed_zero;
  int32_t parity; /* no mantissa bits: the parity of the exponent whose code is even; else -1 */
  int32_t exact;  /* 1: leave x as it is */
} nc_number;

typedef struct {
  nc_number product, sum, outer;
  int32_t multiply;   /* nc_multiply */
  int32_t order;      /* nc_order */
  int64_t block;      /* NC_BLOCKED */
  int32_t kahan, stochastic;
  int32_t arithmetic; /* nc_arithmetic: the caller knows the formats and the range of a and b */
  int32_t careful;    /* 1: a, b or a product may be non-finite in a way that the next format cannot hold */
  uint64_t seed;
} nc_accumulator;

/* Strides in elements. */
typedef struct {
  const float *a, *b;
  float* out;
  int64_t batch, m, n, k;
  int64_t a_batch, a_row, a_column, b_batch, b_row, b_column, out_batch, out_row, out_column;
} nc_matrices;

/* out = a @ b. Returns 0, or a negative number for an argument that this build cannot take. */
int nc_matmul(const nc_accumulator* accumulator, const nc_matrices* matrices, int32_t threads);

#ifdef __cplusplus
}
#endif
#endif
