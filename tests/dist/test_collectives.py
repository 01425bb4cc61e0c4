"""reduce_scatter, all_gather, all_to_all, broadcast, send, recv: values, identical bits, errors, work under way."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dist.emulation import Setting, noise_at, summed
from dist.models import error_of
from dist.pool import WORLDS, Pool, soon
from torch import Tensor

import narrowcast as nc
from narrowcast.collectives import Residuals, Work, irecv, isend
from narrowcast.collectives.runtime.channel import channel_of
from narrowcast.simulate import World

SPECS = ("as-is", "bf16", "int8/32", "int8", "e5m2+aps", "int4/16+sr", "nvfp4", "mxfp8", "uint8/16", "sign/32")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(rank: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 + rank)).to(dtype)


def lengths_of(world: int) -> list[int]:
    """Uneven, with an empty one among them."""
    return [(37 * rank) % 90 for rank in range(world)]


def passage(spec: str, x: Tensor, rank: int, phase: int, offset: int, step: int, to: tuple[int, ...] = ()) -> Tensor:
    """What comes back of a part that is encoded by itself, in its own type."""
    setting = Setting(nc.codec(spec), [x.numel()], x.dtype)
    if not x.numel():
        return x.clone()
    wire = setting.codec.encode(x, **noise_at(offset, 0, step, rank, phase, *to))
    return setting.codec.decode(wire, x.numel(), dtype=x.dtype)


Kinds = list[tuple[str, torch.dtype]]
ALL_KINDS: Kinds = [(spec, dtype) for spec in SPECS for dtype in DTYPES]
SOME_KINDS: Kinds = [(spec, DTYPES[number % 3]) for number, spec in enumerate(SPECS)]

every_world = pytest.mark.parametrize(
    "world, kinds",
    [
        *((world, ALL_KINDS if world < 4 else SOME_KINDS) for world in WORLDS),
        *(pytest.param(world, ALL_KINDS, marks=pytest.mark.slow) for world in WORLDS if world >= 4),
    ],
)
"""Of four ranks and more each codec with one type, in the long form with each."""


def scatter_all(group: dist.ProcessGroup, kinds: Kinds) -> list[list[Tensor]]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    found = []
    for spec, dtype in kinds:
        equal, uneven = torch.empty(20, dtype=dtype), torch.empty(lengths_of(world)[rank], dtype=dtype)
        nc.reduce_scatter(equal, values(rank, 20 * world, dtype), spec, dist.ReduceOp.AVG, group, step=1)
        parts = list(values(rank, sum(lengths_of(world)), dtype).split(lengths_of(world)))
        nc.reduce_scatter(uneven, parts, spec, group=group, step=2)
        found.append([equal, uneven])
    return found


@every_world
def test_reduce_scatter_gives_each_rank_the_rank_order_sum_of_its_part(pool: Pool, world: int, kinds: Kinds) -> None:
    ranks = pool.run(world, scatter_all, kinds)
    for number, (spec, dtype) in enumerate(kinds):
        for lengths, step, divide, place in [([20] * world, 1, world, 0), (lengths_of(world), 2, 1, 1)]:
            xs = [values(rank, sum(lengths), dtype) for rank in range(world)]
            setting = Setting(nc.codec(spec), lengths, dtype, step=step, divide=divide)
            scales = setting.scales(xs)
            for owner, part in enumerate(setting.ranges):
                parts = [setting.passage(x[slice(*part)], part, r, 0, scales[r]) for r, x in enumerate(xs)]
                expected = setting.finish(summed(parts)).to(dtype)
                assert torch.equal(ranks[owner][number][place], expected), f"{spec} {dtype} rank {owner}"


def gather_all(group: dist.ProcessGroup, kinds: Kinds) -> list[list[Tensor]]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    found = []
    for spec, dtype in kinds:
        flat, uneven = torch.empty(20 * world, dtype=dtype), [torch.empty(n, dtype=dtype) for n in lengths_of(world)]
        nc.all_gather(flat, values(rank, 20, dtype), spec, group, step=1)
        nc.all_gather(uneven, values(rank, lengths_of(world)[rank], dtype), spec, group, step=1)
        found.append([flat, torch.cat(uneven)])
    return found


@every_world
def test_all_gather_gives_everybody_the_same_bits_of_everybody(pool: Pool, world: int, kinds: Kinds) -> None:
    ranks = pool.run(world, gather_all, kinds)
    for number, (spec, dtype) in enumerate(kinds):
        for place, lengths in enumerate([[20] * world, lengths_of(world)]):
            offsets = [sum(lengths[:rank]) for rank in range(world)]
            sent = [passage(spec, values(r, lengths[r], dtype), r, 1, offsets[r], 1) for r in range(world)]
            for rank in range(world):
                assert torch.equal(ranks[rank][number][place], torch.cat(sent)), f"{spec} {dtype} rank {rank}"


def splits(source: int, target: int) -> int:
    """How many values `source` sends to `target`; some pairs none."""
    return (13 * source + 7 * target) % 29 * ((source + target) % 3 > 0)


def exchange_all(group: dist.ProcessGroup, kinds: Kinds) -> list[list[Tensor]]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    leaving, arriving = [splits(rank, p) for p in range(world)], [splits(p, rank) for p in range(world)]
    found = []
    for spec, dtype in kinds:
        x = values(rank, sum(leaving), dtype)
        one, listed = torch.empty(sum(arriving), dtype=dtype), [torch.empty(n, dtype=dtype) for n in arriving]
        options = {"output_split_sizes": arriving, "input_split_sizes": leaving}
        nc.all_to_all(one, x, spec, group, step=1, **options)
        nc.all_to_all(listed, list(x.split(leaving)), spec, group, step=1)
        equal = torch.empty(4 * world, dtype=dtype)
        nc.all_to_all(equal, values(rank, 4 * world, dtype), spec, group, step=1)
        found.append([one, torch.cat(listed), equal])
    return found


@every_world
def test_all_to_all_brings_part_p_to_rank_p(pool: Pool, world: int, kinds: Kinds) -> None:
    ranks = pool.run(world, exchange_all, kinds)
    for number, (spec, dtype) in enumerate(kinds):
        for target in range(world):
            uneven, equal = [], []
            for source in range(world):
                sizes = [splits(source, p) for p in range(world)]
                x, begin = values(source, sum(sizes), dtype), sum(sizes[:target])
                uneven.append(passage(spec, x[begin : begin + sizes[target]], source, 0, begin, 1))
                x = values(source, 4 * world, dtype)[4 * target : 4 * target + 4]
                equal.append(passage(spec, x, source, 0, 4 * target, 1))
            one, listed, even = ranks[target][number]
            assert torch.equal(one, torch.cat(uneven)), f"{spec} {dtype} rank {target}"
            assert torch.equal(listed, one)
            assert torch.equal(even, torch.cat(equal))


def broadcast_all(group: dist.ProcessGroup) -> list[Tensor]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    found = []
    for spec in SPECS:
        for root in {0, world - 1}:
            x, parts = values(rank, 77).view(7, 11), [values(rank, 5), values(rank, 40)]
            nc.broadcast(x, spec, group_src=root, group=group, step=4)
            nc.broadcast(parts, spec, dist.get_global_rank(group, root), group, step=4)
            found.append(torch.cat([x.flatten(), *parts]))
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_gives_everybody_what_the_codec_brings_back_the_sender_too(pool: Pool, world: int) -> None:
    ranks = pool.run(world, broadcast_all)
    roots = sorted({0, world - 1})
    for number, (spec, root) in enumerate((s, r) for s in SPECS for r in roots):
        whole = passage(spec, values(root, 77), root, 0, 0, 4)
        setting = Setting(nc.codec(spec), [5, 40], step=4)
        parts = setting.passage(torch.cat([values(root, 5), values(root, 40)]), (0, 45), root, 0)
        for rank in range(world):
            assert torch.equal(ranks[rank][number], torch.cat([whole, parts])), f"{spec} rank {rank}"


def send_around(group: dist.ProcessGroup) -> list[Tensor]:
    """Everybody sends to the next rank: blocking by turns, then all at once."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % world, (rank - 1) % world
    found = []
    for spec in SPECS:
        x, y, z = values(rank, 66).view(6, 11), torch.empty(6, 11), [torch.empty(3), torch.empty(0), torch.empty(50)]
        if rank % 2 == 0 and right != 0:
            nc.send(x, spec, group_dst=right, group=group, step=1)
        if rank % 2 == 1:
            nc.recv(y, spec, group_src=left, group=group)
        parts = [values(rank, 3), torch.empty(0), values(rank, 50)]
        works = [
            irecv(z, spec, group_src=left, group=group, tag=7),
            isend(parts, spec, group_dst=right, group=group, tag=7, step=1),
        ]
        for work in works:
            work.wait()
        found.append([y, torch.cat(z)])
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_is_sent_arrives_as_the_codec_brings_it_back(pool: Pool, world: int) -> None:
    ranks = pool.run(world, send_around)
    for number, spec in enumerate(SPECS):
        for rank in range(world):
            left = (rank - 1) % world
            whole, parts = ranks[rank][number]
            if rank % 2 == 1:
                expected = passage(spec, values(left, 66), left, 0, 0, 1, to=(rank, 0))
                assert torch.equal(whole.flatten(), expected), f"{spec} {rank}"
            setting = Setting(nc.codec(spec), [3, 0, 50], step=1, to=(rank, 7))
            x = torch.cat([values(left, 3), values(left, 50)])
            assert torch.equal(parts, setting.passage(x, (0, 53), left, 0, setting.own_scales(x)))


def many_in_flight(group: dist.ProcessGroup, count: int) -> list[float]:
    """Messages with one tag, all started before one is waited for."""
    rank = dist.get_rank(group)
    received = [torch.empty(40) for _ in range(count)]
    if rank == 0:
        works = [isend(torch.full((40,), float(i)), "fp32", group_dst=1, group=group) for i in range(count)]
    else:
        works = [irecv(x, "fp32", group_src=0, group=group) for x in received]
    for work in reversed(works):
        work.wait()
    return [float(x[0]) for x in received]


def test_messages_with_one_tag_keep_their_order(pool: Pool) -> None:
    assert pool.run(2, many_in_flight, 40)[1] == list(range(40))


def by_tags(group: dist.ProcessGroup) -> list[float]:
    rank, a, b = dist.get_rank(group), torch.empty(4), torch.empty(4)
    if rank == 0:
        works = [isend(torch.full((4,), float(tag)), "bf16", group_dst=1, group=group, tag=tag) for tag in (1, 2)]
    else:
        works = [irecv(x, "bf16", group_src=0, group=group, tag=tag) for x, tag in ((b, 2), (a, 1))]
    for work in works:
        work.wait()
    return [float(a[0]), float(b[0])]


def test_messages_with_different_tags_do_not_wait_for_each_other(pool: Pool) -> None:
    assert pool.run(2, by_tags)[1] == [1.0, 2.0]


def misfit(group: dist.ProcessGroup, spec: tuple[str, str], n: tuple[int, int]) -> str:
    rank = dist.get_rank(group)
    try:
        if rank == 0:
            nc.send(torch.ones(n[0]), spec[0], group_dst=1, group=group)
        else:
            nc.recv(torch.empty(n[1]), spec[1], group_src=0, group=group)
    finally:
        x = torch.ones(5)
        nc.all_reduce(x, "as-is", group=group)
        assert float(x[0]) == 2.0


@pytest.mark.parametrize(
    "spec, n", [(("int8/16", "int8/32"), (40, 40)), (("int8/16",) * 2, (40, 41)), (("int8/16",) * 2, (4000, 0))]
)
def test_a_sender_and_a_receiver_that_disagree_both_find_out_and_go_on(
    pool: Pool, spec: tuple[str, str], n: tuple[int, int]
) -> None:
    sender, receiver = pool.outcomes(2, misfit, spec, n)
    assert sender.error.startswith(f"DisagreementError: send: rank 1 expects something else than {n[0]} values")
    assert receiver.error.startswith(f"DisagreementError: recv: rank 0 sends something else than {n[1]} values")


WRONG = {
    "list too short": (lambda g: nc.all_gather([torch.empty(3)], torch.empty(3), "bf16", g), "list of 1 tensors for 2"),
    "no whole parts": (
        lambda g: nc.all_gather(torch.empty(3), torch.empty(1), "bf16", g),
        "3 values do not divide into 2",
    ),
    "input too long": (lambda g: nc.all_gather(torch.empty(4), torch.empty(3), "bf16", g), "has 2 values, the tensor"),
    "output too long": (lambda g: nc.reduce_scatter(torch.empty(3), torch.empty(4), "bf16", group=g), "has 2 values"),
    "max": (lambda g: nc.reduce_scatter(torch.empty(2), torch.empty(4), "bf16", dist.ReduceOp.MAX, g), "is not a sum"),
    "splits": (
        lambda g: nc.all_to_all(torch.empty(4), torch.empty(4), "bf16", g, input_split_sizes=[1, 2]),
        "must be 2 numbers that add up to 4",
    ),
    "negative split": (
        lambda g: nc.all_to_all(torch.empty(4), torch.empty(4), "bf16", g, input_split_sizes=[5, -1]),
        "split sizes [5, -1] must be 2 numbers that add up to 4, none below 0",
    ),
    "half a split": (
        lambda g: nc.all_to_all(torch.empty(4), torch.empty(4), "bf16", g, output_split_sizes=[1.5, 2.5]),
        "split sizes are integers, got 1.5",
    ),
    "half a step": (
        lambda g: nc.all_reduce(torch.ones(40), "int4/16+sr", group=g, step=1.5),
        "step is the number of the call, an integer or a tuple of integers, got 1.5",
    ),
    "seed": (lambda g: nc.all_reduce(torch.ones(40), "int4/16+sr", group=g, step=1, seed=-5), "got -5"),
    "expanded": (
        lambda g: nc.all_reduce(torch.ones(1, 1).expand(3, 400), "int8/16", group=g),
        "of shape [3, 400] and strides [0, 0] share their memory",
    ),
    "a window": (
        lambda g: nc.broadcast(torch.ones(10).as_strided((5, 2), (1, 1)), "bf16", 0, g),
        "share their memory, so there is no place for the result; give a copy",
    ),
    "sparse": (lambda g: nc.all_reduce(torch.ones(3, 3).to_sparse(), "bf16", group=g), "give a dense tensor"),
    "meta": (lambda g: nc.all_reduce(torch.ones(3, device="meta"), "bf16", group=g), "CPUs and CUDA devices"),
    "inference": (lambda g: nc.all_reduce(made_in_inference(), "bf16", group=g), "call in inference_mode, or clone"),
    "numpy": (
        lambda g: nc.all_reduce(np.ones(3, dtype=np.float32), "bf16", group=g),
        "takes a tensor or a flat list of tensors, got numpy.ndarray",
    ),
    "nested": (lambda g: nc.all_reduce([[torch.ones(3)]], "bf16", group=g), "flat list of tensors, got list of list"),
    "nothing": (lambda g: nc.all_reduce(None, "bf16", group=g), "flat list of tensors, got NoneType"),
    "residuals too short": (lambda g: owing(g, Residuals.zeros(10)), "residuals.first must be 1000 float32 values"),
    "residuals too long": (lambda g: owing(g, Residuals.zeros(1001)), "residuals.first must be 1000 float32 values"),
    "no second residual": (
        lambda g: owing(g, Residuals.zeros(1000, shots=1)),
        "residuals.second must be 1000 float32 values in one row on cpu for 'two_shot', got torch.float32 of shape [0]",
    ),
    "residuals in 16 bits": (lambda g: owing(g, Residuals(*torch.zeros(2, 1000).half())), "got torch.float16 of shape"),
    "residuals in rows": (lambda g: owing(g, Residuals(*torch.zeros(2, 10, 100))), "of shape [10, 100] on cpu"),
    "strided residuals": (lambda g: owing(g, Residuals(*torch.zeros(1000, 2).t())), "of shape [1000] on cpu"),
    "unit": (lambda g: owing(g, Residuals.zeros(1000), unit=0.0), "residuals.unit=0.0; residuals are kept in units"),
    "inner without nodes": (
        lambda g: nc.all_reduce(torch.ones(40), "int8/16", group=g, inner="bf16"),
        "inner=bf16 is the spec inside a node, and 'one_shot' knows no nodes",
    ),
    "nodes without hierarchy": (
        lambda g: nc.all_reduce(torch.ones(40), "int8/16", group=g, nodes=[[0], [1]], algorithm="two_shot"),
        "nodes=[[0], [1]] are for 'hierarchical'; 'two_shot' knows none",
    ),
    "no nodes": (lambda g: nc.all_reduce(torch.ones(40), "int8/16", group=g, nodes=[]), "nodes=[] are for"),
    "noise": (lambda g: nc.all_gather(torch.empty(4), torch.empty(2), "int4/16+sr", g), "needs step="),
    "noise, broadcast": (lambda g: nc.broadcast(torch.empty(4), "int4/16+sr", 0, g), "needs step="),
    "noise, all_to_all": (lambda g: nc.all_to_all(torch.empty(4), torch.empty(4), "int4/16+sr", g), "needs step="),
    "noise, send": (
        lambda g: nc.send(torch.empty(4), "int4/16+sr", group=g, group_dst=1 - dist.get_rank(g)),
        "needs step=",
    ),
    "no source": (lambda g: nc.broadcast(torch.empty(4), "bf16", group=g), "give either the global rank or its group_"),
    "two sources": (lambda g: nc.broadcast(torch.empty(4), "bf16", 0, g, group_src=0), "give either the global rank"),
    "no such peer": (lambda g: nc.send(torch.empty(4), "bf16", group=g, group_dst=2), "no rank 2 in a group of 2"),
    "itself": (
        lambda g: nc.send(torch.empty(4), "bf16", group=g, group_dst=dist.get_rank(g)),
        "give another rank of the group",
    ),
    "tag": (lambda g: nc.send(torch.empty(4), "bf16", group=g, group_dst=1 - dist.get_rank(g), tag=-1), "tag must be"),
    "root": (lambda g: nc.broadcast(torch.empty(4), "bf16", group=g, group_src=2), "no rank 2 in a group of 2"),
    "double": (lambda g: nc.broadcast(torch.empty(4).double(), "bf16", 0, g), "got torch.float64; codecs take"),
    "two dtypes": (lambda g: nc.all_gather(torch.empty(4), torch.empty(2).bfloat16(), "as-is", g), "one dtype"),
}


def made_in_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(40)


def owing(group: dist.ProcessGroup, residuals: Residuals, unit: float = 1.0) -> None:
    residuals.unit = unit
    nc.all_reduce(torch.ones(1000), "int4/16+ef", group=group, residuals=residuals, algorithm="two_shot")


def wrong(group: dist.ProcessGroup, names: list[str]) -> list[str]:
    found = [error_of(lambda name=name: WRONG[name][0](group)) for name in names]
    x = torch.ones(3)
    nc.all_reduce(x, "as-is", group=group)
    assert float(x[0]) == 2
    return found


def test_wrong_arguments_are_refused_before_anything_is_sent(pool: Pool) -> None:
    names = list(WRONG)
    for messages in pool.run(2, wrong, names):
        for name, message in zip(names, messages, strict=True):
            assert WRONG[name][1] in message, name


def waiting(group: dist.ProcessGroup) -> None:
    x = torch.ones(100)
    work = nc.all_reduce(x, "int8/16", group=group, async_op=True)
    assert isinstance(work, Work)
    assert work.wait()
    assert work.is_completed()
    assert work.wait(timedelta(0))
    assert work.exception() is None
    assert nc.all_reduce(x, "int8/16", group=group) is None
    called = []
    work.then(called.append)
    assert called == [work]


def test_a_work_can_be_waited_for_twice(pool: Pool) -> None:
    pool.run(2, waiting)


def late(group: dist.ProcessGroup) -> bool:
    """Rank 0 starts at once, rank 1 when it is told to."""
    x = torch.ones(10)
    if dist.get_rank(group) == 1:
        dist.barrier(group=group)
        return nc.all_reduce(x, "int8/16", group=group, async_op=True).wait()
    work = nc.all_reduce(x, "int8/16", group=group, async_op=True)
    assert "wait again" in error_of(lambda: work.wait(timedelta(milliseconds=200)))
    assert not work.is_completed()
    dist.barrier(group=group)
    return work.wait()


def test_waiting_may_have_an_end_and_the_call_goes_on(pool: Pool) -> None:
    assert pool.run(2, late) == [True, True]


def several(group: dist.ProcessGroup) -> list[float]:
    """Calls of all kinds in flight at once, with torch's own traffic on the same group between them."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    works, results = [], []
    for i in range(20):
        x, y, own = torch.full((70 + i,), float(i)), torch.empty(2 * world), torch.full((9,), float(rank))
        works.append(nc.all_reduce(x, "int8/16", group=group, async_op=True))
        handle = dist.all_reduce(own, group=group, async_op=True)
        works.append(nc.all_gather(y, torch.full((2,), float(i + rank)), "bf16", group=group, async_op=True))
        peer = torch.empty(3)
        if rank < 2:
            theirs = dist.irecv(peer, group=group, group_src=1 - rank, tag=5)
            dist.isend(torch.full((3,), 5.0 + rank), group=group, group_dst=1 - rank, tag=5).wait()
            theirs.wait()
        handle.wait()
        results += [x, y, own]
    for work in works:
        work.wait()
    return [float(r.double().sum()) for r in results]


def test_calls_in_flight_keep_their_order_and_user_traffic_does_not_get_between(pool: Pool) -> None:
    for world in (2, 4):
        found = pool.run(world, several)
        expected = []
        for i in range(20):
            expected += [world * i * (70.0 + i), 2.0 * sum(i + r for r in range(world)), 9.0 * sum(range(world))]
        assert all(rank == pytest.approx(expected, rel=1e-2) for rank in found)
        assert len({tuple(rank) for rank in found}) == 1


def chained(group: dist.ProcessGroup, n: int) -> list[list[float]]:
    """Calls under way that use what the one before still writes: all values of each result, which should be one."""
    world, found = dist.get_world_size(group), []
    for _ in range(5):
        x, y, z, pair = torch.ones(n), torch.ones(n), torch.ones(n // 2, 2), [torch.ones(n), torch.ones(3)]
        gathered, scattered, told = torch.empty(world * n), torch.empty(n // world), torch.ones(n)
        options = {"group": group, "async_op": True}
        works = [
            nc.all_reduce(x, "fp32", algorithm="two_shot", **options),
            nc.all_reduce(x, "fp32", algorithm="two_shot", **options),
            nc.all_gather(gathered, x, "fp32", **options),
            nc.all_reduce(y, "fp32", algorithm="two_shot", **options),
            nc.reduce_scatter(scattered, list(y.split(n // world)), "fp32", **options),
            # what is not contiguous is gathered first, and that has to wait, too
            nc.all_reduce(z.t(), "fp32", algorithm="two_shot", **options),
            nc.all_reduce(z.t(), "fp32", algorithm="two_shot", **options),
            nc.all_reduce(pair, "fp32", algorithm="two_shot", **options),
            nc.all_reduce(pair, "fp32", algorithm="two_shot", **options),
            nc.all_reduce(told, "fp32", algorithm="two_shot", **options),
        ]
        nc.broadcast(told, "fp32", group_src=0, group=group)
        for work in works:
            work.wait()
        found.append([t.unique().tolist() for t in (x, gathered, scattered, z, torch.cat(pair), told)])
    return found


def test_a_call_sees_what_the_calls_before_it_wrote(pool: Pool) -> None:
    for rank in pool.run(2, chained, 200_000):
        assert rank == [[[4.0], [4.0], [4.0], [4.0], [4.0], [2.0]]] * 5


def under_inference(group: dist.ProcessGroup) -> list[float]:
    with torch.inference_mode():
        x, y = torch.ones(40), torch.ones(40, 2)
        nc.all_reduce(x, "int8/16", group=group)
        nc.all_reduce(y.t(), "fp32", group=group)
    return [float(x[0]), float(y[0, 0])]


def test_tensors_of_inference_mode_are_summed_in_it(pool: Pool) -> None:
    assert pool.run(2, under_inference) == [[2.0, 2.0]] * 2


def counted_messages(group: dist.ProcessGroup) -> tuple[int, int, int]:
    """Bytes that a message took on this side, with as many tags as messages; and the lines that are kept."""
    rank, sent = dist.get_rank(group), set()
    for tag in range(5):
        x = torch.ones(1000)
        make = isend if rank == 0 else irecv
        work = make(x, "int8/256", group=group, tag=tag, **{"group_dst" if rank == 0 else "group_src": 1 - rank})
        work.wait()
        sent.add(work.sent_bytes)
    (only,) = sent
    return only, nc.codec("int8/256").nbytes(1000), len(channel_of(group).lines)


def test_a_message_counts_its_bytes_and_leaves_nothing_behind(pool: Pool) -> None:
    (sender, size, left), (receiver, _, left_there) = pool.run(2, counted_messages)
    header = 32
    assert (sender, receiver) == (header + size, header)
    assert (left, left_there) == (0, 0)


def failing(group: dist.ProcessGroup) -> list[str]:
    """Calls whose ranks disagree: the error comes with wait(), and again."""
    spec = "int8/16" if dist.get_rank(group) else "int8/32"
    first = nc.all_reduce(torch.ones(64), spec, group=group, async_op=True)
    x = torch.ones(64)
    second = nc.all_reduce(x, "as-is", group=group, async_op=True)
    found = [error_of(first.wait).partition(":")[0] for _ in range(2)]
    assert type(first.exception()).__name__ == "DisagreementError"
    second.wait()
    assert float(x[0]) == dist.get_world_size(group)
    return found


def test_an_error_surfaces_in_wait_each_time(pool: Pool) -> None:
    assert pool.run(3, failing) == [["DisagreementError"] * 2] * 3


def in_two_groups(group: dist.ProcessGroup) -> tuple[float, float, float]:
    """Ranks 0 and 2 of 4 in one group, 1 and 3 in another, and all in the third, at the same time."""
    pairs, four = [dist.new_group([0, 2]), dist.new_group([1, 3])], dist.new_group([0, 1, 2, 3])
    rank = dist.get_rank()
    if rank >= 4:
        return ()
    mine, other = pairs[rank % 2], pairs[1 - rank % 2]
    x, y = torch.full((50,), 1.0 + rank), torch.full((50,), 1.0 + rank)
    works = [nc.all_reduce(x, "as-is", group=mine, async_op=True), nc.all_reduce(y, "as-is", group=four, async_op=True)]
    for work in works:
        work.wait()
    z = torch.full((10,), float(rank))
    nc.broadcast(z, "bf16", src=2 + rank % 2, group=mine)
    assert "no member" in error_of(lambda: nc.all_reduce(x, "as-is", group=other))
    return float(x[0]), float(y[0]), float(z[0])


def test_a_group_of_some_ranks_works_beside_the_whole(pool: Pool) -> None:
    assert pool.run(8, in_two_groups)[:4] == [(4.0, 10.0, 2.0), (6.0, 10.0, 3.0)] * 2


def threads_left(group: dist.ProcessGroup) -> int:
    """Groups made, used and destroyed."""
    before = threading.active_count()
    for _ in range(5):
        made = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            nc.all_reduce(torch.ones(3), "as-is", group=made)
            dist.destroy_process_group(made)
        del made
    gc.collect()
    soon(lambda: threading.active_count() <= before + 1)
    return threading.active_count() - before


def test_a_group_that_is_gone_takes_its_thread_along(pool: Pool) -> None:
    assert max(pool.run(8, threads_left)) <= 1


def crossed(group: dist.ProcessGroup) -> None:
    """New calls on two channels at once, on different ranks in different order: neither waits for the other's store."""
    other = dist.new_group(range(8))
    for made in (group, other):  # the first call of a group is collective
        nc.all_reduce(torch.ones(1), "fp32", group=made)
    x, y = torch.ones(10), torch.ones(10)
    for n in range(8):
        order = [(x[n:], group), (y[n:], other)]
        works = [nc.all_reduce(t, "fp32", group=g, async_op=True) for t, g in order[:: 1 - 2 * (dist.get_rank() % 2)]]
        for work in works:
            work.wait(timedelta(seconds=60))


def test_two_groups_may_be_used_in_different_orders(pool: Pool) -> None:
    pool.run(8, crossed)


def first_crossed(group: dist.ProcessGroup) -> list[float]:
    """First calls of two groups by two threads, on different ranks in different order."""
    pair, found = [dist.new_group(range(8)) for _ in range(2)], []

    def use(made: dist.ProcessGroup) -> None:
        x = torch.ones(10)
        nc.all_reduce(x, "fp32", group=made)
        found.append(float(x[0]))

    threads = [threading.Thread(target=use, args=(made,)) for made in pair[:: 1 - 2 * (dist.get_rank(group) % 2)]]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join(20)
    return found


def test_two_groups_may_be_made_ready_in_different_orders(pool: Pool) -> None:
    assert pool.run(8, first_crossed) == [[8.0, 8.0]] * 8


def ask_for_feedback(group: dist.ProcessGroup) -> list[str]:
    x, spec = torch.ones(8), "int8/32+ef"
    calls = (
        lambda: nc.reduce_scatter(torch.empty(4), x, spec, group=group),
        lambda: nc.all_gather(torch.empty(16), x, spec, group=group),
        lambda: nc.all_to_all([torch.empty(4), torch.empty(4)], [x[:4], x[4:]], spec, group=group),
        lambda: nc.broadcast(x, spec, group_src=0, group=group),
        lambda: nc.send(x, spec, group_dst=1, group=group),
        lambda: nc.recv(x, spec, group_src=0, group=group),
    )
    return [error_of(call) for call in calls]


def test_calls_that_keep_nothing_refuse_error_feedback(pool: Pool) -> None:
    for told in pool.run(2, ask_for_feedback):
        assert len(told) == 6
        assert all("leave out +ef" in text for text in told)


def pay_out(group: dist.ProcessGroup, spec: str, steps: int) -> float:
    """Gradients once, then zeros: what was owed must still arrive, though a scale for zeros alone would flush it."""
    rank, residuals = dist.get_rank(group), Residuals.zeros(300)
    wanted, got = torch.zeros(300), torch.zeros(300)
    for step in range(steps):
        x = torch.randn(300, generator=torch.Generator().manual_seed(rank)) if step == 0 else torch.zeros(300)
        if step == 0:
            wanted = sum(torch.randn(300, generator=torch.Generator().manual_seed(r)) for r in range(2))
        nc.all_reduce(x, spec, group=group, residuals=residuals, algorithm="two_shot")
        got += x
    return float((got - wanted).abs().max())


@pytest.mark.parametrize("spec", ["int2+ef", "e5m2+aps+ef", "dtree8+ef"])
def test_what_is_owed_is_paid_out_under_one_scale_for_a_tensor(pool: Pool, spec: str) -> None:
    once, often = pool.run(2, pay_out, spec, 1), pool.run(2, pay_out, spec, 80)
    assert all(error < 1e-3 * first for error, first in zip(often, once, strict=True)), (once, often)


def settling(group: dist.ProcessGroup, spec: str, algorithms: list[str]) -> tuple[list[Tensor], list[Tensor]]:
    """The result of each step and what is owed afterwards: values once, then zeros, by one algorithm after another."""
    rank, residuals, found = dist.get_rank(group), Residuals.zeros(300), []
    for step, algorithm in enumerate(algorithms):
        x = values(rank, 300) * (step == 0)
        nc.all_reduce(x, spec, dist.ReduceOp.AVG, group, residuals=residuals, algorithm=algorithm, step=step)
        found.append(x)
    return found, [residuals.first, residuals.second]


@pytest.mark.parametrize("spec", ["int4/16+ef", "int4/16+sr+ef", "dtree8+ef", "e5m2+aps+ef"])
def test_one_shot_pays_what_two_shot_owes_with_the_bits_of_a_simulated_world(pool: Pool, spec: str) -> None:
    algorithms = ["two_shot"] + ["one_shot"] * 12 + ["two_shot", "one_shot"]
    ranks = pool.run(3, settling, spec, algorithms)
    simulated = World(3, "two_shot", spec)
    for step, algorithm in enumerate(algorithms):
        simulated.algorithm = algorithm
        expected = simulated.all_reduce([values(rank, 300) * (step == 0) for rank in range(3)], "avg", step=step)
        for rank in range(3):
            assert torch.equal(ranks[rank][0][step], expected[rank]), f"step {step}, {algorithm}: rank {rank}"
    for results, (_, second) in ranks:
        assert not second.any()
        mean = sum(values(rank, 300) for rank in range(3)) / 3
        assert float((sum(results) - mean).abs().max()) < 1e-3 * float((results[0] - mean).abs().max())


def paid_at_once(group: dist.ProcessGroup, spec: str) -> float:
    """How much of a large debt of the sum one call pays."""
    residuals, x = Residuals.zeros(300), torch.full((300,), 1e-3)
    residuals.second.fill_(100.0)
    nc.all_reduce(x, spec, dist.ReduceOp.AVG, group, residuals=residuals, algorithm="one_shot")
    return float(x[0])


@pytest.mark.parametrize("spec", ["int8/16+ef", "int8+ef", "e5m2+aps+ef"])
def test_scales_are_found_with_what_the_sum_owes(pool: Pool, spec: str) -> None:
    assert min(pool.run(3, paid_at_once, spec)) > 90


def paid_alone(group: dist.ProcessGroup) -> tuple[list[float], list[float], list[float]]:
    x = torch.tensor([1.0, torch.inf, 2.0])
    residuals = Residuals(torch.tensor([0.5, 0.25, 0.0]), torch.tensor([2.0, 1.0, 0.5]), unit=4.0)
    options = {"op": dist.ReduceOp.AVG, "group": group, "residuals": residuals, "algorithm": "two_shot"}
    nc.all_reduce(x, "int4/16+ef", **options)
    return x.tolist(), residuals.first.tolist(), residuals.second.tolist()


def test_a_world_of_one_pays_what_it_owes(pool: Pool) -> None:
    (found,) = pool.run(1, paid_alone)
    assert found == ([11.0, torch.inf, 4.0], [0.0, 0.25, 0.0], [0.0, 1.0, 0.0])
