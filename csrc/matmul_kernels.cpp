// Matrix products for one instruction set. Compiled once for each, with NC_ISA as the name of its namespace.
#include "matmul_kernels.hpp"

#include "matmul_tile.hpp"

namespace nc::NC_ISA {

template <class T, class R>
struct Kind {
  using Tile = T;
  using Real = R;
};

// visit(tile) with the kind of tile that serves this accumulator.
template <class Visit>
static auto with_tile(const nc_accumulator& accumulator, const Visit& visit) {
  const bool single = accumulator.arithmetic == NC_SINGLE;
  if (accumulator.stochastic) {
    return single ? visit(Kind<StochasticTile<float>, float>{}) : visit(Kind<StochasticTile<double>, double>{});
  }
  if (single) return visit(Kind<NearestTile<float, false>, float>{});
  return accumulator.arithmetic == NC_DOUBLE ? visit(Kind<NearestTile<double, false>, double>{})
                                             : visit(Kind<NearestTile<double, true>, double>{});
}

// visit(worker) with the worker that serves this accumulator.
template <class Visit>
static auto with_worker(const nc_accumulator& accumulator, const Visit& visit) {
  return with_tile(accumulator, [&](auto kind) {
    using K = decltype(kind);
    return accumulator.kahan ? visit(Worker<typename K::Tile, typename K::Real, true>{})
                             : visit(Worker<typename K::Tile, typename K::Real, false>{});
  });
}

static int64_t width(const nc_accumulator& accumulator) {
  return with_tile(accumulator, [](auto kind) { return int64_t(decltype(kind)::Tile::COLUMNS); });
}

static int64_t scratch_bytes(const nc_accumulator& accumulator, int64_t k) {
  return with_worker(accumulator, [&](auto worker) { return worker.scratch_bytes(k); });
}

static void work(const nc_accumulator& accumulator, const nc_matrices& matrices, const MatmulItem& item, void* scratch) {
  with_worker(accumulator, [&](auto worker) { worker.work(accumulator, matrices, item, scratch); });
}

const MatmulKernel matmul_kernel = {width, scratch_bytes, work};

}  // namespace nc::NC_ISA
