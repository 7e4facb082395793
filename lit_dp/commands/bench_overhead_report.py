"""The tables of `bench overhead`: every kind beside the two loops by hand."""

from typing import Any

from lit_dp.commands.bench_report import Spread, Table, differences, ratios

BASES = ("a", "b")
"""The loops by hand: what every kind is a multiple of."""


def steps_table(measured: dict[str, Any]) -> Table:
    """Milliseconds a step and peak memory; on one process also microseconds above the loops."""
    steps = measured.get("milliseconds_per_step")
    header, rows, notes = ["kind"], _labels(measured), _missing(measured)
    if steps is not None:
        _add(header, rows, "ms a step", [str(Spread.of(steps[kind])) for kind in measured["kinds"]])
        for base in BASES:
            _add(header, rows, f"of ({base})", [_ratio(steps, kind, base) for kind in measured["kinds"]])
        if measured["processes"] == 1:
            for base in BASES:
                _add(header, rows, f"µs above ({base})", [_above(steps, kind, base) for kind in measured["kinds"]])
    _add_memory(header, rows, notes, measured)
    return Table(f"A step: {measured['title']}", header, rows, notes)


def epochs_table(measured: dict[str, Any]) -> Table:
    """Seconds an epoch with its validation."""
    seconds, kinds = measured["seconds_per_epoch"], list(measured["kinds"])
    header, rows, notes = ["kind"], _labels(measured), _missing(measured)
    _add(header, rows, "s an epoch", [str(Spread.of(seconds[kind])) for kind in kinds])
    for base in BASES:
        _add(header, rows, f"of ({base})", [_ratio(seconds, kind, base) for kind in kinds])
    _add(header, rows, "accuracy", [f"{Spread.of(measured['accuracy'][kind]).median:.4f}" for kind in kinds])
    notes.append("An epoch: training, validation with loss and accuracy, and, in (c) to (e), logs and checkpoints.")
    _add_memory(header, rows, notes, measured)
    return Table(f"Whole epochs: {measured['title']}", header, rows, notes)


def start_table(measured: dict[str, Any]) -> Table:
    """Seconds to the first step, and memory until then, of interpreters that import what they need only."""
    seconds, kinds = measured["seconds_to_first_step"], list(measured["kinds"])
    header, rows = ["command"], [[measured["kinds"][kind]] for kind in kinds]
    _add(header, rows, "s to the first step", [str(Spread.of(seconds[kind])) for kind in kinds])
    _add(header, rows, "of torchrun's", [_ratio(seconds, kind, "torchrun") for kind in kinds])
    peaks = measured["peak_megabytes_by_then"]
    _add(header, rows, "peak MB a rank by then", [_number(Spread.of(peaks[kind]).median) for kind in kinds])
    return Table(f"The start: {measured['title']}", header, rows)


def _labels(measured: dict[str, Any]) -> list[list[str]]:
    return [[f"({kind}) {title}"] for kind, title in measured["kinds"].items()]


def _missing(measured: dict[str, Any]) -> list[str]:
    return [f"({kind}) is left out: {why}." for kind, why in measured["left_out"].items()]


def _add(header: list[str], rows: list[list[str]], name: str, cells: list[str]) -> None:
    header.append(name)
    for row, cell in zip(rows, cells, strict=True):
        row.append(cell)


def _add_memory(header: list[str], rows: list[list[str]], notes: list[str], measured: dict[str, Any]) -> None:
    peaks = measured.get("peak_megabytes_per_rank")
    if peaks is None:
        return
    _add(header, rows, "peak MB a rank", [_number(peaks[kind]) for kind in measured["kinds"]])
    _add(header, rows, "of (b)", [_ratio_of_numbers(peaks, kind, "b") for kind in measured["kinds"]])
    above = measured["megabytes_above_start_per_rank"]
    _add(header, rows, "MB above its start", [_number(above[kind]) for kind in measured["kinds"]])
    notes.append(
        f"Memory: VmHWM of fresh processes that train once on {measured['memory_samples']:,} samples, all kinds"
        " with the same imports; their start is what they hold before."
    )


def _ratio(values: dict[str, list[float]], kind: str, base: str) -> str:
    return str(Spread.of(ratios(values[kind], values[base]))) if base in values and kind != base else "-"


def _above(milliseconds: dict[str, list[float]], kind: str, base: str) -> str:
    if base not in milliseconds or kind == base:
        return "-"
    return str(Spread.of([1000 * ms for ms in differences(milliseconds[kind], milliseconds[base])]))


def _ratio_of_numbers(values: dict[str, float | None], kind: str, base: str) -> str:
    value, of = values[kind], values.get(base)
    return f"{value / of:.3f}" if value is not None and of and kind != base else "-"


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.0f}"
