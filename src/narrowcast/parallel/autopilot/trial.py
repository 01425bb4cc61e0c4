"""A change on trial: it has to show what was promised, and where that is little, in turns with what was before."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from narrowcast.parallel.autopilot.plan import StepPlan

CLEAR = 1.25
"""Times quicker: that is no chance, and one beat shows it."""
TURNS = 3
"""Beats of each in turns, where less is gained: one beat may be that much quicker or slower by itself, and the first
steps of a training are slower than those that follow.
"""
LINK = 2.0
"""Times longer or less than in the last turn of the same plan: the link has changed, and nothing can be compared."""


@dataclass
class Trial:
    before: StepPlan
    after: StepPlan
    took: float
    """A step before."""
    share: float
    """Of that, what a step may take: less than all where the change is to be quicker, a little more where it is to lose
    less.
    """
    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    """Seconds of a step in the beats of the turns."""
    busy: list[float] = field(default_factory=list)
    """Of calls, in all beats so far: of the new plan and of the old one in turn."""

    def is_on_another_link(self, busy: float) -> bool:
        """Whether calls of this beat say so."""
        self.busy.append(busy)
        last = self.busy[-3] if len(self.busy) > 2 else busy
        return busy > LINK * last or last > LINK * busy

    def verdict(self, now: StepPlan, seconds: float, is_exact: bool) -> bool | None:
        """Of a beat with the plan `now`: whether the change stays, None where it takes another turn."""
        if now == self.after and not self.old:
            if seconds > self.share * self.took:
                return False
            clear = is_exact or self.share > 1 or CLEAR * seconds <= self.share * self.took
            return True if clear else None
        (self.new if now == self.after else self.old).append(seconds)
        if len(self.new) < TURNS:
            return None
        return statistics.median(self.new) <= self.share * statistics.median(self.old)

    def words(self, seconds: float) -> str:
        """Why it does not stay."""
        if self.new:
            new, old = (1e3 * statistics.median(times) for times in (self.new, self.old))
            return f"in turns {new:.1f} ms a step, and {old:.1f} without it"
        return f"{1e3 * seconds:.1f} ms a step, and {1e3 * self.share * self.took:.1f} were allowed"
