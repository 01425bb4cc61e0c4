"""A new option that changes what a codec encodes is one file and one line: this file, and TRANSFORMS.append."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from laws.laws import LAWS, exempt
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import Codec, all_specs, registry, spec
from narrowcast.codecs.spec import Spec
from narrowcast.codecs.transformed import Transformed, wishes_of
from narrowcast.kernels import Transform


@dataclass(frozen=True)
class Shift(Transform):
    """Each block begins `by` values later, the first ones last. Side plane: one byte a block, `by`."""

    name: ClassVar[str] = "shift"
    size: int
    by: int

    @property
    def block(self) -> int:
        return self.size

    def count(self, n: int) -> int:
        return -(-n // self.size) * self.size

    def side_bytes(self, n: int) -> int:
        return -(-n // self.size)

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        side.fill_(self.by)
        filled = torch.nn.functional.pad(x, (0, -len(x) % self.size)).view(-1, self.size)
        return filled.roll(-self.by, dims=1).flatten()

    def inverse(self, kept: Tensor, side: Tensor, n: int) -> Tensor:
        return kept.view(-1, self.size).roll(self.by, dims=1).flatten()[:n]


@dataclass(frozen=True)
class Shifted(Transformed):
    """`FORMAT/BLOCK+shiftN`."""

    by: int = 1

    option: ClassVar[str] = "shift"
    examples: ClassVar[tuple[str, ...]] = ("int4/64+shift3", "int8/32+shift1+sr+ef")

    @classmethod
    def from_inner(cls, spec: Spec, inner: Codec) -> Shifted:
        return cls(**wishes_of(spec), inner=inner, by=spec.numbers["shift"])

    @property
    def option_text(self) -> str:
        return f"shift{self.by}"

    @property
    def transform(self) -> Shift:
        return Shift(self.inner.block, self.by)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    spec.declare("shift", "each block begins that many values later", range(1, 16), example=2, transforms=True)
    registry.TRANSFORMS.append(Shifted)
    yield
    registry.TRANSFORMS.remove(Shifted)
    del spec.OPTIONS["shift"]
    registry._from_text.cache_clear()


def test_it_is_found_listed_and_spelled() -> None:
    assert nc.codec("int4/64+shift3").inner == nc.codec("int4/64")
    assert set(Shifted.examples) <= set(all_specs())
    assert str(nc.codec("int8/64+ef+shift3+sr")) == "int8/64+shift3+sr+ef"
    assert nc.codec("int4/64+shift3+ef").feedback
    assert not nc.codec("int4/64+shift3+ef").inner.feedback
    assert nc.codec("mxfp4+shift3").spec == "mxfp4+shift3"


WRONG = {
    "int4/64+shift": "+shift needs a number, for example +shift2",
    "int4/64+shift16": "+shift takes a number from 1 to 15, got 16",
    "int4/64+shift0": "got 0",
    "int4/64+shift03": "got 03",
    "int4/64+shift3+shift4": "written twice",
    "int4/64+shift٣": "unknown option",
    "int4/64+sr8": "+sr takes no number; leave out 8",
    "int4/64+l22": "unknown option +l22",
    "int4/64+shift3+l2": "+l2 does not go with int4",
    "int4/64+shift3+ef+diff": "leave out",
    "itn4/64+shift3": "nearest: int4",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_one_is_told_why(text: str) -> None:
    with pytest.raises(ValueError, match=WRONG[text].replace("+", r"\+")) as caught:
        nc.codec(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("text", Shifted.examples)
def test_it_obeys_every_law(law: str, text: str) -> None:
    codec = nc.codec(text)
    if not exempt(codec, law):
        LAWS[law](codec)


def test_reports_and_feedback_work_with_it_and_it_says_why_it_is_slow() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert nc.error_report(x, "int8/32+shift3").relative_error == nc.error_report(x, "int8/32").relative_error
    feedback = nc.ErrorFeedback(nc.codec("int4/64+shift3+ef"))
    sent = nc.codec("int4/64+shift3").decode(feedback.encode(x), 100)
    assert feedback.residual is not None
    assert torch.allclose(sent + feedback.residual, x, rtol=0, atol=1e-6)
    assert {choice.why for choice in nc.codec("int4/64+shift3").explain() if choice.op == "encode"} == {
        "+shift is in the reference only"
    }
