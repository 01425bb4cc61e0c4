"""The grammar of specs: `HEAD[/BLOCK | @SCALE][+OPTION]...`. What a head and its options mean is up to each codec."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

OPTIONS = {
    "sr": "stochastic rounding",
    "ef": "error feedback",
    "aps": "Auto Precision Scaling: a power-of-two scale for the tensor, agreed by all ranks",
    "l2": "scale by the L2 norm instead of the maximum",
    "sbf16": "scales stored as bfloat16",
    "se8m0": "scales stored as powers of two, one byte each",
    "rceil": "round power-of-two scales up, so that nothing saturates",
    "cpd": "CPD's corner cases",
    "diff": "the difference to what everybody has last decoded, for FSDP2's parameters",
}
"""Every option, in the order in which `str(codec)` writes them."""

BLOCK_MULTIPLE = 16
MAX_BLOCK = 1 << 20

_SPEC = re.compile(r"(?P<head>[a-z0-9.\-]+)(?:/(?P<block>[^/@+]*)|@(?P<scale>[^/@+]*))?(?P<options>(?:\+[^+]*)*)")
_NUMBER = re.compile(r"([0-9]+(\.[0-9]+)?|\.[0-9]+)(e-?[0-9]+)?")


@dataclass(frozen=True)
class Spec:
    """A spec taken apart, not yet understood."""

    text: str
    head: str
    block: int | None
    scale: float | None
    options: frozenset[str]

    def error(self, problem: str) -> ValueError:
        return ValueError(f"codec spec {self.text!r}: {problem}")

    @property
    def wishes(self) -> dict[str, bool]:
        """What every codec takes as arguments of these names."""
        return {"feedback": "ef" in self.options, "differences": "diff" in self.options}

    def allow(self, options: Collection[str], *, block: bool = True, scale: bool = False) -> None:
        """Refuse whatever this codec has no use for. What can feed back its error can be sent as a difference."""
        known = {*options, "diff"} if "ef" in options else set(options)
        extra = sorted(self.options - known)
        if extra:
            allowed = ", ".join(f"+{name}" for name in OPTIONS if name in known) or "none"
            raise self.error(f"+{extra[0]} does not go with {self.head}; options that do: {allowed}")
        if {"ef", "diff"} <= self.options:
            raise self.error("what +diff loses is in the next difference; leave out +ef or +diff")
        if self.block is not None and not block:
            raise self.error(f"{self.head} takes no /BLOCK; leave it out")
        if self.scale is not None and not scale:
            raise self.error(f"{self.head} takes no @SCALE; leave it out")

    def need_block(self) -> int:
        if self.block is None:
            raise self.error(f"{self.head} needs a block size, for example {self.head}/64")
        return self.block


def parse(text: str) -> Spec:
    """Take a spec apart; an error says what is wrong and what is allowed."""
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ValueError(f"codec spec {text!r}: write FORMAT[/BLOCK | @SCALE][+OPTION]..., for example int4/128+sr")
    names = match["options"].split("+")[1:]
    for name in names:
        if name not in OPTIONS:
            known = ", ".join(f"+{option}" for option in OPTIONS)
            raise ValueError(f"codec spec {text!r}: unknown option +{repr(name)[1:-1]}; options: {known}")
    if len(set(names)) < len(names):
        raise ValueError(f"codec spec {text!r}: an option is written twice; write each once")
    return Spec(text, match["head"], _block(text, match["block"]), _scale(text, match["scale"]), frozenset(names))


def _block(text: str, written: str | None) -> int | None:
    if written is None:
        return None
    block = int(written) if re.fullmatch(r"[1-9][0-9]{0,8}", written) else 0
    if block % BLOCK_MULTIPLE or not 0 < block <= MAX_BLOCK:
        allowed = f"a multiple of {BLOCK_MULTIPLE} up to {MAX_BLOCK}"
        raise ValueError(f"codec spec {text!r}: BLOCK is {allowed}, got {written!r}")
    return block


def _scale(text: str, written: str | None) -> float | None:
    if written is None:
        return None
    value = float(written) if _NUMBER.fullmatch(written) else 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"codec spec {text!r}: @SCALE is a positive number such as 1, 1000 or 1e-3, got {written!r}")
    return value


def write_number(value: float) -> str:
    """The shortest text that reads back as `value`, without a plus sign."""
    text = repr(value).replace("e+", "e")
    return text.removesuffix(".0")


def write(head: str, block: int | None, scale: float | None, options: Iterable[str]) -> str:
    """The inverse of `parse`."""
    chosen = set(options)
    middle = f"/{block}" if block else f"@{write_number(scale)}" if scale is not None else ""
    return head + middle + "".join(f"+{name}" for name in OPTIONS if name in chosen)
