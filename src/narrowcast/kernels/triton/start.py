"""How a kernel is started: by Triton the first time, and from then on by what Triton compiled.

Triton looks at every argument of every launch: the type and alignment of a tensor, the width and divisibility of an
integer. A `Start` stands for arguments that agree in all of this, so what was compiled for the first of them fits the
others; whoever keeps one keeps it under everything that Triton looks at, and gives addresses for tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import triton

from narrowcast.kernels.triton.constants import INTERPRETED, constants
from narrowcast.kernels.triton.recipe import Named
from narrowcast.kernels.triton.shapes import Tuning

FAST = not INTERPRETED and triton.__version__.startswith("3.6.")
"""Versions on which a compiled kernel was seen to start when called by itself."""
COMPILING = threading.Lock()
"""Channels have threads of their own."""


def _slow_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# torch's front asks whether CUDA is there at each call; a tensor on a device has answered that
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_stream)


class Start:
    """One kernel with its compile-time constants, on one grid."""

    __slots__ = ("_after", "_before", "_launch", "compiled", "constant", "grid", "kernel", "options")

    def __init__(self, kernel: Any, programs: int, recipe: Named, job: Named, tuning: Tuning, rows: int = 0) -> None:
        self.kernel, self.grid = kernel, (programs, rows or 1, 1)
        self.constant, self.options = (constants(recipe), constants(job)), tuning.options()
        self.compiled: Any = None
        """What Triton compiled; until then arguments are tensors and numbers, and then addresses will do, too."""

    def begin(self, device: int, *args: Any) -> None:
        """Start it on the current device, whose number is `device`."""
        if self.compiled is not None:
            self._again(device, args)
        elif FAST:
            with COMPILING:
                compiled = self.kernel[self.grid](*args, *self.constant, **self.options)
            if compiled is not None:
                self._keep(compiled)
        else:
            self.kernel[self.grid](*args, *self.constant, **self.options)

    def _keep(self, compiled: Any) -> None:
        run = compiled.run
        self._launch = run.launch if _is_simple(run) else None
        if self._launch is not None:
            # after the grid and the stream; the kernel has no memory of its own, and nobody listens
            self._before = (
                compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata,
                None, None, None,
            )  # fmt: skip
        # constants have their places among the arguments, and nobody looks at them
        self._after = (None,) * len(self.constant)
        self.compiled = compiled

    def _again(self, device: int, args: tuple[Any, ...]) -> None:
        runtime = triton.knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        # each a chain of hooks, or one
        if self._launch is None or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            # a profiler wants to know of it, or Triton has more to do
            self.compiled[self.grid](*args, *self.constant)
            return
        self._launch(*self.grid, current_stream(device), *self._before, *args, *self._after)


def _is_simple(run: Any) -> bool:
    """Whether a launch is one call of CUDA's: no other maker's device, no memory that Triton allocates for it."""
    return hasattr(run, "launch_pdl") and not (run.global_scratch_size or run.profile_scratch_size)
