"""All-reduce along two complementary binary trees at once, pipelined in chunks: few steps, full bandwidth."""

from __future__ import annotations

from torch import Tensor

from lit_dp.collectives.wire import Message, Wire, span

CHUNK_BYTES = 1 << 18
"""Grain of the pipeline: each half of x travels in equal chunks of at most this size."""


def double_tree(wire: Wire, x: Tensor, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Each half of `x` is reduced up its own tree and broadcast down it; inner ranks of one are leaves of the other.

    Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"; the trees are
    NCCL's. All chunks of both trees move in one lock-step pipeline, so a rank sends at most 2S in all.
    """
    chunks, height = max(1, -(-x.nbytes // (2 * chunk_bytes))), (wire.size - 1).bit_length()
    halves = [_Half(span(x, i, i + 1, of=2), chunks, _tree_orders(wire.size)[i], wire.rank, height) for i in (0, 1)]
    for step in range(chunks + 2 * height - 1):
        sends = [message for half in halves for message in half.sends(step)]
        receives = [message for half in halves for message in half.receives(step)]
        wire.exchange(sends, receives)
        for half in halves:
            half.add(step)


class _Half:
    """One half of the data, and this rank's node in the tree of height H that it travels along.

    At depth d, chunk c goes up in step c + H - d and down in step c + H + d. One step before each, it comes in.
    """

    def __init__(self, half: Tensor, chunks: int, order: list[int], rank: int, height: int) -> None:
        self.half, self.chunks, self.height = half, chunks, height
        node = order.index(rank)
        self.parents = [order[_parent(node, len(order))]] if node else []
        self.children = [order[child] for child in range(1, len(order)) if _parent(child, len(order)) == node]
        self.depth = 0
        while node:
            node, self.depth = _parent(node, len(order)), self.depth + 1
        self.scratch = [half.new_empty(-(-half.numel() // chunks)) for _ in self.children]

    def sends(self, step: int) -> list[Message]:
        up, down = self._chunk(step - (self.height - self.depth)), self._chunk(step - (self.height + self.depth))
        return [(parent, up) for parent in self.parents] + [(child, down) for child in self.children]

    def receives(self, step: int) -> list[Message]:
        down = self._chunk(step - (self.height + self.depth - 1))
        return list(zip(self.children, self._from_children(step), strict=True)) + [(p, down) for p in self.parents]

    def add(self, step: int) -> None:
        for received in self._from_children(step):
            self._chunk(step - (self.height - self.depth - 1)).add_(received)

    def _from_children(self, step: int) -> list[Tensor]:
        return [scratch[: self._chunk(step - (self.height - self.depth - 1)).numel()] for scratch in self.scratch]

    def _chunk(self, c: int) -> Tensor:
        """Chunk `c`; an empty tensor, which is not sent, before the first and after the last."""
        return span(self.half, c, c + 1, of=self.chunks) if 0 <= c < self.chunks else self.half[:0]


def _tree_orders(size: int) -> tuple[list[int], list[int]]:
    """The rank at each node of both trees: the second is the first mirrored or, for odd N, shifted by one rank."""
    ranks = list(range(size))
    return ranks, ranks[::-1] if size % 2 == 0 else [*ranks[1:], 0]


def _parent(node: int, size: int) -> int:
    """Parent of `node` > 0 in the in-order binary tree of 1 .. size - 1, whose top hangs from 0. Odd nodes: leaves."""
    bit = node & -node
    parent = (node ^ bit) | (bit << 1)
    return parent if parent < size else node ^ bit
