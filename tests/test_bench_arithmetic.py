"""What `bench` makes of times: medians, quartiles, ratios, efficiency, exposed communication, bandwidth, workers."""

from dataclasses import replace

import pytest

from lit_dp.commands.bench_loader_report import limit, suggestion
from lit_dp.commands.bench_overhead_report import epochs_table, start_table, steps_table
from lit_dp.commands.bench_report import Spread, Table, alternated, differences, ratios, step_seconds
from lit_dp.commands.bench_scaling_report import Cell, rows, table


def test_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == (3.0, 2.0, 4.0)
    assert Spread.of([1.0, 2.0]) == (1.5, 1.25, 1.75)
    assert Spread.of([7.0]) == (7.0, 7.0, 7.0)
    assert str(Spread.of([1.0, 2.0])) == "1.5 [1.25, 1.75]"
    assert str(Spread.of([7.0])) == "7"


def test_ratios_are_of_the_same_repetition() -> None:
    """What slows all kinds down in one repetition is in none of the ratios."""
    kind, base = [2.0, 4.0, 9.0], [1.0, 2.0, 3.0]
    assert ratios(kind, base) == [2.0, 2.0, 3.0]
    assert differences(kind, base) == [1.0, 2.0, 6.0]
    assert Spread.of(ratios(kind, base)).median == 2.0
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], base)


def test_repetitions_alternate() -> None:
    assert [alternated("abc", repetition) for repetition in range(3)] == [[*"abc"], [*"cba"], [*"abc"]]


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    first, second = [9.0, 9.0, 1.0, 5.0, 1.0], [9.0, 8.0, 2.0, 1.0, 3.0]
    assert step_seconds([first, second], warm_up=2) == 3.0  # of 2, 5 and 3; each rank's own median is 1 or 2


def test_table_is_aligned_markdown() -> None:
    lines = str(Table("A title", ["kind", "ms"], [["a", "12.5"], ["longer", "1"]], ["A note."])).splitlines()
    assert lines == [
        "A title",
        "",
        "| kind   | ms   |",
        "|--------|------|",
        "| a      | 12.5 |",
        "| longer | 1    |",
        *("", "A note."),
    ]


# --- scaling ---


def cells() -> dict[Cell, list[dict[str, float]]]:
    def value(step: float, alone: float, all_reduce: float) -> dict[str, float]:
        return {"step": step, "alone": alone, "all_reduce": all_reduce, "bytes": 1e6}

    return {
        Cell("strong", 1, 64, 10, None): [value(0.8, 0.8, 0.0), value(1.6, 1.6, 0.0)],
        Cell("strong", 4, 16, 10, None): [value(0.25, 0.2, 0.01), value(0.4, 0.3, 0.02)],
        Cell("weak", 1, 64, 10, None): [value(0.8, 0.8, 0.0), value(1.6, 1.6, 0.0)],
        Cell("weak", 4, 64, 10, None): [value(1.0, 0.9, 0.01), value(1.6, 1.6, 0.02)],
    }


def test_efficiency_exposed_communication_and_bandwidth() -> None:
    strong_1, strong_4, _, weak_4 = rows(cells())
    assert strong_1["efficiency"] == [1.0, 1.0]
    assert strong_4["efficiency"] == pytest.approx([0.8, 1.0])  # 0.8 / (4 x 0.25), 1.6 / (4 x 0.4)
    assert weak_4["efficiency"] == pytest.approx([0.8, 1.0])  # 0.8 / 1.0, 1.6 / 1.6
    assert strong_4["exposed_milliseconds"] == pytest.approx([50.0, 100.0])
    assert weak_4["exposed_milliseconds"] == pytest.approx([100.0, 0.0])
    # nccl-tests: S / t x 2 (N - 1) / N
    assert strong_4["bus_bytes_per_second"] == pytest.approx([1e6 / 0.01 * 1.5, 1e6 / 0.02 * 1.5])
    assert strong_1["bus_bytes_per_second"] == [0.0, 0.0]


def test_efficiency_is_against_the_fewest_processes_that_were_measured() -> None:
    runs = {cell: values for cell, values in cells().items() if cell.processes == 4}
    assert [row["efficiency"] for row in rows(runs)] == [[1.0, 1.0], [1.0, 1.0]]


def test_only_emulated_lines_say_so() -> None:
    runs = cells()
    lines = str(table({"title": "", "emulated": False, "rows": rows(runs)})).splitlines()
    assert not any("emulated" in line for line in lines)
    emulated = {replace(cell, sleep=0.001): values for cell, values in runs.items()}
    lines = str(table({"title": "", "emulated": True, "rows": rows(emulated)})).splitlines()
    assert sum("emulated" in line for line in lines if line.startswith(("| strong", "| weak"))) == 4


# --- overhead ---


def test_overhead_tables_hold_ratios_by_repetition() -> None:
    kinds = {"a": "tutorial loop", "b": "tuned loop", "d": "exact_ddp (fit)"}
    named = {"title": "MLP", "processes": 1, "kinds": kinds, "left_out": {"f": "accelerate is not installed"}}
    steps = {"a": [2.0, 4.0], "b": [1.0, 2.0], "d": [1.5, 3.0]}
    peaks, above = {"a": 400.0, "b": 200.0, "d": 210.0}, {"a": 3.0, "b": 2.0, "d": None}
    measured = {**named, "milliseconds_per_step": steps, "peak_megabytes_per_rank": peaks, "memory_samples": 9}
    made = steps_table({**measured, "megabytes_above_start_per_rank": above})
    row = dict(zip(made.header[1:4], made.rows[2][1:4], strict=True))
    assert row == {"ms a step": "2.25 [1.875, 2.625]", "of (a)": "0.75", "of (b)": "1.5"}
    assert made.rows[2][4:6] == ["-750 [-875, -625]", "750 [625, 875]"]  # microseconds above (a) and (b)
    assert made.rows[2][6:] == ["210", "1.050", "not known"]
    assert made.notes[0] == "(f) is left out: accelerate is not installed."

    made = epochs_table({**named, "seconds_per_epoch": steps, "accuracy": {kind: [0.5, 0.7] for kind in kinds}})
    assert made.rows[2] == ["(d) exact_ddp (fit)", "2.25 [1.875, 2.625]", "0.75", "1.5", "0.6000"]


def test_start_is_compared_with_torchrun() -> None:
    kinds = {"torchrun": "torchrun, tutorial loop", "fit": "python -m lit_dp fit"}
    seconds, peaks = {"torchrun": [3.0, 4.0], "fit": [3.3, 4.4]}, {"torchrun": [100.0, 100.0], "fit": [120.0, 130.0]}
    named = {"title": "", "kinds": kinds, "seconds_to_first_step": seconds, "peak_megabytes_by_then": peaks}
    made = start_table(named)
    assert made.rows[0][2] == "-"
    assert made.rows[1][2].startswith("1.1")
    assert made.rows[1][3] == "125"


# --- loader ---


@pytest.mark.parametrize(
    ("delivered", "spare", "workers", "why"),
    [
        ({0: 100_000.0, 1: 9.0}, 3, 0, "loading in the process itself takes 1.0% of a step"),
        ({0: 500.0, 1: 600.0, 2: 1100.0, 4: 2000.0}, 3, 2, "the fewest that deliver what the model consumes"),
        ({0: 100.0, 1: 90.0, 2: 180.0, 4: 360.0}, 3, 2, "the most that 3 spare cores a process deliver"),
        ({0: 500.0, 1: 2000.0}, 0, 0, "no core is left for workers"),
    ],
)
def test_suggested_workers(delivered: dict[int, float], spare: int, workers: int, why: str) -> None:
    suggested, because = suggestion(delivered, 1000.0, spare)
    assert suggested == workers
    assert why in because


@pytest.mark.parametrize(
    ("delivered", "copied", "workers", "limits"),
    [
        ({0: 5000.0}, 9000.0, 0, "model"),
        ({0: 5000.0}, 900.0, 0, "copy to the device"),
        ({0: 300.0, 1: 280.0, 2: 560.0}, 9000.0, 2, "decoding and augmentation"),
        ({0: 900.0, 1: 200.0, 2: 210.0, 4: 220.0}, 9000.0, 2, "workers"),
        ({0: 300.0, 1: 280.0}, 9000.0, 0, "decoding and augmentation"),
    ],
)
def test_what_limits(delivered: dict[int, float], copied: float, workers: int, limits: str) -> None:
    assert limit(delivered, copied, 1000.0, workers).startswith(limits)
