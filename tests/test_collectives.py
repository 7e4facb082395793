"""Law L11, traffic: every all-reduce sums right, gives all ranks the same bits, and sends what the formula says.

Three counts of the same thing must agree: the algorithm's own, the closed form in `cost.py`, and the kernel's, which
trusts neither. Law L2 rests on one more: halving-doubling continues a pairwise sum made inside each process.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_dp.collectives import Algorithm, Traffic, algorithms, all_reduce, cost, count_traffic
from lit_dp.collectives.wire import Message, Wire, span

BIG = 1_000_003
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
COUNTED = [algorithm for algorithm in Algorithm if algorithm is not Algorithm.native]
FRAMING_BYTES = 3 * 48  # gloo's headers, a message: two from its sender ("ready", data), one from its receiver
SECONDS = 25  # gloo's timeout: a hang becomes an error


# --- N forked processes -----------------------------------------------------------------------------------------------


class Ranks:
    """N forked processes joined by gloo over 127.0.0.1; `run(f, ...)` is [f(rank, ...) for every rank] in parallel."""

    def __init__(self, size: int) -> None:
        context, self.size = multiprocessing.get_context("fork"), size
        self.directory = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            arguments = (rank, size, f"{self.directory.name}/store", theirs, list(self.pipes))
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = [pipe.recv() if pipe.poll(2 * SECONDS) else (False, "no answer") for pipe in self.pipes]
        failures = [f"rank {rank}: {answer}" for rank, (fine, answer) in enumerate(answers) if not fine]
        assert not failures, "\n".join(failures)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)
        for process in self.processes:
            process.join(timeout=5)
            process.kill()
        self.directory.cleanup()


def _serve(rank: int, size: int, store: str, pipe: Any, not_ours: list[Any]) -> None:
    for other in not_ours:
        other.close()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", f"file://{store}", timeout, size, rank)
    with suppress(EOFError):
        while task := pipe.recv():
            pipe.send(_answer(rank, *task))
    dist.destroy_process_group()
    os._exit(0)


def _answer(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(rank, *args)
    except Exception:
        return False, traceback.format_exc()


@pytest.fixture(scope="module", params=range(2, 10), ids=lambda size: f"N{size}")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    for dtype in DTYPES:
        noise(dtype)  # before the fork, once for all
    started = Ranks(request.param)
    yield started
    started.close()


def only(*sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ranks", sizes, indirect=True, ids=lambda size: f"N{size}")


# --- what is measured -------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What one rank ended with: SHA-256 of its bits, the bits themselves on rank 0, and both counts of what it sent."""

    digest: str
    bits: bytes
    traffic: Traffic
    kernel_bytes: int | None

    def tensor(self, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(bytearray(self.bits), dtype=dtype) if self.bits else torch.empty(0, dtype=dtype)


def measure(
    rank: int, reduce: Callable[[Tensor], Any], source: Callable[[int], Tensor], ask_kernel: bool = False
) -> Outcome:
    x, before = source(rank), kernel_bytes_sent() if ask_kernel else 0
    with count_traffic() as traffic:
        reduce(x)
    sent = kernel_bytes_sent() - before if ask_kernel else None
    bits = x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return Outcome(hashlib.sha256(bits).hexdigest(), bits if rank == 0 else b"", traffic, sent)


def kernel_bytes_sent() -> int:
    """TCP payload of this process that its peers acknowledged (TCP_INFO), after waiting until that is all there is."""
    while True:
        infos = [info for fd in os.listdir("/proc/self/fd") if (info := tcp_info(int(fd)))]
        if all(in_flight == 0 for _, in_flight in infos):
            return sum(acknowledged for acknowledged, _ in infos)
        time.sleep(0.001)


def tcp_info(fd: int) -> tuple[int, int] | None:
    """tcpi_bytes_acked, and tcpi_unacked + tcpi_notsent_bytes, if `fd` is an established TCP connection."""
    with suppress(OSError):
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(fd)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # or our peers wait 40 ms for us
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        if info[0] == 1:
            return field(info, 120, 8), field(info, 24, 4) + field(info, 144, 4)
    return None


def field(info: bytes, offset: int, width: int) -> int:
    return int.from_bytes(info[offset : offset + width], "little")


@lru_cache
def noise(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(BIG + 100, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(1 << 48), 1 << 48, (BIG + 100,), generator=generator)


def leaf(size: int, dtype: torch.dtype, rank: int) -> Tensor:
    return noise(dtype)[7 * rank : 7 * rank + size].clone()


@lru_cache(maxsize=32)
def exact_sum(n: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sum over ranks of the leaves and of their magnitudes, in fp64 (of int64: exact, below 2^53)."""
    leaves = [leaf(size, dtype, rank).double() for rank in range(n)]
    return sum(leaves, torch.zeros(size).double()), sum(map(torch.abs, leaves), torch.zeros(size).double())


def cases(n: int) -> list[tuple[int, torch.dtype]]:
    """Every size with every dtype; but 8 MB tensors, the big size in eight-byte dtypes, only on 4 and on 7 ranks."""
    sizes, heavy = (0, 1, n - 1, n, BIG), n not in (4, 7)
    return [(size, dtype) for size in sizes for dtype in DTYPES if not (heavy and size * dtype.itemsize > 4 * BIG)]


# --- the checks -------------------------------------------------------------------------------------------------------


def check_sum(outcomes: list[Outcome], dtype: torch.dtype, total: Tensor, magnitude: Tensor) -> None:
    """Any order of adding N numbers is off by at most (N - 1) u times the sum of magnitudes (Higham 2002, 4.4)."""
    u = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    error = (outcomes[0].tensor(dtype).double() - total).abs()
    assert (error <= (len(outcomes) - 1) * u * magnitude).all(), f"wrong sum: off by {error.max()}"


def check_same_bits(outcomes: list[Outcome]) -> None:
    assert len({outcome.digest for outcome in outcomes}) == 1, "ranks hold different bits"


def check_traffic(outcomes: list[Outcome], expected: cost.Cost) -> None:
    traffic = [outcome.traffic for outcome in outcomes]
    assert [rank.bytes_sent for rank in traffic] == [*expected.bytes_sent], "bytes are not the formula's"
    assert [rank.messages_sent for rank in traffic] == [*expected.messages_sent], "messages are not the formula's"
    assert [rank.steps for rank in traffic] == [expected.steps] * len(traffic), "steps are not the formula's"


def check_kernel(outcomes: list[Outcome]) -> None:
    """Each rank's payload left it, and beside it nothing but gloo's framing."""
    framing = [(outcome.kernel_bytes or 0) - outcome.traffic.bytes_sent for outcome in outcomes]
    messages = sum(outcome.traffic.messages_sent for outcome in outcomes)
    assert min(framing) >= 0, f"the kernel sent less than was counted: {framing}"
    assert sum(framing) <= FRAMING_BYTES * messages, f"the kernel sent more than was counted: {framing}"


# --- law L11 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", COUNTED)
def test_l11_traffic(ranks: Ranks, algorithm: Algorithm) -> None:
    """Every size and dtype; the kernel is asked for fp32 only, since it answers after TCP's delayed acknowledgement."""
    for size, dtype in cases(ranks.size):
        ask_kernel = dtype == torch.float32
        reduce, source = partial(all_reduce, algorithm=algorithm), partial(leaf, size, dtype)
        outcomes = ranks.run(measure, reduce, source, ask_kernel)
        check_sum(outcomes, dtype, *exact_sum(ranks.size, size, dtype))
        check_same_bits(outcomes)
        check_traffic(outcomes, cost.predict(algorithm, ranks.size, size, dtype.itemsize))
        if ask_kernel:
            check_kernel(outcomes)


def test_native(ranks: Ranks) -> None:
    """The backend's own says nothing about its traffic; by the kernel's count gloo's is a ring, within 1 %."""
    for size, dtype in cases(ranks.size):
        ask_kernel = (size, dtype) == (BIG, torch.float32)
        outcomes = ranks.run(measure, partial(all_reduce, algorithm="native"), partial(leaf, size, dtype), ask_kernel)
        check_sum(outcomes, dtype, *exact_sum(ranks.size, size, dtype))
        check_same_bits(outcomes)
        assert {(o.traffic.bytes_sent, o.traffic.uncounted) for o in outcomes} == {(0, int(size > 0))}
        if ask_kernel:
            ring = cost.predict("ring", ranks.size, size, dtype.itemsize).bytes_sent
            assert [outcome.kernel_bytes for outcome in outcomes] == pytest.approx(ring, rel=0.01)


@only(13, 16)
@pytest.mark.parametrize("algorithm", COUNTED)
def test_l11_traffic_of_more_ranks(ranks: Ranks, algorithm: Algorithm) -> None:
    for size in (1, 100):
        outcomes = ranks.run(measure, partial(all_reduce, algorithm=algorithm), partial(leaf, size, torch.float32))
        check_sum(outcomes, torch.float32, *exact_sum(ranks.size, size, torch.float32))
        check_same_bits(outcomes)
        check_traffic(outcomes, cost.predict(algorithm, ranks.size, size, 4))


def palette(values: list[float], size: int, dtype: torch.dtype, rank: int) -> Tensor:
    return torch.tensor([values[(rank + i * (rank + 1)) % len(values)] for i in range(size)], dtype=dtype)


@settings(max_examples=20, deadline=None)
@given(
    algorithm=st.sampled_from(COUNTED),
    size=st.integers(0, 40),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    values=st.lists(st.floats(width=32), min_size=1, max_size=9),
)
def test_any_values(ranks: Ranks, algorithm: Algorithm, size: int, dtype: torch.dtype, values: list[float]) -> None:
    """Infinities, signed zeros, subnormals and NaNs too: the same bits everywhere, the right sum."""
    leaves = [palette(values, size, dtype, rank).double() for rank in range(ranks.size)]
    outcomes = ranks.run(measure, partial(all_reduce, algorithm=algorithm), partial(palette, values, size, dtype))
    check_same_bits(outcomes)
    check_traffic(outcomes, cost.predict(algorithm, ranks.size, size, dtype.itemsize))
    magnitude = torch.stack(leaves).abs().sum(0)
    if (magnitude <= torch.finfo(dtype).max).all():
        check_sum(outcomes, dtype, torch.stack(leaves).sum(0), magnitude)


def nans(rank: int) -> Tensor:
    """Quiet NaNs whose payload names the rank: which of two survives an addition depends on their order."""
    return torch.full((37,), 0x7FC00001 + rank, dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_nans_keep_one_payload(ranks: Ranks, algorithm: Algorithm) -> None:
    check_same_bits(ranks.run(measure, partial(all_reduce, algorithm=algorithm), nans))


@pytest.mark.parametrize("algorithm", COUNTED)
def test_steps_are_the_longest_chain_of_messages(ranks: Ranks, algorithm: Algorithm) -> None:
    """Lamport clocks over who sent to whom: the lock-step rounds that are counted hold no round that could be saved."""
    sources = ranks.run(senders_of_each_step, algorithm.value, 3 * ranks.size)
    clock = [0] * ranks.size
    for step in zip(*sources, strict=True):
        clock = [
            clock[rank] if senders is None else 1 + max(clock[peer] for peer in (rank, *senders))
            for rank, senders in enumerate(step)
        ]
    assert max(clock) == cost.predict(algorithm, ranks.size, 3 * ranks.size, 4).steps


def senders_of_each_step(rank: int, algorithm: str, size: int) -> list[list[int] | None]:
    """Global ranks heard in every step; None in a step in which this rank neither sends nor receives."""
    log: list[list[int] | None] = []

    class LoggingWire(Wire):
        def rest(self, steps: int) -> None:
            log.extend([None] * steps)

        def exchange(self, sends: Sequence[Message] = (), receives: Sequence[Message] = ()) -> None:
            super().exchange(sends, receives)
            if any(tensor.numel() for _, tensor in (*sends, *receives)):
                log[-1] = [self.members[peer] for peer, tensor in receives if tensor.numel()]

    getattr(algorithms, algorithm)(LoggingWire(None, torch.device("cpu")), torch.ones(size))
    return log


# --- law L2: halving-doubling goes on with a sum made inside each process ---------------------------------------------


LEAVES = 8


def pairwise_fold(terms: list[Tensor]) -> Tensor:
    """((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)): what a carry stack does to 2^k terms."""
    while len(terms) > 1:
        terms = [left + right for left, right in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def fold_in_order(terms: list[Tensor]) -> Tensor:
    return sum(terms[1:], terms[0])


def folded_leaves(
    fold: Callable[[list[Tensor]], Tensor], ranks: int, size: int, dtype: torch.dtype, rank: int
) -> Tensor:
    share = LEAVES // ranks
    return fold([leaf(size, dtype, virtual) for virtual in range(rank * share, (rank + 1) * share)])


@only(1, 2, 4, 8)
@pytest.mark.parametrize("algorithm", ["tree", "butterfly", "halving_doubling"])
def test_l2_placement_of_leaves(ranks: Ranks, algorithm: str) -> None:
    """Eight leaves on 1, 2, 4 or 8 processes: bit for bit the sum along one tree."""
    for size in (1, 7, 1001, BIG):
        for dtype in (torch.float32, torch.bfloat16):
            source = partial(folded_leaves, pairwise_fold, ranks.size, size, dtype)
            outcomes = ranks.run(measure, partial(all_reduce, algorithm=algorithm), source)
            check_same_bits(outcomes)
            assert torch.equal(outcomes[0].tensor(dtype), folded_leaves(pairwise_fold, 1, size, dtype, 0))


@only(2)
def test_l2_has_teeth(ranks: Ranks) -> None:
    """Adding the leaves one after another, as gradient accumulation does, is another sum."""
    source = partial(folded_leaves, fold_in_order, ranks.size, 1001, torch.float32)
    outcomes = ranks.run(measure, partial(all_reduce, algorithm="halving_doubling"), source)
    expected = folded_leaves(pairwise_fold, 1, 1001, torch.float32, 0)
    assert not torch.equal(outcomes[0].tensor(torch.float32), expected)


# --- teeth: faulty algorithms meet the same checks --------------------------------------------------------------------


def by_hand(steps: Callable[[Wire, Tensor], None], x: Tensor) -> None:
    steps(Wire(None, x.device), x)


def pass_around_ring(wire: Wire, x: Tensor) -> None:
    """PyTorch's tutorial: every rank adds what comes around, each in another order."""
    passing, received = x.clone(), torch.empty_like(x)
    for _ in range(wire.size - 1):
        wire.exchange([((wire.rank + 1) % wire.size, passing)], [((wire.rank - 1) % wire.size, received)])
        x += received
        passing, received = received.clone(), torch.empty_like(x)


def ring_that_gathers_the_wrong_block(wire: Wire, x: Tensor) -> None:
    rank, size = wire.rank, wire.size
    blocks = [span(x, i, i + 1, of=size) for i in range(size)]
    for shift in (0, 0):
        for step in range(size - 1):
            target = blocks[(rank - step - 1 + shift) % size]
            received = torch.empty_like(target)
            wire.exchange([((rank + 1) % size, blocks[(rank - step + shift) % size])], [((rank - 1) % size, received)])
            target += received


def ring_with_a_message_too_many(wire: Wire, x: Tensor) -> None:
    algorithms.ring(wire, x)
    wire.exchange([((wire.rank + 1) % wire.size, x[:1])], [((wire.rank - 1) % wire.size, x[:1].clone())])


def ring_that_does_not_count_a_message(wire: Wire, x: Tensor) -> None:
    algorithms.ring(wire, x)
    sending = dist.isend(x[:1], (wire.rank + 1) % wire.size)
    dist.recv(x[:1].clone(), (wire.rank - 1) % wire.size)
    assert sending is not None
    sending.wait()


def ring_that_counts_what_it_does_not_send(wire: Wire, x: Tensor) -> None:
    algorithms.ring(wire, x)
    for traffic in wire._counters:
        traffic.bytes_sent += 10_000


FAULTS: list[tuple[Callable[[Wire, Tensor], None], str]] = [
    (pass_around_ring, "ranks hold different bits"),
    (ring_that_gathers_the_wrong_block, "wrong sum"),
    (ring_with_a_message_too_many, "bytes are not the formula's"),
    (ring_that_does_not_count_a_message, "the kernel sent more than was counted"),
    (ring_that_counts_what_it_does_not_send, "the kernel sent less than was counted"),
]


@only(4)
@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_faults_are_caught(ranks: Ranks, fault: Callable[[Wire, Tensor], None], message: str) -> None:
    size, dtype = 10_001, torch.float32
    outcomes = ranks.run(measure, partial(by_hand, fault), partial(leaf, size, dtype), True)
    checks = {
        "wrong sum": lambda: check_sum(outcomes, dtype, *exact_sum(ranks.size, size, dtype)),
        "ranks hold": check_same_bits,
        "bytes are": lambda: check_traffic(outcomes, cost.predict("ring", ranks.size, size, 4)),
        "the kernel": lambda: check_kernel(outcomes),
    }
    check = next(check for prefix, check in checks.items() if message.startswith(prefix))
    with pytest.raises(AssertionError, match=message):
        check(outcomes) if check is check_same_bits else check()


# --- the front --------------------------------------------------------------------------------------------------------


def reduce_layouts(rank: int, algorithm: Algorithm) -> list[str]:
    """Names of the layouts and dtypes that `all_reduce` got wrong; rank r holds r + 1 times the same whole numbers."""
    n = dist.get_world_size()
    grid = torch.arange(24.0).view(4, 6)
    layouts: dict[str, Tensor] = {
        "matrix": grid.clone(),
        "transposed": grid.clone().t(),
        "strided": grid.clone()[:, ::2],
        "scalar": torch.tensor(5.0),
        "int8": torch.arange(5, dtype=torch.int8),
        "fp16": torch.arange(5).half(),
        "complex": torch.complex(grid, -grid),
        "conjugate": torch.complex(grid, -grid).conj(),
        "leaf": grid.clone().requires_grad_(),
    }
    wrong = []
    for name, layout in layouts.items():
        with torch.no_grad():
            expected = layout * (n * (n + 1) // 2)
            layout.mul_(rank + 1)
        if all_reduce(layout, algorithm) is not layout or not torch.equal(layout, expected):
            wrong.append(name)
    base = torch.ones(6)
    all_reduce(base[::2], algorithm)
    return wrong if base.tolist() == [n, 1] * 3 else [*wrong, "elements between strides"]


@only(3)
@pytest.mark.parametrize("algorithm", Algorithm)
def test_layouts_and_dtypes(ranks: Ranks, algorithm: Algorithm) -> None:
    assert ranks.run(reduce_layouts, algorithm) == [[]] * ranks.size


def reduce_bools(rank: int, algorithm: Algorithm) -> list[bool]:
    return all_reduce(torch.tensor([False, rank == 1, True]), algorithm).tolist()


@only(3)
def test_bools_add_as_or(ranks: Ranks) -> None:
    for algorithm in COUNTED:
        assert ranks.run(reduce_bools, algorithm) == [[False, True, True]] * ranks.size


def reduce_in_group(rank: int, members: list[int]) -> list[Any]:
    group: Any = dist.new_group(members)
    if rank not in members:
        with pytest.raises(ValueError, match=f"global rank {rank} is not in the group"):
            all_reduce(torch.ones(1), group=group)
        return []
    return [all_reduce(torch.full((5,), 10.0**rank), algorithm, group).tolist() for algorithm in Algorithm]


@only(5)
@pytest.mark.parametrize("members", [[1, 3, 4], [2], [0, 1, 2, 4]], ids=str)
def test_subgroups(ranks: Ranks, members: list[int]) -> None:
    """Ranks count within the group; its global ranks start nowhere in particular."""
    expected = [[sum(10.0**rank for rank in members)] * 5] * len(Algorithm)
    answers = ranks.run(reduce_in_group, members)
    assert answers == [expected if rank in members else [] for rank in range(ranks.size)]


def count_in_blocks(rank: int) -> list[tuple[int, int]]:
    with count_traffic() as outer:
        all_reduce(torch.ones(2))
        with count_traffic() as inner:
            all_reduce(torch.ones(4), "butterfly")
    all_reduce(torch.ones(8))
    return [(traffic.bytes_sent, traffic.steps) for traffic in (outer, inner)]


@only(2)
def test_counting_blocks_nest(ranks: Ranks) -> None:
    assert ranks.run(count_in_blocks) == [[(8 + 16, 3), (16, 1)]] * 2


@only(1)
@pytest.mark.parametrize("algorithm", Algorithm)
def test_one_rank_sends_nothing(ranks: Ranks, algorithm: Algorithm) -> None:
    [outcome] = ranks.run(measure, partial(all_reduce, algorithm=algorithm), partial(leaf, 9, torch.float32))
    assert torch.equal(outcome.tensor(torch.float32), leaf(9, torch.float32, 0))
    assert outcome.traffic == Traffic()


def test_a_wrong_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"unknown all-reduce algorithm 'rings'.*ring, tree, .*halving_doubling"):
        all_reduce(torch.ones(1), "rings")


# --- the cost model ---------------------------------------------------------------------------------------------------

# (alpha, S beta, S gamma) on the critical path and the bytes of the busiest rank in units of S, for N | S.
TABLE: dict[str, Callable[[int, float], tuple[float, float, float, float]]] = {
    "central": lambda n, _: (2 * (n - 1), 2 * (n - 1), n - 1, n - 1),
    "sharded_parameter_server": lambda n, _: (2 * (n - 1), 2 * (n - 1) / n, (n - 1) / n, 2 * (n - 1) / n),
    "ring": lambda n, _: (2 * (n - 1), 2 * (n - 1) / n, (n - 1) / n, 2 * (n - 1) / n),
    "tree": lambda n, log: (2 * log, 2 * log, log, log),
    "butterfly": lambda n, log: (log, log, log, log),
    "halving_doubling": lambda n, log: (2 * log, 2 * (n - 1) / n, (n - 1) / n, 2 * (n - 1) / n),
    "circulant": lambda n, log: (2 * log, 2 * (n - 1) / n, (n - 1) / n, 2 * (n - 1) / n),
}


@pytest.mark.parametrize("algorithm", TABLE)
@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_cost_is_the_textbooks(algorithm: str, n: int) -> None:
    predicted = cost.predict(algorithm, n, 64 * 1024, 4)
    alphas, betas, gammas, busiest = TABLE[algorithm](n, math.log2(n))
    nbytes = 64 * 1024 * 4
    assert predicted.path.seconds(1e-5, 1e-9, 1e-10) == pytest.approx(
        alphas * 1e-5 + betas * nbytes * 1e-9 + gammas * nbytes * 1e-10
    )
    assert max(predicted.bytes_sent) == busiest * nbytes


@pytest.mark.parametrize("n", [3, 5, 6, 7, 9, 12])
def test_folding_costs_two_more_steps_and_s_more_bytes(n: int) -> None:
    p, nbytes = 1 << (n.bit_length() - 1), 48 * 1024 * 4
    butterfly, halving = (cost.predict(name, n, 48 * 1024, 4) for name in ("butterfly", "halving_doubling"))
    assert (butterfly.steps, max(butterfly.bytes_sent)) == (math.log2(p) + 2, (math.log2(p) + 1) * nbytes)
    assert halving.steps == 2 * math.log2(p) + 2
    assert max(halving.bytes_sent) == pytest.approx((1 + 2 * (p - 1) / p) * nbytes)


@given(n=st.integers(2, 200), size=st.integers(1, 10**6), algorithm=st.sampled_from(COUNTED))
@settings(deadline=None)
def test_no_cost_beats_the_lower_bounds(n: int, size: int, algorithm: Algorithm) -> None:
    predicted, bound = cost.predict(algorithm, n, size, 4), cost.lower_bound(n, size * 4)
    assert predicted.path.messages >= bound.messages
    assert max(predicted.bytes_sent) >= bound.bytes * (1 - 1e-12)
    assert predicted.path.bytes >= bound.bytes * (1 - 1e-12)
    assert predicted.path.bytes_added >= bound.bytes_added * (1 - 1e-12)
    assert sum(predicted.bytes_sent) >= 2 * (n - 1) * size * 4


@given(n=st.integers(2, 200), size=st.integers(1, 10**8))
@settings(deadline=None)
def test_double_tree_sends_at_most_twice_the_data(n: int, size: int) -> None:
    predicted = cost.predict("double_tree", n, size, 4)
    assert max(predicted.bytes_sent) <= 2 * (size + 1) * 4
    assert predicted.steps <= math.ceil(size * 4 / 2 / (1 << 18)) + 2 * math.ceil(math.log2(n)) - 1


def test_ring_and_butterfly_cross_where_their_times_meet() -> None:
    crossing = cost.ring_butterfly_crossover_bytes(8, alpha=1e-5, beta=1e-9)
    ring, butterfly = (cost.predict(name, 8, round(crossing), 1) for name in ("ring", "butterfly"))
    assert ring.path.seconds(1e-5, 1e-9) == pytest.approx(butterfly.path.seconds(1e-5, 1e-9), rel=1e-4)
    assert cost.ring_butterfly_crossover_bytes(2, 1e-5, 1e-9) == math.inf


def test_bus_bandwidth_of_a_perfect_ring_is_the_links() -> None:
    ring = cost.predict("ring", 8, 1 << 20, 4)
    assert cost.bus_bandwidth(8, 4 << 20, ring.path.seconds(0, 1e-9)) == pytest.approx(1e9)


def test_native_has_no_formula() -> None:
    with pytest.raises(ValueError, match="no cost formula for 'native': choose one of central, "):
        cost.predict("native", 2, 1, 4)
