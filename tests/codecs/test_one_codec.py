"""A new codec is one new file and one line: this file is that file, FAMILIES.append is that line, all laws follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from laws.laws import LAWS
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import Codec, all_specs, registry
from narrowcast.codecs.spec import Spec
from narrowcast.kernels.noise import Noise


@dataclass(frozen=True)
class TopBytes(Codec):
    """The upper two bytes of each float32, the rest cut off. Wire: two bytes a value, little-endian."""

    examples: ClassVar[tuple[str, ...]] = ("topbytes",)
    heads: ClassVar[tuple[str, ...]] = ("topbytes",)

    @classmethod
    def from_spec(cls, spec: Spec) -> Codec | None:
        if spec.head != "topbytes":
            return None
        spec.allow({"ef"}, block=False)
        return cls(feedback="ef" in spec.options)

    def __str__(self) -> str:
        return "topbytes+ef" if self.feedback else "topbytes"

    @property
    def block(self) -> int:
        return 1

    @property
    def bits_per_value(self) -> float:
        return 16.0

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return 2 * n

    def _encode(self, x: Tensor, wire: Tensor, noise: Noise, scale: Tensor | None) -> None:
        wire.view(-1, 2).copy_(x.float().view(torch.uint8).view(-1, 4)[:, 2:])

    def _decode(self, wire: Tensor, n: int, out: Tensor, accumulate: bool) -> None:
        value = torch.zeros(n, 4, dtype=torch.uint8)
        value[:, 2:] = wire.view(-1, 2)
        limit = torch.finfo(out.dtype).max
        decoded = value.view(torch.float32).view(-1)
        decoded = torch.where(decoded.isfinite(), decoded.clamp(-limit, limit), decoded)
        out.copy_(out + decoded if accumulate else decoded)


@pytest.fixture
def registered() -> Iterator[None]:
    registry.FAMILIES.append(TopBytes)
    yield
    registry.FAMILIES.remove(TopBytes)
    registry._from_text.cache_clear()


def test_without_its_line_it_is_unknown() -> None:
    with pytest.raises(ValueError, match="unknown format 'topbytes'"):
        nc.codec("topbytes")


@pytest.mark.usefixtures("registered")
def test_it_is_found_listed_and_spelled() -> None:
    assert nc.codec("topbytes") == TopBytes()
    assert "topbytes" in all_specs()
    assert str(nc.codec("topbytes+ef")) == "topbytes+ef"


@pytest.mark.usefixtures("registered")
def test_no_format_may_take_its_name_and_a_wrong_name_is_told_of_it() -> None:
    with pytest.raises(ValueError, match="format name 'topbytes' is taken"):
        nc.Codebook([0.0, 1.0], name="topbytes")
    with pytest.raises(ValueError, match="nearest: topbytes"):
        nc.codec("topbites")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("law", LAWS)
def test_it_obeys_every_law(law: str) -> None:
    LAWS[law](nc.codec("topbytes"))


@pytest.mark.usefixtures("registered")
def test_reports_and_feedback_work_with_it() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert nc.error_report(x, "topbytes").snr_db > 40
    feedback = nc.ErrorFeedback(nc.codec("topbytes+ef"))
    sent = nc.codec("topbytes").decode(feedback.encode(x), 100)
    assert feedback.residual is not None
    assert torch.equal(sent + feedback.residual, x)
