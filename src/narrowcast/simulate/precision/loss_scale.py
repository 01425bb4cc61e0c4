"""Loss scaling: static, dynamic, and dynamic with a minimum that rises (Mellempudi et al. 2019).

    scaler = LossScale(2**10, minimums={2000: 2**12, 8000: 2**14})
    scaler.scale(loss).backward()
    scaler.step(optimizer)      # divides the gradients; leaves the step out where one is not finite
    scaler.update()

Several optimizers: `step` each, then `update` once; each leaves its own step out, and the factor backs off for any. The
names are those of torch.amp.GradScaler, so that `nc.attach(model, spec, scaler=scaler)` takes it, too. (Error
feedback knows a skipped step by a smaller factor; one that is skipped at the minimum it does not see.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

SMALLEST = torch.finfo(torch.float32).tiny
"""No factor is less: what it is divided by again must be a float32 number."""


class LossScale:
    """A factor of the loss that keeps small gradients above a narrow format's smallest number.

    dynamic: multiplied by `backoff` when a gradient is not finite, by `growth` after `interval` good steps in a row.
    minimums: {step: least factor from then on}; training later has smaller gradients, and backing off below would flush
    them all. It never falls below 2**-126. With dynamic=False the factor stays, and steps with a gradient that is not
    finite are left out all the same.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        dynamic: bool = True,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        minimums: Mapping[int, float] | None = None,
    ) -> None:
        if not 0 < scale < math.inf or growth < 1 or not 0 < backoff <= 1 or interval < 1:
            got = f"scale={scale}, growth={growth}, backoff={backoff}, interval={interval}"
            raise ValueError(
                f"LossScale: needs a finite scale > 0, growth >= 1, 0 < backoff <= 1, interval >= 1; got {got}"
            )
        self.dynamic, self.growth, self.backoff, self.interval = dynamic, growth, backoff, interval
        self.minimums = dict(sorted((minimums or {}).items()))
        self._scale, self._steps, self._good = float(scale), 0, 0
        self.skipped = False
        """Whether the last step was left out, of any optimizer."""
        self._unscaled: dict[Optimizer, bool] = {}
        """Whose gradients were divided since the last update, and whether one was not finite."""
        self._stepped: set[Optimizer] = set()
        self._scale = max(self._scale, self.minimum)

    @property
    def minimum(self) -> float:
        """The least factor at this step."""
        return max([SMALLEST, *(least for step, least in self.minimums.items() if step <= self._steps)])

    def get_scale(self) -> float:
        return self._scale

    def is_enabled(self) -> bool:
        return True

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide all gradients of an optimizer by the factor, once a step, and note whether one is not finite."""
        if optimizer in self._unscaled:
            raise RuntimeError("LossScale: unscale_() was already called for this optimizer since the last update()")
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._unscaled[optimizer] = not all(bool(g.isfinite().all()) for g in grads)
        self.skipped = any(self._unscaled.values())
        for g in grads:
            g.mul_(1 / self._scale)

    def step(self, optimizer: Optimizer) -> Any:
        """The optimizer's step, unless one of its gradients is not finite."""
        if optimizer in self._stepped:
            raise RuntimeError("LossScale: step() was already called for this optimizer since the last update()")
        self._stepped.add(optimizer)
        if optimizer not in self._unscaled:
            self.unscale_(optimizer)
        return None if self._unscaled[optimizer] else optimizer.step()

    def update(self) -> None:
        """Choose the factor of the next step, once all optimizers are done."""
        if not self._unscaled:
            raise RuntimeError("LossScale: update() comes after step()")
        self._steps += 1
        self._unscaled.clear()
        self._stepped.clear()
        if not self.dynamic:
            return
        self._good = 0 if self.skipped else self._good + 1
        if self.skipped:
            self._scale *= self.backoff
        elif self._good == self.interval:
            self._scale, self._good = self._scale * self.growth, 0
        self._scale = max(self._scale, self.minimum)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "steps": self._steps, "good": self._good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scale, self._steps, self._good = state["scale"], state["steps"], state["good"]
