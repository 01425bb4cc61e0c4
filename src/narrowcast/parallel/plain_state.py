"""The state of a training as bytes, without pickle: reading them makes tensors and plain values, and runs nothing.

    8 bytes "NCSTATE1", 8 bytes: length of the head (little-endian), the head in JSON, then every tensor's bytes in turn

The head is {"tensors": [[type, shape], ...], "state": ...}. In it a value stands for itself if it is None, a bool, a
number or a text; else it is ["t", number of the tensor], ["d", [[key, value], ...]], ["l", [...]] or ["u", [...]], for
a dict (keys: texts or whole numbers), a list or a tuple.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MAGIC, LENGTH = b"NCSTATE1", struct.Struct("<Q")
BEGIN = len(MAGIC) + LENGTH.size
TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
PLAIN = (type(None), bool, int, float, str)


def pack(state: Any) -> list[bytes]:
    """The bytes, in a few pieces; a copy. Raises TypeError where the state holds something else."""
    tensors: list[Tensor] = []
    tree = _tree(state, tensors, "state")
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    head = json.dumps({"tensors": kinds, "state": tree}).encode()
    return [MAGIC + LENGTH.pack(len(head)) + head, *map(_bytes, tensors)]


def unpack(data: bytes | bytearray) -> Any:
    """What was packed. Raises ValueError where the bytes are none of ours, too few or too many."""
    kinds, tree, at = _head(data)
    tensors = []
    for dtype, shape in kinds:
        size = math.prod(shape) * dtype.itemsize
        if size > len(data) - at:
            raise ValueError(f"state: a tensor of {size} bytes, and {len(data) - at} are left; it was cut off")
        part = torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8) if size else torch.empty(0).byte()
        tensors.append(part.view(dtype).view(shape))
        at += size
    if at != len(data):
        raise ValueError(f"state: {len(data) - at} bytes too many")
    return _value(tree, tensors)


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""


def _tree(value: Any, tensors: list[Tensor], where: str) -> Any:
    if type(value) in PLAIN:
        return value
    if type(value) in (Tensor, torch.nn.Parameter) and value.dtype in TYPES.values() and value.layout == torch.strided:
        tensors.append(value)
        return ["t", len(tensors) - 1]
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return ["d", [[key, _tree(kept, tensors, f"{where}[{key!r}]")] for key, kept in value.items()]]
    if type(value) in (list, tuple):
        kept = [_tree(one, tensors, f"{where}[{n}]") for n, one in enumerate(value)]
        return ["l" if type(value) is list else "u", kept]
    raise TypeError(
        f"{where} is a {type(value).__name__}; give dense tensors, dicts, lists, tuples, numbers, texts and None"
    )


def _head(data: bytes | bytearray) -> tuple[list[tuple[torch.dtype, list[int]]], Any, int]:
    """The tensors' types and shapes, the tree, and where the first tensor begins."""
    if data[: len(MAGIC)] != MAGIC or len(data) < BEGIN:
        raise ValueError(f"state: begins with {bytes(data[:8])!r}, and not with {MAGIC!r}")
    end = BEGIN + LENGTH.unpack_from(data, len(MAGIC))[0]
    if end > len(data):
        raise ValueError(f"state: its head ends at byte {end}, and there are {len(data)}; it was cut off")
    try:
        head = json.loads(bytes(data[BEGIN:end]).decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"state: its head is no JSON of ours: {type(error).__name__}") from None
    if not isinstance(head, dict) or set(head) != {"tensors", "state"} or not isinstance(head["tensors"], list):
        raise ValueError("state: its head is not {tensors, state}")
    return [_kind(kind) for kind in head["tensors"]], head["state"], end


def _kind(kind: Any) -> tuple[torch.dtype, list[int]]:
    match kind:
        case [str(name), list(shape)] if name in TYPES and all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
            if len(shape) <= 64 and math.prod(n or 1 for n in shape) < 1 << 60:
                return TYPES[name], shape
    raise ValueError("state: a tensor whose type or shape is none")


def _value(tree: Any, tensors: list[Tensor]) -> Any:
    try:
        return _read(tree, tensors)
    except RecursionError:
        raise ValueError("state: nested too deep") from None


def _read(tree: Any, tensors: list[Tensor]) -> Any:
    match tree:
        case ["t", int(number)] if type(number) is int and 0 <= number < len(tensors):
            return tensors[number]
        case ["d", list(pairs)]:
            return dict(_pairs(pairs, tensors))
        case ["l", list(kept)]:
            return [_read(one, tensors) for one in kept]
        case ["u", list(kept)]:
            return tuple(_read(one, tensors) for one in kept)
    if type(tree) in PLAIN:
        return tree
    raise ValueError("state: a value of no kind that is known")


def _pairs(pairs: list[Any], tensors: list[Tensor]) -> Iterator[tuple[str | int, Any]]:
    for pair in pairs:
        match pair:
            case [str() | int() as key, value] if type(key) is not bool:
                yield key, _read(value, tensors)
            case _:
                raise ValueError("state: a dict with a key that is neither a text nor a whole number")
