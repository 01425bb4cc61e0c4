"""The answer in words: which wire, how much it gains, where it stops paying, and what it risks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import MIN_VALUES, overlap
from narrowcast.parallel import errors as rule
from narrowcast.predict import speeds
from narrowcast.predict.codec_systems import codec_systems
from narrowcast.predict.low_rank import lost_db
from narrowcast.predict.profile import ModelError, default_loss
from narrowcast.predict.step import HIDDEN, PLAIN, Prediction, Setup
from narrowcast.predict.sweep import Sweep, half_precision

WIRES = ("int8/256", "int4/128+ef")
HALF = "bf16"
MODERATE = 10.0
"""Times what the autopilot allows: more is a high risk."""
SAFE_BITS = 8.0
"""Fewer are not advised unless somebody has looked at what they do to the gradients, or asked for them."""
RISKS = ("low", "moderate", "high")


@dataclass(frozen=True)
class GradientError:
    """Of all gradients of one backward pass that a codec would round."""

    wire: str
    snr_db: float
    """Energy of the gradients over that of what rounding changes, after both roundings of two_shot."""
    batch_share: float
    """Energy of the rounding error over that of the difference between two batches' gradients."""
    worst: str
    worst_db: float
    over: float | None = None
    """The counted error, in units of what `attach(model, "auto")` allows; None: as the other numbers have it."""

    @property
    def risk(self) -> str:
        """low, moderate or high: by the rule of the autopilot, which allows what is low."""
        over = self.over
        if over is None:
            lost = min(10 ** (-self.snr_db / 10), self.batch_share)
            over = lost * (rule.FED_BACK if codec_named(self.wire).feedback else 1.0) / rule.BOUND
        return RISKS[0 if over <= 1 else 1 if over <= MODERATE else 2]


def gradients(module: nn.Module, batch: Tensor, loss: Callable[[Any], Tensor] = default_loss) -> dict[str, Tensor]:
    """One backward pass; the module's own gradients are put back."""
    before = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    try:
        loss(module(batch)).backward()
    except Exception as error:
        raise ModelError(f"model: a backward pass failed: {type(error).__name__}: {error}") from error
    taken = {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}
    for name, p in module.named_parameters():
        p.grad = before[name]
    return taken


def gradient_error(wire: str, first: dict[str, Tensor], second: dict[str, Tensor]) -> GradientError:
    """first, second: gradients of two batches."""
    codec = codec_named(wire)
    signal = noise = between = counted = allowed = 0.0
    worst, worst_db = "", math.inf
    for name, gradient in first.items():
        if gradient.numel() < MIN_VALUES or codec.lossless:
            continue
        own_db = lost_db(gradient, codec)
        energy = float(gradient.double().square().sum())
        signal += energy
        counted += rule.counted(codec, energy * 10 ** (-own_db / 10))
        # both shots round, and the errors add up; what low rank leaves out it leaves out once
        noise += (1 if codec.rank else 2) * energy * 10 ** (-own_db / 10)
        noise_between = float((gradient.double() - second[name].double()).square().sum()) / 2
        between += noise_between
        cut = float(rule.energy_of(gradient))
        allowed += rule.allowed(cut, noise_between * cut / max(energy, 1e-300))
        if own_db < worst_db:
            worst, worst_db = name, own_db
    if noise == 0.0:
        return GradientError(wire, math.inf, 0.0, worst, worst_db, 0.0)
    snr_db, share = 10 * math.log10(max(signal, 1e-300) / noise), noise / max(between, 1e-300)
    return GradientError(wire, snr_db, share, worst, worst_db, counted / max(allowed, 1e-300))


@dataclass(frozen=True)
class Advice:
    """What to do, and why."""

    verdict: str
    """compress, 16-bit, leave-off or cannot-tell."""
    wire: str
    text: str
    choice: overlap.WireDecision
    prediction: Prediction
    errors: tuple[GradientError, ...] = field(default=())
    quickest: str = PLAIN
    """Of all wires considered, by the means alone."""

    def as_dict(self) -> dict[str, Any]:
        words = {"verdict": self.verdict, "wire": self.wire, "text": self.text, "why": self.choice.why}
        errors = [{**asdict(error), "risk": error.risk} for error in self.errors]
        return words | {"prediction": self.prediction.as_dict(), "gradient_errors": errors}


def advise(
    sweep: Sweep,
    world: int,
    wires: Sequence[str] | None = None,
    errors: Sequence[GradientError] = (),
    algorithm: str = "auto",
) -> Advice:
    """Choose among float32 as it is, 16 bits and the wires; one whose accuracy risk is high is not chosen.

    wires: None for WIRES, of which those under 8 bits count only where their errors are known.
    """
    if world < 2:
        raise ValueError(f"advise: got {world} worker(s); communication begins with two")
    by_wire, unknown = {error.wire: error for error in errors}, list[str]()
    if wires is None:
        unknown = [wire for wire in WIRES if wire not in by_wire and codec_named(wire).bits_per_value < SAFE_BITS]
        wires = [wire for wire in WIRES if wire not in unknown and speeds.is_covered(wire, sweep.cluster)]
    risky = {error.wire for error in errors if error.risk == "high"}
    considered = [PLAIN, HALF, *(wire for wire in wires if wire not in (PLAIN, HALF, *risky))]
    setups = {wire: setup_of(sweep, world, wire, algorithm) for wire in considered}
    steps = {wire: sweep.steps.steps(setup) for wire, setup in setups.items()}
    choice = choose(steps)
    wire = choice.wire if choice.wire != PLAIN else _fastest(steps)
    prediction = sweep.cell(setups[wire])
    verdict = {PLAIN: "leave-off", HALF: "16-bit"}.get(choice.wire, "compress") if choice.sure else "cannot-tell"
    text = _words(verdict, choice, prediction, sweep, by_wire, sorted(risky & set(wires)), unknown)
    quickest = min(steps, key=lambda name: float(steps[name][0]))
    return Advice(verdict, choice.wire, text, choice, prediction, tuple(errors), quickest)


def setup_of(sweep: Sweep, world: int, wire: str, algorithm: str = "auto") -> Setup:
    """How a wire travels that is advised: with another system's codecs as that system sends it."""
    if wire == HALF:
        return half_precision(sweep.cluster, world)
    system = codec_systems().get(sweep.cluster.codec_system)
    if wire == PLAIN or (algorithm == "auto" and system is None):
        return Setup(world, wire)
    return Setup(world, wire, system.algorithm if system and algorithm == "auto" else algorithm)


def choose(steps: dict[str, Tensor]) -> overlap.WireDecision:
    """`decide` against float32; and fewer than 16 bits must surely be worth it over 16 bits, too."""
    choice, best = overlap.decide(steps, PLAIN), _fastest(steps)
    if best == HALF or (choice.sure and choice.wire == PLAIN):
        return choice
    over_half = overlap.decide({name: steps[name] for name in (HALF, best)}, HALF)
    if choice.sure and over_half.sure and over_half.wire == best:
        return choice
    half = overlap.decide({name: steps[name] for name in (PLAIN, HALF)}, PLAIN)
    if half.sure and half.wire == HALF:
        beside = f"is as good as {best}" if over_half.sure else f"cannot be told from {best}"
        return replace(half, why=f"{half.why}; it {beside} and loses less")
    if not choice.sure:
        return choice
    why = f"cannot tell: {choice.why}, but not surely over {HALF}, nor does {HALF} surely gain: {half.why}"
    return replace(choice, wire=PLAIN, sure=False, why=why)


def _fastest(steps: dict[str, Tensor]) -> str:
    return min((wire for wire in steps if wire != PLAIN), key=lambda wire: float(steps[wire][0]))


def _words(
    verdict: str,
    choice: overlap.WireDecision,
    made: Prediction,
    sweep: Sweep,
    errors: dict[str, GradientError],
    risky: list[str],
    unknown: list[str],
) -> str:
    if verdict in ("compress", "16-bit"):
        first = f"use `{choice.wire}`, {made.algorithm}; {_gains(verdict, choice, made)}; {_pays(made)}"
        lines = [first, _accuracy(choice.wire, errors)]
    elif verdict == "leave-off":
        lines = [_leave_off(made, sweep.steps.predict(Setup(made.workers, PLAIN)).exposed)]
    else:
        lines = [f"cannot tell: {choice.why.removeprefix('cannot tell: ')}", f"measure first: {_measure(sweep)}"]
    lines += [f"not considered, since the accuracy risk is high: {', '.join(risky)}"] if risky else []
    if unknown:
        lines.append(
            f"8 bits at the least while the accuracy risk is unknown: {', '.join(unknown)} not considered; give a real "
            "model, and its gradients will be looked at, or name the wire"
        )
    if not sweep.cluster.measured:
        lines.append(f"the cluster {sweep.cluster.name} was not measured; `narrowcast probe` narrows the interval")
    return "\n".join(lines)


def _gains(verdict: str, choice: overlap.WireDecision, made: Prediction) -> str:
    if verdict == "16-bit":
        return f"at {made.workers} workers {choice.why}"
    return (
        f"{made.over_16bit:.2f}x ({made.over_16bit_low:.2f}-{made.over_16bit_high:.2f}) over 16 bits and "
        f"{made.over_fp32:.2f}x over float32 at {made.workers} workers"
    )


def _leave_off(made: Prediction, exposed: float) -> str:
    adds = f"communication adds {1e3 * exposed:.1f} ms to a step of {1e3 * made.compute:.1f} ms"
    would = f"`{made.wire}` would give {made.over_fp32:.2f}x over float32"
    if exposed <= HIDDEN * made.compute:
        return f"leave it off: communication is hidden; it {adds.removeprefix('communication ')}, and {would}"
    return f"leave it off: {adds}, but fewer bits cost as much as they save, or more: {would}"


def _pays(made: Prediction) -> str:
    if made.break_even_gbit is None and not made.hide_gbit:
        return "no bandwidth hides communication"
    if made.break_even_gbit is None:
        return f"needs {made.hide_gbit:.3g} Gb/s to hide communication"
    if math.isinf(made.break_even_gbit):
        return "it pays at every bandwidth"
    return f"below {made.break_even_gbit:.3g} Gb/s it pays over 16 bits, above it does not"


def _accuracy(wire: str, errors: dict[str, GradientError]) -> str:
    error = errors.get(wire)
    if codec_named(wire).lossless or wire == HALF:
        return "accuracy risk low: 16 bits or more"
    if error is None:
        return "accuracy risk unknown: give a real model, and its gradients will be looked at"
    beside = f"{100 * error.batch_share:.2g} % of the energy of the noise between two batches"
    worst = f"the worst tensor is {error.worst} with {error.worst_db:.0f} dB"
    return f"accuracy risk {error.risk}: gradient SNR {error.snr_db:.0f} dB, an error with {beside}; {worst}"


def _measure(sweep: Sweep) -> str:
    if not sweep.cluster.measured:
        return "the cluster, with `narrowcast probe`"
    if sweep.profile.source.startswith("description"):
        return "the model, with `narrowcast profile`"
    return f"a few steps with each wire: they differ by less than {100 * overlap.SURE:.0f} % or so"


def advise_model(
    sweep: Sweep,
    world: int,
    module: nn.Module | None = None,
    batches: tuple[Tensor, Tensor] | None = None,
    wires: Sequence[str] | None = None,
    loss: Callable[[Any], Tensor] = default_loss,
) -> Advice:
    """`advise`, with the gradients of a real model looked at first."""
    return advise(sweep, world, wires, errors_of(module, batches, wires or WIRES, loss))


def errors_of(
    module: nn.Module | None,
    batches: tuple[Tensor, Tensor] | None,
    wires: Sequence[str] = WIRES,
    loss: Callable[[Any], Tensor] = default_loss,
) -> list[GradientError]:
    """What wires do to the gradients of a real model; nothing where there is none."""
    if module is None or batches is None:
        return []
    first, second = (gradients(module, batch, loss) for batch in batches)
    return [gradient_error(wire, first, second) for wire in wires]
