"""Traces and counters: what is written can be read back, and adds up."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from each import each
from torch.profiler import ProfilerActivity, profile, record_function

from narrowcast.collectives.segments import Times
from narrowcast.parallel.integrations import perfetto, tensorboard
from narrowcast.parallel.integrations.recording import SINKS, Recording, scalars
from narrowcast.parallel.integrations.tensorboard import TensorBoard
from narrowcast.parallel.stats import KEPT, CallEvent, Stats


class Counted:
    """A handle with known counters."""

    def __init__(self) -> None:
        self.kept = Stats()

    def count(self, name: str, sent: int, seconds: float) -> None:
        self.kept.count(name, sent * 4, sent, sent * 4, Times(seconds / 4, seconds / 8), seconds, compressed=0)

    def stats(self) -> dict[str, float]:
        return self.kept.as_dict()

    def events(self) -> list[CallEvent]:
        return list(self.kept.events)


def counted() -> Counted:
    watched = Counted()
    for number in range(5):
        watched.count(f"reduce_scatter of gradients blocks.{number}", 100 + number, 0.25)
        watched.count("all_gather of parameters root", 1000, 0.5)
    return watched


def test_a_trace_has_every_call_with_its_time_and_bytes(tmp_path: Path) -> None:
    watched = counted()
    perfetto.write(watched, tmp_path / "3.json", rank=3)
    events = json.loads((tmp_path / "3.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 10
    assert {event["pid"] for event in events} == {3}
    assert sum(event["args"]["sent bytes"] for event in slices) == watched.stats()["sent_bytes"] == 5510
    for event, original in zip(slices, sorted(watched.events(), key=lambda e: e.start + e.seconds), strict=True):
        assert event["ts"] == original.start * 1e6
        assert event["dur"] == original.seconds * 1e6
    # one row for each kind, named
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(rows.values()) == ["all_gather of parameters", "reduce_scatter of gradients"]
    assert all(event["name"].startswith(rows[event["tid"]]) for event in slices)
    totals = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert totals == sorted(totals)
    assert totals[-1] == 5510


def test_traces_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.json" for rank in range(3)]
    for rank, path in enumerate(paths):
        perfetto.write(counted(), path, rank)
    perfetto.merge(paths, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert len([event for event in events if event["ph"] == "X"]) == 30


def absolute(path: Path) -> dict[str, Any]:
    """The slices of a trace by name: begin and end, in seconds since 1970."""
    trace = json.loads(path.read_text())
    base = trace.get("baseTimeNanoseconds", 0) / 1e9
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return {e["name"]: (base + e["ts"] / 1e6, base + (e["ts"] + e["dur"]) / 1e6) for e in slices}


def test_calls_stand_inside_what_the_profiler_saw_of_them(tmp_path: Path) -> None:
    watched = Counted()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("the step"):
        time.sleep(0.1)
        began = time.perf_counter()
        time.sleep(0.01)
        watched.count("all_gather of parameters root", 1000, time.perf_counter() - began)
        time.sleep(0.1)
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    perfetto.write(watched, tmp_path / "ours.json", rank=0)
    perfetto.merge([tmp_path / "ours.json", tmp_path / "torch.json"], tmp_path / "both.json")
    found = absolute(tmp_path / "both.json")
    (begin, end), (call, done) = found["the step"], found["all_gather of parameters root"]
    assert begin < call < done < end
    # both on one clock, also when they are merged again
    assert call == pytest.approx(watched.events()[0].start, abs=1e-5)
    perfetto.merge([tmp_path / "both.json", tmp_path / "ours.json"], tmp_path / "again.json")
    assert absolute(tmp_path / "again.json") == found
    # the profiler's own times are untouched, to the nanosecond
    own, both = (json.loads((tmp_path / name).read_text())["traceEvents"] for name in ("torch.json", "both.json"))
    assert all(event in both for event in own)


def test_old_calls_make_room_for_new_ones() -> None:
    stats = Stats()
    for number in range(KEPT + 5):
        stats.count(str(number), 1, 1, 1, Times(), 0.0, compressed=0)
    assert [stats.events[0].name, stats.events[-1].name] == ["5", str(KEPT + 4)]
    assert stats.calls == KEPT + 5


def test_counters_become_numbers_for_a_step() -> None:
    first = {"steps": 10.0, "sent_bytes": 1000.0, "ratio": 4.0}
    second = {"steps": 14.0, "sent_bytes": 1800.0, "ratio": 3.9}
    assert scalars(first) == {"sent_bytes_per_step": 100.0, "ratio": 4.0}
    assert scalars(second, first) == {"sent_bytes_per_step": 200.0, "ratio": 3.9}
    # no step since: nothing is divided by zero
    assert scalars(second, second)["sent_bytes_per_step"] == 0.0


class Writer:
    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))

    def close(self) -> None:
        self.closed = True


def test_any_writer_will_do_and_stays_its_owners() -> None:
    watched, writer = counted(), Writer()
    watched.kept.steps = 5
    board = TensorBoard(watched, writer, prefix="wire")
    board.write(5)
    watched.count("all_gather of parameters root", 1000, 0.5)
    watched.kept.steps = 6
    board.write(6)
    board.close()
    found = {(name, step): value for name, value, step in writer.rows}
    assert found["wire/sent_bytes_per_step", 5] == 5510 / 5
    assert found["wire/sent_bytes_per_step", 6] == 1000
    assert found["wire/ratio", 6] == pytest.approx(4.0)
    assert not writer.closed


FAKE_WANDB = """
class Run:
    rows = []
    def log(self, numbers, step): self.rows.append((step, numbers))
    def finish(self): self.rows.append("finished")
run = None
made = Run()
def init(project): return made
"""


@each("kind", SINKS)
def test_every_sink_gets_every_counter_of_every_write(kind: str) -> None:
    watched, read = counted(), READERS[kind]
    watched.kept.steps = 5
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(sys.modules), pytest.MonkeyPatch.context() as patch:
        wandb = types.ModuleType("wandb")
        exec(FAKE_WANDB, vars(wandb))
        sys.modules["wandb"] = wandb
        patch.setattr(tensorboard, "_writer", lambda to: writers.setdefault(to, Writer()))
        recording = Recording(watched, f"{kind}:{folder}/out")
        recording.write(5)
        watched.count("all_gather of parameters root", 1000, 0.5)
        watched.kept.steps = 6
        recording.write(6)
        recording.close()
        found = read(f"{folder}/out")
    assert found["sent_bytes_per_step"] == 1000
    assert found["ratio"] == pytest.approx(4.0)
    assert len(found) >= len(watched.stats()) - 1


writers: dict[str, Writer] = {}


def _of_tensorboard(path: str) -> dict[str, float]:
    writer = writers.pop(path)
    assert writer.closed
    return {name.removeprefix("narrowcast/"): value for name, value, step in writer.rows if step == 6}


def _of_jsonl(path: str) -> dict[str, float]:
    first, last = map(json.loads, Path(path).read_text().splitlines())
    assert (first["step"], last["step"]) == (5, 6)
    return {name.removeprefix("narrowcast/"): value for name, value in last.items()}


def _of_prometheus(path: str) -> dict[str, float]:
    rows = [line.split(" ") for line in Path(path).read_text().splitlines() if not line.startswith("#")]
    return {name.removeprefix("narrowcast_").partition("{")[0]: float(value) for name, value in rows}


def _of_wandb(path: str) -> dict[str, float]:
    (_, _), (step, numbers), end = sys.modules["wandb"].made.rows
    assert (step, end) == (6, "finished")
    return {name.removeprefix("narrowcast/"): value for name, value in numbers.items()}


READERS = {"jsonl": _of_jsonl, "prometheus": _of_prometheus, "tensorboard": _of_tensorboard, "wandb": _of_wandb}


def test_a_sink_that_nobody_knows_is_refused_with_those_there_are() -> None:
    for wrong in ("csv:x", "jsonl", "jsonl:"):
        with pytest.raises(ValueError, match=f"got '{wrong}'; give KIND:WHERE with one of jsonl, prometheus"):
            Recording(counted(), wrong)


def test_stats_of_several_roles_add_up() -> None:
    one, two = counted().kept, counted().kept
    total = Stats.total([one, two])
    assert (total.calls, total.sent_bytes, len(total.events)) == (20, 2 * 5510, 20)
    assert total.times.encode == pytest.approx(one.times.encode + two.times.encode)
    assert total.as_dict()["ratio"] == 4.0
