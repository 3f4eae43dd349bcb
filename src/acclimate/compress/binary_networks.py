"""Reference networks for binary training: convolutions each with a shortcut of its own (Bi-Real), norm after the convolution."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from acclimate.compress.surge import SurgeConfig, binarize

Activation = Callable[[int], nn.Module]  # of so many channels


class _Step(nn.Module):
    """A 3 x 3 convolution, its norm, the shortcut, an activation. A stride is met on the shortcut by pooling and a 1 x 1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: Activation) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.AvgPool2d(stride), nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
            )
        self.act = activation(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)) + self.shortcut(x))


def hardtanh(channels: int) -> nn.Module:
    """An `activation` of the networks below."""
    return nn.Hardtanh()


def _resnet(
    stem: list[nn.Module],
    widths: list[int],
    depth: int,
    classes: int,
    config: SurgeConfig | None,
    activation: Activation,
) -> nn.Module:
    steps: list[nn.Module] = []
    width = widths[0]
    for stage, outputs in enumerate(widths):
        for place in range(depth):
            steps.append(_Step(width, outputs, 2 if stage and not place else 1, activation))
            width = outputs
    model = nn.Sequential(*stem, *steps, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    return binarize(model, config)


def surge_resnet20(
    classes: int = 10, config: SurgeConfig | None = None, activation: Activation = nn.PReLU
) -> nn.Module:
    """ResNet-20 for images of 3 x 32 x 32; `activation` makes what follows each shortcut: nn.PReLU or `hardtanh`."""
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)]
    return _resnet(stem, [16, 32, 64], 6, classes, config, activation)


def surge_resnet18(
    classes: int = 1000, config: SurgeConfig | None = None, small: bool = False, activation: Activation = nn.PReLU
) -> nn.Module:
    """ResNet-18 for images of 3 x 224 x 224; `small`: of 3 x 32 x 32. `activation` as in `surge_resnet20`."""
    stem: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.MaxPool2d(3, 2, 1)]
    if small:
        stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)]
    return _resnet(stem, [64, 128, 256, 512], 4, classes, config, activation)


def surge_vgg_small(classes: int = 10, config: SurgeConfig | None = None) -> nn.Module:
    """VGG-Small for images of 3 x 32 x 32."""
    layers: list[nn.Module] = []
    width = 3
    for place, outputs in enumerate((128, 128, 256, 256, 512, 512)):
        layers += [nn.Conv2d(width, outputs, 3, 1, 1, bias=False)]
        layers += [nn.MaxPool2d(2)] if place % 2 else []
        layers += [nn.BatchNorm2d(outputs), nn.Hardtanh()]
        width = outputs
    return binarize(nn.Sequential(*layers, nn.Flatten(), nn.Linear(512 * 16, classes)), config)
