"""Table 2 of Dettmers 2016 again: error of the four 8-bit types on four distributions, beside the paper's numbers.

The paper's column "mean absolute error" is the mean squared error (it grows a hundredfold when the deviation grows
tenfold), and both of its columns carry a defect of the original search, which compared with one neighbour only. The
corrected numbers are those of exact nearest rounding on 5 million samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from narrowcast.codecs import error_report

SAMPLES = 5_000_000


@dataclass(frozen=True)
class Published:
    """What the paper prints, and what exact nearest rounding gives."""

    paper_squared: float
    paper_relative: float
    absolute: float
    squared: float
    relative: float


@dataclass(frozen=True)
class Cell:
    """One distribution under one type; relative errors in percent."""

    distribution: str
    codec: str
    absolute: float
    squared: float
    relative: float
    published: Published

    @property
    def deviation(self) -> float:
        """Largest relative difference between ours and the corrected numbers."""
        ours = (self.absolute, self.squared, self.relative)
        corrected = (self.published.absolute, self.published.squared, self.published.relative)
        return max(abs(got / want - 1) for got, want in zip(ours, corrected, strict=True))

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"deviation": self.deviation}


DISTRIBUTIONS = {"U(0,1)": (None, 10), "N(0,1)": (1.0, 10), "N(0,10^2)": (10.0, 100), "N(0,0.2^2)": (0.2, 10)}
"""Standard deviation (None: uniform), and the paper's exponent offset for the two static types."""

PUBLISHED = {
    ("U(0,1)", "dtree8"): Published(0.00004, 1.39, 0.003367, 1.69e-5, 0.935),
    ("U(0,1)", "linear8"): Published(0.0024, 2.16, 0.001968, 5.2e-6, 1.49),
    ("U(0,1)", "mantissa8"): Published(0.0017, 7.22, 0.02096, 6.78e-4, 4.97),
    ("U(0,1)", "stree8"): Published(0.0007, 4.82, 0.01344, 2.74e-4, 3.34),
    ("N(0,1)", "dtree8"): Published(0.0005, 2.46, 0.01016, 1.80e-4, 1.64),
    ("N(0,1)", "linear8"): Published(0.0004, 6.47, 0.01048, 1.46e-4, 5.01),
    ("N(0,1)", "mantissa8"): Published(0.0104, 6.89, 0.0396, 5.67e-3, 4.97),
    ("N(0,1)", "stree8"): Published(0.0093, 6.3, 0.0432, 5.17e-3, 4.78),
    ("N(0,10^2)", "dtree8"): Published(0.049, 2.49, 0.0992, 0.0170, 1.61),
    ("N(0,10^2)", "linear8"): Published(0.041, 6.44, 0.0999, 0.0133, 4.81),
    ("N(0,10^2)", "mantissa8"): Published(1.066, 7.19, 0.397, 0.570, 4.97),
    ("N(0,10^2)", "stree8"): Published(0.926, 6.28, 0.433, 0.520, 4.79),
    ("N(0,0.2^2)", "dtree8"): Published(0.000018, 2.45, 0.00202, 7.1e-6, 1.63),
    ("N(0,0.2^2)", "linear8"): Published(0.000015, 6.15, 0.00207, 5.7e-6, 4.94),
    ("N(0,0.2^2)", "mantissa8"): Published(0.00055, 8.26, 0.0108, 2.94e-4, 5.97),
    ("N(0,0.2^2)", "stree8"): Published(0.00022, 6.58, 0.00739, 1.05e-4, 4.84),
}


def published_largest(distribution: str) -> float:
    """The largest magnitude of the sample behind the corrected numbers.

    The two normalised types depend on it. The mean absolute error of even steps is a quarter of a step, so the linear
    type's error tells: largest = 4 * 127 * error.
    """
    return 4 * 127 * PUBLISHED[distribution, "linear8"].absolute


def sample(distribution: str, samples: int) -> Tensor:
    """Random values with the same extreme as the published sample."""
    generator, (deviation, _) = torch.Generator().manual_seed(2016), DISTRIBUTIONS[distribution]
    if deviation is None:
        return torch.rand(samples, generator=generator)
    largest = published_largest(distribution)
    x = (torch.randn(samples, generator=generator) * deviation).clamp(-largest, largest)
    x[0] = largest
    return x


def run(samples: int = SAMPLES) -> Iterator[Cell]:
    """The sixteen cells of the table."""
    for distribution, (_, offset) in DISTRIBUTIONS.items():
        x = sample(distribution, samples)
        specs = {"dtree8": "dtree8", "linear8": "linear8"}
        specs |= {name: f"{name}@{offset}" for name in ("mantissa8", "stree8")}
        for name, spec in specs.items():
            report = error_report(x, spec)
            errors = report.mean_absolute_error, report.mean_squared_error, 100 * report.mean_relative_error
            yield Cell(distribution, spec, *errors, PUBLISHED[distribution, name])
