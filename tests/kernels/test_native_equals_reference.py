"""Law 6 on the CPU: native and reference give the same bytes and the same values, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from each import each
from laws.inputs import hard_values, normal, unaligned, with_specials
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import all_specs
from narrowcast.formats import Format, all_formats
from narrowcast.formats.codebooks import TableFormat
from narrowcast.kernels import native, reference
from narrowcast.kernels.noise import Noise
from narrowcast.kernels.plan import Method, Plan, Rule, Store, TransformPlan

pytestmark = pytest.mark.usefixtures("native_library")

SIZES = (1, 2, 15, 16, 17, 31, 127, 128, 129, 255, 256, 257, 1000, 4099)
LARGE = 100_003
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
THREADS = (1, 2, 3)


def instruction_sets() -> list[str]:
    """Those of this machine, the best first."""
    found, before = [], native.isa()
    for name in ("avx512", "avx2", "baseline"):
        try:
            native.set_isa(name)
        except ValueError:
            continue
        found.append(name)
    native.set_isa(before)
    return found


def ways() -> Iterator[str]:
    """Every instruction set with every number of threads; set while the loop body runs."""
    for name, threads in itertools.product(instruction_sets(), THREADS):
        native.set_isa(name)
        torch.set_num_threads(threads)
        yield f"{name}, {threads} threads"
    torch.set_num_threads(1)


def bits(x: Tensor) -> Tensor:
    """The pattern of each float, with one pattern for all NaN."""
    pattern = x.view({2: torch.int16, 4: torch.int32}[x.element_size()])
    return torch.where(x.isnan(), -1, pattern)


def assert_equal(got: Tensor, wanted: Tensor, what: str) -> None:
    if got.dtype is not torch.uint8:
        got, wanted = bits(got), bits(wanted)
    if not torch.equal(got, wanted):
        where = (got != wanted).nonzero().flatten()
        first = int(where[0])
        raise AssertionError(
            f"{what}: {len(where)} of {len(got)} differ, the first at {first}: {got[first]} instead of {wanted[first]}"
        )


def wires(plan: Plan | TransformPlan, x: Tensor, what: str, **noise: Any) -> Tensor:
    """The reference's wire, after every way of the native kernel has given the same."""
    nbytes = plan.layout(x.numel()).nbytes
    wanted = torch.empty(nbytes, dtype=torch.uint8)
    reference.kernels(plan).encode(plan, x, wanted, Noise(**noise))
    for way in ways():
        got = torch.empty(nbytes, dtype=torch.uint8)
        native.kernels(plan).encode(plan, x, got, Noise(**noise))
        assert_equal(got, wanted, f"encode {what} ({way})")
    return wanted


def values(
    plan: Plan | TransformPlan, wire: Tensor, n: int, start: Tensor | None, dtype: torch.dtype, what: str
) -> None:
    """Decode, or add to `start` where one is given."""
    wanted = torch.empty(n, dtype=dtype) if start is None else start.clone()
    before = wanted.clone()
    reference.kernels(plan).decode(plan, wire, n, wanted, start is not None)
    for way in ways():
        got = before.clone()
        native.kernels(plan).decode(plan, wire, n, got, start is not None)
        assert_equal(got, wanted, f"decode {what} to {dtype}{' accumulating' if start is not None else ''} ({way})")


def agrees(plan: Plan | TransformPlan, x: Tensor, what: str, **noise: Any) -> Tensor:
    """Encode and decode once, in the type of x."""
    wire = wires(plan, x, what, **noise)
    values(plan, wire, x.numel(), None, x.dtype, what)
    return wire


def plan_of(spec: str) -> Plan | TransformPlan | None:
    codec = nc.codec(spec)
    plan = getattr(codec, "plan", None)
    return plan if plan is not None and native.why_not(plan) is None else None


PLANS = {spec: plan for spec in all_specs() if (plan := plan_of(spec)) is not None}


def codebook(size: int) -> Format:
    """A table of `size` values in no order, with a zero."""
    table = normal(size, seed=size)
    table[size // 2] = 0
    return TableFormat(f"table{size}", tuple(table.tolist()))


WIDTHS = {
    **{f"int{n}": nc.format(f"int{n}") for n in range(2, 9)},
    **{f"qsgd{n}": nc.format(f"qsgd{n}") for n in range(2, 9)},
    **{
        name: nc.format(name)
        for name in ("e1m0fn", "e2m0", "e2m1fn", "e3m1", "e3m2fn", "e3m3", "e4m3fn", "e5m2", "e7m0")
    },
    **{name: nc.format(name) for name in ("e4m3fnuz", "e4m3b11fnuz", "e3m4", "e2m5", "e4m3f", "e6m0fnuz", "e1m6f")},
    **{
        name: nc.format(name)
        for name in ("posit3.0", "posit5.1", "posit8.2", "fixed4.4", "fixed1.2", "linear8", "stree8")
    },
    **{f"table{n}": codebook(n) for n in (2, 4, 7, 13, 32, 50, 100, 256)},
}
RULES = [(Store.FP32, Rule.DIVIDE), (Store.BF16, Rule.DIVIDE), (Store.E8M0, Rule.FLOOR), (Store.E8M0, Rule.RCEIL)]
BLOCKS = (16, 32, 48, 64, 128, 256, 512, 1024, 4096, 0)


def scaled_plans(fmt: Format) -> Iterator[Plan]:
    """Every store and rule of a format, each with a few blocks, nearest and stochastic by turns."""
    for number, (block, (store, rule)) in enumerate(itertools.product(BLOCKS, RULES)):
        if number % 3 == fmt.bits % 3:
            yield Plan(fmt, block=block, store=store, rule=rule, stochastic=number % 2 == 1)
    yield Plan(fmt, rule=Rule.APS)
    for constant in (1.0, 0.37, 1024.0):
        yield Plan(fmt, constant=constant, stochastic=constant == 0.37)
    yield Plan(fmt, block=64, l2=True, stochastic=True)
    yield Plan(fmt, block=0, l2=True)


def other_plans() -> Iterator[Plan]:
    """Affine, one-bit and nvfp4."""
    for width, block in itertools.product(range(1, 9), (16, 48, 256, 0)):
        yield Plan(nc.format(f"uint{width}"), Method.AFFINE, block, stochastic=(width + block // 16) % 2 == 1)
    for method, block in itertools.product((Method.MEANS, Method.SIGN), (16, 48, 64, 112, 512, 4096)):
        yield Plan(nc.format("uint1"), method, block)
    for stochastic in (False, True):
        yield Plan(nc.format("e2m1fn"), Method.NVFP4, 16, store=Store.E8M0, stochastic=stochastic)


def name_of(plan: Plan) -> str:
    scale = plan.constant if plan.constant is not None else f"{plan.store.name}-{plan.rule.name}"
    flags = f"{'-sr' if plan.stochastic else ''}{'-l2' if plan.l2 else ''}"
    return f"{plan.format}-{plan.method.name}-{plan.block}-{scale}{flags}"


@pytest.mark.parametrize("spec", PLANS)
def test_every_listed_codec_at_every_size(spec: str) -> None:
    plan = PLANS[spec]
    x = hard_values(plan.block, SIZES[-1])
    for n in SIZES:
        # from the end, so that each size begins with other values
        agrees(plan, x[len(x) - n :].contiguous(), f"{spec}, {n} values", seed=5, stream=6)


@pytest.mark.parametrize("spec", PLANS)
def test_every_listed_codec_on_a_large_tensor_with_some_nan_and_inf(spec: str) -> None:
    plan = PLANS[spec]
    x = hard_values(plan.block, LARGE)
    agrees(plan, x, f"{spec}, hard values", seed=2**63, stream=2**40, offset=2**33 + 16)
    agrees(plan, with_specials(x, every=5000), f"{spec}, NaN and Inf", seed=1)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@each("spec", PLANS)
def test_every_listed_codec_on_sixteen_bit_values(spec: str, dtype: torch.dtype) -> None:
    plan = PLANS[spec]
    x = (normal(4099, seed=7) * torch.exp(2 * normal(4099, seed=8))).to(dtype)
    x[1000:1300] *= torch.finfo(dtype).smallest_normal  # subnormals of the type
    x[2000] = torch.finfo(dtype).max
    for n in (1, 17, 257, 4099):
        agrees(plan, x[-n:].contiguous(), f"{spec}, {n} of {dtype}", seed=3)


@each("name", WIDTHS)
def test_every_width_block_store_and_rule(name: str) -> None:
    for plan in scaled_plans(WIDTHS[name]):
        x = hard_values(plan.block, 5 * (plan.block or 300) + 19 if plan.block < 4096 else 4096 + 19)
        agrees(plan, x, name_of(plan), seed=9, stream=1)


@each("plan", list(other_plans()))
def test_every_affine_one_bit_and_nvfp4_plan(plan: Plan) -> None:
    for n in (1, 15, 16, 17, 300, 4099, 20_011):
        x = hard_values(plan.block, n)
        agrees(plan, x, f"{name_of(plan)}, {n} values", seed=9, stream=1, offset=48)
        agrees(plan, normal(n, seed=n) + 3, f"{name_of(plan)}, {n} values off zero", seed=10)


@pytest.mark.parametrize(
    "spec", ["int8/256", "int4/128", "e4m3fn/256", "dtree8", "qsgd4/512", "mxfp4", "onebit/64", "uint8/512"]
)
def test_an_unaligned_tensor_gives_the_same_bytes(spec: str) -> None:
    for dtype in DTYPES:
        x = normal(4099).to(dtype)
        wanted = agrees(PLANS[spec], x, spec)
        assert torch.equal(agrees(PLANS[spec], unaligned(x), f"{spec}, unaligned"), wanted)


@pytest.mark.parametrize("spec", ["int8/256+sr", "qsgd4/512", "mxfp4+sr", "uint3/64+sr", "nvfp4+sr", "e4m3fnuz/64+sr"])
def test_seed_stream_and_offset_choose_the_same_noise(spec: str) -> None:
    x = normal(1500)
    for seed, stream, offset in itertools.product(
        (0, 2**32, 2**64 - 1), (0, 2**64 - 1), (0, 16, 112, 2**31, 2**35 + 96)
    ):
        wires(PLANS[spec], x, f"{spec} {seed} {stream} {offset}", seed=seed, stream=stream, offset=offset)


@pytest.mark.parametrize("spec", ["int8", "e5m2", "e5m2+aps", "linear8", "dtree8", "posit8.1", "e3m0"])
def test_a_scale_that_is_given_is_used(spec: str) -> None:
    plan, x = PLANS[spec], hard_values(0, 4099)
    for scale in (2.0**-5, 0.3, 1e30, 2.0**-126):
        given = torch.tensor([scale])
        for some in (x, with_specials(x, every=900)):
            wanted, got = torch.empty(plan.layout(4099).nbytes, dtype=torch.uint8), None
            reference.kernels(plan).encode(plan, some, wanted, scale=given)
            for way in ways():
                got = torch.empty_like(wanted)
                native.kernels(plan).encode(plan, some, got, scale=given)
                assert_equal(got, wanted, f"{spec} with scale {scale} ({way})")


@each("spec", PLANS)
def test_every_code_is_decoded_to_every_type_and_added_to_what_is_there(spec: str) -> None:
    plan, n = PLANS[spec], 4099
    wire = torch.empty(plan.layout(n).nbytes, dtype=torch.uint8)
    reference.kernels(plan).encode(plan, hard_values(plan.block, n), wire, Noise(1))
    codes = wire[: plan.code_bytes(n)]
    codes.copy_(torch.randint(0, 256, codes.shape, generator=torch.Generator().manual_seed(4)))
    start = normal(n, seed=9) * 100
    for dtype in DTYPES:
        values(plan, wire, n, None, dtype, spec)
        values(plan, wire, n, start.to(dtype), dtype, spec)


@pytest.mark.parametrize("spec", [spec for spec, plan in PLANS.items() if isinstance(plan, TransformPlan)])
def test_bytes_that_no_encoder_wrote_are_decoded_alike(spec: str) -> None:
    """A side plane comes from a peer: places that are no places, too many of them, too few."""
    plan, draw = PLANS[spec], torch.Generator().manual_seed(11)
    for n in (1, 17, 1000, 4099, 20_011):
        wire = agrees(plan, normal(n, seed=n), spec)
        values(
            plan, torch.randint(0, 256, wire.shape, generator=draw).byte(), n, None, torch.float32, f"{spec}, any bytes"
        )
        for _ in range(5):
            wrong = wire.clone()
            wrong[
                torch.randint(plan.layout(n).inner, len(wire) + 1, (3,), generator=draw).clamp(max=len(wire) - 1)
            ] ^= 5
            values(plan, wrong, n, normal(n), torch.float32, f"{spec}, three wrong bytes")


@each("name", WIDTHS)
def test_every_code_of_every_width_and_store_is_decoded(name: str) -> None:
    for number, plan in enumerate(scaled_plans(WIDTHS[name])):
        n = (1003, 257, 4099)[number % 3]
        wire = torch.empty(plan.layout(n).nbytes, dtype=torch.uint8)
        reference.kernels(plan).encode(plan, hard_values(plan.block, n), wire)
        codes = wire[: plan.code_bytes(n)]
        codes.copy_(torch.randint(0, 256, codes.shape, generator=torch.Generator().manual_seed(number)))
        values(plan, wire, n, normal(n) if number % 2 else None, DTYPES[number % 3], name_of(plan))


@pytest.mark.parametrize(
    "spec", ["int8/256", "int3/64", "e4m3fn/256", "dtree8", "mxfp4", "onebit/64", "uint8/512", "nvfp4"]
)
def test_decoding_into_an_unaligned_tensor_from_an_unaligned_wire(spec: str) -> None:
    plan, n = PLANS[spec], 4099
    wire = agrees(plan, normal(n), spec)
    for dtype in DTYPES:
        wanted, room = torch.empty(n, dtype=dtype), torch.empty(n + 2, dtype=dtype).fill_(7)
        reference.kernels(plan).decode(plan, wire, n, wanted)
        for way in ways():
            native.kernels(plan).decode(plan, unaligned(wire), n, room[1:-1])
            assert_equal(room[1:-1].clone(), wanted, f"{spec} to {dtype} ({way})")
            assert room[0] == room[-1] == 7, "written outside"


@each("spec", PLANS)
def test_nothing_is_written_outside_the_wire(spec: str) -> None:
    plan = PLANS[spec]
    for n in (1, 17, 255, 1000):
        nbytes = plan.layout(n).nbytes
        for way in ways():
            room = torch.full((nbytes + 128,), 0x5A, dtype=torch.uint8)
            native.kernels(plan).encode(plan, normal(n), room[64 : 64 + nbytes])
            outside = torch.cat([room[:64], room[64 + nbytes :]])
            assert bool((outside == 0x5A).all()), f"{spec}, {n} values ({way})"


ROUNDED = [fmt for fmt in [*all_formats(), *WIDTHS.values()] if native.why_not_round(fmt, "nearest", "ieee") is None]


@each("fmt", list(dict.fromkeys(ROUNDED)))
def test_round_to_is_the_same_for_every_format_overflow_rule_and_type(fmt: Format) -> None:
    near = torch.cat([fmt.grid, fmt.boundaries()]).float()[:: max(1, len(fmt.grid) // 4000)]
    up = torch.nextafter(near, torch.tensor(float("inf")))
    x = torch.cat([near, up, -near, near * 1.5, hard_values(256, 3001), 4 * fmt.max * normal(99)])
    x = with_specials(x, every=50)
    for overflow, rounding, dtype in itertools.product(fmt.overflows, ("nearest", "stochastic"), DTYPES):
        same_rounding(x.to(dtype), fmt, rounding, overflow)


def same_rounding(x: Tensor, fmt: Format, rounding: str, overflow: str) -> None:
    wanted = reference.round_to(x, fmt, rounding, overflow, "ieee", 77, torch.empty_like(x))
    for way in ways():
        got = native.round_to(x, fmt, rounding, overflow, "ieee", 77, torch.empty_like(x))
        assert_equal(got, wanted, f"{fmt} {rounding} {overflow} {x.dtype} ({way})")


def test_round_to_is_the_same_at_every_size_and_in_place() -> None:
    for name in ("e4m3fn", "int8", "dtree8", "fp16"):
        fmt = nc.format(name)
        for n in (*SIZES, LARGE):
            x = hard_values(64, n)
            wanted = reference.round_to(x, fmt, "stochastic", "saturate", "ieee", 1, torch.empty_like(x))
            for way in ways():
                got = x.clone()
                native.round_to(got, fmt, "stochastic", "saturate", "ieee", 1, got)
                assert_equal(got, wanted, f"{name}, {n} values in place ({way})")


@pytest.mark.parametrize(
    "spec", ["int8/256", "e4m3fn/256", "dynamic8/256", "qsgd4/512", "uint8/512", "onebit/64", "nvfp4", "mxfp8"]
)
def test_flushing_of_subnormals_in_the_caller_changes_nothing(spec: str) -> None:
    plan, x = PLANS[spec], hard_values(256, 20_011)
    wanted = wires(plan, x, spec)
    out = torch.empty(len(x))
    reference.kernels(plan).decode(plan, wanted, len(x), out)
    assert torch.set_flush_denormal(True)
    try:
        for way in ways():
            wire, got = torch.empty_like(wanted), torch.empty_like(out)
            native.kernels(plan).encode(plan, x, wire)
            native.kernels(plan).decode(plan, wire, len(x), got)
            assert_equal(wire, wanted, f"{spec} ({way})")
            assert_equal(got, out, f"{spec} ({way})")
    finally:
        torch.set_flush_denormal(False)


def test_the_caller_finds_its_floating_point_environment_as_it_was() -> None:
    assert torch.set_flush_denormal(True)
    try:
        native.encode(
            PLANS["int8/256"], normal(1000), torch.empty(PLANS["int8/256"].layout(1000).nbytes, dtype=torch.uint8)
        )
        assert (torch.tensor([1e-39]) * 1).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert (torch.tensor([1e-39]) * 1).item() > 0


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="instruction set 'sse9': not in this build or not on this machine; it runs"):
        native.set_isa("sse9")


def test_this_machine_runs_its_best_instruction_set() -> None:
    assert native.isa() == instruction_sets()[0]
    assert "baseline" in instruction_sets()
