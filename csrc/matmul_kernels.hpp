// What matmul.cpp and the compilations of matmul_kernels.cpp (one for each instruction set) agree on.
#pragma once

#include "matmul.h"

namespace nc {

// A piece of work: rows row .. row + rows - 1 of one panel of columns, of one matrix of the batch.
struct MatmulItem {
  int64_t batch, row, rows, column;
};

struct MatmulKernel {
  // Columns that one item has.
  int64_t (*width)(const nc_accumulator& accumulator);
  // Bytes that an item needs beside its arguments.
  int64_t (*scratch_bytes)(const nc_accumulator& accumulator, int64_t k);
  void (*work)(const nc_accumulator& accumulator, const nc_matrices& matrices, const MatmulItem& item, void* scratch);
};

namespace baseline {
extern const MatmulKernel matmul_kernel;
}
namespace avx2 {
extern const MatmulKernel matmul_kernel;
}
namespace avx512 {
extern const MatmulKernel matmul_kernel;
}

}  // namespace nc
