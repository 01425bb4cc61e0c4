"""What an all-reduce algorithm is: all that ranks, simulator, predictor, command line and docs ask about one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from narrowcast.codecs import Codec, refuse_differences, refuse_low_rank
from narrowcast.collectives.algorithms.context import Call, Reduction
from narrowcast.collectives.algorithms.cost import Cost, Placement
from narrowcast.collectives.algorithms.workers import Workers
from narrowcast.collectives.aps import agreed_scales
from narrowcast.collectives.residuals import Residuals
from narrowcast.collectives.runtime.shots import Shots, run_rounds
from narrowcast.collectives.segments import Coder, Scales, store

Nodes = Sequence[Sequence[int]]
SMALL_BYTES = 16 << 10
"""Up to this size on the wire, one latency costs less than fewer bytes save."""


class Order(Enum):
    """In which order an algorithm adds what the ranks have."""

    RANKS = "rank order"
    RING = "around the ring"
    PAIRS = "in pairs"
    EXACT = "any: integers"
    BACKEND = "the backend's own"


class Setting(NamedTuple):
    """What the sizes of a call's messages follow from."""

    coder: Coder
    world: int
    nodes: Nodes = ()
    inner: Coder | None = None


def _takes_any_codec(codec: Codec, world: int) -> None:
    pass


def _takes_any_world(world: int, nodes: Nodes | None) -> None:
    pass


@dataclass(frozen=True)
class Algorithm:
    """One all-reduce algorithm. W ranks, n values."""

    name: str
    summary: str
    """A line for listings and docs, as are the next three."""
    bytes_sent: str
    """By each rank, where shards divide evenly."""
    roundings: str
    """How often a codec touches one rank's value on its way into the result, at most."""
    phases: str
    """Of the noise: each encoding of a rank has a number."""
    order: Order
    run: Callable[[Call], None]
    """On a rank: all receives are posted before anything is sent, and every rank ends with identical bits in `x`."""
    simulate: Callable[[Workers], None] | None
    """All workers at once, the same bits; None where nobody knows the order of the sum."""
    sent_bytes: Callable[[Setting], list[int]]
    """By worker: exactly what `run` sends, found from sizes alone."""
    cost: Callable[[Placement], Cost]
    """For the predictor."""
    shots: Callable[[Call], Sequence[Shots]] | None = None
    """The rounds of a call, where several calls may travel together."""
    check_codec: Callable[[Codec, int], None] = _takes_any_codec
    """Refuse a codec on a world of that size."""
    check_world: Callable[[int, Nodes | None], None] = _takes_any_world
    """Refuse a number of ranks, or how they are grouped into nodes."""
    host_waits: bool = True
    """Whether `run` makes the host wait for other ranks also where the transport carries the device's memory."""
    residual_shots: int = 0
    """How many of its encodings keep a residual; 0: no error feedback."""
    takes_nodes: bool = False
    """Whether `nodes=` and `inner=` mean something."""
    takes_accumulator: bool = False
    """Whether `accumulator="low"` means something."""


ALGORITHMS: dict[str, Algorithm] = {}
"""By name, in the order of the docs; filled by `narrowcast.collectives.algorithms`."""


def register(algorithm: Algorithm) -> None:
    """Make an algorithm known everywhere: calls, simulator, predictor, command line, docs table, tests."""
    if ALGORITHMS.get(algorithm.name, algorithm) != algorithm or algorithm.name == "auto":
        raise ValueError(f"algorithm name {algorithm.name!r} is taken; choose another")
    ALGORITHMS[algorithm.name] = algorithm


def choose(name: str, codec: Codec, numel: int, world: int, has_nodes: bool) -> str:
    """Resolve "auto"; every rank comes to the same answer, since it looks at agreed things only."""
    refuse_low_rank("all_reduce", codec)
    if name != "auto":
        if name not in ALGORITHMS:
            raise ValueError(f"all_reduce: unknown algorithm {name!r}; take auto, {', '.join(ALGORITHMS)}")
        return name
    if has_nodes:
        return "hierarchical"
    return "one_shot" if codec.nbytes(numel) * world <= SMALL_BYTES else "two_shot"


def check(name: str, codec: Codec, world: int, nodes: Nodes | None, what: str = "all_reduce") -> None:
    """Refuse what an algorithm cannot do, before anything is sent. what: who asks."""
    algorithm = ALGORITHMS[name]
    if nodes is not None and not algorithm.takes_nodes:
        listed, users = [list(members) for members in nodes], _names(lambda one: one.takes_nodes)
        raise ValueError(f"all_reduce: nodes={listed} are for {users}; {name!r} knows none, leave out nodes=")
    algorithm.check_world(world, nodes)
    refuse_low_rank(what, codec)
    algorithm.check_codec(codec, world)
    refuse_differences(what, codec)
    if codec.feedback:
        check_feedback(name, f"{what} with {codec}")


def check_feedback(name: str, what: str = "all_reduce") -> None:
    """Refuse residuals where none are kept."""
    if not ALGORITHMS[name].residual_shots:
        allowed = ", ".join(one.name for one in ALGORITHMS.values() if one.residual_shots)
        raise ValueError(f"{what}: error feedback goes with {allowed}; got {name!r}")


def check_inner(codec: Codec, inner: Codec) -> None:
    """Refuse error feedback inside of nodes alone, and differences."""
    refuse_low_rank("all_reduce: inner", inner)
    refuse_differences("all_reduce: inner", inner)
    if inner.feedback and not codec.feedback:
        raise ValueError(
            f"all_reduce: inner={inner} with {codec} between nodes: error feedback inside a node needs it between "
            "nodes, too; write +ef in both, or leave it out of inner="
        )


def check_accumulator(name: str, what: str, otherwise: str) -> None:
    """Refuse a low-precision accumulator where there is none; `otherwise` says what happens instead."""
    if not ALGORITHMS[name].takes_accumulator:
        users = _names(lambda one: one.takes_accumulator)
        raise ValueError(f"{what}='low' is for {users}; {name!r} always {otherwise}")


def check_power_of_two(name: str, world: int) -> None:
    if world & (world - 1):
        raise ValueError(
            f"all_reduce: algorithm {name!r} needs a power-of-two world, got {world} ranks; take 'two_shot'"
        )


def _names(applies: Callable[[Algorithm], bool]) -> str:
    return ", ".join(repr(one.name) for one in ALGORITHMS.values() if applies(one))


def run(name: str, call: Call) -> None:
    """Find the scales that a codec with one scale for a tensor needs, then run the algorithm."""
    if _begin(name, call):
        ALGORITHMS[name].run(call)


def run_together(calls: Sequence[tuple[str, Call]]) -> None:
    """Calls of one exchange by algorithms that have `shots`: their messages travel together, round by round."""
    begun = [(name, call) for name, call in calls if _begin(name, call)]
    shots = [shots_of(call) for name, call in begun if (shots_of := ALGORITHMS[name].shots) is not None]
    if shots:
        members = zip_longest(*shots)
        run_rounds(begun[0][1].exchange, [[one for one in each if one is not None] for each in members])


def _begin(name: str, call: Call) -> bool:
    """What comes before an algorithm runs; False where nothing is left for it to do."""
    if call.x.numel() == 0:
        return False
    if call.exchange.world == 1:
        reduce_alone(call.x, call.x, call.reduction, call.residuals)
        return False
    if ALGORITHMS[name].residual_shots == 1 and call.residuals is not None:
        call.residuals.fold(call.reduction.gain)  # before scales are found: it counts too
    call.scales = scales(call)
    return True


def sent_bytes(name: str, setting: Setting) -> list[int]:
    """What each rank sends in such a call."""
    coder, world = setting.coder, setting.world
    if world == 1 or coder.numel == 0:
        return [0] * world
    agreement = 4 * (world - 1) * len(coder.segments) if coder.shares_scales else 0
    return [count + agreement for count in ALGORITHMS[name].sent_bytes(setting)]


def reduce_alone(x: Tensor, out: Tensor, reduction: Reduction, residuals: Residuals | None) -> None:
    """A world of one: nothing travels, so nothing is rounded, and residuals can be added as a whole."""
    total = x.float().clone()
    if residuals is None:
        store(out, reduction.finish(total))
        return
    total = residuals.empty_into(reduction.finish(residuals.empty_into(total, 0)), 1)
    store(out, total)
    residuals.keep(total, out, 0, (0, out.numel()), reduction.gain)


def scales(call: Call) -> Scales:
    """One scale for each segment, for codecs with one scale for a tensor: this rank's own, or agreed by all (APS)."""
    values = call.x
    if call.residuals is not None and call.codec.block == 0:
        # residuals count too: a scale for the gradient alone would cut them off or flush them
        values = call.residuals.added_to(call.x, 0, (0, call.x.numel()), call.codec.decay)
    if call.coder.shares_scales:
        return agreed_scales(call.coder, call.exchange, values)
    return call.coder.scales(values)
