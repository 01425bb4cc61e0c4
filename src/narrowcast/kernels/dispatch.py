"""Which implementation runs a plan on a kind of device: chosen once for each plan, and said aloud by `explain`.

A new implementation is one file that answers what `Implementation` asks, and one line in IMPLEMENTATIONS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from narrowcast.formats import Format
from narrowcast.kernels import native, reference, triton_loader
from narrowcast.kernels.arithmetic import NO_FINISH, Feedback, Finish, Unfused, decode_each, encode_each
from narrowcast.kernels.noise import NO_NOISE, Noise
from narrowcast.kernels.plan import AnyPlan, CastPlan, CustomPlan, Plan, TransformPlan

RoundTo = Callable[..., Tensor]
"""x, format, rounding, overflow, rules, seed, out: returns `out`."""


class Kernels(Protocol):
    """What runs plans of one kind; `kernels.ops` says what each function promises."""

    def encode(
        self,
        plan: Any,
        x: Tensor,
        wire: Tensor,
        noise: Noise = ...,
        scale: Tensor | None = None,
        feedback: Feedback | None = None,
    ) -> None: ...

    @property
    def decode(self) -> Callable[..., None]:
        """plan, wire, n, out, accumulate"""

    def reduce(
        self,
        plan: Any,
        wires: Any,
        n: int,
        wire: Tensor,
        noise: Noise = ...,
        scale: Tensor | None = None,
        feedback: Feedback | None = None,
        finish: Finish = ...,
        out: Tensor | None = None,
    ) -> None: ...

    def sum_wires(self, plan: Any, wires: Any, n: int, out: Tensor, finish: Finish = ...) -> None: ...

    def encode_rows(
        self,
        plan: Any,
        x: Tensor,
        per: int,
        wires: Tensor,
        noise: Noise = ...,
        feedback: Feedback | None = None,
        pitch: int = 0,
    ) -> None: ...

    def decode_rows(self, plan: Any, wires: Tensor, per: int, out: Tensor, pitch: int = 0) -> None: ...


class Implementation(Protocol):
    """A way to compute, on one kind of device; a module is one."""

    DEVICE: str

    def name(self) -> str:
        """As `explain` shows it."""

    def why_not(self, plan: Plan | CastPlan | TransformPlan | None) -> str | None:
        """Why this plan cannot run here, or None where it can. Without a plan: why none can."""

    def why_not_round(self, fmt: Format, rounding: str, rules: str) -> str | None:
        """Why `round_to` cannot do this here, or None where it can."""

    def kernels(self, plan: Plan | CastPlan | TransformPlan) -> Kernels:
        """What runs a plan for which nothing speaks against this."""

    def rounding(self) -> RoundTo:
        """What runs `round_to`."""


IMPLEMENTATIONS: list[Implementation] = [triton_loader, native, reference]
"""The fastest first; the last runs everything."""

CUSTOM: Kernels = Unfused(lambda plan, *args: plan.encode(*args), lambda plan, *args: plan.decode(*args))
"""A codec with code of its own brings it in its plan."""


@dataclass(frozen=True)
class KernelChoice:
    """Which implementation runs an op, and why not a faster one."""

    op: str
    device: str
    implementation: str
    why: str


def _first(device: str, why_not: Callable[[Implementation], str | None]) -> tuple[Implementation | None, str]:
    """The fastest implementation of a kind of device that nothing speaks against, and what did against faster ones."""
    reasons: list[str] = []
    for implementation in IMPLEMENTATIONS:
        if device == implementation.DEVICE:
            why = why_not(implementation)
            if why is None:
                return implementation, "; ".join(reasons)
            reasons.append(why)
    return None, "; ".join(reasons)


def choose_kernels(plan: AnyPlan, device: str) -> Kernels:
    """What runs `plan` on "cpu" or "cuda", asked anew."""
    if isinstance(plan, CustomPlan):
        return CUSTOM if device == "cpu" else CpuFallback(CUSTOM)
    implementation, _ = _first(device, lambda one: one.why_not(plan))
    return CpuFallback(kernels_for(plan, "cpu")) if implementation is None else implementation.kernels(plan)


def runs_over_host(plan: AnyPlan) -> bool:
    """Whether CUDA tensors go over the host with this plan: the host then waits for the device."""
    return isinstance(kernels_for(plan, "cuda"), CpuFallback)


def kernels_for(plan: AnyPlan, device: str) -> Kernels:
    """What runs `plan` on "cpu" or "cuda"; kept on the plan, since what can run does not change in a process.

    Whoever changes that (a test that takes an implementation away) puts `choose_kernels` in the place of this.
    """
    try:
        kernels: Kernels = plan.__dict__["_kernels"][device]
    except KeyError:
        kernels = choose_kernels(plan, device)
        plan.__dict__.setdefault("_kernels", {})[device] = kernels
    return kernels


def choose_rounding(fmt: Format, rounding: str, rules: str, device: str) -> RoundTo:
    """What runs `round_to` on "cpu" or "cuda"."""
    implementation, _ = _first(device, lambda one: one.why_not_round(fmt, rounding, rules))
    if implementation is not None:
        return implementation.rounding()
    on_cpu = choose_rounding(fmt, rounding, rules, "cpu")

    def run_on_copies(x: Tensor, *arguments: Any) -> Tensor:
        *how, out = arguments
        result: Tensor = out.copy_(on_cpu(x.cpu(), *how, torch.empty(x.shape, dtype=x.dtype)))
        return result

    return run_on_copies


OPS = ("encode", "decode", "decode and add", "encode with residual", "reduce", "round_to")


def explain(plan: AnyPlan | None = None) -> list[KernelChoice]:
    """What runs each op on each device of this machine, and why nothing faster does."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    plans = {op: None if op == "round_to" else plan for op in OPS}
    return [KernelChoice(op, device, *_explain(plans[op], device)) for device in devices for op in OPS]


def _explain(plan: AnyPlan | None, device: str) -> tuple[str, str]:
    """The name of what runs, and why nothing faster does."""
    if isinstance(plan, CustomPlan):
        name = "the codec's own code"
        return (name, "") if device == "cpu" else (f"host copy, {name}", f"{name} is for the CPU")
    implementation, why = _first(device, lambda one: one.why_not(plan))
    return (f"host copy, {_explain(plan, 'cpu')[0]}" if implementation is None else implementation.name()), why


@dataclass(frozen=True)
class CpuFallback:
    """CUDA tensors without CUDA kernels: over the host and back. Slow, and `explain` says so."""

    on_cpu: Kernels

    def encode(
        self,
        plan: AnyPlan,
        x: Tensor,
        wire: Tensor,
        noise: Noise = NO_NOISE,
        scale: Tensor | None = None,
        feedback: Feedback | None = None,
    ) -> None:
        """See `kernels.ops.encode`."""
        bytes_, kept = torch.empty(wire.shape, dtype=torch.uint8), _on_host(feedback)
        self.on_cpu.encode(plan, x.cpu(), bytes_, noise, None if scale is None else scale.cpu(), kept)
        wire.copy_(bytes_)
        _copy_back(feedback, kept)

    def decode(self, plan: AnyPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
        """See `kernels.ops.decode`."""
        values = out.cpu()
        self.on_cpu.decode(plan, wire.cpu(), n, values, accumulate)
        out.copy_(values)

    def reduce(
        self,
        plan: AnyPlan,
        wires: Tensor,
        n: int,
        wire: Tensor,
        noise: Noise = NO_NOISE,
        scale: Tensor | None = None,
        feedback: Feedback | None = None,
        finish: Finish = NO_FINISH,
        out: Tensor | None = None,
    ) -> None:
        """See `kernels.ops.reduce`."""
        bytes_, kept = torch.empty(wire.shape, dtype=torch.uint8), _on_host(feedback)
        rows, given_scale = wires.cpu().unbind(), None if scale is None else scale.cpu()
        values = None if out is None else out.cpu()
        self.on_cpu.reduce(plan, rows, n, bytes_, noise, given_scale, kept, finish, values)
        wire.copy_(bytes_)
        _copy_back(feedback, kept)
        if out is not None and values is not None:
            out.copy_(values)

    def sum_wires(self, plan: AnyPlan, wires: Tensor, n: int, out: Tensor, finish: Finish = NO_FINISH) -> None:
        """See `kernels.ops.sum_wires`."""
        total = torch.empty(n, dtype=torch.float32)
        self.on_cpu.sum_wires(plan, wires.cpu().unbind(), n, total, finish)
        out.copy_(total)

    def encode_rows(
        self,
        plan: AnyPlan,
        x: Tensor,
        per: int,
        wires: Tensor,
        noise: Noise = NO_NOISE,
        feedback: Feedback | None = None,
        pitch: int = 0,
    ) -> None:
        """See `kernels.ops.encode_rows`."""
        encode_each(self.encode, plan, x, per, wires, noise, feedback, pitch)

    def decode_rows(self, plan: AnyPlan, wires: Tensor, per: int, out: Tensor, pitch: int = 0) -> None:
        """See `kernels.ops.decode_rows`."""
        decode_each(self.decode, plan, wires, per, out, pitch)


def _on_host(feedback: Feedback | None) -> Feedback | None:
    return None if feedback is None else feedback._replace(residual=feedback.residual.cpu())


def _copy_back(feedback: Feedback | None, kept: Feedback | None) -> None:
    if feedback is not None and kept is not None:
        feedback.residual.copy_(kept.residual)
