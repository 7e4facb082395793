"""`bench loader`: what a config's training loader delivers, what its model consumes, how many workers that takes."""

import itertools
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch.utils.data import DataLoader

from lit_dp.cli import LitCLI
from lit_dp.commands.bench_jobs import WARM_UP
from lit_dp.commands.bench_loader_report import limit, suggestion, table
from lit_dp.commands.bench_pictures import draw_loader
from lit_dp.commands.bench_ranks import on_ranks
from lit_dp.commands.bench_report import Report, Spread, alternated, cores, environment, run_folder, say
from lit_dp.engine.loaders import copy_with
from lit_dp.engine.marks import settle_device
from lit_dp.engine.optimizers import optimizer_and_schedulers
from lit_dp.engine.peers import Peers
from lit_dp.engine.sharding import Sharder
from lit_dp.errors import ConfigError
from lit_dp.usage import DEFAULT_CONFIG

MAX_WORKERS = 8


def run(options: Namespace) -> None:
    """Measure in a process of its own, print the report, and save it in a run folder."""
    seen = environment()
    arguments = [part for name in options.config or [DEFAULT_CONFIG] for part in ("--config", name)] + options.rest
    results = on_ranks(1, measured, arguments, options)[0]
    settings = {"repetitions": options.repetitions, "batches": options.batches, "arguments": arguments}
    report = Report("loader", options.command, settings, [table(results)], results, seen)
    report.publish(run_folder(options.name), draw_loader)


def measured(arguments: list[str], options: Namespace) -> dict[str, Any]:
    """Samples a second of the loader with each number of workers, of the copy and of the model; what follows."""
    cli = LitCLI(args=arguments, run=False)
    processes = options.processes or cli.trainer.num_devices
    side = Side.of(cli, processes)
    counts = options.workers if options.workers is not None else default_workers()
    delivered: dict[int, list[float]] = {count: [] for count in counts}
    copied, consumed = [], []
    as_read = next(iter(side.loader_with(0)))
    step = side.step(side.prepared(as_read))
    for repetition in range(options.repetitions):
        for count in alternated(counts, repetition):
            delivered[count].append(side.batch_size / loading_seconds(side.loader_with(count), options.batches))
        copied.append(side.batch_size / _seconds_each(partial(side.prepared, as_read), options.batches))
        consumed.append(side.batch_size / _seconds_each(step, options.batches))
        say(f"loader: repetition {repetition + 1} of {options.repetitions}")
    medians = {count: Spread.of(rates).median for count, rates in delivered.items()}
    need, spare = Spread.of(consumed).median, max(0, cores() // processes - 1)
    workers, why = suggestion(medians, need, spare)
    return {
        "title": f"{' '.join(a for a in arguments if a != '--config')}: batches of {side.batch_size}",
        "processes": processes,
        "spare_cores_per_process": spare,
        "batch_size": side.batch_size,
        "loader_samples_per_second": {str(count): rates for count, rates in delivered.items()},
        "copy_samples_per_second": copied,
        "model_samples_per_second": consumed,
        "workers_of_the_config": side.loader.num_workers,
        "limit": limit(medians, Spread.of(copied).median, need, workers),
        "suggested_workers": workers,
        "why": why,
    }


@dataclass(frozen=True)
class Side:
    """One rank's part of a configured training, without a Trainer's run: its loader and its model."""

    module: Any
    datamodule: Any
    loader: DataLoader[Any]
    batch_size: int
    device: torch.device
    bf16: bool

    @classmethod
    def of(cls, cli: LitCLI, processes: int) -> "Side":
        """As `fit` would set it up on `processes`.

        Raises:
            ConfigError: the training loader does not batch a dataset of known length.
        """
        data, module = cli.datamodule, cli.model
        data.planned_world_size = processes  # pyright: ignore[reportAttributeAccessIssue]
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        if not isinstance(loader, DataLoader) or loader.batch_size is None or not hasattr(loader.dataset, "__len__"):
            raise ConfigError("bench loader measures a DataLoader with a batch_size, over a dataset of known length")
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        module.to(device).train()
        module.log = module.log_dict = lambda *args, **kwargs: None  # there is no Trainer to log to
        return cls(module, data, loader, loader.batch_size, device, cli.trainer.precision == "bf16-mixed")

    def loader_with(self, workers: int) -> Any:
        """The loader as `exact_ddp` reads it, with its draws that follow the sample; full batches only."""
        changed = {"num_workers": workers, "persistent_workers": workers > 0, "drop_last": True}
        if workers:
            changed["prefetch_factor"] = self.loader.prefetch_factor or 2
        sampler = {"batch_sampler": torch.utils.data.BatchSampler(self.loader.sampler, self.batch_size, drop_last=True)}
        loader = copy_with(self.loader, None, **changed, **sampler)
        return Sharder(Peers(0, 1), 0, "pad", seeded_draws=True).share_out(loader, "train", 0)

    def prepared(self, batch: Any) -> Any:
        """On the device, as a training step gets it."""
        batch = move_data_to_device(batch, self.device)
        return self.datamodule.on_after_batch_transfer(batch, 0)

    def step(self, batch: Any) -> Any:
        """Forward, backward and optimizer step on one batch that is kept."""
        optimizer, _ = optimizer_and_schedulers(self.module)
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)

        def once() -> None:
            optimizer.zero_grad()
            with autocast:
                output = self.module.training_step(batch, 0)
            (output["loss"] if isinstance(output, dict) else output).backward()
            optimizer.step()

        return once


def default_workers() -> list[int]:
    """0, 1, 2, 4 ... up to the cores there are."""
    most = min(MAX_WORKERS, cores())
    return sorted({0, 1, most, *(2**power for power in range(4) if 2**power <= most)})


def loading_seconds(loader: Any, batches: int) -> float:
    """Seconds a batch, once what workers had prepared before is used up; epochs follow each other. Workers end with
    the loader, so that none of them disturbs the next measurement."""
    delivered = _endless(loader)
    for _ in range(WARM_UP + loader.num_workers * (loader.prefetch_factor or 0)):
        next(delivered)
    begun = time.perf_counter()
    for _ in range(batches):
        next(delivered)
    return (time.perf_counter() - begun) / batches


def _endless(loader: Any) -> Iterator[Any]:
    for epoch in itertools.count():
        if callable(set_epoch := getattr(loader.batch_sampler, "set_epoch", None)):
            set_epoch(epoch)
        yield from loader


def _seconds_each(function: Any, times: int) -> float:
    for _ in range(WARM_UP):
        function()
    settle_device()
    begun = time.perf_counter()
    for _ in range(times):
        function()
    settle_device()
    return (time.perf_counter() - begun) / times
