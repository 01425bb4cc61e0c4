"""All workers' matrices in one process, summed by low rank as ranks do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from narrowcast.codecs import Codec, KeptFactors, Matrix, parts_of, simulate_low_rank
from narrowcast.collectives import LowRankReduce, Reduction, StackedResiduals, record
from narrowcast.simulate.stack import Stack

Add = Callable[[Tensor, list[int], int], Tensor]
"""Factors of all workers, their segments and the number of the sum -> the sum."""


@dataclass(frozen=True)
class MatrixCall:
    """One all-reduce of matrices."""

    stack: Stack
    out: Tensor
    reduction: Reduction
    names: tuple[str, ...]
    matrices: list[Matrix]

    @classmethod
    def of(
        cls, stack: Stack, out: Tensor, reduction: Reduction, names: tuple[str, ...], given: Sequence[Matrix] | None
    ) -> MatrixCall:
        """given: the shapes of the segments; where there are none, the tensors have them."""
        one = stack.shaped(stack.x_Wn[0])
        shapes = [tuple(t.shape) for t in (one if isinstance(one, list) else [one])]
        if given is None:
            found = [Matrix.of(shape) for shape in shapes if len(shape) > 1]
        else:
            found = [Matrix(*matrix) for matrix in given]
        if [matrix.numel for matrix in found] != stack.lengths:
            raise ValueError(
                f"World: low rank needs matrices, got segments of {stack.lengths} values and shapes {shapes}; give "
                "tensors of two dimensions or more, or matrices="
            )
        return cls(stack, out, reduction, names, found)

    def run(self, codec: Codec, factors: KeptFactors, residuals: StackedResiduals | None, add: Add) -> None:
        """Write the result into `out`, and renew residuals and factors."""
        world, numel = len(self.stack.x_Wn), self.out.numel()
        if world == 1 or numel == 0:
            kept = None if residuals is None else residuals.of_one()
            record.reduce_alone(self.stack.x_Wn[0], self.out, self.reduction, kept)
            return
        if residuals is not None:
            residuals.fold(self.reduction.gain)
        # results are written where each worker's own values were
        rows_Wn, workers = self.stack.x_Wn.clone(), []
        for worker in range(world):
            feedback = None if residuals is None else residuals.first(worker, (0, numel))
            xs = rows_Wn[worker].split(self.stack.lengths)
            workers.append(parts_of(xs, self.matrices, self.names, codec, factors, feedback))
        simulate_low_rank(workers, codec, LowRankReduce.share_of(self.reduction, world), add)
        self.out.copy_(rows_Wn[0])
