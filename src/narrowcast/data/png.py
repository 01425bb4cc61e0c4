"""PNG pictures with the standard library and torch: 8 bits a channel, no interlace, which is what data sets use."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}
"""Samples for a pixel by PNG's colour type; palettes (type 3) are not read."""
NONE, SUB, UP, AVERAGE, PAETH = range(5)


def decode(picture: bytes) -> Tensor:
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
    found = lines.clone()
    subtracted = torch.tensor([kind == SUB for kind in kinds])
    by_pixel = lines[subtracted].view(int(subtracted.sum()), -1, channels)
    # sums of bytes, modulo 256 as PNG has it
    found[subtracted] = by_pixel.cumsum(1, dtype=torch.int64).to(torch.uint8).flatten(1)
    for row, kind in enumerate(kinds):
        above = found[row - 1] if row else torch.zeros_like(found[0])
        if kind == UP:
            found[row] = lines[row] + above
        elif kind in (AVERAGE, PAETH):
            line = _one_by_one(kind, lines[row].tolist(), above.tolist(), channels)
            found[row] = torch.tensor(line, dtype=torch.uint8)
        elif kind not in (NONE, SUB):
            raise ValueError(f"png: there is no filter {kind}")
    return found


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
    guess = left + up - corner
    return min((left, up, corner), key=lambda neighbour: abs(guess - neighbour))
