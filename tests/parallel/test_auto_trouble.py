"""The autopilot in trouble: links that flap, numbers that are none, passes that break off, wires that were refused."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from parallel.test_autopilot import FAST, SLOW, TENSORS, WORLD, Clock, Drive, bits
from torch import Tensor

import narrowcast as nc
from narrowcast.parallel.autopilot.link import DescribedLink, DescribedRoad
from narrowcast.parallel.autopilot.pilot import BEAT, DOUBTS, FLUSH
from narrowcast.parallel.autopilot.plan import Measurements, StepPlan
from narrowcast.parallel.autopilot.times import PLAIN, WIRES, Fit, Layout, StepTimes, without_calls
from narrowcast.parallel.autopilot.trial import CLEAR, TURNS, Trial

SIXTEEN = StepPlan(WIRES, tuple((info.name, "bf16") for info in TENSORS))


class Unsteady(DescribedRoad):
    """Steps that take longer or less than the link says, whatever travels."""

    is_real = True
    noise: random.Random

    def numbers(self) -> tuple[float, float, float]:
        if self.noise.random() < 0.05:
            return 0.0, 0.0, 0.0
        _, step, busy = super().numbers()
        return 1.0, step * self.noise.uniform(0.7, 1.4), busy * self.noise.choice([0.5, 1.0, 1.0, 1.0, 2.0])


def troubled(seed: int) -> Drive:
    """A link, gradients and times that change at random."""
    chance = random.Random(seed)
    links = [
        DescribedLink(chance.choice([0.0005, 0.003, 0.1, 100.0]), compute=0.02, codec_gbyte=chance.choice([0.01, 4.0]))
        for _ in range(6)
    ]
    bad = {(chance.randrange(300), chance.choice(TENSORS).name): chance.choice([math.inf, math.nan]) for _ in range(40)}
    first = chance.choice([0, 7])

    def of(step: int, name: str, x: Tensor) -> Tensor:
        if step < first or (step, name) in bad:
            return torch.full_like(x, bad.get((step, name), math.inf))
        return x * 10.0 ** (step // 50 % 3)

    pilot = nc.auto(every=chance.choice([BEAT, 35, 1000]), candidates=["int8/256", "int4/128+ef", "int4/128"])
    drive = Drive(nc.auto(), SLOW, of)
    drive.pilot = pilot
    drive.road = Unsteady(
        lambda step: links[step // 50 % 6], WORLD, pilot, TENSORS, lambda: [TENSORS], lambda: drive.step
    )
    drive.road.noise = chance
    drive.road.halves = chance.random() < 0.5
    return drive


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_it_goes_on_backs_off_and_sends_what_is_owed(seed: int) -> None:
    drive = troubled(seed)
    for _ in range(60):
        drive.run(BEAT)
        now = {info.name: drive.pilot(info, drive.step) for info in TENSORS}
        few = {name for name, wire in now.items() if nc.codec(wire).bits_per_value < 16}
        # what was found at the last step's end holds from the next one on
        assert not few & drive.pilot.known.cooled, (drive.step, drive.pilot.history()[-1])
        assert few <= set(drive.pilot.known.errors), "nobody has seen what few bits lose"
    for before, after in zip(drive.wires, drive.wires[1:], strict=False):
        for name, wire in before.items():
            if nc.codec(wire).feedback and wire != FLUSH:
                assert nc.codec(after[name]).feedback, (name, wire, after[name])


def test_few_bits_are_not_taken_on_the_word_of_gradients_that_were_inf() -> None:
    """As the first ones are under a loss scaler: their error was found to be none."""

    def of(step: int, name: str, x: Tensor) -> Tensor:
        return torch.full_like(x, math.inf) if step < first else x.exp() ** 6

    for first in (0, 20):
        drive = Drive(nc.auto(every=1000), lambda step: FAST if step < 150 else SLOW, of).run(200)
        assert min(min(bits(wires)) for wires in drive.wires) >= 16
        assert drive.pilot.history()[0]["step"] == first + BEAT, "as soon as there is something to see"


def test_a_look_at_what_is_not_finite_leaves_what_was_known() -> None:
    def of(step: int, name: str, x: Tensor) -> Tensor:
        return torch.full_like(x, math.inf) if step >= 20 else x

    drive = Drive(nc.auto(every=BEAT), SLOW, of).run(20)
    known = {name: one.energy for name, one in drive.pilot.known.errors.items()}
    drive.run(20)
    assert {name: one.energy for name, one in drive.pilot.known.errors.items()} == known


def test_where_all_else_was_refused_it_stays_until_it_must_change() -> None:
    drive = Drive(nc.auto(candidates=["int8/256"]), SLOW).run(20)
    pilot = drive.pilot
    drive.road.halves = False
    before = pilot.plan
    assert before.road == WIRES
    pilot.known.fits = {name: Fit(0.0, 1e-9 if name in (PLAIN, "as-is") else 1.0) for name in pilot.known.fits}
    pilot.known.factors, pilot.known.per_bit = {}, 0.0
    pilot._refused = {StepPlan(): 10**6}
    pilot._change(25, "the link has changed")
    assert pilot.plan == before
    pilot.known.cooled = frozenset(info.name for info in TENSORS)
    pilot._change(25, "non-finite gradients", must=True)
    assert pilot.plan == StepPlan()


def test_what_does_not_gain_is_not_taken_back_to_bits_that_are_too_few_by_now() -> None:
    drive = Drive(nc.auto(candidates=["int4/128+ef"]), SLOW).run(20)
    pilot = drive.pilot
    few = pilot.plan
    pilot._take(20, pilot.known.cost(SIXTEEN, TENSORS), "a test", Trial(few, SIXTEEN, 1e-9, 1.0))
    pilot.known.cooled = frozenset([TENSORS[0].name])
    pilot._judge(25, 0.0)
    assert nc.codec(dict(pilot.plan.wires)[TENSORS[0].name]).bits_per_value >= 16
    assert pilot.known.cost(pilot.plan, TENSORS).error <= pilot.known.limit()


def test_a_link_that_nobody_listens_to_is_counted_once() -> None:
    drive = Drive(nc.auto(), SLOW).run(20)
    drive.pilot._deaf_until = 120
    before = drive.pilot.known.per_bit
    drive.road._at = lambda _: DescribedLink(SLOW.gbit / 2, compute=0.02)
    drive.run(110)
    assert drive.pilot.known.per_bit == pytest.approx(2 * before, rel=0.05)


@pytest.mark.parametrize("doubtful", [1, 2, 7])
def test_measurements_that_contradict_the_steps_are_made_again(doubtful: int) -> None:
    """Where buckets seem to be ready long after a step was over, nothing seems to gain. In the end it decides."""
    drive = Drive(nc.auto(), SLOW)
    layout, numbers, asked = drive.road.layout, drive.road.numbers, 0

    def late(stalls: bool) -> Any:
        nonlocal asked
        asked += 1
        true = layout()
        return true if asked > doubtful else replace(true, ready=tuple(1e4 + at for at in true.ready))

    def as_seen() -> tuple[float, float, float]:
        drive.road.layout = layout  # type: ignore[method-assign]
        seen = numbers()
        drive.road.layout = late  # type: ignore[method-assign]
        return seen

    drive.road.numbers = as_seen  # type: ignore[method-assign]
    drive.run(80)
    waits = min(doubtful, DOUBTS)
    assert set(drive.roads[: (1 + waits) * BEAT]) == {PLAIN}
    # whatever came first, it looks again at buckets that are ready when they are
    assert drive.wires[-1] == Drive(nc.auto(), SLOW).run(80).wires[-1]


@pytest.mark.parametrize("kept", ["_recent", "_plain_seconds"])
def test_one_slow_beat_does_not_let_a_loss_pass_for_a_gain(kept: str) -> None:
    """As the beat after a change is on a busy machine: what comes next is compared with steps as they are."""
    pilot = Drive(nc.auto(), SLOW).run(5).pilot
    usual, pilot.plan, pilot._trial = pilot._step_seconds, StepPlan(), None
    pilot._step_seconds, pilot._recent, pilot._plain_seconds = 5 * usual, [5 * usual], 0.0
    setattr(pilot, kept, [usual, 5 * usual] if kept == "_recent" else usual)
    pilot._change(10, "looked again")
    assert pilot._trial is not None
    assert pilot._trial.took <= usual


def test_codecs_that_take_processors_from_computing_are_tried_once_not_in_every_mixture() -> None:
    """Calls are as quick as they were said to be, and steps are slower all the same."""
    drive = Drive(nc.auto(), DescribedLink(0.03, compute=0.02))
    real = drive.road.numbers

    def seen() -> tuple[float, float, float]:
        one, step, busy = real()
        return one, step * (3.0 if drive.pilot.plan.wires else 1.0), busy

    drive.road.numbers = seen  # type: ignore[method-assign]
    drive.run(150)
    tried = [entry for entry in drive.pilot.history() if entry["road"] == WIRES and entry["numbers"]]
    assert len(tried) == 1, tried
    assert WIRES not in drive.roads[-5:]


class Measured(DescribedRoad):
    """Sums promise much. Steps take what a test says, by what travels and when, as a part of those at the start."""

    is_real, usual = True, 0.0
    share: Callable[[bool, int], float]

    def numbers(self) -> tuple[float, float, float]:
        _, took, busy = super().numbers()
        self.usual = self.usual or took
        return 1.0, self.usual * self.share(bool(self._pilot.plan.wires), self._step()), busy


def measured(share: Callable[[bool, int], float]) -> Drive:
    drive, pilot = Drive(nc.auto(), SLOW), nc.auto(candidates=["int4/128+ef"], every=BEAT)
    drive.pilot = pilot
    drive.road = Measured(SLOW, WORLD, pilot, TENSORS, lambda: [TENSORS], lambda: drive.step)
    drive.road.halves, drive.road.share = False, share
    return drive


@pytest.mark.parametrize("with_wires, stays", [(1.05, False), (1.0, False), (0.95, True)])
def test_a_small_gain_has_to_show_in_turns(with_wires: float, stays: bool) -> None:
    """The first beat is slow, as a training's is; then each is up to 1 % quicker or slower by chance."""
    for seed in range(3):
        chance = random.Random(seed)

        def share(wires: bool, step: int, chance: random.Random = chance) -> float:
            return (1.15 if step <= BEAT else chance.uniform(0.99, 1.01)) * (with_wires if wires else 1.0)

        drive = measured(share).run(60)
        taken = [step for step, road in enumerate(drive.roads) if road == WIRES]
        assert taken[0] == BEAT
        assert drive.roads[-1] == (WIRES if stays else PLAIN), drive.pilot.history()
        turns = [entry for entry in drive.pilot.history() if "in turns, since" in entry["reason"]]
        assert len(turns) == 2 * TURNS, "and then it is settled"


def test_a_great_gain_needs_no_turns() -> None:
    drive = measured(lambda wires, step: 0.98 / CLEAR if wires else 1.0).run(60)
    assert set(drive.roads[BEAT:]) == {WIRES}


def test_what_may_no_longer_be_sent_ends_the_turns() -> None:
    drive = measured(lambda wires, step: 0.95 if wires else 1.0).run(4 * BEAT)
    assert drive.pilot._trial is not None
    later = nc.auto(candidates=["int4/128+ef"], every=BEAT)
    later.load_state_dict(json.loads(json.dumps(drive.pilot.state_dict())))
    assert later._trial == drive.pilot._trial
    drive.pilot.known.bound = 0.0
    drive.run(10 * BEAT)
    assert drive.pilot._trial is None
    assert drive.roads[-1] == PLAIN


@pytest.mark.parametrize("at", range(10, 50, 5))
def test_a_link_that_changes_in_the_turns_is_met_as_any_other(at: int) -> None:
    """Sums are timed anew, and what travelled before does not count the slow link twice."""
    drive = measured(lambda wires, step: 1.0)

    def numbers() -> tuple[float, float, float]:
        busy = (10.0 if drive.step >= at else 1.0) * (0.17 if drive.pilot.plan.wires else 0.2)
        return 1.0, 0.02 + busy, busy

    def fits(wires: Sequence[str], values: int) -> dict[str, Fit]:
        slow, total = 10.0 if drive.step >= at else 1.0, sum(info.numel for info in TENSORS)
        return {name: Fit(0.0, slow * (0.2 if name in (PLAIN, "as-is") else 0.17) / total) for name in (PLAIN, *wires)}

    drive.road.numbers, drive.road.fits = numbers, fits  # type: ignore[method-assign]
    drive.run(at + 60)
    assert drive.roads[-1] == WIRES, drive.pilot.history()


class HeldRoad(DescribedRoad):
    """A device on which backward goes on only when a call is done: buckets are ready the later, the more travels."""

    def layout(self, stalls: bool = False) -> Layout:
        free = super().layout()
        real = Measurements(self._pilot.known.codecs, layout=free)
        real.fits = self.fits([str(codec) for codec in real.codecs], 0)
        plan = self._pilot.plan
        if plan.road == WIRES:
            problem, wires = real._problem(self._tensors), dict(plan.wires)
            names = [str(codec) for codec in real.codecs]
            choice = [names.index(wires.get(info.name, "as-is")) for info in self._tensors]
            calls = [problem.service(bucket, choice) for bucket in range(len(free.buckets))]
        else:
            calls = [real.fits[plan.road](values) for values in free.values]
        ready, at, before = list[float](), 0.0, 0.0
        for own, call in zip(free.ready, calls, strict=True):
            at += own - before
            ready.append(at)
            at, before = at + call, own
        self.took = at
        return replace(free, ready=tuple(without_calls(ready, calls) if stalls else ready))

    def numbers(self) -> tuple[float, float, float]:
        seen = self.layout()
        return 1.0, self.took, self.took - DescribedRoad.layout(self).ready[-1] if seen.ready else 0.0


@pytest.mark.parametrize("gbit", [0.003, 0.03, 0.3])
def test_few_bits_are_found_where_calls_hold_up_backward(gbit: float) -> None:
    """As NCCL's do on several ranks of one GPU: nothing is hidden, and buckets that are late are no reason to wait."""
    drive = Drive(nc.auto(), DescribedLink(gbit, compute=0.02))
    buckets = [TENSORS[:2], TENSORS[2:4], TENSORS[4:]]
    pilot = nc.auto()
    drive.pilot = pilot
    drive.road = HeldRoad(DescribedLink(gbit, compute=0.02), WORLD, pilot, TENSORS, lambda: buckets, lambda: drive.step)
    drive.run(60)
    took = drive.road.numbers()[1]
    fewest = 0.02 + sum(drive.road.link.fit("int4/128+ef", WORLD)(sum(info.numel for info in part)) for part in buckets)
    assert took <= 1.03 * fewest, pilot.history()


def test_steps_that_take_no_time_are_no_reason_to_end() -> None:
    pilot = nc.auto()
    drive = Drive(nc.auto(), FAST)
    free = DescribedLink(1.0, compute=0.0)
    drive.pilot, drive.road = pilot, DescribedRoad(free, 1, pilot, TENSORS, lambda: [TENSORS], lambda: drive.step)
    assert set(drive.run(20).roads) == {PLAIN}


def test_a_backward_pass_that_broke_off_leaves_no_marks() -> None:
    clock = Clock()
    times = StepTimes(clock)  # type: ignore[arg-type]
    for begin, is_whole in ((0.0, False), (10.0, True)):
        clock.now = begin
        times.begin()
        for at in (1.0, 2.0) if is_whole else (1.0,):
            clock.now = begin + at
            times.ready((f"{at}",), 5)()
    times.end()
    assert times.numbers() == (1.0, 2.0, 0.0)
    ready, _, marks = times.last()
    assert (ready, marks.names) == ([1.0, 2.0], [("1.0",), ("2.0",)])


def test_marks_that_nobody_asks_for_do_not_pile_up() -> None:
    """A history that is repeated decides nothing, for as long as it takes."""
    times = StepTimes(Clock())  # type: ignore[arg-type]
    for _ in range(1000):
        times.begin()
        times.ready(("a",), 5)()
        times.end()
    assert len(times._steps) < 100
    assert times.numbers()[0] == 1.0


@pytest.mark.parametrize("wrong", [{"gbit": math.nan}, {"gbit": "1"}, {"latency": math.inf}, {"compute": math.nan}])
def test_a_link_is_described_by_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be finite numbers"):
        DescribedLink(**{"gbit": 1.0, **wrong})


def test_the_state_of_another_model_is_refused() -> None:
    """Its gradients would count among those of this one."""
    saved = Drive(nc.auto(), SLOW).run(20).pilot.state_dict()
    pilot = nc.auto()
    DescribedRoad(SLOW, WORLD, pilot, TENSORS[1:], lambda: [TENSORS[1:]], lambda: 0)
    with pytest.raises(ValueError, match="which here is no tensor that may change"):
        pilot.load_state_dict(saved)
