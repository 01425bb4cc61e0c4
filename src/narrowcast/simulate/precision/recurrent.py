"""LSTM, GRU and RNN in a lowered module, as nn's layers and cells call them.

The weights of a layer are cast once a call, and the input's products of all steps are one product, as in torch; the
state's products are one for each step. What is stored between steps is rounded: h and c forward to the activations'
format, their gradients, all that comes back to them added, to the gradients'. Gates are float32, as all that is
elementwise, and so is the sum over the steps of the state weights' gradients, before it is cast.

A batch of equally long sequences is a packed one whose every step is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.simulate.precision import gemm
from narrowcast.simulate.precision.formats import ACTIVATION, OUTPUT, ROUNDED_OUTPUT, WEIGHT, Site

State = tuple[Tensor, ...]
"""h, and of an LSTM c."""


@dataclass(frozen=True)
class CellWeights:
    """Of one direction of a layer, cast; of input and state, and of an LSTM with a projection that."""

    input: Tensor
    state: Tensor
    input_bias: Tensor | None
    state_bias: Tensor | None
    projection: Tensor | None


def _weights(site: Site, given: Sequence[Tensor], biased: bool) -> CellWeights:
    of_input, of_state, *more = site.new_call().cast_together(*((x, WEIGHT) for x in given))
    biases = (more.pop(0), more.pop(0)) if biased else (None, None)
    return CellWeights(of_input, of_state, biases[0], biases[1], more[0] if more else None)


def _affine(site: Site, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of operands that are cast already; the gradient that comes back is cast."""
    call = site.new_call()
    return call.cast(gemm.affine(x, weight, bias, call.sums), OUTPUT)


def _low(site: Site, x: Tensor) -> Tensor:
    """An operand that comes from outside."""
    return site.new_call().cast_together((x, ACTIVATION))[0]


def _stored(site: Site, x: Tensor) -> Tensor:
    return site.new_call().cast(x, ROUNDED_OUTPUT)


Cell = Callable[[Site, CellWeights, Tensor, State], State]
"""The next state, of the input's products and the state."""


def _lstm(site: Site, weights: CellWeights, inputs: Tensor, state: State) -> State:
    h, c = state
    gates = inputs + _affine(site, h, weights.state, weights.state_bias)
    take, keep, new, show = gates.chunk(4, 1)
    c = _stored(site, torch.sigmoid(keep) * c + torch.sigmoid(take) * torch.tanh(new))
    h = torch.sigmoid(show) * torch.tanh(c)
    if weights.projection is not None:
        h = _affine(site, _low(site, h), weights.projection, None)
    return _stored(site, h), c


def _gru(site: Site, weights: CellWeights, inputs: Tensor, state: State) -> State:
    (h,) = state
    reset, keep, new = inputs.chunk(3, 1)
    reset_h, keep_h, new_h = _affine(site, h, weights.state, weights.state_bias).chunk(3, 1)
    proposed = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
    return (_stored(site, torch.sigmoid(keep + keep_h) * (h - proposed) + proposed),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(site: Site, weights: CellWeights, inputs: Tensor, state: State) -> State:
        (h,) = state
        # a copy, since the activation keeps its result for its gradient
        return (_stored(site, activation(inputs + _affine(site, h, weights.state, weights.state_bias)).clone()),)

    return cell


def _forwards(step: Callable[[Tensor, State], State], parts: Sequence[Tensor], start: State) -> tuple[Tensor, State]:
    """h of each step, and each sequence's last state: the shorter ones are last in the batch and end first."""
    outputs, ended, state = [], [], start
    for part in parts:
        if len(part) < len(state[0]):
            ended.append(tuple(x[len(part) :] for x in state))
            state = tuple(x[: len(part)] for x in state)
        state = step(part, state)
        outputs.append(state[0])
    ended.append(state)
    return torch.cat(outputs), tuple(torch.cat(pieces[::-1]) for pieces in zip(*ended, strict=True))


def _backwards(step: Callable[[Tensor, State], State], parts: Sequence[Tensor], start: State) -> tuple[Tensor, State]:
    """From the last step to the first: the shorter sequences join later."""
    outputs, state = [], tuple(x[:0] for x in start)
    for part in reversed(parts):
        here = len(state[0])
        if len(part) > here:
            state = tuple(torch.cat([x, more[here : len(part)]]) for x, more in zip(state, start, strict=True))
        state = step(part, state)
        outputs.append(state[0])
    return torch.cat(outputs[::-1]), state


@dataclass(frozen=True)
class RecurrentStack:
    """Layers as torch.lstm and its like take them; `params` has the weights of one direction after another."""

    cell: Cell
    params: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool

    def run(self, site: Site, data: Tensor, sizes: Sequence[int], start: State) -> tuple[Tensor, State]:
        """h of the last layer at every step, packed, and the last states of all layers and directions."""
        if not sizes:
            raise ValueError("lower: a recurrent layer got a sequence without steps; give one step at least")
        directions = 2 if self.bidirectional else 1
        each = len(self.params) // (self.num_layers * directions)
        ends: list[State] = []
        for layer in range(self.num_layers):
            if layer:
                data = torch.dropout(data, self.dropout, self.train)
            low, outputs = _low(site, data), []
            for direction in range(directions):
                at = layer * directions + direction
                weights = _weights(site, self.params[at * each : (at + 1) * each], self.has_biases)
                output, end = self._direction(site, weights, low, sizes, tuple(x[at] for x in start), direction == 1)
                outputs.append(output)
                ends.append(end)
            data = torch.cat(outputs, 1)
        return data, tuple(torch.stack(last) for last in zip(*ends, strict=True))

    def _direction(
        self, site: Site, weights: CellWeights, low: Tensor, sizes: Sequence[int], start: State, reverse: bool
    ) -> tuple[Tensor, State]:
        products = _affine(site, low, weights.input, weights.input_bias)

        def step(part: Tensor, state: State) -> State:
            return self.cell(site, weights, part, state)

        go = _backwards if reverse else _forwards
        return go(step, products.split(list(sizes)), tuple(_low(site, x) for x in start))


_COMMON = ("hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_PACKED, _PADDED = ("data", "batch_sizes", *_COMMON), ("input", *_COMMON, "batch_first")


def layers(cell: Cell) -> Callable[..., tuple[Tensor, ...]]:
    """torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu: both forms, packed and padded."""

    def handler(site: Site, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        # batch sizes are whole numbers, states are none
        second = args[1] if len(args) > 1 else None
        packed = "batch_sizes" in kwargs or (isinstance(second, Tensor) and not second.is_floating_point())
        given = dict(zip(_PACKED if packed else _PADDED, args, strict=False)) | kwargs
        hx, batch_first = given.pop("hx"), given.pop("batch_first", False)
        start = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        if packed:
            data, sizes = given.pop("data"), given.pop("batch_sizes").tolist()
            output, end = RecurrentStack(cell, **given).run(site, data, sizes, start)
            return output, *end
        x = given.pop("input")
        x = x.transpose(0, 1) if batch_first else x
        output, end = RecurrentStack(cell, **given).run(site, x.flatten(0, 1), [x.shape[1]] * x.shape[0], start)
        output = output.view(*x.shape[:2], output.shape[-1])
        return output.transpose(0, 1) if batch_first else output, *end

    return handler


def one_step(cell: Cell) -> Callable[..., Any]:
    """torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell."""

    def handler(
        site: Site, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:  # fmt: skip
        given = [w_ih, w_hh] if b_ih is None or b_hh is None else [w_ih, w_hh, b_ih, b_hh]
        weights = _weights(site, given, len(given) == 4)
        products = _affine(site, _low(site, input), weights.input, weights.input_bias)
        start = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        state = cell(site, weights, products, tuple(_low(site, x) for x in start))
        return state[0] if isinstance(hx, Tensor) else state

    return handler


CELLS: dict[str, Cell] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn(torch.tanh),
    "rnn_relu": _rnn(torch.relu),
}
HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(torch, name): layers(cell) for name, cell in CELLS.items()},
    **{getattr(torch, f"{name}_cell"): one_step(cell) for name, cell in CELLS.items()},
}
