"""`reduce` and `encode` with a residual on the CPU: what error feedback and a two-shot all-reduce do by hand."""

from __future__ import annotations

import pytest
import torch
from each import each
from laws.inputs import hard_values, normal, with_specials
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import all_specs
from narrowcast.kernels import Feedback, Finish, Noise, ops

SPECS = ("int8/256", "int4/128+sr", "e5m2", "nvfp4", "onebit/64", "uint8/512", "bf16", "fp32", "dtree8")
N = 1001


def bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), -1, x.view(torch.int32))


@pytest.mark.parametrize("unit", [1.0, 1024.0, 3.0])
@each("spec", SPECS)
def test_encoding_with_a_residual_is_what_error_feedback_does_by_hand(spec: str, unit: float) -> None:
    codec, x = nc.codec(spec), with_specials(hard_values(64, N), 300)
    old = 0.01 * normal(N, 1)
    residual, wanted = old.clone(), x + old * unit
    wire = codec.encode(wanted, seed=3)
    owed = (wanted - codec.decode(wire, N)) / unit
    assert torch.equal(codec.encode(x, seed=3, residual=residual, unit=unit), wire)
    assert torch.equal(residual, torch.where(owed.isfinite(), owed, old))


@pytest.mark.parametrize("unit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_unit_that_cannot_be_divided_by_is_refused(unit: float) -> None:
    with pytest.raises(ValueError, match="units of a positive number"):
        nc.codec("int8/256").encode(torch.ones(4), residual=torch.zeros(4), unit=unit)


@pytest.mark.parametrize("spec", SPECS)
def test_reduce_is_decode_and_add_in_order_then_encode(spec: str) -> None:
    codec = nc.codec(spec)
    wires = [codec.encode(normal(N, rank), seed=rank) for rank in range(4)]
    total = codec.decode(wires[0], N)
    for wire in wires[1:]:
        codec.decode(wire, N, out=total, accumulate=True)
    total = total.div_(4.0).mul_(0.5)
    wanted, decoded = codec.encode(total, seed=9, stream=2), torch.empty(N, dtype=torch.bfloat16)
    rows = ops.aligned_rows(4, codec.nbytes(N))
    for row, wire in zip(rows, wires, strict=True):
        row.copy_(wire)
    for given in (wires, rows):
        got = codec.reduce(given, N, seed=9, stream=2, divide=4.0, multiply=0.5, decoded=decoded)
        assert torch.equal(got, wanted)
        assert torch.equal(decoded, codec.decode(wanted, N, dtype=torch.bfloat16))


@each("spec", all_specs())
def test_a_sum_is_decode_and_add_in_order(spec: str) -> None:
    codec = nc.codec(spec)
    ranks = [normal(N, 0), with_specials(hard_values(codec.block or 256, N), 300), -normal(N, 0), normal(N, 3)]
    rows = ops.aligned_rows(4, codec.nbytes(N))
    for rank, (row, x) in enumerate(zip(rows, ranks, strict=True)):
        codec.encode(x, seed=rank, out=row)
    wanted = codec.decode(rows[0], N)
    for row in rows[1:]:
        codec.decode(row, N, out=wanted, accumulate=True)
    finish = Finish(3.0, 0.7)
    for given in (rows, list(rows.clone())):
        out, plan = torch.empty(N), codec.plan_for(torch.float32)
        ops.sum_wires(plan, given, N, out)
        assert torch.equal(bits(out), bits(wanted))
        ops.sum_wires(plan, given, N, out, finish)
        assert torch.equal(bits(out), bits(finish.apply(wanted)))


@pytest.mark.parametrize("gap", [0, 16])
@each("spec", all_specs())
def test_rows_are_encoded_and_decoded_as_each_by_itself(spec: str, gap: int) -> None:
    codec, per, world = nc.codec(spec), 304, 3
    pitch = per + gap
    n = world * pitch - gap
    x, residual = with_specials(hard_values(codec.block or 256, n), 300), 0.01 * normal(n, 5)
    for floats, owing in ((x, False), (x, True), (normal(n).to(torch.bfloat16), True)):
        feedback = Feedback(residual.clone(), 3.0) if owing else None
        wanted_left = residual.clone()
        rows = ops.aligned_rows(world, codec.nbytes(per, torch.float32 if owing else floats.dtype))
        plan, kept = codec.plan_for(torch.float32 if owing else floats.dtype), feedback
        if feedback is not None:
            kept = Feedback(feedback.residual, feedback.unit, codec.decay)
        ops.encode_rows(plan, floats, per, rows, Noise(5, 6, 32), kept, pitch)
        for row in range(world):
            part = slice(row * pitch, row * pitch + per)
            kept = {"residual": wanted_left[part], "unit": 3.0} if owing else {}
            wanted = codec.encode(floats[part], seed=5, stream=6, offset=32 + row * pitch, **kept)
            assert torch.equal(rows[row], wanted), row
        if feedback is not None:
            assert torch.equal(bits(feedback.residual), bits(wanted_left))
    out = torch.full((n + gap,), 7.0)
    ops.decode_rows(codec.plan_for(torch.float32), rows, per, out[:n], pitch)
    assert torch.equal(
        bits(out.view(world, pitch)[:, :per]), bits(torch.stack([codec.decode(row, per) for row in rows]))
    )
    assert (out.view(world, pitch)[:, per:] == 7).all()


def test_rows_of_no_seed_draw_each_its_own_bits() -> None:
    codec, x = nc.codec("int4/128+sr"), torch.rand(256).repeat(4)
    rows = ops.aligned_rows(4, codec.nbytes(256))
    ops.encode_rows(codec.plan_for(x.dtype), x, 256, rows, Noise(0, 0, 0))
    for row, wire in enumerate(rows):
        assert torch.equal(wire, codec.encode(x[:256], offset=256 * row))


@each("spec", all_specs())
def test_a_residual_of_any_shape_is_flat_for_kernels(spec: str) -> None:
    codec, x, flat, table = nc.codec(spec), normal(64), torch.full((64,), 0.01), torch.full((64, 1), 0.01)
    assert torch.equal(codec.encode(x, residual=flat), codec.encode(x, residual=table))
    assert torch.equal(bits(flat), bits(table.view(-1)))


def test_the_first_wire_starts_the_sum() -> None:
    codec, zero = nc.codec("e5m2/64"), torch.full((64,), -0.0)
    out = torch.empty(64)
    codec.reduce([codec.encode(zero)], 64, decoded=out)
    assert bool(torch.signbit(out).all())  # 0 + -0 would be +0


@pytest.mark.parametrize("spec", SPECS)
def test_reduce_writes_what_it_decodes_to_wherever_decoded_lies(spec: str) -> None:
    codec = nc.codec(spec)
    wires = [codec.encode(normal(N, rank), seed=rank) for rank in range(2)]
    wanted = codec.decode(codec.reduce(wires, N), N)
    room = torch.zeros(N, 2)
    for decoded in (room[:, 0], torch.empty(7, 11, 13).transpose(0, 2), torch._neg_view(torch.empty(N))):
        codec.reduce(wires, N, decoded=decoded)
        assert torch.equal(decoded.reshape(-1), wanted)
    assert not room[:, 1].any(), "written between the values"


def wires(*, dtype: torch.dtype = torch.uint8, stride: int = 1) -> list[Tensor]:
    return 2 * [torch.zeros(68 * stride, dtype=dtype)[::stride]]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda c: c.reduce(wires(), 64, decoded=torch.zeros(16)), "decoded holds 16 values, not n=64"),
        (lambda c: c.reduce(wires(stride=2), 64), "64 values take 68 bytes, got 68 of torch.uint8, not contiguous"),
        (lambda c: c.reduce(wires(dtype=torch.int8), 64), "got 68 of torch.int8"),
        (lambda c: c.reduce([wires()[0], wires()[0].to("meta")], 64), "a wire is on meta"),
        (lambda c: c.reduce([b"wire"], 64), "64 values take 68 bytes, got bytes"),
        (lambda c: c.encode(torch.zeros(64), residual=torch._neg_view(torch.zeros(64))), "got 64 .*, not contiguous"),
        (lambda c: c.reduce([], 64), "got no wires"),
        (lambda c: c.reduce(torch.zeros(72, dtype=torch.uint8), 64), "one wire in each row"),
        (lambda c: c.reduce([torch.zeros(7, dtype=torch.uint8)], 64), "64 values take 68 bytes, got 7"),
        (lambda c: c.encode(torch.zeros(64), residual=torch.zeros(63)), "must be 64 contiguous float32"),
        (lambda c: c.encode(torch.zeros(64), residual=torch.zeros(64).double()), "got 64 of torch.float64"),
    ],
)
def test_wrong_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(nc.codec("int8/64"))  # type: ignore[operator]


def test_decoded_of_another_type_is_named() -> None:
    with pytest.raises(TypeError, match=r"got torch\.float64; give float32"):
        nc.codec("int8/64").reduce(wires(), 64, decoded=torch.zeros(64).double())


def test_rows_for_wires_begin_where_loads_are_widest() -> None:
    rows = ops.aligned_rows(3, 17)
    assert rows.shape == (3, 17)
    assert rows.stride(0) % 16 == 0


@pytest.mark.parametrize("spec", ["e5m2", "e5m2+aps", "int8", "dtree8", "posit8.1", "linear8"])
def test_the_scale_of_a_tensor_is_that_of_its_largest_value_alone(spec: str) -> None:
    """What a GPU takes it from, since it must not wait for the host."""
    codec = nc.codec(spec)
    for x in (hard_values(0, N), torch.zeros(5), normal(N) * 1e37, normal(N) * 1e-30):
        top = x.abs().amax().view(1)
        scale = codec.encode(top)[codec.plan.layout(1).scales :].view(torch.float32)
        assert torch.equal(scale, codec.tensor_scale(x))
        assert torch.equal(codec.tensor_scale(with_specials(x, 2)), codec.tensor_scale(without_specials(x, 2)))


def without_specials(x: Tensor, every: int) -> Tensor:
    """The finite values of `with_specials`."""
    mixed = with_specials(x, every)
    assert not mixed.isfinite().all()
    return torch.where(mixed.isfinite(), mixed, 0.0)
