"""The crash matrix (law L9; FAULTS 19, 25, 26): whatever ends a rank, its cause is the last thing that is printed, all
processes are gone within 10 s, and the exit code is not 0."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader, Dataset, Subset

from lit_dp import ExactDDPStrategy, LitClassifier
from lit_dp.__main__ import guarded
from lit_dp.engine import failures
from lit_dp.engine.calls import JointCalls
from lit_dp.engine.causes import LIMIT, LOST_PEER, brief, cause, shortened
from lit_dp.engine.failures import Failures
from lit_dp.errors import ConfigError, RunError
from tests.launchers import LAUNCHERS, Launched, launched, note
from tests.ranks import free_port, torchrun_env
from tests.training import Points, momentum, network, quiet_trainer, seed_everything

pytestmark = pytest.mark.matrix

HOST = re.escape(socket.gethostname())
SECONDS_TO_BE_GONE = 10.0


# ---- what goes wrong


@dataclass(frozen=True)
class Fault:
    """What happens where, in the third call there, on the ranks `bad`; and how the last line describes it."""

    at: str
    what: str = "raise"
    workers: int = 0
    where: str = ""
    says: str = "ValueError: planted"


STEP = "epoch 1, step 3, on samples \\d+, \\d+, \\d+, \\d+"
LINE = f"error: rank RANK on {HOST}, WHERE: WHAT"
FAULTS = {
    "training_step": Fault("training_step", where=STEP),
    "validation_step": Fault("validation_step", where="validate after epoch 1, step 8, batch 3, on samples .*\\d"),
    "reading": Fault("read", where="epoch 1, after step 2", says="ValueError: planted \\(while reading sample \\d+\\)"),
    "reading in a worker": Fault(
        "read",
        workers=1,
        where="epoch 1, after step 2",
        says="ValueError: Caught ValueError in DataLoader worker process 0. ValueError: planted \\(while reading"
        " sample \\d+\\)",
    ),
    "configure_optimizers": Fault("configure_optimizers", where="before the first step"),
    "callback": Fault("callback", where=STEP.replace("step", "at the end of step")),
    "no memory": Fault("training_step", "memory", where=STEP, says="MemoryError"),
    "SIGKILL": Fault("training_step", "kill"),
    "exit": Fault("training_step", "exit"),
    "nan": Fault("training_step", "nan"),
    "dead worker": Fault(
        "read",
        "kill worker",
        workers=1,
        where="epoch 1, .*",
        says="RuntimeError: DataLoader worker \\(pid(\\(s\\))? \\d+\\) (is killed by|exited).*",
    ),
}


def strike(fault: Fault, folder: Path) -> None:
    note(folder, "struck", str(time.monotonic()))
    if fault.what == "memory":
        bytearray(1 << 60)
    if fault.what.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.what == "exit":
        os._exit(3)
    raise ValueError("planted")


class Read(Dataset[Any]):
    """Strikes when it reads the first sample of the third batch, on ranks that are to."""

    def __init__(self, data: Points, strikes: Fault | None, folder: Path) -> None:
        self.inner, self.strikes, self.folder, self.reads = data.dataset, strikes, folder, 0

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if torch.utils.data.get_worker_info() is not None and self.reads == 1:
            note(self.folder, "pids", f"-1 {os.getpid()}")
        if self.strikes is not None and self.reads == 9:
            strike(self.strikes, self.folder)
        return self.inner[index]


class Data(Points):
    def __init__(self, fault: Fault, strikes: bool, folder: Path) -> None:
        super().__init__()
        self.workers = fault.workers
        self.read = Read(self, fault if fault.at == "read" and strikes else None, folder)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.read, self.batch_size, shuffle=True, num_workers=self.workers)


class Module(LitClassifier):
    def __init__(self, fault: Fault, strikes: bool, folder: Path) -> None:
        super().__init__(network(), 4, momentum)  # pyright: ignore[reportArgumentType]
        self.fault, self.strikes, self.folder = fault, strikes, folder

    def at(self, place: str, batch_idx: int = 2) -> None:
        if self.strikes and self.fault.at == place and batch_idx == 2 and self.fault.what != "nan":
            strike(self.fault, self.folder)

    def configure_optimizers(self) -> Any:
        self.at("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.at("training_step", batch_idx)
        loss = super().training_step(batch, batch_idx)
        if self.strikes and self.fault.what == "nan" and batch_idx == 2:
            note(self.folder, "struck", str(time.monotonic()))
            return loss * float("nan")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.at("validation_step", batch_idx)
        super().validation_step(batch, batch_idx)


class Struck(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.at("callback", batch_idx)


def fit(folder: Path, fault: Fault, bad: tuple[int, ...]) -> None:
    quieten()
    strikes = rank() in bad
    module, data = Module(fault, strikes, folder), Data(fault, strikes, folder)
    quiet_trainer(max_epochs=2, callbacks=[Struck()], num_sanity_val_steps=0).fit(module, datamodule=data)


def rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def quieten() -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    seed_everything(3, verbose=False)


# ---- the matrix


def ended(run: Launched, seconds: float = 60) -> tuple[int, list[str]]:
    """Exit code and lines of standard error, when all processes are gone, in time, and none complained of another."""
    code = run.wait(seconds)
    struck = min(map(float, run.notes("struck")))
    assert run.survivors() == []
    assert time.monotonic() - struck < SECONDS_TO_BE_GONE
    assert not LOST_PEER.search(run.err), run.err
    return code, [line for line in run.err.splitlines() if "LeafSpec" not in line and line.strip()]


def words(fault: Fault, ranks: tuple[int, ...], line: str = LINE) -> str:
    return (
        line.replace("RANK", f"[{''.join(map(str, ranks))}]").replace("WHERE", fault.where).replace("WHAT", fault.says)
    )


LAST = {
    "kill": f"error: rank RANK on {HOST} was killed by SIGKILL \\(out of memory\\? see dmesg\\)",
    "exit": f"error: rank RANK on {HOST} was the first to end, with exit code 3",
    "nan": "error: non-finite loss at step 3 .*rank RANK: samples \\d+, \\d+, .*",
}


@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "both"])
@pytest.mark.parametrize("name", FAULTS)
def test_cause_is_the_last_line_of_our_launcher(name: str, bad: tuple[int, ...], tmp_path: Path) -> None:
    fault = FAULTS[name]
    with launched("lit_dp", 2, fit, tmp_path, fault, bad, folder=tmp_path) as run:
        code, lines = ended(run)
    assert code == {"kill": 128 + signal.SIGKILL, "exit": 3}.get(fault.what, 1)
    assert re.fullmatch(words(fault, bad, LAST.get(fault.what, LINE)), lines[-1]), run.err
    if fault.what in ("raise", "memory"):
        assert lines[0] == "Traceback (most recent call last):"
        assert any("in strike" in line for line in lines)  # to where it was raised
        assert run.err.count("Traceback (most recent call last)") == 1 + fault.workers
    if fault.what in ("kill", "exit") and len(bad) == 1:  # who is left says how far it was
        assert re.fullmatch(
            f"error: rank {bad[0]} on {HOST} ended without a word .*; rank {1 - bad[0]} was at {STEP}", lines[-2]
        ), run.err


ROOT_CAUSE = "Root Cause (first observed failure):"
SIGNAL = "exitcode  : -9 .*traceback : Signal 9 \\(SIGKILL\\) received by PID \\d+"


@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "both"])
@pytest.mark.parametrize("name", FAULTS)
def test_cause_is_in_torchruns_summary(name: str, bad: tuple[int, ...], tmp_path: Path) -> None:
    fault = FAULTS[name]
    with launched("torchrun", 2, fit, tmp_path, fault, bad, folder=tmp_path) as run:
        code, _ = ended(run)
    assert code == 1
    summary = run.err.rpartition(ROOT_CAUSE)[2]
    if fault.what != "nan":  # that all ranks find
        assert re.search(f"rank      : [{''.join(map(str, bad))}] \\(", summary), run.err
    expected = {"kill": SIGNAL, "exit": "exitcode  : 3 "}.get(fault.what) or words(
        fault, bad, LAST.get(fault.what, LINE)
    )
    assert re.search(expected, summary, re.DOTALL), run.err


# ---- ranks that do not end by themselves


def sleep_or_fail(folder: Path, patched: bool) -> None:
    """Rank 1 fails in its first step, while rank 0 is in a long computation."""
    quieten()
    if patched:
        Failures._end_soon = lambda self: None  # type: ignore
    module, data = Module(Fault(""), False, folder), Points()

    class Sleeps(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_rank == 0:
                time.sleep(60)
            strike(Fault(""), folder)

    quiet_trainer(max_epochs=1, callbacks=[Sleeps()]).fit(module, datamodule=data)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_in_a_long_computation_is_ended(launcher: str, tmp_path: Path) -> None:
    with launched(launcher, 2, sleep_or_fail, tmp_path, False, folder=tmp_path) as run:
        code, _ = ended(run)
    assert code == 1
    assert f"rank 1 on {socket.gethostname()}, epoch 1, step 1, on samples" in run.err


def test_without_an_end_it_would_stay(tmp_path: Path) -> None:
    """On hosts where nothing else fails: their launchers have no reason to end anything."""
    answers = run_ranks_alone(2, sleep_or_fail, tmp_path, True, seconds=4)
    assert answers == [None, 1]
    answers = run_ranks_alone(2, sleep_or_fail, tmp_path, False, seconds=20)
    assert answers == [1, 1]


def run_ranks_alone(world_size: int, function: Any, *args: Any, seconds: float) -> list[int | None]:
    """Exit codes of ranks that no launcher watches over; None for those that had not ended in time."""
    port, pids = free_port(), []
    for number in range(world_size):
        if (pid := os.fork()) == 0:
            os.environ.update(torchrun_env(number, world_size, port))
            code = 1
            with suppress(BaseException):
                function(*args)
                code = 0
            os._exit(code)
        pids.append(pid)
    deadline, codes = time.monotonic() + seconds, dict[int, int | None]()
    while len(codes) < world_size and time.monotonic() < deadline:
        for number, pid in enumerate(pids):
            done, status = os.waitpid(pid, os.WNOHANG) if number not in codes else (0, 0)
            if done:
                codes[number] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for number, pid in enumerate(pids):
        if number not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(number) for number in range(world_size)]


def catch_and_go_on(folder: Path, bad: tuple[int, ...]) -> None:
    """The first training fails, which the program catches; then it trains again."""
    quieten()
    failures.FIRST_SECONDS = failures.GRACE_SECONDS = 0.5
    fault = Fault("training_step")
    with suppress(ValueError):
        fit(folder, fault, bad)
    time.sleep(2)
    fit(folder, fault, ())
    note(folder, "trained", str(rank()))


@pytest.mark.parametrize(("ranks", "bad"), [(1, (0,)), (2, (0, 1))])
def test_a_failure_that_is_caught_on_all_ranks_ends_nothing(ranks: int, bad: tuple[int, ...], tmp_path: Path) -> None:
    with launched("lit_dp", ranks, catch_and_go_on, tmp_path, bad, folder=tmp_path) as run:
        assert run.wait() == 0, run.err
    assert sorted(run.notes("trained")) == [str(number) for number in range(ranks)]
    assert "error:" not in run.err


def test_where_one_rank_catches_it_the_others_do_not_wait_for_ever(tmp_path: Path) -> None:
    with launched("lit_dp", 2, catch_and_go_on, tmp_path, (1,), folder=tmp_path) as run:
        assert run.wait() != 0
    assert run.notes("trained") == []
    assert f"error: rank 1 on {socket.gethostname()}, epoch 1, step 3" in run.err


def fail_on_four(folder: Path) -> None:
    quieten()

    class Fails(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_rank == 2 and batch_idx == 2:
                strike(Fault(""), folder)

    quiet_trainer(max_epochs=2, callbacks=[Fails()]).fit(Module(Fault(""), False, folder), datamodule=Points())


def test_one_of_four(tmp_path: Path) -> None:
    with launched("lit_dp", 4, fail_on_four, tmp_path, folder=tmp_path) as run:
        code, lines = ended(run)
    assert code == 1
    assert lines[-1].startswith(f"error: rank 2 on {socket.gethostname()}, epoch 1, step 3, on samples")
    assert run.err.count("Traceback") == 1


def save_on_exception(folder: Path) -> None:
    """A callback that needs all ranks deals with the exception of one."""
    quieten()
    warnings.simplefilter("ignore")  # it looks for such a checkpoint, too
    failures.FIRST_SECONDS = 1.0
    module = Module(Fault("training_step"), rank() == 1, folder)
    options: Any = {"enable_checkpointing": True, "default_root_dir": str(folder), "num_sanity_val_steps": 0}
    quiet_trainer(callbacks=[OnExceptionCheckpoint(str(folder))], **options).fit(module, datamodule=Points())


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_callback_that_saves_on_exceptions_hides_nothing(launcher: str, tmp_path: Path) -> None:
    with launched(launcher, 2, save_on_exception, tmp_path, folder=tmp_path) as run:
        assert run.wait() == 1
        assert time.monotonic() - float(run.notes("struck")[0]) < SECONDS_TO_BE_GONE
    line = f"error: rank 1 on {socket.gethostname()}, epoch 1, step 3, on samples"
    assert line in (run.err.splitlines()[-1] if launcher == "lit_dp" else run.err), run.err


def leave_early(folder: Path, code: int) -> None:
    quieten()

    class Leaves(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_rank == 1 and batch_idx == 2:
                note(folder, "struck", str(time.monotonic()))
                sys.exit(code)

    quiet_trainer(max_epochs=1, callbacks=[Leaves()]).fit(Module(Fault(""), False, folder), datamodule=Points())


def test_a_rank_that_exits_is_named(tmp_path: Path) -> None:
    with launched("lit_dp", 2, leave_early, tmp_path, 3, folder=tmp_path) as run:
        assert run.wait() == 3
    assert run.err.splitlines()[-1] == f"error: rank 1 on {socket.gethostname()} was the first to end, with exit code 3"


def test_a_rank_that_exits_as_if_all_were_well_is_named(tmp_path: Path) -> None:
    with launched("lit_dp", 2, leave_early, tmp_path, 0, folder=tmp_path) as run:
        assert run.wait() == 1
    assert re.search(f"error: rank 0 on {HOST}, {STEP}: rank 1 has ended its training before this one", run.err), (
        run.err
    )


# ---- what all ranks must do, and some do not

TIMEOUT = 3.0
GRADIENTS = sum(parameter.numel() for parameter in network().parameters())
CALLS = {
    "save": lambda module: module.trainer.save_checkpoint(module.folder / "x.ckpt"),
    "log a step": lambda module: module.log("x", 1.0, on_step=True, on_epoch=False, sync_dist=True),
    "log an epoch": lambda module: module.log("x", 1.0, on_step=False, on_epoch=True, sync_dist=True),
    "log_dir": lambda module: module.trainer.log_dir,
    "barrier": lambda module: module.trainer.strategy.barrier(),
    "all_reduce": lambda module: torch.distributed.all_reduce(torch.zeros(GRADIENTS)),  # torch's own
}
HOOKS = ("training_step", "on_train_batch_end", "on_train_epoch_end", "validation_step")


class OneSided(Module):
    def __init__(self, call: str, hook: str, bad: int, folder: Path) -> None:
        super().__init__(Fault(""), False, folder)
        self.call, self.hook, self.bad = call, hook, bad

    def at(self, place: str, batch_idx: int = 1) -> None:
        if place == self.hook and batch_idx == 1 and self.trainer.global_rank == self.bad:
            note(self.folder, "struck", str(time.monotonic()))
            CALLS[self.call](self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("on_train_batch_end", batch_idx)

    def on_train_epoch_end(self) -> None:
        self.at("on_train_epoch_end")


def call_alone(folder: Path, call: str, hook: str, bad: int, fault: str = "") -> None:
    quieten()
    if fault == "nobody looks":
        JointCalls.meet = lambda self, kind: None  # type: ignore
    if fault == "one group":
        real = JointCalls.__init__
        JointCalls.__init__ = lambda self, *args: (real(self, *args), setattr(self, "gradients", None))[0]  # type: ignore
    module = OneSided(call, hook, bad, folder)
    quiet_trainer(
        max_epochs=2,
        strategy=ExactDDPStrategy(timeout=TIMEOUT),
        enable_checkpointing=True,
        default_root_dir=str(folder),
        num_sanity_val_steps=0,
    ).fit(module, datamodule=Points())
    note(folder, "trained")


def not_all_joined(call: str, hook: str, bad: int) -> str:
    """The end of a run in which one rank makes a call: what it was, and where the others are."""
    line = r"test_crash.py:\d+ `.*`"
    if call == "log an epoch":  # which is reduced when the epoch is over
        line = f"the reduction of 'x', which {hook} logged with sync_dist=True"
    if hook == "validation_step" and call.startswith("log a"):
        return r"what validation_step logged for all ranks .* rank 1 differs from rank 0's: .*'x'"
    return f"(not all ranks joined the same exchange|ranks meet in different calls): .*rank {bad} .*{line}"


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_one_rank_only_is_named(call: str, tmp_path: Path) -> None:
    hooks = [hook for hook in HOOKS if (call, hook) != ("log a step", "on_train_epoch_end")]  # Lightning refuses that
    with ExitStack() as runs:
        running = []
        for bad, hook in enumerate(hooks):
            (tmp_path / hook).mkdir()
            args = (tmp_path / hook, call, hook, bad % 2)
            running.append(runs.enter_context(launched("lit_dp", 2, call_alone, *args, folder=tmp_path / hook)))
        for bad, (hook, run) in enumerate(zip(hooks, running, strict=True)):
            code, lines = ended(run, TIMEOUT + SECONDS_TO_BE_GONE)
            assert code in (1, 2), hook
            assert re.search(not_all_joined(call, hook, bad % 2), lines[-1]), (hook, run.err)
            assert f"rank {1 - bad % 2}" in lines[-1], (hook, run.err)
            assert not run.notes("trained")


def test_without_a_look_at_the_others_it_goes_unseen(tmp_path: Path) -> None:
    """Rank 0's sum meets another sum of rank 1's, and so do all that follow."""
    args = (tmp_path, "log an epoch", "on_train_epoch_end", 0, "nobody looks")
    with launched("lit_dp", 2, call_alone, *args, folder=tmp_path) as run:
        assert run.wait() == 0
    assert len(run.notes("trained")) == 2


def test_without_a_group_of_their_own_gradients_are_mixed_with_what_a_rank_sums(tmp_path: Path) -> None:
    """Rank 0's zeros are added to rank 1's gradients, and its gradients to the next; or gloo ends the process."""
    args = (tmp_path, "all_reduce", "training_step", 0, "one group")
    with launched("lit_dp", 2, call_alone, *args, folder=tmp_path) as run:
        run.wait()
    assert not re.search(not_all_joined("all_reduce", "training_step", 0), run.err)


class Plain(LightningModule):
    """Exchanges gradients, and nothing else."""

    def __init__(self, folder: Path, logs: bool) -> None:
        super().__init__()
        self.layer, self.folder, self.logs = torch.nn.Linear(36, 4), folder, logs

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            note(self.folder, "struck", str(time.monotonic()))
        if self.logs:
            self.log("x", 1.0, on_step=False, on_epoch=True, sync_dist=True)
        return self.layer(batch[0].flatten(1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def take_unequal_steps(folder: Path, logs: bool) -> None:
    """Each rank has the user's own share of the samples, and rank 1 has a batch more."""
    quieten()
    share = Subset(Points().dataset, range(16 + 4 * rank()))
    strategy = ExactDDPStrategy(timeout=TIMEOUT)
    trainer = quiet_trainer(max_epochs=1, strategy=strategy, use_distributed_sampler=False)
    trainer.fit(Plain(folder, logs), DataLoader(share, 4))


@pytest.mark.parametrize("logs", [True, False])
def test_fault_26_unequal_numbers_of_batches(logs: bool, tmp_path: Path) -> None:
    with launched("lit_dp", 2, take_unequal_steps, tmp_path, logs, folder=tmp_path) as run:
        code, lines = ended(run, TIMEOUT + SECONDS_TO_BE_GONE)
    assert code == 1
    assert re.search(
        "not all ranks joined the same exchange: rank 0 is in .* \\(epoch 1, after step 4\\);"
        " rank 1 is in .* \\(epoch 1, step 5\\)",
        lines[-1],
    ), run.err


# ---- configurations


def misconfigured(folder: Path, when: str, bad: tuple[int, ...]) -> None:
    quieten()
    note(folder, "struck", str(time.monotonic()))
    if when == "before" and rank() in bad:
        raise ConfigError("no such\nfolder")

    class Refuses(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_rank in bad:
                raise ConfigError("no such\nfolder")

    quiet_trainer(max_epochs=1, callbacks=[Refuses()]).fit(Module(Fault(""), False, folder), datamodule=Points())


@pytest.mark.parametrize("bad", [(1,), (0, 1)], ids=["rank 1", "both"])
@pytest.mark.parametrize("when", ["before", "in a training"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_configuration_is_refused_in_one_line(launcher: str, when: str, bad: tuple[int, ...], tmp_path: Path) -> None:
    with launched(launcher, 2, misconfigured, tmp_path, when, bad, folder=tmp_path) as run:
        code = run.wait()
    assert code == (2 if launcher == "lit_dp" else 1)
    said = re.findall("^error: no such folder.*", run.err, re.MULTILINE)
    assert len(said) == 1, run.err
    if launcher == "lit_dp":
        assert run.err.splitlines()[-1] == said[0]
    else:
        assert "error: no such folder" in run.err.rpartition(ROOT_CAUSE)[2]


# ---- programs of the user's own, and hosts

PROGRAM = """
import lightning.pytorch, torch, lit_dp
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            raise ValueError("planted")
        return super().training_step(batch, batch_idx)

lightning.pytorch.seed_everything(1)
off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = lit_dp.Trainer(accelerator="cpu", max_epochs=1, limit_val_batches=0, **off)
trainer.fit(Model())
"""


def test_a_program_under_torchrun(tmp_path: Path) -> None:
    """Nothing of ours is around it: the first to fail says so by Python's hook for what nobody catches."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    line = f"error: rank 1 on {socket.gethostname()}, epoch 1, step 3, on samples .*: ValueError: planted"
    assert done.returncode == 1
    assert re.search(line, done.stderr.rpartition(ROOT_CAUSE)[2]), done.stderr
    assert not LOST_PEER.search(done.stderr)
    assert done.stderr.count('raise ValueError("planted")') == 2  # when it fails, and summed up


def fail_on_another_host(folder: Path, what: str) -> None:
    """Ranks of two hosts; each has a launcher that hears of nothing but its own rank."""
    socket.gethostname = lambda: f"host{rank()}"
    bad = (1,)
    fit(folder, Fault("training_step", what), bad)


@pytest.mark.parametrize(
    ("what", "says"),
    [("raise", ", epoch 1, step 3, on samples .*: ValueError: planted"), ("exit", " ended without a word .*")],
)
def test_each_host_says_whose_failure_it_was(what: str, says: str, tmp_path: Path) -> None:
    codes = run_ranks_alone(2, said_by, tmp_path, fail_on_another_host, what, seconds=30)
    assert codes == [1, 3 if what == "exit" else 1]
    assert re.search(f"^error: rank 1 on host1{says}$", (tmp_path / "said by 0").read_text(), re.MULTILINE)


def said_by(folder: Path, function: Any, *args: Any) -> None:
    os.dup2(os.open(folder / f"said by {rank()}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = sys.__stderr__
    try:
        guarded(lambda: function(folder, *args))
    except SystemExit as exit_:
        assert sys.stderr is not None
        sys.stderr.flush()
        os._exit(int(exit_.code or 0))


# ---- words


def test_a_long_traceback_leaves_the_last_line_whole() -> None:
    def deep(left: int) -> None:
        if left == 0:
            raise ValueError("begin " + "ü" * 5000 + " end")
        deep(left - 1)

    with pytest.raises(ValueError, match="begin") as raised:
        deep(50)
    said = cause(raised.value, "rank 3 on host7, epoch 2, step 9", ", on samples 4, 5")
    told = shortened(said, LIMIT)
    assert len(told.encode()) <= LIMIT
    assert told.startswith("Traceback (most recent call last):\n")
    assert "\n...\n" in told
    last = told.splitlines()[-1]
    assert last.startswith("error: rank 3 on host7, epoch 2, step 9, on samples 4, 5: ValueError: begin ü")
    assert " ... " in last
    assert last.endswith("ü end")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "MemoryError"),
        (KeyError("x"), "KeyError: 'x'"),
        (RuntimeError("a\n  b\n"), "RuntimeError: a b"),
        (ConfigError("use a\nfolder"), "use a folder"),
        (RunError("disk full"), "disk full"),
    ],
)
def test_an_exception_in_one_line(error: Exception, line: str) -> None:
    assert brief(error) == line
