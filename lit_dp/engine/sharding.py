"""Which part of a user's loader this process reads: one rule for each kind of loader."""

from typing import Any, Literal, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lit_dp.engine.agreement import require_same_dataset
from lit_dp.engine.loaders import follow
from lit_dp.engine.peers import Peers
from lit_dp.engine.samplers import Draw, EvalBatches, Share, TrainBatches, plain_order
from lit_dp.engine.schedule import Schedule, Tail, placement
from lit_dp.engine.streams import ShardedStream, stream_loader
from lit_dp.errors import ConfigError

Stage = Literal["train", "evaluate", "predict"]


class Sharder(NamedTuple):
    """Shares loaders out between processes.

    Attributes:
        peers: all processes; loaders are shared out on all of them together.
        seed: of the shuffle and of custom samplers' draws, equal on all ranks.
        tail: what becomes of samples that do not fill the last training step, where the loader keeps them.
        seeded_draws: whether draws in datasets follow (seed, epoch, sample).
    """

    peers: Peers
    seed: int
    tail: Literal["pad", "exact"]
    seeded_draws: bool

    def share_out(self, loader: Any, stage: Stage, epoch: int) -> Any:
        """This process's part of `loader`. Every rank calls it, for the same loaders in the same order.

        Raises:
            ConfigError: it cannot be shared out, or the ranks do not see the same dataset.
        """
        if not isinstance(loader, DataLoader):
            return self._share_iterable(loader)
        if isinstance(loader.dataset, IterableDataset):
            stream = ShardedStream(loader.dataset, self.peers.rank, self.peers.world_size)
            return stream_loader(loader, stream, self.peers, together=stage == "train")
        sampler = _sampler(loader)
        if isinstance(sampler, DistributedSampler):
            return self._checked(loader, sampler)
        require_same_dataset(
            loader.dataset, {"train": "training", "evaluate": "evaluation"}.get(stage, stage), self.peers
        )
        batches = self._train_batches(loader) if stage == "train" else self._eval_batches(loader, stage)
        batches.set_epoch(epoch)
        return follow(loader, batches, self.seed if self.seeded_draws else None)

    @property
    def share(self) -> Share:
        rank, world_size = self.peers.rank, self.peers.world_size
        return Share(rank, world_size, placement(world_size, world_size, rank))

    def _train_batches(self, loader: DataLoader[Any]) -> TrainBatches:
        """Batches per process of `batch_size`, as in DDP; whole batches are dealt where a batch sampler makes them."""
        world_size = self.peers.world_size
        world_size, sampler = self.peers.world_size, _sampler(loader)
        if type(loader.batch_sampler) is not BatchSampler:  # custom batches, or no batching: deal them out whole
            draw = self._draw(loader.batch_sampler or sampler)
            schedule = Schedule(max(1, len(draw)), world_size, world_size, shuffle=False)
            return TrainBatches(schedule, self.share, draw, batched=False)
        batch_size, drop_last = loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
        shuffle = plain_order(sampler)
        draw = self._draw(sampler) if shuffle is None else None
        if (samples := len(sampler)) == 0:
            raise ConfigError("the training dataset is empty: there is nothing to train on")
        tail: Tail = "drop" if drop_last else self.tail
        schedule = Schedule(samples, batch_size * world_size, world_size, self.seed, bool(shuffle), tail)
        if schedule.steps_per_epoch == 0:
            raise ConfigError(
                f"drop_last=True leaves nothing of {samples} training samples: a step takes {batch_size} x {world_size}"
                f" processes = {batch_size * world_size}; use a batch size of at most {samples // world_size}"
            )
        return TrainBatches(schedule, self.share, draw)

    def _eval_batches(self, loader: DataLoader[Any], stage: Stage) -> EvalBatches:
        batch_sampler, sampler = loader.batch_sampler, _sampler(loader)
        if batch_sampler is None:
            return EvalBatches(self._draw(sampler), None, False, self.share)
        whole = type(batch_sampler) is not BatchSampler and not (
            stage == "predict" and hasattr(batch_sampler, "sampler")
        )
        if whole:
            return EvalBatches(self._draw(batch_sampler), None, False, self.share)
        elements = len(sampler) if plain_order(sampler) is False else self._draw(sampler)
        drop_last = batch_sampler.drop_last and stage != "predict"  # pyright: ignore[reportAttributeAccessIssue]
        return EvalBatches(elements, batch_sampler.batch_size, drop_last, self.share)  # pyright: ignore

    def _draw(self, sampler: Any) -> Draw:
        return Draw(sampler, self.seed, self.peers.from_first)

    def _checked(self, loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> DataLoader[Any]:
        """A loader that the user has shared out is left alone, if its numbers are ours."""
        theirs, ours = (sampler.num_replicas, sampler.rank), (self.peers.world_size, self.peers.rank)
        if theirs != ours:
            raise ConfigError(
                f"the loader's DistributedSampler has num_replicas={theirs[0]}, rank={theirs[1]}; the trainer runs"
                f" {ours[0]} processes and this is rank {ours[1]}: leave the sampler out, exact_ddp brings its own"
            )
        return loader

    def _share_iterable(self, loader: Any) -> Any:
        if self.peers.world_size == 1:
            return loader
        if callable(shard := getattr(loader, "shard", None)):
            return shard(self.peers.rank, self.peers.world_size)
        raise ConfigError(
            f"{type(loader).__name__} is no torch DataLoader: each of {self.peers.world_size} processes would read all of"
            " it; give it a method shard(index, count) that returns the index-th of count disjoint parts"
        )


def _sampler(loader: DataLoader[Any]) -> Any:
    """What orders the samples: it sits in the batch sampler, also where that was given ready-made."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)
