"""The networks of the papers that are reproduced, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.study import linear_layers

DAVIDNET_LOGITS = 0.125


class _Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _conv(before: int, after: int, *, stride: int = 1, kernel: int = 3) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(after)]


def _conv_relu(before: int, after: int, *, stride: int = 1) -> list[nn.Module]:
    return [*_conv(before, after, stride=stride), nn.ReLU(inplace=True)]


def davidnet(classes: int = 10, width: int = 64) -> nn.Module:
    """David Page's nine-layer residual network for 32 x 32 pictures (6.6 million parameters at width 64)."""
    w = width
    layers: list[nn.Module] = [*_conv_relu(3, w)]
    for before, after, deep in ((w, 2 * w, True), (2 * w, 4 * w, False), (4 * w, 8 * w, True)):
        layers += [*_conv_relu(before, after), nn.MaxPool2d(2)]
        if deep:
            layers.append(_Residual(*_conv_relu(after, after), *_conv_relu(after, after)))
    layers += [nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8 * w, classes, bias=False), _Times(DAVIDNET_LOGITS)]
    return nn.Sequential(*layers)


class _Basic(nn.Module):
    """ResNet's basic block."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*_conv_relu(before, after, stride=stride), *_conv(after, after))
        same = stride == 1 and before == after
        self.short = nn.Identity() if same else nn.Sequential(*_conv(before, after, stride=stride, kernel=1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.short(x))


def resnet18(classes: int = 10, width: int = 64) -> nn.Module:
    """ResNet-18 in its form for 32 x 32 pictures: no stem pooling, widths 64-128-256-512 (11.2 million parameters)."""
    layers: list[nn.Module] = _conv_relu(3, width)
    before = width
    for stage in range(4):
        after = width << stage
        layers += [_Basic(before, after, 1 if stage == 0 else 2), _Basic(after, after, 1)]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def vgg19(classes: int = 1000, width: int = 64, side: int = 224) -> nn.Module:
    """Simonyan and Zisserman's configuration E, without dropout (143.7 million parameters)."""
    layers: list[nn.Module] = []
    before = 3
    for doubled, count in ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4)):
        for _ in range(count):
            layers += [nn.Conv2d(before, doubled * width, 3, padding=1), nn.ReLU(inplace=True)]
            before = doubled * width
        layers.append(nn.MaxPool2d(2))
    flat, hidden = before * (side // 32) ** 2, 64 * width
    return nn.Sequential(*layers, nn.Flatten(), linear_layers((flat, hidden, hidden, classes)))


class _Bottleneck(nn.Module):
    """ResNet's block of three convolutions, with the stride in the middle one."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        narrow, wide = _conv(before, width, kernel=1), _conv(width, 4 * width, kernel=1)
        self.inner = nn.Sequential(
            *narrow, nn.ReLU(inplace=True), *_conv(width, width, stride=stride), nn.ReLU(inplace=True), *wide
        )
        same = before == 4 * width
        self.short = nn.Identity() if same else nn.Sequential(*_conv(before, 4 * width, stride=stride, kernel=1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.short(x))


def resnet50(classes: int = 1000, width: int = 64) -> nn.Module:
    """He et al.'s network of 50 layers for 224 x 224 pictures (25.6 million parameters)."""
    layers: list[nn.Module] = [*_conv(3, width, stride=2, kernel=7), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    before = width
    for stage, count in enumerate((3, 4, 6, 3)):
        for number in range(count):
            layers.append(_Bottleneck(before, width << stage, 2 if stage and not number else 1))
            before = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


class _SpeechLstm(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(inputs, width, 2, batch_first=True), nn.Linear(width, outputs)

    def forward(self, x_BLF: Tensor) -> Tensor:
        return self.head(self.lstm(x_BLF)[0])


def speech_lstm(inputs: int = 120, width: int = 1024, outputs: int = 132) -> nn.Module:
    """Two layers of 1024 cells that label frames of speech (13.2 million parameters)."""
    return _SpeechLstm(inputs, width, outputs)


def small_cnn(classes: int = 10, channels: int = 1, side: int = 28, width: int = 16) -> nn.Module:
    """Two convolutions and a linear layer, for what must train in seconds."""
    after = side // 4
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * after * after, classes),
    )


class _Ones(nn.Module):
    """A vector of weights that multiplies its input and is summed: least squares without a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def least_squares(size: int = 10) -> nn.Module:
    """The convex problem on which Zamirai et al. show that nearest rounding of updates stalls."""
    return _Ones(size)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "davidnet": davidnet,
    "resnet18": resnet18,
    "mlp": linear_layers,
    "small-cnn": small_cnn,
}
