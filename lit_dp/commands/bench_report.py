"""A benchmark's report: medians and quartiles over repetitions, tables, bench.json, and the folder that they lie in."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch

import lit_dp
from lit_dp.engine.run_folder import claim

ROOT = Path("runs")


class Spread(NamedTuple):
    """Median and quartiles of one value a repetition."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Quartiles lie between values that were seen (`inclusive`), however few there are."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        quartiles = "" if self.low == self.high else f" [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.median:.4g}{quartiles}"


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Repetition by repetition: what the machine did to both in the same repetition cancels."""
    return [value / of for value, of in zip(values, base, strict=True)]


def differences(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Repetition by repetition."""
    return [value - of for value, of in zip(values, base, strict=True)]


def alternated(things: Sequence[Any], repetition: int) -> list[Any]:
    """A B C in even repetitions, C B A in odd ones: a drift of the machine falls on all alike."""
    return list(things) if repetition % 2 == 0 else list(reversed(things))


def step_seconds(by_rank: Sequence[Sequence[float]], warm_up: int) -> float:
    """Median over the steps of a training, but for the first `warm_up`; a step takes as long as on its slowest rank.

    DDP's buckets stand from the third step on.
    """
    return statistics.median([max(step) for step in zip(*by_rank, strict=True)][warm_up:])


def environment() -> dict[str, str]:
    """Versions and hardware, as they stand beside every number."""
    peers = {"accelerate": version("accelerate")} if find_spec("accelerate") is not None else {}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "lit_dp": lit_dp.__version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        **peers,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": str(cores()),
        "gpus": ", ".join(gpus) or "none",
        "backend": "nccl" if gpus else "gloo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        "load average at the start": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "not known",
    }


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Table:
    """One table of a report; cells are text, the first column names the row."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Markdown with aligned columns: to be read in a terminal, and pasted into a README."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]

        def row(cells: list[str]) -> str:
            return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"

        rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
        notes = ["", *self.notes] if self.notes else []
        return "\n".join([self.title, "", row(self.header), rule, *map(row, self.rows), *notes])


@dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Attributes:
        benchmark: overhead, scaling or loader.
        command: what was typed.
        settings: the options that it ran with.
        tables: for people.
        results: for programs: every value of every repetition, with its unit in its name.
    """

    benchmark: str
    command: str
    settings: dict[str, Any]
    tables: list[Table]
    results: dict[str, Any]
    environment: dict[str, str] = field(default_factory=environment)

    def __str__(self) -> str:
        seen = ", ".join(f"{name} {value}" for name, value in self.environment.items())
        return "\n\n".join([*map(str, self.tables), seen, f"again: {self.command}"])

    def publish(self, folder: Path, draw: Callable[["Report", Path], None]) -> None:
        """Write bench.json and bench.png, and print."""
        content = {name: getattr(self, name) for name in ("benchmark", "command", "environment", "settings", "results")}
        (folder / "bench.json").write_text(json.dumps(content, indent=1) + "\n")
        draw(self, folder / "bench.png")
        print(self)
        print(f"in {folder}/: bench.json, bench.png")


def run_folder(name: str) -> Path:
    """A new folder below runs/bench."""
    return ROOT / claim(ROOT, f"bench/{name}")


def say(text: str) -> None:
    """How far the benchmark is: on standard error, so that the report can be piped."""
    print(text, file=sys.stderr, flush=True)
