"""Optimizers whose weights and states live in a chosen format, without a float32 copy unless one is asked for.

Everything that is kept from one step to the next is rounded when it is stored; a step itself is computed in float32.
Tensors stay float32 and hold numbers of the format. With "fp32" the results are those of torch.optim, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import codec
from narrowcast.kernels import derive
from narrowcast.simulate.precision.casts import OPTIMIZER, Caster, What, caster

UPDATES = ("nearest", "stochastic", "kahan")
WEIGHT, MASTER, STATE = 0, 1, 2


def _with_rounding(what: What, stochastic: bool) -> Caster:
    chosen = caster(what)
    if not stochastic or chosen.is_identity or chosen.stochastic:
        return chosen
    if chosen.codec is None:
        return replace(chosen, rounding="stochastic")
    try:
        return replace(chosen, codec=codec(f"{chosen.codec}+sr"))
    except ValueError as error:
        problem = f"update='stochastic': {chosen.codec} does not round stochastically ({error})"
        raise ValueError(f"{problem}; take another codec or update='nearest'") from error


@dataclass(frozen=True)
class LinearUpdate:
    """w - lr * direction: SGD, momentum, LARS."""

    direction: Tensor
    lr: float

    def apply(self, w: Tensor) -> Tensor:
        return w.add(self.direction, alpha=-self.lr)

    def difference(self, w: Tensor) -> Tensor:
        return self.direction.mul(-self.lr)


@dataclass(frozen=True)
class QuotientUpdate:
    """w * (1 - decay) - size * mean / denominator: Adam, AdamW."""

    mean: Tensor
    denominator: Tensor
    size: float
    decay: float

    def apply(self, w: Tensor) -> Tensor:
        start = w.mul(1 - self.decay) if self.decay else w
        return start.addcdiv(self.mean, self.denominator, value=-self.size)

    def difference(self, w: Tensor) -> Tensor:
        step = self.mean.div(self.denominator).mul(-self.size)
        return step.sub(w, alpha=self.decay) if self.decay else step


Update = LinearUpdate | QuotientUpdate
"""What an optimizer does to a weight in one step: as one float32 expression, and as the difference alone.

The expressions are those of torch.optim, operation by operation, so that in float32 the bits are the same.
"""


RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("lr", "momentum", "weight_decay", "eps"), (lambda value: float(value) >= 0, "zero or more")),
    "betas": (lambda betas: all(0 <= float(beta) < 1 for beta in betas), "zero or more and below one, each"),
}
"""What the numbers of a group may be; NaN is neither."""


class LowPrecisionOptimizer(torch.optim.Optimizer):
    """What all of them share.

    weights: the format of the weights. states: that of momentum and the like, by default the same. update: how a new
    weight is rounded: "nearest", "stochastic" (states too), or "kahan", where a compensation in the same format keeps
    what rounding took away (Zamirai 2020: y = R(u - c), t = R(w + y), c = R(R(t - w) - y), w = t). master: keep a
    float32 copy, move that, and round it into the weights. seed: noise is that of (seed, number of steps done,
    parameter, what is stored); the number of steps is part of `state_dict()`.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        weights: What = "fp32",
        states: What = None,
        update: str = "nearest",
        master: bool = False,
        seed: int | None = None,
    ) -> None:
        if update not in UPDATES:
            raise ValueError(f"{type(self).__name__}: unknown update {update!r}; take one of {', '.join(UPDATES)}")
        if master and update == "kahan":
            raise ValueError(f"{type(self).__name__}: a float32 master loses nothing that Kahan could keep; take one")
        self.weights = _with_rounding(weights, update == "stochastic")
        self.states = _with_rounding(weights if states is None else states, update == "stochastic")
        if seed is None and (self.weights.stochastic or self.states.stochastic):
            raise ValueError(f"{type(self).__name__}: stochastic rounding needs seed=, an integer")
        self.update, self.master, self.seed = update, master, seed or 0
        super().__init__(params, defaults | {"updates": 0})

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Weights start as numbers of their format; a master keeps what they were."""
        super().add_param_group(param_group)
        number, group = len(self.param_groups) - 1, self.param_groups[-1]
        self._check(group)
        for i, p in enumerate(group["params"]):
            if self.master:
                self.state[p]["master"] = p.detach().clone(memory_format=torch.preserve_format)
            p.copy_(self.weights(p, derive(self.seed, OPTIMIZER, number, i, WEIGHT)))

    def _check(self, group: dict[str, Any]) -> None:
        for name, (is_good, expected) in RANGES.items():
            if name in group and not is_good(group[name]):
                raise ValueError(f"{type(self).__name__}: {name} must be {expected}, got {group[name]}")

    @property
    def precision(self) -> dict[str, Any]:
        """What it does besides what its groups say."""
        formats = {"weights": self.weights, "states": self.states}
        return {**formats, "update": self.update, "master": self.master, "seed": self.seed}

    def _update(self, p: Tensor, w: Tensor, group: dict[str, Any], store: Callable[[str, Tensor], Tensor]) -> Update:
        """What to do to the weight `w` of parameter `p`; new states go through `store`, which rounds them."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; parameters without a gradient are left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group_number, group in enumerate(self.param_groups):
            group["updates"] = group.get("updates", 0) + 1
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    self._step_one(p, group, derive(self.seed, OPTIMIZER, group_number, i, 1 + group["updates"]))
        return loss

    def _step_one(self, p: Tensor, group: dict[str, Any], seed: int) -> None:
        state = self.state[p]
        slots = itertools.count(STATE)
        step = group["updates"]

        def store(name: str, value: Tensor) -> Tensor:
            state[name] = self.states(value, derive(seed, next(slots)), step)
            return state[name]

        w = state["master"] if self.master else p
        update = self._update(p, w, group, store)
        if self.update == "kahan":

            def rounded(x: Tensor) -> Tensor:
                return self.weights(x, derive(seed, next(slots)), step)

            lost = state.get("compensation")
            y = rounded(rounded(update.difference(p)) - (torch.zeros_like(p) if lost is None else lost))
            t = rounded(p + y)
            state["compensation"] = rounded(rounded(t - p) - y)
            p.copy_(t)
            return
        new = update.apply(w)
        if self.master:
            w.copy_(new)
        p.copy_(self.weights(new, derive(seed, WEIGHT), step))


class SGD(LowPrecisionOptimizer):
    """torch.optim.SGD: momentum, dampening, weight decay, Nesterov."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **precision: Any,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("SGD: Nesterov needs a momentum and no dampening")
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening}
        super().__init__(params, defaults | {"weight_decay": weight_decay, "nesterov": nesterov}, **precision)

    def _update(self, p: Tensor, w: Tensor, group: dict[str, Any], store: Callable[[str, Tensor], Tensor]) -> Update:
        assert p.grad is not None
        grad, momentum = self._gradient(p.grad, w, group), group["momentum"]
        if not momentum:
            return LinearUpdate(grad, group["lr"])
        before = self.state[p].get("momentum_buffer")
        new = grad.clone() if before is None else before.mul(momentum).add(grad, alpha=1 - group["dampening"])
        buffer = store("momentum_buffer", new)
        return LinearUpdate(grad.add(buffer, alpha=momentum) if group["nesterov"] else buffer, group["lr"])

    def _gradient(self, grad: Tensor, w: Tensor, group: dict[str, Any]) -> Tensor:
        return grad.add(w, alpha=group["weight_decay"]) if group["weight_decay"] else grad


class LARS(SGD):
    """Layer-wise adaptive rates (You et al. 2017): each tensor's gradient is scaled, then SGD with momentum follows.

    rate = coefficient * |w| / (|g| + weight_decay * |w| + eps), 1 where either norm is zero; tensors of one dimension
    (biases and norms) are left at 1 unless `adapt_all`. The norms are float32.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        coefficient: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
        adapt_all: bool = False,
        **precision: Any,
    ) -> None:
        self.coefficient, self.eps, self.adapt_all = coefficient, eps, adapt_all
        self._check({"eps": eps})
        super().__init__(params, lr, momentum, 0.0, weight_decay, nesterov, **precision)

    @property
    def precision(self) -> dict[str, Any]:
        own = {"coefficient": self.coefficient, "eps": self.eps, "adapt_all": self.adapt_all}
        return {**super().precision, **own}

    def rate(self, grad: Tensor, w: Tensor, weight_decay: float) -> float:
        """The factor of one tensor's gradient."""
        if w.dim() < 2 and not self.adapt_all:
            return 1.0
        of_w, of_grad = float(w.norm()), float(grad.norm())
        if of_w == 0 or of_grad == 0:
            return 1.0
        return self.coefficient * of_w / (of_grad + weight_decay * of_w + self.eps)

    def _gradient(self, grad: Tensor, w: Tensor, group: dict[str, Any]) -> Tensor:
        return super()._gradient(grad, w, group) * self.rate(grad, w, group["weight_decay"])


class Adam(LowPrecisionOptimizer):
    """torch.optim.Adam."""

    decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **precision: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **precision)

    def _update(self, p: Tensor, w: Tensor, group: dict[str, Any], store: Callable[[str, Tensor], Tensor]) -> Update:
        assert p.grad is not None
        state, (beta1, beta2), decay = self.state[p], group["betas"], group["weight_decay"]
        grad = p.grad if self.decoupled or not decay else p.grad.add(w, alpha=decay)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        step = float(state["step"])
        mean = store("exp_avg", state["exp_avg"].lerp(grad, 1 - beta1))
        square = store("exp_avg_sq", state["exp_avg_sq"].mul(beta2).addcmul(grad, grad, value=1 - beta2))
        denominator = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        size = group["lr"] / (1 - beta1**step)
        return QuotientUpdate(mean, denominator, size, group["lr"] * decay if self.decoupled else 0.0)


class AdamW(Adam):
    """torch.optim.AdamW: the weights decay by themselves, apart from the gradient."""

    decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **precision: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **precision)
