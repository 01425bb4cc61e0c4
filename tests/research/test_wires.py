"""Wires on workloads: fp32 is plain training, what is done is not done again, and tables hold the right arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from narrowcast_research.text import corpus
from narrowcast_research.wires import accuracy, convergence, gradients, page, workloads
from narrowcast_research.wires.convergence import Job
from narrowcast_research.wires.workloads import Setting, WorkerLoop

from narrowcast.simulate import World, train

TINY = Setting(tiny=True, epochs=0.4, batch=128, steps=6)
WORDS = ["--tiny", "--epochs", "0.4", "--batch", "128", "--steps", "6"]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """Small products on several threads of a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("model", ["davidnet", "lm"])
def test_fp32_is_plain_training(model: str) -> None:
    """The mean of the workers' gradients, added in their order, is what the optimizer gets."""
    loop, plain = (workloads.workload(model, 3, TINY) for _ in range(2))
    loop_of = WorkerLoop(loop, "fp32")
    for step in range(3):
        loop_of.step()
        plain.model.train()
        own = []
        buffers = [b.clone() for b in plain.model.buffers()]
        for worker in reversed(range(workloads.WORKERS)):  # worker 0 last: its buffers stay
            for there, here in zip(plain.model.buffers(), buffers, strict=True):
                there.copy_(here)
            plain.optimizer.zero_grad()
            plain.loss(plain.batch(step, worker)).backward()
            own.insert(0, [p.grad for p in plain.model.parameters()])
        for p, first, *others in zip(plain.model.parameters(), *own, strict=True):
            total = first
            for other in others:
                total = total + other
            p.grad = total * (1 / workloads.WORKERS)
        if plain.clip is not None:
            torch.nn.utils.clip_grad_norm_(plain.model.parameters(), plain.clip)
        for group in plain.optimizer.param_groups:
            group["lr"] = plain.rate(step)
        plain.optimizer.step()
    ours, theirs = loop.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert loop.score() == plain.score()


def test_a_loop_is_what_the_simulator_trains() -> None:
    """`simulate.train`, which has the bits of DDP, on the same pictures; with error feedback."""
    work, other = (workloads.workload("davidnet", 1, TINY) for _ in range(2))
    loop = WorkerLoop(work, "int4/128+ef")
    for _ in range(3):
        loop.step()
    options = workloads.base.Options(quick=True)
    run = train(
        other.model,
        workloads.pictures.pictures("cifar10", options, channels=3),
        workers=World(workloads.WORKERS, seed=1),
        spec="int4/128+ef",
        steps=3,
        batch=TINY.batch,
        optimizer=lambda _: other.optimizer,
        lr=other.rate,
        seed=1,
    )
    ours, theirs = work.model.state_dict(), run.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_is_done_is_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By two processes, after a call that was cut while it wrote."""
    old, out = tmp_path / "old" / "wires.jsonl", tmp_path / "new.jsonl"
    chosen = ["--models", "davidnet", "lm", "--seeds", "1", *WORDS]
    assert convergence.main(["--out", str(old), "--wires", "fp32", *chosen]) == 0
    out.write_text('{"model": "davidnet", "wi')
    more = ["--done", str(old.parent), "--wires", "fp32", "int8/256", "--jobs", "2"]
    assert convergence.main(["--out", str(out), *more, *chosen]) == 0
    assert "2 of 4 trainings are done" in capsys.readouterr().out
    before, after = convergence.read([old]), convergence.read([out])
    assert [(x["model"], x["wire"]) for x in before] == [("davidnet", "fp32"), ("lm", "fp32")]
    assert sorted((x["model"], x["wire"]) for x in after) == [("davidnet", "int8/256"), ("lm", "int8/256")]
    assert [step for step, _ in before[1]["curve"]] == [2, 3, 5, 6]
    assert all(x["bits"] == 32.0 > y["bits"] > 8 for x, y in zip(before, after, strict=True))
    # another length is another training
    assert convergence.is_done(Job("lm", "fp32", 0), before, TINY)
    assert not convergence.is_done(Job("lm", "fp32", 0), before, replace(TINY, steps=7))


def test_without_time_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "wires.jsonl"
    assert convergence.main(["--out", str(out), "--models", "lm", "--limit", "0", *WORDS]) == 1
    assert out.read_text() == ""


def test_jobs_go_seed_by_seed() -> None:
    jobs = convergence.planned(["davidnet", "lm"], ["fp32", "int8/256"])
    assert len(jobs) == 2 * (5 + 3)
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)
    assert jobs[:4] == [Job(model, wire, 0) for model in ("davidnet", "lm") for wire in ("fp32", "int8/256")]


def line(wire: str, seed: int, score: float | None, model: str = "davidnet") -> dict[str, object]:
    facts = {"parameters": 6_500_000, "workers": 4, "steps": 970, "where": "a machine", "bits": 32.0, "tiny": False}
    facts |= {"length": 10.0, "batch": 128}
    return {"model": model, "wire": wire, "seed": seed, "score": score, **facts}


def test_differences_are_paired_by_seed() -> None:
    """By hand: differences -1, -2, -3 have mean -2, deviation 1, and t = 4.3027 at 2 degrees of freedom."""
    lines = [line("fp32", seed, 90.0 + seed) for seed in range(4)]
    lines += [line("int4/128", seed, 90.0 + seed - (1 + seed)) for seed in range(3)]
    text = page.convergence_text(lines)
    half = 4.30265 / math.sqrt(3)
    assert f"| -2.00 ({-2 - half:+.2f} to {-2 + half:+.2f}) |" in text
    assert "| `int4/128` | 4 | 3 | 89.00 ± 0.00 |" in text


@pytest.mark.parametrize(
    "differences, words",
    [
        ([0.1, -0.1, 0.05, 0.0, -0.05], "equal within 0.5"),
        ([-3.0, -3.1, -2.9, -3.0, -3.05], "loses more than 0.5"),
        ([3.0, 3.1, 2.9, 3.0, 3.05], "better by more than 0.5"),
        ([-0.6, -0.5, -0.4, -0.55, -0.45], "loses; whether more than 0.5, cannot be told"),
        ([3.0, -3.0, 1.0, -1.0, 0.5], "cannot tell"),
        ([-3.0], "cannot tell"),
    ],
)
def test_a_verdict_follows_from_the_interval(differences: list[float], words: str) -> None:
    lines = [line("fp32", seed, 90.0) for seed in range(len(differences))]
    lines += [line("other", seed, 90.0 + difference) for seed, difference in enumerate(differences)]
    assert page.convergence_text(lines).splitlines()[-1].endswith(f"| {words} |")


def test_of_a_loss_more_is_worse_and_lost_runs_are_counted() -> None:
    lines = [line("fp32", seed, 4.0, "lm") for seed in range(3)]
    lines += [line("coarse", seed, 4.1 + 0.001 * seed, "lm") for seed in range(3)]
    lines += [line("broken", seed, None if seed else 4.0, "lm") for seed in range(3)]
    rows = page.convergence_text(lines).splitlines()
    assert "+0.101 (+0.099 to +0.103) | 1.000 | 1.000 | loses more than 0.02 |" in rows[-2]
    assert rows[-1].endswith("| 2 of 3 runs lost their numbers |")
    with pytest.raises(ValueError, match="no run with fp32"):
        page.convergence_text(lines[3:])


def test_tests_of_several_wires_are_corrected() -> None:
    """Differences of mean 0 and deviation 0.3, five seeds: t = 0.5 / 0.134 = 3.727, one-sided p at 4 degrees 0.0102."""
    spread = [0.3 * math.sqrt(2) * one for one in (1, -1, 0, 0, 0)]
    lines = [line("fp32", seed, 90.0) for seed in range(5)]
    lines += [line(wire, seed, 90.0 + spread[seed]) for wire in ("one", "other") for seed in range(5)]
    assert all("| 0.010 | 0.020 | equal" in row for row in page.convergence_text(lines).splitlines()[-2:])


@pytest.mark.parametrize("key, other", [("length", 12.0), ("where", "a GPU"), ("batch", 64), ("parameters", 7)])
def test_runs_of_several_settings_are_no_twins(key: str, other: object) -> None:
    lines = [line("fp32", 0, 90.0), line("int8/256", 0, 90.0), line("int8/256", 1, 10.0) | {key: other}]
    with pytest.raises(ValueError, match=rf"several settings are no twins .*{key} {other}"):
        page.convergence_text(lines)


def test_a_run_that_lost_its_numbers_is_a_twin_all_the_same() -> None:
    days = [{"where": f"a machine, 2026-11-1{day}"} for day in (6, 7)]
    lines = [line("fp32", 0, 90.0) | days[0], line("int2/64", 0, None) | days[1] | {"steps": 60}]
    assert "1 of 1 runs lost their numbers" in page.convergence_text(lines)


def test_errors_are_those_of_the_mean_by_kind() -> None:
    """Against sums written out here; as-is loses nothing, and low rank of a rank-one gradient little."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"e": torch.nn.Embedding(64, 32), "l": torch.nn.Linear(128, 96, bias=False)})
    rank_one = torch.outer(torch.randn(96), torch.randn(128))
    own = [{"e.weight": torch.randn(64, 32), "l.weight": rank_one * (1 + w)} for w in range(4)]
    probe = gradients.Probe(model, ["l.weight", "e.weight"])
    assert probe.errors(own, "fp32")[0]["all"] == (64 * 32 + 96 * 128, pytest.approx(0, abs=1e-6))
    found, bits = probe.errors(own, "int4/128")
    assert bits == 4.25
    means, _ = probe.exchanged(own, "int4/128")
    exact = torch.stack([one["e.weight"].double() for one in own]).mean(0)
    assert found["embedding"][1] == pytest.approx(float((means["e.weight"] - exact).norm() / exact.norm()))
    assert 0.05 < found["linear"][1] < 0.3
    found, bits = probe.errors(own, "bf16+rank1")
    assert found["linear"][1] < 0.01 < found["embedding"][1]
    assert bits == pytest.approx(16 * (96 + 128 + 64 + 32) / (96 * 128 + 64 * 32))


def test_gradients_make_a_page(tmp_path: Path) -> None:
    out, target = tmp_path / "gradients.json", tmp_path / "gradients.md"
    gradients.main(["--out", str(out), "--models", "lm", *WORDS])
    found = json.loads(out.read_text())
    wires = sum(len(members) for members in gradients.FAMILIES.values())
    whole = [row for row in found["rows"] if row["kind"] == gradients.ALL]
    assert len(whole) == 3 * wires
    assert [row["step"] for row in whole[::wires]] == [1, 3, 6]
    error = {row["wire"]: row["error"] for row in whole[-wires:]}
    assert error["int8/256"] < error["int4/128"] < error["int3/64"] < error["int2/64"]
    assert error["bf16+rank4"] < error["bf16+rank2"] < error["bf16+rank1"]
    target.write_text("before\n<!-- runs -->\n<!-- end of runs -->\nafter\n")
    page.main(["--gradients", str(out), "--page", str(target)])
    rows = [row for row in target.read_text().splitlines() if row.startswith("| about 4 ")]
    assert len(rows) == 1
    assert rows[0].count("**") == 2


def test_rare_tokens_become_one() -> None:
    text = corpus.Text(torch.tensor([5, 5, 5, 2, 2, 7], dtype=torch.int16), torch.tensor([7, 5, 0]).short(), 8, "made")
    few = workloads.frequent(text, 3)
    assert (few.train.tolist(), few.held_out.tolist(), few.vocabulary) == ([1, 1, 1, 2, 2, 0], [0, 1, 0], 3)


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="there is no model 'gpt'; take davidnet, resnet18, lm"):
        workloads.workload("gpt", 0, TINY)
    with pytest.raises(ValueError, match="--text: give a token file"):
        workloads.workload("lm", 0, Setting())


def test_the_poisoned_layer_is_left_as_it_is_and_a_second_call_only_judges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", str(tmp_path / "a.jsonl"), "--models", "poisoned", "--seeds", "1"]
    words += ["--tiny", "--epochs", "4", "--batch", "128"]
    assert accuracy.main(words) == 0
    first = capsys.readouterr().out
    found = {line["wire"]: line for line in convergence.read([tmp_path / "a.jsonl"])}
    assert found["int4/128"]["score"] < found["fp32"]["score"] - 1
    assert abs(found["auto"]["score"] - found["fp32"]["score"]) < 1
    assert 8 < found["auto"]["bits"] < 32
    assert accuracy.main(words) == 0
    again = capsys.readouterr().out
    assert "3 of 3 trainings are done" in again
    assert again.splitlines()[-2:] == first.splitlines()[-2:]
    assert "margin 0.5" in again


def test_a_training_that_was_lost_is_no_number() -> None:
    lines = [{"model": "lm", "wire": w, "seed": s, "score": x} for w, s, x in (("fp32", 0, 3.0), ("auto", 0, 2.5))]
    lines += [{"model": "lm", "wire": w, "seed": 1, "score": x} for w, x in (("fp32", 3.0), ("auto", None))]
    assert accuracy.differences(lines, "lm", "auto") == [0.5, None]
    assert [said for _, wire, said in accuracy.verdicts(lines, ["lm"]) if wire == "auto"] == [
        "1 of 2 trainings ended in NaN"
    ]
