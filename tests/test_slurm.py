"""Under a real Slurm: a controller and two nodes, all on this host, for as long as the tests run.

Without Slurm (Debian: apt-get install slurm-wlm munge) they are skipped.
"""

import contextlib
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.command import lit_dp
from tests.ranks import free_port

REPOSITORY = Path(__file__).parents[1]
PATH = f"{os.environ['PATH']}:/usr/sbin:/opt/slurm/bin:/opt/slurm/sbin"
PROGRAMS = {
    name: shutil.which(name, path=PATH) for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel")
}
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(None in PROGRAMS.values(), reason="Slurm is not installed"),
]
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=10
SchedulerParameters=sched_min_interval=0
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""
FIT = ["fit", "--config", "digits", "--trainer.max_epochs", "6", "--trainer.accelerator", "cpu"]


class Slurm:
    """Two nodes of one CPU each, under a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir()
        ports = [free_port() for _ in range(3)]
        host, user = socket.gethostname(), getpass.getuser()
        (folder / "slurm.conf").write_text(CONFIG.format(host=host, user=user, folder=folder, ports=ports))
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{PATH}",
            # By default it is a node's name, which a real cluster's hosts know.
            "MASTER_ADDR": "127.0.0.1",
        }
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o600)
        self.daemons: list[subprocess.Popen] = []

    def begin(self) -> None:
        folder = self.folder
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
        key = f"--key-file={folder}/key"
        self._start("munged", "--foreground", "--force", key, f"--socket={folder}/munge.socket", *files)
        self.until(lambda: (folder / "munge.socket").exists())
        self._start("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-N", node)
        self.until(lambda: self.run("sinfo", "-h", "-o", "%D %t", check=False).strip() == "2 idle")

    def _start(self, name: str, *args: str) -> None:
        with open(self.folder / "daemons.log", "a") as log:
            program = shutil.which(name, path=PATH)
            assert program is not None
            command = [program, *args]
            self.daemons.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.folder))

    def run(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, cwd=cwd or self.folder, timeout=20)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def until(self, condition: Callable[[], bool], seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.folder / "daemons.log").read_text()[-3000:]
            time.sleep(0.05)

    def end(self) -> None:
        self.run("scancel", "--user", getpass.getuser(), "--signal=KILL", check=False)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=2)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


class Batch:
    """A job of the script that we ship, on both nodes."""

    def __init__(self, slurm: Slurm, cwd: Path) -> None:
        self.slurm, self.output = slurm, cwd / "output"
        script = str(REPOSITORY / "configs" / "cluster" / "slurm.sbatch")
        here = [
            "--nodes=2",
            "--ntasks-per-node=1",
            "--gpus-per-node=0",
            "--cpus-per-task=1",
            "--output=output",
            "--parsable",
        ]
        self.number = slurm.run("sbatch", *here, script, *FIT[1:], cwd=cwd).strip()

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait_for(self, text: str, seconds: float = 60) -> float:
        """Until it has said so; how long that took."""
        begun = time.monotonic()
        while text not in self.said:
            assert time.monotonic() - begun < seconds, f"no {text!r}: {self.said[-3000:]}"
            time.sleep(0.02)
        return time.monotonic() - begun

    def is_started_again(self) -> bool:
        """Without waiting for two minutes, as Slurm does; in the second in which it was killed a node refuses it."""
        job = self.slurm.run("scontrol", "show", "job", self.number)
        if "Restarts=1" in job and "JobState=PENDING" in job:
            time.sleep(2)
            self.slurm.run("scontrol", "update", f"JobId={self.number}", "StartTime=now", check=False)
        return "Restarts=1" in job and "JobState=RUNNING" in job

    @property
    def state(self) -> str:
        return self.slurm.run("squeue", "-h", "-j", self.number, "-o", "%t", check=False).strip()

    def wait_until_over(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.state:
            assert time.monotonic() < deadline, self.said[-3000:]
            time.sleep(0.05)

    def processes(self) -> dict[int, int]:
        """Process ids of its ranks."""
        ranks = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                env = dict(line.split("=", 1) for line in (path / "environ").read_text().split("\0") if "=" in line)
                if env.get("SLURM_JOB_ID") == self.number and b"lit_dp" in (path / "cmdline").read_bytes().split(b"\0"):
                    ranks[int(env["SLURM_PROCID"])] = int(path.name)
        return ranks


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    running = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        running.begin()
        yield running
    finally:
        running.end()


def test_a_job_is_saved_queued_again_and_goes_on_by_itself(slurm: Slurm, tmp_path: Path) -> None:
    batch = Batch(slurm, tmp_path)
    (reference := tmp_path / "reference").mkdir()
    expected = re.findall(r"weights SHA-256 (\w+)", lit_dp(*FIT, ranks=2, cwd=reference)[0].out)
    batch.wait_for("epoch 2: 1,258 samples, each used once")
    assert "launcher       slurm (SLURM_NTASKS=2" in batch.said
    assert batch.said.count("processes      2 hosts x 1 device = 2") == 1
    slurm.run("scancel", "--signal=USR1", batch.number)
    assert batch.wait_for(f"Slurm job {batch.number} requeued") < 5
    for node, task in (("n1", 0), ("n2", 1)):
        batch.wait_for(f"srun: error: {node}: task {task}: Exited with exit code 75")
    slurm.until(batch.is_started_again)
    batch.wait_for("weights SHA-256")
    batch.wait_until_over(20)
    assert "resume: goes on from runs/digits/checkpoints/last.ckpt" in batch.said
    assert re.findall(r"weights SHA-256 (\w+)", batch.said) == expected
    epochs = re.findall(r"^epoch (\d): 1,258 samples, each used once", batch.said, re.MULTILINE)
    assert epochs == [str(n) for n in range(1, 7)]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits"]


def test_a_rank_that_is_killed_ends_the_job_and_is_named(slurm: Slurm, tmp_path: Path) -> None:
    batch = Batch(slurm, tmp_path)
    batch.wait_for("epoch 1: 1,258 samples, each used once")
    ranks = batch.processes()
    os.kill(ranks[1], signal.SIGKILL)
    begun = time.monotonic()
    while Path(f"/proc/{ranks[0]}").exists():
        assert time.monotonic() - begun < 10
        time.sleep(0.02)
    batch.wait_until_over(10)
    assert re.search(r"error: rank 1 on \S+ ended without a word \(killed\? out of memory\?", batch.said)
    assert "task 1: Killed" in batch.said
    assert batch.processes() == {}
