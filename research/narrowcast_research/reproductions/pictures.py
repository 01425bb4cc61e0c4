"""Pictures for reproductions: normalised, on the device, with the usual random crops and flips made there."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from narrowcast import data
from narrowcast.data import Dataset
from narrowcast_research.reproductions.base import Options

PAD, CUT = 4, 8


def pictures(name: str, options: Options, *, channels: int | None = None) -> Dataset:
    """A data set as floats on the device; the digits that come with narrowcast where the run is a quick one."""
    return _loaded("digits" if options.quick else name, str(data.folder(options.root)), options.device, channels)


@lru_cache(maxsize=1)
def _loaded(name: str, root: str, device: str, channels: int | None) -> Dataset:
    """Kept for the next cell: to read and normalise CIFAR-10 takes seconds."""
    found = data.load(name, root).normalised(device)
    if channels is not None and channels != found.x_train.shape[1]:
        found = replace(found, x_train=_repeat(found.x_train, channels), x_test=_repeat(found.x_test, channels))
    return found


def _repeat(x: Tensor, channels: int) -> Tensor:
    return x.expand(-1, channels, -1, -1).contiguous()


def crop_flip(x: Tensor, generator: torch.Generator, *, cut: int = 0) -> Tensor:
    """Shift by up to four pixels (mirrored borders), flip half of them, and blank a square; all on the device."""
    count, _, height, width = x.shape
    pad = min(PAD, height - 1, width - 1)
    padded = torch.nn.functional.pad(x, (pad, pad, pad, pad), mode="reflect")
    draw = _Draw(count, x.device, generator)
    rows = draw.below(2 * pad + 1).view(-1, 1) + torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device).expand(count, -1)
    columns = torch.where(draw.below(2).view(-1, 1) == 1, width - 1 - columns, columns)
    columns = columns + draw.below(2 * pad + 1).view(-1, 1)
    each = torch.arange(count, device=x.device)
    # the pixels of all channels at once: N x H x W x C, which is what convolutions on a GPU like best
    found = padded.permute(0, 2, 3, 1)[each.view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)
    return found if not cut else found.masked_fill(_square(count, height, width, cut, draw), 0.0)


def crop_flip_cut(x: Tensor, generator: torch.Generator) -> Tensor:
    """As `crop_flip`, and eight by eight pixels are blanked."""
    return crop_flip(x, generator, cut=min(CUT, x.shape[-1] // 4))


def _square(count: int, height: int, width: int, cut: int, draw: _Draw) -> Tensor:
    top, left = draw.below(height - cut + 1).view(-1, 1), draw.below(width - cut + 1).view(-1, 1)
    row, column = (torch.arange(size, device=top.device) for size in (height, width))
    inside_rows, inside_columns = (row >= top) & (row < top + cut), (column >= left) & (column < left + cut)
    return (inside_rows.unsqueeze(2) & inside_columns.unsqueeze(1)).unsqueeze(1)


class _Draw:
    """One random whole number for each picture."""

    def __init__(self, count: int, device: torch.device, generator: torch.Generator) -> None:
        self._count, self._device, self._generator = count, device, generator

    def below(self, limit: int) -> Tensor:
        return torch.randint(limit, (self._count,), device=self._device, generator=self._generator)
