"""reduce_scatter, all_gather, all_to_all and broadcast of `narrowcast.collectives`, all workers at once, same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.collectives.algorithms.context import Reduction
from narrowcast.collectives.algorithms.one_shot import store
from narrowcast.collectives.api import Step, noise_of
from narrowcast.collectives.segments import segment_ranges
from narrowcast.kernels import FLOATS
from narrowcast.kernels.noise import Noise
from narrowcast.simulate.world.algorithms import Job
from narrowcast.simulate.world.stack import Stack, flat_row
from narrowcast.simulate.world.sums import Sums
from narrowcast.simulate.world.wire import Wire

if TYPE_CHECKING:
    from narrowcast.simulate.world.world import World


def _plain(what: str, world: World, step: Step | None) -> tuple[Codec, Noise]:
    """The codec and noise of a call that keeps nothing from one to the next."""
    if world.codec.feedback:
        raise ValueError(f"World.{what} with {world.codec}: only all_reduce has error feedback; leave out +ef")
    return world.codec, noise_of(f"World.{what}", world.codec, world.seed, step)


def reduce_scatter(world: World, stack: Stack, reduction: Reduction, step: Step | None) -> list[Tensor]:
    codec, noise = _plain("reduce_scatter", world, step)
    stack = _with_a_part_for_each(stack, world.n)
    x_Wn, ranges = stack.x_Wn, segment_ranges(stack.lengths)
    scales, unit_n = world.scales(stack, codec, None)
    sums = Sums(world.sums.format, world.sums.kahan, world.sums.pairwise, unit_n)
    wire, seats = world.wire(codec, stack), world.seats(step)
    job = Job(x_Wn, torch.empty_like(x_Wn[0]), wire, seats, noise.derive, scales, reduction, sums)
    store(job.out, reduction.finish(job.sum_of_own(ranges)))
    parts = stack.shaped(job.out) if not stack.is_one_tensor else None
    # a list of tensors gives back tensors of their shapes, one tensor flat parts of it
    return list(parts) if isinstance(parts, list) else [job.out[low:high] for low, high in ranges]


def _with_a_part_for_each(stack: Stack, world: int) -> Stack:
    if len(stack.lengths) == world and world > 1:
        return stack
    numel = stack.x_Wn.shape[1]
    if len(stack.lengths) > 1:
        raise ValueError(
            f"World.reduce_scatter: got a list of {len(stack.lengths)} tensors for {world} workers; give one for each"
        )
    if numel % world:
        raise ValueError(f"World.reduce_scatter: {numel} values do not divide into {world} parts; pad, or give a list")
    return Stack(stack.x_Wn, [numel // world] * world, stack.shaped, is_one_tensor=world > 1 or stack.is_one_tensor)


def all_gather(world: World, tensors: Sequence[Tensor], step: Step | None) -> list[list[Tensor]]:
    codec, noise = _plain("all_gather", world, step)
    _check_each("all_gather", tensors, world.n)
    arrived = _parts(codec, tensors, [noise.derive(worker, 1) for worker in range(world.n)])
    return [list(arrived) for _ in range(world.n)]


def all_to_all(world: World, tensors: Sequence[Sequence[Tensor]], step: Step | None) -> list[list[Tensor]]:
    codec, noise = _plain("all_to_all", world, step)
    if len(tensors) != world.n or any(len(row) != world.n for row in tensors):
        raise ValueError(f"World.all_to_all: give a list of {world.n} tensors for each of the {world.n} workers")
    sent = []
    for worker, row in enumerate(tensors):
        _check_each("all_to_all", row, world.n)
        sent.append(_parts(codec, row, [noise.derive(worker, 0)] * world.n))
    return [[sent[source][target] for source in range(world.n)] for target in range(world.n)]


def broadcast(world: World, stack: Stack, src: int, step: Step | None) -> Tensor:
    codec, noise = _plain("broadcast", world, step)
    if not 0 <= src < world.n:
        raise ValueError(f"World.broadcast: there is no worker {src} among {world.n}")
    whole, out = (0, stack.x_Wn.shape[1]), torch.empty_like(stack.x_Wn[src])
    world.wire(codec, stack).through(stack.x_Wn[src], whole, noise.derive(src, 0), None, out)
    return out


def _parts(codec: Codec, tensors: Sequence[Tensor], noises: Sequence[Noise]) -> list[Tensor]:
    """Each tensor through the wire by itself, at its place in the whole."""
    lengths, like = [t.numel() for t in tensors], tensors[0]
    wire, flat = Wire(codec, lengths, like.dtype, like.device), flat_row(tensors)
    out = torch.empty_like(flat)
    ranges = segment_ranges(lengths)
    for part, noise in zip(ranges, noises, strict=True):
        wire.through(flat[part[0] : part[1]], part, noise, None, out[part[0] : part[1]])
    return [out[low:high].view(t.shape) for t, (low, high) in zip(tensors, ranges, strict=True)]


def _check_each(what: str, tensors: Sequence[Tensor], world: int) -> None:
    if len(tensors) != world:
        raise ValueError(f"World.{what}: got {len(tensors)} tensors for {world} workers; give one for each")
    if len({(t.dtype, t.device) for t in tensors}) > 1 or tensors[0].dtype not in FLOATS:
        raise TypeError(f"World.{what}: all tensors must be float32, float16 or bfloat16, of one type, on one device")
