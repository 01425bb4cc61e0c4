"""Specs: broken ones are refused in one line that repeats them, good ones mean what `str` says."""

from __future__ import annotations

from functools import cache
from random import Random

import torch
from fuzz.base import Kind, one_line, replaced, require

from narrowcast.codecs import all_specs, codec
from narrowcast.codecs.spec import OPTIONS

PIECES = (
    *("int", "uint", "e", "m", "fn", "fnuz", "posit", "fixed", "nf4", "mxfp8", "qsgd", "onebit", "dtree8", "as-is"),
    *("/", "@", "+", "-", ".", "_", " ", "/16", "/128", "/17", "/0", "/1048592", "@1", "@0", "@-1", "@1e400", "@nan"),
    *("0", "1", "2", "4", "8", "16", "32", "99", "9" * 30, "٣", "\x00", "\n", "E4M3", "int8/256"),
    *(f"+{name}" for name in OPTIONS),
)


@cache
def _good() -> list[str]:
    return all_specs()


def make(source: Random) -> str:
    match source.randrange(4):
        case 0:
            return "".join(source.choice(PIECES) for _ in range(source.randrange(1, 6)))
        case 1:
            return source.choice(_good()) + source.choice(PIECES)
        case _:
            text = source.choice(_good())
            for _ in range(source.choice((1, 1, 2, 3))):
                text = replaced(text, source)
            return text


def check(text: str) -> None:
    try:
        found = codec(text)
    except ValueError as error:
        require(repr(text) in str(error), f"the message does not repeat the spec: {error}")
        one_line(str(error), "spec")
        return
    require(codec(str(found)) == found, f"{text!r} is written {str(found)!r}, which is another")
    wire = found.encode(torch.tensor([1.0, -2.0, 0.0]))
    require(wire.numel() == found.nbytes(3), f"{text!r}: {wire.numel()} bytes, not {found.nbytes(3)}")
    require(found.decode(wire, 3).shape == (3,), f"{text!r}: another number of values")


KIND = Kind("specs", 30, make, check)
