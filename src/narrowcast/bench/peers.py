"""What others do with the same data in the same run: torch's casts, ml_dtypes, bitsandbytes, torchao, qtorch.

Each peer is optional. A row has its speed as a share of the copy, its error, and what it makes of a NaN and an Inf.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from narrowcast.bench.codecs import data
from narrowcast.codecs import codec as codec_named
from narrowcast.measure import Timing, interleaved, torch_threads

PEER_BYTES = 64 << 20
ROUNDS = 5


@dataclass(frozen=True)
class Peer:
    """A way to encode and decode that is not ours; `nbytes` is the size of what encode returned."""

    name: str
    ours: str
    """Our codec that does the same job."""
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any, int], Tensor]
    bits: float


@dataclass(frozen=True)
class PeerRow:
    name: str
    ours: str
    bits: float
    encode: float
    decode: float
    relative_error: float
    nan_becomes: str
    inf_becomes: str
    zeros_kept: float


def _torch_casts() -> Iterator[Peer]:
    pairs = [(torch.float8_e4m3fn, "e4m3fn@1"), (torch.float8_e5m2, "e5m2@1"), (torch.bfloat16, "bf16")]
    for dtype, ours in pairs:
        name = f"torch .to({str(dtype).removeprefix('torch.')})"
        yield Peer(name, ours, methodcaller("to", dtype), lambda wire, n: wire.float(), 8 * dtype.itemsize)


def _through_numpy(cast: Callable[[Any], Any], x: Tensor) -> Any:
    return cast(x.numpy())


def _ml_dtypes() -> Iterator[Peer]:
    import ml_dtypes
    import numpy

    for name, ours in (("float8_e4m3fn", "e4m3fn@1"), ("float8_e3m4", "e3m4@1")):
        cast = methodcaller("astype", getattr(ml_dtypes, name))
        yield Peer(
            f"ml_dtypes {name}",
            ours,
            partial(_through_numpy, cast),
            lambda wire, n: torch.from_numpy(wire.astype(numpy.float32)),
            8,
        )


def _bitsandbytes() -> Iterator[Peer]:
    functional = importlib.import_module("bitsandbytes.functional")
    yield Peer(
        "bitsandbytes quantize_blockwise 256",
        "dynamic8/256",
        lambda x: functional.quantize_blockwise(x, blocksize=256),
        lambda wire, n: functional.dequantize_blockwise(*wire),
        8.125,
    )
    yield Peer(
        "bitsandbytes quantize_4bit nf4 64",
        "nf4/64",
        lambda x: functional.quantize_4bit(x, blocksize=64, quant_type="nf4"),
        lambda wire, n: functional.dequantize_4bit(*wire),
        4.5,
    )


def _torchao() -> Iterator[Peer]:
    mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")

    def encode(x: Tensor) -> Any:
        return mx.to_mx(x.view(-1, 32), torch.float8_e4m3fn, 32)

    def decode(wire: Any, n: int) -> Tensor:
        scale, codes = wire
        return (codes.float().view(-1, 32) * torch.exp2(scale.view(torch.uint8).float() - 127).view(-1, 1)).flatten()

    yield Peer("torchao to_mx e4m3fn 32 (eager)", "mxfp8", encode, decode, 8.25)


def _qtorch() -> Iterator[Peer]:
    quant = importlib.import_module("qtorch.quant")
    yield Peer(
        "qtorch float_quantize e4m3 (no bytes)",
        "e4m3@1",
        lambda x: quant.float_quantize(x, exp=4, man=3, rounding="nearest"),
        lambda wire, n: wire.clone(),
        32,
    )


GROUPS: dict[str, Callable[[], Iterator[Peer]]] = {
    "torch": _torch_casts,
    "ml_dtypes": _ml_dtypes,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    "qtorch": _qtorch,
}


def _becomes(peer: Peer, value: float) -> str:
    """What comes back for `value` among ordinary numbers, in words."""
    x = torch.linspace(-1, 1, 4096)
    x[7] = value
    back = float(peer.decode(peer.encode(x), x.numel()).flatten()[7])
    return f"{back:g}" if math.isfinite(back) else str(back)


def _zeros_kept(peer: Peer) -> float:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    x[::2] = 0.0
    back = peer.decode(peer.encode(x), x.numel()).flatten()
    return float((back[::2] == 0).double().mean())


def measure(peer: Peer, x: Tensor) -> tuple[PeerRow, PeerRow]:
    """The peer and our codec for the same job, timed in the same rounds; both allocate what they return."""
    codec, n = codec_named(peer.ours), x.numel()
    ours = Peer(f"narrowcast {codec}", peer.ours, codec.encode, codec.decode, codec.bits_per_value)
    target = torch.empty_like(x)
    wires = {p.name: p.encode(x) for p in (peer, ours)}
    candidates: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(x)}
    for p in (peer, ours):
        candidates[f"encode {p.name}"] = partial(p.encode, x)
        candidates[f"decode {p.name}"] = partial(p.decode, wires[p.name], n)
    with torch_threads(1):
        took = interleaved(candidates, ROUNDS)
    return tuple(_peer_row(p, x, wires[p.name], took) for p in (peer, ours))  # type: ignore[return-value]


def _peer_row(peer: Peer, x: Tensor, wire: Any, took: dict[str, Timing]) -> PeerRow:
    per_value = 4 + peer.bits / 8
    share = {
        way: (per_value / took[f"{way} {peer.name}"].median) / (8 / took["copy"].median) for way in ("encode", "decode")
    }
    back = peer.decode(wire, x.numel()).flatten()
    error = float((back - x).norm() / x.norm())
    nan, inf = _becomes(peer, math.nan), _becomes(peer, math.inf)
    return PeerRow(
        peer.name, peer.ours, peer.bits, share["encode"], share["decode"], error, nan, inf, _zeros_kept(peer)
    )


def run() -> Iterator[dict[str, object]]:
    """A row for each peer that is installed and one for ours beside it; for the others, why not."""
    x = data(PEER_BYTES)
    for group, make in GROUPS.items():
        try:
            peers = list(make())
        except Exception as error:  # a peer that does not import here is not our fault, but it is named
            yield {"name": group, "missing": f"{type(error).__name__}: {error}"}
            continue
        for peer in peers:
            yield from (asdict(row) for row in measure(peer, x))
