"""What DDP keeps for itself: which parameters it reduces, in which order, and which of them a pass did not use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.parallel.private import in_autograd


def check_group(model: DistributedDataParallel, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group to exchange in: the model's, or another one of the same ranks, in whatever order."""
    if group is None:
        return model.process_group
    own = dist.get_process_group_ranks(model.process_group)
    given = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
    if sorted(own) != sorted(given):
        has = f"has the ranks {given}" if given else f"is {group!r}: this rank is not a member of it"
        raise ValueError(
            f"attach: group= {has}; the model is replicated over the ranks {own}, which would drift apart. Give a "
            "group of exactly these, or leave group= out"
        )
    return group


def reduced(model: DistributedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that DDP looks after, frozen ones too, each once, in its order."""
    seen: set[nn.Parameter] = set()
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        # DDP itself writes the names of the outermost module's own parameters with a dot in front
        if (name if "." in name else f".{name}") not in model.parameters_to_ignore and parameter not in seen:
            seen.add(parameter)
            yield name, parameter


def ignored(model: DistributedDataParallel) -> list[str]:
    """Why each trainable parameter that does not come to the hook stays away."""
    known = {parameter for _, parameter in reduced(model)}
    apart = {id(parameter) for parameter in getattr(model, "_delay_all_reduce_params", ())}
    return [
        f"{name}: DDP reduces it apart, as it is" if id(p) in apart else f"{name}: DDP ignores it: not reduced"
        for name, p in model.module.named_parameters()
        if p.requires_grad and p not in known
    ]


class Unused:
    """The parameters that no rank used in the last pass: DDP throws the hook's result away and leaves `.grad` alone.

    It knows them after the pass alone, from a map of uses that it sums over the ranks.
    """

    def __init__(self, model: DistributedDataParallel, names: dict[int, str]) -> None:
        self._names, self._is_static, self._are_views = names, model.static_graph, model.gradient_as_bucket_view
        self._uses: Tensor | None = None
        # whoever asks DDP in its own hook waits for ever
        (self._find_map_later if in_autograd() else self._find_map)(model)
        self._expected = [names[id(p)] for _, p in reduced(model) if p.requires_grad]
        self._seen: set[str] = set()
        self._in_place: set[str] = set()
        """Those whose `.grad` is a view of the bucket: whatever DDP does, the result is there."""

    def _find_map(self, model: DistributedDataParallel) -> None:
        """Of each parameter: how many ranks used it in the last pass. DDP writes to it in each."""
        self._uses = model.reducer._get_local_used_map()

    def _find_map_later(self, model: DistributedDataParallel) -> None:
        def find(found: DistributedDataParallel, _: object) -> None:
            hook.remove()
            self._find_map(found)

        hook = model.register_forward_pre_hook(find)

    def see(self, parameters: Iterable[Tensor]) -> None:
        """A bucket comes by."""
        for parameter in parameters:
            name = self._names[id(parameter)]
            self._seen.add(name)
            (self._in_place.add if self._are_views and parameter.grad is not None else self._in_place.discard)(name)

    def discarded(self) -> set[str] | None:
        """Those for which nothing arrived in the last pass; None where the graph is static and uses all."""
        if self._uses is None:
            return set()
        uses = self._uses.tolist()
        unused = {name for name, count in zip(self._order(len(uses)), uses, strict=True) if not count}
        return None if self._is_static and not unused else unused - self._in_place

    def _order(self, count: int) -> list[str]:
        """The parameters in DDP's order: those that were trainable when it was made, which may have changed since."""
        if len(self._expected) == count and self._seen <= set(self._expected):
            return self._expected
        found = [name for name in self._names.values() if name in self._seen]
        if len(found) != count:
            raise RuntimeError(
                f"attach: DDP reduces {count} parameters, of which {len(found)} came by; wrap the model in DDP after "
                "parameters were frozen or thawed, so that it can be told which ones a pass does not use"
            )
        return found


def unused(model: DistributedDataParallel, names: dict[int, str]) -> Unused | None:
    """Where DDP lets a pass leave parameters out."""
    return Unused(model, names) if model.find_unused_parameters or model.static_graph else None
