"""A state as bytes: what was packed comes back, bit for bit, and what is no state of ours is refused."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
import urllib.error
from typing import Any

import pytest
import torch

from narrowcast.parallel.integrations import torchft
from narrowcast.parallel.plain_state import MAGIC, TYPES, pack, unpack


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        bits = a.contiguous().view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_what_was_packed_comes_back() -> None:
    x = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45, 300.0, -2.0, 7.0]).view(2, 4)
    state = {name: x.nan_to_num(1, 1, 1).to(dtype) for name, dtype in TYPES.items()}
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state |= {"x": x, "x.t": x.T, "none": torch.empty(0, 5), "one": torch.tensor(3), "model": dict(model.state_dict())}
    state |= {"adam": optimizer.state_dict(), "more": [None, True, 1 << 70, -0.5, "é\n", (1, [2]), {}], 7: ()}
    found = unpack(b"".join(pack(state)))
    assert same(state, found)
    optimizer.load_state_dict(found["adam"])


def test_nothing_of_another_kind_is_packed() -> None:
    csr = torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1))
    for wrong in (object(), {1.5: 2}, {1}, torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse(), csr, b"x"):
        with pytest.raises(TypeError, match=r"state\['a'\]\[1\] is a .*give dense tensors"):
            pack({"a": [0, wrong]})


@pytest.mark.parametrize("cut", [0, 7, 12, 40, -1])
def test_what_is_cut_off_or_longer_is_refused(cut: int) -> None:
    data = b"".join(pack({"a": torch.ones(5)}))
    with pytest.raises(ValueError, match="state: "):
        unpack(data[:cut])
    with pytest.raises(ValueError, match="1 bytes too many"):
        unpack(data + b"x")


def test_a_pickle_is_not_even_looked_at() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return pytest.fail, ("it was run",)

    bomb = pickle.dumps(Bomb())
    for data in (bomb, MAGIC + struct.pack("<Q", len(bomb)) + bomb):
        with pytest.raises(ValueError, match="state: "):
            unpack(data)


def test_a_state_is_fetched_once_it_is_there() -> None:
    served = torchft._Served(seconds=10)
    server = torchft._serve(served)
    address = f"http://localhost:{server.server_address[1]}/state/"
    state = {"w": torch.arange(300_000), "lr": 0.5}
    threading.Timer(0.2, served.put, (7, pack(state))).start()
    assert same(state, torchft.fetch(f"{address}7", 10))
    for wrong in ("6", "x", "7/../8", ""):  # not of that step any more, or no step
        with pytest.raises(urllib.error.HTTPError, match="404"):
            torchft.fetch(address + wrong, 10)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("head", [b"Content-Length: 99\r\n", b""])
def test_a_reply_that_ends_too_early_is_refused(head: bytes) -> None:
    def answer() -> None:
        with server.accept()[0] as peer:
            peer.recv(1000)
            peer.sendall(b"HTTP/1.0 200 OK\r\n" + head + b"\r\n" + b"".join(pack([1]))[:30])

    with socket.create_server(("localhost", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ValueError, match=r"30 bytes came .* and not 99|does not say how long"):
            torchft.fetch(f"http://localhost:{server.getsockname()[1]}/state/1", 10)
