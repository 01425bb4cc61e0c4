"""The errors of the four 8-bit types with correct rounding: papers.md 1.4, met to 2 %."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc

SAMPLES = 2_000_000

# mean absolute error, mean squared error, mean relative error in per cent
TABLE = {
    "uniform": {
        "dtree8": (0.003367, 1.69e-5, 0.935),
        "linear8": (0.001968, 5.2e-6, 1.49),
        "mantissa8@10": (0.02096, 6.78e-4, 4.97),
        "stree8@10": (0.01344, 2.74e-4, 3.34),
    },
    "N(0, 1)": {
        "dtree8": (0.01016, 1.80e-4, 1.64),
        "linear8": (0.01048, 1.46e-4, 5.01),
        "mantissa8@10": (0.0396, 5.67e-3, 4.97),
        "stree8@10": (0.0432, 5.17e-3, 4.78),
    },
    "N(0, 10^2)": {
        "dtree8": (0.0992, 0.0170, 1.61),
        "linear8": (0.0999, 0.0133, 4.81),
        "mantissa8@100": (0.397, 0.570, 4.97),
        "stree8@100": (0.433, 0.520, 4.79),
    },
    "N(0, 0.2^2)": {
        "dtree8": (0.00202, 7.1e-6, 1.63),
        "linear8": (0.00207, 5.7e-6, 4.94),
        "mantissa8@10": (0.0108, 2.94e-4, 5.97),
        "stree8@10": (0.00739, 1.05e-4, 4.84),
    },
}
DEVIATION = {"uniform": 0.0, "N(0, 1)": 1.0, "N(0, 10^2)": 10.0, "N(0, 0.2^2)": 0.2}
CASES = [(distribution, spec) for distribution, row in TABLE.items() for spec in row]


def sample(distribution: str) -> Tensor:
    """The distribution, with the largest magnitude of the table's own sample.

    Dynamic and linear are scaled by it. It is 4 * 127 times the mean absolute error of the linear type, whose errors
    are spread evenly over a step.
    """
    generator = torch.Generator().manual_seed(0)
    if distribution == "uniform":
        return torch.rand(SAMPLES, generator=generator)
    x = DEVIATION[distribution] * torch.randn(SAMPLES, generator=generator)
    largest = 4 * 127 * TABLE[distribution]["linear8"][0]
    x = x.clamp(-largest, largest)
    x[0] = largest
    return x


@pytest.mark.parametrize("distribution, spec", CASES)
def test_the_corrected_errors_of_the_paper(distribution: str, spec: str) -> None:
    report = nc.error_report(sample(distribution), spec)
    found = (report.mean_absolute_error, report.mean_squared_error, 100 * report.mean_relative_error)
    assert found == pytest.approx(TABLE[distribution][spec], rel=0.02)
