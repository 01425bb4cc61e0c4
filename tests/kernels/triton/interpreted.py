"""Every Triton kernel on CPU tensors, in Triton's interpreter, against the reference. A process of its own runs this:

    TRITON_INTERPRET=1 python interpreted.py GROUP PART PARTS

since the variable must be set before Triton is imported. Codecs are dealt out to so many parts, of which one is run.
Prints what differs; ends with 1 where anything does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from kernels.triton import products
from laws.inputs import hard_values, near_ties, normal, unaligned, with_specials
from laws.wires import hard_wires
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import all_specs
from narrowcast.formats import all_formats
from narrowcast.kernels import CastPlan, Feedback, Finish, Noise, Plan, TransformPlan, ops, reference, triton_loader
from narrowcast.kernels.triton import launch, start

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (4099, 1001, 300, 17, 4096, 1)
FUSED = (
    "int8/256",
    "int4/128+sr+ef",
    "e4m3fn/256",
    "dtree8",
    "nvfp4+sr",
    "mxfp4",
    "onebit/64",
    "sign/64",
    "uint3/64+sr",
)
FUSED += ("uint8", "qsgd4/512+l2", "int3/64", "int6/48", "e5m2+aps", "e4m3@1+cpd", "dynamic8/256+sr")
FUSED += ("int8/128+sbf16", "posit8.1/256", "dynamic8/256")
FUSED += ("int2/512+top32+ef", "fp32/256+top9", "bf16/64+top40", "int8/128+top16+sr", "int4/128+spike2", "mxfp4+spike5")
FUSED += ("int4/128+rot+sr+ef", "nf4/64+rot", "int3/64+rot")
SPIKES = ("int6/48+spike3", "int8/16+spike4", "int4/128+spike2", "int8/4096+spike2", "int4/512+spike4")
WIDE = ("int8/8192", "sign/8192", "onebit/5008", "qsgd4/8192+l2", "uint8/5008", "int4/6000+sr")
BY_WORDS = ("int4/128", "mxfp4", "nvfp4", "int3/64", "int6/64", "onebit/64", "sign/64", "nf4/64", "qsgd4/512", "int3")
BY_WORDS += ("uint4/64", "e2m3fn/64", "e3m0", "int4/8192", "int6/64+sr", "int2/64", "int8/256", "uint8/64+sr")
BY_WORDS += (
    "e2m1fn/64+se8m0",
    "e2m1fn/16+se8m0",
    "e2m1fn/8192+se8m0",
    "e3m0fn/64+se8m0",
    "e1m2fn/32+se8m0",
    "fixed4.4/64",
)
faults: list[str] = []


def bits(x: Tensor) -> Tensor:
    if x.dtype is torch.uint8:
        return x
    pattern = x.view({2: torch.int16, 4: torch.int32}[x.element_size()])
    return torch.where(x.isnan(), -1, pattern)


def same(got: Tensor, wanted: Tensor, what: str) -> None:
    got, wanted = bits(got), bits(wanted)
    if not torch.equal(got, wanted):
        where = (got != wanted).nonzero().flatten()
        at = int(where[0])
        faults.append(f"{what}: {len(where)} of {len(got)} differ, first at {at}: {got[at]} not {wanted[at]}")


oracle, fast = reference.kernels, triton_loader.kernels


def poisoned(plan: Plan | CastPlan, n: int) -> Tensor:
    return torch.full((plan.layout(n).nbytes,), 0xA5, dtype=torch.uint8)


def few(plan: Plan | CastPlan | TransformPlan, n: int) -> int:
    """At most two blocks and a half where a program takes one: each is slow in the interpreter."""
    return min(n, 5 * plan.block // 2 + 3) if isinstance(plan, TransformPlan) else n


def inputs(plan: Plan | CastPlan, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Hard values, the last third of the blocks with NaN and Inf here and there."""
    block = getattr(plan, "block", 0)
    if dtype != torch.float32:
        return (normal(n, 7) * torch.exp(2 * normal(n, 8))).to(dtype)
    x = hard_values(block, n)
    return torch.cat([x[: 2 * n // 3], with_specials(x[2 * n // 3 :], every=90)]) if n > 1000 else x


def check_encode(plan: Plan | CastPlan, x: Tensor, noise: Noise, what: str) -> Tensor:
    wanted, got = poisoned(plan, x.numel()), poisoned(plan, x.numel())
    oracle(plan).encode(plan, x, wanted, noise)
    fast(plan).encode(plan, x, got, noise)
    same(got, wanted, f"encode {what}")
    return wanted


def check_decode(plan: Plan | CastPlan, wire: Tensor, n: int, dtype: torch.dtype, add: bool, what: str) -> None:
    wanted = normal(n, 4).to(dtype)
    got = wanted.clone()
    oracle(plan).decode(plan, wire, n, wanted, add)
    fast(plan).decode(plan, wire, n, got, add)
    same(got, wanted, f"decode {what} to {dtype}{' adding' if add else ''}")


def check_feedback(plan: Plan | CastPlan, x: Tensor, unit: float, what: str) -> None:
    n = x.numel()
    wanted, got, left = poisoned(plan, n), poisoned(plan, n), 0.01 * normal(n, 9)
    kept, decay = left.clone(), 0.95 if n % 2 else 1.0
    oracle(plan).encode(plan, x, wanted, Noise(7, 8, 128), None, Feedback(left, unit, decay))
    fast(plan).encode(plan, x, got, Noise(7, 8, 128), None, Feedback(kept, unit, decay))
    same(got, wanted, f"wire of {what} with residual, unit {unit}")
    same(kept, left, f"residual of {what}, unit {unit}")


def check_reduce(plan: Plan | CastPlan, n: int, world: int, number: int, what: str) -> None:
    block = getattr(plan, "block", 0)
    rows = ops.aligned_rows(world, plan.layout(n).nbytes)
    for rank, row in enumerate(rows):
        oracle(plan).encode(plan, hard_values(block, n) if rank == 1 else normal(n, rank), row, Noise(rank))
    unit, divide, multiply = ((1.0, 1.0, 1.0), (1024.0, 3.0, 1.0), (3.0, 1.0, 0.3))[number % 3]
    dtype, keeps = DTYPES[number % 3], number % 2 == 0
    found = []
    for kernels in (oracle(plan), fast(plan)):
        wire, out = poisoned(plan, n), torch.zeros(n, dtype=dtype)
        feedback = Feedback(0.01 * normal(n, 9), unit, (1.0, 0.9)[number % 4 // 2]) if keeps else None
        kernels.reduce(plan, rows, n, wire, Noise(1, 2), None, feedback, Finish(divide, multiply), out)
        found.append((wire, out, feedback.residual if feedback is not None else torch.zeros(1)))
    for wanted, got, name in zip(*found, ("wire", "values", "residual"), strict=True):
        same(got, wanted, f"{name} of reduce {what}")


def codecs(specs: Sequence[str]) -> None:
    """Encode and decode of every listed codec, at sizes, types, offsets and addresses by turns."""
    for number, spec in enumerate(specs):
        plan = nc.codec(spec).plan_for(torch.float32)
        if triton_loader.why_not(plan) is not None:
            continue
        n = few(plan, SIZES[number % len(SIZES)])
        noise = Noise(2**64 - 1, 2**63 + 1, 16 * number) if number % 2 else Noise(5, 6)
        wire = check_encode(plan, inputs(plan, n), noise, f"{spec}, {n} values")
        dtype = DTYPES[number % 3]
        check_encode(plan, inputs(plan, 300, dtype), Noise(3, 0, 2**35), f"{spec}, 300 of {dtype}")
        if not isinstance(plan, CastPlan):
            codes = wire[: plan.code_bytes(n)]
            codes.copy_(torch.randint(0, 256, codes.shape, generator=torch.Generator().manual_seed(4)))
        check_decode(plan, wire, n, dtype, number % 2 == 0, spec)
        if isinstance(plan, TransformPlan):
            # a side plane comes from a peer
            wire[plan.layout(n).side + number % 7 :: 7] ^= 1 << number % 8
            check_decode(plan, wire, n, dtype, number % 2 == 0, f"{spec}, wrong bytes")


def fused(specs: Sequence[str]) -> None:
    for number, spec in enumerate(specs):
        plan = nc.codec(spec).plan
        check_feedback(plan, inputs(plan, 1001), (1.0, 1024.0, 3.0)[number % 3], spec)
        check_reduce(plan, (1001, 2048)[number % 2], 3 if number % 4 else 5, number, spec)


def spikes(specs: Sequence[str]) -> None:
    """Where the largest are taken while places lie over the last bits of magnitudes, and where they are not: more of
    them, larger places, tiles that are not full, blocks that are no power of two.
    """
    for number, spec in enumerate(specs):
        plan, n = nc.codec(spec).plan, 4096 + number
        check_encode(plan, near_ties(n), Noise(), f"{spec} of near ties")
        check_feedback(plan, near_ties(n)[:1050], 1.0, f"{spec} of near ties")
        # in some blocks more than spikes, in any order
        wire = check_encode(plan, with_specials(normal(n), 13), Noise(), f"{spec}, NaN and Inf")
        side = wire[plan.layout(n).side :]
        side[::5] ^= 1 << number
        side[100:200] = 0  # the same place again and again
        if plan.block == 48:
            side[9 * 30 + 6 :][:3] = torch.tensor([0x40, 0, 3])  # 0, 1 and 48
        check_decode(plan, wire, n, torch.float32, number % 2 == 0, f"{spec}, wrong bytes")


def check_wires(plan: Plan, rows: Tensor, n: int, what: str) -> None:
    wanted, got = poisoned(plan, n), poisoned(plan, n)
    oracle(plan).reduce(plan, rows, n, wanted)
    fast(plan).reduce(plan, rows, n, got)
    same(got, wanted, f"reduce of {what}")


def check_sum(plan: Plan | CastPlan, rows: Tensor, n: int, finish: Finish, what: str) -> None:
    wanted, got = torch.zeros(n), torch.zeros(n)
    oracle(plan).sum_wires(plan, rows, n, wanted, finish)
    fast(plan).sum_wires(plan, rows, n, got, finish)
    same(got, wanted, f"sum of {what}, {finish}")


def sums(specs: Sequence[str]) -> None:
    """Sums of wires of every listed codec: hard values, and wires that no encoder makes."""
    for number, spec in enumerate(specs):
        plan = nc.codec(spec).plan_for(torch.float32)
        if triton_loader.why_not(plan) is not None:
            continue
        n, world = few(plan, (4099, 1001, 300, 17, 1)[number % 5]), (2, 3, 17)[number % 3]
        world = min(world, 3) if isinstance(plan, TransformPlan) else world
        rows = ops.aligned_rows(world, plan.layout(n).nbytes)
        for rank, row in enumerate(rows):
            oracle(plan).encode(plan, inputs(plan, n) if rank == 1 else normal(n, rank % 4), row, Noise(rank))
        check_sum(plan, rows, n, (Finish(), Finish(3.0), Finish(1.0, 0.3))[number % 3], f"{spec}, {world} x {n}")
        if spec in BY_WORDS + FUSED and isinstance(plan, Plan):
            full = 4096 if not plan.block else 4096 // plan.block * plan.block or plan.block
            for what, hard in hard_wires(plan, full, 3):
                check_sum(plan, hard, full, Finish(), f"{spec}, {what}")


def check_rows(plan: Plan | CastPlan, per: int, world: int, number: int, what: str) -> None:
    """Every row as it is alone: bytes, residuals, and nothing written between rows."""
    dtype, noise, nbytes = DTYPES[number % 3], Noise(2**63 + 5, 6, 16 * (number % 9)), plan.layout(per).nbytes
    pitch = per + (0, 16, 256)[number % 3]
    x = torch.cat([inputs(plan, pitch, dtype).roll(row) for row in range(world)])[: (world - 1) * pitch + per]
    between, left = (0, 3, -nbytes % 16)[number % 3], 0.01 * normal(x.numel(), 9)
    found = []
    for kernels in (oracle(plan), fast(plan)):
        room = torch.full((world, nbytes + between), 0xA5, dtype=torch.uint8)
        feedback = Feedback(left.clone(), (1.0, 1024.0, 3.0)[number % 3]) if number % 2 else None
        kernels.encode_rows(plan, x, per, room[:, :nbytes], noise, feedback, pitch)
        out = torch.full_like(x, 7.0)
        kernels.decode_rows(plan, found[0][0][:, :nbytes] if found else room[:, :nbytes], per, out, pitch)
        found.append((room, out, feedback.residual if feedback is not None else left))
    for wanted, got, name in zip(*found, ("wires", "values", "residual"), strict=True):
        same(got.flatten(), wanted.flatten(), f"{name} of {world} rows of {per}, {what} from {dtype}")


def rows(specs: Sequence[str]) -> None:
    for number, spec in enumerate(specs):
        plan = nc.codec(spec).plan_for(torch.float32)
        if triton_loader.why_not(plan) is None:
            check_rows(plan, (304, 1024, 16, 2064)[number % 4], (2, 3)[number % 2], number, spec)
    for number, per in enumerate((1, 17, 1001)):  # parts that no cut makes
        check_rows(nc.codec("int4/128").plan, per, 3, number, "int4/128")


def by_words(specs: Sequence[str]) -> None:
    """Full tiles of narrow codes are summed and packed word by word, the rest as other tiles are."""
    for number, spec in enumerate(specs):
        plan, n = nc.codec(spec).plan, 8192 + 100 * (number % 2)
        check_encode(plan, inputs(plan, n), Noise(5, 6), f"{spec} by words")
        check_reduce(plan, n, (3, 2, 5)[number % 3], number, f"{spec} by words")
        for what, rows in hard_wires(plan, 8192, 3):
            check_wires(plan, rows, 8192, f"{spec}, {what}")


def casts() -> None:
    for stored in DTYPES:
        for dtype in DTYPES:
            plan = CastPlan(stored)
            wire = check_encode(plan, inputs(plan, 1001, dtype), Noise(), f"{stored} from {dtype}")
            check_decode(plan, wire, 1001, dtype, stored is dtype, f"{stored}")
        check_feedback(plan, inputs(plan, 1001), 1024.0, str(stored))
        check_reduce(plan, 1001, 3, 1, str(stored))


def wide(specs: Sequence[str]) -> None:
    """Blocks larger than a tile, scales that are given, and addresses that are multiples of nothing."""
    for number, spec in enumerate(specs):
        plan = nc.codec(spec).plan
        wire = check_encode(plan, inputs(plan, 12_305), Noise(5, 6, 48), spec)
        check_decode(plan, wire, 12_305, torch.float32, False, spec)
        check_feedback(plan, inputs(plan, 12_305), 3.0, spec)
        if number % 2 == 0:
            check_reduce(plan, 12_305, 2, number, spec)
    for spec in ("e5m2+aps", "int8", "dtree8"):
        plan, x, given = nc.codec(spec).plan, inputs(nc.codec(spec).plan, 1001), torch.tensor([0.3])
        for some in (x, torch.nan_to_num(x, 1.0, 2.0, 3.0)):
            wanted, got = poisoned(plan, 1001), poisoned(plan, 1001)
            reference.encode(plan, some, wanted, scale=given)
            fast(plan).encode(plan, some, got, scale=given)
            same(got, wanted, f"{spec} with a given scale")
    for spec in ("int8/256", "int4/128", "mxfp4", "nvfp4", "uint8/512", "int3/64", "int8/128+sbf16"):
        plan, x = nc.codec(spec).plan, normal(1001)
        wanted, got = poisoned(plan, 1001), torch.empty(plan.layout(1001).nbytes + 1, dtype=torch.uint8)[1:]
        reference.encode(plan, x, wanted)
        fast(plan).encode(plan, unaligned(x), got)
        same(got.clone(), wanted, f"unaligned {spec}")
        check_decode(plan, got, 1001, torch.float32, False, f"unaligned {spec}")


def rounding() -> None:
    x = with_specials(hard_values(64, 2500), 400)
    for number, fmt in enumerate(all_formats()):
        if triton_loader.why_not_round(fmt, "nearest", "ieee") is not None:
            continue
        for mode in ("nearest", "stochastic"):
            for overflow in fmt.overflows:
                y = x.to(DTYPES[number % 3]) if mode == "nearest" and overflow == fmt.overflows[0] else x
                wanted, got = torch.empty_like(y), torch.empty_like(y)
                reference.round_to(y, fmt, mode, overflow, "ieee", 7, wanted)
                launch.round_to(y, fmt, mode, overflow, "ieee", 7, got)
                same(got, wanted, f"round_to {fmt} {mode} {overflow} {y.dtype}")


def cpd() -> None:
    """Every corner: carries out of the format, lost sticky bits, float32 subnormals, ties without mantissa bits."""
    x = torch.cat([with_specials(hard_values(64, 2500), 400), 2.0 ** torch.arange(-149, 128), torch.tensor([3.39e38])])
    for number, name in enumerate(("e5m2", "e4m3", "e3m0", "e2m1", "e6m9", "fp16", "bf16", "e8m2", "e8m0", "e5m0")):
        fmt = nc.format(name)
        # numbers of the format, ties between them, and both neighbours of each
        grid = fmt.grid.float()[:: -(-len(fmt.grid) // 4096)]
        ties = (grid[1:].double() + grid[:-1].double()).div(2).float()
        ends = torch.tensor([fmt.max * 1.03, fmt.max * 1.3, fmt.max * 2.1])
        exact = torch.cat([x, grid, ties, ends, -ends])
        hard = torch.cat([exact.nextafter(torch.tensor(-torch.inf)), exact, exact.nextafter(torch.tensor(torch.inf))])
        for dtype in (torch.float32, DTYPES[number % 3]):
            y = hard.to(dtype)
            wanted, got = torch.empty_like(y), torch.empty_like(y)
            reference.round_to(y, fmt, "nearest", fmt.default_overflow, "cpd", 0, wanted)
            launch.round_to(y, fmt, "nearest", fmt.default_overflow, "cpd", 0, got)
            same(got, wanted, f"round_to {fmt} by CPD's rules, {dtype}")


FINITE = (
    "fp32",
    "bf16",
    "int8/256",
    "int4/128",
    "mxfp4",
    "nvfp4",
    "onebit/64",
    "sign/64",
    "int8",
    "uint8/64",
    "int8/8192",
    "int4/128+spike2",
)


def finite(specs: Sequence[str]) -> None:
    """Sums that are too large for float32, alone and beside others, and values that were not finite before."""
    largest = torch.finfo(torch.float32).max
    for number, spec in enumerate(specs):
        plan, n = nc.codec(spec).plan_for(torch.float32), 8192 + 100 * (number % 2)
        x = normal(n, 3) * 2.0**100
        x[: n // 2 : 5], x[1 : n // 2 : 5] = largest, -largest
        rows = ops.aligned_rows(4, plan.layout(n).nbytes)
        for rank, row in enumerate(rows):
            oracle(plan).encode(plan, with_specials(x, 3000) if rank == 2 else x.roll(rank // 2), row, Noise(rank))
        for unit, divide, multiply in ((1.0, 1.0, 1.0), (3.0, 1e-3, 1e30)):
            found = []
            for kernels in (oracle(plan), fast(plan)):
                wire, out, residual = poisoned(plan, n), torch.zeros(n), x * 0.9
                feedback = Feedback(residual, unit)
                kernels.reduce(plan, rows, n, wire, Noise(1, 2), None, feedback, Finish(divide, multiply), out)
                found.append((wire, out, residual))
            for wanted, got, name in zip(*found, ("wire", "values", "residual"), strict=True):
                same(got, wanted, f"{name} of a sum of {spec} that is too large")
        for dtype in DTYPES:
            wanted, got = (x.clamp(-3e4, 3e4).to(dtype) if dtype is torch.float16 else x.to(dtype) for _ in range(2))
            oracle(plan).decode(plan, rows[0], n, wanted, True)
            fast(plan).decode(plan, rows[0], n, got, True)
            same(got, wanted, f"{spec} added to {dtype}")


def empty() -> None:
    for spec in ("int8/256", "dtree8", "nvfp4", "bf16"):
        codec = nc.codec(spec)
        nothing, plan = torch.empty(0), codec.plan_for(torch.float32)
        wire = torch.empty(codec.nbytes(0), dtype=torch.uint8)
        fast(plan).encode(plan, nothing, wire)
        fast(plan).decode(plan, wire, 0, nothing)
        fast(plan).reduce(plan, wire.expand(3, 0), 0, wire)
    launch.round_to(nothing, nc.format("e5m2"), "nearest", "inf", "ieee", 0, nothing)


def run(group: str, part: slice) -> None:
    specs = all_specs()[part]
    {
        "codecs": lambda: codecs(specs),
        "fused": lambda: (fused(FUSED[part]), spikes(SPIKES[part]), empty()),
        "wide": lambda: (wide(WIDE[part]), casts()),
        "words": lambda: by_words(BY_WORDS[part]),
        "sums": lambda: sums(specs),
        "rows": lambda: rows(specs),
        "rounding": rounding,
        "cpd": cpd,
        "finite": lambda: finite(FINITE[part]),
        "low-rank": lambda: products.check("cpu"),
    }[group]()


def main() -> None:
    torch.set_num_threads(1)
    assert start.INTERPRETED, "set TRITON_INTERPRET=1 before Triton is imported"
    group, part, parts = sys.argv[1:]
    run(group, slice(int(part), None, int(parts)))
    print("\n".join(faults[:20]))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
