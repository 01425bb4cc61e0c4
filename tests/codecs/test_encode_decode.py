"""encode and decode as calls: shapes, types, `out=`, wrong arguments, and what they leave alone."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from each import each
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import all_specs
from narrowcast.kernels import reference
from narrowcast.kernels.noise import Noise

SOME = [
    *(
        "as-is",
        "bf16",
        "fp16",
        "int8",
        "int8/256",
        "int4/128+sr+ef",
        "int3/64",
        "e4m3fn/128",
        "e5m2+aps",
        "mxfp4",
        "mxfp6",
    ),
    *(
        "nvfp4",
        "dtree8",
        "dynamic8/256",
        "nf4/64",
        "posit8.1/256",
        "qsgd4/512+l2",
        "ternary/512",
        "onebit/64",
        "sign/64",
    ),
    *("uint8/512", "uint1/64", "e4m3@1", "e4m3@1+cpd"),
]
some_specs = pytest.mark.parametrize("spec", SOME)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@some_specs
def test_a_tensor_of_any_shape_and_stride_is_taken_in_row_major_order(spec: str) -> None:
    codec = nc.codec(spec)
    x = normal(24, 36)
    wanted = codec.encode(x.t().contiguous().view(-1))
    for same in (x.t(), x.t().contiguous(), x.t().reshape(4, 9, 24), x[:, None].transpose(0, 2)):
        assert torch.equal(codec.encode(same), wanted)
    every_second = normal(2000)[::2]
    assert torch.equal(codec.encode(every_second), codec.encode(every_second.clone()))


@each("spec", all_specs())
def test_the_argument_is_never_changed(spec: str) -> None:
    codec = nc.codec(spec)
    x = normal(1000)
    before = x.clone()
    wire = codec.encode(x)
    kept = wire.clone()
    codec.decode(wire, 1000)
    assert torch.equal(x, before)
    assert torch.equal(wire, kept)


@each("spec", all_specs())
def test_the_same_call_gives_the_same_bytes_whatever_the_state_of_torch(spec: str) -> None:
    codec = nc.codec(spec)
    x = normal(1000)
    torch.manual_seed(1)
    first = codec.encode(x, seed=5, stream=6)
    torch.manual_seed(2)
    assert torch.equal(codec.encode(x, seed=5, stream=6), first)
    if codec.stochastic:
        assert not torch.equal(codec.encode(x, seed=6, stream=6), first)
        assert not torch.equal(codec.encode(x, seed=5, stream=7), first)
        assert not torch.equal(codec.encode(x, seed=5, stream=6, offset=16), first)
    else:
        assert torch.equal(codec.encode(x, seed=6, stream=7, offset=16), first)


@some_specs
def test_an_empty_tensor_has_an_empty_wire(spec: str) -> None:
    codec = nc.codec(spec)
    for empty in (torch.empty(0), torch.empty(3, 0, 2)):
        wire = codec.encode(empty)
        assert wire.numel() == codec.nbytes(0) == 0
        assert codec.decode(wire, 0).shape == (0,)


@some_specs
def test_out_is_written_and_returned(spec: str) -> None:
    codec = nc.codec(spec)
    x = normal(1000)
    wire = torch.empty(codec.nbytes(1000), dtype=torch.uint8)
    assert codec.encode(x, out=wire) is wire
    assert torch.equal(wire, codec.encode(x))
    y = torch.empty(10, 100)
    assert codec.decode(wire, 1000, out=y) is y
    assert torch.equal(y.view(-1), codec.decode(wire, 1000))


@some_specs
def test_out_need_not_be_contiguous(spec: str) -> None:
    codec = nc.codec(spec)
    wire = codec.encode(normal(1000))
    room = torch.zeros(100, 20)
    codec.decode(wire, 1000, out=room[:, ::2])
    assert torch.equal(room[:, ::2].reshape(-1), codec.decode(wire, 1000))
    assert not room[:, 1::2].any(), "written between the columns"
    start = normal(1000, seed=1).view(100, 10)
    room[:, ::2] = start
    codec.decode(wire, 1000, out=room[:, ::2], accumulate=True)
    wanted = start.clone()
    codec.decode(wire, 1000, out=wanted, accumulate=True)
    assert torch.equal(room[:, ::2], wanted)


@some_specs
def test_a_wire_may_be_a_slice_that_begins_anywhere(spec: str) -> None:
    codec = nc.codec(spec)
    wire = codec.encode(normal(1000))
    room = torch.zeros(wire.numel() + 3, dtype=torch.uint8)
    for start in range(4):
        room[start : start + wire.numel()] = wire
        assert torch.equal(codec.decode(room[start : start + wire.numel()], 1000), codec.decode(wire, 1000))
    double = torch.stack([wire, wire], dim=1)
    assert torch.equal(codec.decode(double[:, 0], 1000), codec.decode(wire, 1000))


@some_specs
def test_accumulate_adds_in_float32_with_two_roundings(spec: str) -> None:
    codec = nc.codec(spec)
    wire = codec.encode(normal(1000))
    start = normal(1000, seed=3) * 7
    got = start.clone()
    codec.decode(wire, 1000, out=got, accumulate=True)
    assert torch.equal(got, start + codec.decode(wire, 1000))


@each("dtype", DTYPES)
@some_specs
def test_every_float_type_goes_in_and_comes_out(spec: str, dtype: torch.dtype) -> None:
    codec = nc.codec(spec)
    x = normal(1000).to(dtype)
    wire = codec.encode(x)
    y = codec.decode(wire, 1000, dtype=dtype)
    assert y.dtype is dtype
    if spec != "as-is":
        assert torch.equal(wire, codec.encode(x.float())), "a 16-bit value means its float32 value"
        assert torch.equal(y, codec.decode(wire, 1000).to(dtype))
    else:
        assert torch.equal(y, x)


@some_specs
def test_a_tensor_that_requires_grad_is_taken_as_it_is(spec: str) -> None:
    codec = nc.codec(spec)
    x = normal(300).requires_grad_()
    wire = codec.encode(x * 2)
    assert not wire.requires_grad
    assert torch.equal(wire, codec.encode(x.detach() * 2))
    assert not codec.decode(wire, 300).requires_grad
    with torch.no_grad():
        codec.decode(wire, 300, out=x)
    assert torch.equal(x.detach(), codec.decode(wire, 300))


@some_specs
def test_a_tensor_with_torchs_negative_bit_keeps_its_sign(spec: str) -> None:
    codec, x = nc.codec(spec), normal(300)
    imaginary = torch.complex(x, -x).conj().imag
    assert imaginary.is_neg()
    for negated in (torch._neg_view(-x), imaginary):
        assert torch.equal(codec.encode(negated), codec.encode(x))
    room, wire = torch.zeros(300), codec.encode(x)
    codec.decode(wire, 300, out=torch._neg_view(room))
    assert torch.equal(-room, codec.decode(wire, 300))


@some_specs
def test_a_codec_that_was_used_can_be_pickled_and_copied(spec: str) -> None:
    codec = nc.codec(spec)
    x = normal(500)
    wire = codec.encode(x, seed=2)
    for twin in (pickle.loads(pickle.dumps(codec)), copy.deepcopy(codec)):
        assert twin == codec
        assert torch.equal(twin.encode(x, seed=2), wire)
        assert torch.equal(twin.decode(wire, 500), codec.decode(wire, 500))


@pytest.mark.parametrize("spec", ["int8", "e5m2", "e5m2+aps", "dtree8", "linear8", "posit8.1"])
def test_a_given_scale_replaces_the_tensors_own(spec: str) -> None:
    codec = nc.codec(spec)
    x = normal(500)
    own = codec.encode(x)[-4:].clone().view(torch.float32)
    assert torch.equal(codec.encode(x, scale=own), codec.encode(x))
    given = own * 4
    wire = codec.encode(x, scale=given)
    assert torch.equal(wire[-4:].clone().view(torch.float32), given)
    # the whole tensor under one scale is its parts under it
    whole, first = codec.decode(wire, 500), codec.encode(x[:100], scale=given)
    assert torch.equal(codec.decode(first, 100), whole[:100])


def test_a_scale_too_small_saturates() -> None:
    codec = nc.codec("int8")
    y = codec.decode(codec.encode(torch.tensor([5.0, -1000.0, 1000.0]), scale=torch.tensor([1.0])), 3)
    assert y.tolist() == [5.0, -127.0, 127.0]


WRONG_SCALES = [-1.0, math.inf, -math.inf, 1e-40, 2.0**-149, 3e38]


@pytest.mark.parametrize("scale", WRONG_SCALES)
def test_a_scale_that_cannot_be_inverted_or_turns_a_level_infinite_is_refused(scale: float) -> None:
    codec = nc.codec("int8")
    with pytest.raises(ValueError, match=r"scale=.*; give 0, NaN or a number from 1\.17549e-38 to 2\.67939e\+36"):
        codec.encode(torch.ones(4), scale=torch.tensor(scale))
    with pytest.raises(ValueError, match="give 0, NaN or a number from"):
        codec.reduce([codec.encode(torch.ones(4))], 4, scale=torch.tensor(scale))


@pytest.mark.parametrize("spec", ["int8", "e5m2+aps", "posit8.1", "linear8"])
def test_every_scale_that_is_allowed_keeps_zeros_and_finite_values(spec: str) -> None:
    codec = nc.codec(spec)
    x = torch.tensor([0.0, -0.0, 1.0, -3.4e38, 1e-39])
    for scale in (torch.finfo(torch.float32).tiny, codec.plan.max_scale, 0.0):  # type: ignore[attr-defined]
        y = codec.decode(codec.encode(x, scale=torch.tensor(scale)), 5)
        assert y.isfinite().all()
        assert not y[:2].any()
    assert codec.decode(codec.encode(x, scale=torch.tensor(math.nan)), 5).isnan().all()


@pytest.mark.parametrize("spec", ["int8/64", "int8@1", "as-is", "bf16", "nvfp4", "uint8", "onebit/64", "mxfp4"])
def test_a_scale_is_refused_where_it_means_nothing(spec: str) -> None:
    with pytest.raises(ValueError, match=r"scale= is for codecs with one .*scale for the tensor"):
        nc.codec(spec).encode(torch.ones(64), scale=torch.ones(1))


@pytest.mark.parametrize(
    "scale", [2.0, torch.ones(2), torch.ones(1, dtype=torch.float64)], ids=["number", "two", "double"]
)
def test_a_scale_that_is_no_single_float32_is_refused(scale: object) -> None:
    with pytest.raises(TypeError, match="scale must be a float32 tensor with one element, got"):
        nc.codec("int8").encode(torch.ones(4), scale=scale)  # type: ignore[arg-type]


@some_specs
@each("dtype", [torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2])
def test_a_wrong_type_is_refused(spec: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"got {dtype}; give float32, float16 or bfloat16"):
        nc.codec(spec).encode(torch.zeros(64, dtype=dtype))


@some_specs
def test_a_truncated_or_oversized_wire_and_a_wrong_n_are_refused(spec: str) -> None:
    codec = nc.codec(spec)
    wire = codec.encode(normal(1000))
    for wrong in (wire[:-1], torch.cat([wire, wire[:1]]), wire[:0]):
        expected = rf"1000 values take {wire.numel()} bytes, got {wrong.numel()}; pass the whole wire"
        with pytest.raises(ValueError, match=expected):
            codec.decode(wrong, 1000)
    with pytest.raises(ValueError, match=rf"got {wire.numel()}; pass the whole wire"):
        codec.decode(wire, 1512)
    for wrong_n in (-1, -1000):
        with pytest.raises(ValueError, match=f"n is a number of values, .* got {wrong_n}"):
            codec.decode(wire, wrong_n)
        with pytest.raises(ValueError, match=f"n is a number of values, .* got {wrong_n}"):
            codec.nbytes(wrong_n)


@some_specs
def test_a_number_of_values_is_any_integer_and_nothing_else(spec: str) -> None:
    codec = nc.codec(spec)
    wire = codec.encode(normal(100))
    for n in (np.int64(100), torch.tensor(100)):
        assert codec.nbytes(n) == wire.numel()  # type: ignore[arg-type]
        assert torch.equal(codec.decode(wire, n), codec.decode(wire, 100))  # type: ignore[arg-type]
        assert torch.equal(codec.reduce([wire], n), codec.reduce([wire], 100))  # type: ignore[arg-type]
    for wrong in (100.0, "100", None, torch.ones(2)):
        for call in (codec.nbytes, partial(codec.decode, wire), partial(codec.reduce, [wire])):
            with pytest.raises(TypeError, match="n is a number of values, an integer that is not negative, got"):
                call(wrong)  # type: ignore[operator]


@some_specs
def test_what_is_no_tensor_is_refused(spec: str) -> None:
    codec = nc.codec(spec)
    for wrong in ([1.0, 2.0], np.ones(3, "f4"), b"abc", None):
        kind = type(wrong).__name__
        with pytest.raises(TypeError, match=f"got {kind}; give a torch tensor, for example torch.as_tensor"):
            codec.encode(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"the wire is of type {kind}; give the uint8 tensor"):
            codec.decode(wrong, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous uint8, got list"):
        codec.encode(normal(64), out=[1])  # type: ignore[arg-type]


@some_specs
def test_a_wire_that_is_not_bytes_is_refused(spec: str) -> None:
    wire = nc.codec(spec).encode(normal(64))
    with pytest.raises(TypeError, match=r"the wire is torch.int8; give the uint8 tensor that encode returned"):
        nc.codec(spec).decode(wire.view(torch.int8), 64)


def test_a_wrong_out_is_refused() -> None:
    codec = nc.codec("int8/64")
    x, n = normal(64), codec.nbytes(64)
    for out in (
        torch.empty(n - 1, dtype=torch.uint8),
        torch.empty(n, dtype=torch.int8),
        torch.empty(2 * n).byte()[::2],
    ):
        with pytest.raises(ValueError, match=rf"out must be {n} contiguous uint8, got"):
            codec.encode(x, out=out)
    wire = codec.encode(x)
    with pytest.raises(ValueError, match=r"out holds 65 values, not n=64; give a tensor of 64"):
        codec.decode(wire, 64, out=torch.empty(65))
    with pytest.raises(TypeError, match=r"got torch.float64; give float32"):
        codec.decode(wire, 64, out=torch.empty(64, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"got torch.int32; give float32"):
        codec.decode(wire, 64, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"accumulate=True adds to out; give out="):
        codec.decode(wire, 64, accumulate=True)


@pytest.mark.parametrize("noise", [{"seed": -1}, {"seed": 2**64}, {"stream": -1}, {"stream": 2**64}], ids=str)
def test_a_seed_beyond_64_bits_is_refused(noise: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"seed and stream are 64-bit unsigned integers, got"):
        nc.codec("int8/64+sr").encode(normal(64), **noise)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [1.5, None, "7", torch.tensor(1.5)], ids=str)
def test_a_seed_that_is_no_integer_is_refused(wrong: object) -> None:
    for spec in ("int8/64", "int8/64+sr"):
        codec = nc.codec(spec)
        for name in ("seed", "stream"):
            with pytest.raises(TypeError, match=r"seed and stream are 64-bit unsigned integers, got"):
                codec.encode(normal(64), **{name: wrong})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"offset: cut between blocks, at a multiple of 16, got"):
            codec.encode(normal(64), offset=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="64-bit unsigned integers"):
            codec.reduce([codec.encode(normal(64))], 64, seed=wrong)  # type: ignore[arg-type]


def test_a_seed_is_any_integer() -> None:
    codec, x = nc.codec("int8/64+sr"), normal(64)
    wanted = codec.encode(x, seed=5, stream=6, offset=16)
    rounded = nc.round_to(x, "int4", rounding="stochastic", seed=5)
    for kind in (np.int64, torch.tensor, np.uint8):
        noise = {"seed": kind(5), "stream": kind(6), "offset": kind(16)}
        assert torch.equal(codec.encode(x, **noise), wanted)
        assert torch.equal(nc.round_to(x, "int4", rounding="stochastic", seed=kind(5)), rounded)


@pytest.mark.parametrize("offset", [-16, 1, 8, 100])
def test_an_offset_inside_a_block_is_refused(offset: int) -> None:
    with pytest.raises(ValueError, match=rf"offset={offset}; .*a multiple of 16"):
        nc.codec("int8/64+sr").encode(normal(64), offset=offset)


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="got a tensor on meta; kernels run on CPUs and CUDA devices"):
        nc.codec("int8/64").encode(torch.empty(64, device="meta"))


def test_round_to_leaves_its_argument_alone_and_keeps_type_and_shape() -> None:
    for dtype in DTYPES:
        x = normal(6, 10).to(dtype).t()
        before = x.clone()
        y = nc.round_to(x, "e4m3fn")
        assert torch.equal(x, before)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert torch.equal(y, nc.round_to(x.float(), "e4m3fn").to(dtype))


def test_round_to_writes_into_out_which_may_be_the_argument_or_a_view() -> None:
    x = normal(6, 10)
    wanted = nc.round_to(x, "int4")
    out = torch.empty(6, 10)
    assert nc.round_to(x, "int4", out=out) is out
    assert torch.equal(out, wanted)
    room = torch.zeros(10, 12)
    nc.round_to(x, "int4", out=room.t()[::2])
    assert torch.equal(room.t()[::2], wanted)
    assert not room.t()[1::2].any()
    nc.round_to(x, "int4", out=x)
    assert torch.equal(x, wanted)


def test_round_to_keeps_the_sign_of_a_tensor_with_torchs_negative_bit() -> None:
    x = normal(6, 10)
    wanted = nc.round_to(x, "e4m3")
    for negated in (torch._neg_view(-x), torch._neg_view(-x.t().contiguous()).t(), torch.complex(x, -x).conj().imag):
        assert negated.is_neg()
        assert torch.equal(nc.round_to(negated, "e4m3"), wanted)
        room = torch.zeros_like(negated.resolve_neg())
        nc.round_to(negated, "e4m3", out=torch._neg_view(room))
        assert torch.equal(-room, wanted)
        nc.round_to(negated, "e4m3", out=negated)
        assert torch.equal(negated, wanted)


def test_round_to_takes_its_noise_in_row_major_order() -> None:
    x = normal(6, 10)
    flat = nc.round_to(x.t().contiguous().view(-1), "int4", rounding="stochastic", seed=3)
    assert torch.equal(nc.round_to(x.t(), "int4", rounding="stochastic", seed=3).reshape(-1), flat)


WRONG_ROUNDING = [
    ({"rounding": "even"}, "unknown rounding 'even'; take one of nearest, stochastic"),
    ({"rounding": "stochastic"}, "stochastic rounding needs seed="),
    ({"rounding": "stochastic", "seed": -1}, "64-bit unsigned"),
    ({"overflow": "wrap"}, "cannot follow overflow='wrap'; take one of saturate"),
    ({"out": torch.empty(3)}, r"out is \(3,\) torch.float32 on cpu; it must be like x: \(4,\)"),
    ({"out": torch.empty(4).half()}, "it must be like x"),
]


@pytest.mark.parametrize("arguments, message", WRONG_ROUNDING, ids=[m for _, m in WRONG_ROUNDING])
def test_round_to_refuses_what_it_cannot_do(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nc.round_to(torch.ones(4), "e5m2", **arguments)  # type: ignore[arg-type]


def test_round_to_refuses_a_wrong_type() -> None:
    with pytest.raises(TypeError, match="got ndarray; give a torch tensor"):
        nc.round_to(np.ones(4, "f4"), "e5m2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"64-bit unsigned integers, got 1\.5"):
        nc.round_to(torch.ones(4), "e5m2", rounding="stochastic", seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got torch\.float64; give float32, float16 or bfloat16"):
        nc.round_to(torch.ones(4).double(), "e5m2")


def test_noise_as_one_value_is_checked_as_its_parts_are() -> None:
    codec, x = nc.codec("int8/64+sr"), normal(64)
    assert torch.equal(codec.encode_with(x, Noise(5, 6, 16)), codec.encode(x, seed=5, stream=6, offset=16))
    with pytest.raises(ValueError, match=r"offset=3; .*a multiple of 16"):
        codec.encode_with(x, Noise(0, 0, 3))


def test_a_nan_that_others_wrote_comes_back_as_ours() -> None:
    """By the native library and by the reference alike."""
    for spec, dtype, patterns in (("fp32", torch.int32, [0x7FC00001, -1]), ("bf16", torch.int16, [0x7FC1, -1])):
        wire = torch.tensor(patterns, dtype=dtype).view(torch.uint8)
        plan, out = nc.codec(spec).plan_for(torch.float32), torch.empty(2)
        reference.decode_cast(plan, wire, 2, out)
        for found in (out, nc.codec(spec).decode(wire, 2)):
            assert found.view(torch.int32).tolist() == [0x7FC00000] * 2
