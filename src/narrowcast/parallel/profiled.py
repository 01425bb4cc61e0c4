"""Our calls by name in torch.profiler, where one is running: they are no calls of torch's, so it sees none of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.profiler import record_function

from narrowcast.parallel import private

P = ParamSpec("P")
R = TypeVar("R")


def profiled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show a call as `narrowcast::NAME`, up to its result: where it returns a future, until that is there."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(call)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if not private.in_profiler():
                return call(*args, **kwargs)
            with record_function(f"narrowcast::{name}") as record:
                result: Any = call(*args, **kwargs)
                if isinstance(result, torch.futures.Future) and hasattr(record, *private.RECORD):
                    result = record._call_end_callbacks_on_future(result)
                return result

        return run

    return decorate
