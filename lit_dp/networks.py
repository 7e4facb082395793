"""Small reference networks: plain modules of plain arguments, so that YAML names them by class_path.

Any other `torch.nn.Module` serves as well, as long as it maps a batch of inputs to logits (B, num_classes).
"""

import torch
from torch import Tensor, nn


class SmallCNN(nn.Sequential):
    """Three stages, each at half the height and width of the one before, then a linear layer.

    Maps images float32 (B, in_channels, H, W) to logits (B, num_classes). H and W are 8 or more and need not be known:
    what the stages leave is averaged over its pixels. Six 3x3 convolutions, each with BatchNorm; three are residual
    (He et al. 2015, arXiv 1512.03385). Most depth is where an image is smallest and a layer is cheapest.
    At the default width 236,922 parameters, and 6.0 million multiply-adds per grey image of 28x28.

    Its weights lie in memory as channels_last: the same function, and 1.5 times the speed on a CPU.

    BatchNorm needs two values a channel in training: where H or W is under 16, two images or more a batch.

    Args:
        num_classes: logits per image.
        in_channels: 1 for grey images, 3 for colour.
        width: channels of the first stage; the second has 3 and the third 6 times as many.
        dropout: share of the averaged features that training sets to zero.
    """

    def __init__(self, num_classes: int, in_channels: int = 1, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__(
            _halve(in_channels, width),
            _halve(width, 3 * width),
            _Residual(3 * width),
            _halve(3 * width, 6 * width),
            _Residual(6 * width),
            _Residual(6 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(6 * width, num_classes),
        )
        self.to(memory_format=torch.channels_last)


class MLP(nn.Sequential):
    """Linear layers with ReLU between.

    Maps inputs float32 (B, ...) of `in_features` numbers each to logits (B, num_classes).

    Args:
        in_features: numbers per input, whatever its shape: 784 for an image of 28x28.
        hidden: units of every hidden layer, first to last; none makes it a linear classifier.
        num_classes: logits per input.
    """

    def __init__(self, in_features: int, hidden: list[int], num_classes: int) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for units in hidden:
            layers += [nn.Linear(in_features, units), nn.ReLU()]
            in_features = units
        super().__init__(*layers, nn.Linear(in_features, num_classes))


class _Residual(nn.Module):
    """x plus a convolution of x: (B, C, H, W) to the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(_conv3x3(channels, channels), nn.BatchNorm2d(channels), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def _halve(in_channels: int, out_channels: int) -> nn.Sequential:
    """(B, in_channels, H, W) to (B, out_channels, H // 2, W // 2).

    Pooled before BatchNorm and ReLU, which then cost a quarter.
    """
    return nn.Sequential(_conv3x3(in_channels, out_channels), nn.MaxPool2d(2), nn.BatchNorm2d(out_channels), nn.ReLU())


def _conv3x3(in_channels: int, out_channels: int) -> nn.Conv2d:
    """Without a bias, which the BatchNorm that follows would take away again."""
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
