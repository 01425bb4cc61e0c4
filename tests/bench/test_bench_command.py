"""`narrowcast bench collectives|ddp|fsdp`: where their ranks are, what is refused, and rows as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrun import torchrun
from typer.testing import CliRunner

from narrowcast import cli
from narrowcast.bench import collectives, ddp, fsdp, ranks
from narrowcast.bench.ranks import Ranks
from narrowcast.console import GrowingTable


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def refused(*words: str) -> str:
    done = CliRunner().invoke(cli.assemble(), ["bench", *words])
    assert isinstance(done.exception, ValueError), done.output
    return str(done.exception)


def test_a_lab_for_each_number_of_hosts_or_the_ranks_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.choose(None, "4", gpu=False) == [Ranks(4, "1gbit")]
    assert ranks.choose("none", "2,8", gpu=False) == [Ranks(2, "none"), Ranks(8, "none")]
    monkeypatch.setattr(ranks, "need_cuda", lambda: None)
    assert ranks.choose(None, "2", gpu=True) == [Ranks(2, "10gbit", gpu=True)]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert ranks.choose(None, "4", gpu=True) == [Ranks(16, "cluster", gpu=True)]
    with pytest.raises(ValueError, match="'1gbit' under torchrun"):
        ranks.choose("1gbit", "4", gpu=False)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA")
@pytest.mark.parametrize("bench", ["collectives", "ddp", "fsdp"])
def test_without_cuda_it_says_what_is_missing_and_what_to_do(bench: str) -> None:
    text = refused(bench, "--gpu", "--lab", "10gbit")
    assert f"needs torch with CUDA and NCCL, and an NVIDIA GPU; got torch {torch.__version__}" in text
    assert "leave --gpu out" in text


@pytest.mark.parametrize(
    "words, text",
    [
        ("collectives --hosts 1", "2 or more, as 4 or 2,4,8"),
        ("ddp --hosts four", "got 'four'"),
        ("collectives --sizes 1,x", "--sizes: got '1,x'"),
        ("collectives --sizes 0", "--sizes: got '0'"),
        ("collectives int9/64", "int takes 2 to 8 bits"),
        ("ddp int9/64", "int takes 2 to 8 bits"),
        ("ddp powersgd-x", "powersgd-4"),
        ("ddp bf16-hook", "for NCCL alone; take fp16-hook, or --gpu"),
        ("ddp --model gpt3", "take small or gpt2"),
        ("fsdp --model gpt3", "take small or gpt2"),
        ("fsdp weights=int8/256", "'weights' is neither"),
    ],
)
def test_what_cannot_be_is_refused_before_a_lab_is_built(
    words: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "Lab", None)
    assert text in refused(*words.split())


def facts(wire: str, **more: Any) -> dict[str, Any]:
    return {"wire": wire, "values": 250_000, "mb": 1.0, "ms": 2.0, "host_ms": 0.1, "beyond_ms": 1.0, **more}


ROWS: dict[Any, list[dict[str, Any]]] = {
    collectives: [
        facts("fp32 sum", over_fp32=1.0, over_bf16=0.5),
        facts("int8/256", over_fp32=3.5, over_bf16=1.75, share_of_limit=0.9, error=0.01),
        facts("int8/256", over_fp32=3.5, over_bf16=1.75, share_of_limit=0.9, error=0.01, small=True),
    ],
    ddp: [
        {"wire": wire, "step": 0.4, "compute": 0.1, "exposed": 0.3, "error": 0.0, "over": {"plain": 1.0}}
        for wire in ("plain", "int8/256")
    ],
    fsdp: [
        {"wire": wire, "step": 0.4, "fastest": 0.3, "slowest": 0.5, "link_bytes": 1e6}
        for wire in ("plain", "gradients=int8/256")
    ],
}


@pytest.mark.parametrize("bench", ROWS, ids=lambda bench: bench.__name__.rpartition(".")[2])
def test_rows_are_shown_and_kept_as_they_come(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = tmp_path / "found.json", []

    def rows(at: Ranks, *_: Any) -> Iterator[dict[str, Any]]:
        yield {"machine": {"cpu": "one"}}
        for row in ROWS[bench]:
            yield row
            # the row before this moment is in the file
            seen.append(json.loads(file.read_text()))

    monkeypatch.setattr(ranks, "rows", rows)
    name = bench.__name__.rpartition(".")[2]
    wire = ROWS[bench][-1]["wire"]
    words = ["bench", name, wire, "--lab", "1gbit", "--hosts", "2,4", "--json", str(file)]
    done = CliRunner().invoke(cli.assemble(), words, catch_exceptions=False)
    assert done.exit_code == 0
    count = len(ROWS[bench])
    assert [len(kept["rows"]) for kept in seen] == list(range(1, 2 * count + 1))
    assert all(kept["machine"] == {"cpu": "one"} for kept in seen)
    assert {(row["hosts"], row["rate"], row["backend"]) for row in seen[-1]["rows"]} == {
        (2, "1gbit", "gloo"),
        (4, "1gbit", "gloo"),
    }
    lines = [line for line in done.stdout.splitlines() if line]
    assert len(lines) == 2 * (2 + count), "a title and a heading for each lab, then a line a row"
    assert ("2 hosts at 1gbit, Gloo" in lines[0], "4 hosts at 1gbit" in lines[2 + count]) == (True, True)
    assert len({len(line.rstrip()) for line in lines if line.startswith("int8/256 ")}) <= 1


def test_with_a_dash_the_output_is_json_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "rows", lambda *_: iter([{"machine": {}}, *ROWS[ddp]]))
    done = CliRunner().invoke(cli.assemble(), ["bench", "ddp", "int8/256", "--json", "-"], catch_exceptions=False)
    assert [row["wire"] for row in json.loads(done.stdout)["rows"]] == ["plain", "int8/256"]


def test_a_growing_table_has_its_heading_once(capsys: pytest.CaptureFixture[str]) -> None:
    table = GrowingTable("What", "wire      ", "ms")
    assert capsys.readouterr().out == ""
    table.add_row("int8/256", "1.5")
    assert capsys.readouterr().out.splitlines() == ["What", "", "wire             ms", "int8/256        1.5"]
    table.add_row("int4/128", "12.25")
    assert capsys.readouterr().out == "int4/128      12.25\n"


@pytest.mark.timeout(300)
def test_under_torchrun_the_ranks_are_there_and_rank_0_speaks(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["bench", "collectives", "int8/256", "--sizes", "0.02", "--rounds", "2", "--json", str(file)]
    done = torchrun("-m", "narrowcast", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert [row["wire"] for row in found["rows"]] == ["fp32 sum", "bf16 sum", "int8/256"]
    assert {(row["hosts"], row["rate"]) for row in found["rows"]} == {(2, "cluster")}
    assert set(found["machine"]) == {"cpu", "isa", "python", "torch", "date"}
    assert done.stdout.count("int8/256") == 1
    assert "All-reduce on 2 ranks of this cluster, Gloo" in done.stdout
    assert "time us    algbw    busbw" in done.stdout
    for row in found["rows"]:
        assert row["algbw"] == pytest.approx(row["size"] / row["us"] / 1e3)
        assert row["busbw"] == row["algbw"], "of two ranks each link carries all"
