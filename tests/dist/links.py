"""A DDP model's link whose times are made up: ranks are real, seconds are those of a described link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from narrowcast.parallel.autopilot.ddp import DDPRoad
from narrowcast.parallel.autopilot.link import DescribedLink
from narrowcast.parallel.autopilot.plan import Measurements
from narrowcast.parallel.autopilot.times import HALF, PLAIN, Fit, Layout

SLOW, FAST = DescribedLink(0.0005, compute=0.02), DescribedLink(1000.0, compute=0.02)


def _layout(road: Any, link: DescribedLink) -> Layout:
    marks = road.times.last()[-1]
    ready = [link.compute * (number + 1) / len(marks.names) for number in range(len(marks.names))]
    return Layout(tuple(ready), tuple(marks.names), tuple(marks.values))


@contextmanager
def made_up(link: Callable[[int], DescribedLink]) -> Iterator[None]:
    """Of a step."""

    def fits(road: Any, wires: Sequence[str], values: int) -> dict[str, Fit]:
        state = road._owner()
        return {name: link(state.step).fit(name, state.channel.world) for name in (PLAIN, HALF, *wires)}

    def numbers(road: Any) -> tuple[float, float, float]:
        valid, *_ = real(road)
        state = road._owner()
        now, pilot = link(state.step), state.policy
        known = Measurements(pilot.known.codecs, fits=fits(road, list(map(str, pilot.known.codecs)), 0))
        known.layout = _layout(road, now)
        cost = known.cost(pilot.plan, list(pilot._tensors.values()))
        return (1.0, cost.step, cost.busy) if valid else (0.0, 0.0, 0.0)

    real = DDPRoad.numbers
    own = {"fits": fits, "numbers": numbers, "layout": lambda road, stalls: _layout(road, link(road._owner().step))}
    with mock.patch.multiple(DDPRoad, is_real=False, **own):
        yield
