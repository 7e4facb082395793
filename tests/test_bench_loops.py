"""The two loops by hand train the same weights, bit for bit, and those of the reference loop."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from lit_dp import LitClassifier, raw_ddp
from lit_dp.commands import bench_fit, bench_lightning, bench_loops
from lit_dp.commands.bench_clock import Clock
from lit_dp.commands.bench_jobs import JOBS, LEARNING_RATE, MOMENTUM, Data, scaled
from lit_dp.commands.bench_ranks import join, on_ranks
from lit_dp.datasets import InMemoryImages
from lit_dp.engine.parity import sha256
from tests.ranks import run_ranks
from tests.training import faulty_copy, leave

SAMPLES, EPOCHS = 90, 2  # an odd number a rank: the last batch is short


def trained(loop: str, job: str, root: Path, loops: Any = bench_loops) -> tuple[str, Any, int]:
    """SHA-256 of the weights, what the validation found, and the number of timed steps, on this rank."""
    join()
    data, clock = Data(job, str(root), SAMPLES), Clock()
    network, validated = getattr(loops, loop)(replace(JOBS[job], batch=8), data, EPOCHS, clock)
    leave()
    return sha256(dict(network.named_parameters())), validated, len(clock.steps())


def by_reference(job: str, root: Path) -> str:
    network = JOBS[job].build()
    module = LitClassifier(network, 10, lambda parameters: torch.optim.SGD(parameters, LEARNING_RATE, MOMENTUM))
    raw_ddp.fit(module, Scaled(Data(job, str(root), SAMPLES)), epochs=EPOCHS)
    return sha256(dict(network.named_parameters()))


class Scaled(LightningDataModule):
    def __init__(self, data: Data) -> None:
        super().__init__()
        images, labels = data.held(train=True)
        self.dataset = TensorDataset(scaled(images), labels)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, 8, shuffle=True)


@pytest.mark.parametrize("job", ["mlp", "cnn"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_loops_train_the_same_weights(job: str, ranks: int, tmp_path: Path) -> None:
    tutorial = run_ranks(ranks, trained, "tutorial", job, tmp_path)
    assert tutorial == run_ranks(ranks, trained, "tuned", job, tmp_path)
    weights, validated, steps = tutorial[0]
    assert {rank[0] for rank in tutorial} == {weights}
    assert validated.loss > 0
    assert steps == EPOCHS * (-(-SAMPLES // ranks // 8) - 1)
    if ranks == 2:
        assert run_ranks(2, by_reference, job, tmp_path) == [weights] * 2


def through_lightning(root: Path) -> str:
    trainer = bench_lightning.train(JOBS["cnn"], Data("cnn", str(root), SAMPLES), 2, str(root), max_epochs=EPOCHS)
    return weights_of(trainer)


def through_fit(root: Path) -> str:
    return weights_of(bench_fit.train(Data("cnn", str(root), SAMPLES), 2, EPOCHS, root))


def weights_of(trainer: Any) -> str:
    return sha256(dict(trainer.lightning_module.network.named_parameters()))


def by_hand(loop: str, root: Path, normalised: bool) -> str:
    join()
    data = Data("cnn", str(root), SAMPLES)
    mean, std = (255 * torch.tensor(values) for values in InMemoryImages(*data.held(train=True)).mean_and_std())
    if normalised:  # as ImageDataModule's, where a tutorial scales
        bench_loops.scaled = lambda images: (images.float() - mean) / std
    network, _ = getattr(bench_loops, loop)(JOBS["cnn"], data, EPOCHS, Clock())
    return sha256(dict(network.named_parameters()))


def test_trainers_train_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared is the same training: Lightning's of the tutorial's images, ours of normalised ones."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # which another test may have left, and Lightning shuffles by
    assert on_ranks(2, through_lightning, tmp_path) == on_ranks(2, by_hand, "tutorial", tmp_path, False)
    assert on_ranks(2, through_fit, tmp_path) == on_ranks(2, by_hand, "tuned", tmp_path, True)


def test_a_loop_that_trains_otherwise_is_seen(tmp_path: Path) -> None:
    right = run_ranks(2, trained, "tuned", "mlp", tmp_path)
    loops = faulty_copy(bench_loops, "optimizer.zero_grad()\n", "pass\n")
    assert run_ranks(2, trained, "tutorial", "mlp", tmp_path, loops)[0][0] != right[0][0]
