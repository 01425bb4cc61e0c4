"""torchft: members that come and go. Local updates through our wires under its Manager, and checkpoints without pickle.

Needs its package, narrowcast[elastic], for the process group and the checkpoint transport.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
import threading
import urllib.request
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowcast.codecs import Codec
from narrowcast.collectives import Channel, TorchTransport, TransportError, Work, all_reduce
from narrowcast.kernels import FLOATS
from narrowcast.parallel import policy
from narrowcast.parallel.local_sgd.settings import Outer, nesterov
from narrowcast.parallel.plain_state import pack, unpack
from narrowcast.parallel.ranks import digest
from narrowcast.parallel.residuals import ModelResiduals

ROLE = "outer gradient"
CLOSE = timedelta(seconds=1)


def _package(name: str) -> Any:
    if importlib.util.find_spec("torchft") is None:
        raise ImportError("narrowcast for torchft: there is no package torchft; install narrowcast[elastic]")
    return importlib.import_module(f"torchft.{name}")


def process_group(timeout: timedelta = timedelta(seconds=60)) -> Any:
    """torchft's Gloo group for its Manager, with connections of ours beside it that follow the same members.

    timeout: until a call with a member that stands still ends in an error. One that dies is noticed at once.
    """

    class Members(_package("process_group").ProcessGroupGloo):  # type: ignore[misc]
        """Gloo for the Manager, and a channel for our wires."""

        channel: Channel | None = None

        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            group = super()._create_pg(store, rank, world_size)
            self.channel = Channel(TorchTransport.on_store(store, rank, world_size, self._timeout))
            return group

        def abort(self, errored: bool = True) -> None:
            self._close()
            super().abort(errored)

        def shutdown(self) -> None:
            self._close()
            super().shutdown()

        def _close(self) -> None:
            channel, self.channel = self.channel, None
            if channel is not None:
                channel.close(CLOSE)

    return Members(timeout)


def checkpoint_transport(timeout: timedelta = timedelta(seconds=60), host: str | None = None) -> Any:
    """How a member that comes gets the state of the others: over HTTP as torchft's own, and nothing is unpickled.

    host: this machine's name or address for the others; by default its hostname. What is fetched may hold dense
    tensors, dicts, lists, tuples, numbers and texts.
    """
    return _http_transport()(timeout, host or socket.gethostname())


def _http_transport() -> Any:
    class PlainHTTP(_package("checkpointing").CheckpointTransport):  # type: ignore[misc]
        """Serves the last state that it was given, as a copy, until the next."""

        def __init__(self, timeout: timedelta, host: str) -> None:
            self._seconds, self._host = timeout.total_seconds(), host
            self._served = _Served(self._seconds)
            self._server = _serve(self._served)

        def metadata(self) -> str:
            host = f"[{self._host}]" if ":" in self._host else self._host
            return f"http://{host}:{self._server.server_address[1]}/state/"

        def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
            self._served.put(step, pack(state_dict))

        def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
            return fetch(f"{metadata}{step}", timeout.total_seconds())

        def shutdown(self, wait: bool = True) -> None:
            self._server.shutdown()
            self._server.server_close()

    return PlainHTTP


class _Served:
    """The state of a step; who asks before it is there waits."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._step = seconds, -1
        self._pieces: list[bytes] = []
        self._changed = threading.Condition()

    def put(self, step: int, pieces: list[bytes]) -> None:
        with self._changed:
            self._step, self._pieces = step, pieces
            self._changed.notify_all()

    def get(self, step: int) -> list[bytes]:
        """Nothing where it does not come in time, or a later one is there."""
        with self._changed:
            self._changed.wait_for(lambda: self._step >= step, self.seconds)
            return self._pieces if self._step == step else []


def _serve(served: _Served) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = served.seconds

        def do_GET(self) -> None:
            _, _, step = self.path.partition("/state/")
            pieces = served.get(int(step)) if step.isdecimal() and len(step) < 20 else []
            if not pieces:
                self.send_error(404, "this member has no state of that step")
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(sum(map(len, pieces))))
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a member that comes is no news for the terminal."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        daemon_threads = True

    server = Server(("", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.1,), name="narrowcast-state", daemon=True).start()
    return server


def fetch(address: str, seconds: float) -> Any:
    """The state behind an address. Raises ValueError where it is none, or ends too early."""
    with urllib.request.urlopen(address, timeout=seconds) as reply:
        length = reply.headers.get("Content-Length") or ""
        if not length.isdigit():
            raise ValueError(f"state: {address} does not say how long it is")
        data = bytearray()
        while len(data) < int(length) and (part := reply.read(min(1 << 20, int(length) - len(data)))):
            data += part
    if len(data) != int(length):
        raise ValueError(f"state: {len(data)} bytes came from {address}, and not {length}; the member is gone")
    return unpack(data)


class Elastic:
    """`LocalSGD` under torchft's Manager: workers may die and join at any time, and nobody starts again.

    Every so many steps all workers that are there exchange how far they moved, in few bits; the mean goes to the outer
    optimizer. If one dies meanwhile, the others take back what they did to their residuals and repeat the exchange at
    once without it. One that comes gets anchor and outer optimizer from another, and its first exchange counts for
    nobody. Making one joins the others, and waits for their next exchange.

    manager: torchft's, with use_async_quorum=False, `group` as its pg and our `checkpoint_transport()`. spec: a policy
    without watchers and low rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        manager: Any,
        group: Any,
        *,
        every: int,
        spec: object,
        outer: Outer = nesterov,
        min_values: int = policy.MIN_VALUES,
        seed: int = 0,
    ) -> None:
        if every < 1:
            raise ValueError(f"Elastic: every={every}; give the number of steps between exchanges, 1 or more")
        if getattr(manager, "_use_async_quorum", False):
            raise ValueError("Elastic: the manager has use_async_quorum=True; make it with False")
        policy.check(spec)
        if policy.all_watchers(spec):
            raise ValueError("Elastic: spec= is a policy that learns, and members that come would know nothing of it")
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._buffers = {name: b for name, b in model.named_buffers() if b.dtype in FLOATS and b.numel()}
        self._policy, self._min_values, self._seed = spec, min_values, seed
        self._manager, self._group = manager, group
        self.every, self.steps, self.exchanges, self.repeated, self.left = every, 0, 0, 0, 0
        self.members = 0
        """How many took part in the last exchange; `left`: by how many they became fewer so far, with their residuals;
        `repeated`: exchanges that were, since someone died."""
        self._anchors = {name: p.detach().float().clone() for name, p in self._parameters.items()}
        self._outer = outer(list(self._anchors.values()))
        self._residuals, self._healed = ModelResiduals(1), False
        self._by_codec()
        manager.register_state_dict_fn("narrowcast", self._heal, self._state)
        self._exchange(contributes=False)
        self._hook = optimizer.register_step_post_hook(lambda *_: self._count()) if optimizer is not None else None

    def step(self) -> bool:
        """Count an inner step, and exchange if it is time. Returns whether it did."""
        self.steps += 1
        if self.steps % self.every:
            return False
        self._exchange(contributes=True)
        return True

    def _count(self) -> None:
        self.step()

    def close(self) -> None:
        """Stop counting steps; manager and group stay the caller's."""
        if self._hook is not None:
            self._hook.remove()

    def residuals(self) -> dict[str, Tensor]:
        """This worker's own, by parameter."""
        return self._residuals.by_parameter()

    @torch.no_grad()
    def _exchange(self, contributes: bool) -> None:
        after = before = _copied(self._residuals.by_parameter())
        while True:
            self._healed = False
            self._manager.start_quorum()
            if self._healed:  # the others ended an exchange in which we failed, or we are new: what we sent has counted
                contributes, before = False, after
            done = self._attempt(before, contributes)
            if self._manager.should_commit() and done is not None:
                break
            self.repeated += 1
            after = _copied(self._residuals.by_parameter())
        self._apply(*done)

    def _attempt(self, residuals: dict[str, Tensor], contributes: bool) -> tuple[int, dict[str, Tensor]] | None:
        """How many contributed, and the means; None where it failed, of which the manager knows."""
        channel, error = self._group.channel, self._manager.errored()
        if error or channel is None:
            if channel is not None:
                channel.fail(RuntimeError(f"this member cannot exchange: {error}"))  # the others need not wait for it
            return None
        self.left += max(0, self.members - channel.world)
        self.members = channel.world
        self._residuals = ModelResiduals(channel.world)
        self._residuals.load(residuals)
        try:
            return self._means(channel, contributes)
        except (TransportError, RuntimeError, TimeoutError) as error:
            self._manager.report_error(error)
            return None

    def _means(self, channel: Channel, contributes: bool) -> tuple[int, dict[str, Tensor]]:
        share = float(contributes)
        sums = {name: (self._start_of(name) - p.float()) * share for name, p in self._parameters.items()}
        sums |= {f"buffer {name}": b * share for name, b in self._buffers.items()}
        count = self._agree(channel, contributes)
        if not count:
            return 0, {}
        works = [
            self._start(channel, number, codec, names, [sums[name] for name in names])
            for number, (codec, names) in enumerate(self._by_codec().items())
        ]
        for dtype in dict.fromkeys(b.dtype for b in self._buffers.values()):
            same = tuple(f"buffer {name}" for name, b in self._buffers.items() if b.dtype == dtype)
            works.append(self._start(channel, len(works), policy.AS_IS, same, [sums[name] for name in same]))
        for work in works:
            work.wait()
        if count != channel.world:
            for mean in sums.values():
                mean *= channel.world / count
        return count, sums

    def _agree(self, channel: Channel, contributes: bool) -> int:
        """How many contribute; an error where members hold other anchors: one that was alone for a while, as a
        lighthouse lets it that hears it first, would add to the others' what does not belong there. Those who made
        fewer exchanges, or have a higher rank, get the state of the others before the exchange is made again.
        """
        mine = torch.cat([torch.tensor([int(contributes), self.exchanges]), digest(self._anchors.values()).view(-1)])
        rows = channel.gather(mine, "members")
        leader = max(range(len(rows)), key=lambda rank: (int(rows[rank][1]), -rank))
        alike = [torch.equal(row[1:], rows[leader][1:]) for row in rows]
        if all(alike):
            return int(sum(row[0] for row in rows))
        if not alike[channel.rank]:
            self._manager.load_state_dict({"step": 0, "batches_committed": 0})
        others = [rank for rank, is_alike in enumerate(alike) if not is_alike]
        raise RuntimeError(f"members {others} hold other parameters than member {leader}, and get those")

    def _start(
        self, channel: Channel, number: int, codec: Codec, names: tuple[str, ...], tensors: list[Tensor]
    ) -> Work:
        residuals = self._residuals.residuals(names, tensors) if codec.feedback else None
        more: dict[str, Any] = {"residuals": residuals, "step": (self.exchanges, number), "seed": self._seed}
        work = all_reduce(tensors, codec, dist.ReduceOp.AVG, async_op=True, channel=channel, **more)
        assert work is not None
        return work

    def _apply(self, count: int, means: dict[str, Tensor]) -> None:
        if count:
            for name, anchor in self._anchors.items():
                anchor.grad = means[name]
            self._outer.step()
            self._outer.zero_grad()
            for name, buffer in self._buffers.items():
                buffer.copy_(means[f"buffer {name}"])
            self.exchanges += 1
        self._begin_again()

    def _begin_again(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._anchors[name])

    def _start_of(self, name: str) -> Tensor:
        return self._anchors[name].to(self._parameters[name].dtype).float()

    def _by_codec(self) -> dict[Codec, tuple[str, ...]]:
        """Which parameters travel together."""
        names: dict[Codec, tuple[str, ...]] = {}
        for name, parameter in self._parameters.items():
            info = policy.TensorInfo(name, tuple(parameter.shape), torch.float32, ROLE)
            codec = policy.choose(self._policy, info, self.exchanges, self._min_values).codec
            if codec.rank:
                raise ValueError(
                    f"Elastic with {codec}: low rank keeps factors that members who come lack; take another"
                )
            names[codec] = (*names.get(codec, ()), name)
        return names

    def _state(self) -> dict[str, Any]:
        """What a member that comes needs. Not the residuals: they are each worker's own."""
        buffers = {name: buffer.clone() for name, buffer in self._buffers.items()}
        return {
            "anchors": dict(self._anchors),
            "outer": self._outer.state_dict(),
            "buffers": buffers,
            "counts": [self.steps, self.exchanges],
        }

    @torch.no_grad()
    def _heal(self, state: dict[str, Any]) -> None:
        for name, anchor in self._anchors.items():
            anchor.copy_(state["anchors"][name])
        self._outer.load_state_dict(state["outer"])
        for name, buffer in self._buffers.items():
            buffer.copy_(state["buffers"][name])
        self.steps, self.exchanges = map(int, state["counts"])
        self._begin_again()
        self._healed = True


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
