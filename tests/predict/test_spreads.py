"""Intervals come from measured errors: their file, their tails, and what widens them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from narrowcast.measure.machine import share_of_others, used_by_all
from narrowcast.parallel import overlap
from narrowcast.predict import Cluster, Device, Level, Setup, StepPredictor, cluster, costs, loop, spreads, zoo
from narrowcast.predict.cluster import Loop
from narrowcast.toml_file import FileError

PLACE = Cluster("a", (Level("link", 0, 5.0, 50.0),), Device("cpu", memory_gbyte=20.0))
PROFILE = zoo.resnet50().profile_of(0.2, spread=0.0)


def width(place: Cluster, known: spreads.Spreads | None = None) -> float:
    made = StepPredictor(PROFILE, costs.Costs(place, known=known)).predict(Setup(4, "int8/256"))
    return made.high / made.low


def test_the_file_is_read_and_written_alike() -> None:
    text = spreads.FILE.read_text()
    assert spreads.dump(spreads.parse(text, "spreads.toml")) == text
    with pytest.raises(FileError, match=r"freedom: must be 3 or more"):
        spreads.parse(text.replace("freedom = 4.0", "freedom = 1.0", 1), "spreads.toml")


@pytest.mark.parametrize("freedom, wanted", [(3.0, 2.353), (10.0, 1.812), (math.inf, 1.645)])
def test_quantiles_of_student(freedom: float, wanted: float) -> None:
    assert float(costs.t_quantile(torch.tensor([0.95], dtype=torch.float64), freedom)) == pytest.approx(
        wanted, rel=0.01
    )


def test_few_draws_have_the_quantiles_of_the_distribution() -> None:
    low, high = overlap.interval(costs.factors(0.2, 40, torch.Generator().manual_seed(1)))
    assert (math.log(low), math.log(high)) == pytest.approx((-0.2 * 1.645, 0.2 * 1.645), rel=0.03)


def test_what_is_known_of_a_cluster_decides_the_spread() -> None:
    probed = replace(PLACE, measured=True)
    kinds = [PLACE, *(replace(PLACE, fitted_rows=rows) for rows in (1, 2, 3, 9)), probed]
    kinds += [replace(probed, busy=0.0), replace(probed, busy=0.3), replace(probed, busy=0.0, drift=0.2)]
    wanted = ["preset", "fitted-1", "fitted-2", "fitted-3", "fitted-3", "disturbed", "probed", "disturbed", "disturbed"]
    assert [spreads.kind_of(one) for one in kinds] == wanted


def test_a_busy_machine_widens_the_interval() -> None:
    known = dict.fromkeys(spreads.KINDS, spreads.Spread(0.0, 0.05, 0.02, 5.0))
    quiet = replace(PLACE, levels=(Level("link", 0, 0.2, 50.0),), measured=True, busy=0.0)
    assert width(quiet, known) < width(replace(quiet, busy=0.2), known) < width(replace(quiet, busy=0.5), known)


def test_where_nothing_travels_wires_are_not_off_by_themselves() -> None:
    """A common error cancels between two wires; that of each grows with the share of the step in which it sends."""
    known = dict.fromkeys(spreads.KINDS, spreads.Spread(0.0, 0.3, 0.1, 5.0))

    def ratio(gbit: float) -> float:
        steps = StepPredictor(PROFILE, costs.Costs(replace(PLACE, levels=(Level("link", 0, gbit, 1.0),)), known=known))
        low, high = overlap.interval(steps.steps(Setup(4, "fp32")) / steps.steps(Setup(4, "int8/256", "two_shot")))
        return high / low

    assert ratio(1000.0) < 0.5 * ratio(0.1) + 0.5 < ratio(0.1) < 2.0


def test_busy_drift_and_loop_are_in_the_file() -> None:
    made = replace(PLACE, measured=True, busy=0.25, drift=0.125, loop=Loop(1.5, 1.25, 2.0))
    assert cluster.parse(cluster.dump(made)) == made
    assert cluster.parse(cluster.dump(PLACE)).busy is None
    with pytest.raises(FileError, match=r"busy: must be 0.99 or less"):
        cluster.parse(cluster.dump(made).replace("busy = 0.25", "busy = 3.0"))


def test_others_are_all_that_our_ranks_are_not() -> None:
    # two ranks on one machine, one on another: 10 s of 20, of which ours used 6; and all ours
    ranks = [(7, 10.0, 2.0, 20.0), (7, 10.0, 4.0, 20.0), (8, 5.0, 5.0, 20.0)]
    assert share_of_others(ranks) == pytest.approx(0.2)
    assert used_by_all("cpu  100 20 999 999 0 0 0 80\ncpu0 1 2 3") == pytest.approx(200 / 100, rel=0.5)


def test_real_steps_calibrate_the_timeline() -> None:
    """Steps made with known factors: they are found again."""
    truth = replace(PLACE, loop=Loop(3.0, 1.4, 1.8))
    steps = StepPredictor(PROFILE, costs.Costs(truth, draws=0))
    took = {wire: float(steps.steps(Setup(4, wire))[0]) for wire in ("fp32", "int8/256")}
    found = loop.calibrated(PLACE, PROFILE, 4, {"alone": PROFILE.compute + 3e-3, **took}).loop
    assert (found.step_ms, found.plain, found.wires) == pytest.approx((3.0, 1.4, 1.8), rel=1e-3)


@pytest.mark.parametrize("step", [0.5, 2.0])
def test_a_step_that_no_factor_explains_tells_none(step: float) -> None:
    """Always quicker or slower than predicted, whatever calls take: 8 or an eighth would be made up."""
    assert loop.factor(lambda factor: step + 0.01 * factor, 1.2, 1.0) == 1.0
    said = spreads.rest_words(replace(PLACE, loop=Loop(1.5, 1.25, 1.0)))
    assert "its sums take 1.25x as long as bare ones, calls with fewer bits 1x (steps did not tell)" in said


def test_beyond_the_ranks_that_were_probed_is_said() -> None:
    table = cluster.CollectiveTimings("all_reduce", 4, ((4096.0, 1e-4), (2.0**24, 0.05)))
    place = replace(PLACE, levels=(replace(PLACE.levels[0], tables=(table,)),))
    steps = StepPredictor(PROFILE, costs.Costs(place, draws=2))
    assert [steps.predict(Setup(world, "fp32")).beyond_probed for world in (2, 4, 8)] == [False, False, True]
