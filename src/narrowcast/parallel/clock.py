"""Marks in time on the device that does the work."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Marks in time: of the processor, or of a CUDA stream, whose work is done later than it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"

    def mark(self) -> Any:
        """Now; on CUDA when the device's current stream gets to it."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        """Until all marks so far can be compared."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self.cuda else end - begin
