"""One string names a codec: strict, invertible, and an error says what is wrong, what was given and what to do."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from each import each
from hypothesis import given
from hypothesis import strategies as st

import narrowcast as nc
from narrowcast.codecs import all_specs
from narrowcast.codecs.spec import OPTIONS, Option, parse

DESIGN = [
    *(
        "as-is",
        "fp32",
        "bf16",
        "fp16",
        "int8/256",
        "int4/128+sr+ef",
        "e4m3fn/128",
        "e5m2",
        "e3m0",
        "e4m3@1",
        "e5m2@1024",
    ),
    *("e5m2+aps", "dtree8", "stree8@1000", "mantissa8@1000", "linear8", "dynamic8/4096", "uint8/512", "mxfp8", "mxfp6"),
    *(
        "mxfp4",
        "nvfp4",
        "nf4/64",
        "posit8.1",
        "fixed4.4@1",
        "qsgd4/512",
        "qsgd4/512+l2",
        "onebit/64+ef",
        "sign/4096+ef",
    ),
    "ternary/512",
]
"""Every spec of the table in design.md."""


@each("spec", DESIGN)
def test_every_spec_of_the_design_is_spelled_as_it_is_read(spec: str) -> None:
    assert str(nc.codec(spec)) == spec


def test_every_spec_of_the_design_is_listed_or_a_listed_one_with_an_option() -> None:
    assert {spec.removesuffix("+ef") for spec in DESIGN} <= {spec.removesuffix("+ef") for spec in all_specs()}


@each("spec", all_specs())
def test_the_listed_spec_reads_back_as_the_same_codec(spec: str) -> None:
    codec = nc.codec(spec)
    assert str(codec) == spec
    assert nc.codec(str(codec)) == codec
    assert nc.codec(codec) is codec


def test_specs_are_listed_once() -> None:
    assert len(set(all_specs())) == len(all_specs())


@each("spec", all_specs())
def test_a_codec_survives_pickling_and_copying(spec: str) -> None:
    codec = nc.codec(spec)
    for twin in (pickle.loads(pickle.dumps(codec)), copy.deepcopy(codec)):
        assert twin == codec
        assert hash(twin) == hash(codec)
        assert str(twin) == spec


HEADS = ["int8", "int3", "e4m3fn", "e5m2", "e3m0", "nf4", "dtree8", "posit8.1", "fixed4.4", "qsgd4", "ternary", "uint4"]
BLOCKS = st.one_of(st.just(""), st.integers(1, 2**16).map(lambda n: f"/{16 * n}"))
SCALES = st.floats(1e-20, 1e20, allow_nan=False).map(lambda v: "@" + repr(v).replace("e+", "e"))
CHOSEN = st.lists(st.sampled_from(list(OPTIONS)), unique=True, max_size=3).map(
    lambda names: "".join(f"+{n}" for n in names)
)


@given(st.sampled_from([*HEADS, "onebit", "sign", "mxfp4", "nvfp4", "bf16"]), st.one_of(BLOCKS, SCALES), CHOSEN)
def test_whatever_is_read_is_written_so_that_it_reads_back(head: str, middle: str, options: str) -> None:
    spec = head + middle + options
    codec = read(spec)
    if codec is None:
        return
    text = str(codec)
    assert nc.codec(text) == codec
    assert str(nc.codec(text)) == text
    assert parse(text).scale == parse(spec).scale


def read(spec: str) -> nc.Codec | None:
    """The codec, or None where the spec is refused, with a message that names it."""
    try:
        return nc.codec(spec)
    except ValueError as error:
        if repr(spec) not in str(error):
            raise
        return None


@given(st.text(max_size=20))
def test_any_text_is_a_codec_or_a_value_error(text: str) -> None:
    codec = read(text)
    assert codec is None or nc.codec(str(codec)) == codec


def test_the_order_of_options_does_not_matter() -> None:
    assert nc.codec("int4/128+ef+sr") == nc.codec("int4/128+sr+ef")
    assert str(nc.codec("int4/128+ef+sr")) == "int4/128+sr+ef"


def test_an_mx_type_is_its_format_with_blocks_of_32_and_exponents() -> None:
    for name, element in (("mxfp8", "e4m3fn"), ("mxfp6", "e2m3fn"), ("mxfp4", "e2m1fn")):
        assert nc.codec(name) == nc.codec(f"{element}/32+se8m0")
        assert str(nc.codec(f"{element}/32+se8m0")) == name
        assert str(nc.codec(f"{name}+rceil")) == f"{name}+rceil"


WRONG = {
    "": ("write FORMAT[/BLOCK | @SCALE][+OPTION]", "for example"),
    "int8/": ("BLOCK is a multiple of 16", "got ''"),
    "int8/100": ("BLOCK is a multiple of 16 up to 1048576", "got '100'"),
    "int8/0": ("BLOCK is a multiple of 16", "got '0'"),
    "int8/-16": ("BLOCK is a multiple of 16", "got '-16'"),
    "int8/016": ("BLOCK is a multiple of 16", "got '016'"),
    "int8/2097152": ("up to 1048576", "got '2097152'"),
    "int8/256/256": ("write FORMAT",),
    "int8@1@2": ("write FORMAT",),
    "int8/64@2": ("write FORMAT",),
    "INT8/256": ("write FORMAT", "for example int4/128+sr"),
    " int8": ("write FORMAT",),
    "int8/256 ": ("BLOCK is a multiple of 16", "got '256 '"),
    "int8@0": ("@SCALE is a positive number", "got '0'"),
    "int8@-1": ("@SCALE is a positive number", "got '-1'"),
    "int8@1e+3": ("unknown option +3",),
    "int8@inf": ("@SCALE is a positive number", "got 'inf'"),
    "int8@nan": ("@SCALE is a positive number", "got 'nan'"),
    "int8@": ("@SCALE is a positive number", "got ''"),
    "int8@1e400": ("@SCALE is a positive number", "got '1e400'"),
    "e5m2@1e38": ("leaves float32", "take a scale nearer to 1"),
    "int8@1e-40": ("leaves float32", "take a scale nearer to 1"),
    "int8/256+": ("unknown option +", "+sr, +ef"),
    "int8/256+fast": ("unknown option +fast", "+sr, +ef, +aps"),
    "int8/256+sr+sr": ("written twice", "write each once"),
    "int8/256+aps": ("+aps does not go with int8", "options that do: +sr, +ef, +sbf16"),
    "int8/256+l2": ("+l2 does not go with int8",),
    "e4m3fn/128+aps": ("+aps has one scale for the tensor", "leave out /BLOCK"),
    "e4m3@1+aps": ("+aps has one scale for the tensor", "@SCALE"),
    "e4m3fn+cpd": ("+cpd does not go with e4m3fn", "options that do"),
    "e4m3+sr+cpd": ("+cpd rounds to nearest", "leave out +sr or +cpd"),
    "e4m3fn+sr+cpd": ("+cpd does not go with e4m3fn",),
    "int8/64+sbf16+se8m0": ("choose one of +sbf16, +se8m0 and +aps",),
    "int8/64+rceil": ("+rceil is a rule for power-of-two scales", "add +se8m0"),
    "int8@1+se8m0": ("+se8m0 does not go with int8",),
    "qsgd4/512+sr": ("+sr does not go with qsgd4", "options that do: +ef"),
    "qsgd4+l2": ("+l2 does not go with qsgd4",),
    "ternary/512+l2": ("+l2 does not go with ternary",),
    "qsgd4/512+l2+se8m0": ("+se8m0 does not go with qsgd4",),
    "onebit": ("onebit needs a block size", "for example onebit/64"),
    "sign@1": ("sign takes no @SCALE; leave it out",),
    "onebit/64+sr": ("+sr does not go with onebit", "options that do: +ef"),
    "as-is/64": ("as-is takes no /BLOCK; leave it out",),
    "as-is+ef": ("+ef does not go with as-is", "options that do: none"),
    "bf16+sr": ("+sr does not go with bf16", "options that do: +ef"),
    "mxfp8/64": ("mxfp8 takes no /BLOCK; leave it out",),
    "mxfp8@1": ("mxfp8 takes no @SCALE; leave it out",),
    "nvfp4/16": ("nvfp4 takes no /BLOCK; leave it out",),
    "nvfp4+rceil": ("+rceil does not go with nvfp4", "options that do: +sr, +ef"),
    "uint8@1": ("uint8 takes no @SCALE; leave it out",),
    "uint8/64+sbf16": ("+sbf16 does not go with uint8",),
    "e6m9/64": ("e6m9 has 16 bits", "up to 8", "use it with round_to"),
    "e8m7": ("e8m7 is called bf16 here", "write bf16"),
    "e5m10+ef": ("e5m10 is called fp16 here", "write fp16"),
    "e2m1b140fn/64": ("ends at 8.60958e-42, and no float32 scale brings that to 1",),
    "e2m1b140fn+aps": ("no float32 scale brings that to 1",),
    "int8/1٦": ("BLOCK is a multiple of 16", "got '1٦'"),
    "int8@1٦": ("@SCALE is a positive number", "got '1٦'"),
    "posit16.1": ("posit16.1 has 16 bits", "round_to"),
    "e8m0fnu/64": ("e8m0fnu is a type for scales", "+se8m0"),
    "int9/64": ("int takes 2 to 8 bits", "got 9"),
    "e9m2/64": ("X=9", "X from 2 to 8"),
    "itn8/256": ("unknown format 'itn8'", "nearest: int8", "`narrowcast codecs` lists them all"),
    "mxfp9": ("unknown format 'mxfp9'", "nearest: mxfp"),
    "sign/64+spike2": ("whose scale follows from the largest value", "for example int4/128"),
    "uint8/512+spike2": ("whose scale follows from the largest value", "for example int4/128"),
    "qsgd4/512+spike2+l2": ("whose scale follows from the largest value",),
    "mxfp4+top32": ("+top needs a block size", "for example mxfp4/4096+top32"),
    "int8+mstop16": ("+mstop needs a block size", "for example int8/4096+mstop16"),
    "int8@1+top16": ("write /BLOCK instead of @SCALE", "for example int8/4096+top16"),
    "e5m2+aps+top16": ("write /BLOCK instead of @SCALE and +aps", "for example e5m2/4096+top16"),
    "nvfp4+top17": ("+top needs a block size", "for example int2/4096+top64"),
    "int8/256+top300": ("keeps less than the block; give a number below 256", "for example int8/4096+top64"),
    "mxfp4/64+top16": ("K is a multiple of 32, which share a scale", "got 16"),
    "int4/64+top9": ("K is a multiple of 16, so that each block ends on a byte", "got 9"),
    "zzz": ("unknown format 'zzz'", "`narrowcast codecs`"),
    "bf17": ("unknown format 'bf17'", "nearest: bf16"),
}


@each("spec", WRONG)
def test_a_wrong_spec_is_told_what_is_wrong_what_was_given_and_what_to_do(spec: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is checked below, by fragments
        nc.codec(spec)
    message = str(caught.value)
    assert repr(spec) in message or repr(spec.partition("/")[0]) in message
    for fragment in WRONG[spec]:
        assert fragment in message


@each("spec", WRONG)
def test_what_an_error_gives_as_an_example_is_a_spec(spec: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  whatever it says
        nc.codec(spec)
    for example in re.findall(r"for example ([^\s;,]+)", str(caught.value)):
        nc.codec(example.rstrip("."))


HEADS = sorted({re.split(r"[/@+]", spec)[0] for spec in all_specs()})
TRANSFORMS = [option for option in OPTIONS.values() if option.transforms]


def corrected(spec: str, message: str) -> str:
    """What a reader writes who does as the message says."""
    if examples := re.findall(r"for example ([^\s;,]+)", message):
        return examples[0]
    if multiple := re.search(r"K is a multiple of (\d+)", message):
        return re.sub(r"(top)\d+", rf"\g<1>{multiple[1]}", spec)
    if other := re.search(r"; (?:take|write) ([a-z0-9]+)(?: or [a-z0-9]+| instead of [a-z-]+)?$", message):
        return re.sub(r"^[^/@+]+", other[1], spec)
    if larger := re.search(r"(?:give a BLOCK of up to|a power of two from) (\d+)", message):
        return re.sub(r"/\d+", f"/{larger[1]}", spec)
    if re.search(r"takes no /BLOCK; leave it out$", message):
        return re.sub(r"/\d+", "", spec)
    if re.search(r"takes no @SCALE; leave it out$", message):
        return re.sub(r"@[\d.]+", "", spec)
    raise AssertionError(f"{spec}: no advice in {message!r}")


@pytest.mark.parametrize("option", TRANSFORMS, ids=lambda option: option.name)
def test_who_follows_the_advice_of_an_error_has_a_codec(option: Option) -> None:
    """Of each format with each option that transforms, whatever is written between them."""
    written = f"+{option.name}{option.example if option.number else ''}"
    for spec in (head + middle + written for head in HEADS for middle in ("", "/16", "/128", "/8192", "@1")):
        text = spec
        for _ in range(4):
            try:
                codec = nc.codec(text)
            except ValueError as error:
                text = corrected(text, str(error))
            else:
                break
        else:
            pytest.fail(f"{spec}: after four corrections {text} is none yet")
        assert option.name in str(codec), (spec, text)


@pytest.mark.parametrize("value", [None, 8, b"int8", ["int8"]])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="give a spec such as 'int8/256', got"):
        nc.codec(value)  # type: ignore[arg-type]


def test_bits_per_value_count_the_scales() -> None:
    wanted = {
        "int8/256": 8 + 32 / 256,
        "int4/128+sr+ef": 4.25,
        "int8/128+sbf16": 8 + 16 / 128,
        "mxfp8": 8.25,
        "mxfp6": 6.25,
        "mxfp4": 4.25,
        "nvfp4": 4.5,
        "onebit/64": 2.0,
        "sign/4096": 1 + 32 / 4096,
        "uint8/512": 8.125,
        "qsgd2/128": 2.25,
        "qsgd4/512": 4.0625,
        "int8": 8.0,
        "e4m3@1": 8.0,
        "bf16": 16.0,
    }
    assert {spec: nc.codec(spec).bits_per_value for spec in wanted} == wanted


LAYOUT = {
    # codes, padding to 4 bytes, scales
    ("int8/256", 257): 257 + 3 + 2 * 4,
    ("int4/128", 3): 2 + 2 + 4,
    ("int3/64", 65): 25 + 3 + 2 * 4,
    ("int8/128+sbf16", 129): 129 + 3 + 2 * 2,
    ("mxfp4", 33): 17 + 3 + 2,
    ("nvfp4", 17): 9 + 3 + 2 + 2 + 4,
    ("onebit/64", 65): 9 + 3 + 2 * 8,
    ("sign/64", 1): 1 + 3 + 4,
    ("uint8/512", 513): 513 + 3 + 2 * 8,
    ("e4m3@1", 13): 13,
    ("e2m1fn@1", 13): 7,
    ("fp16", 13): 26,
}


@each("spec, n", LAYOUT)
def test_the_size_of_a_wire_is_that_of_its_planes(spec: str, n: int) -> None:
    assert nc.codec(spec).nbytes(n) == LAYOUT[spec, n]
