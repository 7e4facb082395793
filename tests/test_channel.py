"""Messages between ranks beside torch.distributed (engine/channel.py, relay.py): the same for all, and who is gone."""

import gc
import os
import pickle
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback

from lit_dp.engine import channel, relay
from lit_dp.engine.channel import Channel
from lit_dp.engine.peers import Peers
from lit_dp.engine.relay import BYE, GONE, LOST, Message, Relay
from lit_dp.errors import RunError
from tests.ranks import free_port, run_ranks, torchrun_env
from tests.training import Job, leave, quiet_trainer


class Rank:
    """A rank's channel and what it has heard; all ranks build it together."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.heard: list[Message] = []
        self.times: list[float] = []
        self._news: Queue[None] = Queue()
        self.peers = Peers(dist.get_rank(), dist.get_world_size())
        self.number = self.peers.rank
        self.channel = Channel(self.peers, "127.0.0.1", self._receive)

    def _receive(self, message: Message) -> None:
        self.heard.append(message)
        self.times.append(time.monotonic())
        self._news.put(None)

    def hear(self, messages: int) -> list[tuple[Any, ...]]:
        """The first so many messages."""
        while len(self.heard) < messages:
            self._news.get(timeout=30)
        return [tuple(message) for message in self.heard[:messages]]


def survivors(world_size: int, function: Any, *args: Any) -> dict[int, Any]:
    """What `function(*args)` returned on those of the forked ranks that lived to say it."""
    port, pipes = free_port(), {}
    for rank in range(world_size):
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.setpgid(0, 0)
            os.environ.update(torchrun_env(rank, world_size, port))
            with suppress(BaseException):
                os.write(write, pickle.dumps(function(*args)))
            os._exit(0)
        os.close(write)
        os.set_blocking(read, False)
        pipes[rank] = (read, pid)
    answers = {}
    for rank, (read, pid) in pipes.items():
        os.waitpid(pid, 0)
        with suppress(BlockingIOError):  # a process that it has left still has its other end
            if answer := os.read(read, 1 << 16):
                answers[rank] = pickle.loads(answer)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.close(read)
    return answers


# ---- everybody hears the same


def speak(times: int) -> list[Any]:
    rank = Rank()
    threads = [threading.Thread(target=lambda: [rank.channel.post("n", i) for i in range(times)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    return rank.hear(2 * times * rank.peers.world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_hear_all_messages_in_one_order(world_size: int) -> None:
    heard = run_ranks(world_size, speak, 50)
    assert heard == [heard[0]] * world_size
    assert sorted(heard[0]) == [("n", rank, i) for rank in range(world_size) for i in range(50) for _ in "ab"]


def test_one_rank_hears_itself_without_a_thread() -> None:
    heard: list[Any] = []
    before = threading.active_count()
    alone = Channel(Peers(0, 1), "nowhere", heard.append)
    alone.post("n", 7)
    alone.close()
    assert heard == [Message("n", 0, 7)]
    assert threading.active_count() == before


def late() -> list[Any]:
    """Rank 2 connects when the others have said something, and one of them is gone."""
    real = channel._connected
    with mock.patch.object(channel, "_connected", lambda *args: time.sleep(0.5 * (args[1] == 2)) or real(*args)):
        rank = Rank()
    rank.channel.post("n")
    if rank.number == 1:
        rank.channel.close()
    return sorted(rank.hear(5 if rank.number != 1 else 0))


def test_who_connects_late_hears_what_was_said_before() -> None:
    said = survivors(3, late)
    host = socket.gethostname()
    assert (
        said[0] == said[2] == sorted([("n", 0, None), ("n", 1, None), ("n", 2, None), (BYE, 1, None), (GONE, 1, host)])
    )


def speak_to_the_waiting() -> bool:
    rank = Rank()
    if rank.number == 1:
        rank.channel.post("look up")
        assert rank.hear(1)
        time.sleep(0.5)
    dist.barrier()
    over = time.monotonic()
    rank.hear(1)
    return rank.times[0] < over


def test_a_message_arrives_in_a_collective() -> None:
    assert run_ranks(2, speak_to_the_waiting) == [True, True]


# ---- the end of a rank


def end(how: str, victim: int) -> Any:
    rank = Rank()
    rank.peers.gather(None)  # all are connected
    if rank.number == victim:
        if os.fork() == 0:  # like a loader worker: it has inherited the connection, and lives on
            time.sleep(3 if how in ("kill", "exit") else 0)
            os._exit(0)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(0)
        rank.channel.close(until_the_end=how == "goodbye, later")
        time.sleep(0.5)
        return None
    heard = rank.hear(1 if how in ("kill", "exit") else 2)
    return heard, rank.times[-1] - rank.times[0]


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_who_dies_is_lost(how: str, victim: int) -> None:
    said = survivors(4, end, how, victim)
    assert {rank: heard for rank, (heard, _) in said.items()} == {
        rank: [(LOST, victim, socket.gethostname())] for rank in range(4) if rank != victim
    }


@pytest.mark.parametrize("victim", [0, 1])
def test_who_says_goodbye_is_not_lost(victim: int) -> None:
    for how, at_least in (("goodbye", 0.0), ("goodbye, later", 0.4)):
        said = survivors(3, end, how, victim)
        assert said.pop(victim) is None
        for heard, seconds in said.values():
            assert heard == [(BYE, victim, None), (GONE, victim, socket.gethostname())]
            assert seconds >= at_least


def end_beside_a_worker() -> float:
    """How long after a rank was killed the others hear of it."""
    rank = Rank()
    killed = rank.peers.gather(time.monotonic())[1]
    if rank.number == 1:
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    rank.hear(1)
    return rank.times[0] - killed


def test_a_worker_that_kept_the_connection_would_hide_the_end() -> None:
    """Why a forked child forgets its rank's connection."""
    assert survivors(2, end_beside_a_worker)[0] < 2
    with mock.patch.object(Channel, "forget"):
        assert survivors(2, end_beside_a_worker)[0] >= 2


def unheard() -> Any:
    """Posts and closes after rank 0, the relay, is gone."""
    rank = Rank()
    rank.peers.gather(None)
    if rank.number == 0:
        os._exit(0)
    rank.hear(1)
    rank.channel.post("n")
    rank.channel.close()
    rank.channel.post("n")
    return len(rank.heard)


def test_after_the_relay_is_gone_nothing_happens() -> None:
    assert survivors(2, unheard) == {1: 1}


def close_twice() -> Any:
    rank = Rank()
    rank.channel.close()
    rank.channel.close()
    rank.channel.post("n")
    rank.peers.gather(None)
    return [message[:2] for message in rank.heard if message.kind != GONE]


def test_messages_after_goodbye_are_no_error() -> None:
    said = run_ranks(2, close_twice)
    assert all((BYE, rank) in heard for rank, heard in enumerate(said))


# ---- strangers


def test_a_wrong_key_is_refused_and_others_are_let_in() -> None:
    server = Relay(1, "127.0.0.1")
    wrong = server.offer._replace(key=b"x" * 32)
    with pytest.raises(RunError, match=r"rank 3 on .* cannot reach rank 0 \(127.0.0.1: digest"):
        channel._connected(wrong, 3)
    with mock.patch.object(relay, "HANDSHAKE_SECONDS", 1):
        silent = socket.create_connection(("127.0.0.1", server.offer.port))
        right = channel._connected(server.offer, 0)  # when the relay has lost its patience with the silent one
    right.send(Message("n", 0))
    assert right.recv() == Message("n", 0)
    silent.close()
    right.close()


def test_rank_0_that_cannot_be_reached_is_named() -> None:
    offer = relay.Offer(("127.0.0.1", "no.such.host.invalid"), free_port(), b"")
    with pytest.raises(RunError, match=r"rank 1 on .*: .*Connection refused; no.such.host.invalid: "):
        channel._connected(offer, 1)


@pytest.mark.parametrize(("host", "everywhere"), [("127.0.0.1", False), ("localhost", False), ("host0", True)])
def test_which_addresses_rank_0_listens_on(host: str, everywhere: bool) -> None:
    server = relay._server(host)
    assert (server.getsockname()[0] in ("::", "0.0.0.0")) == everywhere
    server.close()


def test_a_host_that_falls_silent_is_noticed() -> None:
    """Its power is gone, or its network: no system is left to close connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = relay.over(socket.create_connection(server.getsockname()), 1)
        with socket.socket(fileno=os.dup(connection.fileno())) as link:
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, every, times = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            seconds = [link.getsockopt(socket.IPPROTO_TCP, option) for option in (idle, every, times)]
        assert seconds[0] + seconds[1] * seconds[2] == relay.SILENT_SECONDS
        connection.close()


# ---- beside a training


class Idle(Callback):
    """Notes how often the channel's threads were switched to while a training does nothing."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            before = switches()
            time.sleep(1)
            self.wakeups = switches() - before
            self.threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("lit_dp"))


def switches() -> int:
    """Of all threads of ours, but the main one."""
    total = 0
    for thread in threading.enumerate():
        if thread.name.startswith("lit_dp"):
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            total += sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
    return total


def fit_test_fit() -> Any:
    module, data = Job(epochs=1).build()
    data.test_dataloader = data.val_dataloader  # type: ignore
    idle, left = Idle(), []
    for stage in ("fit", "test", "fit"):
        trainer = quiet_trainer(max_epochs=1, limit_val_batches=0, callbacks=[idle])
        getattr(trainer, stage)(module, datamodule=data)
        dist.barrier()
        time.sleep(0.2)
        gc.collect()
        left.append((sorted(t.name for t in threading.enumerate() if t.name.startswith("lit_dp")), sockets()))
        again = trainer
    again.test(module, datamodule=data)
    again.fit(module, datamodule=data)
    leave()
    return idle.wakeups, idle.threads, left


def sockets() -> int:
    return sum(
        os.readlink(f"/proc/self/fd/{fd}").startswith("socket") for fd in os.listdir("/proc/self/fd") if _is_there(fd)
    )


def _is_there(fd: str) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()


def test_nothing_wakes_up_and_nothing_is_left() -> None:
    for rank, (wakeups, threads, left) in enumerate(run_ranks(2, fit_test_fit)):
        assert wakeups == 0
        assert threads == ["lit_dp channel", *["lit_dp relay"] * (rank == 0), "lit_dp signals"]
        assert [names for names, _ in left] == [[], [], []]
        assert len({open_sockets for _, open_sockets in left}) == 1
