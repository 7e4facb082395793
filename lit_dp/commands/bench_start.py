"""From the command to the first optimizer step: `fit`, `torchrun` with the tutorial's loop, and Lightning's launcher.

Each is typed anew, in turn; ranks note the time of their first step in a file, and the last of them counts.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from lit_dp.commands.bench_jobs import Data
from lit_dp.commands.bench_ranks import pinned
from lit_dp.commands.bench_report import alternated, say
from lit_dp.errors import RunError

TIMEOUT_SECONDS, GRACE_SECONDS = 300.0, 15.0
KINDS = {
    "torchrun": "torchrun, tutorial loop",
    "lightning": "Lightning ddp, its own launcher",
    "fit": "python -m lit_dp fit",
}


class Start(NamedTuple):
    """Seconds from the command to the first step of the last rank, and the most memory that a rank had held by then."""

    seconds: float
    peak_megabytes: float


def measure(processes: int, repetitions: int, root: str, scratch: Path) -> dict[str, Any]:
    """Seconds to the first step by kind, one a repetition; Fashion-MNIST where it is, otherwise digits."""
    job = "cnn" if Data("cnn", root).real else "digits"
    starts: dict[str, list[Start]] = {kind: [] for kind in KINDS}
    for repetition in range(repetitions):
        for kind in alternated(list(KINDS), repetition):
            note = scratch / f"first-step-{kind}-{repetition}"
            starts[kind].append(first_step(command(kind, job, root, processes, note, scratch), processes, note))
        last = ", ".join(f"{kind} {of_kind[-1].seconds:.1f} s" for kind, of_kind in starts.items())
        say(f"first step: repetition {repetition + 1} of {repetitions}: {last}")
    return {
        "title": f"from the command to the first step, {processes} processes, {Data(job, root).origin}",
        "processes": processes,
        "data": Data(job, root).origin,
        "kinds": KINDS,
        "commands": {kind: " ".join(command(kind, job, root, processes, Path("FILE"), Path("ROOT"))) for kind in KINDS},
        "seconds_to_first_step": {kind: [start.seconds for start in of_kind] for kind, of_kind in starts.items()},
        "peak_megabytes_by_then": {kind: [start.peak_megabytes for start in of] for kind, of in starts.items()},
    }


def command(kind: str, job: str, root: str, processes: int, note: Path, scratch: Path) -> list[str]:
    """What is typed. `fit` reads a shipped config, with the batch size of the loops."""
    if kind == "torchrun":
        launcher = ["torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(_free_port())]
        loop = ["-m", "lit_dp.commands.bench_loops", "--job", job, "--data", root, "--first-step", str(note)]
        return [sys.executable, "-m", *launcher, *loop]
    if kind == "lightning":
        options = ["--job", job, "--data", root, "--processes", str(processes), "--root", str(scratch / kind)]
        return [sys.executable, "-m", "lit_dp.commands.bench_lightning", *options, "--first-step", str(note)]
    data = ["--config", "fashion_mnist", "--data.root", root] if job == "cnn" else ["--config", "digits"]
    callback = [
        "--trainer.callbacks+=lit_dp.commands.bench_lightning.FirstStep",
        f"--trainer.callbacks.file={note}",
    ]
    trainer = [f"--trainer.devices={processes}", "--trainer.max_steps=1"]
    options = ["--data.batch_size=64", *trainer, f"--trainer.default_root_dir={scratch / kind}", *callback]
    return [sys.executable, "-m", "lit_dp", "fit", *data, *options]


def first_step(command: list[str], ranks: int, note: Path) -> Start:
    """Run a command until its ranks have noted their first step, and wait until it has ended.

    Raises:
        RunError: it failed, or a rank has not come so far in time.
    """
    log = note.with_suffix(".log")
    begun = time.time()
    with log.open("w") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, env={**os.environ, **pinned()}, start_new_session=True, **streams)
    try:
        code = process.wait(TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process)
    notes = [Path(f"{note}.{rank}") for rank in range(ranks)]
    if code != 0 or not all(path.is_file() for path in notes):
        how = "did not end in time" if code is None else f"ended with exit code {code}"
        last = (log.read_text().strip().splitlines() or ["it printed nothing"])[-1]
        raise RunError(f"{' '.join(command)} {how}, before its first step or after: {last}")
    at, peaks = zip(*([float(number) for number in path.read_text().split()] for path in notes), strict=True)
    return Start(max(at) - begun, max(peaks))


def _end(process: subprocess.Popen[Any]) -> None:
    """A launcher ends its ranks, which have process groups of their own, if it is asked to."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
