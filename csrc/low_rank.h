/* Products of a matrix with few vectors, for low-rank wires. C interface, see kernels/low_rank.py for what each promises. */
#pragma once

#include <stdint.h>

/* A matrix of rows x columns float32 values, row by row, and what error feedback adds to it. */
typedef struct {
  float* x;
  float* residual; /* of the same shape, or NULL */
  float unit;
  float weight; /* by which the residual is multiplied: the unit, less what is forgotten */
  int64_t rows, columns;
  const float* left;  /* rank x rows, or NULL */
  const float* right; /* rank x padded, or NULL: padded is columns rounded up to a multiple of 16, zero beyond columns */
  int64_t rank;
  float* out;  /* what a product gives: rank x rows, or rank x padded */
  float share; /* of the result that one rank has sent */
} nc_low_rank;

#ifdef __cplusplus
extern "C" {
#endif
int nc_low_rank_left(const nc_low_rank* job, int32_t threads);
int nc_low_rank_right(const nc_low_rank* job, int32_t threads);
int nc_low_rank_finish(const nc_low_rank* job, int32_t threads);
#ifdef __cplusplus
}
#endif
