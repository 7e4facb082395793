"""`bench`: it runs from the command to the picture, and its arithmetic is right. No speed is asserted."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from lit_dp.commands import bench, bench_fit, bench_overhead, bench_start
from lit_dp.commands.bench_jobs import CLASSES, Data
from lit_dp.commands.bench_kinds import KINDS, Training, left_out
from lit_dp.commands.bench_ranks import on_ranks, terminal
from lit_dp.errors import ConfigError, RunError

CLUSTER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LIT_DP_SUPERVISED", "LIT_DP_CPU_THREADS")


@pytest.fixture
def benched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs a benchmark in an empty folder; its bench.json and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[dict[str, Any], str]:
        before = dict(os.environ)
        bench.main(list(arguments))
        assert dict(os.environ) == before
        folder = tmp_path / "runs/bench" / arguments[0]
        assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.png"]  # no scratch
        with Image.open(folder / "bench.png") as picture:
            assert picture.size[0] > 600
        found, printed = json.loads((folder / "bench.json").read_text()), capfd.readouterr().out
        for name in ("torch", "lightning", "python", "cpu", "cores", "gpus", "OMP_NUM_THREADS"):
            assert f"{name} {found['environment'][name]}" in printed
        assert f"again: OMP_NUM_THREADS=1 python -m lit_dp bench {' '.join(arguments)}" in printed
        return found, printed

    return run


def test_overhead(benched: Any) -> None:
    found, printed = benched("overhead", "--model", "mlp", "--repetitions", "1", "--steps", "2", "--parts", "steps")
    alone, together = found["results"]["steps"]
    assert (alone["processes"], together["processes"]) == (1, 2)
    measured = {kind for kind in KINDS if left_out(kind, "mlp", 2) is None}
    assert measured >= {*"abcdeg"}
    for table in (alone, together):
        assert {kind: len(values) for kind, values in table["milliseconds_per_step"].items()} == dict.fromkeys(
            measured, 1
        )
        assert all(value > 0 for values in table["milliseconds_per_step"].values() for value in values)
    assert "µs above (b)" in printed
    assert "synthetic 1x4x8" in printed
    for kind in measured:
        assert printed.count(f"({kind}) {KINDS[kind].title}") == 2


def test_overhead_of_whole_epochs_and_memory(tmp_path: Path) -> None:
    training = Training(Data("cnn", str(tmp_path), samples=192), processes=2, epochs=1, root=tmp_path)
    plan = bench_overhead.Plan(training, "abdg", 1)
    found = bench_overhead.epochs(plan, ["epochs", "memory"])
    assert {kind: len(values) for kind, values in found["seconds_per_epoch"].items()} == dict.fromkeys("abdg", 1)
    assert found["accuracy"]["a"] == found["accuracy"]["b"] == found["accuracy"]["g"]  # they train the same weights
    assert "(a) tutorial loop" in str(bench_overhead.epochs_table(found))
    above, peaks = found["megabytes_above_start_per_rank"], found["peak_megabytes_per_rank"]
    assert set(above) == set(plan.kinds)
    assert all(0 < above[kind] < peaks[kind] for kind in plan.kinds)
    for table in (bench_overhead.epochs_table(found), bench_overhead.steps_table({**found, "processes": 2})):
        assert "peak MB a rank" in str(table)
        assert "192 samples" in str(table)


@pytest.mark.parametrize(
    ("model", "parts", "jobs"),
    [
        ("mlp", "epochs,memory", ["mlp", "mlp"]),  # on one process, and on two
        ("cnn", "epochs,memory", []),  # beside its epochs
        ("all", "epochs,memory", ["mlp", "mlp", "resnet18"]),
        ("cnn", "memory", ["cnn"]),
        ("cnn", "steps,epochs", ["cnn"]),
    ],
)
def test_memory_is_measured_wherever_it_is_asked_for(
    model: str, parts: str, jobs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(bench_overhead, "steps", lambda plan, parts: seen.append(plan.training.data.job) or {})
    monkeypatch.setattr(bench_overhead, "epochs", lambda plan, parts: {})
    for table in ("steps_table", "epochs_table"):
        monkeypatch.setattr(bench_overhead, table, lambda measured: "")
    options = Namespace(data=str(tmp_path), processes=2, repetitions=1, steps=2, epochs=1)
    every = ["mlp", "cnn", "resnet18"] if model == "all" else [model]
    bench_overhead._measured(options, every, "bd", parts.split(","), tmp_path)
    assert seen == jobs


def test_scaling(benched: Any) -> None:
    options = ("--processes", "1,2", "--repetitions", "1", "--steps", "2", "--emulate-ms-per-layer", "1")
    found, printed = benched("scaling", *options)
    rows = found["results"]["rows"]
    assert [(row["regime"], row["processes"], row["samples_per_process"]) for row in rows] == [
        ("strong", 1, 64),
        ("strong", 2, 32),
        ("weak", 1, 64),
        ("weak", 2, 64),
    ]
    assert [row["emulated_milliseconds_per_layer"] for row in rows] == [1, 0.5, 1, 1]
    assert all(row["milliseconds_per_step"][0] > 8 * row["emulated_milliseconds_per_layer"] for row in rows)
    assert all((row["bus_bytes_per_second"][0] > 0) == (row["processes"] > 1) for row in rows)
    lines = [line for line in printed.splitlines() if line.startswith(("| strong", "| weak"))]
    assert len(lines) == 4
    assert all("emulated" in line for line in lines)


def test_loader(benched: Any) -> None:
    options = ("--repetitions", "1", "--batches", "3", "--workers", "0,1", "--data.batch_size", "8")
    found, printed = benched("loader", "--config", "digits", *options)
    results = found["results"]
    assert results["batch_size"] == 8
    assert set(results["loader_samples_per_second"]) == {"0", "1"}
    assert f"What limits: {results['limit']}" in printed
    assert f"--data.num_workers {results['suggested_workers']}" in printed


def test_start_of_every_kind(tmp_path: Path) -> None:
    """The commands that are typed work as they stand, from a new interpreter to the first step of both ranks."""

    def started(kind: str) -> bench_start.Start:
        note = tmp_path / f"note-{kind}"
        return bench_start.first_step(bench_start.command(kind, "digits", "", 2, note, tmp_path), 2, note)

    with ThreadPoolExecutor() as pool:
        starts = dict(zip(bench_start.KINDS, pool.map(started, bench_start.KINDS), strict=True))
    for kind, start in starts.items():
        assert 0 < start.seconds < bench_start.TIMEOUT_SECONDS, kind
        assert start.peak_megabytes > 100, kind


def test_start_counts_until_the_last_rank(tmp_path: Path) -> None:
    note = tmp_path / "note"
    wrote = f"import time; t = time.time(); [open(f'{note}.{{r}}', 'w').write(f'{{t + r}} {{r + 7}}') for r in (0, 1)]"
    start = bench_start.first_step([sys.executable, "-c", wrote], 2, note)
    assert 1 < start.seconds < 20
    assert start.peak_megabytes == 8
    with pytest.raises(RunError, match="exit code 3, before its first step or after: it broke"):
        bench_start.first_step([sys.executable, "-c", "print('it broke'); exit(3)"], 2, note)


def test_help_is_light_and_a_misspelt_option_one_line() -> None:
    code = "import sys; from lit_dp.__main__ import main; sys.argv[1:] = sys.argv[1:]; main()"
    watch = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); "
    help_ = subprocess.run(
        [sys.executable, "-c", watch + code, "bench", "overhead", "--help"], capture_output=True, text=True, check=True
    )
    assert help_.stderr == "False\n"
    assert "--repetitions N" in help_.stdout
    assert max(map(len, help_.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["overhead", "--repetition", "3"], "there is no option --repetition, did you mean --repetitions?"),
        (["overhead", "--steps", "no"], "argument --steps: 'no' is no whole number from 1 up"),
        (["scaling", "--processes", "2,0"], "argument --processes: '0' is no whole number from 1 up"),
        ([], "the following arguments are required: BENCHMARK"),
    ],
)
def test_what_was_typed_wrongly(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench.main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert len(error.splitlines()) == 1


def test_what_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="'x' is none of a, b, c"):
        bench.main(["overhead", "--kinds", "abx"])
    with pytest.raises(ConfigError, match="no 3 equal parts"):
        bench.main(["scaling", "--processes", "1,3"])
    with pytest.raises(ConfigError, match=r"config 'digit' is neither .* did you mean digits\?"):
        bench.main(["loader", "--config", "digit"])
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="LOCAL_RANK is set"):
        bench.main(["scaling"])
    assert not any(tmp_path.iterdir())


EVERYTHING = "BestCheckpoint LastCheckpoint ProgressBar PrintPlan EpochLines Ledger MonitoredValues NonFinite Replicas"
EVERYTHING += " Preemption Resume LoggedState"


def _callbacks(root: Path) -> tuple[set[str], str, int]:
    with terminal():
        trainer: Any = bench_fit.train(Data("mlp", str(root), 64), 1, 1, root)
    return {type(c).__name__ for c in trainer.callbacks}, type(trainer.logger).__name__, trainer.global_step


def test_exact_ddp_is_measured_with_everything_on(tmp_path: Path) -> None:
    callbacks, logger, steps = on_ranks(1, _callbacks, tmp_path)[0]
    assert callbacks >= {*EVERYTHING.split()}
    assert logger == "RunFolder"
    assert steps == 8


# --- the processes ---


def _seen() -> dict[str, Any]:
    return {
        "variables": {name: os.environ.get(name) for name in CLUSTER},
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


def test_ranks_have_variables_of_their_own_and_are_gone() -> None:
    before = dict(os.environ)
    joined, alone = on_ranks(2, _seen), on_ranks(2, _seen, joined=False)
    assert dict(os.environ) == before
    assert [rank["variables"]["LOCAL_RANK"] for rank in joined] == ["0", "1"]
    assert {rank["variables"]["WORLD_SIZE"] for rank in joined} == {"2"}
    assert {rank["variables"]["WORLD_SIZE"] for rank in alone} == {None}
    assert {rank["threads"] for rank in (*joined, *alone)} == {1}
    for rank in (*joined, *alone):
        with pytest.raises(ProcessLookupError):
            os.kill(rank["pid"], 0)


def _fail(how: str) -> None:
    if os.environ["LOCAL_RANK"] == "1":
        if how == "dies":
            os._exit(7)
        raise ConfigError("mend it") if how == "refuses" else ZeroDivisionError("by nothing")
    dist.init_process_group("gloo", rank=0, world_size=2)  # waits for the other


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("refuses", ConfigError, "^mend it$"),
        ("raises", RunError, "rank 1 of the benchmark failed: ZeroDivisionError: by nothing"),
        ("dies", RunError, "rank 1 of the benchmark ended, exit code 7"),
    ],
)
def test_a_rank_that_fails_ends_all(how: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        on_ranks(2, _fail, how)


def _at_a_terminal() -> tuple[list[bool], int, int]:
    before = os.fstat(1).st_ino
    with terminal():
        seen = [stream.isatty() for stream in (sys.stdout, sys.stderr)] + [os.isatty(1)]
        print("\n" * 100_000)  # more than a pipe holds: somebody reads
    return seen, before, os.fstat(1).st_ino


def test_a_terminal_is_there_and_gone() -> None:
    seen, before, after = on_ranks(1, _at_a_terminal)[0]
    assert seen == [True, True, True]
    assert before == after


# --- the data ---


def test_data_is_the_same_in_both_forms(tmp_path: Path) -> None:
    for job in ("mlp", "cnn", "resnet18", "digits"):
        data = Data(job, str(tmp_path), samples=64)
        for train in (True, False):
            images, labels = data.held(train)
            tutorial: Any = data.tutorial(train)
            assert len(tutorial) == len(labels) == (64 if train else 4)
            assert images.dtype == torch.uint8
            image, label = tutorial[3]
            assert torch.equal(image, images[3].float() / 255)
            assert 0 <= int(label) == int(labels[3]) < CLASSES
