"""Many messages of one tensor at once are those that each part has alone."""

from __future__ import annotations

import pytest
import torch
from each import each
from laws.inputs import hard_values, normal
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import all_specs
from narrowcast.collectives.segments import Coder, Range, take
from narrowcast.kernels import Feedback, Finish, Noise, aligned_rows, ops

WORLD = 4
NOISE = Noise(5, 6)


def cuts(coder: Coder) -> list[list[Range]]:
    """Equal parts, unequal ones, a few that are equal, and some that are empty."""
    step, n = coder.align, coder.numel
    return [
        coder.shards(WORLD),
        [(0, step), (step, n), (n, n)],
        [(0, step), (step, 2 * step), (2 * step, 3 * step), (3 * step, n)],
        [(0, step), (2 * step, 3 * step), (4 * step, 5 * step), (5 * step, 6 * step)],
    ]


@pytest.mark.parametrize("numel", [4 * 512 * 3, 4 * 512 * 3 + 7, 5008])
@each("spec", all_specs())
def test_parts_at_once_are_parts_one_by_one(spec: str, numel: int) -> None:
    codec = nc.codec(spec)
    coder = Coder(codec, [numel - 100, 100], torch.float32)
    x = hard_values(codec.block or 256, numel)
    scales = coder.scales(x)
    for parts in cuts(coder):
        if any(high < low or high > numel for low, high in parts):
            continue
        residual = 0.01 * normal(numel, 3)
        found, wanted = (aligned_rows(len(parts), max(map(coder.nbytes, parts))).fill_(7) for _ in range(2))
        kept, left = Feedback(residual.clone()), Feedback(residual.clone())
        coder.encode_parts(x, parts, found, NOISE, scales, kept)
        for row, part in zip(wanted, parts, strict=True):
            coder.encode(take(x, part), part, row[: coder.nbytes(part)], NOISE, scales, left.part(slice(*part)))
        assert torch.equal(found, wanted)
        assert torch.equal(kept.residual, left.residual)
        assert torch.equal(decoded(coder, found, parts), decoded_one_by_one(coder, found, parts))


def decoded(coder: Coder, rows: Tensor, parts: list[Range]) -> Tensor:
    out = torch.zeros(coder.numel)
    coder.decode_parts(rows, parts, out)
    return out.view(torch.int32)


def decoded_one_by_one(coder: Coder, rows: Tensor, parts: list[Range]) -> Tensor:
    out = torch.zeros(coder.numel)
    for row, part in zip(rows, parts, strict=True):
        coder.decode(row[: coder.nbytes(part)], part, take(out, part))
    return out.view(torch.int32)


def test_equal_parts_side_by_side_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    for name in ("encode", "encode_rows", "decode", "decode_rows"):
        op = getattr(ops, name)
        monkeypatch.setattr(
            ops, name, lambda plan, x, *args, name=name, op=op: (calls.append((name, x.shape[0])), op(plan, x, *args))
        )
    coder = Coder(nc.codec("int8/256"), [5 * 256], torch.float32)
    x, rows = normal(5 * 256), aligned_rows(4, coder.nbytes((0, 512)))
    parts = [(0, 256), (256, 512), (512, 768), (768, 1280)]
    coder.encode_parts(x, parts, rows, NOISE)
    coder.decode_parts(rows, parts, x)
    last = coder.nbytes((0, 512))
    assert calls == [("encode_rows", 768), ("encode", 512), ("decode_rows", 3), ("decode", last)]


@pytest.mark.parametrize("spec", ["int8/256", "int8", "bf16", "nvfp4"])
def test_a_sum_of_messages_is_decode_and_add(spec: str) -> None:
    coder = Coder(nc.codec(spec), [300, 500], torch.float32)
    part, finish = (100, 700), Finish(3.0)
    rows, out = aligned_rows(WORLD, coder.nbytes(part)), torch.empty(600)
    wanted = torch.zeros(600)
    for rank, row in enumerate(rows):
        coder.encode(normal(600, rank), part, row, NOISE)
        coder.decode(row, part, wanted, accumulate=rank > 0)
    coder.sum(rows, part, finish, out)
    assert torch.equal(out, finish.apply(wanted))
