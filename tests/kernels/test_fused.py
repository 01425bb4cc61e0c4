"""Error feedback and reduction in one pass equal the separate steps, bit for bit, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from each import each
from laws.inputs import hard_values, normal, with_specials
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import all_specs
from narrowcast.kernels import Feedback, Finish, Noise, native, reference

pytestmark = pytest.mark.usefixtures("native_library")

SPECS = [spec for spec in all_specs() if hasattr(nc.codec(spec), "plan")]
SIZES = (1, 17, 256, 1000, 20_011)
WORLD = 3


def instruction_sets() -> list[str]:
    found = []
    for name in ("avx512", "avx2", "baseline"):
        try:
            native.set_isa(name)
        except ValueError:
            continue
        found.append(name)
    return found


def bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), -1, x.view({2: torch.int16, 4: torch.int32}[x.element_size()]))


def noise_of(spec: str) -> Noise:
    return Noise(5, 3, 32) if nc.codec(spec).stochastic else Noise()


def cases(spec: str, n: int) -> tuple[list[Tensor], Tensor]:
    """What W ranks have, and what is owed: hard values in both."""
    ranks = [normal(n, seed=7 + rank) for rank in range(WORLD)]
    block = nc.codec(spec).block or 256
    ranks[1] = with_specials(hard_values(block, n), every=3 * block)
    return ranks, normal(n, seed=3) * 1e-3


@pytest.mark.parametrize("spec", SPECS)
def test_encoding_what_is_owed_equals_the_separate_steps(spec: str) -> None:
    plan, noise = nc.codec(spec).plan, noise_of(spec)
    if native.why_not(plan) is not None:
        pytest.skip("the reference alone has it")
    for n in SIZES:
        (_, hard, _), owed = cases(spec, n)
        for x, *how in ((hard, 1.0), (hard, 1.0, 0.95), (hard.to(torch.bfloat16), 1024.0, 0.5)):
            wires = [torch.empty(plan.layout(n).nbytes, dtype=torch.uint8) for _ in range(2)]
            wanted = owed.clone()
            reference.kernels(plan).encode(plan, x, wires[0], noise, None, Feedback(wanted, *how))
            for name in instruction_sets():
                native.set_isa(name)
                got = owed.clone()
                native.kernels(plan).encode(plan, x, wires[1], noise, None, Feedback(got, *how))
                assert torch.equal(wires[0], wires[1]), (name, n, how)
                assert torch.equal(bits(got), bits(wanted)), (name, n, how)


@each("spec", SPECS)
def test_a_reduction_equals_the_separate_steps(spec: str) -> None:
    codec, noise = nc.codec(spec), noise_of(spec)
    plan = codec.plan
    if native.why_not(plan) is not None:
        pytest.skip("the reference alone has it")
    for n, dtype, owing in ((1, torch.float32, False), (1000, torch.bfloat16, True), (20_011, torch.float32, True)):
        ranks, owed = cases(spec, n)
        wires = [codec.encode(x, seed=noise.seed, stream=rank) for rank, x in enumerate(ranks)]
        found = []
        for kernels in (reference.kernels(plan), *instruction_sets()):
            if isinstance(kernels, str):
                native.set_isa(kernels)
                kernels = native.kernels(plan)
            wire, out = torch.empty(plan.layout(n).nbytes, dtype=torch.uint8), torch.empty(n, dtype=dtype)
            feedback = Feedback(owed.clone(), 2.0, 0.9) if owing else None
            kernels.reduce(plan, wires, n, wire, noise, None, feedback, Finish(3.0, 0.5), out)
            found.append((wire, bits(out), bits(feedback.residual) if feedback else torch.empty(0)))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), (n, dtype)


@each("spec", SPECS)
def test_a_sum_of_wires_equals_decode_and_add(spec: str) -> None:
    codec, noise = nc.codec(spec), noise_of(spec)
    if native.why_not(codec.plan) is not None:
        pytest.skip("the reference alone has it")
    for n, finish in ((1, Finish()), (1000, Finish(3.0)), (20_011, Finish(1.0, 0.3))):
        ranks, _ = cases(spec, n)
        wires = [codec.encode(x, seed=noise.seed, stream=rank) for rank, x in enumerate(ranks)]
        found = [torch.empty(n), torch.empty(n)]
        for kernels, out in zip((reference.kernels(codec.plan), native.kernels(codec.plan)), found, strict=True):
            kernels.sum_wires(codec.plan, wires, n, out, finish)
        assert torch.equal(bits(found[0]), bits(found[1])), n


def test_which_plans_go_in_one_pass() -> None:
    """A test that compares the separate steps with themselves would show nothing."""

    def fused(spec: str) -> bool:
        plan, x = nc.codec(spec).plan, torch.ones(64)
        wire = torch.empty(plan.layout(64).nbytes, dtype=torch.uint8)
        return native.encode_with_feedback(plan, x, wire, Noise(), Feedback(torch.zeros(64)))

    one_pass = ("int8/256", "int4/128+sr", "e4m3fn/256", "mxfp4", "uint8/512", "onebit/64", "e4m3@1", "dynamic8/4096")
    one_pass += ("int4/128+rot", "nf4/4096+rot")
    assert [spec for spec in one_pass if not fused(spec)] == []
    assert [spec for spec in ("int8", "e5m2+aps", "nvfp4", "dtree8") if fused(spec)] == []


def test_threads_make_no_difference() -> None:
    n, plan = 1 << 20, nc.codec("int4/128").plan
    x, owed = normal(n, seed=1), normal(n, seed=2)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        wire, residual = torch.empty(plan.layout(n).nbytes, dtype=torch.uint8), owed.clone()
        native.kernels(plan).encode(plan, x, wire, Noise(), None, Feedback(residual))
        out = torch.empty(n)
        native.PLANS.reduce(plan, [wire, wire], n, wire.clone(), Noise(), None, Feedback(residual), Finish(2.0), out)
        found.append((wire, residual, out))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
