// nc_low_rank_*: arguments, choice of the instruction set, threads. Compiled for the baseline.
#include "low_rank.h"

#include <string.h>

#include "low_rank_kernels.hpp"
#include "narrowcast.h"
#include "threads.hpp"

namespace {

constexpr int64_t LANES = 16;
constexpr int BAD_ARGUMENT = -2;

const nc::LowRankKernel& chosen_kernel() {
  const char* const isa = nc_isa();
#if defined(NC_HAVE_AVX512)
  if (strcmp(isa, "avx512") == 0) return nc::avx512::low_rank_kernel;
#endif
#if defined(NC_HAVE_AVX2)
  if (strcmp(isa, "avx2") == 0) return nc::avx2::low_rank_kernel;
#endif
  (void)isa;
  return nc::baseline::low_rank_kernel;
}

bool is_sound(const nc_low_rank* job) {
  return job && job->x && job->rows > 0 && job->columns > 0 && job->rank > 0 && job->unit > 0;
}

}  // namespace

#define NC_EXPORT extern "C" __attribute__((visibility("default")))

NC_EXPORT int nc_low_rank_left(const nc_low_rank* job, int32_t threads) {
  if (!is_sound(job) || !job->right || !job->out) return BAD_ARGUMENT;
  const auto work = chosen_kernel().left;
  const nc::Parts parts(job->rows, 1, job->columns * int64_t(sizeof(float)), threads);
  nc::run(parts, [&](int, int64_t begin, int64_t end) { work(*job, begin, end); });
  return 0;
}

NC_EXPORT int nc_low_rank_right(const nc_low_rank* job, int32_t threads) {
  if (!is_sound(job) || !job->left || !job->out) return BAD_ARGUMENT;
  const auto work = chosen_kernel().right;
  const nc::Parts parts(job->columns, LANES, job->rows * int64_t(sizeof(float)), threads);
  nc::run(parts, [&](int, int64_t begin, int64_t end) { work(*job, begin, end); });
  return 0;
}

NC_EXPORT int nc_low_rank_finish(const nc_low_rank* job, int32_t threads) {
  if (!is_sound(job) || !job->left || !job->right) return BAD_ARGUMENT;
  const auto work = chosen_kernel().finish;
  const nc::Parts parts(job->rows, 1, job->columns * int64_t(sizeof(float)), threads);
  nc::run(parts, [&](int, int64_t begin, int64_t end) { work(*job, begin, end); });
  return 0;
}
