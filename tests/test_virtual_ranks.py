"""L2: with `virtual_ranks: V` the bits do not depend on how many processes run (here 1, 2, 4 and 8)."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lit_dp import raw_ddp
from lit_dp.engine import carry_stack
from lit_dp.engine.carry_stack import CarryStack
from lit_dp.engine.parity import Trace, first_difference, sha256
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.errors import ConfigError
from tests.ranks import run_ranks
from tests.training import Job, adamw, cosine, quiet_trainer, through_lightning, through_raw_loop

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


# --- the same bits on any number of processes ---

STATE = ("gradients/", "weights/", "buffers/", "optimizer_state/")


@dataclass(frozen=True)
class Result:
    """What a training left behind on one rank."""

    trace: Trace  # gradients, weights, buffers and optimizer state of every step
    metrics: dict[str, float]
    logged: list[dict[str, float]]  # what the logger got, step by step


class Recorded(Callback):
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:  # type: ignore
        if "seen" in trainer.callback_metrics and not trainer.fit_loop._should_accumulate():
            self.logged.append({"seen": float(trainer.callback_metrics["seen"])})


def train(job: Job, virtual_ranks: int | None, wrong: str = "", **kwargs: Any) -> Result:
    """Train on all ranks of this process; `wrong` names a fault to build in."""
    if wrong == "arrival":
        CarryStack.push = _push_in_order_of_arrival  # pyright: ignore[reportAttributeAccessIssue]
    if wrong == "threads" and os.environ["RANK"] == "1":
        os.environ["LIT_DP_CPU_THREADS"] = "2"
    recorded = Recorded()
    strategy = ExactDDPStrategy(virtual_ranks=virtual_ranks, timeout=30, **kwargs)
    trace: Trace = through_lightning(job, strategy, [recorded])
    kept = [{name: d for name, d in step.items() if name.startswith(STATE)} for step in trace]
    return Result(kept, {}, recorded.logged)


def _push_in_order_of_arrival(stack: CarryStack) -> None:
    gradients = [p.grad for p in stack.parameters]
    for p in stack.parameters:
        p.grad = None
    if stack._stack:
        gradients = [carry_stack._sum(a, b) for a, b in zip(stack._stack.pop()[1], gradients, strict=True)]
    stack._stack.append((0, gradients))


JOBS = {
    "adamw, clipping, schedule, validation": Job(75, 2, 2, adamw, cosine, "step", clip_norm=0.5, validate=True),
    "bf16": Job(64, 2, 1, bf16=True),
    "drop_last": Job(75, 2, 2, drop_last=True),
}


def on_raw_ranks(job: Job, world_size: int) -> Trace:
    """Rank 0 of the raw loop with the halving-doubling hook on as many processes as there are virtual ranks."""
    traces = run_ranks(world_size, through_raw_loop, job, raw_ddp, True, "halving_doubling")
    return [{name: d for name, d in step.items() if name.startswith(STATE)} for step in traces[0]]


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_bits_do_not_depend_on_the_number_of_processes(job: Job) -> None:
    raw = on_raw_ranks(job, 8)
    assert len(raw) >= 4
    for world_size in (1, 2, 4, 8):
        ours = run_ranks(world_size, train, job, 8)
        assert first_difference([ours[0].trace], [raw]) is None, f"{world_size} processes"


@dataclass(frozen=True)
class ChannelsLast(Job):
    """Weights that are dense in another order than that of their shape."""

    def build(self) -> Any:
        module, data = super().build()
        torch.manual_seed(1)
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(24, 4)
        module.network = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # pyright: ignore
        return module, data


def test_weights_in_another_memory_order() -> None:
    job = ChannelsLast(64, 2, 1)
    raw = on_raw_ranks(job, 4)
    for world_size in (1, 2, 4):
        ours = run_ranks(world_size, train, job, 4)
        assert first_difference([ours[0].trace], [raw]) is None, f"{world_size} processes"


def test_tail_exact_too() -> None:
    results = [run_ranks(w, train_with_tail, Job(75, 2, 2, adamw))[0].trace for w in (1, 2, 4)]
    assert first_difference([results[0]], [results[1]]) is None
    assert first_difference([results[0]], [results[2]]) is None


def train_with_tail(job: Job) -> Result:
    return train(job, 4, tail="exact")


def test_folding_in_order_of_arrival_is_found() -> None:
    right = run_ranks(1, train, Job(64, 2, 1), 8)[0].trace
    wrong = run_ranks(1, train, Job(64, 2, 1), 8, "arrival")[0].trace
    difference = first_difference([right], [wrong])
    assert difference is not None
    assert (difference.step, difference.part) == (0, "gradients")


def test_a_rank_with_another_number_of_threads_is_found() -> None:
    job = Wide(256, 32, 1)
    right = run_ranks(2, train, job, 2)
    wrong = run_ranks(2, train, job, 2, "threads")
    difference = first_difference([right[0].trace], [wrong[0].trace])
    assert difference is not None
    assert (difference.step, difference.tensor) == (0, "gradients/network.0.weight")


@dataclass(frozen=True)
class Wide(Job):
    """A convolution so large that two threads share the sums of its gradient."""

    def build(self) -> Any:
        module, data = super().build()
        torch.manual_seed(1)
        first, second = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        module.network = nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(32 * 36, 4))
        return module, data


# --- not about images: a transformer on text, with tied embeddings, LayerNorm and dropout ---


class Text(Dataset):
    """Overlapping windows of characters of this repository's own README."""

    def __init__(self) -> None:
        text = (Path(__file__).parents[1] / "README.md").read_bytes()[:1500]
        self.codes = torch.tensor(list(text), dtype=torch.int64) % 96

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.codes[index * 20 : index * 20 + 17]
        return piece[:-1], piece[1:]


class Transformer(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        self.body = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        codes, following = batch
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        logits = self.head(self.body(self.embedding(codes), src_mask=mask, is_causal=True))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        self.log("seen", loss, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train_on_text(virtual_ranks: int | None) -> tuple[str, list[dict[str, float]]]:
    seed_everything(1, verbose=False)
    module, recorded = Transformer(), Recorded()
    trainer = quiet_trainer(
        strategy=ExactDDPStrategy(virtual_ranks=virtual_ranks, timeout=30),
        max_epochs=2,
        log_every_n_steps=1,
        callbacks=[recorded],
    )
    trainer.fit(module, DataLoader(Text(), batch_size=2, shuffle=True))
    return sha256(module.state_dict()), recorded.logged


def test_transformer_and_logged_step_values() -> None:
    by_processes = {w: run_ranks(w, train_on_text, 4)[0] for w in (1, 2, 4)}
    assert len({weights for weights, _ in by_processes.values()}) == 1
    logged = [values for _, values in by_processes.values()]
    assert len(logged[0]) == 16  # 61 windows, 8 a step, 2 epochs
    assert logged[0] == logged[1] == logged[2]  # the mean over the global batch, not one process's last micro-batch
    other = run_ranks(2, train_on_text, 2)[0]
    assert other[0] != by_processes[2][0]  # another V is another training


# --- refused when it cannot be ---


@pytest.mark.parametrize(
    ("virtual", "kwargs", "words"),
    [
        (6, {}, ["virtual_ranks is 6", "power of two"]),
        (1, {}, ["1 virtual ranks cannot be placed on 2 processes"]),
        (4, {"accumulate_grad_batches": 2}, ["accumulate_grad_batches (here 2)"]),
        (4, {"all_reduce": "ring"}, ["'ring'", "halving_doubling"]),
        (4, {"all_reduce": "rign"}, ["'rign'", "ring"]),
        (4, {"module": "sync"}, ["SyncBatchNorm"]),
        (4, {"module": "manual"}, ["automatic optimization"]),
    ],
    ids=lambda value: str(value) if not isinstance(value, list) else None,
)
def test_refusals(virtual: int, kwargs: dict[str, Any], words: list[str]) -> None:
    for message in run_ranks(2, _refused, virtual, kwargs):
        for word in words:
            assert word in message


def _refused(virtual: int, kwargs: dict[str, Any]) -> str:
    module, data = Job().build()
    if kwargs.get("module") == "sync":
        module.network[1] = nn.SyncBatchNorm(4)  # pyright: ignore[reportIndexIssue]
    if kwargs.get("module") == "manual":
        module.automatic_optimization = False
    try:
        strategy = ExactDDPStrategy(virtual_ranks=virtual, all_reduce=kwargs.get("all_reduce", "native"), timeout=20)
        accumulate = kwargs.get("accumulate_grad_batches", 1)
        quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate).fit(module, datamodule=data)
    except ConfigError as error:
        return str(error)
    return ""
