"""Pictures of a run. Figures are made without pyplot, which would keep them, and takes memory and time to import."""

import csv
from collections import defaultdict
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from torch import Tensor

from lit_dp.engine.step_parts import PARTS, StepTimes

Curves = dict[str, tuple[list[int], list[float]]]
"""x and y values by metric name."""


def read_metrics(path: Path) -> Curves:
    """Curves from a CSVLogger's metrics.csv: x is the epoch, counted from 1; non-numeric cells are left out."""
    curves: Curves = defaultdict(lambda: ([], []))
    with path.open() as file:
        for row in csv.DictReader(file):
            for name, cell in row.items():
                if name not in ("epoch", "step") and cell:
                    curves[name][0].append(int(row["epoch"]) + 1)
                    curves[name][1].append(float(cell))
    return dict(curves)


def draw_curves(metrics: Path, picture: Path) -> None:
    """One panel a metric, train and val in it: losses first, then whatever else was logged."""
    if not metrics.exists():
        return
    curves = read_metrics(metrics)
    panels: dict[str, list[str]] = defaultdict(list)
    for name in sorted(curves, key=lambda n: ("loss" not in n, n)):
        panels[name.split("/")[-1]].append(name)
    if not panels:
        return
    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, (title, names) in zip(axes[0], panels.items(), strict=True):
        for name in names:
            axis.plot(*curves[name], marker=".", label=name)
        axis.set(title=title, xlabel="epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(picture, dpi=110)


def draw_confusion(counts: Tensor, classes: list[str] | None, picture: Path) -> None:
    """Counts (true class, predicted class), each row coloured by its share; numbers where they fit."""
    n = len(counts)
    names = classes if classes is not None and len(classes) == n else [str(i) for i in range(n)]
    share = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    size = max(4.0, 0.45 * n + 1.5) if n <= 40 else 12.0
    figure = Figure(figsize=(size, size), layout="constrained")
    axis = figure.subplots()
    axis.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
    axis.set(xlabel="predicted", ylabel="true", title=f"{int(counts.trace()):,} of {int(counts.sum()):,} right")
    if n <= 40:
        axis.set_xticks(range(n), names, rotation=90)
        axis.set_yticks(range(n), names)
    if n <= 20:
        for true in range(n):
            for predicted in range(n):
                if count := int(counts[true, predicted]):
                    colour = "white" if share[true, predicted] > 0.5 else "black"
                    axis.text(predicted, true, str(count), ha="center", va="center", color=colour, fontsize=8)
    figure.savefig(picture, dpi=110)


def draw_step_profile(times: StepTimes, picture: Path) -> None:
    """A bar a rank: the parts of a mean step, end to end."""
    ranks = len(times.ranks)
    figure = Figure(figsize=(9, 1.6 + 0.4 * ranks), layout="constrained")
    axis = figure.subplots()
    colours = matplotlib.colormaps["tab10"].colors  # pyright: ignore[reportAttributeAccessIssue]
    ends, names = [0.0] * ranks, [f"rank {rank}" for rank in range(ranks)]
    for (part, title), colour in zip(PARTS.items(), colours, strict=False):
        lengths = times.milliseconds(part)
        if any(lengths):
            axis.barh(names, lengths, left=ends, label=title, color=colour, height=0.7)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds", title=f"a step, mean of {len(times.ranks[0].busy):,}")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.savefig(picture, dpi=110)
