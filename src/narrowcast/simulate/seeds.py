"""Who draws in a simulated training: the first word of each one's noise, so that all may be given one seed."""

from __future__ import annotations

LOWERED, MASTER, OPTIMIZER = 2**40, 2**40 + 1, 2**40 + 2
