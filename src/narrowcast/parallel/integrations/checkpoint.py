"""torch.distributed.checkpoint: load what was saved before narrowcast was added, or without error feedback."""

from __future__ import annotations

import logging

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

log = logging.getLogger("narrowcast")


class LoadPlanner(DefaultLoadPlanner):
    """For `dcp.load(state, checkpoint_id=..., planner=LoadPlanner())`: our part may be missing, and nothing else.

    names: where in `state` the handles are, with dots between the levels. Residuals that the checkpoint does not have
    stay what they are, which is none after `attach`.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names or ("narrowcast",)

    def create_local_plan(self) -> LoadPlan:
        known = self.metadata.state_dict_metadata if self.metadata is not None else {}
        missing = [key for key in self.state_dict if key not in known and self._is_ours(key)]
        self.state_dict = {key: value for key, value in self.state_dict.items() if key not in missing}
        if any(key not in self._names for key in missing) and self.is_coordinator:
            log.warning(
                "%s is not in this checkpoint (%d tensors): error feedback begins anew",
                " or ".join(self._names),
                len(missing),
            )
        return super().create_local_plan()

    def _is_ours(self, key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in self._names)
