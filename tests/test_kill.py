"""The kill matrix (laws L3, L4): whatever is killed, whenever, a training that is started again ends with the same bits
as one that was not, and has used every sample once in every epoch."""

import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lit_dp.engine.checkpoint_files import examine, newest
from lit_dp.engine.samplers import TrainBatches
from tests.killing import Kill, Training, end, kill_at_random, live

pytestmark = pytest.mark.matrix

TRAINING = Training()
"""6 steps an epoch, the last of them padded; a save after every second."""
SEED = 5


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("whole")
    assert live(root, TRAINING, ranks=1).code == 0
    return end(root)


def finish(root: Path, ranks: int) -> str:
    last = live(root, TRAINING, ranks)
    assert last.code == 0, last.err
    return end(root)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_number_of_processes_leaves_no_trace(ranks: int, uninterrupted: str, tmp_path: Path) -> None:
    assert finish(tmp_path, ranks) == uninterrupted


BOTH = (0, 1)
KILLS = [  # on how many processes, and on how many it goes on
    (2, Kill("setup", (1,)), 2),
    (2, Kill("forward", (0,), 13), 1),
    (2, Kill("forward", (1,), 14), 4),
    (2, Kill("forward", BOTH, 13), 2),
    (1, Kill("backward", (0,), 33), 2),
    (4, Kill("backward", (3,), 8), 1),
    (2, Kill("all-reduce", (0,), 9), 2),
    (2, Kill("all-reduce", (1,), 20), 4),
    (4, Kill("all-reduce", (0, 2), 11), 2),
    (2, Kill("on_train_batch_end", (1,), 22), 1),
    (2, Kill("validation", (0,), 9), 1),
    (2, Kill("validation", (1,), 20), 2),
    (4, Kill("validation", (0, 1, 2, 3), 5), 2),
    (2, Kill("on_validation_end", (0,), 2), 2),
    (2, Kill("on_train_epoch_end", (0,), 2), 1),
    (2, Kill("on_train_epoch_end", (1,), 3), 4),
    (2, Kill("on_train_end", (1,)), 1),
]


@pytest.mark.parametrize(("ranks", "kill", "then"), KILLS, ids=[f"{k.at} of {k.ranks} on {n}" for n, k, _ in KILLS])
def test_killed_in(ranks: int, kill: Kill, then: int, uninterrupted: str, tmp_path: Path) -> None:
    killed = live(tmp_path, TRAINING, ranks, kill)
    assert killed.code == 128 + signal.SIGKILL
    assert not killed.over or kill.at == "on_train_end"
    assert finish(tmp_path, then) == uninterrupted


def save_and_be_killed(at: str, calls: list[int], root: Path) -> list[bool]:
    """Lives of a training that has saved before, each killed in its first save; whether it was not saved."""
    live(root, TRAINING, 2, Kill("on_train_batch_start", (0,), 11))  # step 6 of 24: four saves are left
    lost = []
    for number, call in enumerate(calls):
        before = newest(root / "checkpoints")[0]
        assert before is not None
        step = examine(before).global_step
        killed = live(root, TRAINING, 1 + number % 2, Kill(at, (0,), call))
        assert killed.code == 128 + signal.SIGKILL
        after = newest(root / "checkpoints")[0]
        assert after is not None
        lost.append(examine(after).global_step == step)
    return lost


def test_killed_before_any_system_call_of_a_save(uninterrupted: str, tmp_path: Path) -> None:
    lost = save_and_be_killed("save", list(range(1, 11)), tmp_path)
    assert lost == [True] * 7 + [False] * 3  # the seventh gives it its name
    assert finish(tmp_path, 4) == uninterrupted


def test_killed_while_a_save_is_written(uninterrupted: str, tmp_path: Path) -> None:
    assert all(save_and_be_killed("write", [1, 2, 20, 60, 110], tmp_path))
    assert finish(tmp_path, 1) == uninterrupted


# ---- from outside


def kill_all(run: Any) -> None:
    run.wait_for("steps", 9)
    for line in run.notes("pids"):
        os.kill(int(line.split()[1]), signal.SIGKILL)


def kill_a_worker(run: Any) -> None:
    run.wait_for("workers", 2)
    run.wait_for("steps", 8)
    os.kill(int(run.notes("workers")[-1]), signal.SIGKILL)


def kill_the_supervisor(run: Any) -> None:
    run.wait_for("steps", 9)
    os.kill(run.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("kill", "code"), [(kill_all, 137), (kill_a_worker, 1), (kill_the_supervisor, -signal.SIGKILL)]
)
def test_killed_from_outside(kill: Any, code: int, uninterrupted: str, tmp_path: Path) -> None:
    slow = replace(TRAINING, workers=1, pace=0.02)
    killed = live(tmp_path, slow, 2, kill)
    assert (killed.code, killed.over) == (code, False), killed.err
    assert live(tmp_path, replace(TRAINING, workers=2), 4).code == 0
    assert end(tmp_path) == uninterrupted


@pytest.mark.parametrize("kill", [Kill("forward", (1,), 14), Kill("all-reduce", (0,), 9)], ids=str)
def test_killed_under_torchrun(kill: Kill, uninterrupted: str, tmp_path: Path) -> None:
    assert live(tmp_path, TRAINING, 2, kill, "torchrun").code == 1
    assert live(tmp_path, TRAINING, 4, None, "torchrun").code == 0
    assert end(tmp_path) == uninterrupted


def test_killed_at_thirty_random_moments(tmp_path: Path) -> None:
    """Ranks, all or some of them, or the supervisor; each life on another number of processes."""
    draw, longer = random.Random(SEED), replace(TRAINING, epochs=16)
    (tmp_path / "whole").mkdir()
    assert live(tmp_path / "whole", longer, 1).code == 0
    for _ in range(30):
        life = live(tmp_path, replace(longer, pace=0.004), draw.choice((1, 2, 4)), kill_at_random(draw, steps=4))
        assert life.code != 0
        assert not life.over
    assert live(tmp_path, longer, draw.choice((1, 2, 4))).code == 0
    assert end(tmp_path) == end(tmp_path / "whole")


# ---- what the comparison sees


def test_an_epoch_read_from_its_beginning_is_seen(uninterrupted: str, tmp_path: Path) -> None:
    """FAULTS 5, put into the second life."""

    def begin(self: TrainBatches) -> Any:
        self.start = 0
        return read(self)

    read = TrainBatches.__iter__
    live(tmp_path, TRAINING, 2, Kill("forward", (0,), 19))  # in step 10; saved after 8, 2 of them in the second epoch
    with mock.patch.object(TrainBatches, "__iter__", begin):
        assert live(tmp_path, TRAINING, 2).code == 0
    with pytest.raises(AssertionError, match="MISSING"):
        end(tmp_path)
    assert uninterrupted not in (tmp_path / "end").read_text()
