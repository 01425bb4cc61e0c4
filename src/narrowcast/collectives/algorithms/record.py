"""The all-reduce algorithms by name, and which one `auto` takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.collectives.algorithms.context import Call
from narrowcast.collectives.algorithms.hierarchical import checked_nodes, hierarchical
from narrowcast.collectives.algorithms.native_sum import check_native, check_shared_scale, native, shared_scale
from narrowcast.collectives.algorithms.one_shot import one_shot, store
from narrowcast.collectives.algorithms.ring import ring
from narrowcast.collectives.algorithms.tree import check_world, tree
from narrowcast.collectives.algorithms.two_shot import two_shot
from narrowcast.collectives.aps import agreed_scales

ALGORITHMS: dict[str, Callable[[Call, list[Tensor | None] | None], None]] = {
    "two_shot": two_shot,
    "one_shot": one_shot,
    "ring": ring,
    "tree": tree,
    "hierarchical": hierarchical,
    "shared_scale": shared_scale,
    "native": native,
}
WITH_FEEDBACK = ("two_shot", "one_shot")

SMALL_BYTES = 16 << 10
"""Up to this size on the wire, one latency costs less than fewer bytes save."""


def choose(name: str, codec: Codec, numel: int, world: int, has_nodes: bool) -> str:
    """Resolve "auto"; every rank comes to the same answer, since it looks at agreed things only."""
    if name != "auto":
        if name not in ALGORITHMS:
            raise ValueError(f"all_reduce: unknown algorithm {name!r}; take auto, {', '.join(ALGORITHMS)}")
        return name
    if has_nodes:
        return "hierarchical"
    return "one_shot" if codec.nbytes(numel) * world <= SMALL_BYTES else "two_shot"


def check(name: str, codec: Codec, world: int, nodes: Sequence[Sequence[int]] | None) -> None:
    """Refuse what an algorithm cannot do, before anything is sent."""
    if nodes is not None and name != "hierarchical":
        given = [list(members) for members in nodes]
        raise ValueError(f"all_reduce: nodes={given} are for 'hierarchical'; {name!r} knows none, leave out nodes=")
    if name == "tree":
        check_world(world)
    elif name == "hierarchical":
        checked_nodes(nodes, world)
    elif name == "native":
        check_native(codec)
    elif name == "shared_scale":
        check_shared_scale(codec, world)


def run(name: str, call: Call) -> None:
    """Find the scales that a codec with one scale for a tensor needs, then run the algorithm."""
    if call.x.numel() == 0:
        return
    if call.exchange.world == 1:
        _alone(call)
        return
    if name == "one_shot" and call.residuals is not None:
        call.residuals.fold(call.reduction.gain)  # before scales are found: it counts too
    ALGORITHMS[name](call, scales(call))


def _alone(call: Call) -> None:
    """Nothing travels, so nothing is rounded, and all that is owed can be paid."""
    total = call.x.float().clone()
    if call.residuals is None:
        store(call.x, call.reduction.finish(total))
        return
    total = call.reduction.finish(call.residuals.pay(total, 0))
    total = call.residuals.pay(total, 1)
    store(call.x, total)
    call.residuals.keep(total, call.x, 0, (0, call.x.numel()), call.reduction.gain)


def scales(call: Call) -> list[Tensor | None] | None:
    """One scale for each segment, for codecs with one scale for a tensor: this rank's own, or agreed by all (APS)."""
    wanted = call.x
    if call.residuals is not None and call.codec.block == 0:
        # what is owed counts too: a scale for the gradient alone would cut it off or flush it
        wanted = call.residuals.wanted(call.x, 0, (0, call.x.numel()))
    if call.codec.agrees_on_scales:
        return agreed_scales(call, wanted)
    return call.coder().scales(wanted)
