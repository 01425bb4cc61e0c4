"""The autopilot: a policy that watches gradients, links and steps, decides, checks what came of it, and backs off."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.parallel.autopilot import errors as rule
from narrowcast.parallel.autopilot import state
from narrowcast.parallel.autopilot.alarm import Alarm
from narrowcast.parallel.autopilot.budget import Budget
from narrowcast.parallel.autopilot.errors import TensorErrors
from narrowcast.parallel.autopilot.history import Decided
from narrowcast.parallel.autopilot.plan import Costed, Measurements, StepPlan
from narrowcast.parallel.autopilot.times import LARGEST, LEAST, PLAIN, ROUNDS, WIRES, Road
from narrowcast.parallel.autopilot.trial import Trial
from narrowcast.parallel.policy import AS_IS, RANK, TensorInfo, Watching

log = logging.getLogger("narrowcast")

BEAT = 5
"""Every so many steps ranks add up a few numbers and decide."""
GAIN = 0.02
"""A change must promise, and then show, at least so much (half of it): less is noise."""
CHANGED = 1.3
"""Calls that take this many times longer or less, twice in a row: the link has changed."""
MOST_DRAG = 4.0
OVER = 1.25
"""Of the bound: a counted error beyond it is not left until the next decision."""
SUM_SHARE = 1.0
"""Of a step, that timing sums may take at once."""
DOUBTS = 3
"""Beats that the first decision may wait until a step as it is takes what measurements say of it, within CHANGED."""
REFINED = 4
"""Beats after the first decision in which it is looked at again: by then calls were seen beside compute."""
LOOK_STEPS = 10 * BEAT
"""Between looks, where they cost nothing that could be measured."""
FLUSH = "fp32+ef"
"""For one step, the wire of a tensor that kept a residual and has a wire without one from then on."""


class Autopilot(Watching):
    """See `narrowcast.auto`. What it does at a step depends on sums over the ranks alone, so all do the same."""

    looks_at = "local"
    alone = True

    def __init__(
        self, codecs: Sequence[Codec], error: float = rule.BOUND, every: int | None = None, dry_run: bool = False
    ) -> None:
        self.known = Measurements(codecs, error)
        self.every, self.dry_run = every, dry_run
        self.plan, self._now, self.flush = StepPlan(), Decided(0), Decided(-1)
        """What travels now, in a dry run what would; and for one step, where residuals are sent."""
        self.unit = 1.0
        """The loss scale of the gradients that it is shown."""
        self._claimed, self._road = False, cast("Road", None)
        self._tensors: dict[str, TensorInfo] = {}
        self._history: list[Decided] = []
        self._alarm = Alarm()
        self._trial: Trial | None = None
        self._refused: dict[StepPlan, int] = {}
        self._patience = 20 * BEAT
        self._doubts, self._refine, self._stalls = DOUBTS, REFINED, True
        self._odd, self._deaf, self._deaf_until, self._retries = 0, 2 * BEAT, 0, 0
        """Beats in a row in which calls took longer or less than they did; when that may count again."""
        self._fresh = False
        """Whether the calls of the plan were seen since it changed."""
        self._step_seconds, self._recent, self._plain_seconds = 0.0, list[float](), 0.0
        """Of a step: at the last beat, at the last three with this plan, and at best as it is, 0 where that is old."""
        self.budget = Budget()
        self._solved = 0
        self.spent = {"look": 0.0, "sums": 0.0}
        """Seconds of this rank since the last beat."""
        self._total, self._begin = 0.0, time.perf_counter()

    @property
    def spelled(self) -> str:
        """Its arguments as text: on all ranks, and in a run that goes on, the same."""
        wires = ", ".join(map(str, self.known.codecs))
        return f"auto(error={self.known.bound}, {wires}, every={self.every}, dry_run={self.dry_run})"

    def claim(self) -> None:
        """By whoever can measure for it."""
        if self._claimed:
            raise ValueError("auto: this policy has a model already; make another one with nc.auto()")
        self._claimed = True

    def start(self, road: Road, tensors: Sequence[TensorInfo]) -> None:
        """Before the first step: how to measure, and what may be compressed."""
        self._road, self._tensors = road, {info.name: info for info in tensors}
        self.known.together, self.known.shares = road.together, road.shares
        values = sum(info.numel for info in tensors)
        if values:
            self.known.width = 8.0 * sum(info.numel * info.dtype.itemsize for info in tensors) / values
        self.budget.looked = list(self._tensors)
        if self.every is None and not road.is_real:
            self.every = LOOK_STEPS

    def leave_out(self, codecs: Sequence[Codec]) -> None:
        """Wires that do not go with how gradients are added."""
        self.known.codecs = [codec for codec in self.known.codecs if codec not in codecs or codec == AS_IS]

    def __call__(self, info: TensorInfo, step: int) -> str | Codec | None:
        if not self._claimed:
            raise ValueError("auto: inside another policy it has no link to measure; give it to attach as it is")
        return self.at(step).wire_of(info)

    def at(self, step: int) -> Decided:
        """How everything travels at a step; the same object until something changes."""
        return self.flush if step == self.flush.step else self._now

    def due(self, step: int) -> bool:
        return step >= BEAT - 1 and (step + 1) % BEAT == 0

    def look(self, info: TensorInfo, gradient: Tensor) -> Tensor | tuple[float, ...]:
        if info.name not in self.budget.looked or info.name not in self._tensors:
            return ()
        return rule.look(gradient, self._codecs_for(info), self.budget.looks.get(info.name, 0), self.unit)

    def _codecs_for(self, info: TensorInfo) -> list[Codec]:
        """Those that suit it; the others are as good as nothing."""
        return [codec if codec.for_shape(info.sent_shape)[0] == codec else AS_IS for codec in self.known.codecs]

    def about_rank(self) -> tuple[float, ...]:
        spent = self.spent if self._road.is_real else dict.fromkeys(self.spent, 0.0)
        self._total, self.spent = self._total + sum(spent.values()), dict.fromkeys(self.spent, 0.0)
        return (*self._road.numbers(), *spent.values(), float(self._alarm.rang()))

    def observe(self, loss: float) -> None:
        """Show it the loss of a step, so that it backs off where that jumps."""
        self._alarm.observe(float(loss))

    def decide(self, step: int, seen: Mapping[str, tuple[float, ...]], world: int) -> None:
        """With the sums of a beat."""
        began = time.perf_counter()
        ranks, took, busy, looks, sums, rang = seen[RANK]
        bad = self._learn(seen, world)
        if ranks:
            self._step_seconds = took / ranks
            self.budget.earn({"look": looks / world, "sums": sums / world}, BEAT * self._step_seconds)
            self._beat(step + 1, busy / ranks, bad, rang > 0)
        beats = None if self.every is None else self.every // BEAT
        self.budget.next_look(list(self._tensors), beats, not self.known.errors)
        self.spent["sums"] += time.perf_counter() - began

    def _learn(self, seen: Mapping[str, tuple[float, ...]], world: int) -> set[str]:
        """Take in what was looked at; the tensors with non-finite values that nobody skips."""
        count, bad = len(self.known.codecs), set[str]()
        for name, sums in seen.items():
            if name == RANK or not sums:
                continue
            new, old = TensorErrors.of(sums, count, world), self.known.errors.get(name)
            bad |= {name} if new.bad and not self._road.skips else set()
            if old is not None and (new.bad or not old.bad):
                new = old.mixed(new)
            if old is not None or not new.bad:  # of Inf alone it says that nothing is lost
                self.known.errors[name] = new
        return bad

    def _beat(self, step: int, busy: float, bad: set[str], rang: bool) -> None:
        """Decide what travels from `step` on."""
        known, tensors = self.known, list(self._tensors.values())
        known.cooled = self._alarm.cooled(step, bad | (set(self._tensors) if rang else set()))
        if not self._solved:
            if known.errors or not tensors:  # Inf so far, as under a young loss scaler: next beat
                self._first_look(step, busy)
            return
        must = known.cost(self.plan, tensors).error > OVER * known.limit() if self.plan.wires else False
        if must or bad or rang:
            why = "the loss jumped" if rang else "non-finite gradients" if bad else "error over the bound"
            self._change(step, why, must=True)
            return
        odd = self._see_calls(busy)
        self._note_step()
        if self._trial is not None:
            self._judge(step, busy)
        elif odd and step >= self._deaf_until:
            self._meet_link(step, busy)
        elif self._retries or self._refine:
            self._look_again(step)
            self._retries, self._refine = max(0, self._retries - 1), max(0, self._refine - 1)
        elif step - self._solved >= (self.every or 40 * BEAT) and self.budget.may_time_sums():
            known.drag = (1 + known.drag) / 2
            self._time_sums(step, busy)
            self._change(step, "looked again")

    def _meet_link(self, step: int, busy: float) -> None:
        """It is another one: what was known of the last does not count."""
        before, self._trial = self.plan, None
        self._stalls, self._recent, self._plain_seconds, self.known.drag = True, [], 0.0, 1.0
        self._time_sums(step, busy)
        self._change(step, "the link has changed")
        self._deaf = 2 * BEAT if self.plan != before else 2 * self._deaf  # whoever is called in vain listens less
        self._deaf_until = step + self._deaf

    def _note_step(self) -> None:
        """One beat may be slow by itself, as the one after a change is, and would let everything pass for a gain."""
        self._recent = [*self._recent[-2:], self._step_seconds]
        if self.plan == StepPlan():
            self._plain_seconds = min(self._recent)

    def _first_look(self, step: int, busy: float) -> None:
        """Decide, unless measurements do not even say how long a step takes as it is: then measure once more."""
        self._note_step()
        self._time_sums(step, busy)
        ratio = self.known.cost(self.plan, list(self._tensors.values())).step / max(self._step_seconds, 1e-9)
        if self._doubts and not 1 / CHANGED < ratio < CHANGED:
            log.info("auto: step %d: measurements say %.2f times the step that was seen; once more", step, ratio)
            self._doubts, self._solved = self._doubts - 1, 0
            return
        self._change(step, "first look")

    def _look_again(self, step: int) -> None:
        """With buckets as they are ready now; sums are not timed anew. Collective."""
        self.known.layout = self._road.layout(self._stalls)
        self._change(step, "looked again")

    def _time_sums(self, step: int, busy: float) -> None:
        """Time short sums through every wire: as many values as may be had for a part of a step. Collective."""
        known, wires = self.known, [str(codec) for codec in self.known.codecs]
        # here and once, since beats go on being odd while nobody listens
        known.per_bit *= busy / self._expected() if self._fresh and self._expected() > 0 < busy else 1.0
        known.layout = self._road.layout(self._stalls)
        values = max(1, sum(known.layout.values))
        bits = sum(min(32.0, codec.bits_per_value) for codec in known.codecs) + 48
        a_value = (ROUNDS + 1) * bits / 32 * busy / values
        sized = SUM_SHARE * self._step_seconds / a_value if a_value > 0 else LARGEST
        size = 1 << max(LEAST.bit_length() - 1, min(LARGEST.bit_length() - 1, int(math.log2(max(2.0, sized)))))
        known.fits = self._road.fits(wires, size)
        # of a wire that is not under way it is of the link as it was
        known.factors = {key: factor for key, factor in known.factors.items() if key in self._under_way().keys}
        # what is under way now is known better than by short sums
        self._solved, self._fresh = max(1, step), False
        self._see_calls(busy)

    def _expected(self) -> float:
        """Seconds that the calls of a step should take."""
        return self.known.cost(self._under_way(), list(self._tensors.values())).busy

    def _under_way(self) -> StepPlan:
        return self.plan if not self.dry_run else StepPlan()

    def _see_calls(self, busy: float) -> bool:
        """Compare the calls of a beat with what was expected of them. Whether the link is another one."""
        known, expected = self.known, self._expected()
        if expected <= 0 or busy <= 0:
            return False
        ratio = busy / expected
        if not self._fresh:
            self._fresh, self._odd = True, 0
            keys = self._under_way().keys
            if keys == {PLAIN}:
                known.per_bit = busy / (known.width * max(1, sum(known.layout.values)))
            for key in keys:
                known.factors[key] = min(8.0, max(0.25, known.slower(key) * ratio))
            known.common = known.factors[min(keys)]
            return False
        matters = abs(busy - expected) > GAIN * self._step_seconds
        self._odd = self._odd + 1 if matters and not 1 / CHANGED < ratio < CHANGED else 0
        return self._odd >= 2

    def _change(self, step: int, why: str, must: bool = False) -> None:
        """Find the best plan, and take it where it is worth it, or where it must be."""
        known, tensors = self.known, list(self._tensors.values())
        # in what follows the present one is always known: it was chosen from the same wires
        now = known.cost(self.plan, tensors)
        options = known.options(tensors, self._road.halves)
        some = [one for one in options if self._refused.get(one.plan, 0) <= step]  # none: only what must change does
        best = min(some or (options if must else [now]), key=lambda one: one.step)
        times = now.step / best.step if best.step else 1.0
        quicker, calmer = best.step < now.step / (1 + GAIN), best.step <= now.step and best.error < now.error / 2
        must = must and (best.error < now.error or now.error > known.limit())
        if best.plan == self.plan or not (quicker or calmer or must):
            if not self._history:
                self._note(step, now, f"{why}: {best.plan} would give {times:.2f}x")
            return
        # while the loss is high or numbers are bad nobody waits for a proof
        took = min([*self._recent, self._step_seconds])
        if self._plain_seconds and not self._odd:
            took = min(took, self._plain_seconds)
        share = 1 - GAIN / 2 if quicker else 1 + GAIN / 2
        trial = None if must or self.dry_run else Trial(self.plan, best.plan, took, share)
        gain = f"{times:.2f}x over {self.plan} predicted" if quicker else f"loses less than {self.plan}"
        self._take(step, best, f"{why}: {gain}", trial)

    def _see_drag(self, busy: float) -> None:
        """What steps with wires take beyond their calls, which were just seen: so of other wires no more is hoped."""
        known, expected = self.known, self._expected()
        if self.plan.wires and expected / CHANGED < busy < expected * CHANGED:
            by_calls = known.cost(self.plan, list(self._tensors.values())).step / known.drag
            known.drag = min(MOST_DRAG, max(1.0, self._step_seconds / max(by_calls, 1e-9)))

    def _judge(self, step: int, busy: float) -> None:
        """Whether the change of the last beat was worth it; back where not."""
        trial, known, tensors = self._trial, self.known, list(self._tensors.values())
        assert trial is not None
        if trial.is_on_another_link(busy):
            self._meet_link(step, busy)
            return
        self._see_drag(busy)
        stays = trial.verdict(self.plan, self._step_seconds, not self._road.is_real)
        if stays is None:
            other = known.cost(trial.before if self.plan == trial.after else trial.after, tensors)
            if other.error <= known.limit():
                self._take(step, other, "in turns, since little was gained", trial)
                return
            stays = self.plan == trial.after  # the other may no longer have what it had
        self._trial = None
        if stays:
            self._patience, self._retries = 20 * BEAT, 0
            return
        self._retries = 2 if self._retries == 0 else 0
        self._stalls = False  # if it was thought so: calls that were to hold up backward were not what did
        self._refused[trial.after] = step + self._patience
        self._patience *= 2
        why = f"no gain: {trial.words(self._step_seconds)}"
        before = known.cost(trial.before, tensors)
        if before.error > known.limit():  # some tensor may no longer have what it had
            self._change(step, why, must=True)
        elif self.plan != trial.before:
            self._take(step, before, why, None)

    def _take(self, step: int, to: Costed, why: str, trial: Trial | None) -> None:
        old, new = dict(self.plan.wires), dict(to.plan.wires)
        kept = {name for name, wire in old.items() if codec_named(wire).feedback}
        kept -= {name for name, wire in new.items() if codec_named(wire).feedback}
        self.plan, self._trial, self._fresh, self._recent = to.plan, trial, False, []
        if kept and not self.dry_run:
            self.flush = Decided(step, WIRES, {**new, **dict.fromkeys(sorted(kept), FLUSH)}, "residuals are sent")
            self._history.append(self.flush)
            step += 1
        self._note(step, to, why)
        self._now = Decided(0) if self.dry_run else self._history[-1]

    def _note(self, step: int, of: Costed, why: str) -> None:
        numbers = {"predicted": of.step, "measured": self._step_seconds, "error": of.error, "bound": self.known.limit()}
        self._history.append(Decided(step, of.plan.road, dict(of.plan.wires), f"{of.plan}: {why}", numbers))
        log.info("auto%s: step %d: %s", " (dry run)" if self.dry_run else "", step, self._history[-1].reason)

    def history(self) -> list[dict[str, Any]]:
        """Every decision so far."""
        return [one.as_dict() for one in self._history]

    def counters(self) -> dict[str, float]:
        """Seconds that this rank spent with watching, their share of the time, and decisions."""
        passed = time.perf_counter() - self._begin
        total = self._total + sum(self.spent.values())
        return {"watch_seconds": total, "watch_share": total / passed, "decisions": float(len(self._history))}

    def allows(self, wire: str) -> bool | None:
        """Whether one wire for all tensors would be below the bound; None where it is no candidate."""
        numbers = [number for number, codec in enumerate(self.known.codecs) if str(codec) == wire]
        if not numbers:
            return None
        return sum(self.known.error_of(name, numbers[0]) for name in self._tensors) <= self.known.limit()

    def notes(self) -> list[str]:
        """What was decided and why, by which rule, and what it costs."""
        said = self._history[-1].reason if self._history else "watching, gradients travel as they are"
        counters, word = self.counters(), "would be " if self.dry_run else ""
        error = self.known.cost(self.plan, list(self._tensors.values())).error if self.plan.wires else 0.0
        limit = self.known.limit()
        lines = [f"auto: {word}{said}", f"auto: {rule.words(self.known.bound)}"]
        if limit > 0:
            lines.append(f"auto: counted error {100 * error / limit:.0f} % of what is allowed")
        often = f"every {self.every}" if self.every else "as often as they cost little"
        spent = f"{1e3 * counters['watch_seconds']:.0f} ms so far, {100 * counters['watch_share']:.2f} % of the time"
        return [*lines, f"auto: looks at steps every {BEAT} steps, gradients {often}; watching took {spent}"]

    def state_dict(self) -> dict[str, Any]:
        """What was learnt; a run on a described link that goes on from it decides as the one before would have."""
        return state.saved(self)

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        state.load(self, kept)

    def take_up(self, history: Sequence[Decided], flush: Decided) -> None:
        """Go on after these decisions."""
        self._history, self.flush = list(history), flush
        self._now = Decided(0) if self.dry_run or not history else history[-1]
