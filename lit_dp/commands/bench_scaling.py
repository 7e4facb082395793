"""`bench scaling`: a small net on 1, 2, 4 ... processes through `exact_ddp`, and what communication adds to a step.

Strong: a step has the same samples on any number of processes. Weak: a process has. What is not hidden is what a step
takes less what it takes without communication: as many processes side by side, each training by itself on as much work.

With emulated compute a backward sleeps where it would compute: many ranks fit on few cores, and only what they exchange
is real. Every line then says so.
"""

import statistics
import time
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lit_dp import LitClassifier, Trainer
from lit_dp.commands.bench_clock import settle
from lit_dp.commands.bench_emulated import WIDTH, EmulatedNet
from lit_dp.commands.bench_jobs import CLASSES, WARM_UP
from lit_dp.commands.bench_lightning import StepClock
from lit_dp.commands.bench_pictures import draw_scaling
from lit_dp.commands.bench_ranks import meet, on_ranks
from lit_dp.commands.bench_report import Report, alternated, environment, run_folder, say, step_seconds
from lit_dp.commands.bench_scaling_report import Cell, rows, table, title
from lit_dp.engine.marks import settle_device
from lit_dp.errors import ConfigError
from lit_dp.networks import SmallCNN

EXCHANGES = 10
REGIMES = ("strong", "weak")


def run(options: Namespace) -> None:
    """Measure, print the report, and save it in a run folder."""
    seen, cells, emulated = environment(), cells_of(options), options.emulate_ms_per_layer
    runs: dict[Cell, list[dict[str, float]]] = {cell: [] for cell in cells}
    for repetition in range(options.repetitions):
        begun = time.monotonic()
        for cell in alternated(cells, repetition):
            runs[cell].append(measure(cell))
        mark, seconds = ", emulated" * (emulated is not None), time.monotonic() - begun
        say(f"scaling{mark}: repetition {repetition + 1} of {options.repetitions}, {seconds:.0f} s")
    results = {"title": title(emulated), "emulated": emulated is not None, "rows": rows(runs)}
    names = ("processes", "repetitions", "steps", "batch", "emulate_ms_per_layer")
    settings = {name: getattr(options, name) for name in names}
    report = Report("scaling", options.command, settings, [table(results)], results, seen)
    report.publish(run_folder(options.name), draw_scaling)


def cells_of(options: Namespace) -> list[Cell]:
    """Every regime on every number of processes.

    Raises:
        ConfigError: the batch cannot be shared.
    """
    if uneven := [n for n in options.processes if options.batch % n]:
        raise ConfigError(f"--batch {options.batch} has no {uneven[0]} equal parts: give a multiple of it")
    if torch.cuda.is_available() and max(options.processes) > torch.cuda.device_count():
        raise ConfigError(f"--processes {max(options.processes)}, and there are {torch.cuda.device_count()} GPUs")
    whole = options.emulate_ms_per_layer
    cells = []
    for regime in REGIMES:
        for processes in options.processes:
            share = processes if regime == "strong" else 1
            sleep = None if whole is None else whole / 1000 / share
            cells.append(Cell(regime, processes, options.batch // share, options.steps, sleep))
    return cells


def measure(cell: Cell) -> dict[str, float]:
    """Seconds a step, the same without communication, and of an all-reduce of the gradient alone."""
    together = on_ranks(cell.processes, trained, cell, True)
    step = step_seconds([seconds for seconds, _ in together], WARM_UP)
    if cell.processes == 1:
        return {"step": step, "alone": step, "all_reduce": 0.0, "bytes": together[0][1]["bytes"]}
    alone = on_ranks(cell.processes, trained, cell, False, joined=False)
    exchanges = [exchange for _, exchange in together]
    slowest = max(exchange["seconds"] for exchange in exchanges)
    without = step_seconds([seconds for seconds, _ in alone], WARM_UP)
    return {"step": step, "alone": without, "all_reduce": slowest, "bytes": exchanges[0]["bytes"]}


def trained(cell: Cell, joined: bool) -> tuple[list[float], dict[str, float]]:
    """On every rank: seconds of each step through `exact_ddp`, and of an all-reduce of as many bytes as gradients."""
    processes = cell.processes if joined else 1
    samples = (WARM_UP + cell.steps + 1) * cell.batch * processes
    torch.manual_seed(0)
    network = SmallCNN(CLASSES) if cell.sleep is None else EmulatedNet(cell.sleep)
    shape = (1, 28, 28) if cell.sleep is None else (WIDTH,)
    data = TensorDataset(torch.rand(samples, *shape), torch.randint(CLASSES, (samples,)))
    clock = _MeetingClock()
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=processes,
        strategy="exact_ddp",
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitClassifier(network, CLASSES), DataLoader(data, cell.batch, shuffle=True))
    size = sum(p.numel() for p in network.parameters())
    seconds = _exchange_seconds(size, trainer.strategy.root_device) if processes > 1 else 0.0
    return clock.clock.steps(), {"bytes": 4.0 * size, "seconds": seconds}


class _MeetingClock(StepClock):
    """Processes that train each by itself begin together all the same: they share the machine, as in a training."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        meet()
        super().on_train_start(trainer, pl_module)


def _exchange_seconds(size: int, device: torch.device) -> float:
    tensor, seconds = torch.zeros(size, device=device), []
    for _ in range(3 + EXCHANGES):
        settle()
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        settle_device()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[3:])
