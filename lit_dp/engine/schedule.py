"""The schedule: what is trained, as arithmetic. (epoch, step, virtual rank) to sample indices, and nothing else.

One rule makes the rest follow. Lay an epoch's samples in one `order`; step s takes the `global_batch` samples from
`s * global_batch`, and virtual rank v every V-th of them, beginning at v. That is `DistributedSampler(num_replicas=V)`
followed by `DataLoader(batch_size=global_batch // V)`, read as one slice. No process appears in it: `placement` says
which virtual ranks a process runs, and can say it anew after every restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Tail = Literal["pad", "drop", "exact"]


@dataclass(frozen=True)
class Schedule:
    """The sample indices of every step of every epoch, for V virtual ranks.

    `tail` says what becomes of the samples that do not fill the last step:

    - "pad": the order is continued from its own beginning until V divides it. Every rank has equally many samples, and
      the last step may be short. Equals `DistributedSampler(drop_last=False)` + `DataLoader(drop_last=False)`.
    - "drop": only full steps, as many as one process would take: `samples // global_batch`, possibly none. Equals
      `DistributedSampler(drop_last=True)` + `DataLoader(drop_last=True)`. The mixture of a padding sampler and a
      dropping loader (Lightning's `ddp` with `drop_last=True`) takes the same steps, and one more, filled with fewer
      than V repeated samples, where `samples % global_batch > global_batch - V`.
    - "exact": nothing padded, nothing dropped. The last step is short, and its samples are dealt in turn: counts of
      virtual ranks differ by at most one, some may be zero, and its gradient needs weights (see `step_counts`).

    Args:
        samples: length of the dataset, or of a custom sampler's draw.
        global_batch: samples a step, over all virtual ranks.
        virtual_ranks: V, the ranks of the run that is reproduced; V divides `global_batch`.
        seed: epoch e is shuffled with `seed + e`, the same on all ranks: that is what makes their shares disjoint.
        shuffle: False keeps the dataset's order.
        tail: "pad", "drop" or "exact".
    """

    samples: int
    global_batch: int
    virtual_ranks: int
    seed: int = 0
    shuffle: bool = True
    tail: Tail = "pad"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples={self.samples} is nothing to train on: give a dataset of 1 or more.")
        if self.virtual_ranks < 1:
            raise ValueError(f"virtual_ranks={self.virtual_ranks}: set it to 1 or more.")
        if self.global_batch < 1 or self.global_batch % self.virtual_ranks:
            raise ValueError(
                f"global_batch={self.global_batch} cannot be shared equally by virtual_ranks={self.virtual_ranks}: "
                f"set global_batch to {_nearest_multiples(self.global_batch, self.virtual_ranks)}."
            )
        if self.tail not in get_args(Tail):
            raise ValueError(f"tail={self.tail!r}: set it to one of {', '.join(map(repr, get_args(Tail)))}.")

    @property
    def per_rank_batch(self) -> int:
        """Samples of one virtual rank in a full step."""
        return self.global_batch // self.virtual_ranks

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch, a short last one included; 0 where "drop" leaves nothing."""
        return self._steps(self._used(self.samples))

    @property
    def padded(self) -> int:
        """Samples of an epoch that are repeats; 0 unless the tail is "pad"."""
        return max(0, self._used(self.samples) - self.samples)

    @property
    def dropped(self) -> int:
        """Samples that an epoch does not use; 0 unless the tail is "drop"."""
        return max(0, self.samples - self._used(self.samples))

    def order(self, epoch: int) -> Tensor:
        """An epoch's samples in the order they are used, padded or cut: int64 (samples + padded - dropped,)."""
        if epoch < 0:
            raise ValueError(f"epoch={epoch}: epochs are counted from 0.")
        if not self.shuffle:
            return self.complete(torch.arange(self.samples, device="cpu"))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return self.complete(torch.randperm(self.samples, generator=generator, device="cpu"))

    def complete(self, draw: Tensor) -> Tensor:
        """A draw (n,) of any length, repeats allowed, padded or cut as `tail` says. Twice is the same as once."""
        used = self._used(len(draw))
        if used <= len(draw):
            return draw[:used]
        repeats = torch.arange(used - len(draw), device=draw.device) % len(draw)
        return torch.cat((draw, draw[repeats]))

    def split(self, order: Tensor, step: int, virtual_rank: int) -> Tensor:
        """One virtual rank's samples of one step, from any order: int64 (<= per_rank_batch,), a copy.

        `order` is `self.order(epoch)`, or a custom sampler's draw: of any length, equal on all ranks. Costs O(batch)
        where the order is complete already, else the price of `complete`.
        """
        order = self.complete(order)
        self._check_step(step, self._steps(len(order)))
        self._check_rank(virtual_rank)
        return self._part(order, step, virtual_rank)

    def indices(self, epoch: int, step: int, virtual_rank: int) -> Tensor:
        """One virtual rank's samples of one step: int64 (<= per_rank_batch,). Shuffles anew: `iterate` for a loop."""
        return self.split(self.order(epoch), step, virtual_rank)

    def step_counts(self, step: int) -> list[int]:
        """Samples of each virtual rank in a step, V numbers. Their sum is what the step's gradient is a mean over."""
        self._check_step(step, self.steps_per_epoch)
        count = min(self.global_batch, self._used(self.samples) - step * self.global_batch)
        return [len(range(rank, count, self.virtual_ranks)) for rank in range(self.virtual_ranks)]

    def iterate(
        self, epoch: int, virtual_ranks: range, start_step: int = 0, draw: Tensor | None = None
    ) -> Iterator[tuple[int, int, Tensor]]:
        """(step, virtual rank, indices) of an epoch from `start_step` on: steps in order, within a step the ranks.

        Shuffles once, when called; after that a step costs O(batch). A rank without samples in an "exact" last step
        is yielded with indices of shape (0,), so that every rank takes part in every step. `start_step` may be the
        number of steps: nothing is left then. A custom sampler's `draw` (n,) takes the place of the shuffle.
        """
        order = self.order(epoch) if draw is None else self.complete(draw)
        steps = self._steps(len(order))
        if not 0 <= start_step <= steps:
            raise ValueError(f"start_step={start_step}: an epoch has {steps} steps; start at 0 to {steps}.")
        for rank in virtual_ranks:
            self._check_rank(rank)
        return ((s, v, self._part(order, s, v)) for s in range(start_step, steps) for v in virtual_ranks)

    def _part(self, complete: Tensor, step: int, virtual_rank: int) -> Tensor:
        start, stop = step * self.global_batch, (step + 1) * self.global_batch
        # A copy: a view would drag the whole epoch's storage along wherever it is pickled.
        return complete[start + virtual_rank : stop : self.virtual_ranks].clone()

    def _used(self, length: int) -> int:
        if self.tail == "exact":
            return length
        if self.tail == "drop":
            return length // self.global_batch * self.global_batch
        return -(-length // self.virtual_ranks) * self.virtual_ranks

    def _steps(self, used: int) -> int:
        return -(-used // self.global_batch)

    def _check_step(self, step: int, steps: int) -> None:
        if not 0 <= step < steps:
            way = (
                f"epoch, step = divmod(step_of_the_run, {steps})"
                if steps
                else "a smaller global_batch, or another tail"
            )
            raise ValueError(f"step={step}: an epoch has {steps} steps, counted from 0. Use {way}.")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.virtual_ranks:
            raise ValueError(f"Virtual rank {rank} does not exist: choose 0 to {self.virtual_ranks - 1}.")


def placement(virtual_ranks: int, processes: int, process: int) -> range:
    """The virtual ranks that one of W processes runs: the block [process * k, (process + 1) * k), k = V / W.

    Blocks, not stripes: neighbours in the summation tree stay together, so its lower levels fold inside a process and
    its upper levels between processes, and the tree is the same one for every W (W a power of two).
    """
    _check_process(processes, process)
    if virtual_ranks < 1 or virtual_ranks % processes:
        choices = ", ".join(str(w) for w in range(1, virtual_ranks + 1) if virtual_ranks % w == 0)
        raise ValueError(
            f"virtual_ranks={virtual_ranks} cannot be placed on {processes} processes equally: set virtual_ranks to "
            f"{_nearest_multiples(virtual_ranks, processes)}" + (f", or start {choices} processes." if choices else ".")
        )
    share = virtual_ranks // processes
    return range(process * share, (process + 1) * share)


def evaluation_indices(samples: int, processes: int, process: int) -> range:
    """One process's samples in evaluation and prediction: i goes to process i % W, nothing padded; may be empty."""
    _check_process(processes, process)
    if samples < 0:
        raise ValueError(f"samples={samples}: give the length of the dataset, 0 or more.")
    return range(process, samples, processes)


def _check_process(processes: int, process: int) -> None:
    if not 0 <= process < processes:
        raise ValueError(f"process={process} of processes={processes}: processes are counted 0 to processes - 1.")


def _nearest_multiples(number: int, of: int) -> str:
    below = number // of * of
    return f"{of}" if below < of else f"{below} or {below + of}"
