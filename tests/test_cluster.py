"""Emulated hosts: real ones to gloo, with links that really are slow, and nothing of them is left behind."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lit_dp.collectives import cluster, cost
from lit_dp.collectives.cluster import Cluster
from lit_dp.errors import RunError

needs_cluster = pytest.mark.skipif(cluster.unavailable() is not None, reason=cluster.unavailable() or "")

ELEMENTS = 750_001  # 3 MB of fp32, not divisible
ACKNOWLEDGED = 1.1  # 66 bytes of headers a packet of 1,448, and as many for each packet that comes back
BARRIER_BYTES = 20_000
HOST = f"""
import os, torch, torch.distributed as dist
from lit_dp.collectives import all_reduce
torch.set_num_threads(1)

def sent():
    dist.barrier()  # on the connections of the all-reduce, hence after it: what was sent has arrived
    return int(open("/sys/class/net/eth0/statistics/tx_bytes").read())

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for algorithm in "ring", "tree":
    x = torch.arange({ELEMENTS}) % 1000 + rank
    x = x.float()
    before = sent()
    all_reduce(x, algorithm)
    after = sent()
    right = torch.equal(x, (torch.arange({ELEMENTS}) % 1000 * size + size * (size - 1) // 2).float())
    print("sent", algorithm, right, after - before)
os._exit(0)
"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The machine has the same namespaces and interfaces after a test as before."""
    before = visible()
    yield
    assert visible() == before


def visible() -> list[str]:
    if cluster.unavailable():
        return []
    commands = ["ip netns list", "ip -o -br link"]
    return sorted(line for c in commands for line in subprocess.check_output(c.split(), text=True).splitlines())


@needs_cluster
@pytest.mark.parametrize("hosts", [2, 3])
def test_an_all_reduce_puts_the_bytes_of_the_formula_on_a_limited_link(hosts: int) -> None:
    with Cluster(hosts, megabits_per_second=400) as emulated:
        ended = emulated.run([[sys.executable, "-c", HOST]] * hosts)
        held_back = [bucket(namespace) for namespace in emulated.namespaces]
    assert [code for code, _ in ended] == [0] * hosts, "\n".join(output for _, output in ended)
    for rank, (_, output) in enumerate(ended):
        lines = [line.split()[1:] for line in output.splitlines() if line.startswith("sent")]  # gloo writes too
        assert len(lines) == 2
        for algorithm, right, sent in lines:
            assert right == "True"
            payload = cost.predict(algorithm, hosts, ELEMENTS, itemsize=4).bytes_sent[rank]
            assert payload < int(sent) < ACKNOWLEDGED * payload + BARRIER_BYTES, (hosts, algorithm, rank)
    for rate_in_bytes, overlimits in held_back:
        assert rate_in_bytes == 400e6 / 8
        assert overlimits > 0  # packets had to wait for the bucket to fill


def bucket(namespace: str) -> tuple[int, int]:
    """Rate, in bytes a second, and how often a packet was held back."""
    answer = subprocess.check_output(["tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", "eth0"])
    (tbf,) = json.loads(answer)
    return tbf["options"]["rate"], tbf["overlimits"]


@needs_cluster
def test_hosts_see_each_other_and_not_the_machine() -> None:
    probe = (
        "import os, socket as s; print(os.environ['RANK'], os.environ['MINE'], sorted(n for _, n in s.if_nameindex()))"
    )
    with Cluster(2) as emulated, Cluster(1):  # of the same addresses, side by side
        ended = emulated.run([[sys.executable, "-c", probe]] * 2, {"MINE": "yes"})
    assert [output.strip() for _, output in ended] == [f"{rank} yes ['eth0', 'lo']" for rank in (0, 1)]


@needs_cluster
def test_exit_codes_and_output_come_back() -> None:
    with Cluster(2, megabits_per_second=0.5) as emulated:
        ended = emulated.run([["sh", "-c", "echo out; echo err >&2; exit 3"], ["sh", "-c", "kill -9 $$"]])
    assert ended == [(3, "out\nerr\n"), (-9, "")]


@needs_cluster
def test_a_host_that_does_not_end_is_killed_with_all_that_it_started() -> None:
    hangs = ["sh", "-c", "echo waiting; setsid sleep 1000 & echo $!; wait"]
    with Cluster(2) as emulated:
        with pytest.raises(TimeoutError, match=r"hosts \[1\] did not end within 1 s") as caught:
            emulated.run([["true"], hangs], timeout=1)
        pid = str(caught.value).splitlines()[-1]
        assert not running(pid)


def running(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


@needs_cluster
def test_nothing_is_left_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), Cluster(2) as emulated:
        raise KeyError
    with pytest.raises(FileNotFoundError), Cluster(2) as emulated:
        emulated.run([["true"], ["true"]], {"PATH": "/nowhere"})
    monkeypatch.setattr(Cluster, "_plug_in", lambda *args: cluster._command("tc nonsense"))
    with pytest.raises(RunError, match=r"tc nonsense failed: .*nonsense"), Cluster(2, megabits_per_second=1):
        pass


def test_what_cannot_be_made_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="0 hosts"):
        Cluster(0)
    with pytest.raises(ValueError, match="rate above 0"):
        Cluster(2, megabits_per_second=0)
    for target, name, value, words in (
        (os, "geteuid", lambda: 1000, "only root .* sudo"),
        (shutil, "which", lambda command: None, "apt-get install iproute2"),
        (sys, "platform", "darwin", "this is darwin: run it on Linux"),
    ):
        monkeypatch.setattr(target, name, value)
        with pytest.raises(RunError, match=words), Cluster(2):
            pass
