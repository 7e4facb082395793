"""The picture of each benchmark: bench.png in its run folder. Every one says on what machine it was measured."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lit_dp.commands.bench_report import Report, Spread, ratios

WORK, EXPOSED, OTHER, LINE = "#4c78a8", "#e45756", "#9a9a9a", "#333333"


def draw_overhead(report: Report, picture: Path) -> None:
    """A panel a measurement: each kind as a multiple of the tuned loop (of torchrun at the start), with quartiles."""
    results = report.results
    panels = [(f"a step\n{m['title']}", m["kinds"], m.get("milliseconds_per_step"), "b") for m in results["steps"]]
    panels += [(f"whole epochs\n{m['title']}", m["kinds"], m["seconds_per_epoch"], "b") for m in results["epochs"]]
    panels += [(m["title"], m["kinds"], m["seconds_to_first_step"], "torchrun") for m in results["start"]]
    drawn = [panel for panel in panels if panel[2] is not None and panel[3] in panel[2]]
    if not drawn:
        return
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    height = 0.42 * max(len(panel[1]) for panel in drawn) + 1.4
    figure = Figure(figsize=(7.0 * columns, height * rows + 0.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, panel in zip(axes.flat, drawn, strict=False):
        _ratios(axis, *panel)
    for axis in axes.flat[len(drawn) :]:
        axis.axis("off")
    _save(figure, report, picture)


def _ratios(axis: Any, title: str, kinds: dict[str, str], values: dict[str, list[float]], base: str) -> None:
    spreads = [Spread.of(ratios(values[kind], values[base])) for kind in kinds]
    axis.axvline(1.0, color=LINE, linewidth=0.8, zorder=0)
    for place, (kind, spread) in enumerate(zip(kinds, spreads, strict=True)):
        colour = OTHER if kind == base else WORK
        axis.hlines(place, spread.low, spread.high, color=colour, linewidth=5, alpha=0.35)
        axis.plot(spread.median, place, marker="o", color=colour)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
        text = f"{spread.median:.3f}"
        axis.annotate(text, (spread.high, place), (8, 0), textcoords="offset points", va="center", bbox=box)
    axis.set_yticks(range(len(kinds)), [f"({kind}) {t}" if len(kind) == 1 else t for kind, t in kinds.items()])
    axis.set_ylim(len(kinds) - 0.4, -0.6)
    axis.margins(x=0.2)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(f"time, as a multiple of: {kinds[base]} (median, quartiles)", fontsize=9)
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def draw_scaling(report: Report, picture: Path) -> None:
    """Step time by processes, strong and weak: work, and communication that work does not hide; and bus bandwidth."""
    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    axes = figure.subplots(1, 3)
    every = report.results["rows"]
    for axis, regime in zip(axes, ("strong", "weak"), strict=False):
        _stacked(axis, regime, [row for row in every if row["regime"] == regime])
    gigabytes: dict[str, list[float]] = {}
    for row in every:
        if row["processes"] > 1:
            of_both = gigabytes.setdefault(str(row["processes"]), [])
            of_both += [value / 1e9 for value in row["bus_bytes_per_second"]]
    axes[2].set(title="bus bandwidth of the gradient's all-reduce", xlabel="processes", ylabel="GB/s")
    if gigabytes:
        _bars(axes[2], list(gigabytes), [Spread.of(values) for values in gigabytes.values()], OTHER)
    else:
        axes[2].text(0.5, 0.5, "one process sends nothing", ha="center", transform=axes[2].transAxes)
    figure.suptitle(report.results["title"], fontsize=11)
    _save(figure, report, picture)


def _stacked(axis: Any, regime: str, rows: list[dict[str, Any]]) -> None:
    steps = [Spread.of(row["milliseconds_per_step"]) for row in rows]
    alone = [Spread.of(row["milliseconds_without_communication"]).median for row in rows]
    work = [min(by_itself, step.median) for by_itself, step in zip(alone, steps, strict=True)]
    exposed = [step.median - part for step, part in zip(steps, work, strict=True)]
    names = [str(row["processes"]) for row in rows]
    axis.bar(names, work, color=WORK, label="work", width=0.6)
    axis.bar(names, exposed, bottom=work, color=EXPOSED, label="exposed communication", width=0.6)
    _whiskers(axis, steps)
    for place, (row, step) in enumerate(zip(rows, steps, strict=True)):
        text = f"{step.median:.3g} ms\n{Spread.of(row['efficiency']).median:.0%}"
        axis.annotate(text, (place, step.high), (0, 6), textcoords="offset points", ha="center")
    what = "a step has the same samples" if regime == "strong" else "a process has the same samples"
    emulated = rows[0]["emulated_milliseconds_per_layer"] is not None
    axis.set_title(f"{regime} scaling{', emulated' if emulated else ''}: {what}", fontsize=11)
    axis.set(xlabel="processes (above: step time, efficiency)", ylabel="ms a step")
    axis.legend(frameon=False, loc="upper left", ncols=2)
    _plain(axis, len(rows), 1.35 * max(step.high for step in steps))


def draw_loader(report: Report, picture: Path) -> None:
    """Samples a second that loaders deliver, by workers, against what the model consumes."""
    results = report.results
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axis = figure.subplots()
    rates = {int(workers): Spread.of(values) for workers, values in results["loader_samples_per_second"].items()}
    _bars(axis, [str(workers) for workers in rates], list(rates.values()), WORK)
    consumed = Spread.of(results["model_samples_per_second"])
    axis.axhspan(consumed.low, consumed.high, color=EXPOSED, alpha=0.25, linewidth=0)
    axis.axhline(consumed.median, color=EXPOSED, label=f"the model consumes {consumed.median:,.0f}")
    axis.set_ylim(0, 1.25 * max(spread.high for spread in (*rates.values(), consumed)))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    title = f"{results['title']}\nsuggested: {results['suggested_workers']} workers; limit: {results['limit']}"
    axis.set_title(title, fontsize=10)
    axis.set(xlabel="workers", ylabel="samples a second and process")
    axis.legend(frameon=False, loc="upper right")
    _save(figure, report, picture)


def _bars(axis: Any, names: list[str], spreads: list[Spread], colour: str) -> None:
    axis.bar(names, [spread.median for spread in spreads], color=colour, width=0.6)
    _whiskers(axis, spreads)
    for place, spread in enumerate(spreads):
        text = f"{spread.median:,.0f}" if spread.median >= 100 else f"{spread.median:.3g}"
        axis.annotate(text, (place, spread.high), (0, 4), textcoords="offset points", ha="center")
    _plain(axis, len(names), 1.2 * max(spread.high for spread in spreads))


def _whiskers(axis: Any, spreads: list[Spread]) -> None:
    medians = [spread.median for spread in spreads]
    below, above = ([abs(getattr(spread, side) - spread.median) for spread in spreads] for side in ("low", "high"))
    axis.errorbar(range(len(spreads)), medians, [below, above], fmt="none", ecolor=LINE, elinewidth=1, capsize=4)


def _plain(axis: Any, bars: int, top: float) -> None:
    middle, half = (bars - 1) / 2, max(bars, 3) / 2 + 0.1  # few bars are not drawn as wide as a wall
    axis.set_xlim(middle - half, middle + half)
    axis.set_ylim(0, top)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, report: Report, picture: Path) -> None:
    seen = report.environment
    versions = ", ".join(f"{name} {seen[name]}" for name in ("torch", "lightning", "python", "OMP_NUM_THREADS"))
    figure.supxlabel(f"{seen['cpu']}, {seen['cores']} cores, GPUs: {seen['gpus']}; {versions}", fontsize=7.5)
    figure.savefig(picture, dpi=110)
