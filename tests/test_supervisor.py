"""The supervisor of the command line (engine/supervisor.py, watch.py, lifeline.py; FAULTS 23, 25, 33; law L9).

Ranks are small scripts without torch. Their output is read to its end, and that comes only when the last process that
can write to it is gone: no test passes that leaves one behind.
"""

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch.utilities import rank_zero_only as lightning_rank_zero_only
from torchmetrics.utilities.prints import rank_zero_only as torchmetrics_rank_zero_only

from lit_dp import processes
from lit_dp.cli import LitCLI
from lit_dp.engine import lifeline
from lit_dp.engine.launch import check, detect
from lit_dp.errors import ConfigError

REPOSITORY = Path(__file__).parents[1]
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR")
LAUNCHERS += ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "_LIT_DP_OMP_NUM_THREADS", "LIT_DP_SUPERVISED")
NOT_INHERITED = (*LAUNCHERS, "PYTHONUNBUFFERED")
HOST = socket.gethostname()
PREAMBLE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # however pytest was started
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup
from lit_dp.engine import supervisor, watch
from lit_dp.engine.lifeline import die_with_parent, tell_cause
watch.GRACE_SECONDS = 1

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole lines, whoever else writes

def on(signum, code):
    def handler(number, _):
        say("rank", rank, signal.Signals(number).name)
        sys.exit(code)
    signal.signal(signum, handler)

def sleep():
    say("ready")
    for _ in range(600):  # Python sleeps through a signal that comes just before
        time.sleep(0.1)
"""


class Ended(NamedTuple):
    code: int
    out: list[str]
    err: list[str]
    seconds: float


class Command:
    """A supervisor of `ranks` ranks that run `body`, as a process group of this session."""

    def __init__(self, body: str, ranks: int = 2, supervise: str = "", **env: str) -> None:
        call = supervise or f"supervisor.supervise({ranks})"
        script = f"{PREAMBLE}\nprint('once')\nrank = {call}\n{textwrap.dedent(body)}"
        self.process = started([sys.executable, "-c", script], REPOSITORY, **env)
        self.out = ""

    def wait_for(self, *lines: str) -> "Command":
        """Read until each of the lines has been said, once for each time that it is given."""
        self.out = read_until(self.process, lambda said: not Counter(lines) - Counter(said.splitlines()), 10)
        return self

    def send(self, signum: int) -> "Command":
        self.process.send_signal(signum)
        return self

    def end(self, timeout: float = 10) -> Ended:
        begun = time.monotonic()
        out, err = self.process.communicate(timeout=timeout)
        seconds = time.monotonic() - begun
        return Ended(self.process.returncode, (self.out + out).splitlines(), err.splitlines(), seconds)


def started(command: list[str], cwd: Path, **env: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    pipe: Any = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=cwd, env=inherited | env, stdout=pipe, stderr=pipe, text=True, preexec_fn=os.setpgrp
    )
    _running.append(process)
    return process


_running: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Also of a test that has failed."""
    yield
    while _running:
        end_all_of(_running.pop())


def end_all_of(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        for pid in descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
    if process.stdout is not None and not process.stdout.closed:
        process.communicate(timeout=60)


def read_until(process: subprocess.Popen[str], enough: Callable[[str], bool], seconds: float) -> str:
    """What it has written to its standard output."""
    assert process.stdout is not None
    said, end = "", time.monotonic() + seconds
    while not enough(said):
        left = end - time.monotonic()
        ready = left > 0 and select.select([process.stdout], [], [], left)[0]
        more = os.read(process.stdout.fileno(), 4096).decode(errors="ignore") if ready else ""
        if not more:
            end_all_of(process)
            raise AssertionError(f"only {said!r}")
        said += more
    return said


def descendants(pid: int) -> Iterator[int]:
    with suppress(FileNotFoundError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield from descendants(child)
            yield child


def run(body: str, ranks: int = 2, supervise: str = "", env: dict[str, str] | None = None) -> Ended:
    return Command(body, ranks, supervise, **(env or {})).end()


# ---- what a rank finds


def test_ranks_have_a_launchers_variables() -> None:
    names = "LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR LIT_DP_SUPERVISED RANK"
    body = f"say(rank, *[os.environ.get(name) for name in {names.split()}], os.environ['MASTER_PORT'].isdecimal())"
    ended = run(body, ranks=3, env={"RANK": "7"})
    assert (ended.code, ended.err) == (0, [])
    said = [f"{rank} {rank} 3 3 None 127.0.0.1 1 None True" for rank in range(3)]
    assert sorted(ended.out) == [*said, "once"]  # what was in a buffer is not printed by each


def test_the_second_host_has_the_higher_ranks() -> None:
    body = "say(rank, *[os.environ[name] for name in ('LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')])"
    own = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    for name in ("NODE_RANK", "GROUP_RANK"):
        ended = run(body, supervise="supervisor.supervise(2, hosts=2)", env=own | {name: "1"})
        assert sorted(ended.out) == ["2 0 4 host0 29500", "3 1 4 host0 29500", "once"]
    own["NODE_RANK"] = "1"
    ended = run("sys.exit(3 * (rank == 3))", supervise="supervisor.supervise(2, hosts=2)", env=own)
    assert ended.err == [f"error: rank 3 on {HOST} was the first to end, with exit code 3"]


def test_nobody_is_given_the_port_before_rank_0_listens() -> None:
    body = """
        import socket
        probe, port = socket.socket(), int(os.environ["MASTER_PORT"])
        if rank == 0:  # as torch's store does
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port)), probe.listen(), say("listens")
        else:
            time.sleep(0.2)
            try:
                probe.bind(("", port))
            except OSError as error:
                say(error.strerror)
    """
    alone = run(body.replace("if rank == 0", "if False"))
    assert sorted(alone.out) == ["Address already in use"] * 2 + ["once"]
    assert "listens" in run(body).out


def test_a_rank_that_reads_gets_nothing_and_is_not_stopped() -> None:
    said, code = in_terminal("say('read', repr(sys.stdin.read()))", {})
    assert (said.count("read ''"), code) == (2, 0)


def test_a_rank_has_its_signals_and_no_descriptors_of_the_supervisor() -> None:
    body = """
        say(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGCHLD), signal.set_wakeup_fd(-1))
        say(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        files = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
        say({*files} == {"0", "1", "2", os.environ["LIT_DP_CAUSE_FD"].split(":")[0]})
    """
    ended = run(body)
    assert ended.out.count("0 0 -1") == ended.out.count("set()") == ended.out.count("True") == 2


def test_ranks_can_be_new_interpreters() -> None:
    other = "import os; from lit_dp.engine.lifeline import tell_cause; os.write(1, b'%d\\n' % tell_cause('x'))"
    ended = run("", supervise=f"supervisor.supervise(2, command=[sys.executable, '-c', {other!r}])")
    assert sorted(ended.out) == ["1", "1", "once"]
    assert ended.code == 0


def test_supervisor_is_light() -> None:
    loaded = "sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'lightning', 'numpy'})"
    assert run(f"say({loaded})", ranks=1).out == ["once", "[]"]


# ---- exit codes and last words


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("", 0, None),
        ("sys.exit(75)", 75, None),
        ("sys.exit(75 * rank)", 75, None),
        ("sys.exit(2)", 2, "rank [01] on HOST was the first to end, with exit code 2"),
        ("rank or time.sleep(0.3); sys.exit(3 + rank)", 4, "rank 1 on HOST was the first to end, with exit code 4"),
        ("rank or time.sleep(0.3); sys.exit(3 * rank)", 3, "rank 1 on HOST was the first to end, with exit code 3"),
        ("rank and os._exit(9)", 9, "rank 1 on HOST was the first to end, with exit code 9"),
        (
            "rank or os.kill(os.getpid(), 9); time.sleep(0.3); sys.exit(1)",
            137,
            r"rank 0 on HOST was killed by SIGKILL \(out of memory\? see dmesg\)",
        ),
        ("rank and os.abort()", 134, "rank 1 on HOST was killed by SIGABRT"),
        ("rank and os.kill(os.getpid(), 40)", 168, "rank 1 on HOST was killed by signal 40"),
        ("rank and os.kill(os.getpid(), signal.SIGTERM)", 143, "rank 1 on HOST was killed by SIGTERM"),
        # the rank that told first is the cause, though others may end before it
        (
            "if rank: tell_cause('error: full disk'), time.sleep(0.3)\ntime.sleep(0.3); sys.exit(5 - rank)",
            4,
            "full disk",
        ),
        ("rank or time.sleep(0.3); tell_cause(f'error: {rank}'); time.sleep(0.3); sys.exit(1)", 1, "1"),
        # it told, but did not end
        ("if rank: tell_cause('error: full disk'), time.sleep(60)\ntime.sleep(0.3); sys.exit(5)", 1, "full disk"),
        # died before another noticed and told
        (
            "rank and os.kill(os.getpid(), 9)\ntime.sleep(0.3); tell_cause('error: lost a peer'); sys.exit(1)",
            137,
            r"rank 1 on HOST was killed by SIGKILL \(out of memory\? see dmesg\)",
        ),
        # told, but got over it
        ("tell_cause('error: never mind'); sys.exit(75 * rank)", 75, None),
        ("if rank: tell_cause('error: a\\0b' + 'ü' * 9999); sys.exit(1)", 1, "abü{2000,2048}"),
    ],
)
def test_exit_code_and_last_line(body: str, code: int, words: str | None) -> None:
    ended = run(body)
    assert ended.code == code, ended.err
    assert len(ended.err) == (words is not None), ended.err
    assert words is None or re.fullmatch("error: " + words.replace("HOST", re.escape(HOST)), ended.err[-1]), ended.err


def test_the_cause_is_printed_after_everything_else() -> None:
    """Rank 1 tells its cause at once; what the others write until they are gone comes before it."""
    body = """
        if rank == 1:
            tell_cause("error: the cause"), sys.exit(1)
        time.sleep(0.3)
        sys.stderr.write("Traceback: connection reset by peer\\n"), sys.exit(1)
    """
    assert run(body, ranks=3).err == ["Traceback: connection reset by peer"] * 2 + ["error: the cause"]


def test_of_ranks_found_dead_at_once_one_that_was_killed_is_the_cause() -> None:
    """A busy machine: what follows from the kill has happened too when the supervisor looks."""
    command = Command("say('ready'); time.sleep(0.2); rank == 2 and os.kill(os.getpid(), 9); sys.exit(1)", ranks=3)
    ranks = list(descendants(command.wait_for("ready", "ready", "ready").send(signal.SIGSTOP).process.pid))
    until(lambda: [state(pid) for pid in ranks] == ["Z", "Z", "Z"])
    ended = command.send(signal.SIGCONT).end()
    assert ended.code == 137
    assert ended.err[-1].startswith(f"error: rank 2 on {HOST} was killed by SIGKILL")


def test_without_a_supervisor_a_cause_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lifeline.CAUSE_FD, raising=False)
    assert not lifeline.tell_cause("error")
    read, write = os.pipe()
    monkeypatch.setenv(lifeline.CAUSE_FD, f"{write}:{os.fstat(write).st_ino}")
    assert lifeline.tell_cause("error")
    assert os.read(read, 99) == b"0 error\0"
    os.close(read)
    assert not lifeline.tell_cause("error")  # the supervisor is gone
    os.close(write)
    assert not lifeline.tell_cause("error")
    _, other = os.pipe()  # a process that a rank has started may have anything under that number
    monkeypatch.setenv(lifeline.CAUSE_FD, f"{other}:1")
    assert not lifeline.tell_cause("error")


# ---- nobody is left (FAULTS 25)

STUBBORN = """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    worker = subprocess.Popen(["sleep", "60"])  # holds this command's standard output, as a loader worker does
"""


@pytest.mark.parametrize("end", ["sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_others_and_loader_workers_are_killed_after_a_failure(end: str) -> None:
    ended = run(STUBBORN + f"    if rank == 1: {end}\n    sleep()", ranks=3)
    assert ended.code in (1, 137)
    assert 0.9 < ended.seconds < 5
    assert ended.err[-1].startswith(f"error: rank 1 on {HOST} was ")


def test_others_end_by_themselves_in_the_time_that_they_get() -> None:
    ended = run("if rank == 1: sys.exit(1)\ntime.sleep(0.3); say('closed my files')")
    assert "closed my files" in ended.out
    assert ended.code == 1


def test_ranks_that_fail_one_after_another_give_the_others_no_more_time() -> None:
    ended = run("time.sleep(0.7 * rank); rank == 2 and say('late'); rank < 3 and sys.exit(1); sleep()", ranks=4)
    assert (ended.code, ended.out) == (1, ["once"])


def test_who_saves_is_not_hurried_by_who_has_saved() -> None:
    ended = run("if rank: time.sleep(1.3), say('saved, too')\nsys.exit(75)")
    assert (ended.code, ended.err) == (75, [])
    assert "saved, too" in ended.out


def test_ranks_get_sigterm_when_the_supervisor_is_killed() -> None:
    command = Command("on(signal.SIGTERM, 75)\nsleep()").wait_for("ready", "ready")
    ended = command.send(signal.SIGKILL).end()
    assert ended.code == -signal.SIGKILL
    assert sorted(ended.out) == ["once", "rank 0 SIGTERM", "rank 1 SIGTERM", "ready", "ready"]


def test_a_worker_dies_with_its_rank() -> None:
    body = """
        if os.fork() == 0:
            die_with_parent(signal.SIGKILL)
            sleep()
        time.sleep(0.3)
        os._exit(0)  # nobody looks for what a rank without failure has left
    """
    assert run(body).seconds < 5


def test_a_parent_that_died_before_is_noticed() -> None:
    body = """
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.01)
            die_with_parent(signal.SIGKILL, parent)
            say("lives on")
    """
    assert run(body, ranks=1).out == ["once"]


def test_no_process_can_be_started() -> None:
    broken = """
    def fork(start=os.fork, left=[None]):
        if not left: raise BlockingIOError(11, "Resource temporarily unavailable")
        return left.pop() or start()
    os.fork = fork
    """
    call = "supervisor.supervise(2)"
    ended = run("sleep()", supervise=f"[exec({textwrap.dedent(broken)!r}), {call}][1]")
    assert ended.code == 1
    assert ended.err[-1].endswith("the system starts only 1 of 2 processes: Resource temporarily unavailable")


# ---- signals (FAULTS 23)


@pytest.mark.parametrize(
    ("sent", "got"),
    [("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGUSR1"), ("SIGHUP", "SIGTERM"), ("SIGINT", "SIGTERM")],
)
def test_a_signal_is_handed_on_to_every_rank(sent: str, got: str) -> None:
    body = "on(signal.SIGTERM, 75), on(signal.SIGUSR1, 75), on(signal.SIGINT, 1)\nsleep()"
    ended = Command(body).wait_for("ready", "ready").send(signal.Signals[sent]).end()
    assert sorted(ended.out) == ["once", f"rank 0 {got}", f"rank 1 {got}", "ready", "ready"]
    assert ended.code == 75
    assert ended.err == ["stopping: all ranks are asked to end; Ctrl-C again kills them"] * (sent == "SIGINT")


def test_a_signal_goes_to_ranks_not_to_their_workers() -> None:
    """A rank reads on until it has saved: Lightning and DataLoader would fail where a worker dies."""
    body = """
        worker = subprocess.Popen(["sleep", "60"])
        def save(*_):
            time.sleep(0.1)
            say("worker", worker.poll()), worker.kill(), sys.exit(75)
        signal.signal(signal.SIGTERM, save)
        sleep()
    """
    assert Command(body).wait_for("ready", "ready").send(signal.SIGTERM).end().out.count("worker None") == 2


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_ranks_that_do_not_handle_a_signal_yet(sent: signal.Signals) -> None:
    ended = Command("sleep()").wait_for("ready", "ready").send(sent).end()
    assert (ended.code, ended.err[-1]) == (128 + sent, f"error: stopped by {sent.name}")


def test_a_second_sigint_kills_ranks_and_workers() -> None:
    command = Command(STUBBORN + "    sleep()").wait_for("ready", "ready").send(signal.SIGINT)
    assert command.process.stderr is not None
    command.process.stderr.readline()
    ended = command.send(signal.SIGINT).end()
    assert (ended.code, ended.err) == (130, ["error: killed by a second Ctrl-C; nothing was saved"])
    assert ended.seconds < 2


def test_an_ignored_signal_stays_ignored() -> None:
    """nohup, and `&` in a script."""
    body = "time.sleep(0.3); say(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    call = "[signal.signal(signal.SIGHUP, signal.SIG_IGN), say('ready'), supervisor.supervise(2)][2]"
    ended = Command(body, supervise=call).wait_for("ready").send(signal.SIGHUP).end()
    assert (ended.code, ended.out.count("True")) == (0, 2)


def test_the_exit_code_does_not_need_a_terminal() -> None:
    command = Command("on(signal.SIGTERM, 3)\nsleep()").wait_for("ready", "ready")
    assert command.process.stderr is not None
    command.process.stderr.close()
    command.process.stderr = None
    until(lambda: state(command.process.pid) == "S")
    command.process.send_signal(signal.SIGHUP)
    assert command.process.wait(10) == 3
    assert command.process.communicate()[0].count("SIGTERM") == 2


def test_ctrl_c_of_a_terminal_is_one_sigterm_for_each_rank() -> None:
    body = "on(signal.SIGTERM, 75), on(signal.SIGINT, 1)\nsleep()"
    said, code = in_terminal(body, {b"ready": b"\x03"})
    assert code == 75
    assert [said.count(words) for words in ("rank 0 SIGTERM", "rank 1 SIGTERM", "SIGINT")] == [1, 1, 0]


def in_terminal(body: str, keys: dict[bytes, bytes]) -> tuple[str, int]:
    """Run ranks in a terminal of their own; type a key when both have said the word. What was seen, and the code."""
    script = f"{PREAMBLE}\nrank = supervisor.supervise(2)\n{body}"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(REPOSITORY)
        os.execv(sys.executable, [sys.executable, "-c", script])
    seen = b""
    while select.select([terminal], [], [], 10)[0]:
        try:
            seen += os.read(terminal, 4096)
        except OSError:  # nobody has it open any more
            break
        for word in [word for word in keys if seen.count(word) == 2]:
            os.write(terminal, keys.pop(word))
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    os.close(terminal)
    return seen.decode(), os.waitstatus_to_exitcode(status)


def test_ctrl_z_stops_the_ranks_until_the_shell_goes_on() -> None:
    command = Command("sleep()").wait_for("ready", "ready")
    everyone = [command.process.pid, *descendants(command.process.pid)]
    command.send(signal.SIGTSTP)
    until(lambda: {state(pid) for pid in everyone} == {"T"})
    command.send(signal.SIGCONT)
    until(lambda: {state(pid) for pid in everyone} == {"S"})
    assert len(everyone) == 3
    assert command.send(signal.SIGTERM).end().code == 143


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition: Any, seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_supervisor_sleeps_while_ranks_run() -> None:
    command = Command("sleep()").wait_for("ready", "ready")
    status = Path(f"/proc/{command.process.pid}/status")
    until(lambda: state(command.process.pid) == "S")
    before = status.read_text()
    time.sleep(0.3)
    switches = [re.findall(r"ctxt_switches:\s+(\d+)", text) for text in (before, status.read_text())]
    command.send(signal.SIGTERM).end()
    assert switches[0] == switches[1]


# ---- when the command line starts ranks


def config(**values: Any) -> Namespace:
    ours = Namespace(class_path="lit_dp.ExactDDPStrategy", init_args=Namespace(virtual_ranks=None))
    defaults = {"accelerator": "auto", "devices": "auto", "num_nodes": 1, "strategy": ours, "plugins": None}
    return Namespace(**(defaults | values))


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `supervise` would be called with for a config, or None; no variables but those given, no accelerators."""

    def supervised(env: dict[str, str] | None = None, accelerators: int = 0, **values: Any) -> Any:
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: accelerators)
        monkeypatch.setattr(processes, "_THREADS_OF_IMPORTS", processes._threads())
        with (
            mock.patch.dict(os.environ, env or {}, clear=True),
            mock.patch("lit_dp.engine.supervisor.supervise", return_value=0) as supervise,
        ):
            processes.start_ranks(config(**values))
            return tuple(supervise.call_args.args) if supervise.called else None

    return supervised


def strategy(class_path: str, **arguments: Any) -> Namespace:
    return Namespace(class_path=class_path, init_args=Namespace(**arguments))


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({}, 2),
        ({"devices": 4}, 4),
        ({"devices": "3"}, 3),
        ({"devices": [0, 2]}, 2),
        ({"devices": 1}, None),
        ({"devices": "many"}, None),  # the trainer says so
        ({"devices": -1}, None),
        ({"strategy": "exact_ddp"}, 2),
        ({"strategy": "ddp"}, 2),
        ({"strategy": "auto"}, 2),
        ({"strategy": "auto", "devices": 1}, None),
        ({"strategy": "ddp_find_unused_parameters_true"}, 2),
        ({"strategy": "ddp_spawn"}, None),
        ({"strategy": "ddp_fork"}, None),
        ({"strategy": "ddp_notebook_find_unused_parameters_true"}, None),
        ({"strategy": "single_device"}, None),
        ({"strategy": "xla"}, None),
        ({"strategy": "ddpp"}, None),
        ({"strategy": strategy("lightning.pytorch.strategies.DDPStrategy")}, 2),
        ({"strategy": strategy("lightning.pytorch.strategies.DDPStrategy", start_method="spawn")}, None),
        ({"strategy": strategy("lightning.pytorch.strategies.SingleDeviceStrategy")}, None),
        ({"strategy": strategy("lit_dp.ExactDDPStrategy", cluster_environment=strategy("x.OwnEnvironment"))}, None),
        ({"plugins": strategy("lightning.fabric.plugins.environments.MPIEnvironment")}, None),
        ({"plugins": [strategy("lightning.fabric.plugins.environments.LightningEnvironment")]}, 2),
        ({"accelerator": "tpu"}, None),
    ],
)
def test_ranks_are_started_for_several_processes_of_one_host(supervised: Any, values: Any, ranks: int | None) -> None:
    assert supervised(**values) == (None if ranks is None else (ranks, 1, None))


def test_a_launcher_that_has_started_ranks_is_left_alone(supervised: Any) -> None:
    from tests.test_launch import BASH, CHILD, OPENMPI, PODS, SLURM, TORCHRUN

    assert [supervised(env) for env in (CHILD, TORCHRUN, SLURM, PODS)] == [None] * 4
    assert supervised(OPENMPI | {"OMPI_COMM_WORLD_SIZE": "2"}) is None
    assert supervised(BASH) == (2, 1, None)  # an allocation in which one starts processes oneself
    assert supervised({"WORLD_SIZE": "8"}) == (2, 1, None)


def test_several_hosts_must_be_numbered(supervised: Any) -> None:
    numbered = {"NODE_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    assert supervised(numbered, num_nodes=2) == (2, 2, None)
    with pytest.raises(ConfigError, match=r"num_nodes 2, but MASTER_PORT not set"):
        supervised({"NODE_RANK": "1", "MASTER_ADDR": "host0"}, num_nodes=2)


def test_with_accelerators_ranks_are_new_interpreters(supervised: Any) -> None:
    again = [sys.executable, *sys.orig_argv[1:]]
    assert supervised(accelerators=4) == (4, 1, again)
    assert supervised(accelerators=4, accelerator="cpu") == (2, 1, None)
    with mock.patch("torch.cuda.is_initialized", return_value=True):
        assert supervised(accelerators=4, accelerator="cpu") == (2, 1, again)
    with mock.patch.object(sys, "platform", "darwin"):
        assert supervised() == (2, 1, again)


def test_supervised_ranks_are_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LIT_DP_SUPERVISED": "1"}
    env |= {"NODE_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    launch = detect(env)
    assert launch.why == "lit_dp (no other launcher's variable is set)"
    assert (launch.world_size, launch.local_world_size, launch.hosts, launch.local_rank) == (4, 2, 2, 1)
    check(launch, 2, 2, True)
    with pytest.raises(ConfigError, match="processes started by lit_dp: 4"):
        check(launch, 4, 2, True)


BORING = {
    n: {"class_path": f"lightning.pytorch.demos.boring_classes.Boring{c}"}
    for n, c in (("model", "Model"), ("data", "DataModule"))
}


def test_a_forked_rank_is_not_taken_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning and torchmetrics look for it on import, in the parent: all ranks would say what rank 0 says for all."""
    known = lightning_rank_zero_only, torchmetrics_rank_zero_only
    for rank_zero_only in known:
        monkeypatch.setattr(rank_zero_only, "rank", 0)
    with mock.patch.dict(os.environ, clear=True), mock.patch("lit_dp.engine.supervisor.supervise", return_value=1):
        processes.start_ranks(config())
    assert [rank_zero_only.rank for rank_zero_only in known] == [1, 1]  # pyright: ignore


class Reached(Exception):
    pass


@pytest.mark.parametrize(
    ("typed", "given", "starts"),
    [
        (["fit"], {}, True),
        (["predict", "--config", "digits"], {}, True),
        (["plan"], {}, False),
        ([], {"args": ["fit", "--config", "digits"]}, False),
        (["--config", "digits"], {"run": False}, False),
        ([], {"args": {"subcommand": "fit", "fit": BORING}}, False),
    ],
)
def test_only_a_typed_command_starts_ranks(typed: Any, given: Any, starts: bool) -> None:
    with (
        mock.patch.object(sys, "argv", ["lit_dp", *typed]),
        mock.patch("lit_dp.cli.start_ranks") as start,
        mock.patch.object(LitCLI, "instantiate_classes", side_effect=Reached),
        pytest.raises(Reached),
    ):
        LitCLI(**given)
    assert start.called == starts


# ---- the whole command


def test_command_line_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    fit = [sys.executable, "-m", "lit_dp", "fit", "--trainer.max_epochs", "1000", "--data.num_workers", "1"]
    process = started(fit, tmp_path, PYTHONPATH=str(REPOSITORY), PYTHONUNBUFFERED="1")
    said = read_until(process, lambda said: "epoch 1: " in said, seconds=60)
    cores = len(os.sched_getaffinity(0))
    assert re.search(r"launcher +lit_dp \(no other launcher's variable is set\)\n", said)
    assert f"CPU threads each: {max(1, cores // 2)} ({cores} cores / 2 processes)" in said
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    rank_1 = int(children.read_text().split()[1])
    assert len(list(descendants(rank_1))) >= 1  # loader workers
    os.kill(rank_1, signal.SIGKILL)
    begun = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - begun < 10
    assert process.returncode == 137
    assert err.splitlines()[-1] == f"error: rank 1 on {HOST} was killed by SIGKILL (out of memory? see dmesg)"


def test_ranks_are_new_interpreters_where_an_import_has_used_openmp(tmp_path: Path) -> None:
    """A forked rank would wait for threads that only the parent has."""
    (tmp_path / "pooled.py").write_text(
        "import torch\n"
        "torch.set_num_threads(2)\n"
        "torch.randn(1000, 1000).sum()\n"
        "from lit_dp import LitClassifier\n"
        "class Classifier(LitClassifier): pass\n"
    )
    args = ["--config", "digits", "--model", "pooled.Classifier", "--trainer.fast_dev_run", "true"]
    process = started(
        [sys.executable, "-m", "lit_dp", "fit", *args], tmp_path, PYTHONPATH=str(REPOSITORY), LIT_DP_CPU_THREADS="2"
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "CPU threads each: 2 (LIT_DP_CPU_THREADS=2)" in out
    assert "epoch 1/1" in out
