"""All-reduce (sum) step by step: each function is one algorithm in its textbook form.

An algorithm is a function of a `Wire` (this rank's view of N ranks) and a contiguous 1-D tensor `x` of S elements, the
same size on all ranks, which it overwrites with the sum. Every rank runs the same loop in lock step; what it sends is
in `cost.py` to the byte.

One rule makes all ranks end with the same bits: an element's sum is either computed in one place and copied, or in
several places from the same operands in the same order. IEEE addition commutes but does not associate, and even the
first does not hold for the payload of NaNs; so where two ranks add the same pair, the lower rank's operand is first.
`tree`, `butterfly` and `halving_doubling` on 2^k ranks add along the same binary tree, ((0 + 1) + (2 + 3)) + ...
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lit_dp.collectives.double_tree import double_tree
from lit_dp.collectives.wire import Wire, span

Steps = Callable[[Wire, Tensor], None]


def central(wire: Wire, x: Tensor) -> None:
    """Rank 0 receives from one rank after another, adds in rank order, and sends the sum back in the same way.

    The "parameter server" of most tutorials: everything passes through one link.
    """
    workers, received = range(1, wire.size), torch.empty_like(x)
    for worker in workers:
        wire.exchange([(0, x)] if wire.rank == worker else [], [(worker, received)] if wire.rank == 0 else [])
        if wire.rank == 0:
            x += received
    for worker in workers:
        wire.exchange([(worker, x)] if wire.rank == 0 else [], [(0, x)] if wire.rank == worker else [])


def sharded_parameter_server(wire: Wire, x: Tensor) -> None:
    """Rank i is the server of block i: it gets that block from everyone, adds in rank order, sends the sum to everyone.

    Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", with every worker a server too.
    """
    others = [rank for rank in range(wire.size) if rank != wire.rank]
    blocks = [span(x, rank, rank + 1, of=wire.size) for rank in range(wire.size)]
    mine = blocks[wire.rank]
    pushed = [mine.clone() if rank == wire.rank else torch.empty_like(mine) for rank in range(wire.size)]
    wire.exchange([(rank, blocks[rank]) for rank in others], [(rank, pushed[rank]) for rank in others])
    mine.copy_(pushed[0])
    for contribution in pushed[1:]:
        mine += contribution
    wire.exchange([(rank, mine) for rank in others], [(rank, blocks[rank]) for rank in others])


def ring(wire: Wire, x: Tensor) -> None:
    """Reduce-scatter, then all-gather, both around the ring 0 → 1 → … → N-1 → 0: bandwidth-optimal.

    Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    rank, size = wire.rank, wire.size
    left, right = (rank - 1) % size, (rank + 1) % size
    blocks = [span(x, i, i + 1, of=size) for i in range(size)]
    for step in range(size - 1):
        partial = blocks[(rank - step - 1) % size]
        received = torch.empty_like(partial)
        wire.exchange([(right, blocks[(rank - step) % size])], [(left, received)])
        partial += received
    for step in range(size - 1):
        wire.exchange([(right, blocks[(rank + 1 - step) % size])], [(left, blocks[(rank - step) % size])])


def tree(wire: Wire, x: Tensor) -> None:
    """Reduce to rank 0 along a binomial tree, then broadcast back along it.

    Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 4.
    """
    distances = [1 << level for level in range((wire.size - 1).bit_length())]
    received = torch.empty_like(x)
    for distance in distances:
        parent, child = _binomial_peers(wire, distance)
        wire.exchange([(peer, x) for peer in parent], [(peer, received) for peer in child])
        if child:
            x += received
    for distance in reversed(distances):
        parent, child = _binomial_peers(wire, distance)
        wire.exchange([(peer, x) for peer in child], [(peer, x) for peer in parent])


def _binomial_peers(wire: Wire, distance: int) -> tuple[list[int], list[int]]:
    """This rank's parent and child over the edges that span `distance`: one, the other or neither."""
    offset = wire.rank % (2 * distance)
    parent = [wire.rank - distance] if offset == distance else []
    child = [wire.rank + distance] if offset == 0 and wire.rank + distance < wire.size else []
    return parent, child


def butterfly(wire: Wire, x: Tensor) -> None:
    """Recursive doubling: swap everything with the rank at distance 1, 2, 4 … and add; few steps, many bytes.

    Thakur, Rabenseifner and Gropp 2005, section 4.4. Other N than 2^k: fold and unfold.
    """
    _folded(wire, x, _butterfly, wire.size.bit_length() - 1)


def _butterfly(wire: Wire, x: Tensor) -> None:
    received = torch.empty_like(x)
    for level in range(wire.size.bit_length() - 1):
        partner = wire.rank ^ (1 << level)
        wire.exchange([(partner, x)], [(partner, received)])
        _add_in_rank_order(x, received, wire.rank < partner)


def halving_doubling(wire: Wire, x: Tensor) -> None:
    """Rabenseifner: reduce-scatter by recursive vector halving at distance 1, 2, 4 …, all-gather by the way back.

    Rabenseifner 2004, "Optimization of Collective Reduction Operations". On 2^k ranks every element, wherever it lies,
    is added along one binary tree over the ranks: if each process has added 2^j neighbouring leaves before, pairwise,
    the bits are those of 2^(k+j) processes with a leaf each (law L2). Other N than 2^k: fold and unfold.
    """
    _folded(wire, x, _halving_doubling, 2 * (wire.size.bit_length() - 1))


def _halving_doubling(wire: Wire, x: Tensor) -> None:
    first, last, way = 0, wire.size, []
    for level in range(wire.size.bit_length() - 1):
        partner, middle = wire.rank ^ (1 << level), (first + last) // 2
        lower, upper = span(x, first, middle, of=wire.size), span(x, middle, last, of=wire.size)
        keep, give = (lower, upper) if wire.rank < partner else (upper, lower)
        received = torch.empty_like(keep)
        wire.exchange([(partner, give)], [(partner, received)])
        _add_in_rank_order(keep, received, wire.rank < partner)
        first, last = (first, middle) if wire.rank < partner else (middle, last)
        way.append((partner, keep, give))
    for partner, keep, give in reversed(way):
        wire.exchange([(partner, keep)], [(partner, give)])


def _add_in_rank_order(mine: Tensor, theirs: Tensor, mine_first: bool) -> None:
    torch.add(*(mine, theirs) if mine_first else (theirs, mine), out=mine)


def _folded(wire: Wire, x: Tensor, power_of_two: Steps, steps: int) -> None:
    """Any N: with p = 2^floor(log2 N), ranks 0, 2, … 2(N - p) - 2 add themselves to the next rank and rest meanwhile.

    Thakur, Rabenseifner and Gropp 2005, section 4.5: one step and S more before, one step and S more after.
    """
    resting = range(0, 2 * (wire.size - (1 << (wire.size.bit_length() - 1))), 2)
    to_next = [(wire.rank + 1, x)] if wire.rank in resting else []
    from_previous = [(wire.rank - 1, torch.empty_like(x))] if wire.rank - 1 in resting else []
    if resting:
        wire.exchange(to_next, from_previous)
    for _, received in from_previous:
        _add_in_rank_order(x, received, mine_first=False)
    if wire.rank in resting:
        wire.rest(steps)
    else:
        power_of_two(wire.among([rank for rank in range(wire.size) if rank not in resting]), x)
    if resting:
        wire.exchange([(previous, x) for previous, _ in from_previous], to_next)


def circulant(wire: Wire, x: Tensor) -> None:
    """Halving-doubling's steps and bytes for every N: rounds of the circulant graph with roughly halved skips.

    Träff 2024, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv 2410.14234, algorithms 1 and 2.
    """
    rank, size = wire.rank, wire.size
    start, skips = rank * x.numel() // size, [size]
    while skips[-1] > 1:
        skips.append((skips[-1] + 1) // 2)
    rounds = list(pairwise(skips))
    rotated = torch.roll(x, -start)  # begins with this rank's own block

    def window(first: int, last: int) -> Tensor:
        return rotated[(rank + first) * x.numel() // size - start : (rank + last) * x.numel() // size - start]

    for previous, skip in rounds:
        to, source = (rank + skip) % size, (rank - skip) % size
        partial = window(0, previous - skip)
        received = torch.empty_like(partial)
        wire.exchange([(to, window(skip, previous))], [(source, received)])
        partial += received
    for previous, skip in reversed(rounds):
        to, source = (rank - skip) % size, (rank + skip) % size
        wire.exchange([(to, window(0, previous - skip))], [(source, window(skip, previous))])
    x.copy_(torch.roll(rotated, start))


def native(wire: Wire, x: Tensor) -> None:
    """The backend's own: a segmented ring in gloo, the cheapest by its own cost model in NCCL."""
    wire.backend_all_reduce(x)


class Algorithm(str, Enum):
    """Names of the all-reduce algorithms, as written in YAML."""

    central = "central"
    sharded_parameter_server = "sharded_parameter_server"
    ring = "ring"
    tree = "tree"
    double_tree = "double_tree"
    butterfly = "butterfly"
    halving_doubling = "halving_doubling"
    circulant = "circulant"
    native = "native"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"unknown all-reduce algorithm {value!r}: choose one of {', '.join(cls.__members__)}")


_STEPS: dict[Algorithm, Steps] = {
    Algorithm.central: central,
    Algorithm.sharded_parameter_server: sharded_parameter_server,
    Algorithm.ring: ring,
    Algorithm.tree: tree,
    Algorithm.double_tree: double_tree,
    Algorithm.butterfly: butterfly,
    Algorithm.halving_doubling: halving_doubling,
    Algorithm.circulant: circulant,
    Algorithm.native: native,
}


@torch.no_grad()
def all_reduce(tensor: Tensor, algorithm: str = "ring", group: dist.ProcessGroup | None = None) -> Tensor:
    """Replace `tensor` by its sum over the ranks of `group` (all ranks by default) and return it.

    Every rank of the group must call it, with the same shape, dtype and algorithm; any shape and strides, any dtype
    that can be added. All ranks end with the same bits. Waits for the sum (on CUDA: queues it on the current stream).

    Raises:
        ValueError: unknown algorithm, or a process outside `group`.
    """
    steps = _STEPS[Algorithm(algorithm)]
    wire = Wire(group, tensor.device)
    x = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if wire.size > 1 and x.numel():
        steps(wire, x)
    if x.data_ptr() != tensor.data_ptr():
        tensor.copy_(x.view_as(tensor))
    return tensor
