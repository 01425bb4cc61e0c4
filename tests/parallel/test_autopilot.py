"""The autopilot on described links: what it takes, how soon, when it goes back, and that it can be repeated."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.parallel import policy
from narrowcast.parallel.autopilot import Autopilot, errors, lines
from narrowcast.parallel.autopilot.alarm import COOL_STEPS, Alarm
from narrowcast.parallel.autopilot.history import Decided, Replay, read
from narrowcast.parallel.autopilot.link import DescribedLink, DescribedRoad
from narrowcast.parallel.autopilot.pilot import BEAT, FLUSH
from narrowcast.parallel.autopilot.times import HALF, PLAIN, WIRES, Fit, StepTimes, without_calls
from narrowcast.parallel.policy import AS_IS, TensorInfo, Watch

WORLD = 4
TENSORS = [TensorInfo(f"layer{number}.weight", (64, 64), torch.float32) for number in range(6)]
SLOW, FAST = DescribedLink(0.003, compute=0.02), DescribedLink(100.0, compute=0.02)
Gradient = Callable[[int, str, Tensor], Tensor]
"""Of a step and a tensor: what becomes of normal values."""


class Drive:
    """Steps of all ranks in one process, with gradients from a generator."""

    def __init__(
        self,
        pilot: Autopilot,
        link: DescribedLink | Callable[[int], DescribedLink],
        of: Gradient = lambda step, name, x: x,
    ):
        self.pilot, self.of, self.step = pilot, of, 0
        buckets = [TENSORS[:2], TENSORS[2:4], TENSORS[4:]]
        self.road = DescribedRoad(link, WORLD, pilot, TENSORS, lambda: buckets, lambda: self.step)
        self.wires: list[dict[str, str]] = []
        self.roads: list[str] = []

    def run(self, steps: int) -> Drive:
        ranks = [Watch(self.pilot, 1) for _ in range(WORLD)]
        for _ in range(steps):
            decision = self.pilot.at(self.step)
            self.wires.append({info.name: str(self.pilot(info, self.step)) for info in TENSORS})
            self.roads.append(decision.road)
            for rank, watch in enumerate(ranks) if self.pilot.due(self.step) else ():
                for info in TENSORS:
                    watch.look(info, self._gradient(rank, info), self.step, "local")
            seen = [watch.take(self.step) for watch in ranks]
            together = Watch(self.pilot, 1)
            together.give(seen[0])
            together.decide(self.step, lambda _, seen=seen: sum(map(Watch.flat, seen[1:]), Watch.flat(seen[0])), WORLD)
            self.step += 1
        return self

    def _gradient(self, rank: int, info: TensorInfo) -> Tensor:
        seed = zlib.crc32(f"{self.step} {rank} {info.name}".encode())
        return self.of(self.step, info.name, torch.randn(info.shape, generator=torch.Generator().manual_seed(seed)))

    def changes(self) -> list[int]:
        return [step for step in range(1, self.step) if self.wires[step] != self.wires[step - 1]]


def bits(wires: dict[str, str]) -> list[float]:
    return [32.0 if wire == "as-is" else nc.codec(wire).bits_per_value for wire in wires.values()]


def test_it_takes_few_bits_on_a_slow_link_after_one_beat_and_stays() -> None:
    drive = Drive(nc.auto(), SLOW).run(40)
    assert drive.roads[:BEAT] == [PLAIN] * BEAT
    assert drive.changes() == [BEAT]
    assert max(bits(drive.wires[-1])) < 5


def test_it_leaves_everything_as_it_is_on_a_fast_link() -> None:
    drive = Drive(nc.auto(), FAST).run(40)
    assert set(drive.roads) == {PLAIN}
    assert [entry["road"] for entry in drive.pilot.history()] == [PLAIN]


def test_the_backends_16_bits_are_taken_where_codecs_cost_too_much() -> None:
    drive = Drive(nc.auto(), DescribedLink(0.5, compute=0.0001, codec_gbyte=0.05, latency=1e-6)).run(20)
    assert drive.roads[-1] in (HALF, WIRES)
    assert set(drive.wires[-1].values()) <= {"bf16", "as-is"}


def test_it_settles_within_20_steps_after_the_link_changes_either_way() -> None:
    drive = Drive(nc.auto(), lambda step: SLOW if 40 <= step < 90 else FAST).run(140)
    assert max(bits(drive.wires[40])) == 32
    assert max(bits(drive.wires[60])) < 5
    assert max(bits(drive.wires[110])) == 32
    assert [step for step in drive.changes() if not (40 < step <= 60 or 90 < step <= 110)] == []


def test_a_link_that_flaps_does_not_make_it_flap() -> None:
    drive = Drive(nc.auto(), lambda step: SLOW if step // 7 % 2 else FAST).run(400)
    assert len(drive.changes()) <= 16


class Lying(DescribedRoad):
    """Sums look quick, and steps are slow with whatever is not as it was."""

    def numbers(self) -> tuple[float, float, float]:
        return 1.0, 0.1 if self._pilot.plan.road == PLAIN else 0.11, 0.05


def test_what_does_not_gain_is_taken_back_and_not_tried_again_soon() -> None:
    pilot = nc.auto()
    drive = Drive(nc.auto(), SLOW)
    drive.pilot, drive.road = pilot, Lying(SLOW, WORLD, pilot, TENSORS, lambda: [TENSORS], lambda: drive.step)
    drive.run(200)
    assert drive.roads[BEAT] == WIRES
    assert any("no gain: 110.0 ms" in entry["reason"] for entry in pilot.history())
    assert sum(road != PLAIN for road in drive.roads) <= 40
    assert drive.roads[-1] == PLAIN


def test_a_tensor_whose_errors_grow_gets_more_bits_at_once() -> None:
    """Heavy tails in one layer: few bits would bring back the largest value of each block and nothing else."""

    def of(step: int, name: str, x: Tensor) -> Tensor:
        if step >= 30 and name == TENSORS[3].name:
            x.view(-1)[::64] *= 300
        return x

    drive = Drive(nc.auto(every=BEAT), SLOW, of).run(60)
    assert nc.codec(drive.wires[29][TENSORS[3].name]).bits_per_value < 5
    assert nc.codec(drive.wires[36][TENSORS[3].name]).bits_per_value > 8
    assert nc.codec(drive.wires[-1][TENSORS[0].name]).bits_per_value < 5
    assert any("error over the bound" in entry["reason"] for entry in drive.pilot.history())


@pytest.mark.parametrize("skips", [False, True])
def test_non_finite_gradients_move_their_tensor_alone_where_nobody_skips_them(skips: bool) -> None:
    def of(step: int, name: str, x: Tensor) -> Tensor:
        return torch.full_like(x, math.inf) if step == 34 and name == TENSORS[1].name else x

    drive = Drive(nc.auto(every=BEAT), SLOW, of)
    drive.road.skips = skips
    drive.run(60)
    assert (nc.codec(drive.wires[37][TENSORS[1].name]).bits_per_value >= 16) != skips
    assert all(width < 5 for width in bits({n: w for n, w in drive.wires[37].items() if n != TENSORS[1].name}))


@pytest.mark.parametrize("loss", [math.nan, 50.0])
def test_a_loss_that_jumps_moves_all_of_them_and_they_come_back(loss: float) -> None:
    drive = Drive(nc.auto(), SLOW).run(20)
    for number in range(20):
        drive.pilot.observe(1.0 + 0.01 * (number % 3))
    drive.run(5)
    assert max(bits(drive.wires[-1])) < 5, "no jump yet"
    drive.pilot.observe(loss)
    drive.run(10)
    assert min(bits(drive.wires[-1])) >= 16
    drive.run(300)
    assert max(bits(drive.wires[-1])) < 5


def test_residuals_are_sent_when_a_wire_without_them_comes() -> None:
    drive = Drive(nc.auto(candidates=["int4/128+ef"]), lambda step: SLOW if step < 40 else FAST).run(80)
    back = next(step for step in drive.changes() if step > 40)
    assert set(drive.wires[back - 1].values()) == {"int4/128+ef"}
    left = [name for name, wire in drive.wires[back + 1].items() if wire != "int4/128+ef"]
    assert len(left) >= 4
    assert {drive.wires[back][name] for name in left} == {FLUSH}
    assert {drive.wires[back + 1][name] for name in left} <= {"as-is", "bf16"}


def test_a_dry_run_says_and_does_nothing() -> None:
    drive = Drive(nc.auto(dry_run=True), SLOW).run(40)
    assert set(drive.roads) == {PLAIN}
    assert [entry["road"] for entry in drive.pilot.history()] == [WIRES]
    assert drive.pilot.notes()[0].startswith("auto: would be int4/128")


def test_the_bound_is_said_in_words_and_can_be_changed() -> None:
    assert "1 % to the energy of the gradient or of the noise between batches" in "\n".join(nc.auto().notes())
    strict = Drive(nc.auto(error=1e-5), SLOW).run(20)
    assert min(bits(strict.wires[-1])) >= 16
    loose = Drive(nc.auto(error=0.5, candidates=["int2/64+ef", "int4/128+ef"], min_bits=2), SLOW).run(20)
    assert max(bits(loose.wires[-1])) < 3
    assert max(bits(Drive(nc.auto(min_bits=8), SLOW).run(20).wires[-1])) > 8


def test_low_rank_is_taken_where_a_gradient_has_it() -> None:
    def of(step: int, name: str, x: Tensor) -> Tensor:
        return x[:, :1] @ x[:1] + 0.001 * x

    drive = Drive(nc.auto(candidates=["bf16+rank2+ef", "int4/128+ef"], min_bits=0), SLOW, of).run(20)
    assert set(drive.wires[-1].values()) == {"bf16+rank2+ef"}


def test_a_run_that_goes_on_decides_as_one_that_was_not_cut_wherever_that_was() -> None:
    def link(step: int) -> DescribedLink:
        return SLOW if 20 <= step < 45 else FAST

    def drive() -> Drive:
        return Drive(nc.auto(candidates=["int4/128+ef"]), link)

    whole = drive().run(70)
    decided = [entry["step"] for entry in whole.pilot.history()]
    assert any(entry["reason"] == "residuals are sent" for entry in whole.pilot.history())
    for cut in sorted({step + off for step in decided for off in (-1, 0, 1)} | {63}):
        first, second = drive().run(cut), drive()
        saved = first.pilot.state_dict()
        text = json.dumps(saved)
        first.run(7)
        assert json.dumps(saved) == text, "a state that is kept in memory stays as it was"
        second.pilot.load_state_dict(json.loads(text))
        second.step, second.wires = cut, first.wires[:cut]
        assert second.run(70 - cut).wires == whole.wires, cut
        assert second.pilot.history() == whole.pilot.history(), cut


def test_a_state_of_other_candidates_is_refused() -> None:
    saved = Drive(nc.auto(), SLOW).run(20).pilot.state_dict()
    with pytest.raises(ValueError, match="the state is of candidates"):
        nc.auto(candidates=["int8/256"]).load_state_dict(saved)


def test_losses_that_hardly_differ_ring_no_alarm_and_one_trouble_is_one() -> None:
    alarm = Alarm()
    for number in range(100):
        alarm.observe(2.0 + 1e-9 * (number == 60))
    assert not alarm.rang()
    alarm.observe(3.0)
    assert alarm.rang()
    for step in (10, 15, 20):
        assert alarm.cooled(step, {"a"}) == {"a"}
    assert alarm.cooled(20 + COOL_STEPS - 1, ()) == {"a"}
    assert alarm.cooled(20 + COOL_STEPS, ()) == frozenset()
    assert alarm.cooled(200, {"a"}) == alarm.cooled(200 + 2 * COOL_STEPS - 1, ()) == {"a"}


def test_what_has_16_bits_as_it_is_does_not_gain_by_16_bits() -> None:
    short = [replace(info, dtype=torch.bfloat16) for info in TENSORS]
    pilot = nc.auto(candidates=[])
    road = DescribedRoad(SLOW, WORLD, pilot, short, lambda: [short], lambda: 0)
    fits = road.fits(["as-is", "bf16"], 0)
    assert fits[PLAIN].per_value == fits["as-is"].per_value == fits["bf16"].per_value
    assert not road.halves


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"error": 0.0}, "error=0.0; give a share"),
        ({"every": 2}, "every=2; give a multiple of 5 steps"),
        ({"candidates": ["e4m3+aps"]}, "whose error is not that of one rank"),
        ({"candidates": ["int9/256"]}, "int9"),
        ({"candidates": ["int2/64+ef"]}, "candidates has int2/64.ef, of 2.5 bits a value; give min_bits=2.5 or less"),
        ({"min_bits": "4"}, "min_bits='4'; give a number"),
        ({"min_bits": math.nan}, "min_bits=nan; give a number"),
        ({"error": "1%"}, "error='1%'; give a share"),
        ({"every": 7.5}, "every=7.5; give a multiple of 5 steps"),
        ({"every": 7}, "every=7; give a multiple of 5 steps"),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        nc.auto(**arguments)


def test_a_spec_is_no_list_of_candidates() -> None:
    with pytest.raises(TypeError, match="give a list of specs"):
        nc.auto(candidates="int8/256")


def test_a_policy_has_one_model() -> None:
    drive = Drive(nc.auto(), SLOW)
    with pytest.raises(ValueError, match="has a model already"):
        Drive(drive.pilot, SLOW)
    with pytest.raises(ValueError, match="inside another policy"):
        nc.auto()(TENSORS[0], 0)


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    drive = Drive(nc.auto(), lambda step: SLOW if 40 <= step < 90 else FAST).run(140)
    path = tmp_path / "run.jsonl"
    path.write_text(lines(drive.pilot.history()))
    again = nc.replay(path)
    assert again.history() == drive.pilot.history()
    assert [{i.name: again(i, s) for i in TENSORS} for s in range(140)] == drive.wires
    assert [again.at(step).road for step in range(140)] == drive.roads
    assert again(TensorInfo("another", (10,), torch.float32), 60) == AS_IS.spec


GOOD = json.loads(lines([Decided(3, WIRES, {"a": "int8/256"}, "why").as_dict()]))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": 2}, "version 2"),
        ({"step": -1}, "step -1"),
        ({"step": "3"}, "step is '3'"),
        ({"step": True}, "step is True"),
        ({"road": "air"}, "roads are plain, half, wires"),
        ({"wires": {"a": "int9/256"}}, "int9"),
        ({"wires": {"a": 8}}, "the wire of a is 8"),
        ({"wires": []}, "wires is"),
        ({"more": 1}, "a decision has"),
        ({"wires": {"a": "int8/256+diff"}}, "the wire of a is 'int8/256.diff': .* leave it out"),
        ({"road": "half"}, "takes all tensors alike, and wires are named"),
        ({"numbers": {"error": "much"}}, "error is 'much'; it must be a number"),
        ({"numbers": {"error": 10**400}}, "error is 10+; it must be a number"),
    ],
)
def test_a_broken_history_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(GOOD | change) + "\n")
    with pytest.raises(ValueError, match=words):
        read(path)


def test_a_number_that_was_infinite_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(lines([Decided(3, numbers={"error": math.inf}).as_dict()]))
    assert nc.replay(path).history() == [json.loads(path.read_text())]


def test_a_history_of_another_model_is_refused() -> None:
    again = Replay([Decided(3, WIRES, {"a": "int8/256", "b": "bf16"})])
    again.check_names(["a", "b", "c"])
    with pytest.raises(ValueError, match="has a wire for 'a' and 1 more, and this model no such parameter"):
        again.check_names(["c"])


@pytest.mark.parametrize("text", ["[" * 100_000, "", "[]\n", "{\n", '{"step": 1}\n', 2 * (json.dumps(GOOD) + "\n")])
def test_what_is_no_history_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="replay: "):
        read(path)


def test_a_fit_goes_through_both_times_and_never_falls() -> None:
    fit = Fit.of(0.1, 0.1 + 1e-6 * 7_500, 10_000)
    assert (fit(2_500), fit(10_000)) == pytest.approx((0.1, 0.1 + 1e-6 * 7_500))
    assert Fit.of(0.2, 0.1, 10_000).per_value == 0


class Clock:
    """Marks are seconds that a test sets."""

    cuda, now = False, 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_steps_and_calls_are_timed_as_they_wait_for_each_other() -> None:
    clock = Clock()
    times = StepTimes(clock)  # type: ignore[arg-type]
    for number in range(4):
        clock.now = 10.0 * number
        times.begin()
        ends = []
        for at, name in ((1.0, "a"), (2.0, "b")):
            clock.now = 10.0 * number + at
            ends.append(times.ready((name,), 5))
        times.end()
        # the first takes until 3, the second waits for it and is done at 4.5
        for at, done in zip((3.0, 4.5), ends, strict=True):
            clock.now = 10.0 * number + at
            done()
    assert times.numbers() == (1.0, 4.5, 3.5)
    assert times.last()[0] == [1.0, 2.0]
    assert times.numbers() == (0.0, 0.0, 0.0)


def test_steps_in_which_somebody_looked_do_not_say_when_buckets_are_ready() -> None:
    """A first look compiles kernels: seconds, in a step of milliseconds."""
    clock = Clock()
    times = StepTimes(clock)  # type: ignore[arg-type]
    for number, late in enumerate((7.0, 0.0, 0.1, -0.1, 9.0)):
        clock.now = 100.0 * number
        times.begin()
        for at, name in ((1.0, "a"), (2.0, "b" if number else "made anew")):
            clock.now = 100.0 * number + at + (late if name != "a" else 0.0)
            times.ready((name,), 5)()
            if number == 4 and name == "a":
                times.looks()
        times.end()
    assert times.numbers()[0] == 1.0
    ready, took, marks = times.last()
    assert (ready, took, marks.names) == ([1.0, pytest.approx(2.0)], [0.0, 0.0], [("a",), ("b",)])


def queued(ready: list[float], calls: list[float]) -> list[float]:
    """From ready to done, where calls wait for each other."""
    took, end = [], 0.0
    for at, call in zip(ready, calls, strict=True):
        end = max(end, at) + call
        took.append(end - at)
    return took


@pytest.mark.parametrize("calls", [[34.0] * 6, [11.0, 34.0, 9.0, 60.0, 2.0, 200.0], [0.5] * 6])
def test_calls_that_hold_up_backward_are_told_from_those_that_run_beside_it(calls: list[float]) -> None:
    compute = [50.0, 3.0, 2.0, 3.0, 2.5, 3.0]
    beside = [sum(compute[: number + 1]) for number in range(len(compute))]
    assert without_calls(beside, queued(beside, calls)) == beside or max(calls) < min(compute)
    held, at = [], 0.0
    for gap, call in zip(compute, calls, strict=True):
        held.append(at + gap)
        at += gap + call
    own = without_calls(held, calls)
    assert own == [pytest.approx(sum(compute))] * len(calls)
    assert own[-1] + sum(calls) == pytest.approx(at)
    assert without_calls([4.0], [9.0]) == [4.0]
    assert without_calls([], []) == []


def test_a_model_of_one_bucket_is_timed_by_marks_that_the_device_has_passed() -> None:
    class Mark(float):
        passed = False

        def synchronize(self) -> None:
            self.passed = True

    class Cuda(Clock):
        cuda = True

        def mark(self) -> Mark:
            return Mark(self.now)

        def seconds(self, begin: Mark, end: Mark) -> float:
            assert end != 2.0 or end.passed, "elapsed_time raises where the device is not there yet"
            return float(end) - float(begin)

    clock = Cuda()
    times = StepTimes(clock)  # type: ignore[arg-type]
    times.begin()
    clock.now = 1.0
    done = times.ready(("a",), 5)
    times.end()
    clock.now = 2.0
    done()
    # the next step's one bucket is the first and the last: it is under way when somebody asks
    times.begin()
    clock.now = 3.0
    times.ready(("a",), 5)
    times.end()
    assert times.numbers() == (1.0, 2.0, 1.0)


@pytest.mark.parametrize("values", [16_385, 20_480, 32_768, 49_152, 131_072, 100_003])
def test_looks_at_a_tensor_come_to_every_part_of_it(values: int) -> None:
    """Or an error could stay unseen for a whole training."""
    places = torch.arange(values, dtype=torch.float32)
    turns = -(-(values // errors.PIECES) // errors.PIECE)
    seen = torch.cat([errors.pieces(places, turn) for turn in range(turns)]).unique()
    assert values - seen.numel() < errors.PIECES


def test_a_huge_gradient_does_not_stay_in_the_bound() -> None:
    codecs = [nc.codec("int8/256")]
    huge, plain = (errors.look(scale * torch.randn(20_000), codecs, 0) for scale in (1e19, 1.0))
    one = errors.TensorErrors.of(huge.tolist(), 1, 1)
    assert one.bad
    assert math.isfinite(one.energy)
    assert not errors.TensorErrors.of(plain.tolist(), 1, 1).bad


@pytest.mark.parametrize("made", [nc.auto, lambda: Replay([Decided(0, HALF)])])
def test_a_policy_for_all_tensors_and_steps_is_no_part_of_another(made: Callable[[], object]) -> None:
    for outer in ({"*": made()}, nc.schedule({0: "as-is", 30: made()})):
        with pytest.raises(ValueError, match="give it to attach as it is"):
            policy.check(outer)
    policy.check(made())
