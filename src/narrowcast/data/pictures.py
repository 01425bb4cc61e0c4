"""Pictures with the standard library and torch: PNG, and in as few bytes as it allows, losslessly.

Of PNG that is read which data sets use: 8 bits a channel, no interlace. Packing is for machines that data must be
carried to. Each picture is predicted from its neighbours (the median of left, up and left + up - corner, as in LOCO-I),
red and blue as differences to green; what is left is Huffman-coded by zlib. CIFAR-10 shrinks to 4.4 bits a sample,
where its PNG files need 6.0 and lossless WebP 4.4. Pieces can be carried one by one where a channel takes so much and
no more.

A piece: `NCPACK1\n`, one line of JSON (name, part, first, count, shape, classes, lengths), labels, then each plane.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.data.dataset import Dataset, replacing
from narrowcast.data.fetch import DataError

MAGIC = b"NCPACK1\n"
STEP = 5000
"""Pictures that are compressed together."""
SUFFIX = ".ncpack"
RGB = 3
MIDDLE = 128
"""Flipping this bit maps bytes 0..255 to signed bytes -128..127 in the same order."""
SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}
"""Samples for a pixel by PNG's colour type; palettes (type 3) are not read."""
NONE, SUB, UP, AVERAGE, PAETH = range(5)


def decode_png(picture: bytes) -> Tensor:
    """The picture as a uint8 tensor of height x width x channels."""
    if not picture.startswith(SIGNATURE):
        raise ValueError("png: this is no PNG picture")
    header, packed = b"", bytearray()
    for kind, body in _chunks(picture):
        if kind == b"IHDR":
            header = body
        elif kind == b"IDAT":
            packed += body
    width, height, bits, colour, _, _, interlace = struct.unpack(">IIBBBBB", header)
    if bits != 8 or colour not in CHANNELS or interlace:
        raise ValueError(f"png: got {bits} bits, colour type {colour}, interlace {interlace}; 8 bits without a palette")
    lines = torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8).view(height, -1)
    channels = CHANNELS[colour]
    return _unfilter(lines[:, 0].tolist(), lines[:, 1:], channels).view(height, width, channels)


def _chunks(picture: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(SIGNATURE)
    while at < len(picture):
        length, kind = struct.unpack_from(">I4s", picture, at)
        body = picture[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack_from(">I", picture, at + 8 + length)
        if zlib.crc32(kind + body) != checksum:
            raise ValueError(f"png: the checksum of a {kind.decode()} chunk does not hold; fetch the file again")
        yield kind, body
        at += 12 + length


def _unfilter(kinds: list[int], lines: Tensor, channels: int) -> Tensor:
    """Undo the filters. Lines that look at themselves alone are done all at once, the others one by one."""
    rows = lines.clone()
    subtracted = torch.tensor([kind == SUB for kind in kinds])
    by_pixel = lines[subtracted].view(int(subtracted.sum()), -1, channels)
    # sums of bytes, modulo 256 as PNG has it
    rows[subtracted] = by_pixel.cumsum(1, dtype=torch.int64).to(torch.uint8).flatten(1)
    for row, kind in enumerate(kinds):
        above = rows[row - 1] if row else torch.zeros_like(rows[0])
        if kind == UP:
            rows[row] = lines[row] + above
        elif kind in (AVERAGE, PAETH):
            line = _one_by_one(kind, lines[row].tolist(), above.tolist(), channels)
            rows[row] = torch.tensor(line, dtype=torch.uint8)
        elif kind not in (NONE, SUB):
            raise ValueError(f"png: there is no filter {kind}")
    return rows


def _one_by_one(kind: int, line: list[int], above: list[int], channels: int) -> list[int]:
    done = [0] * channels
    corners = [0] * channels + above
    for here, up, corner in zip(line, above, corners, strict=False):
        left = done[-channels]
        guess = (left + up) // 2 if kind == AVERAGE else _paeth(left, up, corner)
        done.append((here + guess) & 255)
    return done[channels:]


def _paeth(left: int, up: int, corner: int) -> int:
    """The neighbour nearest to left + up - corner; ties in this order."""
    return min((left, up, corner), key=lambda neighbour: abs(left + up - corner - neighbour))


def pack(data: Dataset, into: Path, limit: int) -> list[Path]:
    """Write a data set as files of at most `limit` bytes; `unpack` of the folder gives it back bit for bit."""
    records = list(_records(data))
    largest = max(len(record) for record in records)
    if largest + len(MAGIC) > limit:
        raise ValueError(f"pack: a record has {largest} bytes, more than the limit of {limit}; raise the limit")
    pieces = _join_records(records, limit)
    # as few pieces as the limit allows, and then about equally large
    even = sum(len(record) for record in records) // len(pieces) + largest // 2
    pieces = _join_records(records, min(limit, even + len(MAGIC)))
    paths = [into / f"{data.name}.{n}-of-{len(pieces)}{SUFFIX}" for n in range(1, len(pieces) + 1)]
    for path, piece in zip(paths, pieces, strict=True):
        with replacing(path) as part:
            part.write_bytes(piece)
    return paths


def _join_records(records: list[bytes], limit: int) -> list[bytes]:
    """Records in their order, joined as long as they stay within the limit."""
    pieces = [MAGIC]
    for record in records:
        if len(pieces[-1]) + len(record) > limit:
            pieces.append(MAGIC)
        pieces[-1] += record
    return pieces


def pieces_in(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"{name}.*-of-*{SUFFIX}"))


def complete(folder: Path, name: str) -> bool:
    return 0 < _promised_pieces(folder, name) == len(pieces_in(folder, name))


def _promised_pieces(folder: Path, name: str) -> int:
    """How many pieces there are by the name of the first; 0 where there is none."""
    paths = pieces_in(folder, name)
    return int(paths[0].name.rsplit("-of-", 1)[1].removesuffix(SUFFIX)) if paths else 0


def unpack(folder: Path, name: str) -> Dataset:
    """The data set whose pieces lie in `folder`."""
    paths = pieces_in(folder, name)
    if not complete(folder, name):
        promised = _promised_pieces(folder, name) or "?"
        raise DataError(f"{folder}: {len(paths)} of {promised} pieces of {name} are here; bring the others too")
    parts: dict[str, list[tuple[int, Tensor, Tensor]]] = {"train": [], "test": []}
    classes = 0
    for path in paths:
        for head, x, y in _unpacked(path):
            parts[head["part"]].append((head["first"], x, y))
            classes = head["classes"]
    tensors = {}
    for part, records in parts.items():
        ordered = sorted(records, key=lambda record: record[0])
        tensors[f"x_{part}"] = torch.cat([x for _, x, _ in ordered])
        tensors[f"y_{part}"] = torch.cat([y for _, _, y in ordered])
    return Dataset(name, classes=classes, **tensors)


def _unpacked(path: Path) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
    """The pictures and labels of each record of a piece."""
    try:
        for head, body in _read(path):
            labels = zlib.decompress(body[: head["lengths"][0]])
            yield head, _picture_planes(head, body), torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError, zlib.error) as error:
        raise DataError(f"{path}: broken ({error}); bring the file again") from error


def _records(data: Dataset) -> Iterator[bytes]:
    for part, x, y in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        for first in range(0, len(x), STEP):
            some, labels = x[first : first + STEP], y[first : first + STEP]
            blocks = [zlib.compress(labels.to(torch.uint8).numpy().tobytes())]
            blocks += [_huffman(residual(plane)) for plane in _decorrelated(some)]
            head = {"name": data.name, "part": part, "first": first, "shape": list(some.shape)}
            head |= {"classes": data.classes, "lengths": [len(block) for block in blocks]}
            yield json.dumps(head).encode() + b"\n" + b"".join(blocks)


def _read(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    content = path.read_bytes()
    if not content.startswith(MAGIC):
        raise DataError(f"{path}: this is no piece of a packed data set")
    at = len(MAGIC)
    while at < len(content):
        end = content.index(b"\n", at)
        head = json.loads(content[at:end])
        size = sum(head["lengths"])
        if end + 1 + size > len(content):
            raise DataError(f"{path}: cut short; bring the file again")
        yield head, content[end + 1 : end + 1 + size]
        at = end + 1 + size


def _picture_planes(head: dict[str, Any], body: bytes) -> Tensor:
    count, channels, height, width = head["shape"]
    planes, at = [], head["lengths"][0]
    for length in head["lengths"][1:]:
        raw = torch.frombuffer(bytearray(zlib.decompress(body[at : at + length], -15)), dtype=torch.uint8)
        planes.append(restore(raw.view(count, height, width)))
        at += length
    if channels != RGB:
        return torch.stack(planes, 1) ^ MIDDLE
    green, red, blue = planes
    green = green ^ MIDDLE
    return torch.stack([red + green, green, blue + green], 1)


def _decorrelated(x: Tensor) -> list[Tensor]:
    """Green, and how red and blue differ from it, modulo 256; all such that their signed values are near zero."""
    if x.shape[1] != RGB:
        return list((x ^ MIDDLE).unbind(1))
    red, green, blue = x.unbind(1)
    return [green ^ MIDDLE, red - green, blue - green]


def _huffman(plane: Tensor) -> bytes:
    """No search for repeats, which pictures of this kind do not have: decoding then is fast."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(plane.contiguous().numpy().tobytes()) + packer.flush()


def residual(plane: Tensor) -> Tensor:
    """What is left of N x H x W bytes after each was predicted from its neighbours."""
    values = _signed(plane)
    guess = torch.zeros_like(values)
    guess[:, 0, 1:] = values[:, 0, :-1]
    guess[:, 1:, 0] = values[:, :-1, 0]
    guess[:, 1:, 1:] = _median(values[:, 1:, :-1], values[:, :-1, 1:], values[:, :-1, :-1])
    return (values - guess).to(torch.uint8)


def restore(left: Tensor) -> Tensor:
    """The inverse of `residual`: pixel by pixel, all pictures at once."""
    pixels = left.permute(1, 2, 0).contiguous()
    height, width, _ = pixels.shape
    for row in range(height):
        for column in range(width):
            if row and column:
                near = (pixels[row, column - 1], pixels[row - 1, column], pixels[row - 1, column - 1])
                guess = _median(*(_signed(neighbour) for neighbour in near))
            elif row or column:
                guess = _signed(pixels[row - 1, 0] if row else pixels[0, column - 1])
            else:
                continue
            pixels[row, column] += guess.to(torch.uint8)
    return pixels.permute(2, 0, 1).contiguous()


def _signed(plane: Tensor) -> Tensor:
    """Bytes as numbers from -128 to 127, so that small differences of either sign are near each other."""
    return plane.view(torch.int8).to(torch.int16)


def _median(left: Tensor, up: Tensor, corner: Tensor) -> Tensor:
    low, high = torch.minimum(left, up), torch.maximum(left, up)
    return torch.maximum(low, torch.minimum(high, left + up - corner))
