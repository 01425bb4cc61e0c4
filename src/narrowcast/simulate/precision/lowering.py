"""`lower`: train an existing model with every cast, product and sum in a chosen precision, its code unchanged.

A lowered module gets a subclass of its own class whose `forward` runs under a torch function mode: the calls that
`handlers` knows are replaced, whoever makes them (nn.Linear, F.linear, `@`). Parameters, buffers, names, hooks and
`isinstance` stay as they are, so checkpoints and optimizers do, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowcast.kernels import Accumulator, derive
from narrowcast.kernels import matmul as kernel
from narrowcast.simulate.precision import formats
from narrowcast.simulate.precision.casts import MASTER, Caster, What, caster
from narrowcast.simulate.precision.formats import NoiseOrigin, Overrides, Precision, Site
from narrowcast.simulate.precision.handlers import HANDLERS, REFUSED

MULTIPLYING = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.MultiheadAttention, nn.Embedding),
    *(nn.RNNBase, nn.RNNCellBase),
)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
WITH_SUBMODULES = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder, nn.TransformerDecoder)
NOT_LOWERED = (nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Bilinear, nn.EmbeddingBag)
NAMES = {func: func.__name__ for func in (*HANDLERS, *REFUSED)}
"""Looked up, since a compiler makes no string of a function's own name."""


class Interception(TorchFunctionMode):
    """Replaces the calls of one module's forward."""

    def __init__(self, site: Site, unsupported: str) -> None:
        super().__init__()
        self.site, self.unsupported = site, unsupported

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            self.site.seen[NAMES[func]] = "lowered"
            with torch._C.DisableTorchFunction():
                return _call_handler(handler, self.site, *args, **(kwargs or {}))
        if func in REFUSED:
            self._refuse(func)
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        formats.follow(func, args, kwargs or {}, result)
        return result

    def _refuse(self, func: Callable[..., Any]) -> None:
        name, advice = NAMES[func], REFUSED[func]
        if self.unsupported == "raise":
            what = f"lower: {self.site.name or 'the model'} calls {name}, which is not lowered"
            raise NotImplementedError(f"{what}; {advice + ', or ' if advice else ''}give unsupported='float32'")
        self.site.seen[name] = "NOT lowered: runs in float32"


def _call_handler(handler: Callable[..., Any], site: Site, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Any:
    """What the handler gives, in `out` where there is one."""
    result = handler(site, *args, **kwargs)
    return result if out is None else out.resize_(result.shape).copy_(result)


class LoweredModule(nn.Module):
    """Mixed into the class of every lowered module."""

    _interception: Interception

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._interception.site.precision.is_plain:
            # so that a module that is left alone inside a lowered one is left alone
            with torch._C.DisableTorchFunction():
                return super().forward(*args, **kwargs)
        for parameter in self._parameters.values():
            if parameter is not None:  # of another kind where torch.func.functional_call puts it there
                formats.mark(parameter, formats.WEIGHT)
        with self._interception:
            return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        theirs = super().extra_repr()
        return f"{theirs}{', ' if theirs else ''}{self._interception.site.precision}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self).__mro__[2],), self.__dict__


_CLASSES: dict[type[nn.Module], type[LoweredModule]] = {}


def lowered_class(original: type[nn.Module]) -> type[LoweredModule]:
    """The subclass of a module class that runs lowered; one for each."""
    if original not in _CLASSES:
        _CLASSES[original] = type(f"Lowered{original.__name__}", (LoweredModule, original), {})
    return _CLASSES[original]


def _rebuild(original: type[nn.Module]) -> nn.Module:
    lowered = lowered_class(original)
    return lowered.__new__(lowered)


@dataclass(frozen=True)
class ModuleRow:
    """What became of one module."""

    module: str
    kind: str
    precision: str
    """"as-is" where it computes in float32."""
    runs: str
    """What multiplies matrices here, or why nothing is lowered."""
    seen: tuple[str, ...]
    """Torch functions that were met when the model ran, and what became of them."""
    operands: tuple[str, ...] = ()
    """What the operands of its products were taken for: "activation @ weight"."""


class Lowered:
    """A lowered model: call it, or go on using the model itself, which was changed in place. `restore()` undoes it."""

    def __init__(self, model: nn.Module, origin: NoiseOrigin, master: Caster) -> None:
        self.model, self._origin, self._master = model, origin, master
        self._sites: dict[str, Site] = {}
        self._left: dict[str, str] = {}
        self._rounds = -1
        """How often parameters were rounded in this step; the first time is before all steps."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def parameters(self) -> Any:
        return self.model.parameters()

    @property
    def step(self) -> int:
        return self._origin.step

    def set_step(self, step: int, worker: int = 0) -> None:
        """Say which step this is, and whose: noise follows from (seed, step, worker, module, call), warm-ups from it.

        Each of several ranks gives its rank as `worker`: their errors shall average out. The master format's noise is
        that of the step alone, so that all keep the same parameters.
        """
        self._origin.step, self._origin.worker, self._rounds = step, worker, 0
        for site in self._sites.values():
            site.calls = 0

    def round_master(self, step: int | None = None) -> None:
        """Round the parameters themselves to the master format, in place; `step` is that of `set_step` by default."""
        at = self._origin.step if step is None else step
        if not self._master.is_identity:
            with torch.no_grad():
                for i, parameter in enumerate(self.model.parameters()):
                    seed = derive(self._origin.seed, MASTER, at, self._rounds, i)
                    parameter.copy_(self._master(parameter, seed, at))
        self._rounds += 1

    def keep_master(self, optimizer: torch.optim.Optimizer) -> None:
        """After each step of `optimizer`, round the parameters to the master format."""
        optimizer.register_step_post_hook(lambda *_: self.round_master())

    def explain(self) -> list[ModuleRow]:
        """Every module: what it computes in, what runs it, and what was met while it ran."""
        rows = []
        for name, module in self.model.named_modules():
            kind = type(module).__name__.removeprefix("Lowered")
            site = self._sites.get(name)
            if site is None:
                why = self._left.get(name, "float32: nothing here is lowered")
                rows.append(ModuleRow(name, kind, "as-is", why, ()))
                continue
            seen = tuple(f"{func}: {what}" for func, what in sorted(site.seen.items()))
            runs = self._left.get(name) or _runs(site.precision)
            rows.append(ModuleRow(name, kind, str(site.precision), runs, seen, tuple(sorted(site.operands))))
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The seed, the step, the worker and how many operations of this step have drawn noise."""
        calls = {name: site.calls for name, site in self._sites.items()}
        return {**vars(self._origin), "rounds": self._rounds, "calls": calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._origin.seed, self._origin.step = state["seed"], state["step"]
        # those of version 0.1 say neither
        self._origin.worker, self._rounds = state.get("worker", 0), state.get("rounds", 0)
        for name, calls in state["calls"].items():
            self._sites[name].calls = calls

    def restore(self) -> nn.Module:
        """The model with its own classes again; parameters keep their values."""
        for module in self.model.modules():
            if isinstance(module, LoweredModule):
                module.__class__ = type(module).__mro__[2]
                del module.__dict__["_interception"]
        self._sites.clear()
        return self.model


def _runs(what: Precision) -> str:
    if what.is_plain:
        return "torch, float32, left alone"
    choices = {kernel.explain(rule) for rule in (what.accumulate, what.backward_sums)}
    return "; ".join(sorted(f"{c.implementation}{f' ({c.why})' if c.why else ''}" for c in choices))


def _why_left(module: nn.Module, norms: bool) -> str | None:
    """Why a module is not lowered, or None where it is."""
    is_torchs = type(module).__module__.startswith("torch.nn.modules")
    if not is_torchs or isinstance(module, (*MULTIPLYING, *WITH_SUBMODULES)):
        return None
    if isinstance(module, NORMS):
        return None if norms else "norms=False"
    if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return "a container: see its modules"
    return "float32: it multiplies no matrices"


def lower(
    model: nn.Module,
    *,
    weights: What = None,
    activations: What = None,
    gradients: What = None,
    accumulate: str | Accumulator = "fp32",
    accumulate_backward: str | Accumulator | None = None,
    master: What = None,
    norms: bool = True,
    overrides: Overrides | None = None,
    unsupported: str = "raise",
    seed: int | None = None,
) -> Lowered:
    """Change `model`, in place, so that it computes in the given formats; `.restore()` of the result undoes it.

    weights: parameters, and what is computed from parameters alone (`w.t().contiguous()`, `w * 0.5`), are cast at each
    use in a lowered operation; what the optimizer holds stays as it is. activations: all other operands, buffers among
    them, outputs of norms and the states of recurrent layers. gradients: what comes back to each operation, and the
    gradient of each weight. accumulate: how matrix products and convolutions sum ("fp32" is torch's own);
    accumulate_backward: in the gradients. master: parameters themselves are rounded to this format now, and by
    `keep_master(optimizer)` after each step.

    Lowered: nn.Linear, Conv1d, Conv2d, Embedding, LSTM, GRU, RNN and their cells, MultiheadAttention, the layers of
    nn.Transformer, norms (norms=False leaves them), and in any module of yours F.linear, conv1d, conv2d, matmul, `@`,
    mm, bmm, addmm, baddbmm, scaled_dot_product_attention, embedding and the norms as functions. What multiplies
    matrices otherwise (transposed convolutions, einsum, ...) raises, or with unsupported="float32" is left alone and
    listed by `explain()`. All else (softmax, activations, pooling, the loss) is float32.

    overrides: {pattern of module names: {role: format} or "as-is"}, the first that matches decides.
    """
    if unsupported not in ("raise", "float32"):
        raise ValueError(f"lower: unknown unsupported {unsupported!r}; take 'raise' or 'float32'")
    _check_model(model)
    roles = {"weights": weights, "activations": activations, "gradients": gradients, "accumulate": accumulate}
    base = formats.precision(Precision(), roles | {"accumulate_backward": accumulate_backward})
    names, to_master = [name for name, _ in model.named_modules()], caster(master)
    chosen = formats.precisions(names, base, overrides or {})
    if seed is None and (to_master.stochastic or any(p.stochastic for p in (base, *chosen.values()))):
        raise ValueError("lower: stochastic rounding needs seed=, an integer; the same seed gives the same run")
    _check_modules(model, chosen, unsupported)
    lowered = Lowered(model, NoiseOrigin(seed or 0), to_master)
    for number, (name, module) in enumerate(model.named_modules()):
        _lower_module(lowered, name, module, Site(name, number, chosen[name], lowered._origin), norms, unsupported)
    lowered.round_master()
    return lowered


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"lower: got {type(model).__name__}; give a torch.nn.Module")
    for name, module in model.named_modules():
        what = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, LoweredModule):
            raise ValueError("lower: this model is lowered already; restore() it first")
        if isinstance(module, torch.jit.ScriptModule):
            problem = "is compiled by TorchScript, where nothing is seen"
            raise NotImplementedError(f"lower: {what} {problem}; lower the original")
        if any(nn.parameter.is_lazy(p) for p in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise ValueError(f"lower: {what} does not know its shapes yet; call the model once, then lower it")


def _check_modules(model: nn.Module, chosen: dict[str, Precision], unsupported: str) -> None:
    refused = []
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(name, recurse=False):
            # what accumulators of ours give is float32; integers are indices, which no accumulator meets
            other = parameter.is_floating_point() and parameter.dtype != torch.float32
            if other and not chosen[name].sums.is_torch:
                advice = "accumulators give float32, so call model.float() first"
                raise ValueError(f"lower: {own} is {parameter.dtype}; {advice} and name the formats to round to")
        if isinstance(module, NOT_LOWERED) and not chosen[name].is_plain:
            refused.append(f"{name} ({type(module).__name__})")
    if refused and unsupported == "raise":
        advice = "override them with 'as-is', or give unsupported='float32'"
        raise NotImplementedError(f"lower: {', '.join(refused)} cannot be lowered; {advice}")


def _lower_module(lowered: Lowered, name: str, module: nn.Module, site: Site, norms: bool, unsupported: str) -> None:
    if isinstance(module, NOT_LOWERED):
        site.precision = Precision()
        lowered._left[name] = "NOT lowered: runs in float32"
    why = _why_left(module, norms)
    if why is not None and not isinstance(module, (*NOT_LOWERED, *NORMS)):
        lowered._left[name] = why
        return
    if why is not None:
        site.precision = Precision()
    module.__dict__["_interception"] = Interception(site, unsupported)
    module.__class__ = lowered_class(type(module))
    lowered._sites[name] = site
