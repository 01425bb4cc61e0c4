"""Private parts of torch: who reaches for one lists it, and `attach` looks first whether this torch has it there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

import torch

KNOWN = "2.11 to 2.15"
"""The versions of torch that the tests have run on."""


def elsewhere(owner: str, part: str) -> RuntimeError:
    """For a torch that is not as the known ones are."""
    return RuntimeError(
        f"attach: this torch ({torch.__version__}) keeps {owner}'s {part} elsewhere than {KNOWN} do; use one of those, "
        "or report it"
    )


def check(owner: str, where: object, parts: Iterable[str]) -> None:
    """Raise where a part is missing. parts: dotted names; of `a|b` either will do."""
    for part in parts:
        if not any(_has(where, name) for name in part.split("|")):
            raise elsewhere(owner, part.partition("|")[0])


def _has(where: object, name: str) -> bool:
    try:
        attrgetter(name)(where)
    except AttributeError:
        return False
    return True


def in_autograd() -> bool:
    """Whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


AUTOGRAD = ("_C._current_graph_task_id",)
"""What `in_autograd` needs of torch itself."""

PROFILER = ("_C._autograd._profiler_enabled",)
RECORD = ("_call_end_callbacks_on_future",)
"""What `profiled` needs, of torch and of a record; a torch without them shows less in its profiler, and that is all."""
in_profiler: Callable[[], bool] = getattr(torch._C._autograd, "_profiler_enabled", lambda: False)
"""Whether a profiler watches this thread; a backward pass has that of its caller."""
