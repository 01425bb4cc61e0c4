"""One NaN, one Inf and one 3.4e38 among 4096 values: what comes back, codec by codec."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from narrowcast.codecs import Law, all_specs
from narrowcast.codecs import codec as codec_named

VALUES = 4096
PLACES = {"nan": 100, "inf": 1700, "huge": 3300}
"""Far enough apart to lie in different blocks of most codecs."""
HUGE = 3.4e38


@dataclass(frozen=True)
class Row:
    """What came back for each, how many other values turned non-finite, and what the codec is excused from."""

    codec: str
    nan: str
    inf: str
    huge: str
    others_lost: int
    kept: bool
    exempt: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def _written(value: float) -> str:
    return f"{value:.4g}"


def _input(*names: str) -> torch.Tensor:
    x = torch.randn(VALUES, generator=torch.Generator().manual_seed(0))
    for name in names:
        x[PLACES[name]] = {"nan": math.nan, "inf": math.inf, "huge": HUGE}[name]
    return x


def row(spec: str) -> Row:
    """The huge value is tried by itself, too: in a block with a NaN it may be lost with the block."""
    codec = codec_named(spec)
    back = codec.decode(codec.encode(_input("nan", "inf", "huge")), VALUES)
    alone = codec.decode(codec.encode(_input("huge")), VALUES)
    nan, inf = float(back[PLACES["nan"]]), float(back[PLACES["inf"]])
    excused = {law: why for law, why in codec.exemptions.items() if law in (Law.NONFINITE, Law.FINITE)}
    nonfinite_kept = Law.NONFINITE in excused or not (math.isfinite(nan) or math.isfinite(inf))
    finite_kept = Law.FINITE in excused or bool(alone.isfinite().all())
    return Row(
        str(codec),
        _written(nan),
        _written(inf),
        _written(float(alone[PLACES["huge"]])),
        others_lost=int((~back.isfinite()).sum()) - sum(not math.isfinite(value) for value in (nan, inf)),
        kept=nonfinite_kept and finite_kept,
        exempt="; ".join(f"{law} ({why})" for law, why in excused.items()),
    )


def run() -> Iterator[Row]:
    return (row(spec) for spec in all_specs())
