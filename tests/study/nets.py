"""A network and data of the user's own, small enough that a study of them takes seconds."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

HERE = Path(__file__)
OWN_STUDY = f"""\
models = ["{HERE}:net"]
data = ["{HERE}:rows"]
wires = ["fp32", "int8/256"]
batch = 8
steps = 3
repeats = 2
"""
"""The beginning of a study of them."""


def net() -> nn.Module:
    """Takes no argument; its matrix is large enough to be compressed."""
    return nn.Sequential(nn.Linear(32, 400), nn.ReLU(), nn.Linear(400, 4))


def net_for(examples: object) -> nn.Module:
    """Takes the examples, and looks at them."""
    return nn.Linear(examples.shape[0], examples.classes)


def slow() -> nn.Module:
    """Long enough in the making that a study can be killed in the middle."""
    time.sleep(0.3)
    return net()


def broken() -> nn.Module:
    raise RuntimeError("this network cannot be made")


def broken_on_rank_1() -> nn.Module:
    """The other ranks wait for this one."""
    if os.environ.get("RANK") == "1":
        raise RuntimeError("rank 1 cannot make it")
    return net()


def rows() -> SimpleNamespace:
    """Which of four directions is strongest."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(320, 32, generator=made)
    y = x[:, :4].argmax(dim=1)
    return SimpleNamespace(x_train=x[:256], y_train=y[:256], x_test=x[256:], y_test=y[256:], classes=4)


def without_tests() -> SimpleNamespace:
    made = rows()
    return SimpleNamespace(**{**vars(made), "x_test": made.x_test[:0], "y_test": made.y_test[:0]})


def with_too_few_labels() -> SimpleNamespace:
    made = rows()
    return SimpleNamespace(**{**vars(made), "y_train": made.y_train[:3]})
