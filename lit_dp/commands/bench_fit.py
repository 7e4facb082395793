"""(d) and (e): `exact_ddp` as `fit` runs it. The config goes through the same LightningCLI as a person's."""

import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lit_dp.cli import LitCLI
from lit_dp.commands.bench_jobs import CLASSES, JOBS, LEARNING_RATE, MOMENTUM, Data, network
from lit_dp.commands.bench_lightning import StepClock
from lit_dp.data import ImageDataModule
from lit_dp.datasets import Contents, InMemoryImages, Source


class BenchData(ImageDataModule):
    """ImageDataModule, with a job's samples as its dataset: the same that the other kinds train and validate on.

    Args:
        job, root, samples: as in `bench_jobs.Data`.
        batch_size: as ImageDataModule's.
    """

    def __init__(self, job: str, root: str, samples: int | None = None, batch_size: int = 32) -> None:
        super().__init__(dataset=job, batch_size=batch_size)
        self.samples = Data(job, root, samples)

    def _source(self) -> Source:
        return _Held(self.samples)


class _Held(Source):
    def __init__(self, data: Data) -> None:
        self.data = data

    def load(self) -> Contents:
        parts: dict[str, Any] = {"train": InMemoryImages(*self.data.held(train=True))}
        parts["val"] = parts["test"] = InMemoryImages(*self.data.held(train=False))
        return Contents([str(label) for label in range(CLASSES)], parts)


def config(data: Data, processes: int, epochs: int, root: Path, virtual_ranks: int | None = None) -> dict[str, Any]:
    """What `fit --config` reads. With virtual ranks a step has the samples that it has without."""
    batch = JOBS[data.job].batch * processes // (virtual_ranks or processes)
    # Weight decay, too: jsonargparse would keep that of AdamW, the argument's default
    settings = {"lr": LEARNING_RATE, "momentum": MOMENTUM, "weight_decay": 0.0}
    optimizer = {"class_path": "torch.optim.SGD", "init_args": settings}
    built = {"class_path": f"{network.__module__}.{network.__name__}", "init_args": {"job": data.job}}
    model = {"num_classes": CLASSES, "network": built, "optimizer": optimizer}
    samples = {"job": data.job, "root": data.root, "samples": data.samples, "batch_size": batch}
    clock = {"class_path": f"{StepClock.__module__}.{StepClock.__name__}"}
    strategy = {"class_path": "lit_dp.ExactDDPStrategy", "init_args": {"virtual_ranks": virtual_ranks}}
    return {
        "name": f"fit-{data.job}",
        "model": {"class_path": "lit_dp.LitClassifier", "init_args": model},
        "data": {"class_path": f"{BenchData.__module__}.{BenchData.__name__}", "init_args": samples},
        "trainer": {
            "devices": processes,
            "max_epochs": epochs,
            "strategy": strategy,
            "default_root_dir": str(root),
            "callbacks": [clock],
        },
    }


def train(data: Data, processes: int, epochs: int, root: Path, virtual_ranks: int | None = None) -> Trainer:
    """Run `fit` in this process, one of the ranks; the Trainer that did."""
    file = root / f"fit-{os.getpid()}.yaml"
    file.write_text(json.dumps(config(data, processes, epochs, root, virtual_ranks)))  # JSON is YAML, too
    return LitCLI(args=["fit", "--config", str(file)]).trainer
