"""`bench overhead`: a step, an epoch, the way to the first step and the memory of every kind of training."""

import gc
import shutil
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_dp.commands import bench_start
from lit_dp.commands.bench import MODELS, PARTS
from lit_dp.commands.bench_clock import held_megabytes, peak_megabytes, settle
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
    for plan in _plans(options, jobs, kinds, scratch) if {"steps", "memory"} & {*parts} else []:
        measured = steps(plan, parts)
        results["steps"].append(measured)
        tables.append(steps_table(measured))
    if "cnn" in jobs and "epochs" in parts:
        training = Training(Data("cnn", options.data), options.processes, options.epochs, scratch)
        measured = epochs(Plan(training, _possible(kinds, "cnn", options.processes), options.repetitions))
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
    measured: dict[str, Any] = _named(plan)
    if "steps" in parts:
        by_rank = on_ranks(plan.training.processes, timings, plan)
        measured["milliseconds_per_step"] = {
            kind: [
                1000 * step_seconds([rank[i][kind].steps for rank in by_rank], WARM_UP) for i in range(plan.repetitions)
            ]
            for kind in plan.kinds
        }
    if "memory" in parts:
        whole = plan.training.data.job == "cnn" and "epochs" in parts
        training = replace(plan.training, data=replace(plan.training.data, samples=None)) if whole else plan.training
        measured["memory_samples"] = training.data.samples or TRAINING
        measured |= _memory(plan.kinds, training)
    return measured


def epochs(plan: Plan) -> dict[str, Any]:
    """Seconds an epoch with its validation, by kind; as long as the slowest rank takes."""
    by_rank = on_ranks(plan.training.processes, timings, plan)
    seconds = {
        kind: [max(rank[i][kind].epoch for rank in by_rank) for i in range(plan.repetitions)] for kind in plan.kinds
    }
    accuracy = {kind: [timing[kind].accuracy for timing in by_rank[0]] for kind in plan.kinds}
    return {**_named(plan), "seconds_per_epoch": seconds, "accuracy": accuracy}


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


def timings(plan: Plan) -> list[dict[str, Timing]]:
    """On every rank: all kinds in turn, A B C and then C B A, in processes that they share; by repetition."""
    join()
    measured = []
    for repetition in range(plan.repetitions):
        begun, of_kind = time.monotonic(), {}
        for kind in alternated(plan.kinds, repetition):
            with terminal():
                of_kind[kind] = KINDS[kind].train(plan.training)
            gc.collect()  # what one kind leaves behind, the next shall not have to clean up
            settle()
        measured.append(of_kind)
        _say_progress(plan, repetition, time.monotonic() - begun)
    return measured


def _say_progress(plan: Plan, repetition: int, seconds: float) -> None:
    from lightning.pytorch.utilities import rank_zero_only

    if rank_zero_only.rank == 0:
        say(f"{plan.title}: repetition {repetition + 1} of {plan.repetitions}, {seconds:.0f} s")


def _memory(kinds: str, training: Training) -> dict[str, dict[str, float | None]]:
    """Peak memory of the rank that holds most, and how much of it was not there before the training; by kind."""
    peaks, above = {}, {}
    for kind in kinds:
        of_ranks = on_ranks(training.processes, peak_memory, kind, training)
        known = [(peak, start) for peak, start in of_ranks if peak is not None]
        peaks[kind] = max((peak for peak, _ in known), default=None)
        above[kind] = max((peak - start for peak, start in known), default=None)
    return {"peak_megabytes_per_rank": peaks, "megabytes_above_start_per_rank": above}


def peak_memory(kind: str, training: Training) -> tuple[float | None, float | None]:
    """In a fresh process: megabytes at the peak, and before the training. Imports are the same for all kinds."""
    start = held_megabytes()
    join()
    with terminal():
        KINDS[kind].train(training)
    return peak_megabytes(), start


def _chosen(given: list[str], possible: tuple[str, ...], option: str) -> list[str]:
    if unknown := [name for name in given if name not in possible]:
        raise ConfigError(f"--{option}: {unknown[0]!r} is none of {', '.join(possible)}")
    return [name for name in possible if name in given]
