"""Law L4 over restarts: a job that its launcher starts again goes on by itself, on as many processes as there are then;
and what a person types about it (FAULTS 18, 27)."""

import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, SequentialLR

from lit_dp import LitClassifier
from lit_dp.__main__ import main
from lit_dp.commands import plots
from lit_dp.engine import rendezvous, restart
from lit_dp.engine.checkpoint import DurableCheckpointIO
from lit_dp.engine.checkpoints import LastCheckpoint
from lit_dp.engine.ledger import Ledger
from lit_dp.engine.parity import sha256
from lit_dp.engine.preemption import Preemption
from lit_dp.engine.resume_choice import agreed
from lit_dp.engine.strategy import ExactDDPStrategy
from tests.command import Ended, lit_dp
from tests.launchers import Elastic, Launched, launched, note
from tests.ranks import RankFailed, free_port, run_ranks
from tests.training import Job, Points, network, quiet_trainer

pytestmark = pytest.mark.matrix

V = 4
STEPS = 4  # an epoch
EPOCHS = 3


# --- what is trained, and what goes wrong in it ---


@dataclass(frozen=True)
class Case:
    """What goes wrong once: `kind` on rank `rank`, before the step after `step`."""

    kind: str = ""
    rank: int = 0
    step: int = 5
    resume: str | None = None


class Fault(Callback):
    """Kills its process, raises, or waits alone until somebody stops it: once in a run."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.folder, self.case = folder, case

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        case = self.case
        if trainer.global_rank != case.rank or trainer.global_step != case.step or (self.folder / case.kind).exists():
            return
        if case.kind == "kill":
            note(self.folder, "kill")
            os.kill(os.getpid(), signal.SIGKILL)
        if case.kind == "raise":
            note(self.folder, "raise")
            raise RuntimeError("a fault of the hardware")
        if case.kind == "host" and trainer.world_size == 1:
            note(self.folder, "alone")
            agreement = next(c for c in trainer.callbacks if isinstance(c, Preemption))._agreement  # pyright: ignore
            while agreement is not None and agreement.asked is None:
                time.sleep(0.01)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero and not trainer.fit_loop._should_accumulate():
            note(self.folder, "steps", str(trainer.global_step))
        time.sleep(0.02)


def train(folder: Path, root: Path, case: Case) -> None:
    """What a rank runs."""
    module, data = Job(samples=V * 4 * STEPS, batch_size=4).build()
    ledger = Ledger()
    trainer = quiet_trainer(
        strategy=ExactDDPStrategy(virtual_ranks=V),
        num_nodes="auto",
        max_epochs=EPOCHS,
        limit_val_batches=0,
        default_root_dir=str(root),
        callbacks=[LastCheckpoint(every_n_steps=2), ledger, Fault(folder, case)],
    )
    note(folder, "starts", f"{trainer.global_rank}/{trainer.world_size} {os.environ.get('TORCHELASTIC_RESTART_COUNT')}")
    trainer.fit(module, datamodule=data, resume=case.resume)
    if trainer.is_global_zero:
        for account in ledger.accounts:
            note(folder, "epochs", f"{account.used} {account.missing.count} {account.repeated.count}")
        note(folder, "sha", sha256(module.state_dict()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SHA-256 of the weights of the training in which nothing goes wrong."""
    folder = tmp_path_factory.mktemp("whole")
    with launched("lit_dp", 2, train, folder, folder, Case(), folder=folder) as run:
        assert run.wait() == 0, run.err
    return run.notes("sha")[0]


def ends_well(run: Launched, whole: str) -> None:
    assert run.wait() == 0, run.err
    assert run.survivors() == []
    assert run.notes("sha") == [whole]
    assert set(run.notes("epochs")) == {f"{V * 4 * STEPS} 0 0"}


# --- torchrun starts it again ---


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_ranks_that_are_started_again_go_on(kind: str, rank: int, tmp_path: Path, whole: str) -> None:
    case = Case(kind, rank)
    with launched("torchrun", 2, train, tmp_path, tmp_path, case, folder=tmp_path, max_restarts=2) as run:
        ends_well(run, whole)
    assert sorted(run.notes("starts")) == ["0/2 0", "0/2 1", "1/2 0", "1/2 1"]
    assert f"resume: goes on from {tmp_path}/checkpoints/last.ckpt" in run.out
    assert run.notes("steps") == [*map(str, range(1, 6)), *map(str, range(5, EPOCHS * STEPS + 1))]


def test_on_another_number_of_processes(tmp_path: Path, whole: str) -> None:
    """torchrun with 2 ranks, which fails; our launcher with 4, which is stopped; then a single rank."""
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    with launched("torchrun", 2, train, folders[0], tmp_path, Case("raise", 1, step=3), folder=folders[0]) as run:
        assert run.wait() == 1
    case = Case(resume="required")
    with launched("lit_dp", 4, train, folders[1], tmp_path, case, folder=folders[1]) as run:
        run.wait_for("steps", 3)
        os.kill(run.rank(2), signal.SIGTERM)
        assert run.wait() == 75, run.err
    assert run.notes("steps")[0] == "3"
    with launched("lit_dp", 1, train, folders[2], tmp_path, case, folder=folders[2]) as run:
        ends_well(run, whole)
    assert run.notes("starts") == ["0/1 None"]


def test_hosts_that_go_and_come(tmp_path: Path, whole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun --nnodes 1:2`: two hosts, of which one is lost; then one; then another joins. torchrun calls the last
    change no restart: its count stays the same. Without the variable torch 2.14 waits for ever for a host that joins:
    the others do not tell it where they meet."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    port, case = free_port(), Case("host", 0, step=6)
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()

    def host(number: int) -> Any:
        notes, elastic = folders[number], Elastic(port, is_first=number == 0)
        return launched("torchrun", 1, train, notes, tmp_path, case, folder=notes, max_restarts=3, elastic=elastic)

    with host(0) as stays, host(1) as lost:
        stays.wait_for("steps", 3)
        lost.kill()
        stays.wait_for("alone", seconds=60)
        with host(2) as joins:
            assert joins.wait() == 0, joins.err
            ends_well(stays, whole)
    assert stays.notes("starts") == ["0/2 0", "0/1 1", "0/2 1"]
    assert joins.notes("starts") == ["1/2 0"]


def test_ranks_do_not_meet_those_of_an_earlier_attempt() -> None:
    """torchrun's agent keeps its store, with what they left in it (PyTorch 135712)."""
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    for rank in range(3):
        agents.set(rendezvous._key("asks", rank), "a question of an earlier attempt")
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(agents.port)}
    first = run_ranks(3, _met, env=env)
    assert run_ranks(3, _met, env=env)[0] != first[0] != agents.port
    assert len(set(first)) == 1


def _met() -> int:
    rendezvous.renew()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    assert rendezvous._served[0].port == int(os.environ["MASTER_PORT"])
    return int(os.environ["MASTER_PORT"])


def test_ranks_that_do_not_meet_say_so() -> None:
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(agents.port)}
    with pytest.raises(
        RankFailed, match=r"RunError: ranks do not meet at 127.0.0.1:\d+ within 0.3 s: no word from rank 1"
    ):
        run_ranks(2, _rank_zero_alone, env=env)


def _rank_zero_alone() -> None:
    if os.environ["RANK"] == "0":
        rendezvous.renew(seconds=0.3)


# --- which job it is ---


def known_by(marks: list[str], env: dict[str, str], tmp_path: Path) -> bool:
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / restart.JOB).write_text("\n".join(marks))
    return restart.made_by(restart.started_as(env), tmp_path / "other") == [tmp_path / "run"]


def test_a_job_is_what_its_launcher_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what has the same run id: people copy `--rdzv-id` from one command to the next."""
    agent, other = "7 100", "9 200"
    torchrun, slurm = {"TORCHELASTIC_RUN_ID": "mine"}, {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}
    again, requeued = {"TORCHELASTIC_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "1"}

    def names(env: dict[str, str], parent: str = agent, argv: str = "fit") -> list[str]:
        monkeypatch.setattr(restart, "_parent", lambda: parent)
        monkeypatch.setattr(sys, "argv", ["lit_dp", argv])
        return restart.names(env)

    def knows(marks: list[str], env: dict[str, str], parent: str = agent, argv: str = "fit") -> bool:
        names(env, parent, argv)
        return known_by(marks, env, tmp_path)

    assert names({}) == [] == restart.started_as({})
    marks = names(torchrun)
    assert knows(marks, torchrun)  # its agent is there still: a host has joined
    assert not knows(marks, torchrun, other)  # another job of that id
    assert knows(marks, torchrun | again, other)  # a script stands between the agent and the rank
    assert not knows(marks, torchrun | again | {"TORCHELASTIC_RUN_ID": "none"}, other)
    marks = names(slurm)
    assert not knows(marks, slurm)  # not requeued: the same command, typed a second time in an allocation
    assert knows(marks, slurm | requeued)
    assert not knows(marks, slurm | requeued, argv="fit --seed 2")  # another command of that script
    assert not knows(marks, slurm | requeued | {"SLURM_JOB_ID": "6"})
    marks = names(torchrun | slurm)
    assert knows(marks, torchrun | slurm | requeued, other)  # torchrun in a job that was requeued
    monkeypatch.setattr(restart, "_fits", restart._fits + 1)
    assert not knows(marks, torchrun | slurm | requeued)  # the next training of the same process


def test_the_run_folder_that_a_job_used_last(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "a-2", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / restart.JOB).write_text("another\nmine\n" if name != "b" else "yours\n")
        os.utime(tmp_path / name / restart.JOB, (number, number))
    assert restart.made_by(["mine"], tmp_path / "a") == [tmp_path / "a-2", tmp_path / "a"]
    assert restart.made_by([], tmp_path / "a") == []
    content = {"epoch": 0, "global_step": 3, "state_dict": {}}
    DurableCheckpointIO().save_checkpoint(
        content, tmp_path / "a" / "checkpoints" / "last.ckpt"
    )  # a-2 was killed before it could save
    for resume in ("again", "auto", "required", "elsewhere.ckpt"):
        assert (
            restart.choose(resume, tmp_path / "c" / "checkpoints", ["mine"]).path
            == f"{tmp_path}/a/checkpoints/last.ckpt"
        )
    assert restart.choose("never", tmp_path / "a" / "checkpoints", ["mine"]) == restart.Choice()
    assert restart.choose("again", tmp_path / "a" / "checkpoints", ["yours"]) == restart.Choice()


# --- what a person types ---


OWN = """
import os, pathlib, signal, torch, lit_dp
from lightning.pytorch import Callback

class Own(lit_dp.LitClassifier):
    def __init__(self, lr: float = 0.005, hidden: int = 8):
        layers = torch.nn.Flatten(), torch.nn.Linear(64, hidden), torch.nn.Linear(hidden, 10)
        super().__init__(torch.nn.Sequential(*layers), 10)
        self.save_hyperparameters()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_rank == 1 and self.global_step == 25 and pathlib.Path("dies").exists():
            pathlib.Path("dies").unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self):
        print("trains with", self.optimizers().param_groups[0]["lr"], self.hparams.hidden)
"""


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plots, "draw_curves", lambda *_: None)  # a third of each command's time
    return tmp_path


FIT = ["fit", "--config", "digits", "--model", "own.Own", "--trainer.accelerator", "cpu"]


def command(cwd: Path, *args: str) -> None:
    os.chdir(cwd)
    sys.argv = ["lit_dp", *args]
    main()


def test_torchrun_goes_on_in_the_folder_of_its_job(cwd: Path) -> None:
    """`torchrun --max-restarts 1 -m lit_dp fit ...`, in which a rank is killed; and another time, without that."""
    (cwd / "dies").touch()
    said = []
    for name in ("first", "second"):
        (folder := cwd / name).mkdir()
        args = (*FIT, "--trainer.max_epochs", "2")
        with launched("torchrun", 2, command, cwd, *args, folder=folder, max_restarts=1) as run:
            assert run.wait() == 0, run.err
        said.append(run.out)
    assert "resume: goes on from runs/digits/checkpoints/last.ckpt" in said[0]
    assert "resume:" not in said[1]
    shas = [re.findall(r"weights SHA-256 (\w+)", out) for out in said]
    assert shas[0] == shas[1] != []
    assert [len(re.findall(f"epoch {n}: 1,258 samples, each used once", said[0])) for n in (1, 2)] == [1, 1]
    assert sorted(path.name for path in (cwd / "runs").iterdir()) == ["digits", "digits-2"]
    rows = [(cwd / "runs" / name / "metrics.csv").read_text() for name in ("digits", "digits-2")]
    assert rows[0] == rows[1]


def fit(cwd: Path, *args: str | Path, epochs: int, ranks: int = 1) -> Ended:
    """Rank 0's words. One process, where the number of them does not matter."""
    return lit_dp(
        *FIT, "--trainer.max_epochs", str(epochs), *args, "--trainer.devices", str(ranks), ranks=ranks, cwd=cwd
    )[0]


def epochs_in(ended: Ended) -> list[int]:
    assert ended.code == 0, ended.err
    return [int(n) for n in re.findall(r"^epoch (\d+): ", ended.out, re.MULTILINE)]


def test_every_way_to_resume(cwd: Path) -> None:
    last = cwd / "runs/digits/checkpoints/last.ckpt"
    nothing = "no valid checkpoint to resume from in runs/digits/checkpoints; --resume auto begins anew then"
    for args in (["--resume", "required"], ["--ckpt_path", "last"]):
        assert fit(cwd, *args, epochs=1)[::2] == (2, f"error: {nothing}\n")
    assert epochs_in(fit(cwd, "--resume", "auto", epochs=1)) == [1]
    assert epochs_in(fit(cwd, "--resume", "auto", epochs=2)) == [2]
    assert epochs_in(fit(cwd, "--ckpt_path", "last", epochs=3)) == [3]
    assert epochs_in(fit(cwd, "--resume", "required", epochs=4)) == [4]
    assert [path.name for path in (cwd / "runs").iterdir()] == ["digits"]

    assert epochs_in(fit(cwd, "--resume", last, "--name", "file", epochs=5)) == [5]
    assert epochs_in(fit(cwd, "--resume", "runs/digits", "--name", "folder", epochs=5)) == [5]
    assert epochs_in(fit(cwd, epochs=1)) == [1]
    assert epochs_in(fit(cwd, "--resume", "never", epochs=1)) == [1]
    assert sorted(path.name for path in (cwd / "runs").iterdir()) == [
        "digits",
        "digits-2",
        "digits-3",
        "file",
        "folder",
    ]

    both = fit(cwd, "--resume", "auto", "--ckpt_path", last, epochs=5)
    assert both[::2] == (2, f"error: ckpt_path is {last} and resume is auto: give one of them\n")
    missing = fit(cwd, "--resume", "atuo", epochs=5)
    told = "there is no checkpoint atuo: give a file, a run folder, auto, required, never"
    assert missing[::2] == (2, f"error: {told}\n")
    assert not (cwd / "runs" / "digits-4").exists()

    last.write_bytes(last.read_bytes()[:-1000])
    torn = fit(cwd, "--resume", "auto", epochs=5)
    assert "resume: runs/digits/checkpoints/last.ckpt is torn: its end is missing: passed over" in torn.out
    assert "resume: goes on from runs/digits/checkpoints/" in torn.out
    assert 5 in epochs_in(torn)


def test_command_line_beats_config_beats_checkpoint(cwd: Path) -> None:
    """FAULTS 18: with Lightning the checkpoint's value beats what is typed."""
    (cwd / "lr.yaml").write_text("model: {class_path: own.Own, init_args: {lr: 0.002}}\n")
    assert "trains with 0.01 16" in fit(cwd, "--model.lr", "0.01", "--model.hidden", "16", epochs=1).out
    saved = ["--resume", "runs/digits/checkpoints/last.ckpt", "--name", "more"]
    typed = fit(cwd, *saved, "--config", "lr.yaml", "--model.lr", "0.001", epochs=2)
    assert "trains with 0.001 16" in typed.out
    assert "hyperparameter lr: 0.001 is used, 0.01 is the checkpoint's" in typed.out
    configured = fit(cwd, *saved, "--config", "lr.yaml", epochs=2)
    assert "trains with 0.002 16" in configured.out
    assert "hyperparameter lr: 0.002 is used, 0.01 is the checkpoint's" in configured.out
    for resume in (saved[1], "runs/digits", "auto"):
        neither = fit(cwd, "--resume", resume, epochs=2)
        assert "trains with 0.01 16" in neither.out
        assert "hyperparameter" not in neither.out


class Scheduled(LitClassifier):
    """Half the learning rate each epoch, after a warm-up over two."""

    def __init__(self, lr: float, decay: float, beta: float, gamma: float) -> None:
        super().__init__(network(), 4)
        self.of = (lr, decay, beta, gamma)

    def configure_optimizers(self) -> Any:
        lr, decay, beta, gamma = self.of
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=decay, betas=(beta, 0.9))
        parts = [LinearLR(optimizer, 0.5, total_iters=2), ExponentialLR(optimizer, gamma)]
        return [optimizer], [SequentialLR(optimizer, parts, [2])]


def rates(folder: Path, epochs: int, *of: float) -> tuple[list[float], dict[str, Any]]:
    """Learning rate of every epoch, and the other options at the end."""
    seen: list[float] = []
    last, options = LastCheckpoint(), {}

    class See(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            options.update(trainer.optimizers[0].param_groups[0], params=None)
            if batch_idx == 0:
                seen.append(options["lr"])

    trainer = quiet_trainer(max_epochs=epochs, limit_val_batches=0, default_root_dir=folder, callbacks=[See(), last])
    trainer.fit(Scheduled(*of), datamodule=Points(8), resume="auto")
    return seen, options


def test_what_is_configured_anew_counts_in_optimizers_and_schedules(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    same = (0.1, 0.01, 0.8, 0.5)
    assert run_ranks(1, rates, tmp_path, 3, *same)[0][0] == pytest.approx([0.05, 0.075, 0.1])
    assert "is used" not in capfd.readouterr().out
    assert run_ranks(1, rates, tmp_path, 4, *same)[0][0] == pytest.approx([0.05])
    assert "is used" not in capfd.readouterr().out
    seen, options = run_ranks(1, rates, tmp_path, 6, 0.2, 0.02, 0.7, 0.25)[0]
    assert seen == pytest.approx([0.05, 0.0125])  # twice what it would be, and a quarter of it
    assert (options["weight_decay"], options["betas"], options["initial_lr"]) == (0.02, (0.7, 0.9), 0.2)
    said = capfd.readouterr().out
    for line in ("lr: 0.2 is used, 0.1", "weight_decay: 0.02 is used, 0.01", "betas: [0.7, 0.9] is used, [0.8, 0.9]"):
        assert f"optimizer {line} is the checkpoint's" in said
    assert "ExponentialLR gamma: 0.25 is used, 0.5 is the checkpoint's" in said


def test_rank_zero_decides(tmp_path: Path) -> None:
    """Whatever other ranks see: here none sees the files of another."""
    for rank, steps in enumerate((4, 8, 0)):
        content = {"epoch": 0, "global_step": steps, "state_dict": {}}
        if steps:
            DurableCheckpointIO().save_checkpoint(content, tmp_path / str(rank) / "checkpoints" / "last.ckpt")
    assert run_ranks(3, _chosen, tmp_path) == [f"{tmp_path}/0/checkpoints/last.ckpt"] * 3


def _chosen(root: Path) -> str | None:
    return agreed(quiet_trainer(default_root_dir=root / os.environ["RANK"]), "auto")
