"""`exact_ddp`: Lightning's DDP, with one schedule for every loader, exact evaluation and draws that follow the step."""

import os
from datetime import timedelta
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.optim import Optimizer

from lit_dp.engine.evaluation import level_buffers, level_lists, taken_back, unlevel_lists
from lit_dp.engine.peers import Peers
from lit_dp.engine.randomness import seed_step
from lit_dp.engine.samplers import EvalBatches, TrainBatches
from lit_dp.engine.sharding import Sharder
from lit_dp.errors import ConfigError

TIMEOUT = timedelta(minutes=5)


class ExactDDPStrategy(DDPStrategy):
    """DistributedDataParallel in which every sample is used once and every draw has a cause.

    Serves a plain LightningModule and plain DataLoaders, whatever they are made of. On one process it is a plain
    single-device strategy: no DDP wrapper, no process group.

    Args:
        tail: what becomes of the samples that do not fill the last step of an epoch: `pad` repeats some, as
            DistributedSampler does; `exact` uses each once, in a short last step whose gradient is a true mean.
            A loader with drop_last=True drops them.
        seeded_draws: draws in a step follow (seed, epoch, step, rank), those in a dataset (seed, epoch, sample). False
            leaves them to the generators' history, as Lightning does.
        timeout: after which a collective that not all ranks joined is an error, in seconds.
        kwargs: DDPStrategy's, and DistributedDataParallel's.
    """

    def __init__(
        self,
        tail: Literal["pad", "exact"] = "pad",
        seeded_draws: bool = True,
        timeout: float | timedelta = TIMEOUT,
        **kwargs: Any,
    ) -> None:
        super().__init__(timeout=timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout), **kwargs)
        self.tail: Literal["pad", "exact"] = tail
        self.seeded_draws = seeded_draws
        self.shards_data = True  # False where the user shares loaders out (Trainer's use_distributed_sampler=False)
        self._sharder: Sharder | None = None
        self._eval_loaders: list[Any] = []

    # --- processes ---

    @property
    def alone(self) -> bool:
        """Whether this is the only process: then neither DDP nor a process group is needed."""
        return self.num_processes * self.num_nodes == 1

    def setup_environment(self) -> None:
        if self.alone:
            Strategy.setup_environment(self)
            self.set_world_ranks()
        else:
            super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        Strategy.setup(self, trainer) if self.alone else super().setup(trainer)
        peers = Peers(self.global_rank, self.world_size)
        seed = peers.from_first(int(os.environ.get("PL_GLOBAL_SEED", "0")))
        self._sharder = Sharder(peers, seed, self.tail, self.seeded_draws)

    def _setup_model(self, model: Any) -> Any:
        return model if self.alone else super()._setup_model(model)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._between_batches:  # a value logged on_step: its rank's own, since not all ranks have this batch
            return tensor
        # Lightning averages the integer number of samples over ranks, which floors it (PL 21859, FAULTS 2).
        if isinstance(tensor, Tensor) and reduce_op in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.float()
        return super().reduce(tensor, group, reduce_op)

    # --- data ---

    @property
    def sharder(self) -> Sharder:
        """Shares loaders out, with what is equal on all ranks."""
        assert self._sharder is not None, "setup comes first"
        return self._sharder

    @property
    def trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def train_batches(self) -> TrainBatches | None:
        """This rank's training batches where one loader with a schedule feeds the training, otherwise None."""
        batches = getattr(self.trainer.train_dataloader, "sampler", None)
        return batches if isinstance(batches, TrainBatches) else None

    def process_dataloader(self, dataloader: object) -> object:
        if not self.shards_data:
            return dataloader
        stage = "train" if self.trainer.training else "predict" if self.trainer.predicting else "evaluate"
        return self.sharder.share_out(dataloader, stage, self.trainer.current_epoch)

    # --- training ---

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        self._seed("transfer", self._batches_begun)
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_start(self) -> None:
        loaders = CombinedLoader(self.trainer.train_dataloader, "sequential").flattened
        unequal = [b for loader in loaders if isinstance(b := _batches(loader), TrainBatches) and not b.equal]
        if unequal and len(loaders) > 1:
            raise ConfigError(
                f"tail='exact' weighs unequal shares of one loader, and {len(loaders)} loaders feed this training: use"
                " tail='pad', or drop_last=True"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._seed("step", self._batches_begun - 1)
        batches, module = self.train_batches, self.lightning_module
        if batches is None or batches.equal or batches.counts(self.trainer.fit_loop.batch_idx)[self.global_rank]:
            return super().training_step(*args, **kwargs)
        assert module is not None
        with taken_back(module, self.trainer._results):  # a borrowed sample: it takes part with weight 0
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        share = self._share_of_window()
        return super().backward(closure_loss if share == 1.0 else closure_loss * share, optimizer, *args, **kwargs)

    @property
    def _batches_begun(self) -> int:
        """Batches of the running epoch, or evaluation, whose step has begun."""
        loop = self.trainer.fit_loop.epoch_loop if self.trainer.training else self.trainer._active_loop
        return loop.batch_progress.current.ready if loop is not None else 0  # pyright: ignore

    def _seed(self, purpose: str, index: int) -> None:
        """Draws until the next call are those of this micro-batch on this rank, whatever was drawn before."""
        if self.seeded_draws:
            trainer = self.trainer
            purpose = purpose if trainer.training else f"{trainer.state.stage} {purpose}"
            seed_step(self.sharder.seed, trainer.current_epoch, index, self.global_rank, purpose, self.root_device)

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
        start = index // accumulate * accumulate
        window = range(start, min(start + accumulate, int(trainer.num_training_batches)))
        samples = sum(sum(batches.counts(i)) for i in window)
        own = batches.counts(index)[self.global_rank]
        return accumulate * self.world_size * own / samples

    # --- evaluation ---

    def on_validation_start(self) -> None:
        self._on_evaluation_start(self.trainer.val_dataloaders)

    def on_test_start(self) -> None:
        self._on_evaluation_start(self.trainer.test_dataloaders)

    def on_validation_end(self) -> None:
        self._on_evaluation_end()

    def on_test_end(self) -> None:
        self._on_evaluation_end()

    def _on_evaluation_start(self, loaders: Any) -> None:
        self._eval_loaders = CombinedLoader(loaders, "sequential").flattened
        if not self.alone and self.lightning_module is not None:
            level_buffers(self.lightning_module)
            level_lists(self.lightning_module, self.sharder.peers.gather)

    def _on_evaluation_end(self) -> None:
        self._eval_loaders = []
        if not self.alone and self.lightning_module is not None:
            unlevel_lists(self.lightning_module)

    @property
    def _between_batches(self) -> bool:
        """Whether an evaluation goes on, in which ranks have unequal numbers of batches: no exchange then."""
        return bool(self._eval_loaders) and self.trainer._logger_connector._first_loop_iter is not None

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        batches = [_batches(loader) for loader in self._eval_loaders]
        if self._between_batches and not all(b is not None and b.equal for b in batches):
            raise ConfigError(
                "all_gather between the batches of an evaluation: ranks have unequal numbers of batches, as no sample"
                " is evaluated twice; gather in on_validation_epoch_end, or update a torchmetrics object"
            )
        return super().all_gather(tensor, group, sync_grads)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", *args, **kwargs)

    def _evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Call the module itself: DDP's forward would exchange buffers, and ranks have unequal numbers of batches."""
        self._seed("step", self._batches_begun - 1)
        module = self.lightning_module
        assert module is not None
        dataloader_idx = args[2] if len(args) > 2 else 0
        batches = _batches(self._eval_loaders[dataloader_idx])
        if isinstance(batches, EvalBatches) and batches.borrowed:
            with taken_back(module, self.trainer._results):
                return getattr(module, step)(*args, **kwargs)
        return getattr(module, step)(*args, **kwargs)


def _batches(loader: Any) -> TrainBatches | EvalBatches | None:
    """This rank's batches where a loader has a schedule, otherwise None."""
    batches = getattr(loader, "sampler", None)
    return batches if isinstance(batches, TrainBatches | EvalBatches) else None


StrategyRegistry.register("exact_ddp", ExactDDPStrategy, description="DDP with one schedule and exact evaluation")
