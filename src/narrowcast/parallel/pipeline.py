"""Activations and their gradients between the stages of a pipeline, through codecs, under torch's own schedules.

What a stage hands on is an envelope: a float32 tensor that holds the bytes of a wire and is only moved, never computed
with. An autograd function at each end seals and opens it, and the gradient comes back in an envelope of the same size,
so torch.distributed.pipelining sees stages with small float outputs and needs no change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowcast.codecs import Codec
from narrowcast.collectives import agreement, concrete
from narrowcast.kernels import FLOATS, Noise
from narrowcast.parallel.seeds import made_before, seed_of
from narrowcast.parallel.wires import (
    Direction,
    Route,
    Spec,
    activation_codecs,
    explain,
    forget,
    remember,
    stats,
)

CARRIER = torch.float32
ALIKE = "give both stages boundaries with the same shape, dtype, specs, number and seed"


class Boundary(Route):
    """What crosses from one stage to the next: one tensor of `shape` (of a microbatch), and its gradient back.

    The two stages make equal boundaries. `number` tells the boundaries of a pipeline apart: each has noise of its own.
    """

    def __init__(
        self,
        shape: Iterable[int],
        forward: Spec = "as-is",
        backward: Spec | None = None,
        *,
        number: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        if dtype not in FLOATS:
            raise TypeError(f"Boundary: dtype {dtype}; codecs take float32, float16 and bfloat16")
        there, back = (concrete(codec, dtype) for codec in activation_codecs("Boundary", forward, backward))
        key = f"boundary {seed} {number}"
        super().__init__(there, back, f"{key} {made_before(key)}", f"boundary {number}")
        self.shape, self.dtype, self.numel = torch.Size(shape), dtype, torch.Size(shape).numel()
        # autograd wants the gradient to be as large as what it belongs to: the larger wire decides
        nbytes = max(self.codec(direction).nbytes(self.numel, dtype) for direction in Direction)
        self.words = -(-nbytes // CARRIER.itemsize) + 1
        # the last word says what the others mean
        text = f"{agreement.VERSION} {key} {tuple(self.shape)} {dtype} {there} {back}"
        self._mark = seed_of(text) % 2**31
        self._strange: dict[Direction, int | None] = dict.fromkeys(Direction, 0)
        """How many envelopes without our mark came in a row; None once one had it."""

    @property
    def nbytes(self) -> int:
        """Bytes of every message, forward and backward."""
        return self.words * CARRIER.itemsize

    def seal(self, x: Tensor) -> Tensor:
        """For the end of a stage: an envelope with `x` inside; its gradient is an envelope too."""
        if x.shape != self.shape or x.dtype != self.dtype:
            raise ValueError(
                f"{self.name}: the stage gives {tuple(x.shape)} of {x.dtype}, the boundary was made for "
                f"{tuple(self.shape)} of {self.dtype}; make it with the shape of a microbatch's activation"
            )
        return _Seal.apply(x, self)

    def open(self, envelope: Tensor) -> Tensor:
        """For the start of the next stage: what is inside."""
        if envelope.shape != (self.words,) or envelope.dtype != CARRIER:
            raise ValueError(
                f"{self.name}: got {tuple(envelope.shape)} of {envelope.dtype}, an envelope is ({self.words},) of "
                f"{CARRIER}; {ALIKE}"
            )
        return _Open.apply(envelope, self)

    def _encode(self, x: Tensor, direction: Direction) -> Tensor:
        if _has_no_values(x):
            return x.new_empty(self.words, dtype=CARRIER)
        turn = self.turn(direction)
        carrier = torch.zeros(self.words, dtype=CARRIER, device=x.device)
        noise = Noise(turn.seed).derive(turn.step, dist.get_rank() if dist.is_initialized() else 0)
        turn.codec.encode_with(x.detach(), noise, out=self._wire(carrier, turn.codec))
        carrier.view(torch.int32)[-1] = self._mark
        self.traffic[direction].count(self.nbytes, x.numel() * x.element_size(), x.numel())
        return carrier

    def _decode(self, envelope: Tensor, direction: Direction) -> Tensor:
        if _has_no_values(envelope):
            return envelope.new_empty(self.shape, dtype=self.dtype)
        codec, carrier = self.codec(direction), envelope.detach().contiguous()
        self._check(carrier, direction)
        wire = self._wire(carrier, codec)
        return codec.decode(wire, self.numel, dtype=self.dtype).view(self.shape)

    def _check(self, carrier: Tensor, direction: Direction) -> None:
        """Refuse what another kind of boundary has sealed, until the first envelope that ours has.

        One without the mark is let pass: torch infers shapes on memory that nobody has written.
        """
        strange = self._strange[direction]
        if strange is None:
            return
        if int(carrier.view(torch.int32)[-1]) == self._mark:
            self._strange[direction] = None
        elif strange:
            raise RuntimeError(
                f"{self.name}: what came {direction.value} was not sealed by an equal boundary; here it is "
                f"{tuple(self.shape)} of {self.dtype} with {self.forward} forward and {self.backward} backward, "
                f"{self.key}; {ALIKE}"
            )
        else:
            self._strange[direction] = 1

    def _wire(self, carrier: Tensor, codec: Codec) -> Tensor:
        return carrier.view(torch.uint8)[: codec.nbytes(self.numel, self.dtype)]


class _Seal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary) -> Tensor:
        ctx.boundary = boundary
        return boundary._encode(x, Direction.FORWARD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.boundary._decode(gradients[0], Direction.BACKWARD), None


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, envelope: Tensor, boundary: Boundary) -> Tensor:
        ctx.boundary = boundary
        return boundary._decode(envelope, Direction.FORWARD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.boundary._encode(gradients[0], Direction.BACKWARD), None


def _has_no_values(x: Tensor) -> bool:
    """A tensor that only stands for a shape."""
    from torch._subclasses.fake_tensor import is_fake

    return x.is_meta or is_fake(x)


class StageHandle:
    """What `attach_stage` returns."""

    def __init__(self, module: nn.Module, boundaries: list[Boundary], hooks: list[Any]) -> None:
        self._module, self._boundaries, self._hooks = module, boundaries, hooks

    def stats(self) -> dict[str, float]:
        """Bytes, values and calls of this stage, by direction: it sends activations on and gradients back."""
        return stats(self._module)

    def explain(self) -> str:
        return explain(self._module)

    def detach(self) -> None:
        """The stage hands plain tensors on again."""
        for hook in self._hooks:
            hook.remove()
        for boundary in self._boundaries:
            forget(self._module, boundary)
        self._hooks = []
        object.__setattr__(self._module, _ATTACHED, False)


_ATTACHED = "_narrowcast_stage"
Boundaries = Boundary | Sequence[Boundary | None] | None


def attach_stage(module: nn.Module, *, before: Boundaries = None, after: Boundaries = None) -> StageHandle:
    """Open envelopes at the start of a stage's module and seal its outputs, by hooks: parameter names do not change.

    before, after: the boundary with the previous and the next stage; None at the ends of the pipeline. Where several
    tensors cross, one for each in order, and None for what travels as it is.
    """
    if getattr(module, _ATTACHED, False):
        raise RuntimeError("attach_stage: the module is attached already; call detach() on its handle first")
    entry, exit_ = _as_list("before", before), _as_list("after", after)

    def open_inputs(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _apply_to_each("inputs", entry, args, lambda boundary, x: boundary.open(x))

    def seal_outputs(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        crossing = _apply_to_each("outputs", exit_, tuple(outputs), lambda boundary, x: boundary.seal(x))
        return crossing if isinstance(output, (tuple, list)) else crossing[0]

    hooks: list[Any] = [module.register_forward_pre_hook(open_inputs, prepend=True)] if entry else []
    hooks += [module.register_forward_hook(seal_outputs)] if exit_ else []
    boundaries = [boundary for boundary in (*entry, *exit_) if boundary is not None]
    for boundary in boundaries:
        remember(module, boundary)
    object.__setattr__(module, _ATTACHED, True)
    return StageHandle(module, boundaries, hooks)


def _as_list(what: str, boundaries: Boundaries) -> list[Boundary | None]:
    if boundaries is None:
        return []
    listed = list(boundaries) if isinstance(boundaries, (list, tuple)) else [boundaries]
    for boundary in listed:
        if boundary is not None and not isinstance(boundary, Boundary):
            raise TypeError(
                f"attach_stage: {what}={boundaries!r}; give a Boundary, which has the spec and the shape, or a list "
                "with one, or None, for each tensor"
            )
    return listed  # type: ignore[return-value]


def _apply_to_each(
    what: str, boundaries: list[Boundary | None], values: tuple[Any, ...], function: Any
) -> tuple[Any, ...]:
    if len(values) != len(boundaries):
        raise ValueError(
            f"attach_stage: the stage has {len(values)} {what} for {len(boundaries)} boundaries; give one, or None, "
            "for each"
        )
    return tuple(
        x if boundary is None else function(boundary, x) for boundary, x in zip(boundaries, values, strict=True)
    )


def boundaries_of(
    stages: Sequence[nn.Module],
    example: Tensor,
    forward: Spec = "as-is",
    backward: Spec | None = None,
    *,
    seed: int = 0,
) -> list[Boundary]:
    """One boundary after each stage but the last, with the shapes that a microbatch like `example` would have there.

    No values are computed: the stages may be on the meta device. Where a rank does not have all stages, give
    `Boundary` the shapes itself.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    shapes: list[tuple[torch.Size, torch.dtype]] = []
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        meta = any(p.is_meta for stage in stages for p in stage.parameters())
        x = mode.from_tensor(example.to("meta") if meta else example)
        for number, stage in enumerate(stages[:-1]):
            x = stage(x)
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"boundaries_of: stage {number} gives {type(x).__name__}, not one tensor; make a Boundary for each"
                )
            shapes.append((x.shape, x.dtype))
    # codecs have tables, which must not be made in the mode
    return [
        Boundary(shape, forward, backward, number=number, dtype=dtype, seed=seed)
        for number, (shape, dtype) in enumerate(shapes)
    ]
