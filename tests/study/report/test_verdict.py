"""The words of the verdict, for worlds whose truth is known."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study.report import made_up
from study.report.made_up import Line, Truth

from narrowcast.study.analysis.findings import Findings
from narrowcast.study.analysis.statistics import Conclusion
from narrowcast.study.analysis.verdict import Answer, Verdict, headline, how_sure, judge, verdict_text
from narrowcast.study.execution.results import ResultsError
from narrowcast.study.report.page import page

SMALL = Truth(nets=("mlp",), wires=("fp32", "int8/256"), rates=("100mbit", "1gbit"), workers=(2,))


def found(folder: Path, truth: Truth = SMALL, **asked: Any) -> Verdict:
    return judge(Findings.of(made_up.write(folder, made_up.study(truth, **asked))))


def of_lines(folder: Path, lines: list[Line]) -> Verdict:
    return judge(Findings.of(made_up.write(folder, lines)))


def test_it_helps(tmp_path: Path) -> None:
    verdict = found(tmp_path)
    assert verdict.answer is Answer.YES
    kept = "accuracy stays within 1 point on 1 data set"
    told = re.fullmatch(
        rf"Yes\. 8 bits on the wire train (.*)× as fast at 100\sMb/s and (.*)× at 1\sGb/s, and {kept}\.",
        headline(verdict),
    )
    assert told is not None
    for words, rate in zip(told.groups(), SMALL.rates, strict=True):
        plain, narrow = (
            sum(made_up.parts(SMALL, wire, made_up.NETS["mlp"], 2, made_up.RATES[rate]).values())
            for wire in SMALL.wires
        )
        assert float(words) == pytest.approx(plain / narrow, rel=0.05)


def test_wires_of_different_starts_are_called_not_interleaved(tmp_path: Path) -> None:
    lines = made_up.study(SMALL)
    for line in lines:
        if "steps_ms" in line:
            line["start"] = "1.1" if line["wire"] == "fp32" or line["rate_name"] == "1gbit" else "1.2"
    verdict = of_lines(tmp_path, lines)
    assert [step.apart for step in verdict.settings] == [step.rate_name == "100mbit" for step in verdict.settings]
    (told,) = (sentence for sentence in how_sure(verdict) if "not interleaved" in sentence)
    assert told.startswith("1 setting not interleaved")
    assert page(Findings.of(tmp_path)).count("measured, not interleaved") == 1
    plain = found(tmp_path / "before")  # lines from before starts had names
    assert not any(step.apart for step in plain.settings)
    for step, same in zip(verdict.settings, plain.settings, strict=True):
        assert (step.speedup == same.speedup) is (not step.apart)


def test_it_depends_on_the_link(tmp_path: Path) -> None:
    verdict = found(tmp_path, replace(SMALL, rates=("100mbit", "loopback"), slow_codec=8.0))
    assert verdict.answer is Answer.DEPENDS
    assert "It depends on the link. 8 bits on the wire train 3" in headline(verdict)
    assert ", but only 0." in headline(verdict)
    assert "on loopback" in headline(verdict)


def test_it_does_not_help(tmp_path: Path) -> None:
    verdict = found(tmp_path, replace(SMALL, rates=("loopback",), slow_codec=8.0))
    assert verdict.answer is Answer.NO
    assert headline(verdict).startswith("No. 8 bits on the wire train only 0.")
    assert "accuracy stays within 1 point" in headline(verdict)


def test_accuracy_is_lost(tmp_path: Path) -> None:
    verdict = found(tmp_path, replace(SMALL, loss={"int8/256": 3.0}))
    assert verdict.answer is Answer.LOST
    assert "; accuracy is lost: \N{MINUS SIGN}" in headline(verdict)
    assert headline(verdict).endswith("points on digits.")


def test_one_lost_data_set_among_several_is_a_loss(tmp_path: Path) -> None:
    lines = made_up.study(replace(SMALL, nets=("mlp", "alexnet-cifar")))
    for line in lines:
        if line["kind"] == "accuracy" and line["data"] == "cifar10" and line["wire"] == "int8/256":
            line["accuracy"] -= 4.0
    verdict = of_lines(tmp_path, lines)
    assert verdict.answer is Answer.LOST
    assert "cifar10" in headline(verdict)
    assert "digits" not in headline(verdict)


def test_too_few_seeds_cannot_tell(tmp_path: Path) -> None:
    verdict = found(tmp_path, replace(SMALL, seeds=1))
    assert verdict.answer is Answer.UNKNOWN
    assert "whether accuracy is kept with mlp on digits cannot be told" in headline(verdict)
    assert any("Fewer than 5 seeds" in sentence for sentence in how_sure(verdict))
    assert any("Accuracy: 1 paired seed, two" in sentence for sentence in how_sure(verdict))


def test_seeds_that_scatter_cannot_tell(tmp_path: Path) -> None:
    verdict = found(tmp_path, replace(SMALL, spread=4.0))
    assert verdict.accuracy is Conclusion.UNKNOWN
    assert headline(verdict).startswith("Cannot tell. 8 bits on the wire train 3.")


TWO = replace(SMALL, nets=("mlp", "alexnet-cifar"))


def _fail(line: Line) -> Line:
    results = ("accuracy", "loss", "curve", "layers", "epochs", "steps_per_epoch")
    return {**{k: v for k, v in line.items() if k not in results}, "status": "failed", "error": "boom"}


def _trained(line: Line, wire: str, data: str = "cifar10") -> bool:
    return line["kind"] == "accuracy" and (line["wire"], line["data"]) == (wire, data)


@pytest.mark.parametrize(
    "wire, seeds, why",
    [
        ("int8/256", range(5), "5 trainings with int8/256 failed"),
        ("int8/256", range(2), "3 seeds, 2 trainings failed"),
        ("fp32", range(5), "5 trainings with fp32 failed"),
        ("fp32", [4], "4 seeds, 1 training failed"),
    ],
)
def test_where_trainings_failed_nothing_is_called_kept(wire: str, seeds: list[int], why: str, tmp_path: Path) -> None:
    lines = [_fail(x) if _trained(x, wire) and x["seed"] in seeds else x for x in made_up.study(TWO)]
    verdict = of_lines(tmp_path, lines)
    assert verdict.answer is Answer.UNKNOWN
    assert headline(verdict).endswith("; whether accuracy is kept with alexnet-cifar on cifar10 cannot be told.")
    (told,) = [x for x in verdict_text(tmp_path).splitlines() if "alexnet-cifar on cifar10" in x and "Cannot" not in x]
    assert why in told
    assert told.endswith("; cannot tell.")


def test_a_network_that_only_the_baseline_trained_cannot_be_told(tmp_path: Path) -> None:
    verdict = of_lines(tmp_path, [line for line in made_up.study(TWO) if not _trained(line, "int8/256")])
    assert verdict.answer is Answer.UNKNOWN
    assert "with alexnet-cifar on cifar10 cannot be told" in headline(verdict)
    assert "no seed was trained with both int8/256 and fp32; cannot tell." in verdict_text(tmp_path)


def test_another_wire_that_failed_does_no_harm(tmp_path: Path) -> None:
    truth = replace(TWO, wires=("fp32", "int8/256", "qsgd2/128"))
    lines = [_fail(line) if _trained(line, "qsgd2/128") else line for line in made_up.study(truth)]
    assert of_lines(tmp_path, lines).answer is Answer.YES


def test_a_loss_stays_a_loss_though_a_seed_failed(tmp_path: Path) -> None:
    lines = made_up.study(replace(SMALL, loss={"int8/256": 3.0}))
    lines = [_fail(x) if _trained(x, "int8/256", "digits") and x["seed"] == 0 else x for x in lines]
    assert of_lines(tmp_path, lines).answer is Answer.LOST


def test_a_training_without_an_accuracy_has_failed(tmp_path: Path) -> None:
    lines = [{**x, "accuracy": None} if _trained(x, "int8/256") and x["seed"] == 0 else x for x in made_up.study(TWO)]
    verdict = of_lines(tmp_path, lines)
    assert verdict.answer is Answer.UNKNOWN
    assert "ended without an accuracy" in verdict.findings.failures[0].error


def test_better_is_not_lost_and_not_within_the_margin(tmp_path: Path) -> None:
    verdict = found(tmp_path, replace(SMALL, loss={"int8/256": -3.0}))
    assert verdict.answer is Answer.YES
    assert headline(verdict).endswith("and accuracy is not lost on 1 data set.")
    assert "better by more than the margin" in verdict_text(tmp_path)
    assert "not lost in 1 of 1 comparison<" in page(verdict.findings)


def _by_chance(lines: list[Line], faster: int) -> list[Line]:
    """Every setting without a difference, but for some that look faster, as one of twenty does."""
    timed = [line for line in lines if line["kind"] == "time" and "steps_ms" in line]
    settings = {(line["model"], line["workers"], line["rate_name"]) for line in timed}
    source = random.Random(15)
    lucky = [
        [[m * source.gauss(1, 0.05) for _ in range(8)] for m in mean] for mean in ((104, 106, 103), (100, 101, 100))
    ]
    for line in timed:
        here = sorted(settings).index((line["model"], line["workers"], line["rate_name"]))
        line["steps_ms"] = lucky[here < faster and line["wire"] == "int8/256"]
    return lines


def test_one_setting_among_many_that_looks_faster_is_chance(tmp_path: Path) -> None:
    truth = replace(TWO, workers=(2, 4))
    verdict = of_lines(tmp_path / "one", _by_chance(made_up.study(truth), faster=1))
    assert len(verdict.settings) == 8
    assert [step.faster for step in verdict.settings].count(True) == 1
    assert verdict.answer is Answer.UNKNOWN
    assert "nowhere faster beyond chance; accuracy stays within 1 point" in headline(verdict)
    assert any(sentence.startswith("1 of 8 settings look faster") for sentence in how_sure(verdict))
    assert of_lines(tmp_path / "all", _by_chance(made_up.study(truth), faster=8)).answer is Answer.YES


def test_noise_in_the_times_cannot_tell(tmp_path: Path) -> None:
    verdict = found(tmp_path, replace(SMALL, rates=("loopback",), noise=0.8))
    assert verdict.answer is Answer.UNKNOWN
    assert headline(verdict).endswith("a difference that could be chance.")


def test_without_trainings_it_says_so(tmp_path: Path) -> None:
    lines = [line for line in made_up.study(SMALL) if line["kind"] != "accuracy"]
    verdict = of_lines(tmp_path, lines)
    assert verdict.answer is Answer.UNKNOWN
    assert headline(verdict).endswith("; accuracy was not compared.")


def test_without_any_result_it_says_so(tmp_path: Path) -> None:
    verdict = of_lines(tmp_path, [made_up.session()])
    assert verdict.answer is Answer.UNKNOWN
    assert headline(verdict) == "Cannot tell. No step times of int8/256 beside fp32."
    assert "Cannot tell" in verdict_text(tmp_path)


def _predict(line: Line) -> Line:
    """The same case, as a plain user's study would have it: predicted for a rate that could not be made."""
    step = sum(line["breakdown_ms"].values())
    kept = {key: line[key] for key in line if key not in ("steps_ms", "bytes", "predicted_ms", "predicted_interval_ms")}
    return {**kept, "source": "predicted", "step_ms": step, "interval_ms": [0.9 * step, 1.1 * step], "cluster": "here"}


def test_predicted_rates_are_called_predicted_and_measured_ones_win(tmp_path: Path) -> None:
    lines = made_up.study(replace(SMALL, rates=("100mbit", "loopback"), slow_codec=4.0))
    slow = [_predict(line) if line.get("rate_name") == "100mbit" and line["kind"] == "time" else line for line in lines]
    verdict = of_lines(tmp_path, slow)
    assert [(rate.rate_name, rate.predicted) for rate in verdict.rates] == [("100mbit", True), ("loopback", False)]
    assert verdict.rates[0].sentence().startswith("At 100\N{NO-BREAK SPACE}Mb/s (predicted): ")
    assert how_sure(verdict)[0] == "Speed is measured at some rates and predicted at others."


def test_the_papers_machines_have_no_say_in_the_verdict(tmp_path: Path) -> None:
    verdict = found(tmp_path)
    assert {rate.rate_name for rate in verdict.rates} == {"100mbit", "1gbit"}
    assert verdict.findings.elsewhere


def test_of_several_algorithms_the_default_counts_not_the_fastest(tmp_path: Path) -> None:
    lines = made_up.study(SMALL)
    extra = []
    for line in lines:
        if line["kind"] == "time" and line["wire"] == "int8/256" and line["source"] == "measured":
            line["algorithm"] = "auto"
            faster = [[0.5 * ms for ms in repeat] for repeat in line["steps_ms"]] if "steps_ms" in line else None
            if faster:
                extra.append({**line, "algorithm": "ring", "steps_ms": faster, "case": line["case"] + "|ring"})
    before, after = found(tmp_path / "a"), of_lines(tmp_path / "b", [*lines, *extra])
    assert [rate.gain for rate in before.rates] == [rate.gain for rate in after.rates]


def test_a_case_that_was_run_again_counts_once_and_last(tmp_path: Path) -> None:
    lines = made_up.study(SMALL)
    first = next(line for line in lines if line["kind"] == "time")
    findings = Findings.of(made_up.write(tmp_path, [*lines, {**first, "status": "failed", "error": "later"}]))
    assert len([line for line in findings.cases if line["case"] == first["case"]]) == 1
    assert first["case"] in [failed.line["case"] for failed in findings.failures]


def test_a_torn_last_line_is_left_out_and_an_unknown_schema_refused(tmp_path: Path) -> None:
    made_up.write(tmp_path, made_up.study(SMALL))
    file = tmp_path / "results.jsonl"
    whole = verdict_text(tmp_path)
    file.write_text(file.read_text() + '{"schema": 1, "kind": "ti')
    assert verdict_text(tmp_path) == whole
    made_up.write(tmp_path, [{**made_up.session(), "schema": 99}])
    with pytest.raises(ResultsError, match="schema 99"):
        verdict_text(tmp_path)


def test_a_folder_without_a_session_is_refused(tmp_path: Path) -> None:
    made_up.write(tmp_path, [])
    with pytest.raises(ResultsError, match="no session line"):
        verdict_text(tmp_path)
