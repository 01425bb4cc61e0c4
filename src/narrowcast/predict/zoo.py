"""Descriptions of known models, layer by layer: parameter tensors and multiply-adds of one sample.

Sizes follow the papers and their reference implementations; tests compare the number of parameters with the published.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from narrowcast.predict.model import LARGEST, Description, Layer

IMAGENET = 1_281_167
Build = Callable[[], Description]


class _Net:
    """Collects layers while the size of the image shrinks."""

    def __init__(self, channels: int, size: int) -> None:
        self.channels, self.size = channels, size
        self.layers: list[Layer] = []

    def add(self, name: str, shapes: tuple[tuple[int, ...], ...], macs: float, output: int = 0) -> None:
        self.layers.append(Layer(name, tuple(map(math.prod, shapes)), macs, output, shapes))

    def conv(
        self,
        out: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        *,
        bias: bool = False,
        norm: bool = False,
        into: int = 0,
    ) -> None:
        """A convolution with "same" padding, its bias, and a batch norm behind it."""
        high, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        shape = (out, into or self.channels, high, wide)
        fan = math.prod(shape[1:])
        self.size = -(-self.size // stride)
        place, values = f"conv{len(self.layers)}", out * self.size * self.size
        self.add(place, (shape, *([(out,)] if bias else [])), fan * values, values)
        if norm:
            self.add(f"{place}.norm", ((out,), (out,)), 2.0 * values, values)
        self.channels = out

    def pool(self) -> None:
        self.size = -(-self.size // 2)

    def linear(self, into: int, out: int, tokens: int = 1, bias: bool = True) -> None:
        shapes = ((out, into), *([(out,)] if bias else []))
        self.add(f"linear{len(self.layers)}", shapes, into * out * tokens, out * tokens)

    def norm(self, width: int, tokens: int) -> None:
        self.add(f"norm{len(self.layers)}", ((width,), (width,)), 2.0 * width * tokens, width * tokens)


def alexnet() -> Description:
    """Krizhevsky's net in one tower, without groups: 62.4 million parameters, as CNTK and QSGD have it."""
    net = _Net(3, 227)
    for out, kernel, size in ((96, 11, 55), (256, 5, 27), (384, 3, 13), (384, 3, 13), (256, 3, 13)):
        net.size = size
        net.conv(out, kernel, bias=True)
    for into, out in ((9216, 4096), (4096, 4096), (4096, 1000)):
        net.linear(into, out)
    return Description("alexnet", tuple(net.layers), 256, IMAGENET, "Krizhevsky et al. 2012, one tower")


def vgg19() -> Description:
    net = _Net(3, 224)
    for out, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            net.conv(out, 3, bias=True)
        net.pool()
    for into, out in ((25088, 4096), (4096, 4096), (4096, 1000)):
        net.linear(into, out)
    return Description("vgg19", tuple(net.layers), 32, IMAGENET, "Simonyan and Zisserman 2014, configuration E")


def _bottlenecks(net: _Net, width: int, count: int, stride: int) -> None:
    for number in range(count):
        into, step = net.channels, stride if number == 0 else 1
        net.conv(width, 1, norm=True)
        net.conv(width, 3, step, norm=True)
        net.conv(4 * width, 1, norm=True)
        if number == 0:
            net.conv(4 * width, 1, norm=True, into=into)


def _resnet(name: str, counts: tuple[int, ...], batch: int) -> Description:
    net = _Net(3, 224)
    net.conv(64, 7, 2, norm=True)
    net.pool()
    for stage, count in enumerate(counts):
        _bottlenecks(net, 64 << stage, count, 1 if stage == 0 else 2)
    net.linear(2048, 1000)
    return Description(name, tuple(net.layers), batch, IMAGENET, "He et al. 2015, stride in the 3x3 convolution")


resnet50: Build = partial(_resnet, "resnet50", (3, 4, 6, 3), 32)
resnet152: Build = partial(_resnet, "resnet152", (3, 8, 36, 3), 16)


def resnet110() -> Description:
    """For CIFAR-10: 54 blocks of two 3x3 convolutions, shortcuts without parameters."""
    net = _Net(3, 32)
    net.conv(16, 3, norm=True)
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        for number in range(18):
            net.conv(width, 3, stride if number == 0 else 1, norm=True)
            net.conv(width, 3, norm=True)
    net.linear(64, 10)
    return Description("resnet110", tuple(net.layers), 128, 50_000, "He et al. 2015, CIFAR-10")


# 1x1; 3x3 reduce, 3x3; double 3x3 reduce, double 3x3; pool projection; 0 where the branch is missing
INCEPTION: tuple[tuple[int, int, int, int, int, int, int], ...] = (
    (64, 64, 64, 64, 96, 32, 1),
    (64, 64, 96, 64, 96, 64, 1),
    (0, 128, 160, 64, 96, 0, 2),
    (224, 64, 96, 96, 128, 128, 1),
    (192, 96, 128, 96, 128, 128, 1),
    (160, 128, 160, 128, 160, 128, 1),
    (96, 128, 192, 160, 192, 128, 1),
    (0, 128, 192, 192, 256, 0, 2),
    (352, 192, 320, 160, 224, 128, 1),
    (352, 192, 320, 192, 224, 128, 1),
)


def _inception(net: _Net, row: tuple[int, int, int, int, int, int, int]) -> None:
    one, reduce3, three, reduce5, five, pooled, stride = row
    into, size = net.channels, net.size

    def branch(*convs: tuple[int, int, int]) -> None:
        net.channels, net.size = into, size
        for out, kernel, step in convs:
            # the reference implementation has a bias beside each batch norm
            net.conv(out, kernel, step, bias=True, norm=True)

    if one:
        branch((one, 1, 1))
    branch((reduce3, 1, 1), (three, 3, stride))
    branch((reduce5, 1, 1), (five, 3, 1), (five, 3, stride))
    if pooled:
        branch((pooled, 1, 1))
    net.channels = one + three + five + (pooled or into)
    net.size = -(-size // stride)


def bn_inception() -> Description:
    net = _Net(3, 224)
    net.conv(64, 7, 2, bias=True, norm=True)
    net.pool()
    net.conv(64, 1, bias=True, norm=True)
    net.conv(192, 3, bias=True, norm=True)
    net.pool()
    for row in INCEPTION:
        _inception(net, row)
    net.linear(1024, 1000)
    return Description("bn-inception", tuple(net.layers), 64, IMAGENET, "Ioffe and Szegedy 2015")


def lstm() -> Description:
    """About the 13 million parameters of the speech model in the QSGD paper, whose exact sizes are not published."""
    net, width, frames = _Net(0, 0), 1024, 100
    for into in (120, width):
        shapes = (4 * width, into), (4 * width, width), (4 * width,), (4 * width,)
        net.add(f"lstm{len(net.layers)}", shapes, 4 * width * (into + width) * frames, width * frames)
    net.linear(width, 132, frames)
    return Description("lstm", tuple(net.layers), 16, 948, "two layers of 1024 cells, 120 inputs, 132 outputs; AN4")


def _transformer(net: _Net, blocks: int, width: int, tokens: int, fused: bool) -> None:
    """Blocks of attention and a feed-forward net; attention's own products have no parameters."""
    for number in range(blocks):
        if fused:
            net.norm(width, tokens)
        for _ in range(1 if fused else 3):
            net.linear(width, 3 * width if fused else width, tokens)
        net.add(f"attention{number}", (), 2.0 * tokens * tokens * width, width * tokens)
        net.linear(width, width, tokens)
        net.norm(width, tokens)
        net.linear(width, 4 * width, tokens)
        net.linear(4 * width, width, tokens)
        if not fused:
            net.norm(width, tokens)


def _bert(name: str, blocks: int, width: int, tokens: int, batch: int) -> Description:
    """With both heads of pre-training; the output's weights are those of the embedding."""
    net, words = _Net(0, 0), 30_522
    net.add("embeddings", ((words, width), (512, width), (2, width)), 0.0, width * tokens)
    net.norm(width, tokens)
    _transformer(net, blocks, width, tokens, fused=False)
    net.linear(width, width)
    net.linear(width, width, tokens)
    net.norm(width, tokens)
    net.add("words", ((words,),), float(words * width * tokens), words * tokens)
    net.linear(width, 2)
    return Description(name, tuple(net.layers), batch, 2_500_000, f"Devlin et al. 2018; {tokens} tokens a sample")


bert_base: Build = partial(_bert, "bert-base", 12, 768, 64, 64)
bert_large: Build = partial(_bert, "bert-large", 24, 1024, 128, 8)


def gpt2() -> Description:
    """The small one, 124 million parameters; the output's weights are those of the embedding."""
    net, width, tokens, words = _Net(0, 0), 768, 1024, 50_257
    net.add("embeddings", ((words, width), (1024, width)), 0.0, width * tokens)
    _transformer(net, 12, width, tokens, fused=True)
    net.norm(width, tokens)
    net.add("words", (), float(words * width * tokens), words * tokens)
    return Description("gpt2", tuple(net.layers), 8, 8_000_000, "Radford et al. 2019; 1024 tokens a sample")


PARTS, SMALLEST_PART = 64, 100_000
TOKENS = 8192


def of_size(parameters: float) -> Description:
    """A model of which only the size is known: equal parts, every parameter used once for a token. A sample is one."""
    if not 1 <= parameters <= LARGEST:
        raise ValueError(f"--parameters: give their number, such as 10e9, from 1 to {LARGEST:g}; got {parameters:g}")
    whole = int(parameters)
    count = max(1, min(PARTS, whole // SMALLEST_PART))
    sizes = [whole // count + (part < whole % count) for part in range(count)]
    layers = tuple(Layer(f"part{number}", (size,), float(size)) for number, size in enumerate(sizes))
    size, unit = (whole / 1e9, "B") if whole >= 1e9 else (whole / 1e6, "M")
    return Description(f"{size:.3g} {unit} parameters", layers, TOKENS, source="equal parts; a sample is a token")


MODELS: dict[str, Build] = {
    "alexnet": alexnet,
    "vgg19": vgg19,
    "resnet50": resnet50,
    "resnet110": resnet110,
    "resnet152": resnet152,
    "bn-inception": bn_inception,
    "lstm": lstm,
    "bert-base": bert_base,
    "bert-large": bert_large,
    "gpt2": gpt2,
}
