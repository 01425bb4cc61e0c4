"""The laws of design.md, over every registered codec. Excused is only who says so, and only if it is true."""

from __future__ import annotations

import pytest
import torch
from each import each
from laws.laws import LAWS, exempt

import narrowcast as nc
from narrowcast.codecs import Law, all_specs
from narrowcast.codecs.scaled import every_small_format
from narrowcast.formats import all_formats

EXEMPTIBLE = {value for name, value in vars(Law).items() if name.isupper()}
# options that the examples of the registry do not combine with every format: each format with one of them, in the long
# form with every one
STORES = ("sbf16", "se8m0", "se8m0+rceil")
STORED = [f"{spec}+{STORES[i % 3]}" for i, spec in enumerate(every_small_format())]
EVERY_STORED = [f"{spec}+{option}" for spec in every_small_format() for option in STORES]
MORE = [
    *STORED,
    *("e2m1fn@0.3", "int8@1", "int4@0.1+sr", "posit8.1@3", "dtree8@1", "e5m2@1e-3", "linear8@2", "qsgd4@1", "nf4@1"),
    *("e3m0+aps", "e4m3fn+aps", "e4m3fn+sr+aps", "e2m1fn+aps", "e5m2+cpd", "e3m0/64+cpd", "e5m2/64+cpd", "e4m3@7+cpd"),
    *("int8/16", "int2/1024", "e4m3fn/4096", "uint8/16", "uint2/48", "onebit/48", "sign/16", "qsgd4/64+l2+sbf16"),
    *(
        "e7m0/64",
        "e6m0fnuz/48",
        "e2m0/64",
        "e2m0fnuz/64",
        "e1m1fn/64",
        "e5m1/64",
        "e1m6f/64",
        "int8+sbf16",
        "e4m3b128fn/64",
    ),
]
# noise under power-of-two scales may lift the largest value into the next binade, where the format reaches that far
LIFTED = ["e6m1/64+sr+se8m0", "fixed4.4/64+sr+se8m0", "fixed1.7/16+sr+se8m0", "fixed1.1/16+sr+se8m0"]
MORE += [*LIFTED, *(f"{spec}+rceil" for spec in LIFTED), "int4/64+sr+se8m0", "e4m3/64+sr+se8m0"]
SPECS = list(dict.fromkeys([*all_specs(), *MORE]))
LONG = [pytest.param(spec, marks=pytest.mark.slow) for spec in EVERY_STORED if spec not in SPECS]
EXCUSED = [spec for spec in [*all_specs(), *LIFTED] if nc.codec(spec).exemptions.keys() & LAWS.keys()]


def broken(laws: list[str], spec: str) -> dict[str, str]:
    """Those of the laws that the codec breaks, each with the smallest case."""
    found = {}
    for law in laws:
        try:
            LAWS[law](nc.codec(spec))
        except AssertionError as error:
            found[law] = str(error)
    return found


@pytest.mark.parametrize("spec", [*SPECS, *LONG])
def test_laws(spec: str) -> None:
    assert broken([law for law in LAWS if not exempt(nc.codec(spec), law)], spec) == {}


@pytest.mark.parametrize("spec", EXCUSED)
def test_exemptions_are_true(spec: str) -> None:
    """A codec that is excused from a law breaks it on some input: otherwise the listing would scare for nothing."""
    excused = [law for law in LAWS if exempt(nc.codec(spec), law)]
    assert list(broken(excused, spec)) == excused


@each("spec", SPECS)
def test_every_exemption_names_a_law_and_has_a_reason(spec: str) -> None:
    for law, reason in nc.codec(spec).exemptions.items():
        assert law in EXEMPTIBLE
        assert len(reason) > 10


@each("spec", SPECS)
def test_law_10_what_runs_on_a_slower_path_says_why(spec: str) -> None:
    choices = [choice for choice in nc.codec(spec).explain() if choice.device == "cpu"]
    assert {choice.op for choice in choices} >= {"encode", "decode"}
    for choice in choices:
        # casts are torch's own, and that is their fastest path
        assert choice.implementation in ("reference", "torch") or choice.implementation.startswith("native (")
        assert bool(choice.why) == (choice.implementation == "reference"), choice


TARGETS = sorted({fmt.target for fmt in all_formats() if fmt.bits <= 8 and not fmt.positive_only})


@pytest.mark.parametrize("target", TARGETS)
def test_for_every_mantissa_the_scale_of_what_comes_back_is_the_scale(target: float) -> None:
    """fl(fl(target * s) / target) == s for each s = fl(absmax / target): why fp32 scales are idempotent."""
    mantissas = (torch.arange(2**23, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    scale = mantissas / target
    again = (scale * target) / target
    wrong = (again != scale).nonzero().flatten()
    assert len(wrong) == 0, f"absmax {mantissas[wrong[0]].item()!r}"
