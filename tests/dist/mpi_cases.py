"""What both transports are asked for."""

from __future__ import annotations

import torch
from torch import Tensor

WORLD = 4
NODES = [[0, 1], [2, 3]]

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "two_shot": ("int8/64", {"algorithm": "two_shot"}),
    "two_shot, noise": ("int4/64+sr", {"algorithm": "two_shot"}),
    "two_shot, aps": ("e5m2+aps", {"algorithm": "two_shot"}),
    "one_shot": ("mxfp8", {"algorithm": "one_shot"}),
    "ring": ("e4m3fn/64", {"algorithm": "ring"}),
    "tree": ("int8", {"algorithm": "tree"}),
    "hierarchical": ("int8/64", {"algorithm": "hierarchical", "nodes": NODES}),
    "shared_scale": ("int8/64", {"algorithm": "shared_scale"}),
    "as-is": ("as-is", {}),
}


def inputs(rank: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(rank)
    # the second is large enough for several chunks
    return [torch.randn(1001, generator=made), torch.randn(3_000_000, generator=made)]
