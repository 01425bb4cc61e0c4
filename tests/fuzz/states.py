"""A training's state as another process sends it: it is read as it was, or refused with a ValueError."""

from __future__ import annotations

import json
from random import Random

import torch
from fuzz.base import VALUES, Kind, one_line, replaced, require

from narrowcast.parallel.plain_state import BEGIN, LENGTH, MAGIC, pack, unpack


def make(source: Random) -> bytes:
    state = {
        "w": torch.full((source.randrange(4), 3), source.random()),
        "step": torch.tensor(source.randrange(99)),
        "groups": [{"lr": source.random(), "betas": (0.9, 0.99), 0: None}],
        "flag": torch.ones(source.randrange(5), dtype=torch.bool),
    }
    data = b"".join(pack(state))
    match source.randrange(5):
        case 0:
            return data[: source.randrange(len(data) + 1)]
        case 1:
            at = source.randrange(len(data))
            return data[:at] + bytes([source.randrange(256)]) + data[at + source.randrange(3) :]
        case 2:
            return data
    end = BEGIN + LENGTH.unpack_from(data, len(MAGIC))[0]
    head = data[BEGIN:end].decode()
    broken = replaced(head, source) if source.random() < 0.5 else _other(head, source)
    text = broken.encode(errors="surrogatepass")
    return MAGIC + LENGTH.pack(len(text)) + text + data[end:]


def _other(head: str, source: Random) -> str:
    found = json.loads(head)
    place = source.choice((found["tensors"][0], found["state"][1][0], found["state"], found["tensors"][0][1]))
    place[source.randrange(len(place))] = source.choice(([], [1 << 62], ["t", 9], ["t", -1], ["d", [[1.5, 2]]], "int9"))
    return json.dumps(found) if source.random() < 0.8 else head.replace("3", source.choice(VALUES))


def check(data: bytes) -> None:
    try:
        found = unpack(data)
    except ValueError as error:
        one_line(str(error), "a state that was refused")
        return
    again = b"".join(pack(found))
    require(b"".join(pack(unpack(again))) == again, "a state is not what it was when it is packed again")


KIND = Kind("states", 7, make, check)
