"""L2 as a person meets it: `fit` on 1, 2, 4 and 8 processes leaves the same metrics.csv and the same state."""

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_dp.engine.parity import sha256
from tests.command import lit_dp
from tests.ranks import run_ranks

SHARED = Path(__file__).parents[2] / "shared/data"
V = 8
JOB = [
    *("--model.network.dropout", "0.2", "--model.optimizer", "torch.optim.AdamW", "--model.optimizer.lr", "1e-3"),
    *("--model.optimizer.weight_decay", "0.05", "--trainer.gradient_clip_val", "1.0"),
    *("--model.lr_scheduler", "lit_dp.recipes.WarmupCosine", "--model.lr_scheduler.total", "2"),
    *("--model.lr_scheduler.warmup", "1", "--trainer.max_epochs", "2", "--trainer.enable_model_summary", "false"),
    *("--data.augmentation", '[{"class_path": "torchvision.transforms.v2.RandomHorizontalFlip"}]'),
    *("--trainer.strategy.virtual_ranks", str(V), "--data.batch_size", "8"),
]
DATA = {
    "digits": ["--config", "digits", "--trainer.limit_train_batches", "6", "--trainer.limit_val_batches", "2"],
    "fashion_mnist": [
        *("--config", "fashion_mnist", "--data.root", SHARED),
        *("--trainer.limit_train_batches", "4", "--trainer.limit_val_batches", "2"),
    ],
}


def fit(data: str, processes: int, folder: Path, *more: str) -> tuple[str, dict[str, str]]:
    """metrics.csv, and SHA-256 of weights and buffers, and of the optimizer's state, after the last epoch."""
    folder = folder / f"{processes}{''.join(more)}"
    folder.mkdir()
    ended = lit_dp("fit", *DATA[data], *JOB, *more, ranks=processes, cwd=folder)
    assert [rank.code for rank in ended] == [0] * processes, ended[0].err
    run = folder / "runs" / data
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    state = checkpoint["optimizer_states"][0]["state"]
    moments = {f"{i}/{name}": torch.as_tensor(value) for i, entry in state.items() for name, value in entry.items()}
    digests = {"weights": sha256(checkpoint["state_dict"]), "optimizer": sha256(moments)}
    return (run / "metrics.csv").read_text(), digests


@pytest.mark.parametrize("data", DATA)
def test_fit_leaves_the_same_on_any_number_of_processes(data: str, tmp_path: Path) -> None:
    if data == "fashion_mnist" and not SHARED.exists():
        pytest.skip("Fashion-MNIST is not at hand")
    metrics, digests = fit(data, 1, tmp_path)
    assert len(metrics.splitlines()) == 5  # a header, and two lines an epoch
    for processes in (2, 4, 8):
        assert fit(data, processes, tmp_path) == (metrics, digests), f"{processes} processes"
    assert fit(data, 2, tmp_path, "--data.num_workers", "2") == (metrics, digests), "2 loader workers a rank"


def test_raw_loop_on_as_many_processes_has_the_same_weights(tmp_path: Path) -> None:
    whole = [arg for arg in DATA["digits"] if not arg.startswith("--trainer.limit") and arg not in ("6", "2")]
    (tmp_path / "ours").mkdir()
    ended = lit_dp("fit", *whole, *JOB, ranks=2, cwd=tmp_path / "ours")[0]
    assert ended.code == 0, ended.err
    ours = [line.split()[-1] for line in ended.out.splitlines() if line.startswith("weights SHA-256")]
    printed = run_ranks(V, _raw, [*whole, *JOB], tmp_path)
    assert printed[0].splitlines()[-2].split()[-1] == ours[0]


def _raw(args: list[str], cwd: Path) -> str:
    from lit_dp.raw_ddp import main

    os.chdir(cwd)
    sys.argv = ["raw_ddp", *map(str, args)]
    out: Any = io.StringIO()
    with contextlib.redirect_stdout(out):
        main()
    return out.getvalue()
