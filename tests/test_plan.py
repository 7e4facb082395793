"""The plan says beforehand what the training then does."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_dp.engine.plan import BUCKET_BYTES, FIRST_BUCKET_BYTES, PrintPlan, gradient_buckets
from tests.command import lit_dp
from tests.ranks import run_ranks
from tests.training import Job, cosine, momentum, quiet_trainer


def rows(text: str) -> dict[str, str]:
    found = re.findall(r"^([a-z-]+(?: [a-z]+)?)  +(.*)$", text, re.MULTILINE)
    return dict(reversed(found))  # the plan comes first


NETWORKS = {
    "small": lambda: nn.Linear(10, 10),
    "one of exactly the first limit": lambda: nn.Linear(512, 512, bias=False),
    "several buckets": lambda: nn.Sequential(*(nn.Linear(1200, 1200) for _ in range(12))),
    "frozen parts": lambda: nn.Sequential(nn.Linear(600, 600).requires_grad_(False), nn.Linear(600, 600)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_buckets_are_those_of_ddp(name: str) -> None:
    network = NETWORKS[name]()
    total, buckets = gradient_buckets(network)
    assert total == sum(p.numel() * 4 for p in network.parameters() if p.requires_grad)
    assert run_ranks(1, _ddp_buckets, name) == [buckets]


def _ddp_buckets(name: str) -> int:
    dist.init_process_group("gloo")
    network = NETWORKS[name]()
    model = DistributedDataParallel(network)
    features = next(p for p in network.parameters() if p.ndim == 2).shape[1]
    for _ in range(3):  # DDP builds its buckets anew after the first step
        model(torch.ones(2, features)).sum().backward()
    return len(model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))


def test_limits_are_those_of_ddp() -> None:
    assert run_ranks(1, _ddp_limits) == [(FIRST_BUCKET_BYTES, BUCKET_BYTES)]


def _ddp_limits() -> tuple[int, int]:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(2, 2))
    return dist._DEFAULT_FIRST_BUCKET_BYTES, model.bucket_bytes_cap  # pyright: ignore[reportPrivateImportUsage]


class Steps(Callback):
    """Samples of every optimizer step on this rank, by epoch."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self._samples = self._seen = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:  # type: ignore
        self._samples += len(batch[0])
        if trainer.global_step > self._seen:
            self.taken.append(self._samples)
            self._samples, self._seen = 0, trainer.global_step


def _train(job: Job, limit: int | None) -> list[int]:
    module, data = job.build()
    steps = Steps()
    trainer = quiet_trainer(
        max_epochs=job.epochs,
        accumulate_grad_batches=job.accumulate,
        limit_train_batches=limit,
        callbacks=[steps, PrintPlan()],
    )
    trainer.fit(module, datamodule=data)
    return steps.taken


@pytest.mark.parametrize(
    ("job", "limit", "expected"),
    [
        (Job(samples=64, batch_size=4, epochs=2), None, "64 samples in 8 steps"),
        (Job(samples=61, batch_size=4, epochs=1), None, "61 samples in 8 steps, the last of 6, pads 1"),
        (Job(samples=61, drop_last=True, epochs=1), None, "61 samples in 7 steps, drops 5"),
        (Job(samples=61, accumulate=3, epochs=1), None, "61 samples in 3 steps, the last of 14, pads 1"),
        (Job(samples=64, epochs=1), 3, "64 samples in 3 steps, stops 5 batches before the end"),
    ],
    ids=["even", "padded", "dropped", "accumulated", "limited"],
)
def test_printed_plan_is_what_happens(
    job: Job, limit: int | None, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    by_rank = run_ranks(2, _train, job, limit)
    plan = rows(capfd.readouterr().out)
    assert plan["epoch"] == expected
    steps = [sum(counts) for counts in zip(*by_rank, strict=True)]
    assert len(steps) == int(plan["training"].split("= ")[1].split()[0])
    assert max(steps) == int(plan["batch"].split("= ")[1].split()[0])
    if "last of" in expected:
        assert steps[-1] == int(expected.split("last of ")[1].split(",")[0])


def test_scheduler_that_ends_early_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, _train, Job(lr_scheduler=cosine, epochs=9, optimizer=momentum), 1)
    assert rows(capfd.readouterr().out)["lr schedule"].endswith("over 7 of 9: it ends before the training")


def test_plan_command_says_the_same_without_training(tmp_path: Path) -> None:
    ended = lit_dp("plan", "--devices", "2", "--trainer.max_epochs", "1", cwd=tmp_path)[0]
    assert ended.code == 0, ended.err
    planned = rows(ended.out)
    assert not (tmp_path / "runs").exists()
    printed = rows(lit_dp("fit", "--trainer.max_epochs", "1", ranks=2, cwd=tmp_path)[0].out)
    assert planned["processes"].split(",")[0] == printed["processes"].split(",")[0]
    for name in ("batch", "epoch", "order", "training", "learning rate", "lr schedule", "all-reduce"):
        assert planned[name] == printed[name]
    assert printed["run folder"] == "runs/digits"


def test_plan_command_for_devices_that_are_not_here(tmp_path: Path) -> None:
    args = ("--data.batch_size", "null", "--data.global_batch_size", "256")
    ended = lit_dp("plan", "--devices", "8", "--nodes", "4", *args, cwd=tmp_path)[0]
    assert ended.code == 0, ended.err
    planned = rows(ended.out)
    assert planned["processes"].startswith("4 hosts x 8 devices = 32")
    assert planned["batch"] == "8 a device x 32 x 1 accumulated = 256 a step"
    assert planned["epoch"] == "1,258 samples in 5 steps, pads 22"
