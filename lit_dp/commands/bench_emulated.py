"""A net whose backward sleeps where it would compute: many ranks fit on few cores, and what they exchange is real."""

import time
from typing import Any

import torch
from torch import Tensor, nn

from lit_dp.commands.bench_jobs import CLASSES

LAYERS, WIDTH = 8, 256
"""2.1 MB of gradients, which DDP exchanges in two buckets."""


class EmulatedNet(nn.Module):
    """Linear layers whose backward sleeps: inputs (B, WIDTH) to logits (B, CLASSES).

    The sleep of a layer comes before its gradients, as computing would.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _Sleep.apply(layer(x).relu(), self.seconds)
        return x[:, :CLASSES]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None
