// Matrix products for one instruction set. Compiled once for each, with NC_ISA as the name of its namespace.
#include "matmul_kernels.hpp"

#include "matmul_tile.hpp"

namespace nc::NC_ISA {

// visit(worker) with the worker that serves this accumulator.
template <class Visit>
static auto with_worker(const nc_accumulator& accumulator, const Visit& visit) {
  if (accumulator.stochastic) {
    return accumulator.kahan ? visit(Worker<StochasticTile, double, true>{})
                             : visit(Worker<StochasticTile, double, false>{});
  }
  if (accumulator.single) {
    return accumulator.kahan ? visit(Worker<NearestTile<float>, float, true>{})
                             : visit(Worker<NearestTile<float>, float, false>{});
  }
  return accumulator.kahan ? visit(Worker<NearestTile<double>, double, true>{})
                           : visit(Worker<NearestTile<double>, double, false>{});
}

static int64_t width(const nc_accumulator& accumulator) {
  if (accumulator.stochastic) return StochasticTile::COLUMNS;
  return accumulator.single ? NearestTile<float>::COLUMNS : NearestTile<double>::COLUMNS;
}

static int64_t scratch_bytes(const nc_accumulator& accumulator, int64_t k) {
  return with_worker(accumulator, [&](auto worker) { return worker.scratch_bytes(k); });
}

static void work(const nc_accumulator& accumulator, const nc_matrices& matrices, const MatmulItem& item, void* scratch) {
  with_worker(accumulator, [&](auto worker) { worker.work(accumulator, matrices, item, scratch); });
}

const MatmulKernel matmul_kernel = {width, scratch_bytes, work};

}  // namespace nc::NC_ISA
