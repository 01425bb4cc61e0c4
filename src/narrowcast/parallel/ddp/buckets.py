"""DDP's buckets: which parameters it reduces, in which order, how it cuts them into buckets and lays them out there,
and which of them a pass did not use. The one place that knows: simulations and predictions ask here, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.codecs import Matrix
from narrowcast.parallel import private
from narrowcast.parallel.ddp import torch_parts
from narrowcast.parallel.policy import TensorInfo

FIRST_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""DDP's caps: a small first bucket, so that communication starts early, then 25 MiB."""


MERGED_BYTES = 2 << 20
"""Of wires that travel together: fewer cost more by their latency, more wait for each other. Measured with GPT-2 at
10 Gb/s: 12 MiB 154 ms a step, 4 MiB 148, 2 MiB 145."""


def is_enough(wire_bytes: int) -> bool:
    """Whether groups of so many bytes on the wire wait for no more."""
    return wire_bytes >= MERGED_BYTES


def travel_together(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Of groups of so many bytes on the wire, in their order: the first and the end of those that make one call."""
    runs, first, total = list[tuple[int, int]](), 0, 0
    for number, size in enumerate(sizes):
        total += size
        if is_enough(total) or number + 1 == len(sizes):
            runs.append((first, number + 1))
            first, total = number + 1, 0
    return runs


def assign_buckets(tensors: Sequence[Tensor], caps: Sequence[int], numbers: Sequence[int] = ()) -> list[list[int]]:
    """The numbers of the tensors in each bucket, by torch's own rule: in their order, by dtype and device, and a bucket
    is closed once it has reached its cap. caps: of the first, the second, ... and all further buckets. numbers: those
    of the tensors, where they are not in the order in which the model has them.
    """
    if not tensors:
        return []
    if not hasattr(dist, torch_parts.BUCKETS[0]):
        private.check("torch.distributed", dist, torch_parts.BUCKETS)
    dense = [False] * len(tensors)
    assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    buckets, _ = assign(list(tensors), list(caps), dense, list(numbers))
    return [list(bucket) for bucket in buckets]


def first_buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Before DDP knows in which order gradients become ready, all go in one bucket (one for each dtype)."""
    return assign_buckets(tensors, [sys.maxsize])[::-1]


def rebuilt_buckets(tensors: Sequence[Tensor], ready: Sequence[int], bucket_cap_mb: float | None) -> list[list[int]]:
    """After the first backward pass, once. ready: the numbers of the tensors in the order in which their gradients
    became ready; bucket_cap_mb: as DDP is given it.
    """
    caps = [FIRST_BYTES, BUCKET_BYTES] if bucket_cap_mb is None else [int(bucket_cap_mb * (1 << 20))]
    return assign_buckets([tensors[number] for number in ready], caps, ready)


def view_like(part: Tensor, parameter: Tensor) -> Tensor:
    """A view of a flat part of a bucket that has the parameter's shape, each value in its own place.

    Values lie in a bucket in the order of the parameter's memory (channels last, say).
    """
    if is_dense(parameter):
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)


def flat_copy(values: Tensor, parameter: Tensor) -> Tensor:
    """The way back: a copy of values of the parameter's shape, in the order of its memory."""
    part = torch.empty(values.numel(), dtype=values.dtype, device=values.device)
    view_like(part, parameter).copy_(values)
    return part


def matrix_of(parameter: Tensor) -> Matrix:
    """The shape of a tensor of two dimensions or more as the matrix that its memory is: its outermost dimension (the
    first, unless it was transposed), and all others.
    """
    if not is_dense(parameter):
        return Matrix.of(parameter.shape)
    rows = max(zip(parameter.stride(), parameter.shape, strict=True), default=(0, 0))[1]
    return Matrix(rows, parameter.numel() // rows)


def memory_shape(parameter: Tensor) -> tuple[int, ...]:
    """That matrix, where it is another one than the shape says; empty otherwise."""
    if parameter.dim() < 2 or not parameter.numel() or matrix_of(parameter) == Matrix.of(parameter.shape):
        return ()
    return tuple(matrix_of(parameter))


def info_of(name: str, parameter: Tensor) -> TensorInfo:
    """What a policy is told of a gradient."""
    return TensorInfo(name, tuple(parameter.shape), parameter.dtype, memory=memory_shape(parameter))


def in_memory(x: Tensor) -> Tensor:
    """The values of a gradient as they lie in its bucket, flat."""
    return x.as_strided((x.numel(),), (1,))


def index_order(vectors: Tensor, parameter: Tensor) -> Tensor:
    """A right factor in the order of the parameter's indices, whatever its strides; of a transposed one as it is."""
    if matrix_of(parameter) != Matrix.of(parameter.shape) or vectors.shape[1] != parameter[0].numel():
        return vectors.clone()
    return torch.stack([view_like(v, parameter[0]).reshape(-1) for v in vectors])


def memory_order(vectors: Tensor, parameter: Tensor) -> Tensor:
    """The way back."""
    if matrix_of(parameter) != Matrix.of(parameter.shape) or vectors.shape[1] != parameter[0].numel():
        return vectors.clone()
    return torch.stack([flat_copy(v.view(parameter.shape[1:]), parameter[0]) for v in vectors])


def is_dense(x: Tensor) -> bool:
    """Whether the memory holds the values of x and nothing else, in whatever order."""
    used = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in used:
        if stride != expected:
            return False
        expected *= size
    return True


def check_group(model: DistributedDataParallel, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group to exchange in: the model's, or another one of the same ranks, in whatever order."""
    if group is None:
        return model.process_group
    own = dist.get_process_group_ranks(model.process_group)
    ranks = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
    if sorted(own) != sorted(ranks):
        has = f"has the ranks {ranks}" if ranks else f"is {group!r}: this rank is not a member of it"
        raise ValueError(
            f"attach: group= {has}; the model is replicated over the ranks {own}, which would drift apart. Give a "
            "group of exactly these, or leave group= out"
        )
    return group


def reduced_parameters(model: DistributedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that DDP looks after, frozen ones too, each once, in its order."""
    seen: set[nn.Parameter] = set()
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        # DDP itself writes the names of the outermost module's own parameters with a dot in front
        if (name if "." in name else f".{name}") not in model.parameters_to_ignore and parameter not in seen:
            seen.add(parameter)
            yield name, parameter


def ignored_parameters(model: DistributedDataParallel) -> list[str]:
    """Why each trainable parameter that does not come to the hook stays away."""
    known = {parameter for _, parameter in reduced_parameters(model)}
    apart = {id(parameter) for parameter in getattr(model, "_delay_all_reduce_params", ())}
    return [
        f"{name}: DDP reduces it apart, as it is" if id(p) in apart else f"{name}: DDP ignores it: not reduced"
        for name, p in model.module.named_parameters()
        if p.requires_grad and p not in known
    ]


def sparse_parameters(module: nn.Module) -> set[str]:
    """The parameters whose gradients are sparse, found as DDP finds them."""
    return {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        for name, _ in part.named_parameters(recurse=False)
    }


class UnusedParameters:
    """The parameters that no rank used in the last pass: DDP throws the hook's result away and leaves `.grad` alone.

    It knows them after the pass alone, from a map of uses that it sums over the ranks.
    """

    def __init__(self, model: DistributedDataParallel, names: dict[int, str]) -> None:
        self._names, self._is_static, self._are_views = names, model.static_graph, model.gradient_as_bucket_view
        self._uses: Tensor | None = None
        # whoever asks DDP in its own hook waits for ever
        (self._find_map_later if private.in_autograd() else self._find_map)(model)
        self._expected = [names[id(p)] for _, p in reduced_parameters(model) if p.requires_grad]
        self._seen: set[str] = set()
        self._in_place: set[str] = set()
        """Those whose `.grad` is a view of the bucket: whatever DDP does, the result is there."""

    def _find_map(self, model: DistributedDataParallel) -> None:
        """Of each parameter: how many ranks used it in the last pass. DDP writes to it in each."""
        self._uses = model.reducer._get_local_used_map()

    def _find_map_later(self, model: DistributedDataParallel) -> None:
        def find(model: DistributedDataParallel, _: object) -> None:
            hook.remove()
            self._find_map(model)

        hook = model.register_forward_pre_hook(find)

    def see(self, parameters: Iterable[Tensor]) -> None:
        """A bucket comes by."""
        for parameter in parameters:
            name = self._names[id(parameter)]
            self._seen.add(name)
            (self._in_place.add if self._are_views and parameter.grad is not None else self._in_place.discard)(name)

    def discarded_names(self) -> set[str] | None:
        """Those for which nothing arrived in the last pass; None where the graph is static and uses all."""
        if self._uses is None:
            return set()
        uses = self._uses.tolist()
        unused = {name for name, count in zip(self._order(len(uses)), uses, strict=True) if not count}
        return None if self._is_static and not unused else unused - self._in_place

    def _order(self, count: int) -> list[str]:
        """The parameters in DDP's order: those that were trainable when it was made, which may have changed since."""
        if len(self._expected) == count and self._seen <= set(self._expected):
            return self._expected
        seen = [name for name in self._names.values() if name in self._seen]
        if len(seen) != count:
            raise RuntimeError(
                f"attach: DDP reduces {count} parameters, of which {len(seen)} came by; wrap the model in DDP after "
                "parameters were frozen or thawed, so that it can be told which ones a pass does not use"
            )
        return seen


def unused_parameters(model: DistributedDataParallel, names: dict[int, str]) -> UnusedParameters | None:
    """Where DDP lets a pass leave parameters out."""
    return UnusedParameters(model, names) if model.find_unused_parameters or model.static_graph else None
