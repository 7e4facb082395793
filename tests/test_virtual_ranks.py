"""L2: with `virtual_ranks: V` the bits do not depend on how many processes run (here 1, 2, 4 and 8)."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lit_dp import raw_ddp
from lit_dp.engine import virtual_ranks
from lit_dp.engine.parity import Difference, Trace, first_difference, sha256
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.engine.virtual_ranks import CarryStack
from lit_dp.errors import ConfigError
from tests.ranks import run_ranks
from tests.training import Job, adamw, cosine, faulty_copy, quiet_trainer, through_lightning, through_raw_loop


# --- the part of the tree inside a process ---


def tree_sum(leaves: list[Tensor]) -> Tensor:
    """((0 + 1) + (2 + 3)) + ..., by definition."""
    while len(leaves) > 1:
        leaves = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
def test_carry_stack_adds_along_the_tree(k: int) -> None:
    leaves = list(torch.randn(k, 1000, generator=torch.Generator().manual_seed(k)).unbind())
    parameter = nn.Parameter(torch.zeros(1000))
    stack, copies = CarryStack([parameter]), []
    for leaf in leaves[:-1]:
        parameter.grad = leaf.clone()
        stack.push()
        copies.append(len(stack._stack))
        assert parameter.grad is None
    parameter.grad = leaves[-1].clone()
    stack.fold()
    assert torch.equal(parameter.grad, tree_sum(leaves))
    assert max(copies, default=0) <= k.bit_length() - 1  # log2 k
    if k >= 4:  # and the order of arrival would not do
        assert not torch.equal(parameter.grad, sum(leaves[1:], leaves[0]))


def test_carry_stack_keeps_unused_parameters_apart() -> None:
    used, unused, sometimes = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    stack = CarryStack([used, unused, sometimes])
    for i in range(4):
        used.grad = torch.full((3,), float(i))
        sometimes.grad = torch.full((3,), -0.0) if i == 1 else None
        if i < 3:
            stack.push()
    stack.fold()
    assert used.grad is not None
    assert used.grad.tolist() == [6.0] * 3
    assert unused.grad is None
    assert sometimes.grad is not None
    assert not sometimes.grad.signbit().any()  # DDP's zeros for the others make a plus of it
