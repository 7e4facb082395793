"""Which part of a user's loader this process reads: one rule for each kind of loader."""

from typing import Any, Literal, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lit_dp.engine.agreement import require_same_dataset
from lit_dp.engine.loaders import follow
from lit_dp.engine.peers import Peers
from lit_dp.engine.samplers import (
    AsGiven,
    Draw,
    EvalBatches,
    Share,
    TrainBatches,
    plain_order,
    shares_by_itself,
    stand,
)
from lit_dp.engine.schedule import Schedule, Tail, placement
from lit_dp.engine.stateful import InUse, has_state
from lit_dp.engine.streams import ShardedStream, stream_loader
from lit_dp.errors import ConfigError

Stage = Literal["train", "evaluate", "predict"]
STAGE_NAMES: dict[Stage, str] = {"train": "training", "evaluate": "evaluation", "predict": "prediction"}


class Sharder(NamedTuple):
    """Shares loaders out between processes.

    Attributes:
        peers: all processes; loaders are shared out on all of them together.
        seed: of the shuffle and of custom samplers' draws, equal on all ranks.
        tail: what becomes of samples that do not fill the last training step, where the loader keeps them.
        seeded_draws: whether draws in datasets follow (seed, epoch, sample).
        virtual_ranks: V, between which loaders are shared out; None for as many as there are processes.
    """

    peers: Peers
    seed: int
    tail: Literal["pad", "exact"]
    seeded_draws: bool
    virtual_ranks: int | None = None

    def share_out(self, loader: Any, stage: Stage, epoch: int, taken: int = 0) -> Any:
        """This process's part of `loader`. Every rank calls it, for the same loaders in the same order.

        Args:
            loader: the user's.
            stage: what it is read for.
            epoch: that is read first.
            taken: batches of it that this process has taken already, before a resume; a loader without a schedule does
                not leave them out.

        Raises:
            ConfigError: it cannot be shared out, or the ranks do not see the same dataset.
        """
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            shared = self._share_stream(loader, stage)
            return InUse(shared) if stage == "train" and has_state(shared) else shared
        require_same_dataset(loader.dataset, STAGE_NAMES[stage], self.peers)
        batches = self._batches(loader, stage)
        if isinstance(batches, EvalBatches):
            batches.set_epoch(epoch)
        else:
            stand(batches, epoch, taken)
        return follow(loader, batches, self.seed if self.seeded_draws else None)

    def _batches(self, loader: DataLoader[Any], stage: Stage) -> TrainBatches | EvalBatches | AsGiven:
        for sampler in (loader.batch_sampler, sampler_of(loader)):
            if shares_by_itself(sampler):
                self._check(sampler)
                if stage == "train" or type(sampler) is not DistributedSampler:
                    return AsGiven(reading_order(loader))
        return self.train_batches(loader) if stage == "train" else self._eval_batches(loader, stage)

    @property
    def share(self) -> Share:
        rank, world_size = self.peers.rank, self.peers.world_size
        return Share(rank, world_size, placement(self.ranks, world_size, rank))

    @property
    def ranks(self) -> int:
        """Virtual ranks."""
        return self.virtual_ranks or self.peers.world_size

    def train_batches(self, loader: DataLoader[Any]) -> TrainBatches:
        """Batches per virtual rank of `batch_size`, as in DDP; whole batches are dealt where a sampler makes them."""
        ranks, sampler = self.ranks, sampler_of(loader)
        if type(loader.batch_sampler) is not BatchSampler:  # custom batches, or no batching
            return self._deal(self._draw(reading_order(loader), whole=loader.batch_sampler is not None))
        batch_size, drop_last = loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
        shuffle = plain_order(sampler)
        draw = self._draw(sampler) if shuffle is None else None
        samples = _some(len(sampler if draw is None else draw))
        tail: Tail = "drop" if drop_last else self.tail
        schedule = Schedule(samples, batch_size * ranks, ranks, self.seed, bool(shuffle), tail)
        if schedule.steps_per_epoch == 0:
            raise ConfigError(
                f"drop_last=True leaves nothing of {samples} training samples: a step takes {batch_size} x {ranks}"
                f" ranks = {batch_size * ranks}; use a batch size of at most {samples // ranks}"
            )
        return TrainBatches(schedule, self.share, draw)

    def _deal(self, draw: Draw) -> TrainBatches:
        """One element of the draw per virtual rank and step; padded, so that all take part in every step."""
        schedule = Schedule(_some(len(draw)), self.ranks, self.ranks, shuffle=False)
        return TrainBatches(schedule, self.share, draw, batched=False)

    def _eval_batches(self, loader: DataLoader[Any], stage: Stage) -> EvalBatches:
        batch_sampler, sampler = loader.batch_sampler, sampler_of(loader)
        if batch_sampler is None:
            return EvalBatches(self._draw(sampler), None, False, self.share)
        # For prediction Lightning has put a sampler class of its own in the place of BatchSampler.
        if type(batch_sampler) is not BatchSampler and not (stage == "predict" and hasattr(batch_sampler, "sampler")):
            return EvalBatches(self._draw(batch_sampler, whole=True), None, False, self.share)
        # A DistributedSampler would pad: what it was made for is what happens here anyway.
        padding = type(sampler) is DistributedSampler
        samples = len(sampler.dataset if padding else sampler)  # pyright: ignore[reportArgumentType]
        elements = samples if padding or plain_order(sampler) is False else self._draw(sampler)
        drop_last = batch_sampler.drop_last and stage != "predict"  # pyright: ignore[reportAttributeAccessIssue]
        return EvalBatches(elements, batch_sampler.batch_size, drop_last, self.share)  # pyright: ignore

    def _draw(self, sampler: Any, whole: bool = False) -> Draw:
        return Draw(sampler, self.seed, self.peers.from_first, whole)

    def _check(self, sampler: Any) -> None:
        """Every rank raises where one of them has a sampler for another place."""
        theirs = self.peers.gather((sampler.num_replicas, sampler.rank))
        if theirs != [(self.peers.world_size, rank) for rank in range(self.peers.world_size)]:
            seen = ", ".join(f"num_replicas={replicas}, rank={rank}" for replicas, rank in theirs)
            raise ConfigError(
                f"the loader's {type(sampler).__name__} has, rank by rank: {seen}; the trainer runs"
                f" {self.peers.world_size} processes: leave the sampler out, exact_ddp brings its own"
            )

    def _share_stream(self, loader: Any, stage: Stage) -> Any:
        if isinstance(loader, DataLoader):
            stream = ShardedStream(loader.dataset, self.peers.rank, self.peers.world_size)
            return stream_loader(loader, stream, self.peers, together=stage == "train")
        if self.peers.world_size == 1:
            return loader
        if callable(shard := getattr(loader, "shard", None)):
            return shard(self.peers.rank, self.peers.world_size)
        raise ConfigError(
            f"{type(loader).__name__} is no torch DataLoader: each of {self.peers.world_size} processes would read all"
            " of it; give it a method shard(index, count) that returns the index-th of count disjoint parts"
        )


def _some(samples: int) -> int:
    if samples == 0:
        raise ConfigError("the training dataset is empty: there is nothing to train on")
    return samples


def reading_order(loader: DataLoader[Any]) -> Any:
    """What the loader takes its batches from, or its samples where it does not batch."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What orders the samples: it sits in the batch sampler, also where that was given ready-made."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)
