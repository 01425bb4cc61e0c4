"""What check_host.py compares: calls of codecs on a GPU, several times each, with what the reference computes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from laws.inputs import hard_values, normal, with_specials
from laws.wires import hard_wires
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.kernels import CastPlan, Feedback, Finish, Noise, ops, reference
from narrowcast.kernels.triton import start

SIZES = (20_011, 1, 17, 65_536)
NOISES = (Noise(), Noise(5, 6, 16), Noise(2**33 + 1, 7, 128), Noise(2**64 - 1, 2**63 + 11, 2**35 + 48), Noise(1))
"""Of 32 bits and of more, and such as are negative as signed numbers."""
PER, WORLD, LARGE = 4096, 4, 2**24 + 3


class Found:
    """What differs."""

    def __init__(self, who: str) -> None:
        self.who, self.faults, self.compared = who, list[str](), 0

    def same(self, got: Tensor, wanted: Tensor, what: str) -> None:
        self.compared += 1
        got, wanted = bits(got.detach().cpu().flatten()), bits(wanted.cpu().flatten())
        if got.shape != wanted.shape:
            self.faults.append(f"{self.who} {what}: {len(got)} not {len(wanted)} of them")
        elif not torch.equal(got, wanted):
            where = (got != wanted).nonzero().flatten()
            at = int(where[0])
            self.faults.append(
                f"{self.who} {what}: {len(where)} of {len(got)} differ, first at {at}: {got[at]} not {wanted[at]}, "
                f"last at {int(where[-1])}"
            )

    def true(self, is_so: bool, what: str) -> None:
        self.compared += 1
        if not is_so:
            self.faults.append(f"{self.who} {what}")


def bits(x: Tensor) -> Tensor:
    """Patterns, with one for all NaN."""
    if x.dtype is torch.uint8:
        return x
    return torch.where(x.isnan(), -1, x.view({2: torch.int16, 4: torch.int32}[x.element_size()]))


def as_stored(plan: Any, wire: Tensor) -> Tensor:
    """A NaN has no one pattern in a plain cast."""
    return wire.clone().view(plan.dtype) if isinstance(plan, CastPlan) else wire


def put(x: Tensor, shift: int = 0) -> Tensor:
    """On the GPU, so many elements after a multiple of 16 bytes; new memory each time."""
    room = torch.empty(x.numel() + 32, dtype=x.dtype, device="cuda")[shift:][: x.numel()]
    return room.copy_(x.flatten()).view(x.shape)


def poison(nbytes: int, shift: int = 0) -> Tensor:
    return put(torch.full((nbytes,), 0xA5, dtype=torch.uint8), shift)


@cache
def values(block: int, n: int, seed: int) -> Tensor:
    if seed == 0:
        return with_specials(hard_values(block, n), 900) if n > 1000 else hard_values(block, n)
    return normal(n, seed)


def wires_of(codec: Codec, n: int, world: int) -> Tensor:
    rows = ops.aligned_rows(world, codec.nbytes(n))
    for rank, row in enumerate(rows):
        plan = codec.plan_for(torch.float32)
        reference.kernels(plan).encode(plan, values(codec.block or 256, n, rank % 4), row, Noise(rank))
    return rows


def rows_on_gpu(rows: Tensor, between: int = -1) -> Tensor:
    size = rows.shape[1]
    stride = size + (-size % 16 if between < 0 else between)
    return torch.empty(len(rows), stride, dtype=torch.uint8, device="cuda")[:, :size].copy_(rows)


def layouts() -> Iterator[tuple[int, int]]:
    """Sizes, and where memory begins: all of the first at several places."""
    for n in SIZES:
        for shift in (0, 1, 4) if n == SIZES[0] else (0,):
            yield n, shift


def check_encode(found: Found, codec: Codec) -> None:
    plan = codec.plan_for(torch.float32)
    for n, shift in layouts():
        for turn, noise in enumerate(NOISES if n > 1 and shift == 0 else NOISES[1:4]):
            x, what = values(codec.block or 256, n, turn), f"encode {n} values, shift {shift}, call {turn}, {noise}"
            wanted, got = torch.empty(codec.nbytes(n), dtype=torch.uint8), poison(codec.nbytes(n), shift)
            reference.kernels(plan).encode(plan, x, wanted, noise)
            codec.encode(put(x, shift), seed=noise.seed, stream=noise.stream, offset=noise.offset, out=got)
            found.same(as_stored(plan, got), as_stored(plan, wanted), what)
    check_residuals(found, codec)
    check_that_it_was_prepared(found, codec)


def check_residuals(found: Found, codec: Codec) -> None:
    plan, n = codec.plan_for(torch.float32), SIZES[0]
    for turn, noise in enumerate(NOISES[1:4]):
        left = 0.01 * normal(n, 9 + turn)
        kept, got = put(left), poison(codec.nbytes(n))
        wanted = torch.empty(codec.nbytes(n), dtype=torch.uint8)
        reference.kernels(plan).encode(plan, values(256, n, 1), wanted, noise, None, Feedback(left, 1024.0))
        codec.encode_with(put(values(256, n, 1)), noise, None, Feedback(kept, 1024.0), got)
        found.same(as_stored(plan, got), as_stored(plan, wanted), f"wire with residual, call {turn}")
        found.same(kept, left, f"residual, call {turn}")


def check_that_it_was_prepared(found: Found, codec: Codec) -> None:
    """Else the comparisons above would show nothing of what they are for."""
    calls = codec.plan_for(torch.float32).__dict__["_triton_calls"].values()
    ready = [call.ready if hasattr(call, "ready") else call.start.compiled is not None for call in calls]
    found.true(all(ready) == start.FAST, f"{sum(ready)} of {len(ready)} calls are prepared, FAST is {start.FAST}")
    direct = [one._launch is not None for call in calls if (one := getattr(call, "last", None)) and one.compiled]
    found.true(all(direct), f"{sum(direct)} of {len(direct)} kernels are launched without Triton")


def check_decode(found: Found, codec: Codec) -> None:
    plan = codec.plan_for(torch.float32)
    for n, shift in layouts():
        rows = wires_of(codec, n, 3)
        for turn, add in enumerate((False, False, True, True) if shift == 0 else (False, False)):
            wanted = normal(n, 20 + turn)
            got = put(wanted, shift)
            reference.kernels(plan).decode(plan, rows[turn % 3], n, wanted, add)
            codec.decode(put(rows[turn % 3], shift), n, out=got, accumulate=add)
            found.same(got, wanted, f"decode {n} values, shift {shift}, call {turn}{', adding' if add else ''}")
    check_that_it_was_prepared(found, codec)


def check_sum(found: Found, codec: Codec) -> None:
    plan = codec.plan_for(torch.float32)
    none, some = [Finish(), Finish()], [Finish(3.0, 0.7), Finish(5.0, 0.1)]
    for n, world, between, finishes in (
        (SIZES[0], 4, -1, none + some), (SIZES[3], 8, -1, none), (SIZES[0], 3, 1, some), (1, 2, -1, none),
    ):  # fmt: skip
        rows = wires_of(codec, n, world)
        for turn, finish in enumerate(finishes):
            wanted, got = torch.empty(n), put(torch.full((n,), 7.0))
            reference.kernels(plan).sum_wires(plan, rows.roll(turn, 0), n, wanted, finish)
            ops.sum_wires(plan, rows_on_gpu(rows.roll(turn, 0), between), n, got, finish)
            found.same(got, wanted, f"sum of {world} x {n}, {between} between, call {turn}, {finish}")
    if isinstance(plan, CastPlan):
        return
    full = 16_384 // max(plan.block, 1) * max(plan.block, 1) or plan.block
    for what, rows in hard_wires(plan, full, 8):
        wanted, got = torch.empty(full), put(torch.full((full,), 7.0))
        reference.kernels(plan).sum_wires(plan, rows, full, wanted)
        ops.sum_wires(plan, rows_on_gpu(rows), full, got)
        found.same(got, wanted, f"sum of 8 x {full}, {what}")


def check_reduce(found: Found, codec: Codec) -> None:
    plan = codec.plan_for(torch.float32)
    for n, world in ((SIZES[0], 4), (SIZES[3], 8)):
        rows = wires_of(codec, n, world)
        for turn, noise in enumerate(NOISES[1:4]):
            owing, finish = n == SIZES[0], Finish(3.0, 0.7)
            left, wanted, values_wanted = 0.01 * normal(n, turn), torch.empty(codec.nbytes(n)).byte(), torch.empty(n)
            kept, got, out = put(left), poison(codec.nbytes(n)), put(torch.full((n,), 7.0))
            given = rows.roll(turn, 0)
            feedbacks = (Feedback(left, 3.0), Feedback(kept, 3.0)) if owing else (None, None)
            reference.kernels(plan).reduce(plan, given, n, wanted, noise, None, feedbacks[0], finish, values_wanted)
            codec.reduce_with(rows_on_gpu(given), n, noise, None, feedbacks[1], finish, got, out)
            what = f"reduce of {world} x {n}, call {turn}"
            found.same(as_stored(plan, got), as_stored(plan, wanted), what)
            found.same(out, values_wanted, f"values of {what}")
            found.same(kept, left, f"residual of {what}")


def check_rows(found: Found, codec: Codec) -> None:
    """Every row as the reference has it alone, and nothing written between rows."""
    plan = codec.plan_for(torch.float32)
    for per, between in ((PER, -1), (1008, 3), (1001, -1))[: 2 if codec.stochastic else 3]:
        size = codec.nbytes(per)
        stride = size + (-size % 16 if between < 0 else between)
        for turn, noise in enumerate(NOISES[1:4]):
            pitch = per + 128 * turn
            n = (WORLD - 1) * pitch + per
            x, left = values(codec.block or 256, n, turn), 0.01 * normal(n, turn)
            room, wanted = poison(WORLD * stride).view(WORLD, stride), poison(WORLD * stride).view(WORLD, stride).cpu()
            feedbacks = (Feedback(left), Feedback(put(left))) if per == PER else (None, None)
            reference.kernels(plan).encode_rows(plan, x, per, wanted[:, :size], noise, feedbacks[0], pitch)
            ops.encode_rows(plan, put(x), per, room[:, :size], noise, feedbacks[1], pitch)
            what = f"{WORLD} rows of {per}, {pitch} apart, {between} between, call {turn}, {noise}"
            for row in range(WORLD):
                found.same(
                    as_stored(plan, room[row, :size]), as_stored(plan, wanted[row, :size]), f"row {row} of {what}"
                )
            found.same(room[:, size:], wanted[:, size:], f"between {what}")
            if feedbacks[1] is not None:
                found.same(feedbacks[1].residual, left, f"residual of {what}")
            out, values_wanted = put(torch.full((n,), 7.0)), torch.full((n,), 7.0)
            reference.kernels(plan).decode_rows(plan, wanted[:, :size], per, values_wanted, pitch)
            ops.decode_rows(plan, rows_on_gpu(wanted[:, :size], between), per, out, pitch)
            found.same(out, values_wanted, f"values of {what}")


def check_large(found: Found, codec: Codec) -> None:
    """The beginning and the end of many values by the reference; all of them the same when called again."""
    plan, n, noise = codec.plan_for(torch.float32), LARGE, Noise(2**63 + 5, 3)
    x = torch.randn(n, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    wires = [codec.encode(x, seed=noise.seed, stream=noise.stream, out=poison(codec.nbytes(n))) for _ in range(3)]
    for turn, wire in enumerate(wires[1:]):
        found.true(torch.equal(wire, wires[0]), f"{n} values, call {turn + 1} differs from the first")
    block, layout, bytes_each = codec.block, plan.layout(n), plan.store.value
    for first in (0, n // block // 2 * block, (n - 3 * block) // block * block):
        part = x[first : first + 4 * block].cpu()
        wanted = torch.empty(codec.nbytes(part.numel()), dtype=torch.uint8)
        reference.kernels(plan).encode(plan, part, wanted, noise.after(first))
        codes, scales, begin = plan.code_bytes(part.numel()), plan.n_scales(part.numel()), first * plan.bits // 8
        found.same(wires[0][begin : begin + codes], wanted[:codes], f"codes of {n} values from {first} on")
        begin, size = layout.scales + first // block * bytes_each, scales * bytes_each
        at = plan.layout(part.numel()).scales
        found.same(wires[0][begin : begin + size], wanted[at : at + size], f"scales of {n} values from {first} on")


def check_surroundings(found: Found, codec: Codec) -> None:
    """Another stream, another thread, a graph, a profiler's hook; another device where there is one."""
    plan, n = codec.plan_for(torch.float32), SIZES[0]
    wanted = [torch.empty(codec.nbytes(n), dtype=torch.uint8) for _ in range(2)]
    for turn in range(2):
        reference.kernels(plan).encode(plan, values(256, n, turn + 1), wanted[turn])
    x, got = put(values(256, n, 1)), poison(codec.nbytes(n))
    codec.encode(x, out=got)
    with torch.cuda.stream(torch.cuda.Stream()):
        aside = codec.encode(put(values(256, n, 2)))
        torch.cuda.current_stream().synchronize()
    found.same(aside, wanted[1], "on another stream")
    worker = threading.Thread(target=lambda: (got.fill_(1), codec.encode(x, out=got), torch.cuda.synchronize()))
    worker.start()
    worker.join()
    found.same(got, wanted[0], "in another thread")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codec.encode(x, out=got)
    x.copy_(values(256, n, 2))
    graph.replay()
    found.same(got, wanted[1], "in a graph")
    check_hook(found, codec, x, got, wanted[1])
    if torch.cuda.device_count() > 1:
        found.same(codec.encode(x.to("cuda:1")), wanted[1], "on a device that is not the current one")


def check_hook(found: Found, codec: Codec, x: Tensor, got: Tensor, wanted: Tensor) -> None:
    heard: list[object] = []
    chain = triton.knobs.runtime.launch_enter_hook
    if not hasattr(chain, "add"):
        return
    chain.add(heard.append)
    codec.encode(x, out=got.fill_(1))
    chain.remove(heard.append)
    found.true(len(heard) == 1, f"a hook heard of {len(heard)} launches, not 1")
    found.same(got, wanted, "with a hook")


def check_refusals(found: Found, codec: Codec) -> None:
    """What is refused on the CPU is refused here, and what must be copied is copied."""
    n, size = 512, codec.nbytes(512)
    x, wire = torch.randn(n, device="cuda"), torch.zeros(size, dtype=torch.uint8, device="cuda")
    out = torch.zeros(n, device="cuda")
    bad: dict[str, Callable[[], object]] = {
        "out that is not contiguous": lambda: codec.encode(x, out=torch.zeros(2 * size, device="cuda").byte()[::2]),
        "out that is too small": lambda: codec.encode(x, out=wire[:-1]),
        "out on the host": lambda: codec.encode(x, out=wire.cpu()),
        "out upon x": lambda: codec.encode(x, out=x.view(torch.uint8)[:size]),
        "float64": lambda: codec.encode(x.double()),
        "a residual on the host": lambda: codec.encode(x, residual=torch.zeros(n)),
        "a residual upon x": lambda: codec.encode(x, residual=x),
        "a negative seed": lambda: codec.encode(x, seed=-1),
        "an odd offset": lambda: codec.encode(x, offset=3),
        "a wire that is too short": lambda: codec.decode(wire[:-1], n, out=out),
        "values that are too few": lambda: codec.decode(wire, n, out=out[:-1]),
        "values that require grad": lambda: codec.decode(wire, n, out=out.clone().requires_grad_()),
        "values upon the wire": lambda: codec.decode(x.view(torch.uint8)[:size], n, out=x),
        "decoded upon a wire": lambda: codec.reduce(x.view(torch.uint8)[:size].view(1, size), n, decoded=x),
    }
    for what, call in bad.items():
        try:
            call()
        except (ValueError, TypeError, RuntimeError):
            found.compared += 1
        else:
            found.faults.append(f"{found.who} {what} is not refused")
    wide = torch.randn(n, 2, device="cuda")
    found.same(codec.encode(wide[:, 0]), codec.encode(wide[:, 0].cpu()), "values that are not contiguous")
    codec.decode(wire, n, out=wide[:, 1])
    found.same(wide[:, 1].contiguous(), codec.decode(wire.cpu(), n), "decoded to where values are not contiguous")


def check_the_checks(found: Found) -> None:
    """A comparison that cannot fail shows nothing."""
    trial, wire = Found("trial"), torch.arange(100).byte()
    broken = wire.clone()
    broken[77] ^= 1
    trial.same(broken, wire, "one bit")
    trial.same(torch.tensor([0.0]), torch.tensor([-0.0]), "the sign of zero")
    trial.same(wire[:-1], wire, "a byte less")
    trial.true(False, "a lie")
    trial.same(torch.tensor([float("nan")]), torch.tensor([-float("nan")]), "NaN is NaN")
    found.true(len(trial.faults) == 4 and "first at 77: 76 not 77" in trial.faults[0], f"checks: {trial.faults}")
