"""The grammar of specs: `HEAD[/BLOCK | @SCALE][+OPTION]...`. What a head and its options mean is up to each codec."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Option:
    """What may follow a plus sign."""

    name: str
    meaning: str
    number: range | None = None
    """The numbers that may follow the name; none where this is None."""
    example: int = 0
    needs_number: bool = True
    """Whether the name alone means nothing."""
    transforms: bool = False
    """Whether it changes what the rest of the spec encodes; `str(codec)` writes such options first."""

    @property
    def listing(self) -> str:
        """As lists of options show it."""
        return f"+{self.name}{self.example}" if self.number is not None and self.needs_number else f"+{self.name}"

    def check(self, written: str) -> int | None:
        """The number that is written after the name, or None where none is; ValueError where that cannot be."""
        if not written:
            if self.number is not None and self.needs_number:
                raise ValueError(f"+{self.name} needs a number, for example {self.listing}")
            return None
        if self.number is None:
            raise ValueError(f"+{self.name} takes no number; leave out {written}")
        number = int(written) if _WHOLE.fullmatch(written) else -1
        if number not in self.number:
            first, last = self.number[0], self.number[-1]
            raise ValueError(f"+{self.name} takes a number from {first} to {last}, got {written}")
        return number


_DIGITS = "0123456789"
_WHOLE = re.compile(r"[1-9][0-9]{0,8}")

OPTIONS: dict[str, Option] = {}
"""Every option. `declare` adds one: here those of several codecs, in its own file one that is a codec's own."""


def declare(
    name: str,
    meaning: str,
    number: range | None = None,
    *,
    example: int = 0,
    needs_number: bool = True,
    transforms: bool = False,
) -> str:
    """Make an option known, and return its name."""
    if name in OPTIONS:
        raise ValueError(f"option +{name} is declared twice; give it another name")
    OPTIONS[name] = Option(name, meaning, number, example, needs_number, transforms)
    return name


declare("sr", "stochastic rounding")
declare("ef", "error feedback; +ef95 keeps 95 % of it at each step", range(1, 100), example=95, needs_number=False)
declare("aps", "Auto Precision Scaling: a power-of-two scale for the tensor, agreed by all ranks")
declare("l2", "scale by the L2 norm instead of the maximum")
declare("sbf16", "scales stored as bfloat16")
declare("se8m0", "scales stored as powers of two, one byte each")
declare("rceil", "round power-of-two scales up, so that nothing saturates")
declare("cpd", "CPD's corner cases")
declare("diff", "the difference to what everybody has last decoded, for FSDP2's parameters")


def options_in_order() -> list[Option]:
    """Every option, in the order in which `str(codec)` writes them."""
    return sorted(OPTIONS.values(), key=lambda option: not option.transforms)


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
    """Names, without numbers."""
    numbers: Mapping[str, int] = field(default_factory=dict, hash=False)
    """By the name of the option that each follows."""

    def error(self, problem: str) -> ValueError:
        return ValueError(f"codec spec {self.text!r}: {problem}")

    @property
    def wishes(self) -> dict[str, Any]:
        """What every codec takes as arguments of these names."""
        kept = self.numbers.get("ef", 100)
        return {"feedback": "ef" in self.options, "kept_percent": kept, "differences": "diff" in self.options}

    def allow(self, options: Collection[str], *, block: bool = True, scale: bool = False) -> None:
        """Refuse whatever this codec has no use for. What can feed back its error can be sent as a difference."""
        known = {*options, "diff"} if "ef" in options else set(options)
        extra = sorted(self.options - known)
        if extra:
            allowed = ", ".join(option.listing for option in options_in_order() if option.name in known) or "none"
            raise self.error(f"+{extra[0]} does not go with {self.head}; options that do: {allowed}")
        if {"ef", "diff"} <= self.options:
            raise self.error("what +diff loses is in the next difference; leave out +ef or +diff")
        if self.block is not None and not block:
            raise self.error(f"{self.head} takes no /BLOCK; leave it out")
        if self.scale is not None and not scale:
            raise self.error(f"{self.head} takes no @SCALE; leave it out")

    def without(self, *options: str) -> Spec:
        """The same without some options: what is left for another codec to understand."""
        numbers = {name: number for name, number in self.numbers.items() if name not in options}
        return replace(self, options=self.options - set(options), numbers=numbers)

    @property
    def written_options(self) -> list[str]:
        """As `write` takes them."""
        return [f"{name}{self.numbers.get(name, '')}" for name in self.options]

    def need_block(self) -> int:
        if self.block is None:
            rest = self.text.removeprefix(self.head) if self.scale is None else ""
            raise self.error(f"{self.head} needs a block size, for example {self.head}/64{rest}")
        return self.block


def parse(text: str) -> Spec:
    """Take a spec apart; an error says what is wrong and what is allowed."""
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ValueError(f"codec spec {text!r}: write FORMAT[/BLOCK | @SCALE][+OPTION]..., for example int4/128+sr")
    numbers: dict[str, int | None] = {}
    for written in match["options"].split("+")[1:]:
        try:
            name, number = _option(written)
        except ValueError as error:
            raise ValueError(f"codec spec {text!r}: {error}") from None
        if name in numbers:
            raise ValueError(f"codec spec {text!r}: an option is written twice; write each once")
        numbers[name] = number
    given = {name: number for name, number in numbers.items() if number is not None}
    block, scale = _block(text, match["block"]), _scale(text, match["scale"])
    return Spec(text, match["head"], block, scale, frozenset(numbers), given)


def _option(written: str) -> tuple[str, int | None]:
    """The name and the number of an option. A name may end in digits (l2), so whole names come first."""
    name = written if written in OPTIONS else written.rstrip(_DIGITS)
    if name not in OPTIONS:
        known = ", ".join(option.listing for option in options_in_order())
        raise ValueError(f"unknown option +{repr(written)[1:-1]}; options: {known}")
    return name, OPTIONS[name].check(written[len(name) :])


def _block(text: str, written: str | None) -> int | None:
    if written is None:
        return None
    block = int(written) if _WHOLE.fullmatch(written) else 0
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
    """The inverse of `parse`: options with their numbers, in any order."""
    chosen = {_option(written)[0]: written for written in options}
    middle = f"/{block}" if block else f"@{write_number(scale)}" if scale is not None else ""
    return head + middle + "".join(f"+{chosen[one.name]}" for one in options_in_order() if one.name in chosen)
