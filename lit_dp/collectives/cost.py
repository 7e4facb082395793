"""What each all-reduce costs: exact bytes and messages of every rank, steps, and time in the alpha-beta-gamma model.

N ranks reduce S elements. A message of b bytes takes alpha + b beta seconds, adding b bytes takes b gamma (Thakur,
Rabenseifner and Gropp 2005, section 3). S cut in N blocks: block i is elements i S // N up to (i + 1) S // N. Counts
are exact for every N and S, divisible or not; nothing here looks at how the algorithms are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log2


@dataclass(frozen=True)
class Path:
    """The longest chain of dependent work: messages, bytes sent and bytes added, one after another."""

    messages: int
    bytes: float
    bytes_added: float

    def seconds(self, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """Time at `alpha` seconds a message, `beta` seconds a byte sent and `gamma` seconds a byte added."""
        return self.messages * alpha + self.bytes * beta + self.bytes_added * gamma


@dataclass(frozen=True)
class Cost:
    """Exact traffic of one all-reduce, a value a rank, its number of lock-step rounds, and its critical path."""

    bytes_sent: tuple[int, ...]
    messages_sent: tuple[int, ...]
    steps: int
    path: Path


def predict(algorithm: str, world_size: int, size: int, itemsize: int) -> Cost:
    """Cost of an all-reduce of `size` elements of `itemsize` bytes among `world_size` ranks.

    Raises:
        ValueError: unknown algorithm, or `native`: the backend chooses its algorithm and says nothing.
    """
    if algorithm not in _FORMULAS:
        raise ValueError(f"no cost formula for {str(algorithm)!r}: choose one of {', '.join(_FORMULAS)}")
    if world_size == 1 or size == 0:
        return Cost((0,) * world_size, (0,) * world_size, 0, Path(0, 0, 0))
    return _FORMULAS[algorithm](world_size, size, itemsize)


def lower_bound(world_size: int, nbytes: int) -> Path:
    """No all-reduce takes fewer rounds, or lets every rank send or add less (Patarasuk and Yuan 2009)."""
    share = (world_size - 1) / world_size * nbytes
    return Path((world_size - 1).bit_length(), 2 * share, share)


def bus_bandwidth(world_size: int, nbytes: int, seconds: float) -> float:
    """Bytes a second, comparable over N: algorithm bandwidth S / t times 2 (N - 1) / N (nccl-tests, PERFORMANCE.md)."""
    return nbytes / seconds * 2 * (world_size - 1) / world_size


def ring_butterfly_crossover_bytes(world_size: int, alpha: float, beta: float) -> float:
    """The size above which `ring` beats `butterfly`, gamma = 0 and N = 2^k: both times set equal. Infinite at N = 2."""
    excess = log2(world_size) - 2 * (world_size - 1) / world_size
    return (2 * (world_size - 1) - log2(world_size)) / excess * alpha / beta if excess > 0 else inf


def _central(n: int, s: int, itemsize: int) -> Cost:
    """All to the root, then all from the root, one after another."""
    elements, messages = [(n - 1) * s] + [s] * (n - 1), [n - 1] + [1] * (n - 1)
    return _cost(elements, messages, itemsize, 2 * (n - 1), sent=2 * (n - 1) * s, added=(n - 1) * s)


def _sharded_parameter_server(n: int, s: int, itemsize: int) -> Cost:
    """Two rounds of N - 1 messages: every block but its own, then its own N - 1 times. Incast is not in the model."""
    own = [_block(n, s, rank) for rank in range(n)]
    elements = [s + (n - 2) * block for block in own]
    messages = [min(s, n) + (n - 2) * (block > 0) for block in own]
    sent, added = 2 * (n - 1) / n * s, (n - 1) / n * s
    return _cost(elements, messages, itemsize, 2, sent, added, chain=2 * (n - 1))


def _ring(n: int, s: int, itemsize: int) -> Cost:
    """Every block twice, but for the one that ends here complete and the one that passes here last."""
    kept = [(_block(n, s, rank + 1), _block(n, s, rank + 2)) for rank in range(n)]
    elements = [2 * s - sum(blocks) for blocks in kept]
    messages = [2 * min(s, n) - sum(block > 0 for block in blocks) for blocks in kept]
    return _cost(elements, messages, itemsize, 2 * (n - 1), sent=2 * (n - 1) / n * s, added=(n - 1) / n * s)


def _tree(n: int, s: int, itemsize: int) -> Cost:
    """S to the parent and to each child: one for every power of two below the rank's lowest set bit and N - rank."""
    below = [n] + [rank & -rank for rank in range(1, n)]
    children = [(min(below[rank], n - rank) - 1).bit_length() for rank in range(n)]
    messages = [(rank > 0) + children[rank] for rank in range(n)]
    height = (n - 1).bit_length()
    return _cost([m * s for m in messages], messages, itemsize, 2 * height, sent=2 * height * s, added=height * s)


def _double_tree(n: int, s: int, itemsize: int, chunk_bytes: int = 1 << 18) -> Cost:
    """Half of S over every edge of each tree, both ways, in a pipeline of C chunks over 2 ceil(log2 N) levels.

    An even node has two children, the last only one, the root one; all others have a parent. The time is that of the
    busiest rank, B bytes, in a full pipeline, and of filling it: B (C - 1 + ceil(log2 N)) / C.
    """
    chunks, height = max(1, -(-s * itemsize // (2 * chunk_bytes))), (n - 1).bit_length()
    children = [1] + [0 if node % 2 else 1 + (node + 1 < n) for node in range(1, n)]
    halves = (s // 2, s - s // 2)
    nodes = [(rank, n - 1 - rank if n % 2 == 0 else (rank - 1) % n) for rank in range(n)]
    edges = [[children[node] + (node > 0) for node in pair] for pair in nodes]
    elements = [sum(half * count for half, count in zip(halves, pair, strict=True)) for pair in edges]
    messages = [sum(min(half, chunks) * count for half, count in zip(halves, pair, strict=True)) for pair in edges]
    steps = chunks + 2 * height - 1
    stretch = (chunks - 1 + height) / chunks
    added = max(sum(children[node] for node in pair) for pair in nodes) * s / 2 * stretch
    return _cost(elements, messages, itemsize, steps, sent=max(elements) * stretch, added=added)


def _butterfly(n: int, s: int, itemsize: int) -> Cost:
    """S in each of log2 p steps."""
    levels, folds = n.bit_length() - 1, not _is_power_of_two(n)
    messages = _unfolded(n, [levels] * (1 << levels), 1)
    sent, added = (levels + 2 * folds) * s, (levels + folds) * s
    return _cost([m * s for m in messages], messages, itemsize, levels + 2 * folds, sent, added)


def _halving_doubling(n: int, s: int, itemsize: int) -> Cost:
    """Down: all that is not kept, S less the last part. Back: each part in turn, from the last to the half."""
    levels, folds = n.bit_length() - 1, not _is_power_of_two(n)
    p = 1 << levels
    parts = [_halved(p, s, rank) for rank in range(p)]
    elements = _unfolded(n, [s + sum(part[1:-1]) for part in parts], s)
    messages = [sum((a > b) + (b > 0) for a, b in pairwise(part)) for part in parts]
    sent, added = 2 * (p - 1) / p * s + 2 * folds * s, (p - 1) / p * s + folds * s
    return _cost(elements, _unfolded(n, messages, 1), itemsize, 2 * (levels + folds), sent, added)


def _circulant(n: int, s: int, itemsize: int) -> Cost:
    """Down: all blocks but its own. Back: the blocks 0 .. skip' - skip after its own, skip halving from N to 1."""
    skips = [n]
    while skips[-1] > 1:
        skips.append((skips[-1] + 1) // 2)
    rounds = list(pairwise(skips))

    def window(rank: int, first: int, last: int) -> int:
        return (rank + last) * s // n - (rank + first) * s // n

    back = [[window(rank, 0, previous - skip) for previous, skip in rounds] for rank in range(n)]
    down = [[window(rank, skip, previous) for previous, skip in rounds] for rank in range(n)]
    elements = [s - _block(n, s, rank) + sum(back[rank]) for rank in range(n)]
    messages = [sum(part > 0 for part in down[rank] + back[rank]) for rank in range(n)]
    return _cost(elements, messages, itemsize, 2 * len(rounds), sent=2 * (n - 1) / n * s, added=(n - 1) / n * s)


def _cost(
    elements: list[int],
    messages: list[int],
    itemsize: int,
    steps: int,
    sent: float,
    added: float,
    chain: int | None = None,
) -> Cost:
    path = Path(chain or steps, sent * itemsize, added * itemsize)
    return Cost(tuple(count * itemsize for count in elements), tuple(messages), steps, path)


def _block(n: int, s: int, index: int) -> int:
    """Elements of block `index`, modulo N."""
    return (index % n + 1) * s // n - index % n * s // n


def _halved(p: int, s: int, rank: int) -> list[int]:
    """Elements that `rank` still adds after 0, 1 … log2 p halvings; bit j of the rank chooses the half of halving j."""
    first, width, sizes = 0, p, [s]
    while width > 1:
        width //= 2
        first += width * (rank & 1)
        rank >>= 1
        sizes.append((first + width) * s // p - first * s // p)
    return sizes


def _unfolded(n: int, core: list[int], once: int) -> list[int]:
    """The counts of all N ranks from those of 2^k: a resting rank has `once`, its neighbour `once` more than else."""
    pairs = n - len(core)
    folded = [value for count in core[:pairs] for value in (once, count + once)]
    return folded + core[pairs:]


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


_FORMULAS: dict[str, Callable[[int, int, int], Cost]] = {
    "central": _central,
    "sharded_parameter_server": _sharded_parameter_server,
    "ring": _ring,
    "tree": _tree,
    "double_tree": _double_tree,
    "butterfly": _butterfly,
    "halving_doubling": _halving_doubling,
    "circulant": _circulant,
}
