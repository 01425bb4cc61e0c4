"""A small decoder-only transformer on bytes, and real text for it: the help pages that every Python brings along."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

HEADS = 4


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm: 12 width² parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Bytes in, the next byte out."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x_BL: Tensor) -> Tensor:
        """The loss of predicting every byte but the first."""
        hidden = self.embed(x_BL[:, :-1]) + self.place(torch.arange(x_BL.shape[1] - 1))
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), x_BL[:, 1:].flatten())


def text() -> Tensor:
    """Some 0.7 MB of English about Python, as bytes."""
    from pydoc_data.topics import topics

    joined = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(joined.encode()), dtype=torch.uint8).long()


def batch(data: Tensor, seed: int, size: int, length: int) -> Tensor:
    """Pieces of length + 1 bytes from places that the seed decides."""
    starts = torch.randint(len(data) - length - 1, (size,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[start : start + length + 1] for start in starts.tolist()])
