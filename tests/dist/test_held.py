"""DDP's calls that travel together, on Gloo ranks whose transport carries the CPU's memory as NCCL does a GPU's."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.pool import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.collectives import TorchTransport
from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.runtime.streams import DeviceStream, Way
from narrowcast.collectives.transports.base import Parcel, Pending, RowsBySwap

CPU = torch.device("cpu")
TAG = (1 << 30) - 1
"""Of all messages of rounds, which match by their order."""


class Several:
    def __init__(self, pending: list[Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for one in self._pending:
            one.wait()


class Carrying(RowsBySwap, TorchTransport):
    """Rounds of the host's messages."""

    calls = 0

    def carries(self, device: torch.device) -> bool:
        return True

    def swap(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        Carrying.calls += 1
        arriving = [self.irecv(wire, peer, TAG) for wire, peer in receives]
        return Several([*arriving, *(self.isend(wire, peer, TAG) for wire, peer in sends)])


@contextlib.contextmanager
def carried() -> Iterator[None]:
    """The channels of DDP made in here have such a transport."""

    def channel(transport: TorchTransport) -> Channel:
        made = Channel(transport)
        made.streams[CPU] = DeviceStream(CPU, Way.ROUNDS)
        return made

    hook = "narrowcast.parallel.ddp.hook"
    with mock.patch(f"{hook}.TorchTransport", Carrying), mock.patch(f"{hook}.Channel", channel):
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
        self.unused = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wrapped(group: dist.ProcessGroup, policy: Any, held: bool, **options: Any) -> tuple[DDP, Any]:
    torch.manual_seed(0)
    model = DDP(Net(), process_group=group, bucket_cap_mb=0.03, find_unused_parameters=True, **options)
    with carried() if held else contextlib.nullcontext():
        return model, nc.attach(model, policy, min_values=0)


def trained(group: dist.ProcessGroup, policy: Any, mode: str, held: bool) -> tuple[str, int, int]:
    """The parameters after some steps, what was sent, and the rounds of the backend."""
    rank, (model, handle) = dist.get_rank(group), wrapped(group, policy, held)
    Carrying.calls = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank + 1)
    with model.join() if mode == "join" else contextlib.nullcontext():
        for _ in range(3 + rank * (mode == "join")):
            optimizer.zero_grad()
            if mode == "accumulate":
                with model.no_sync():
                    model(torch.randn(8, 64, generator=generator)).square().sum().backward()
            model(torch.randn(8, 64, generator=generator)).square().sum().backward()
            optimizer.step()
    flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
    sent = handle.stats()["sent_bytes"]
    handle.detach()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest(), sent, Carrying.calls


MIXED = {"layers.0*": "as-is", "layers.1*": "e4m3+aps", "layers.2*": "e4m3fn", "*": "int8/64+ef"}


@pytest.mark.parametrize(
    "policy, mode",
    [("int4/64+sr+ef", "plain"), (MIXED, "plain"), ("int8/64+ef", "accumulate"), ("int8/64+ef", "join")],
    ids=["one codec", "four codecs", "accumulate", "join"],
)
def test_what_is_held_has_the_bits_of_what_is_not(pool: Pool, policy: Any, mode: str) -> None:
    held, alone = pool.run(2, trained, policy, mode, True), pool.run(2, trained, policy, mode, False)
    assert [one[:2] for one in held] == [one[:2] for one in alone]
    assert held[0][0] == held[1][0]


def test_buckets_of_a_step_take_one_pair_of_calls(pool: Pool) -> None:
    """All that six buckets of this model send is below what is held."""
    for _, _, calls in pool.run(2, trained, "int8/64", "plain", True):
        assert calls == 3 * 2


def cannot_start(group: dist.ProcessGroup) -> str:
    model, _ = wrapped(group, "int8/64", held=True)
    x = torch.randn(8, 64)
    for _ in range(2):
        model(x).sum().backward()
    broken: Callable[[Any], None] = mock.Mock(side_effect=RuntimeError("device-side assert"))
    with mock.patch.object(DeviceStream, "record", broken) if dist.get_rank(group) == 0 else contextlib.nullcontext():
        try:
            model(x).sum().backward()
        except RuntimeError as error:
            return str(error)
    return "nothing was raised"


def test_calls_that_cannot_be_started_end_the_backward_pass_on_all_ranks(pool: Pool) -> None:
    texts = pool.run(2, cannot_start)
    assert all("device-side assert" in text for text in texts), texts
