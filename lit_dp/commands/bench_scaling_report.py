"""The rows and the table of `bench scaling`: efficiency, exposed communication, bus bandwidth."""

from dataclasses import dataclass
from typing import Any

import torch

from lit_dp.collectives.cost import bus_bandwidth
from lit_dp.commands.bench_emulated import LAYERS
from lit_dp.commands.bench_report import Spread, Table, cores, differences, ratios


@dataclass(frozen=True)
class Cell:
    """One row of the table: a regime on a number of processes.

    Attributes:
        batch: samples a process and step.
        sleep: seconds that the backward of a layer sleeps; None computes.
    """

    regime: str
    processes: int
    batch: int
    steps: int
    sleep: float | None


def rows(runs: dict[Cell, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Every value of every repetition, by regime and processes.

    Efficiency is against the fewest processes of the regime, N0, in the same repetition: strong (N0 t(N0)) / (N t(N)),
    weak t(N0) / t(N).
    """
    found = []
    for cell, values in runs.items():
        base = next(other for other in runs if other.regime == cell.regime)
        steps, alone = ([1000 * value[name] for value in values] for name in ("step", "alone"))
        scale = base.processes / cell.processes if cell.regime == "strong" else 1.0
        of_base = [1000 * value["step"] for value in runs[base]]
        found.append(
            {
                "regime": cell.regime,
                "processes": cell.processes,
                "samples_per_process": cell.batch,
                "emulated_milliseconds_per_layer": None if cell.sleep is None else 1000 * cell.sleep,
                "gradient_bytes": values[0]["bytes"],
                "milliseconds_per_step": steps,
                "milliseconds_without_communication": alone,
                "exposed_milliseconds": differences(steps, alone),
                "efficiency": [scale * ratio for ratio in ratios(of_base, steps)],
                "all_reduce_milliseconds": [1000 * value["all_reduce"] for value in values],
                "bus_bytes_per_second": [
                    bus_bandwidth(cell.processes, int(value["bytes"]), value["all_reduce"])
                    if value["all_reduce"]
                    else 0.0
                    for value in values
                ],
            }
        )
    return found


def table(results: dict[str, Any]) -> Table:
    """A line a regime and number of processes."""
    header = ["scaling", "processes", "samples a process", "ms a step", "without communication", "exposed ms"]
    header += ["efficiency", "all-reduce alone, ms", "bus GB/s"]
    lines = []
    for row in results["rows"]:
        peers = row["processes"] > 1
        bandwidth = [value / 1e9 for value in row["bus_bytes_per_second"]]
        lines.append(
            [
                row["regime"] + (", emulated" if results["emulated"] else ""),
                str(row["processes"]),
                str(row["samples_per_process"]),
                str(Spread.of(row["milliseconds_per_step"])),
                str(Spread.of(row["milliseconds_without_communication"])) if peers else "-",
                str(Spread.of(row["exposed_milliseconds"])) if peers else "-",
                str(Spread.of(row["efficiency"])),
                str(Spread.of(row["all_reduce_milliseconds"])) if peers else "-",
                str(Spread.of(bandwidth)) if peers else "-",
            ]
        )
    size = results["rows"][0]["gradient_bytes"]
    notes = [
        "Without communication: as many processes side by side, each by itself on as much work. Exposed: the rest.",
        f"Bus bandwidth as nccl-tests defines it, of an all-reduce of {size:,.0f} bytes, the gradient's.",
    ]
    most = max(row["processes"] for row in results["rows"])
    if most > cores() and not results["emulated"] and not torch.cuda.is_available():
        notes.append(f"{most} processes share {cores()} cores: what they lose to one another is not communication.")
    return Table(results["title"], header, lines, notes)


def title(emulated: float | None) -> str:
    if emulated is None:
        return "Scaling of exact_ddp: SmallCNN, 28x28 images"
    return f"Scaling of exact_ddp: {LAYERS} layers, compute emulated by {emulated:g} ms of sleep a layer in backward"
