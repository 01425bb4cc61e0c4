"""Files that people edit: what is written is read back, and what is wrong is named with its line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from narrowcast.predict import cluster, model
from narrowcast.predict.cluster import Cluster, CodecSpeed, CollectiveTimings, Device, Level, Loop, Overlap
from narrowcast.predict.model import Profile, TensorTime
from narrowcast.toml_file import FileError, parse_toml

TEXT = """# a comment
format = 1
name = "a \\"quoted\\" name # no comment"   # a comment
on = true
off = false
whole = -12
big = 1_000_000
small = 2.5e-3

[table]
list = [1, 2.5, "x"]   # mixed
rows = [
  [1, 2.0],   # a row
  [3, 4.0],
]

[[level]]
name = "one"

[[level.collective]]
ranks = 2

[[level.collective]]
ranks = 4

[[level]]
name = "two"
"""

CLUSTER = Cluster(
    name="mine",
    levels=(
        Level("inside", 4, 100.0, 5.0, 0.1),
        Level(
            *("between", 0, 10.0, 50.0, 0.0),
            tables=(CollectiveTimings("two_shot", 4, ((1024.0, 1e-3, 2e-3), (4096.0, 2e-3)), "int8/256"),),
            timed_gbit=10.0,
        ),
    ),
    device=Device("cpu: x", 1e12, 20.0, 3.0, "compute", 0.1),
    overlap=Overlap(1.5, 1.25, 2.0),
    codecs=(CodecSpeed("int8/256", ((1024.0, 1e-6),), ((1024.0, 2e-6),), 1.5, 1.25, 2.0),),
    measured=True,
    source="a test",
    price_per_hour=2.5,
)


def test_values_and_their_lines() -> None:
    found = parse_toml(TEXT)
    assert found.values["name"] == 'a "quoted" name # no comment'
    assert (found.values["on"], found.values["off"], found.values["whole"], found.values["big"]) == (
        True,
        False,
        -12,
        10**6,
    )
    assert found.values["table"]["rows"] == [[1, 2.0], [3, 4.0]]
    assert [level["name"] for level in found.values["level"]] == ["one", "two"]
    assert [table["ranks"] for table in found.values["level"][0]["collective"]] == [2, 4]
    assert (found.lines["name"], found.lines["table.rows.1"], found.lines["level.0.collective.1.ranks"]) == (3, 14, 24)


@pytest.mark.parametrize(
    "text", [TEXT, cluster.dump(CLUSTER), *(p.read_text() for p in cluster.PRESETS.glob("*.toml"))]
)
def test_every_value_has_a_line_with_its_key(text: str) -> None:
    rows, document = text.split("\n"), parse_toml(text)

    def check(value: object, path: str, key: str) -> None:
        if isinstance(value, list) and isinstance(value[0], dict):
            for number, table in enumerate(value):
                check(table, f"{path}.{number}", key)
            return
        assert key in rows[document.lines[path] - 1], path
        for inner, part in value.items() if isinstance(value, dict) else ():
            check(part, f"{path}.{inner}", inner)
        for number in range(len(value)) if isinstance(value, list) else ():
            assert f"{path}.{number}" in document.lines

    for key, value in document.values.items():
        check(value, key, key)


def test_lines_are_right_in_all_that_toml_allows() -> None:
    text = """a.b = 1
"quoted" = 'x # no comment'
long = \"\"\"
[no.table]
\"\"\"
inline = {x = 1, y = [2,
3]}
day = 1979-05-27 07:32:00

[[ t . u ]]
v = 1
[[t.u]]
v = [{w = 1},
     {w = 2}]
"""
    document = parse_toml(text)
    assert document.values["t"]["u"][1]["v"][1] == {"w": 2}
    expected = {
        "a.b": 1,
        "quoted": 2,
        "long": 3,
        "inline.y.1": 7,
        "day": 8,
        "t.u.0.v": 11,
        "t.u.1": 12,
        "t.u.1.v.1.w": 14,
    }
    assert {path: document.lines[path] for path in expected} == expected


@pytest.mark.parametrize(
    "text, line, word",
    [
        ("a = 1\nb = [\n[1,\n2]\n", 4, "Unclosed array"),
        ("a = 1\nb = 99999999999999999999\n", 2, "b: .* is too large"),
        (f"a = 1\nb = {'9' * 5000}\n", 2, "digits"),
        (f"a = 1\nb = {'[' * 5000}{']' * 5000}\n", 2, "in one another"),
        ('a = "\\ud800"\n', 1, "no TOML"),
    ],
)
def test_what_is_no_toml_is_told_with_its_line(text: str, line: int, word: str) -> None:
    with pytest.raises(FileError, match=f"mine.toml:{line}: .*{word}"):
        parse_toml(text, "mine.toml")


def test_a_cluster_is_read_back() -> None:
    assert cluster.parse(cluster.dump(CLUSTER)) == CLUSTER


def test_a_cluster_with_all_fields_is_read_back() -> None:
    """Each by itself, too: one may be known without the others."""
    rare: dict[str, Any] = {
        "busy": 0.25,
        "drift": 0.5,
        "loop": Loop(0.5, 1.25, 1.5),
        "fitted_rows": 3,
        "codec_system": "grace-8bit",
    }
    whole = replace(CLUSTER, **rare)
    plain = Cluster("plain", CLUSTER.levels)
    assert not [key for key, value in vars(whole).items() if value == getattr(plain, key) and key != "levels"]
    for made in (whole, *(replace(CLUSTER, **{key: value}) for key, value in rare.items())):
        assert cluster.parse(cluster.dump(made)) == made


def test_a_profile_is_read_back() -> None:
    made = Profile("m", 8, 0.5, 1.0, 0.25, (TensorTime("a", 10, 0.125), TensorTime("b", 20, 0.5)), 0.1, "a test", 7, 2)
    assert model.read_profile(parse_toml(model.dump(made))) == made


GOOD = 'format = 1\nname = "x"\n[[level]]\nname = "l"\nbandwidth_gbit = 1.0\nlatency_us = 5.0\n'


@pytest.mark.parametrize(
    "old, new, line, word",
    [
        ("bandwidth_gbit = 1.0\n", "", 3, "bandwidth_gbit: is missing"),
        ("= 1.0", "= -1.0", 5, "must be more than 0, got -1.0"),
        ("= 1.0", "= 0", 5, "must be more than 0, got 0"),
        ("= 1.0", "= nan", 5, "must be a number"),
        ("= 1.0", '= "fast"', 5, "must be a number, got 'fast'"),
        ("= 1.0", "= fast", 5, "Invalid value, in 'bandwidth_gbit = fast'"),
        ("= 1.0", "=", 5, "Invalid value"),
        ("latency_us = 5.0", "latency_us = -5.0", 6, "must be 0 or more"),
        ("latency_us", "latency_ms", 6, "unknown; there are"),
        ("format = 1", "format = 2", 1, "reads format = 1"),
        ("[[level]]", "[level", 3, "in '[level'"),
        ("[[level]]", "[level]", 3, "there may be several"),
        ("5.0\n", "5.0\nlatency_us = 6.0\n", 7, "Cannot overwrite"),
        (
            "5.0\n",
            '5.0\n[[level.collective]]\nname = "all_reduce"\nranks = 2\npoints = [[1, 2],\n[3, -4]]\n',
            11,
            "all above 0",
        ),
        ("5.0\n", '5.0\n[[codec]]\nwire = "int9/256"\n', 8, "codec.0.wire"),
        ("5.0\n", '5.0\n[device]\ncodec_stream = "both"\n', 8, 'take "side" or "compute"'),
        ("5.0\n", "5.0\nranks = 0\n[[level]]\nbandwidth_gbit = 1.0\nlatency_us = 5.0\n", 7, "the devices of a node"),
        ("5.0\n", "5.0\nranks = 2\n" + 2 * "[[level]]\nbandwidth_gbit = 1.0\nlatency_us = 5.0\n", 8, "nodes of a rack"),
        ("5.0\n", "5.0\noversubscription = 0.5\n", 7, "must be 1 or more"),
        (
            "5.0\n",
            "5.0\nranks = 2\n" + 3 * "[[level]]\nbandwidth_gbit = 1.0\nlatency_us = 5.0\nranks = 2\n",
            16,
            "one to three",
        ),
    ],
)
def test_an_error_names_file_line_and_reason(old: str, new: str, line: int, word: str) -> None:
    assert cluster.parse(GOOD).levels[0].bandwidth_gbit == 1.0
    with pytest.raises(FileError) as caught:
        cluster.parse(GOOD.replace(old, new), "mine.toml")
    assert str(caught.value).startswith(f"mine.toml:{line}: ")
    assert word in str(caught.value)


def test_an_edited_bandwidth_is_not_a_measured_one() -> None:
    text = cluster.dump(CLUSTER)
    assert cluster.parse(text).measured
    edited = cluster.parse(text.replace("bandwidth_gbit = 10.0", "bandwidth_gbit = 20.0"))
    assert (edited.levels[1].bandwidth_gbit, edited.levels[1].timed_gbit, edited.measured) == (20.0, 10.0, False)


@pytest.mark.parametrize("ranks, most", [((8,), 8), ((0,), 0), ((4, 0), 0), ((4, 3), 12), ((4, 3, 5), 60)])
def test_a_cluster_joins_so_many_workers_and_no_more(ranks: tuple[int, ...], most: int) -> None:
    made = Cluster("small", tuple(Level("l", n, 1.0, 1.0) for n in ranks))
    assert made.level_of(most or 4096) == len(ranks) - 1
    if most:
        with pytest.raises(ValueError, match=f"small: joins at most {most}, got {most + 1} workers"):
            made.level_of(most + 1)


def test_no_level_and_no_file_are_errors() -> None:
    with pytest.raises(FileError, match="at least one"):
        cluster.parse("format = 1\n")
    with pytest.raises(FileError, match=r"no file and no preset; there are .*p2\.16xlarge"):
        cluster.load("no-such-cluster")


@pytest.mark.parametrize("name", cluster.presets())
def test_a_preset_says_that_nobody_measured_it_and_where_its_numbers_are_from(name: str) -> None:
    found = cluster.load(name)
    assert not found.measured
    assert len(found.source) > 40
    assert all(level.spread > 0 for level in found.levels)
    assert (found.device.flops > 0, found.device.memory_gbyte > 0) == (True, True)
