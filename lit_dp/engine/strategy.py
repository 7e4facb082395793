"""`exact_ddp`: Lightning's DDP, with one schedule for every loader, exact evaluation and draws that follow the step."""

import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_dp.collectives.hooks import GradientExchange, bucket_limits, register
from lit_dp.engine.buckets import laid_out
from lit_dp.engine.checkpoint import DurableCheckpointIO
from lit_dp.engine.evaluation import ExactEvaluation, scheduled
from lit_dp.engine.metric_states import taken_back, widen
from lit_dp.engine.nonfinite import Mode, poisoned
from lit_dp.engine.position import Position, move, next_to_read
from lit_dp.engine.randomness import seed_step
from lit_dp.engine.samplers import TrainBatches
from lit_dp.engine.sharding import Sharder
from lit_dp.engine.step_values import StepValues
from lit_dp.engine.virtual_ranks import VirtualRanks, claim, exchange_for, micro_batches_per_process
from lit_dp.errors import ConfigError

TIMEOUT = timedelta(minutes=5)


class ExactDDPStrategy(ExactEvaluation):
    """DistributedDataParallel in which every sample is used once and every draw has a cause.

    Serves a plain LightningModule and plain DataLoaders, whatever they are made of. On one process it is a plain
    single-device strategy: no DDP wrapper, no process group.

    Args:
        tail: what becomes of the samples that do not fill the last step of an epoch: `pad` repeats some, as
            DistributedSampler does; `exact` uses each once, in a short last step whose gradient is a true mean.
            A loader with drop_last=True drops them.
        seeded_draws: draws in a step follow (seed, epoch, step, rank), those in a dataset (seed, epoch, sample). False
            leaves them to the generators' history, as Lightning does.
        virtual_ranks: V, a power of two that the number of processes divides: the training has the bits of V processes,
            however many there are. A loader's batch_size is then that of a virtual rank. None: as many as processes.
        all_reduce: how gradients meet: `native` is the backend's own; any of `lit_dp.collectives.Algorithm`; `fp16`,
            `bf16` or `powersgd` compress. With virtual ranks it is one that sums along a binary tree.
        nonfinite: what becomes of a step whose loss or gradient is not finite on any rank: `stop` ends the run on all
            ranks before it, `skip` leaves it out, `ignore` does not look.
        timeout: after which a collective that not all ranks joined is an error, in seconds.
        kwargs: DDPStrategy's, and DistributedDataParallel's.
    """

    def __init__(
        self,
        tail: Literal["pad", "exact"] = "pad",
        seeded_draws: bool = True,
        virtual_ranks: int | None = None,
        all_reduce: str = "native",
        nonfinite: Mode = "stop",
        timeout: float | timedelta = TIMEOUT,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("checkpoint_io", DurableCheckpointIO())
        kwargs.setdefault("gradient_as_bucket_view", True)
        super().__init__(timeout=timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout), **kwargs)
        self._has_group = "process_group" in kwargs
        self.tail: Literal["pad", "exact"] = tail
        self.seeded_draws = seeded_draws
        self.virtual_ranks = virtual_ranks
        self.all_reduce = exchange_for(all_reduce, virtual_ranks)
        self.nonfinite: Mode = nonfinite
        self.reduced: dict[int, nn.Parameter] | None = None  # by id: whose gradients meet; None if there are no others
        self._virtual: VirtualRanks | None = None
        self._step_values: StepValues | None = None
        self._claimed = False
        self.exchange: Any = None
        self.shards_data = True  # False where the user shares loaders out (Trainer's use_distributed_sampler=False)
        self.resumed: Position | None = None  # of the checkpoint that the training goes on from
        self._sharder: Sharder | None = None

    # --- processes ---

    def setup_environment(self) -> None:
        if self.alone:
            Strategy.setup_environment(self)
            self.set_world_ranks()
        else:
            super().setup_environment()
        self.watch_for_failures()
        # As early as ranks can talk: a module may ask for the number of steps, hence for loaders, in its own `setup`.
        seed = self.peers.from_first(int(os.environ.get("PL_GLOBAL_SEED", "0")))
        self._sharder = Sharder(self.peers, seed, self.tail, self.seeded_draws, self.virtual_ranks)
        k = self._micro_batches
        if self.virtual_ranks is not None and not self._claimed:  # once for a trainer, which may fit, then test
            claim(self.trainer, k)
            self._claimed = True

    def setup(self, trainer: Trainer) -> None:
        if self.virtual_ranks is not None and trainer.state.fn == TrainerFn.FITTING:
            self._virtual = VirtualRanks(self._micro_batches, self.peers, self.module, self._layer_sync is not None)
            self._step_values = StepValues(trainer, self.peers)
        Strategy.setup(self, trainer) if self.alone else super().setup(trainer)

    @property
    def _micro_batches(self) -> int:
        """k, of a process in a step; 1 where there are no virtual ranks."""
        return micro_batches_per_process(self.virtual_ranks, self.world_size) if self.virtual_ranks is not None else 1

    def _setup_model(self, model: Any) -> Any:
        if not self.alone or self._virtual is not None:
            self.reduced = {id(p): p for p in model.parameters() if p.requires_grad}
        if self.alone:
            return model
        if self._virtual is not None:
            self._ddp_kwargs["forward_sync_buffers"] = False  # they follow virtual rank 0
        if self.root_device.type == "cpu" and self.calls is not None and not self._has_group:
            self._ddp_kwargs["process_group"] = self.calls.gradients
        self._ddp_kwargs.update(bucket_limits(self.all_reduce, model, self.root_device))
        with laid_out(self.resumed.buckets if self.resumed is not None else []):
            return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only, and says nothing otherwise (FAULTS 32).
        if self._ddp_comm_hook is not None:
            super()._register_ddp_hooks()
            return
        fold = self._virtual.stack.fold_bucket if self._virtual is not None else None
        self.exchange = register(self.model, self.all_reduce, self.root_device, fold, self._timeout)  # pyright: ignore

    def teardown(self) -> None:
        if isinstance(self.exchange, GradientExchange):
            self.exchange.close()
        super().teardown()

    # --- data ---

    @property
    def sharder(self) -> Sharder:
        """Shares loaders out, with what is equal on all ranks."""
        assert self._sharder is not None, "setup_environment comes first"
        return self._sharder

    @property
    def train_batches(self) -> TrainBatches | None:
        """This rank's training batches where one loader with a schedule feeds the training, otherwise None."""
        batches = getattr(self.trainer.train_dataloader, "sampler", None)
        return batches if isinstance(batches, TrainBatches) else None

    def process_dataloader(self, dataloader: object) -> object:
        if not self.shards_data:
            return dataloader
        stage = "train" if self.trainer.training else "predict" if self.trainer.predicting else "evaluate"
        epoch, taken = next_to_read(self.trainer) if stage == "train" else (self.trainer.current_epoch, 0)
        loader = self.sharder.share_out(dataloader, stage, epoch, taken)
        if self.resumed is not None and taken:
            move(self.trainer, self.resumed, loader)
        return loader

    # --- training ---

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        self.seed_draws("transfer", self.batches_begun)
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_start(self) -> None:
        loaders = CombinedLoader(self.trainer.train_dataloader, "sequential").flattened
        unequal = [b for loader in loaders if isinstance(b := scheduled(loader), TrainBatches) and not b.equal]
        if unequal and len(loaders) > 1:
            raise ConfigError(
                f"tail='exact' weighs unequal shares of one loader, and {len(loaders)} loaders feed this training: use"
                " tail='pad', or drop_last=True"
            )
        if self._virtual is not None:
            shared_out = all(isinstance(scheduled(loader), TrainBatches) for loader in loaders)
            self._virtual.refuse_at_start(shared_out, self.optimizers)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        index = self.batches_begun - 1
        self.seed_draws("step", index)
        if self._virtual is not None:
            self._virtual.begin(index)
        with nullcontext() if self._step_values is None else self._step_values.collected():
            output = self._training_step(index, *args, **kwargs)
        widen(self.trainer.fit_loop.epoch_loop._results)
        return output

    def _training_step(self, index: int, *args: Any, **kwargs: Any) -> Any:
        batches = self.train_batches
        if batches is None or batches.equal or batches.counts(index)[self.global_rank]:
            return super().training_step(*args, **kwargs)
        with taken_back(self.module, self.trainer._results):  # a borrowed sample: it takes part with weight 0
            return super().training_step(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._step_values is not None and self._step_values.collecting:  # logged with on_step and sync_dist
            return tensor
        return super().reduce(tensor, group, reduce_op)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        share = self._share_of_window()
        if self._virtual is not None and self._ddp_kwargs.get("find_unused_parameters"):
            self._virtual.before_backward(self.batches_begun - 1, closure_loss)
        weighed = closure_loss if share == 1.0 else closure_loss * share
        weighed = weighed if self.nonfinite == "ignore" else poisoned(weighed)
        loss = super().backward(weighed, optimizer, *args, **kwargs)
        if self._virtual is not None and self._step_values is not None:
            self._step_values.note(last=self._virtual.end(self.batches_begun - 1))
        return loss

    def seed_draws(self, purpose: str, index: int) -> None:
        """Draws until the next call are those of this micro-batch on this rank, whatever was drawn before."""
        if self.seeded_draws:
            trainer = self.trainer
            purpose = purpose if trainer.training else f"{trainer.state.stage} {purpose}"
            # Evaluation too takes the batches of virtual ranks in turn.
            k = self._micro_batches
            index, rank = index // k, self.global_rank * k + index % k
            seed_step(self.sharder.seed, trainer.current_epoch, index, rank, purpose, self.root_device)

    def _share_of_window(self) -> float:
        """What this micro-batch counts in the mean over its accumulation window, relative to a full window.

        Lightning divides by `accumulate_grad_batches` and DDP by the number of ranks: right if all micro-batches are
        equally large and the window is full (PL 19987, FAULTS 9). The factor is 1 then; otherwise it makes the gradient
        the mean over the samples of all ranks in the window.
        """
        trainer, batches = self.trainer, self.train_batches
        if batches is None:
            return 1.0
        accumulate, index = trainer.accumulate_grad_batches, trainer.fit_loop.batch_idx
        if accumulate == 1 and batches.equal:
            return 1.0
        start = index // accumulate * accumulate
        window = range(start, min(start + accumulate, int(trainer.num_training_batches)))
        samples = sum(sum(batches.counts(i)) for i in window)
        own = batches.counts(index)[self.global_rank]
        return accumulate * self.world_size * own / samples


StrategyRegistry.register("exact_ddp", ExactDDPStrategy, description="DDP with one schedule and exact evaluation")
