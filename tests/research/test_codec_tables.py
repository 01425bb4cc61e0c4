"""`narrowcast codecs --table`."""

from __future__ import annotations

import json

import pytest
from narrowcast_research.bench import dettmers2016
from typer.testing import CliRunner

from narrowcast.cli import assemble
from narrowcast.codecs import all_specs


def test_no_codec_but_declared_ones_loses_a_nan_an_inf_or_a_huge_value() -> None:
    done = CliRunner().invoke(assemble(), ["codecs", "--table", "nonfinite", "--json", "-"], catch_exceptions=False)
    rows = json.loads(done.stdout)
    assert [row["codec"] for row in rows] == all_specs()
    assert [row["codec"] for row in rows if not row["kept"]] == []


def test_the_dettmers_table_agrees_with_the_corrected_numbers_to_two_percent() -> None:
    cells = list(dettmers2016.run(1_000_000))
    assert len(cells) == len(dettmers2016.PUBLISHED)
    assert {cell.codec: cell.deviation for cell in cells if cell.deviation > 0.02} == {}


def test_an_unknown_table_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="unknown table 'x'; there are dettmers2016, nonfinite"):
        CliRunner().invoke(assemble(), ["codecs", "--table", "x"], catch_exceptions=False)
