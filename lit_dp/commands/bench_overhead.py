"""`bench overhead`: a step, an epoch, the way to the first step and the memory of every kind of training."""

import shutil
import statistics
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lit_dp.commands import bench_start
from lit_dp.commands.bench import MODELS, PARTS
from lit_dp.commands.bench_clock import held_megabytes, peak_megabytes
from lit_dp.commands.bench_jobs import JOBS, TRAINING, WARM_UP, Data
from lit_dp.commands.bench_kinds import KINDS, Timing, Training, left_out
from lit_dp.commands.bench_overhead_report import epochs_table, start_table, steps_table
from lit_dp.commands.bench_pictures import draw_overhead
from lit_dp.commands.bench_ranks import join, on_ranks, terminal
from lit_dp.commands.bench_report import Report, alternated, environment, run_folder, say, step_seconds
from lit_dp.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """Trainings of several kinds, in turn, in one set of processes."""

    training: Training
    kinds: str
    repetitions: int

    @property
    def title(self) -> str:
        processes = self.training.processes
        on = f"{processes} processes" if processes > 1 else "1 process"
        return f"{JOBS[self.training.data.job].title}, {on}, {self.training.data.origin}"


def run(options: Namespace) -> None:
    """Measure what was asked for, print the report, and save it in a run folder.

    Raises:
        ConfigError: a kind or part is not known, or there are too few samples for the steps.
    """
    seen, parts = environment(), _chosen(options.parts.split(","), PARTS, "parts")
    jobs: list[str] = list(MODELS) if options.model == "all" else [options.model]
    kinds = "".join(_chosen(list(options.kinds), tuple(KINDS), "kinds"))
    for job in jobs:
        _refuse(job, options)
    folder = run_folder(options.name)
    scratch = folder / "scratch"
    scratch.mkdir()
    try:
        results, tables = _measured(options, jobs, kinds, parts, scratch.absolute())
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(scratch)
    names = ("model", "processes", "repetitions", "steps", "epochs", "data", "kinds", "parts")
    settings = {name: getattr(options, name) for name in names}
    Report("overhead", options.command, settings, tables, results, seen).publish(folder, draw_overhead)


def _refuse(job: str, options: Namespace) -> None:
    a_step, data = JOBS[job].batch * options.processes, Data(job, options.data)
    if data.real and (WARM_UP + options.steps + 1) * a_step > TRAINING:
        most = TRAINING // a_step - WARM_UP - 1
        raise ConfigError(f"--steps {options.steps}: {data.origin} has {TRAINING:,} samples, enough for {most} steps")


def _measured(options: Namespace, jobs: list[str], kinds: str, parts: list[str], scratch: Path) -> tuple[dict, list]:
    results: dict[str, Any] = {"steps": [], "epochs": [], "start": []}
    tables = []
    for plan in _plans(options, jobs, kinds, scratch):
        by_epochs = plan.training.data.job == "cnn" and "epochs" in parts  # there its memory is measured, too
        if "steps" not in parts and ("memory" not in parts or by_epochs):
            continue
        measured = steps(plan, parts)
        results["steps"].append(measured)
        tables.append(steps_table(measured))
    if "cnn" in jobs and "epochs" in parts:
        training = Training(Data("cnn", options.data), options.processes, options.epochs, scratch)
        measured = epochs(Plan(training, _possible(kinds, "cnn", options.processes), options.repetitions), parts)
        results["epochs"].append(measured)
        tables.append(epochs_table(measured))
    if "start" in parts:
        measured = bench_start.measure(options.processes, options.repetitions, options.data, scratch)
        results["start"].append(measured)
        tables.append(start_table(measured))
    return results, tables


def _plans(options: Namespace, jobs: list[str], kinds: str, scratch: Path) -> list[Plan]:
    """A job on the processes that were asked for; the MLP, which is nothing but overhead, on one as well."""
    where = [(job, n) for job in jobs for n in ((1, options.processes) if job == "mlp" else (options.processes,))]
    plans = []
    for job, processes in dict.fromkeys(where):
        samples = (WARM_UP + options.steps + 1) * JOBS[job].batch * processes
        training = Training(Data(job, options.data, samples), processes, 1, scratch)
        plans.append(Plan(training, _possible(kinds, job, processes), options.repetitions))
    return plans


def _possible(kinds: str, job: str, processes: int) -> str:
    return "".join(kind for kind in kinds if left_out(kind, job, processes) is None)


def steps(plan: Plan, parts: list[str]) -> dict[str, Any]:
    """Milliseconds a step and peak memory, by kind."""
    measured, runs = _named(plan), trained(plan)
    if "steps" in parts:
        measured["milliseconds_per_step"] = {
            kind: [1000 * step_seconds([rank.timing.steps for rank in run[kind]], WARM_UP) for run in runs]
            for kind in plan.kinds
        }
    return measured | (_memory(plan, runs) if "memory" in parts else {})


def epochs(plan: Plan, parts: list[str]) -> dict[str, Any]:
    """Seconds an epoch with its validation, as long as the slowest rank takes, and peak memory; by kind."""
    runs = trained(plan)
    seconds = {kind: [max(rank.timing.epoch for rank in run[kind]) for run in runs] for kind in plan.kinds}
    accuracy = {kind: [run[kind][0].timing.accuracy for run in runs] for kind in plan.kinds}
    measured = {**_named(plan), "seconds_per_epoch": seconds, "accuracy": accuracy}
    return measured | (_memory(plan, runs) if "memory" in parts else {})


def _named(plan: Plan) -> dict[str, Any]:
    training = plan.training
    titles = {kind: KINDS[kind].title for kind in plan.kinds}
    missing = {kind: why for kind in KINDS if (why := left_out(kind, training.data.job, training.processes))}
    return {
        "title": plan.title,
        "job": training.data.job,
        "processes": training.processes,
        "data": training.data.origin,
        "kinds": titles,
        "left_out": missing,
    }


class OfRank(NamedTuple):
    """What one rank took for a training: time, and megabytes at the peak and before."""

    timing: Timing
    peak: float | None
    before: float | None


def trained(plan: Plan) -> list[dict[str, list[OfRank]]]:
    """All kinds in turn, A B C and then C B A, each in processes of its own, as a person starts it: what allocator and
    libraries have learnt from one kind does not serve another. By repetition, kind and rank."""
    runs = []
    for repetition in range(plan.repetitions):
        begun = time.monotonic()
        run = {
            kind: on_ranks(plan.training.processes, train, kind, plan.training)
            for kind in alternated(plan.kinds, repetition)
        }
        runs.append(run)
        say(f"{plan.title}: repetition {repetition + 1} of {plan.repetitions}, {time.monotonic() - begun:.0f} s")
    return runs


def train(kind: str, training: Training) -> OfRank:
    """On every rank. Imports are the same for all kinds."""
    before = held_megabytes()
    join()
    with terminal():
        timing = KINDS[kind].train(training)
    return OfRank(timing, peak_megabytes(), before)


def _memory(plan: Plan, runs: list[dict[str, list[OfRank]]]) -> dict[str, Any]:
    """Peak memory of the rank that holds most, and what of it the training took: medians of repetitions, by kind."""
    peaks, above = {}, {}
    for kind in plan.kinds:
        known = [[(r.peak, r.peak - r.before) for r in run[kind] if r.peak is not None and r.before] for run in runs]
        most = [max(of_ranks) for of_ranks in known if of_ranks]
        peaks[kind] = statistics.median(peak for peak, _ in most) if most else None
        above[kind] = statistics.median(taken for _, taken in most) if most else None
    return {
        "memory_samples": plan.training.data.samples or TRAINING,
        "peak_megabytes_per_rank": peaks,
        "megabytes_above_start_per_rank": above,
    }


def _chosen(given: list[str], possible: tuple[str, ...], option: str) -> list[str]:
    if unknown := [name for name in given if name not in possible]:
        raise ConfigError(f"--{option}: {unknown[0]!r} is none of {', '.join(possible)}")
    return [name for name in possible if name in given]
