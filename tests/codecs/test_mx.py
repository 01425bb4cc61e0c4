"""Block-scaled types: MX against torchao and gfloat, nvfp4 against its definition in numpy."""

from __future__ import annotations

from typing import Any

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_mxfp4_e2m1, format_info_mxfp6_e2m3, format_info_mxfp8_e4m3
from laws.inputs import hard_blocks, log_uniform, normal, unpacked
from torch import Tensor

import narrowcast as nc

BLOCK = 32
ELEMENTS = {"mxfp8": 8, "mxfp6": 6, "mxfp4": 4}


def inputs() -> Tensor:
    """Blocks of all magnitudes, with zeros, ties and powers of two; below 2**-100 ours are zeros by design."""
    x_NB = torch.cat([hard_blocks(BLOCK, random=400), 2.0 ** torch.arange(-16, 16).repeat_interleave(BLOCK)]).view(
        -1, BLOCK
    )
    usual = (x_NB == 0).all(dim=1) | ((x_NB.abs().amax(dim=1) >= 2.0**-90) & (x_NB.abs().amax(dim=1) < 1e38))
    return x_NB[usual].flatten()


def planes(spec: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and the bytes of the exponents."""
    bits = ELEMENTS[spec.partition("+")[0]]
    wire = nc.codec(spec).encode(x)
    code_bytes = len(x) * bits // 8
    return unpacked(wire[:code_bytes], bits, len(x)), wire[code_bytes:]


def torchao_planes(x: Tensor, name: str, mode: str) -> tuple[Tensor, Tensor]:
    pytest.importorskip("torchao", reason="torchao is one of the peers of the benchmark, not needed for anything else")
    from torchao.prototype.mx_formats import mx_tensor

    kinds: dict[str, Any] = {"mxfp8": torch.float8_e4m3fn, "mxfp6": "fp6_e2m3", "mxfp4": torch.float4_e2m1fn_x2}
    scale, data = mx_tensor.to_mx(x.view(-1, BLOCK), kinds[name], BLOCK, mx_tensor.ScaleCalculationMode[mode])
    code = data.view(torch.uint8).flatten().long()
    if name == "mxfp4":
        code = torch.stack([code & 15, code >> 4], dim=1).flatten()
    return code, scale.view(torch.uint8).flatten()


@pytest.mark.parametrize("mode, option", [("FLOOR", ""), ("RCEIL", "+rceil")])
@pytest.mark.parametrize("name", ELEMENTS)
def test_codes_and_exponents_are_those_of_torchao(name: str, mode: str, option: str) -> None:
    x = inputs()
    wanted_codes, wanted_scales = torchao_planes(x, name, mode)
    codes, scales = planes(name + option, x)
    # torchao gives a block of zeros whatever exponent its rule yields; its codes are zero either way
    live = (x.view(-1, BLOCK) != 0).any(dim=1)
    assert torch.equal(scales[live], wanted_scales[live])
    assert torch.equal(codes, wanted_codes)


@pytest.mark.parametrize("name", ELEMENTS)
def test_values_are_those_of_gfloat(name: str) -> None:
    info = {"mxfp8": format_info_mxfp8_e4m3, "mxfp6": format_info_mxfp6_e2m3, "mxfp4": format_info_mxfp4_e2m1}[name]
    codec = nc.codec(name)
    scale = log_uniform(60, -30, 30, seed=3)
    for number, size in enumerate(scale.tolist()):
        x = normal(BLOCK, seed=number) * size
        top = x.abs().max()
        # gfloat does not saturate: keep to blocks whose largest value fits
        fits = float(top / 2.0 ** (torch.frexp(top).exponent - 1)) * 2**codec.plan.top_exponent <= codec.plan.format.max  # type: ignore[attr-defined]
        if not fits:
            continue
        wanted = gfloat.quantize_block(info, x.double().numpy(), gfloat.compute_scale_amax)
        assert codec.decode(codec.encode(x), BLOCK).tolist() == wanted.tolist()


def test_the_exponent_of_the_floor_rule_is_that_of_the_specification() -> None:
    """2 ** (floor(log2 absmax) - floor(log2 largest element)), as one byte with bias 127."""
    for name, largest_exponent in (("mxfp8", 8), ("mxfp6", 2), ("mxfp4", 2)):
        for top, exponent in ((1.0, 0), (1.99, 0), (2.0, 1), (0.75, -1), (1e30, 99)):
            _, scales = planes(name, torch.full((BLOCK,), top))
            assert scales.tolist() == [exponent - largest_exponent + 127]


def test_with_rceil_nothing_saturates() -> None:
    x = normal(32 * 1000) * log_uniform(1000, -20, 20).repeat_interleave(32)
    for name in ELEMENTS:
        assert nc.error_report(x, f"{name}+rceil").saturated == 0
        assert nc.error_report(x, name).saturated > 0


def nvfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Codes, block scales and tensor scale in float32 numpy, rounded by ml_dtypes."""
    one, largest = np.float32(1), np.float32(448)
    x_NB = x.reshape(-1, 16)
    top_N = np.abs(x_NB).max(axis=1)
    tensor_scale = top_N.max() / np.float32(6 * 448)
    wanted_N = (top_N / np.float32(6)) * (one / tensor_scale)
    block_N = np.clip(wanted_N, np.float32(2.0**-9), largest).astype(ml_dtypes.float8_e4m3fn)
    step_N = block_N.astype(np.float32) * tensor_scale
    t_NB = x_NB * (one / step_N)[:, None]
    return t_NB.astype(ml_dtypes.float4_e2m1fn), block_N, tensor_scale


@pytest.mark.parametrize("seed", range(5))
def test_nvfp4_is_its_definition(seed: int) -> None:
    x = normal(16 * 300, seed=seed) * log_uniform(300, -6, 3, seed=seed).repeat_interleave(16)
    x[::17] = 0
    codec = nc.codec("nvfp4")
    wire = codec.encode(x)
    codes, blocks, tensor_scale = nvfp4(x.numpy())
    n = len(x)
    assert np.array_equal(unpacked(wire[: n // 2], 4, n).numpy(), codes.view(np.uint8).reshape(-1))
    assert np.array_equal(wire[n // 2 : n // 2 + n // 16].numpy(), blocks.view(np.uint8))
    assert wire[-4:].clone().view(torch.float32).item() == tensor_scale
    value = codes.astype(np.float32) * (blocks.astype(np.float32) * tensor_scale)[:, None]
    assert np.array_equal(codec.decode(wire, n).numpy(), value.reshape(-1))


def test_nvfp4_is_nearest_in_float64() -> None:
    x = normal(16 * 300, seed=9)
    y = nc.codec("nvfp4").decode(nc.codec("nvfp4").encode(x), len(x)).double()
    _, blocks, tensor_scale = nvfp4(x.numpy())
    step = torch.from_numpy(blocks.astype(np.float64) * float(tensor_scale)).repeat_interleave(16)
    levels = nc.format("e2m1fn").grid
    best = (x.double()[:, None] - levels * step[:, None]).abs().amin(dim=1)
    assert bool(((x.double() - y).abs() <= best + step * 1e-6).all())


def test_the_largest_block_scale_of_nvfp4_is_the_largest_e4m3_number() -> None:
    x = normal(1600)
    wire = nc.codec("nvfp4").encode(x)
    scales = nc.format("e4m3fn").values[wire[800:900].long()]
    assert scales.max() == 448


def test_a_weak_block_of_nvfp4_keeps_something() -> None:
    """A block of which the nearest block scale would be zero has the smallest one."""
    x = torch.ones(32)
    x[16:] = 2.0**-20
    wire = nc.codec("nvfp4").encode(x)
    assert nc.format("e4m3fn").values[int(wire[17])] == 2.0**-9
    assert bool((nc.codec("nvfp4").decode(wire, 32) > 0).all())
