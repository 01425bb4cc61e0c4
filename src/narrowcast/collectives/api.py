"""torch.distributed's collectives with a spec: same names, same meaning, same `async_op`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import checks, p2p, primitives
from narrowcast.collectives.algorithms import record
from narrowcast.collectives.algorithms.context import Call, Reduction
from narrowcast.collectives.algorithms.one_shot import store
from narrowcast.collectives.flat import Flat
from narrowcast.collectives.residuals import Residuals
from narrowcast.collectives.runtime import agreement
from narrowcast.collectives.runtime.channel import Channel, channel_of
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.runtime.streams import Visit, lane_of
from narrowcast.collectives.runtime.submit import submit
from narrowcast.collectives.segments import Coder, Times, segment_ranges
from narrowcast.collectives.work import Work
from narrowcast.kernels import Noise, check_integer, check_seed

Tensors: TypeAlias = checks.Tensors
Spec: TypeAlias = checks.Spec
Step: TypeAlias = int | tuple[int, ...]
"""The number of a call, or several numbers where there are several calls a step: no two calls may have the same."""


def reduction_of(op: Any, world: int) -> Reduction:
    """What an op of torch.distributed means for a float32 sum."""
    kind = op.op if hasattr(op, "op") else op
    if kind == dist.ReduceOp.SUM:
        return Reduction()
    if kind == dist.ReduceOp.AVG:
        return Reduction(divide=float(world))
    if kind == dist.ReduceOp.PREMUL_SUM:
        # torch 2.11 has no op.factor, and all versions give it to pickle
        _, factor = op.__getstate__()
        return Reduction(multiply=float(factor))
    raise ValueError(f"collectives: op {op} is not a sum; take SUM, AVG or PREMUL_SUM")


def noise_of(what: str, codec: Codec, seed: int, step: Step | None) -> Noise:
    """The noise of a call."""
    if codec.stochastic and step is None:
        raise ValueError(
            f"{what} with {codec}: stochastic rounding needs step=, the number of this call; "
            "the same noise every time would be a bias"
        )
    rule = "step is the number of the call, an integer or a tuple of integers"
    path = step if isinstance(step, tuple) else (step or 0,)
    return Noise(check_seed(what, seed)).derive(*(check_integer(what, rule, number) for number in path))


def _signature(what: str, codec: Codec, flat: Flat, **more: object) -> dict[str, object]:
    dtype = str(flat.dtype).removeprefix("torch.")
    common = {"version": agreement.VERSION, "call": what, "spec": codec.spec, "dtype": dtype}
    return {**common, "numel": flat.numel, **more}


def _run(
    channel: Channel,
    signature: dict[str, object],
    job: Callable[[Exchange], None],
    flat: Flat,
    async_op: bool,
    more: Sequence[Tensor] = (),
) -> Work | None:
    """Submit a job that ends in `flat`; `more` are the other tensors that it uses."""

    def whole(exchange: Exchange) -> None:
        job(exchange)
        flat.write_back()

    work = submit(channel, signature, whole, [*flat.memory, *more])
    if async_op:
        return work
    work.wait()
    return None


def all_reduce(
    tensor: Tensors,
    spec: Spec,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    step: Step | None = None,
    seed: int = 0,
    nodes: Sequence[Sequence[int]] | None = None,
    inner: Spec = "as-is",
    accumulator: str = "float32",
    residuals: Residuals | None = None,
    times: Times | None = None,
    channel: Channel | None = None,
    buffer: Tensor | None = None,
) -> Work | None:
    """Sum `tensor` (or each of a list: the segments of one bucket) over the group, in place, through a codec.

    All ranks end with identical bits. algorithm: see `narrowcast.collectives.algorithms.record`. nodes and inner: the ranks of
    each node and the spec inside it, for "hierarchical". accumulator: "float32" or "low", for "ring". residuals: what
    error feedback carries from call to call. times, channel and buffer are for `attach`: where to count seconds, whose
    turn it is, and the flat tensor that the listed ones are views of.
    """
    codec, flat = codec_named(spec), Flat(checks.outputs("all_reduce", tensor), buffer)
    channel = channel or channel_of(group)
    chosen = record.choose(algorithm, codec, flat.numel, channel.world, bool(nodes))
    record.check(chosen, codec, channel.world, nodes)
    checks.check_options(codec, chosen, accumulator, residuals)
    checks.check_residuals(residuals, chosen, flat)
    reduction, noise = reduction_of(op, channel.world), noise_of("all_reduce", codec, seed, step)
    inside = codec_named(inner)
    checks.check_inner(inside, chosen)
    noise_of("all_reduce inside a node", inside, seed, step)

    def job(exchange: Exchange) -> None:
        call = Call(flat.x, codec, exchange, flat.lengths, reduction, noise, residuals, accumulator, nodes, inside)
        call.times = times or call.times
        record.run(chosen, call)

    more: dict[str, object] = {"algorithm": chosen, "op": str(reduction), "segments": flat.lengths}
    more["seed"] = noise.seed if codec.stochastic or inside.stochastic else None
    more |= {"nodes": nodes, "inner": str(inside)}
    signature = _signature("all_reduce", codec, flat, **more, accumulator=accumulator)
    owed = [] if residuals is None else [residuals.first, residuals.second]
    return _run(channel, signature, job, flat, async_op, owed)


def reduce_scatter(
    output: Tensor,
    input: Tensors,
    spec: Spec,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    step: Step | None = None,
    seed: int = 0,
) -> Work | None:
    """Rank r gets the sum of everybody's part r: of a list with one tensor a rank, or of W equal parts of a tensor."""
    codec, channel = checks.plain_codec("reduce_scatter", spec), channel_of(group)
    flat = Flat(checks.inputs("reduce_scatter", input, output))
    target = Flat(checks.outputs("reduce_scatter", output))
    lengths = checks.parts("reduce_scatter", flat, isinstance(input, Tensor), channel.world)
    checks.expect("reduce_scatter", target, lengths[channel.rank])
    noise, reduction = noise_of("reduce_scatter", codec, seed, step), reduction_of(op, channel.world)

    def job(exchange: Exchange) -> None:
        call = Call(flat.x, codec, exchange, lengths, reduction, noise)
        store(target.x, primitives.reduce_scatter(call, segment_ranges(lengths), record.scales(call)))

    signature = _signature("reduce_scatter", codec, flat, segments=lengths, op=str(reduction))
    return _run(channel, signature, job, target, async_op, flat.memory)


def all_gather(
    output: Tensors,
    input: Tensor,
    spec: Spec,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    step: Step | None = None,
    seed: int = 0,
) -> Work | None:
    """Everybody gets everybody's `input`, in rank order: into a list with one tensor a rank, or into one tensor."""
    codec, channel = checks.plain_codec("all_gather", spec), channel_of(group)
    flat, source = Flat(checks.outputs("all_gather", output, input)), Flat(checks.inputs("all_gather", input))
    lengths = checks.parts("all_gather", flat, isinstance(output, Tensor), channel.world)
    checks.expect("all_gather", source, lengths[channel.rank])
    noise = noise_of("all_gather", codec, seed, step)

    def job(exchange: Exchange) -> None:
        call = Call(flat.x, codec, exchange, lengths, noise=noise)
        primitives.all_gather(call, segment_ranges(lengths), source.x)

    signature = _signature("all_gather", codec, flat, segments=lengths)
    return _run(channel, signature, job, flat, async_op, source.memory)


def all_to_all(
    output: Tensors,
    input: Tensors,
    spec: Spec,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    step: Step | None = None,
    seed: int = 0,
) -> Work | None:
    """Part p of our input goes to rank p, each encoded by itself; parts may differ in size (lists, or split sizes)."""
    codec, channel = checks.plain_codec("all_to_all", spec), channel_of(group)
    target, source = Flat(checks.outputs("all_to_all", output, input)), Flat(checks.inputs("all_to_all", input))
    world, split_sizes = channel.world, checks.split_sizes
    arriving = split_sizes("all_to_all", target, isinstance(output, Tensor), output_split_sizes, world)
    leaving = split_sizes("all_to_all", source, isinstance(input, Tensor), input_split_sizes, world)
    noise = noise_of("all_to_all", codec, seed, step)

    def job(exchange: Exchange) -> None:
        sending = Call(source.x, codec, exchange, leaving, noise=noise)
        receiving = Call(target.x, codec, exchange, arriving, noise=noise)
        primitives.all_to_all(sending, receiving)

    # the sizes may differ from rank to rank and from call to call: phases.all_to_all compares them each time
    signature = _signature("all_to_all", codec, source, numel=None)
    return _run(channel, signature, job, target, async_op, source.memory)


def broadcast(
    tensor: Tensors,
    spec: Spec,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    group_src: int | None = None,
    step: Step | None = None,
    seed: int = 0,
) -> Work | None:
    """Everybody gets what rank `src` has, as the codec brings it back: `src` itself, too."""
    codec, flat = checks.plain_codec("broadcast", spec), Flat(checks.outputs("broadcast", tensor))
    channel = channel_of(group)
    root = checks.group_rank("broadcast", channel, group, src, group_src)
    noise = noise_of("broadcast", codec, seed, step)

    def job(exchange: Exchange) -> None:
        primitives.broadcast(Call(flat.x, codec, exchange, flat.lengths, noise=noise), root)

    return _run(channel, _signature("broadcast", codec, flat, segments=flat.lengths, src=root), job, flat, async_op)


def send(
    tensor: Tensors,
    spec: Spec,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    *,
    group_dst: int | None = None,
    step: Step | None = None,
    seed: int = 0,
) -> None:
    """Send to one rank, which calls `recv` with the same spec, size and tag."""
    work = isend(tensor, spec, dst, group, tag, group_dst=group_dst, step=step, seed=seed)
    work.wait()


def recv(
    tensor: Tensors,
    spec: Spec,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    *,
    group_src: int | None = None,
) -> None:
    """Receive from one rank, in place."""
    irecv(tensor, spec, src, group, tag, group_src=group_src).wait()


def isend(
    tensor: Tensors,
    spec: Spec,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    *,
    group_dst: int | None = None,
    step: Step | None = None,
    seed: int = 0,
) -> Work:
    """`send` without waiting. The tensor is encoded before this returns."""
    codec, flat = checks.plain_codec("send", spec), Flat(checks.inputs("send", tensor))
    channel = channel_of(group)
    peer, noise = checks.peer_rank("send", channel, group, dst, group_dst), noise_of("send", codec, seed, step)
    p2p.check_tag(tag)
    coder = Coder(codec, flat.lengths, flat.dtype)
    lane = lane_of(channel.transport, flat.device)
    wire, there = lane.to_host(p2p.outgoing(coder, flat.x, noise.derive(channel.rank, 0, peer, tag)))

    def job() -> int:
        lane.hold(there)
        return p2p.send(channel.transport, coder, wire, peer, tag)

    return channel.lines.start(("send", peer, tag), job, Work())


def irecv(
    tensor: Tensors,
    spec: Spec,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    *,
    group_src: int | None = None,
) -> Work:
    """`recv` without waiting."""
    codec, flat = checks.plain_codec("recv", spec), Flat(checks.outputs("recv", tensor))
    channel = channel_of(group)
    peer = checks.peer_rank("recv", channel, group, src, group_src)
    p2p.check_tag(tag)
    coder, whole = Coder(codec, flat.lengths, flat.dtype), (0, flat.numel)
    lane = lane_of(channel.transport, flat.device)
    visit, inference = Visit(lane, flat.memory), torch.is_inference_mode_enabled()

    def job() -> int:
        wire = lane.pinned(coder.nbytes(whole))
        sent = p2p.receive(channel.transport, coder, wire, peer, tag)
        with torch.inference_mode(inference), visit.working():
            coder.decode(wire.to(lane.device, non_blocking=True), whole, flat.x)
            flat.write_back()
        return sent

    return channel.lines.start(("recv", peer, tag), job, Work(visit))
