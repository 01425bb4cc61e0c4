"""`narrowcast bench simulate`: no speed without equal bits."""

from __future__ import annotations

import pytest
import torch
from narrowcast_research.bench import simulate
from torch import Tensor


def test_the_ring_is_compared_with_eager_torch_and_then_timed() -> None:
    assert simulate.failure() is None
    rows = list(simulate.run(values=20_000, rounds=2, many=False))
    assert [row.peer for row in rows] == ["eager torch", "torch.float8_e5m2"]
    assert [row.target for row in rows] == [simulate.TARGET, None]
    assert all(row.times is not None and row.times > 0 for row in rows)
    assert set(rows[0].as_dict()) >= {"what", "workers", "seconds", "times", "met"}


def test_a_peer_that_rounds_otherwise_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def truncating(x: Tensor, unit: Tensor) -> Tensor:
        return torch.sign(x) * simulate.eager_cast(x.abs() * 0.99, unit)

    monkeypatch.setitem(simulate.PEERS, "eager torch", truncating)
    with pytest.raises(RuntimeError, match="differs from eager torch; nothing was timed"):
        next(simulate.run(values=1000, rounds=1, many=False))
