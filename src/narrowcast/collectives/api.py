"""torch.distributed's collectives with a spec: same names, same meaning, same `async_op`.

Each one looks at its arguments in the caller's thread, submits a named function (`_run_...`, `AllReduce.run`) to the
group's channel, and that runs it when it is the call's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import checks, p2p, primitives
from narrowcast.collectives.algorithms import record
from narrowcast.collectives.algorithms.context import Call, Flat, Reduction
from narrowcast.collectives.prepared import prepared, reduction_of, signature_text
from narrowcast.collectives.residuals import Residuals
from narrowcast.collectives.runtime.channel import Channel, channel_of
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.runtime.streams import DeviceStream, StreamScope, Way
from narrowcast.collectives.segments import Coder, Times, segment_ranges, store
from narrowcast.collectives.transports.base import Transport
from narrowcast.collectives.work import Work
from narrowcast.kernels import Noise, check_integer, check_seed

Tensors: TypeAlias = checks.Tensors
Spec: TypeAlias = checks.Spec
Nodes: TypeAlias = record.Nodes
Step: TypeAlias = int | tuple[int, ...]
"""The number of a call, or several numbers where there are several calls a step: no two calls may have the same."""


FIRST_CALL = (0,)
"""The numbers of a call that has none."""


def call_path(what: str, codec: Codec, step: Step | None) -> tuple[int, ...]:
    """The numbers of a call, by which its noise differs from that of others."""
    if codec.stochastic and step is None:
        raise ValueError(
            f"{what} with {codec}: stochastic rounding needs step=, the number of this call; "
            "the same noise every time would be a bias"
        )
    if step is None:
        return FIRST_CALL
    rule = "step is the number of the call, an integer or a tuple of integers"
    path = step if isinstance(step, tuple) else (step,)
    return tuple(check_integer(what, rule, number) for number in path)


def noise_of(what: str, codec: Codec, seed: int, step: Step | None) -> Noise:
    """The noise of a call."""
    path = call_path(what, codec, step)
    return Noise(check_seed(what, seed)).derive(*path)


def _outcome(work: Work, async_op: bool) -> Work | None:
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
    nodes: Nodes | None = None,
    inner: Spec = "as-is",
    accumulator: str = "float32",
    residuals: Residuals | None = None,
    times: Times | None = None,
    channel: Channel | None = None,
    buffer: Tensor | None = None,
) -> Work | None:
    """Sum `tensor` (or each of a list: the segments of one bucket) over the group, in place, through a codec.

    All ranks end with identical bits. algorithm: see `narrowcast.collectives.algorithms.record`. nodes and inner: the
    ranks of each node and the spec inside it, for "hierarchical". accumulator: "float32" or "low", for "ring".
    residuals: what error feedback carries from call to call. times, channel and buffer are for `attach`: where to count
    seconds, whose turn it is, and the flat tensor that the listed ones are views of.
    """
    codec, flat = codec_named(spec), Flat(checks.outputs("all_reduce", tensor), buffer)
    channel = channel or channel_of(group)
    places = None if nodes is None else tuple(map(tuple, nodes))
    options: dict[str, Any] = {"algorithm": algorithm, "seed": seed, "nodes": places, "inner": inner}
    options |= {"accumulator": accumulator, "feedback": residuals is not None}
    reduction = reduction_of(op, channel.world)
    kind = prepared(codec, tuple(flat.lengths), flat.dtype, channel.world, reduction, **options)
    checks.check_residuals(residuals, codec, kind.algorithm, flat)
    path: tuple[int, ...] = FIRST_CALL
    if kind.draws or step is not None:
        path = call_path("all_reduce", codec, step)
        call_path("all_reduce inside a node", kind.inner, step)
    return _outcome(kind.start(channel, flat, path, residuals, times), async_op)


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

    signature = signature_text("reduce_scatter", codec, flat.numel, flat.dtype, segments=lengths, op=str(reduction))
    run = partial(_run_reduce_scatter, target, flat, codec, lengths, reduction, noise)
    return _outcome(
        channel.submit(signature, run, [*target.memory, *flat.memory], waits=flat.host_waits(codec)), async_op
    )


def _run_reduce_scatter(
    target: Flat, flat: Flat, codec: Codec, lengths: list[int], reduction: Reduction, noise: Noise, exchange: Exchange
) -> None:
    call = Call(flat.x, codec, exchange, lengths, reduction, noise)
    store(target.x, primitives.reduce_scatter(call, segment_ranges(lengths), record.scales(call)))
    target.write_back()


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

    signature = signature_text("all_gather", codec, flat.numel, flat.dtype, segments=lengths)
    run = partial(_run_all_gather, flat, source, codec, lengths, noise)
    return _outcome(
        channel.submit(signature, run, [*flat.memory, *source.memory], waits=flat.host_waits(codec)), async_op
    )


def _run_all_gather(
    flat: Flat, source: Flat, codec: Codec, lengths: list[int], noise: Noise, exchange: Exchange
) -> None:
    call = Call(flat.x, codec, exchange, lengths, noise=noise)
    primitives.all_gather(call, segment_ranges(lengths), source.x)
    flat.write_back()


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
    agreed: Mapping[str, object] | None = None,
) -> Work | None:
    """Part p of our input goes to rank p, each encoded by itself; parts may differ in size (lists, or split sizes).

    agreed: for callers whose ranks have told each other their split sizes, what those have in common; ranks compare
    this once, and not the sizes in every call.
    """
    codec, channel = checks.plain_codec("all_to_all", spec), channel_of(group)
    target, source = Flat(checks.outputs("all_to_all", output, input)), Flat(checks.inputs("all_to_all", input))
    world, split_sizes = channel.world, checks.split_sizes
    arriving = split_sizes("all_to_all", target, isinstance(output, Tensor), output_split_sizes, world)
    leaving = split_sizes("all_to_all", source, isinstance(input, Tensor), input_split_sizes, world)
    noise = noise_of("all_to_all", codec, seed, step)

    # other sizes may differ from rank to rank and from call to call: all ranks compare them each time, on the host
    equal = output_split_sizes is None is input_split_sizes and isinstance(output, Tensor) and isinstance(input, Tensor)
    if equal:
        checks.expect("all_to_all", target, source.numel)
    known = equal or agreed is not None
    signature = signature_text("all_to_all", codec, source.numel if equal else None, source.dtype, **(agreed or {}))
    run = partial(_run_all_to_all, target, source, codec, arriving, leaving, noise, known, equal)
    waits = not known or source.host_waits(codec)
    return _outcome(channel.submit(signature, run, [*target.memory, *source.memory], waits=waits), async_op)


def _run_all_to_all(
    target: Flat,
    source: Flat,
    codec: Codec,
    arriving: list[int],
    leaving: list[int],
    noise: Noise,
    known: bool,
    even: bool,
    exchange: Exchange,
) -> None:
    sending = Call(source.x, codec, exchange, leaving, noise=noise)
    receiving = Call(target.x, codec, exchange, arriving, noise=noise)
    if not known:
        primitives.agree_on_sizes(sending, receiving)
    primitives.all_to_all(sending, receiving, even)
    target.write_back()


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

    signature = signature_text("broadcast", codec, flat.numel, flat.dtype, segments=flat.lengths, src=root)
    run = partial(_run_broadcast, flat, codec, noise, root)
    return _outcome(channel.submit(signature, run, flat.memory, waits=flat.host_waits(codec)), async_op)


def _run_broadcast(flat: Flat, codec: Codec, noise: Noise, root: int, exchange: Exchange) -> None:
    primitives.broadcast(Call(flat.x, codec, exchange, flat.lengths, noise=noise), root)
    flat.write_back()


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
    stream = channel.stream_on(flat.device)
    wire = p2p.encode_message(coder, flat.x, noise.derive(channel.rank, 0, peer, tag))
    if stream.way is Way.ROUNDS:
        line = channel.lines.on_device(channel.transport, channel.rank, peer, stream)
        deliver = partial(line.send, wire, StreamScope(line.stream, [wire]))
    else:
        deliver = partial(_send_from_host, channel.transport, peer, stream, *stream.to_host(wire))
    run = partial(p2p.send, channel.transport, coder, peer, tag, deliver)
    return channel.lines.start(("send", peer, tag), run, Work())


def _send_from_host(
    transport: Transport,
    peer: int,
    stream: DeviceStream,
    wire: Tensor,
    copied: torch.cuda.Event | None,
    announce: Callable[[int], None],
    tag: int,
) -> None:
    announce(0)
    stream.synchronize(copied)
    transport.isend(wire, peer, tag).wait()


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
    coder, stream = Coder(codec, flat.lengths, flat.dtype), channel.stream_on(flat.device)
    size = coder.nbytes((0, flat.numel))
    if stream.way is Way.ROUNDS:
        line = channel.lines.on_device(channel.transport, peer, channel.rank, stream)
        stream, take = line.stream, partial(line.receive, size)
    else:
        take = partial(_receive_on_host, channel.transport, peer, stream, size)
    scope, inference = StreamScope(stream, flat.memory), torch.is_inference_mode_enabled()

    def accept(number: int, tag: int) -> None:
        wire = take(number, tag)
        with torch.inference_mode(inference), scope:
            coder.decode(wire.to(stream.device, non_blocking=True), (0, flat.numel), flat.x)
            flat.write_back()

    run = partial(p2p.receive, channel.transport, coder, peer, tag, accept)
    return channel.lines.start(("recv", peer, tag), run, Work(scope))


def _receive_on_host(transport: Transport, peer: int, stream: DeviceStream, nbytes: int, _: int, tag: int) -> Tensor:
    wire = stream.pinned(nbytes)
    transport.irecv(wire, peer, tag).wait()
    return wire
