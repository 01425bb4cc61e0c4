// What low_rank.cpp and the compilations of low_rank_kernels.cpp (one for each instruction set) agree on.
#pragma once

#include "low_rank.h"

namespace nc {

struct LowRankKernel {
  // For rows begin .. end - 1.
  void (*left)(const nc_low_rank& job, int64_t begin, int64_t end);
  // For columns begin .. end - 1; begin is a multiple of 16.
  void (*right)(const nc_low_rank& job, int64_t begin, int64_t end);
  // For rows begin .. end - 1.
  void (*finish)(const nc_low_rank& job, int64_t begin, int64_t end);
};

namespace baseline {
extern const LowRankKernel low_rank_kernel;
}
namespace avx2 {
extern const LowRankKernel low_rank_kernel;
}
namespace avx512 {
extern const LowRankKernel low_rank_kernel;
}

}  // namespace nc
