"""torch.distributed's collectives with a spec: same names, same meaning, same `async_op`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import agreement, algorithms, phases, point
from narrowcast.collectives.call import Call, Reduction
from narrowcast.collectives.channel import Channel, channel_of
from narrowcast.collectives.coder import Coder, Noise, Times, segment_ranges
from narrowcast.collectives.exchange import Exchange
from narrowcast.collectives.feedback import Residuals
from narrowcast.collectives.flat import Flat
from narrowcast.collectives.lane import Visit, lane_of
from narrowcast.collectives.one_shot import store
from narrowcast.collectives.submit import submit
from narrowcast.collectives.work import Work
from narrowcast.kernels.ops import FLOATS

Tensors = Tensor | Sequence[Tensor]
Spec = str | Codec


def reduction_of(op: Any, world: int) -> Reduction:
    """What an op of torch.distributed means for a float32 sum."""
    kind = op.op if hasattr(op, "op") else op
    if kind == dist.ReduceOp.SUM:
        return Reduction()
    if kind == dist.ReduceOp.AVG:
        return Reduction(divide=float(world))
    if kind == dist.ReduceOp.PREMUL_SUM:
        return Reduction(multiply=float(op.factor))
    raise ValueError(f"collectives: op {op} is not a sum; take SUM, AVG or PREMUL_SUM")


def _checked(what: str, tensors: Tensors, like: Tensors = ()) -> list[Tensor]:
    """As a list. `like` are the other tensors of the call, which must have the same type."""
    listed, others = _listed(tensors), _listed(like)
    for tensor in listed:
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{what}: got {tensor.dtype}; codecs take float32, float16 and bfloat16, use torch.distributed"
            )
    if len({(t.dtype, t.device) for t in listed + others}) > 1:
        raise TypeError(f"{what}: all tensors of one call must have one dtype and one device")
    return listed


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _plain_codec(what: str, spec: Spec) -> Codec:
    """A codec for calls that keep nothing from one to the next."""
    codec = codec_named(spec)
    if codec.feedback:
        raise ValueError(f"{what} with {codec}: only all_reduce has error feedback; leave out +ef")
    return codec


def noise_of(what: str, codec: Codec, seed: int, step: int | None) -> Noise:
    if codec.stochastic and step is None:
        raise ValueError(
            f"{what} with {codec}: stochastic rounding needs step=, the number of this call; "
            "the same noise every time would be a bias"
        )
    return Noise(seed, step or 0)


def _signature(what: str, codec: Codec, x: Tensor, **more: object) -> dict[str, object]:
    dtype = str(x.dtype).removeprefix("torch.")
    common = {"version": agreement.VERSION, "call": what, "spec": str(codec), "dtype": dtype}
    return {**common, "numel": x.numel(), **more}


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

    work = submit(channel, signature, whole, [flat.x, *flat.tensors, *more])
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
    step: int | None = None,
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

    All ranks end with identical bits. algorithm: see `narrowcast.collectives.algorithms`. nodes and inner: the ranks of
    each node and the spec inside it, for "hierarchical". accumulator: "float32" or "low", for "ring". residuals: what
    error feedback carries from call to call. times, channel and buffer are for `attach`: where to count seconds, whose
    turn it is, and the flat tensor that the listed ones are views of.
    """
    codec, flat = codec_named(spec), Flat(_checked("all_reduce", tensor), buffer)
    channel = channel or channel_of(group)
    chosen = algorithms.choose(algorithm, codec, flat.x.numel(), channel.world, bool(nodes))
    algorithms.check(chosen, codec, channel.world, nodes)
    _check_options(codec, chosen, accumulator, residuals)
    reduction, noise = reduction_of(op, channel.world), noise_of("all_reduce", codec, seed, step)
    inside = codec_named(inner)
    _check_inner(inside, step)

    def job(exchange: Exchange) -> None:
        call = Call(flat.x, codec, exchange, flat.lengths, reduction, noise, residuals, accumulator, nodes, inside)
        call.times = times or call.times
        algorithms.run(chosen, call)

    more: dict[str, object] = {"algorithm": chosen, "op": str(reduction), "segments": flat.lengths, "seed": seed}
    more |= {"nodes": nodes, "inner": str(inside)}
    signature = _signature("all_reduce", codec, flat.x, **more, accumulator=accumulator)
    owed = [] if residuals is None else [residuals.first, residuals.second]
    return _run(channel, signature, job, flat, async_op, owed)


def _check_options(codec: Codec, algorithm: str, accumulator: str, residuals: Residuals | None) -> None:
    if accumulator not in ("float32", "low"):
        raise ValueError(f"all_reduce: accumulator={accumulator!r}; take 'float32' or 'low'")
    if accumulator == "low" and algorithm != "ring":
        raise ValueError(f"all_reduce: accumulator='low' is for 'ring'; {algorithm!r} always adds in float32")
    if (residuals is not None or codec.feedback) and algorithm not in algorithms.WITH_FEEDBACK:
        allowed = ", ".join(algorithms.WITH_FEEDBACK)
        raise ValueError(f"all_reduce: error feedback goes with {allowed}; got {algorithm!r}")
    if codec.feedback and residuals is None:
        raise ValueError(f"all_reduce with {codec}: +ef needs residuals=, which keeps what is owed from call to call")


def _check_inner(inner: Codec, step: int | None) -> None:
    noise_of("all_reduce inside a node", inner, 0, step)
    if inner.feedback:
        raise ValueError(f"all_reduce: inner={inner}; there is no error feedback inside a node, leave out +ef")


def reduce_scatter(
    output: Tensor,
    input: Tensors,
    spec: Spec,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    step: int | None = None,
    seed: int = 0,
) -> Work | None:
    """Rank r gets the sum of everybody's part r: of a list with one tensor a rank, or of W equal parts of a tensor."""
    codec, channel = _plain_codec("reduce_scatter", spec), channel_of(group)
    flat, target = Flat(_checked("reduce_scatter", input, output)), Flat(_checked("reduce_scatter", output))
    lengths = _parts("reduce_scatter", flat, isinstance(input, Tensor), channel.world)
    _expect("reduce_scatter", target, lengths[channel.rank])
    noise, reduction = noise_of("reduce_scatter", codec, seed, step), reduction_of(op, channel.world)

    def job(exchange: Exchange) -> None:
        call = Call(flat.x, codec, exchange, lengths, reduction, noise)
        store(target.x, phases.reduce_scatter(call, segment_ranges(lengths), algorithms.scales(call)))

    signature = _signature("reduce_scatter", codec, flat.x, segments=lengths, op=str(reduction))
    return _run(channel, signature, job, target, async_op, [flat.x])


def all_gather(
    output: Tensors,
    input: Tensor,
    spec: Spec,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    step: int | None = None,
    seed: int = 0,
) -> Work | None:
    """Everybody gets everybody's `input`, in rank order: into a list with one tensor a rank, or into one tensor."""
    codec, channel = _plain_codec("all_gather", spec), channel_of(group)
    flat, source = Flat(_checked("all_gather", output, input)), Flat(_checked("all_gather", input))
    lengths = _parts("all_gather", flat, isinstance(output, Tensor), channel.world)
    _expect("all_gather", source, lengths[channel.rank])
    noise = noise_of("all_gather", codec, seed, step)

    def job(exchange: Exchange) -> None:
        call = Call(flat.x, codec, exchange, lengths, noise=noise)
        phases.all_gather(call, segment_ranges(lengths), source.x)

    signature = _signature("all_gather", codec, flat.x, segments=lengths)
    return _run(channel, signature, job, flat, async_op, [source.x])


def all_to_all(
    output: Tensors,
    input: Tensors,
    spec: Spec,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    step: int | None = None,
    seed: int = 0,
) -> Work | None:
    """Part p of our input goes to rank p, each encoded by itself; parts may differ in size (lists, or split sizes)."""
    codec, channel = _plain_codec("all_to_all", spec), channel_of(group)
    target, source = Flat(_checked("all_to_all", output, input)), Flat(_checked("all_to_all", input))
    arriving = _split_sizes("all_to_all", target, isinstance(output, Tensor), output_split_sizes, channel.world)
    leaving = _split_sizes("all_to_all", source, isinstance(input, Tensor), input_split_sizes, channel.world)
    noise = noise_of("all_to_all", codec, seed, step)

    def job(exchange: Exchange) -> None:
        sending = Call(source.x, codec, exchange, leaving, noise=noise)
        receiving = Call(target.x, codec, exchange, arriving, noise=noise)
        phases.all_to_all(sending, receiving)

    # the sizes may differ from rank to rank and from call to call: phases.all_to_all compares them each time
    signature = _signature("all_to_all", codec, source.x, numel=None)
    return _run(channel, signature, job, target, async_op, [source.x])


def broadcast(
    tensor: Tensors,
    spec: Spec,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    group_src: int | None = None,
    step: int | None = None,
    seed: int = 0,
) -> Work | None:
    """Everybody gets what rank `src` has, as the codec brings it back: `src` itself, too."""
    codec, flat, channel = _plain_codec("broadcast", spec), Flat(_checked("broadcast", tensor)), channel_of(group)
    root = _group_rank("broadcast", channel, group, src, group_src)
    noise = noise_of("broadcast", codec, seed, step)

    def job(exchange: Exchange) -> None:
        phases.broadcast(Call(flat.x, codec, exchange, flat.lengths, noise=noise), root)

    return _run(channel, _signature("broadcast", codec, flat.x, segments=flat.lengths, src=root), job, flat, async_op)


def send(
    tensor: Tensors,
    spec: Spec,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    *,
    group_dst: int | None = None,
    step: int | None = None,
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
    step: int | None = None,
    seed: int = 0,
) -> Work:
    """`send` without waiting. The tensor is encoded before this returns."""
    codec, flat, channel = _plain_codec("send", spec), Flat(_checked("send", tensor)), channel_of(group)
    peer, noise = _peer("send", channel, group, dst, group_dst), noise_of("send", codec, seed, step)
    coder = Coder(codec, flat.lengths, flat.x.dtype, noise)
    lane = lane_of(channel.transport, flat.x.device)
    wire, there = lane.to_host(point.outgoing(coder, flat.x, noise.stream(channel.rank, 0)))

    def job() -> None:
        lane.hold(there)
        point.send(channel.transport, coder, wire, peer, tag)

    return _in_line(channel, ("send", peer, tag), job, Work())


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
    codec, flat, channel = _plain_codec("recv", spec), Flat(_checked("recv", tensor)), channel_of(group)
    peer = _peer("recv", channel, group, src, group_src)
    coder, whole = Coder(codec, flat.lengths, flat.x.dtype, Noise()), (0, flat.x.numel())
    lane = lane_of(channel.transport, flat.x.device)
    visit = Visit(lane, [flat.x, *flat.tensors])

    def job() -> None:
        wire = lane.pinned(coder.nbytes(whole))
        point.receive(channel.transport, coder, wire, peer, tag)
        with visit.working():
            coder.decode(wire.to(lane.device, non_blocking=True), whole, flat.x)
            flat.write_back()

    return _in_line(channel, ("recv", peer, tag), job, Work(visit))


def _in_line(channel: Channel, line: tuple[str, int, int], job: Callable[[], None], work: Work) -> Work:
    """Messages between two ranks with one tag arrive in the order in which they were sent."""
    point.start(job, channel.lines.get(line), work)
    channel.lines[line] = work
    return work


def _peer(what: str, channel: Channel, group: dist.ProcessGroup | None, rank: int | None, own: int | None) -> int:
    peer = _group_rank(what, channel, group, rank, own)
    if peer == channel.rank:
        raise ValueError(f"{what}: rank {peer} is this one; give another rank of the group")
    return peer


def _group_rank(what: str, channel: Channel, group: dist.ProcessGroup | None, rank: int | None, own: int | None) -> int:
    """The rank in the group; `own` is that already."""
    if (rank is None) == (own is None):
        raise ValueError(f"{what}: give either the global rank or its group_ twin, not both and not neither")
    if rank is not None:
        own = rank if group is None else dist.get_group_rank(group, rank)
    assert own is not None
    if not 0 <= own < channel.world:
        raise ValueError(f"{what}: there is no rank {own} in a group of {channel.world}")
    return own


def _split_sizes(what: str, flat: Flat, one_tensor: bool, sizes: Sequence[int] | None, world: int) -> list[int]:
    if sizes is None:
        return _parts(what, flat, one_tensor, world)
    if len(sizes) != world or sum(sizes) != flat.x.numel():
        raise ValueError(f"{what}: split sizes {list(sizes)} must be {world} numbers that add up to {flat.x.numel()}")
    return list(sizes)


def _parts(what: str, flat: Flat, one_tensor: bool, world: int) -> list[int]:
    """The length of each rank's part."""
    if not one_tensor:
        if len(flat.lengths) != world:
            raise ValueError(f"{what}: got a list of {len(flat.lengths)} tensors for {world} ranks; give one for each")
        return flat.lengths
    if flat.x.numel() % world:
        raise ValueError(f"{what}: {flat.x.numel()} values do not divide into {world} parts; pad, or give a list")
    return [flat.x.numel() // world] * world


def _expect(what: str, flat: Flat, numel: int) -> None:
    if flat.x.numel() != numel:
        raise ValueError(f"{what}: this rank's part has {numel} values, the tensor given for it {flat.x.numel()}")
