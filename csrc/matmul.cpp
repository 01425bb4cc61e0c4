// nc_matmul: arguments, choice of the instruction set, threads. Compiled for the baseline.
#include "matmul.h"

#include <stdlib.h>
#include <string.h>

#include "matmul_kernels.hpp"
#include "narrowcast.h"
#include "threads.hpp"

namespace {

constexpr int64_t ROWS = 64;                     // of an item: packing a panel is small beside so many
constexpr int64_t PRODUCTS_PER_THREAD = 1 << 18;  // less is not worth a thread
enum Refusal { BAD_ARGUMENT = -2, NO_MEMORY = -3 };

const nc::MatmulKernel& chosen_kernel() {
  const char* const isa = nc_isa();
#if defined(NC_HAVE_AVX512)
  if (strcmp(isa, "avx512") == 0) return nc::avx512::matmul_kernel;
#endif
#if defined(NC_HAVE_AVX2)
  if (strcmp(isa, "avx2") == 0) return nc::avx2::matmul_kernel;
#endif
  (void)isa;
  return nc::baseline::matmul_kernel;
}

struct Items {
  const nc_matrices& matrices;
  int64_t width, panels, chunks, count;

  Items(const nc_matrices& matrices, int64_t width)
      : matrices(matrices),
        width(width),
        panels((matrices.n + width - 1) / width),
        chunks((matrices.m + ROWS - 1) / ROWS),
        count(matrices.batch * panels * chunks) {}

  nc::MatmulItem operator[](int64_t index) const {
    const int64_t chunk = index % chunks, panel = index / chunks % panels, batch = index / chunks / panels;
    const int64_t row = chunk * ROWS, rest = matrices.m - row;
    return {batch, row, rest < ROWS ? rest : ROWS, panel * width};
  }
};

bool is_sound(const nc_accumulator* accumulator, const nc_matrices* matrices) {
  if (!accumulator || !matrices || !matrices->out) return false;
  if (matrices->m < 0 || matrices->n < 0 || matrices->k < 0 || matrices->batch < 0) return false;
  if (matrices->k > 0 && (!matrices->a || !matrices->b)) return false;
  return accumulator->order != NC_BLOCKED || accumulator->block > 0;
}

int32_t useful_threads(const nc_matrices& matrices, int32_t threads) {
  const double products = double(matrices.batch) * double(matrices.m) * double(matrices.n) * double(matrices.k);
  const double useful = products / PRODUCTS_PER_THREAD + 1;
  return useful < threads ? int32_t(useful) : threads;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int nc_matmul(const nc_accumulator* accumulator,
                                                                const nc_matrices* matrices, int32_t threads) {
  if (matrices && (matrices->m == 0 || matrices->n == 0 || matrices->batch == 0)) return 0;
  if (!is_sound(accumulator, matrices)) return BAD_ARGUMENT;
  const nc::MatmulKernel& kernel = chosen_kernel();
  const Items items(*matrices, kernel.width(*accumulator));
  const int64_t bytes = (kernel.scratch_bytes(*accumulator, matrices->k) + 63) / 64 * 64;
  std::atomic<bool> failed{false};
  const nc::Parts parts(items.count, 1, nc::BYTES_PER_THREAD, useful_threads(*matrices, threads));
  nc::run(parts, [&](int, int64_t begin, int64_t end) {
    void* const scratch = aligned_alloc(64, size_t(bytes));
    if (!scratch) {
      failed.store(true);
      return;
    }
    for (int64_t index = begin; index < end; index++) kernel.work(*accumulator, *matrices, items[index], scratch);
    free(scratch);
  });
  return failed.load() ? NO_MEMORY : 0;
}
