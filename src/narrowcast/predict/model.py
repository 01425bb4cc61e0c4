"""What a model is to the predictor: its tensors, when each gradient is ready, how long a step computes, and which calls
`attach` makes for it: DDP's bucket rule is here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from narrowcast.codecs import Matrix
from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import BUCKET_BYTES, FIRST_BYTES, MIN_VALUES, assign_buckets
from narrowcast.parallel import buckets as ddp
from narrowcast.toml_file import Document, Section, brief, parse_toml, read_text, toml_lines

FORMAT = 1
LARGEST = 1e15
"""Values, multiply-adds and seconds: no model has more, and sums of products stay far from infinity."""


@dataclass(frozen=True)
class TensorTime:
    """One gradient: when it is ready, in seconds after the backward pass began."""

    name: str
    numel: int
    ready: float
    shape: tuple[int, ...] = ()
    """Where somebody knows it: low rank follows from it."""


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
    jitter: float = 0.0
    """Relative standard deviation of a rank's compute from step to step; 0: as the cluster's device says."""

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
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the tensors, where they are known."""


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
        outputs = [layer.output for layer in self.layers if layer.macs and layer.output]
        return Profile(
            *(self.name, size, forward, 2 * forward, update, self._tensors(4 * size / flops)),
            spread=spread,
            source=f"description; {self.source}",
            activations=int(statistics.median(outputs or [0])),
        )

    def profile_of(self, compute: float, batch: int | None = None, spread: float = 0.02) -> Profile:
        """Times from a step that somebody measured: a third forward, two thirds backward."""
        made = self.profile(1.0, batch=batch, spread=spread)
        return replace(made.scaled(compute / (made.forward + made.backward)), update=0.0)

    def _tensors(self, seconds_per_mac: float) -> tuple[TensorTime, ...]:
        at, tensors = 0.0, []
        for layer in reversed(self.layers):
            at += layer.macs * seconds_per_mac
            shapes = layer.shapes or ((),) * len(layer.tensors)
            both = list(enumerate(zip(layer.tensors, shapes, strict=True)))
            tensors += [TensorTime(f"{layer.name}.{i}", n, at, shape) for i, (n, shape) in reversed(both)]
        return tuple(tensors)


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together, ready when the last of them is."""

    values: int
    ready: float
    small: int
    """How many of the values are in tensors too small to be compressed."""
    tensors: tuple[TensorTime, ...] = ()


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
    buckets = []
    for held in ([tensors[number] for number in bucket] for bucket in assigned):
        small = sum(t.numel for t in held if t.numel < min_values)
        buckets.append(Bucket(sum(t.numel for t in held), max(t.ready for t in held), small, tuple(held)))
    return tuple(buckets)


class PlannedSum(NamedTuple):
    """A sum of a call: so many values with one codec, and how often a step has it."""

    values: int
    wire: str
    often: float = 1.0


@dataclass(frozen=True)
class CallPlan:
    """One call: so many values with one codec, no earlier than `ready`."""

    values: int
    ready: float
    wire: str
    matrices: tuple[Matrix, ...] = ()
    """By low rank: those whose factors travel."""
    beside: int = 0
    """How many more values have the bytes of those that travel in the same messages, and as they are."""

    @property
    def sums(self) -> list[PlannedSum]:
        """What travels: the values themselves; or both factors, or each of them at every other step."""
        if not self.matrices:
            return [PlannedSum(self.values + self.beside, self.wire)]
        codec = codec_named(self.wire)
        lengths = [codec.rank * sum(m.length(on_left) for m in self.matrices) for on_left in (True, False)]
        often = 0.5 if codec.sends_one_factor else 1.0
        return [PlannedSum(length, str(codec.factors), often) for length in lengths]


def attach_calls(buckets: tuple[Bucket, ...], wire: str, split: bool = True) -> tuple[CallPlan, ...]:
    """What `attach` starts: small tensors as they are, in a call of their own; one call a bucket for lossless wires."""
    if not split or codec_named(wire).lossless:
        return tuple(CallPlan(b.values, b.ready, wire) for b in buckets)
    planned = []
    for bucket in buckets:
        parts = ((bucket.values - bucket.small, wire), (bucket.small, "fp32"))
        planned += [CallPlan(values, bucket.ready, name) for values, name in parts if values]
    return tuple(planned)


def merged_calls(buckets: Sequence[Bucket], wire: str) -> tuple[CallPlan, ...]:
    """The same where a device's backend carries the wires: small tensors travel with the others, and so do buckets
    that are small on the wire.
    """
    sizes = [wire_sizes(wire, (b.values - b.small,))[0] + 4 * b.small for b in buckets]
    planned, weight = [], 32 / codec_named(wire).bits_per_value
    for first, end in ddp.travel_together(sizes):
        values, small = (sum(getattr(b, key) for b in buckets[first:end]) for key in ("values", "small"))
        # a call of small tensors alone
        own = "fp32" if small == values else wire
        # those that stay as they are count as many as their bytes would carry
        beside = 0 if small == values else round(small * (weight - 1))
        planned.append(CallPlan(values, buckets[end - 1].ready, own, beside=beside))
    return tuple(planned)


@lru_cache(maxsize=4096)
def wire_sizes(wire: str, values: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes on the wire of tensors of so many float32 values."""
    return tuple(4 * n for n in values) if wire in ("as-is", "fp32") else tuple(map(codec_named(wire).nbytes, values))


ROW = '["name", values, seconds] or ["name", values, seconds, [rows, ...]]'
OPTIONAL = {"spread": 0.0, "activations": 0, "ranks": 1, "jitter": 0.0}
NUMBERS = ("batch", "forward", "backward", "update", *OPTIONAL)


def dump(profile: Profile) -> str:
    head: dict[str, object] = {"format": FORMAT, "name": profile.name, "source": profile.source}
    head |= {key: getattr(profile, key) for key in NUMBERS}
    head["tensors"] = [[t.name, t.numel, t.ready, *([list(t.shape)] if t.shape else [])] for t in profile.tensors]
    title = "# A training step of one rank. Times in seconds; tensors: name, values, ready in the backward pass, shape."
    return "\n".join([title, *toml_lines(head)]) + "\n"


def load(path: str | Path) -> Profile:
    return read_profile(parse_toml(read_text(path), str(path)))


def read_profile(document: Document) -> Profile:
    top = Section(document, document.values)
    top.check_keys("format", "name", "source", *NUMBERS, "tensors")
    top.check_format(FORMAT)
    numbers: dict[str, Any] = {key: document.values.get(key, OPTIONAL.get(key)) for key in NUMBERS}
    for key, value in numbers.items():
        if not _is_number(value):
            got = f"must be a number from 0 to {LARGEST:g}, got {brief(value)}"
            top.fail(key, "is missing; give a number" if value is None else got)
    rows = document.values.get("tensors")
    if not isinstance(rows, list) or not rows:
        top.fail("tensors", f"give a list of {ROW}")
    for number, row in enumerate(rows):
        is_a_row = isinstance(row, list) and len(row) in (3, 4) and isinstance(row[0], str)
        if not is_a_row or not all(_is_number(v) for v in row[1:3]):
            top.fail(f"tensors.{number}", f"must be {ROW}, got {brief(row)}")
        if len(row) == 4 and not (_is_shape(row[3]) and math.prod(row[3]) == row[1]):
            top.fail(f"tensors.{number}", f"must be {ROW}, of a shape with so many values, got {brief(row)}")
    tensors = tuple(TensorTime(n, int(v), float(s), *map(tuple, shape)) for n, v, s, *shape in rows)
    return Profile(name=top.text("name"), source=top.text("source", ""), tensors=tensors, **numbers)


def read_description(document: Document) -> Description:
    """A description of one's own: a name, the batch, and a [[layer]] for each, with its tensors and multiply-adds."""
    top = Section(document, document.values)
    top.check_format(FORMAT)
    top.check_keys("format", "name", "batch", "samples", "source", "layer")
    layers = tuple(map(_layer, top.tables("layer")))
    if not layers:
        top.fail("layer", "write [[layer]], once for each")
    batch, samples = top.whole("batch", 1, low=1, most=LARGEST), top.whole("samples", 0, most=LARGEST)
    name, source = (str(document.values.get(key, other)) for key, other in (("name", document.name), ("source", "")))
    return Description(name, layers, batch, samples, source)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _is_shape(value: object) -> bool:
    sizes = value if isinstance(value, list) else []
    return bool(sizes) and all(isinstance(n, int) and _is_number(n) for n in sizes) and math.prod(sizes) <= LARGEST


def _layer(table: Section) -> Layer:
    table.check_keys("name", "tensors", "macs", "output")
    tensors = table.values.get("tensors", [])
    given: list[Any] = [[n] if isinstance(n, int) else n for n in tensors] if isinstance(tensors, list) else [0]
    if not all(_is_shape(shape) and math.prod(shape) > 0 for shape in given):
        table.fail("tensors", f"must be a list of numbers of values or of shapes, got {brief(tensors)}")
    macs, output = float(table.number("macs", most=LARGEST)), table.whole("output", 0, most=LARGEST)
    shapes = tuple(tuple(t) if isinstance(t, list) else () for t in tensors)
    return Layer(
        str(table.values.get("name", table.path)), tuple(math.prod(one) for one in given), macs, output, shapes
    )
