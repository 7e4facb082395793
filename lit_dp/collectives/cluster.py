"""Emulated hosts on one Linux machine: network namespaces joined by a switch, with links as slow as one likes.

A host is a network namespace with one interface, `eth0`, whose cable (a veth pair) ends in a bridge. The bridge is in a
namespace of its own: deleting the namespaces removes everything, and the machine's own network never changes.
To gloo, torchrun and TCP these are real hosts; they share processors, files and the machine's host name.
A link's rate is limited both ways by a token bucket, `tc-tbf(8)`. Latency is not emulated.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from lit_dp.errors import RunError

INTERFACE = "eth0"
BURST_BYTES, QUEUE_BYTES = 1 << 17, 1 << 20  # two TCP offload packets; what many senders to one host may fill
_serial = itertools.count()


def unavailable() -> str | None:
    """Why no cluster can be made here, and what to do about it; None if it can."""
    if sys.platform != "linux":
        return f"emulated hosts are Linux network namespaces, and this is {sys.platform}: run it on Linux"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "emulated hosts need the commands ip and tc: apt-get install iproute2"
    if os.geteuid() != 0:
        return "only root may make network namespaces: use sudo, or a container started with --privileged"
    return None


class Ended(NamedTuple):
    """How a host's process ended."""

    code: int  # negative: the signal that killed it
    output: str  # stdout and stderr


class Cluster:
    """`hosts` emulated hosts until the end of the `with` block, however it ends; nothing of them is left then.
    Host i has the address 10.0.0.(i + 1), which only the hosts of its cluster see.

    Args:
        hosts: how many, 1 to 254.
        megabits_per_second: of each host's link, each way: 10^6 bits, headers included. None: no limit.

    Raises:
        RunError: none can be made here, with what to install or type; or a command failed, with what it said.
    """

    def __init__(self, hosts: int, megabits_per_second: float | None = None) -> None:
        if not 1 <= hosts <= 254 or (megabits_per_second is not None and not megabits_per_second > 0):
            raise ValueError(f"{hosts} hosts at {megabits_per_second} Mbit/s: give 1 to 254, and a rate above 0")
        name = f"lit-dp-{os.getpid()}-{next(_serial)}"
        self.switch, self.namespaces = f"{name}-switch", [f"{name}-host{host}" for host in range(hosts)]
        self.megabits_per_second = megabits_per_second

    def __enter__(self) -> "Cluster":
        if reason := unavailable():
            raise RunError(reason)
        with ExitStack() as self._made:
            for namespace in (self.switch, *self.namespaces):
                _command(f"ip netns add {namespace}")
                self._made.callback(_command, f"ip netns delete {namespace}")
            _command(f"ip -n {self.switch} link add bridge up type bridge")
            for host, namespace in enumerate(self.namespaces):
                self._plug_in(host, namespace)
            self._made = self._made.pop_all()  # all went well: they stay until the end of the block
        return self

    def __exit__(self, *error: object) -> None:
        self._made.close()

    def run(
        self, argv_per_host: Sequence[Sequence[str]], env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> list[Ended]:
        """Start one process a host, all at once, with the variables that torchrun sets, and wait for all of them.

        Args:
            argv_per_host: the command line of each host's process.
            env: further variables; they win over this process's own and torchrun's.
            timeout: in seconds, for all.

        Raises:
            TimeoutError: some did not end; with what each wrote. All are killed, and all that they started.
        """
        deadline, processes = time.monotonic() + timeout, []
        with TemporaryDirectory() as folder:
            files = [Path(folder, namespace) for namespace in self.namespaces]  # an unread pipe would block its writer
            try:
                for host, (argv, file) in enumerate(zip(argv_per_host, files, strict=True)):
                    processes.append(self._start(host, argv, env or {}, file))
                for process in processes:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, deadline - time.monotonic()))
                late = [host for host, process in enumerate(processes) if process.returncode is None]
            finally:
                self._kill(processes)
            outputs = [file.read_text(errors="replace") for file in files]
        wrote = "\n".join(f"host {host} wrote last: {output[-2000:]}" for host, output in enumerate(outputs))
        if late:
            raise TimeoutError(f"hosts {late} did not end within {timeout:g} s\n{wrote}")
        return [Ended(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]

    def _plug_in(self, host: int, namespace: str) -> None:
        _command(f"ip -n {self.switch} link add port{host} type veth peer name {INTERFACE} netns {namespace}")
        for place, end in ((namespace, INTERFACE), (self.switch, f"port{host}")):
            _command(f"ip -n {place} link set {end} addrgenmode none")  # IPv6 would count as traffic
            if self.megabits_per_second is not None:
                rate = f"rate {self.megabits_per_second * 1e6:.0f}bit burst {BURST_BYTES} limit {QUEUE_BYTES}"
                _command(f"tc -n {place} qdisc add dev {end} root tbf {rate}")
        _command(f"ip -n {namespace} address add 10.0.0.{host + 1}/24 dev {INTERFACE}")
        _command(f"ip -n {namespace} link set {INTERFACE} up")
        _command(f"ip -n {namespace} link set lo up")
        _command(f"ip -n {self.switch} link set port{host} master bridge up")

    def _start(self, host: int, argv: Sequence[str], env: Mapping[str, str], file: Path) -> subprocess.Popen[bytes]:
        rank, size = str(host), str(len(self.namespaces))
        hosts = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE}
        hosts |= {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "cluster"}
        ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        command, env = ["ip", "netns", "exec", self.namespaces[host], *argv], {**os.environ, **hosts, **ranks, **env}
        with file.open("wb") as output:
            return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def _kill(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """End these, then what else runs on the hosts: they have started it, whatever session it has moved to."""
        for process in processes:
            process.kill()
            process.wait()
        for namespace in self.namespaces:
            while pids := _command(f"ip netns pids {namespace}").split():
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)


def _command(words: str) -> str:
    done = subprocess.run(words.split(), capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{words} failed: {done.stderr.strip()}")
    return done.stdout
