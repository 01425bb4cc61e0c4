"""The predictor against published data: the figures that are promised, and the arithmetic of the papers, exactly."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from narrowcast_research.validation import (
    calibrate,
    ddl,
    dettmers2016,
    formulas,
    grace,
    lab,
    lab_models,
    metrics,
    qsgd,
    registry,
    steps,
    table,
    transfer,
)
from narrowcast_research.validation.metrics import Cell

from narrowcast.predict import costs, loop, spreads
from narrowcast.toml_file import FileError

QUICK = [name for name in registry.VALIDATIONS if name not in ("lab", "intervals")]


@pytest.mark.parametrize("name", [*QUICK, pytest.param("intervals", marks=pytest.mark.slow)])
def test_what_is_promised_is_reached(name: str) -> None:
    for result in registry.run([name]):
        assert all(result.met().values()), registry.target_lines(result)
        assert result.fitted
        assert result.figures.cells > 0
        json.dumps(result.as_dict())


def test_the_shipped_lab_runs_are_predicted() -> None:
    (result,) = registry.run(["lab"])
    assert all(result.met().values()), registry.target_lines(result)


def test_an_unknown_validation_is_an_error() -> None:
    with pytest.raises(ValueError, match="there are dettmers2016"):
        list(registry.run(["no-such"]))


# ---- historic models -------------------------------------------------------------------------------------------------


def test_dettmers_on_one_node() -> None:
    ours = [round(dettmers2016.one_node(total, bits), 2) for total in (104.1, 177.0) for bits in (32, 8)]
    assert ours == [3.53, 3.67, 3.71, 3.80]


def test_dettmers_on_96_gpus_with_the_papers_eighth() -> None:
    assert round(dettmers2016.best(32), 1) == 23.0
    assert round(dettmers2016.best(8), 1) == 50.6
    assert round(dettmers2016.best(8, total=177.0), 1) == pytest.approx(62.8, abs=0.3)


def test_dettmers_on_96_gpus_with_an_honest_quarter() -> None:
    honest = [round(dettmers2016.cluster(row, 8, "honest"), 1) for row in dettmers2016.ROWS]
    assert honest == [13.8, 24.3, 37.2, 37.0, 25.6, 4.9]
    with pytest.raises(ValueError, match="take paper or honest"):
        dettmers2016.cluster(dettmers2016.ROWS[0], 8, "other")


def test_krizhevskys_measurement_is_met_within_two_percent() -> None:
    assert dettmers2016.one_node(177.0, 32) / dettmers2016.KRIZHEVSKY == pytest.approx(1.0, abs=0.02)


def test_the_penalty_rule() -> None:
    assert dettmers2016.sub_batch_penalty(((1.0, 0.4), (0.5, 0.9)), passes=4, alone=0.2) == pytest.approx(0.6 + 5 * 0.2)


def test_published_volumes_and_steps() -> None:
    assert formulas.one_bit_adam_ratio(0.15) == pytest.approx(4.92, abs=0.01)
    assert formulas.sharded_volume(4) == pytest.approx(3 * 3 / 4)
    assert formulas.outside_share(32, 4) == pytest.approx(0.097, abs=0.0005)
    latency, bandwidth = formulas.aps_fit()
    assert (round(1e6 * latency), round(bandwidth / 1e9, 2)) == (315, 2.26)
    # APS against fp16 on the largest layer: 1.37 measured
    ours = formulas.aps_seconds(2_359_296, latency, bandwidth, 255e-6)
    assert 2402e-6 / ours == pytest.approx(1.37, abs=0.12)


@pytest.mark.parametrize("ratio", [2, 4, 8, 16, 32])
def test_an_all_gather_loses_from_twice_the_ratio_on(ratio: int) -> None:
    assert formulas._crossing_ranks(ratio) == formulas.gather_crossover(ratio)


# ---- honesty ---------------------------------------------------------------------------------------------------------


def test_sizes_that_judge_were_not_seen_by_the_fit() -> None:
    points = transfer._points("t32_ms")
    assert not {n for n, _ in points[::2]} & {n for n, _ in points[1::2]}
    assert len(points) == 212


def test_a_left_out_model_has_no_part_in_its_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change every measurement of one model: its own factor must not move."""
    before, plain = ddl.left_out(), ddl.times
    wrong = {key: 0.5 * t if key[0] == "BERT-Base" else t for key, t in plain(ddl.WANTED).items()}
    monkeypatch.setattr(ddl, "times", lambda method: wrong if method == ddl.WANTED else plain(method))
    after = ddl.left_out()
    assert after["BERT-Base"] == before["BERT-Base"]
    assert after["ResNet-50"] != before["ResNet-50"]


def test_the_factors_lie_inside_of_what_was_tried() -> None:
    assert all(ddl.SLOWER[0] < factor < ddl.SLOWER[-1] for factor in ddl.left_out().values())


def test_no_run_at_1_gbit_is_seen_before_it_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [cell.predicted for cell in grace.cells("unet")]
    plain = grace._runs

    def wrong(model: str, speed: str, workers: int) -> tuple[dict[str, str], ...]:
        found = plain(model, speed, workers)
        return tuple({**row, "throughput_med": "1.0"} for row in found) if speed == "1g" else found

    monkeypatch.setattr(grace, "_runs", wrong)
    assert [cell.predicted for cell in grace.cells("unet")] == before


def test_order_with_and_without_a_tolerance() -> None:
    close = [Cell(("a",), 1.00, 2.0), Cell(("b",), 1.01, 1.0)]
    assert (qsgd.in_order(close, 0.03), qsgd.in_order(close, 0.0)) == (True, False)
    apart = [Cell(("a",), 1.0, 2.0), Cell(("b",), 1.5, 1.0)]
    assert not qsgd.in_order(apart, 0.03)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    cells = [Cell(("x", "a"), 1.0, 1.1), Cell(("x", "b"), 2.0, 1.6), Cell(("x", "c"), 9.0, 1.0, counted=False)]
    found = metrics.figures(cells, case=lambda cell: cell.key[0])
    assert (found.cells, found.mape, found.median, found.largest, found.bias) == pytest.approx((2, 15, 15, 20, -5))
    assert (found.rank, found.decisions, found.decided) == (1.0, 1.0, 1)


def test_a_decision_is_right_within_three_percent() -> None:
    def decision(second: float) -> float | None:
        cells = [Cell(("x", "a"), 1.0, 2.0), Cell(("x", "b"), second, 1.0)]
        return metrics.figures(cells, case=lambda cell: cell.key[0]).decisions

    assert (decision(1.02), decision(1.04)) == (1.0, 0.0)


def test_kendall() -> None:
    assert metrics.kendall([1, 2, 3, 4], [1, 2, 3, 4]) == 1.0
    assert metrics.kendall([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert metrics.kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    # with ties scipy says the same
    assert metrics.kendall([1, 2, 2, 3], [1, 2, 3, 3]) == pytest.approx(0.8)


# ---- anyone's table --------------------------------------------------------------------------------------------------

HEADER = "model,parameters,layers,compute_ms,link,workers,wire,measured_ms,role,overlap,algorithm\n"


def written(tmp_path: Path, rows: str) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(HEADER + rows)
    return path


def test_a_table_is_fitted_on_its_calibrating_rows_alone(tmp_path: Path) -> None:
    """Steps made with 8 Gb/s and 100 us: the fit finds them, and the predicted rows come out."""
    link = table.Link(8.0, 100.0, 50.0, 50.0)
    rows = "a,4000000,,10,x,4,fp32,{},calibrate\nb,,1000;200000;3000000,20,x,4,fp32,{},calibrate\n"
    rows += "resnet50,,,100,x,8,fp32,{},calibrate\na,4000000,,10,x,8,fp32,{},predict\n"
    path = written(tmp_path, rows.format(1000, 1000, 1000, 1000))
    exact = [1e3 * link.seconds(run) for run in table.load(path)]
    path = written(tmp_path, rows.format(*exact[:3], 5 * exact[3]))
    found = table.validate(path)
    assert found.figures.cells == 1
    # the row to be predicted is off by five: nothing of it went into the fit
    assert found.cells[-1].predicted == pytest.approx(exact[3] / 1e3, rel=0.03)


def test_what_the_rows_do_not_determine_is_not_called_a_fit(tmp_path: Path) -> None:
    """One row fits one number; a codec's speed needs a row with a codec, and as many rows as numbers."""
    one = "a,4000000,,10,x,4,fp32,40,calibrate\n"
    judged, other = "a,4000000,,10,x,8,fp32,50,predict\n", "b,9000000,,10,x,4,{},70,calibrate\n"

    def assumed(rows: str) -> list[str]:
        (note,) = table.validate(written(tmp_path, rows + judged)).notes
        return [part.split()[-2] for part in note.split(", ") if "assumed" in part]

    assert assumed(one) == ["us", "GB/s"]
    assert assumed(one + other.format("fp32")) == ["GB/s"]
    assert assumed(one + other.format("int8/256")) == ["us"]
    assert assumed(one + one.replace("4000000", "7000000") + other.format("int8/256")) == []


@pytest.mark.parametrize(
    "row, word",
    [
        ("a,4000000,,10,x,4,fp32,5,train", ":2: role: take calibrate or predict"),
        ("a,4000000,,10,x,4,int9,5,predict", ":2: wire: "),
        ("a,4000000,,10,x,0,fp32,5,predict", ":2: workers: must be above 0"),
        ("a,4000000,,10,x,2.7,fp32,5,predict", ":2: workers: must be a whole number, got 2.7"),
        ("a,4000000,,10,x,1,fp32,15,calibrate", ":2: workers: a row that calibrates a link needs 2 or more, got 1"),
        ("a,4000000,,10,x,4,fp32,9,calibrate", ":2: measured_ms: a row that calibrates a link must be above"),
        ("a,4000000,,10,x,4,fp32,15,calibrate", "no row's role is predict"),
        ("a,4000000,,10,x,4,fp32,15,predict,nope", ":2: overlap: take yes or no, got 'nope'"),
        ("a,4000000,,10,x,4,fp32,15,predict,no,rings", ":2: algorithm: unknown 'rings'"),
        ("a,,inf;3,10,x,4,fp32,15,predict", ":2: layers: must be above 0, got inf"),
        ("a,4000000,,ten,x,4,fp32,5,predict", ":2: compute_ms: must be a number, got 'ten'"),
        ("a,,,10,x,4,fp32,5,predict", "give parameters or layers"),
        ("a,,1;b,10,x,4,fp32,5,predict", ":2: layers: must be a number, got 'b'"),
        ("a,4000000,,10,x,4,fp32,5,predict", "has no row whose role is calibrate"),
        ("", "the table has no rows"),
    ],
)
def test_a_wrong_table_names_its_line(tmp_path: Path, row: str, word: str) -> None:
    with pytest.raises(FileError) as caught:
        table.validate(written(tmp_path, row + "\n" if row else ""))
    assert word in str(caught.value)


def test_a_table_without_a_column_or_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text("model,link\nx,y\n")
    with pytest.raises(FileError, match="no column 'compute_ms'"):
        table.validate(path)
    with pytest.raises(FileError, match="no file"):
        table.validate(tmp_path / "none.csv")


# ---- lab runs --------------------------------------------------------------------------------------------------------


def test_lab_runs_can_be_resumed(tmp_path: Path) -> None:
    places = lab.grid(hosts=(2,), rates=("1gbit",))
    assert lab.missing(tmp_path, places) == places
    row = {"hosts": 2, "rate": "1gbit", "model": "cnn", "profile": "", "seconds": {"fp32": [0.1]}}
    (tmp_path / lab.RUNS).write_text(json.dumps(row) + '\n{"hosts": 2, "ra')
    assert [place.model for place in lab.missing(tmp_path, places)] == ["mlp", "transformer"]


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"hosts": 2, "rate": 1}', "[" * 100_000, '{"hosts": 2, "seconds": {"fp32": []}}']
)
def test_a_row_of_the_lab_that_says_nothing_is_named_with_its_line(text: str, tmp_path: Path) -> None:
    (tmp_path / lab.RUNS).write_text(f"{text}\n")
    with pytest.raises(FileError, match=r"runs\.jsonl:1: "):
        lab.read(tmp_path)


def test_runs_over_nccl_and_over_gloo_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "check_machine", lambda: None)
    row = {"hosts": 4, "rate": "10gbit", "model": "cnn", "profile": "", "seconds": {"fp32": [0.1]}}
    for backend, other in (({}, True), ({"backend": "nccl"}, False)):
        (tmp_path / lab.RUNS).write_text(json.dumps(row | backend) + "\n")
        with pytest.raises(ValueError, match=r"has runs over (gloo|nccl); give another folder"):
            next(lab.measure(tmp_path, lab.grid(), gpu=other))


def test_a_lab_that_real_steps_calibrated_is_judged_with_and_without_them(tmp_path: Path) -> None:
    shutil.copy(lab.SHIPPED / "cluster-2-1gbit.toml", tmp_path)
    rows = [json.loads(line) for line in (lab.SHIPPED / lab.RUNS).read_text().splitlines()]
    row = next(row for row in rows if (row["hosts"], row["rate"]) == (2, "1gbit"))
    (tmp_path / lab.RUNS).write_text(json.dumps(row) + "\n")
    assert lab.validate(tmp_path).extra == {}
    with (tmp_path / "cluster-2-1gbit.toml").open("a") as file:
        file.write("\n[loop]\nstep_ms = 100.0\n")
    made = lab.validate(tmp_path)
    assert made.figures.bias > made.extra["without real steps"].bias + 10


@pytest.mark.parametrize("name", lab_models.SMALL)
def test_probe_finds_the_models_of_the_lab(name: str) -> None:
    model, shape = (word.partition("=")[2] for word in lab_models.for_probe(name))
    module, batch = loop.prepare(model, shape)
    assert module(batch).shape[0] == len(batch)


def test_fits_of_a_table_of_rings_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """14 % before nodes behind PCIe had a ring's bytes."""
    monkeypatch.setattr(calibrate, "steps", lambda: list(steps.TABLES["ddl"]()))
    errors = [abs(math.expm1(-error.log)) for error in calibrate.fitted_errors(1)]
    assert sum(errors) / len(errors) < 0.08


def test_a_fitted_codec_has_no_part_in_float32() -> None:
    slow, quick = (table.Link(10.0, 50.0, speed, speed).cluster(1) for speed in (0.1, 1e4))
    sent = torch.tensor([2.0**20], dtype=torch.float64)
    for wire in ("fp32", "bf16"):
        both = (costs.Costs(made, 0).seconds("two_shot", wire, sent, 4)[0] for made in (slow, quick))
        assert torch.equal(*both), wire


def test_the_grid_is_the_promised_one() -> None:
    assert len(lab.grid()) * len(lab.WIRES) == 72


PAGE = Path(__file__).parents[2] / "docs" / "validation.md"


@pytest.mark.slow
def test_the_page_of_results_is_up_to_date() -> None:
    wanted = registry.markdown(registry.run())
    assert PAGE.read_text() == wanted, "run: narrowcast validate --markdown docs/validation.md"


@pytest.mark.parametrize("name", QUICK)
def test_each_part_of_the_page_is_up_to_date(name: str) -> None:
    page = PAGE.read_text()
    for result in registry.run([name]):
        (part,) = registry.sections([result])
        assert part in page, "run: narrowcast validate --markdown docs/validation.md"


@pytest.mark.slow
def test_the_spreads_are_what_the_command_makes_of_the_data() -> None:
    wanted = spreads.dump(calibrate.calibrated())
    assert spreads.FILE.read_text() == wanted, f"run: narrowcast validate --calibrate {spreads.FILE.name}"


def test_the_spreads_of_probed_clusters_are_those_of_the_data() -> None:
    shipped = spreads.shipped()
    for kind, quiet in (("disturbed", False), ("probed", True)):
        found = calibrate.estimate(calibrate.probed_errors(quiet))
        assert (found.step, found.wire) == pytest.approx((shipped[kind].step, shipped[kind].wire), abs=1e-4)


def test_a_cluster_has_no_part_in_its_own_interval() -> None:
    errors = calibrate.probed_errors(quiet=True)
    wrong = [replace(error, log=9.0) if error.cluster == errors[0].cluster else error for error in errors]
    others = [[one for one in these if one.cluster != errors[0].cluster] for these in (errors, wrong)]
    assert calibrate.estimate(others[0]) == calibrate.estimate(others[1])
    assert calibrate.estimate(wrong).step > 2 * calibrate.estimate(errors).step


def test_clusters_count_alike_however_many_cells_they_have() -> None:
    many = [(0.1, "a", 1.0)] * 98 + [(0.5, "b", 1.0)] * 2
    assert calibrate.quantile(many, 0.4) == 0.1
    assert calibrate.quantile(many, 0.6) == 0.5


def test_a_link_that_nothing_waits_for_is_an_error(tmp_path: Path) -> None:
    rows = "a,4000000,,10,x,4,fp32,10.001,calibrate\na,4000000,,10,x,8,fp32,50,predict\n"
    with pytest.raises(FileError, match="a limit of the search"):
        table.validate(written(tmp_path, rows))


def test_gpus_of_a_node_and_buckets_are_read(tmp_path: Path) -> None:
    head = HEADER.strip() + ",gpus_per_node,bucket_mb\n"
    rows = "resnet50,,,100,x,8,fp32,300,calibrate,,,4,1\nresnet50,,,100,x,16,fp32,310,predict,,,4,\n"
    path = tmp_path / "nodes.csv"
    path.write_text(head + rows)
    first, second = table.load(path)
    assert (first.gpus_per_node, first.setup.bucket_bytes, second.setup.bucket_bytes) == (4, 2**20, 25 * 2**20)
    (cell,) = [cell for cell in table.validate(path).cells if cell.counted]
    assert cell.low < cell.predicted < cell.high
    path.write_text(head + rows.replace("x,8", "x,4"))
    with pytest.raises(FileError, match="do not use the link between nodes"):
        table.load(path)
