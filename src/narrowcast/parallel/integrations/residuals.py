"""What error feedback owes, for checkpoints that one process writes and every process reads."""

from __future__ import annotations

from torch import Tensor

from narrowcast.parallel.handle import Handle


class Owed:
    """The state of a handle in whole tensors on the CPU: what is sharded is put together first.

    writes: whether this process writes the checkpoint. The others only take part: their state is empty.
    """

    def __init__(self, handle: Handle, writes: bool) -> None:
        self._handle, self._writes = handle, writes

    def state_dict(self) -> dict[str, Tensor]:
        """Collective."""
        # one after another: who does not write never holds more than one of them
        wholes = ((name, _whole(value)) for name, value in self._handle.state_dict().items())
        return {name: whole.cpu() for name, whole in wholes if self._writes}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """On every process, with what the one had written."""
        self._handle.load_state_dict(state)


def _whole(value: Tensor) -> Tensor:
    """Of a DTensor, all ranks' parts (collective); a rank alone would save its own and lose the rest."""
    gather = getattr(value, "full_tensor", None)
    return gather() if gather is not None else value
