"""What a model is to the predictor: its tensors, when each gradient is ready, how long a step computes, and which calls
`attach` makes for it: DDP's bucket rule is here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import BUCKET_BYTES, FIRST_BYTES, MIN_VALUES, assign_buckets
from narrowcast.toml_file import Document, brief, parse_toml, read_text, toml_lines

FORMAT = 1
LARGEST = 1e15
"""Values, multiply-adds and seconds: no model has more, and sums of products stay far from infinity."""
ALLOWED = f"must be a number from 0 to {LARGEST:g}"


@dataclass(frozen=True)
class TensorTime:
    """One gradient: when it is ready, in seconds after the backward pass began."""

    name: str
    numel: int
    ready: float


UPDATE_BYTES = 20
"""An optimizer with momentum reads gradient, weight and momentum and writes the last two: 20 bytes a parameter."""


@dataclass(frozen=True)
class Profile:
    """One training step of one rank without communication. Tensors in the order in which gradients get ready."""

    name: str
    batch: int
    forward: float
    backward: float
    update: float
    tensors: tuple[TensorTime, ...]
    spread: float = 0.0
    """Relative standard deviation of the step's time."""
    source: str = ""
    activations: int = 0
    """Values that cross a pipeline boundary or a tensor-parallel layer, for each sample."""
    ranks: int = 1
    """How many ranks ran at once when it was measured: where they share processors, it already shows."""

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.update

    def scaled(self, factor: float) -> Profile:
        """The same model on a device that takes `factor` times as long."""
        tensors = tuple(replace(t, ready=t.ready * factor) for t in self.tensors)
        times = {key: getattr(self, key) * factor for key in ("forward", "backward", "update")}
        return replace(self, tensors=tensors, **times)


@dataclass(frozen=True)
class Layer:
    """Part of a description: parameter tensors and the multiply-adds of one sample, in forward order."""

    name: str
    tensors: tuple[int, ...]
    macs: float
    output: int = 0
    """Values that the layer hands on, for each sample."""


@dataclass(frozen=True)
class Description:
    """A model that need not run here: what it is made of. A step takes 6 flops for each multiply-add."""

    name: str
    layers: tuple[Layer, ...]
    batch: int
    samples: int = 0
    """Samples of an epoch."""
    source: str = ""

    @property
    def numel(self) -> int:
        return sum(sum(layer.tensors) for layer in self.layers)

    @property
    def macs(self) -> float:
        return sum(layer.macs for layer in self.layers)

    def profile(
        self, flops: float, memory_gbyte: float = 0.0, batch: int | None = None, spread: float = 0.2
    ) -> Profile:
        """Times on a device with so many flops a second: layer by layer, backward twice the forward pass."""
        if flops <= 0:
            raise ValueError(f"model {self.name}: a description needs the device's speed; give --flops or --compute-ms")
        size = batch or self.batch
        forward = 2 * self.macs * size / flops
        update = self.numel * UPDATE_BYTES / (memory_gbyte * 1e9) if memory_gbyte else 0.0
        return Profile(
            *(self.name, size, forward, 2 * forward, update, self._tensors(4 * size / flops)),
            spread=spread,
            source=f"description; {self.source}",
            activations=int(
                statistics.median([layer.output for layer in self.layers if layer.macs and layer.output] or [0])
            ),
        )

    def profile_of(
        self, compute: float, batch: int | None = None, update: float = 0.0, spread: float = 0.02
    ) -> Profile:
        """Times from a step that somebody measured: a third forward, two thirds backward."""
        made = self.profile(1.0, batch=batch, spread=spread)
        return replace(made.scaled((compute - update) / (made.forward + made.backward)), update=update)

    def _tensors(self, seconds_per_mac: float) -> tuple[TensorTime, ...]:
        at, tensors = 0.0, []
        for layer in reversed(self.layers):
            at += layer.macs * seconds_per_mac
            tensors += [TensorTime(f"{layer.name}.{i}", n, at) for i, n in reversed(list(enumerate(layer.tensors)))]
        return tuple(tensors)


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together, ready when the last of them is."""

    values: int
    ready: float
    small: int
    """How many of the values are in tensors too small to be compressed."""


@lru_cache(maxsize=256)
def ddp_buckets(
    tensors: tuple[TensorTime, ...],
    first_bytes: int = FIRST_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    value_bytes: int = 4,
    min_values: int = MIN_VALUES,
) -> tuple[Bucket, ...]:
    """The buckets that DDP makes of tensors in the order in which they get ready."""
    gradients = [torch.empty(t.numel * value_bytes, dtype=torch.uint8, device="meta") for t in tensors]
    assigned = assign_buckets(gradients, [first_bytes, bucket_bytes])
    return tuple(_close([tensors[number] for number in bucket], min_values) for bucket in assigned)


def _close(held: Sequence[TensorTime], min_values: int) -> Bucket:
    small = sum(t.numel for t in held if t.numel < min_values)
    return Bucket(sum(t.numel for t in held), max(t.ready for t in held), small)


@dataclass(frozen=True)
class CallPlan:
    """One collective: so many values with one codec, no earlier than `ready`."""

    values: int
    ready: float
    wire: str


def attach_calls(buckets: tuple[Bucket, ...], wire: str, split: bool = True) -> tuple[CallPlan, ...]:
    """What `attach` starts: small tensors as they are, in a call of their own; one call a bucket for lossless wires."""
    if not split or codec_named(wire).lossless:
        return tuple(CallPlan(b.values, b.ready, wire) for b in buckets)
    planned = []
    for bucket in buckets:
        parts = ((bucket.values - bucket.small, wire), (bucket.small, "fp32"))
        planned += [CallPlan(values, bucket.ready, name) for values, name in parts if values]
    return tuple(planned)


@lru_cache(maxsize=65536)
def wire_bytes(wire: str, values: int) -> int:
    """Bytes of so many float32 values on the wire."""
    return 4 * values if wire == "as-is" else codec_named(wire).nbytes(values)


OPTIONAL = ("spread", "activations", "ranks")
NUMBERS = ("batch", "forward", "backward", "update", *OPTIONAL)


def dump(profile: Profile) -> str:
    head: dict[str, object] = {"format": FORMAT, "name": profile.name, "source": profile.source}
    head |= {key: getattr(profile, key) for key in NUMBERS}
    head["tensors"] = [[t.name, t.numel, t.ready] for t in profile.tensors]
    title = (
        "# A training step of one rank. Times in seconds; tensors: name, values, ready after the backward pass began."
    )
    return "\n".join([title, *toml_lines(head)]) + "\n"


def load(path: str | Path) -> Profile:
    return read_profile(parse_toml(read_text(path), str(path)))


def read_profile(document: Document) -> Profile:
    values = dict(document.values)
    if values.pop("format", None) != FORMAT:
        document.fail("format", f"this version reads format = {FORMAT}")
    for key in NUMBERS:
        number = values.get(key, 0 if key in OPTIONAL else None)
        if not _is_number(number):
            document.fail(key, "is missing; give a number" if number is None else f"{ALLOWED}, got {brief(number)}")
    rows = values.pop("tensors", None)
    if not isinstance(rows, list) or not rows:
        document.fail("tensors", 'give a list of ["name", values, seconds]')
    for number, row in enumerate(rows):
        good = isinstance(row, list) and len(row) == 3 and isinstance(row[0], str)
        if not good or not all(_is_number(v) for v in row[1:]):
            document.fail(f"tensors.{number}", f'must be ["name", values, seconds], got {brief(row)}')
    unknown = set(values) - {*NUMBERS, "name", "source"}
    if unknown:
        document.fail(min(unknown), "unknown key")
    for key, default in (("name", None), ("source", "")):
        if not isinstance(values.get(key, default), str):
            document.fail(key, 'is missing; give a "string"')
    tensors = tuple(TensorTime(n, int(v), float(s)) for n, v, s in rows)
    return Profile(tensors=tensors, **values)


def read_description(document: Document) -> Description:
    """A description of one's own: a name, the batch, and a [[layer]] for each, with its tensors and multiply-adds."""
    values = document.values
    if values.get("format") != FORMAT:
        document.fail("format", f"this version reads format = {FORMAT}")
    for key in values:
        if key not in ("format", "name", "batch", "samples", "source", "layer"):
            document.fail(key, "unknown key; there are name, batch, samples, source and [[layer]]")
    if not isinstance(values["layer"], list) or not values["layer"]:
        document.fail("layer", "write [[layer]], once for each")
    layers = tuple(_layer(document, table, number) for number, table in enumerate(values["layer"]))
    batch, samples = values.get("batch", 1), values.get("samples", 0)
    for key, value in (("batch", batch), ("samples", samples)):
        if not _is_whole(value) or value < (key == "batch"):
            document.fail(key, f"must be a whole number, got {brief(value)}")
    return Description(str(values.get("name", document.name)), layers, batch, samples, str(values.get("source", "")))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and _is_number(value)


def _layer(document: Document, table: object, number: int) -> Layer:
    path = f"layer.{number}"
    if not isinstance(table, dict):
        document.fail("layer", "write [[layer]], once for each")
    for key in table:
        if key not in ("name", "tensors", "macs", "output"):
            document.fail(f"{path}.{key}", "unknown; a layer has name, tensors, macs and output")
    tensors, macs, output = table.get("tensors", []), table.get("macs", math.nan), table.get("output", 0)
    if not isinstance(tensors, list) or not all(_is_whole(n) and n > 0 for n in tensors):
        document.fail(f"{path}.tensors", f"must be a list of numbers of values, got {brief(tensors)}")
    if not _is_number(macs):
        document.fail(f"{path}.macs", f"must be the multiply-adds of one sample, got {brief(macs)}")
    if not _is_whole(output):
        document.fail(f"{path}.output", f"must be the values that it hands on for one sample, got {brief(output)}")
    return Layer(str(table.get("name", path)), tuple(tensors), float(macs), output)
