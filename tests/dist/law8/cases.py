"""Law 8's cases: a seed is a combination of everything that can happen to error feedback in training."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

KINDS = ("ddp", "fsdp", "hsdp", "local")

WITH_FEEDBACK = (
    "int2/64+ef",
    "int4/128+ef",
    "int4/64+sr+ef",
    "onebit/64+ef",
    "sign/32+ef",
    "e4m3fn/128+ef",
    "e4m3+aps+ef",
    "e5m2+ef",
    "linear8+ef",
    "uint4/48+ef",
    "bf16+ef",
)
LOW_RANK = ("fp32+rank1+ef", "bf16+rank2+ef", "int8/64+rank1+ef", "int4/64+rank2+sr+ef", "fp32+acp1+ef", "bf16+acp2+ef")
"""Not for HSDP."""
WITHOUT = ("as-is", "fp32", "int8/64", "e4m3fn")
"""Of these the last two lose what they round: such a step is in neither sum, and must leave residuals alone."""

Plan = tuple[tuple[int, tuple[tuple[str, str], ...]], ...]
"""From which iteration on, which wire for which name pattern."""


@dataclass(frozen=True)
class Case:
    """What happens in one run; all of it follows from the seed."""

    seed: int
    kind: str
    worlds: tuple[int, ...]
    """The number of ranks; more than one: a checkpoint in between, loaded into as many."""
    iterations: int
    plan: Plan
    between: str | None
    """HSDP: the wire between replicas; None: that of gradients."""
    algorithm: str
    inner: str | None
    """DDP: the wire inside of nodes of two ranks (of one where their number is odd); None: no nodes."""
    piloted: bool
    """DDP: the plan is the history of an autopilot; what is all as it is takes the backend's own sum."""
    passes: int
    """Backward passes (LocalSGD: inner steps) in each iteration."""
    sync: str
    """Of several passes: the `last` one communicates, or `every` one."""
    dtypes: str
    """`float32`, `bfloat16`, or `mixed`: both; with FSDP2 that is float32 which computes in bfloat16."""
    reduce: tuple[str, ...]
    """FSDP2: the type in which gradients travel, for each of the worlds; empty: that of `dtypes`."""
    strides: bool
    """Channels-last and transposed parameters."""
    unused: float
    """How often a parameter goes unused: by all ranks, or by some of them."""
    scaler: bool
    skips: tuple[int, ...]
    """The iterations in which a gradient of one rank is infinite."""
    lowered: tuple[int, ...]
    """The iterations after which somebody halves the scale by hand."""
    optimizers: int
    lazy: bool
    """The second optimizer steps every second time only."""
    frozen: int | None
    """From this iteration on one parameter is not trained."""
    looks: tuple[int, ...]
    """The iterations after which somebody takes a state_dict."""
    set_to_none: bool
    bucket_view: bool
    """DDP's gradients are views of its buckets; LocalSGD: a hook on the optimizer counts its steps."""

    def features(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def case_of(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    # an HSDP case takes as long as five others: four ranks, two exchanges
    (kind,) = draw.choices(KINDS, weights=(3, 2, 1, 2))
    sharded = kind in ("fsdp", "hsdp")
    iterations, passes = draw.randint(4, 7), draw.choice((1, 1, 2, 3))
    scaler = kind != "local" and draw.random() < 0.4
    lazy = kind != "local" and not scaler and draw.random() < 0.2
    sync = draw.choice(("last", "every"))
    unused = draw.choice((0.2, 0.5)) if draw.random() < 0.4 else 0.0
    # torch adds up .grad in the parameter's type: with 16 bits it would lose more than the law allows
    adds_up = kind != "local" and (lazy or (sync == "every" and passes > 1))
    dtypes = "float32" if adds_up else draw.choice(("float32", "float32", "bfloat16", "mixed"))
    worlds = _worlds(draw, kind)
    reduce = _reduce(random.Random(f"reduce {seed}"), worlds) if sharded and dtypes != "bfloat16" else ()
    in_16_bits = dtypes == "bfloat16" or reduce
    between = [None, draw.choice(WITH_FEEDBACK), "as-is"][: 2 if in_16_bits else 3]
    # where an optimizer gets the sum of several results, each of them must count
    plain = WITHOUT[: (0 if in_16_bits else 2) if kind == "hsdp" or lazy else None]
    freezes = kind != "ddp" or unused > 0
    plan, inner = _plan(draw, iterations, plain), None
    if kind == "ddp":
        inner = _inner(random.Random(f"nodes {seed}"), plan)
    if kind != "hsdp":
        plan = _some_by_low_rank(random.Random(f"rank {seed}"), plan)
    return Case(
        seed=seed,
        kind=kind,
        worlds=worlds,
        iterations=iterations,
        plan=plan,
        between=draw.choice(between) if kind == "hsdp" else None,
        algorithm=draw.choice(("auto", "two_shot", "one_shot")) if kind == "ddp" else "auto",
        inner=inner,
        piloted=kind == "ddp" and inner is None and random.Random(f"auto {seed}").random() < 0.4,
        passes=passes,
        sync=sync,
        dtypes=dtypes,
        reduce=reduce,
        strides=not sharded and draw.random() < 0.4,
        unused=unused,
        scaler=scaler,
        skips=_some(draw, iterations, 0.3 * scaler),
        lowered=_some(draw, iterations, 0.15 * scaler),
        optimizers=2 if lazy or draw.random() < 0.3 else 1,
        lazy=lazy,
        frozen=draw.randint(1, iterations - 1) if freezes and draw.random() < 0.25 else None,
        looks=_some(draw, iterations, 0.15),
        set_to_none=draw.random() < 0.7,
        bucket_view=draw.random() < 0.3,
    )


def _worlds(draw: random.Random, kind: str) -> tuple[int, ...]:
    first, then = draw.choice((2, 2, 2, 3, 4)), draw.choice((1, 2, 3, 4))
    if kind == "hsdp":
        first, then = 4, 4
    return (first, then) if draw.random() < 0.3 else (first,)


def _reduce(draw: random.Random, worlds: tuple[int, ...]) -> tuple[str, ...]:
    """A type for each world, in a third of the runs. FSDP divides a float16 sum of three by 1.5, which rounds."""
    if draw.random() > 0.35:
        return ()
    allowed = [("float16", "bfloat16", "float32")[world == 3 :] for world in worlds]
    return tuple(draw.choice(types) for types in allowed)


def _inner(draw: random.Random, plan: Plan) -> str | None:
    """One with feedback only where all that rounds has it between nodes."""
    if draw.random() < 0.6:
        return None
    wires = {wire for _, wires in plan for _, wire in wires}
    return draw.choice(("as-is", *WITH_FEEDBACK) if wires <= {*WITH_FEEDBACK, *WITHOUT[:2]} else WITHOUT[:2])


def _some(draw: random.Random, iterations: int, share: float) -> tuple[int, ...]:
    return tuple(i for i in range(iterations) if draw.random() < share)


def _plan(draw: random.Random, iterations: int, plain: tuple[str, ...]) -> Plan:
    """One wire for all of the run, or several; plain: those without feedback to take from."""
    starts = [0, *(i for i in range(1, iterations) if draw.random() < 0.25)]
    return tuple((start, _wires(draw, plain if start else ())) for start in starts)


def _some_by_low_rank(draw: random.Random, plan: Plan) -> Plan:
    """Some of the wires with feedback, in a third of the runs, are others of low rank."""
    if draw.random() > 0.35:
        return plan
    return tuple(
        (
            start,
            tuple(
                (name, draw.choice(LOW_RANK) if wire in WITH_FEEDBACK and draw.random() < 0.7 else wire)
                for name, wire in wires
            ),
        )
        for start, wires in plan
    )


def _wires(draw: random.Random, plain: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    rest = draw.choice(plain if plain and draw.random() < 0.4 else WITH_FEEDBACK)
    if draw.random() < 0.3:
        return ("*2", draw.choice(WITH_FEEDBACK + plain)), ("*", rest)
    return (("*", rest),)
