"""Exact evaluation (law L5): no sample twice, so unequal numbers of batches, so no exchange until all are done."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn

from lit_dp.engine.metric_states import level_lists, taken_back, unlevel_lists, widen
from lit_dp.engine.rank import RankStrategy
from lit_dp.engine.samplers import EvalBatches, TrainBatches
from lit_dp.errors import ConfigError


class ExactEvaluation(RankStrategy):
    """Lightning's DDP, whose metrics of validation and test are those of one process.

    Ranks have unequal numbers of batches. So the module is called past DDP's forward, which would exchange buffers;
    what is logged on a step is its rank's own; and a rank without samples borrows one and takes back what comes of it.
    """

    _eval_loaders: list[Any] = []  # noqa: RUF012 - replaced, never changed; of the evaluation that goes on
    _levelled = True  # whether ranks hold equal buffers in it

    @property
    def batches_begun(self) -> int:
        """Batches of the running epoch, or evaluation, whose step has begun."""
        trainer = self.trainer
        loop = trainer.fit_loop.epoch_loop if trainer.training else trainer._active_loop
        return loop.batch_progress.current.ready if loop is not None else 0  # pyright: ignore

    def seed_draws(self, purpose: str, index: int) -> None:
        """Called before a batch is used, with its index in the epoch or evaluation."""

    def on_validation_start(self) -> None:
        self._start(self.trainer.val_dataloaders)

    def on_test_start(self) -> None:
        self._start(self.trainer.test_dataloaders)

    def on_validation_end(self) -> None:
        self._end()

    def on_test_end(self) -> None:
        self._end()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._step("test_step", *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._between_batches:  # a value logged on_step: its rank's own, since not all ranks have this batch
            return tensor
        mean = reduce_op in ("mean", "avg")
        # Lightning averages the integer number of samples over ranks, which floors it (PL 21859, FAULTS 2). In float64
        # the order of ranks leaves no trace, and all have one dtype, whether their sums have been widened or not.
        if (
            isinstance(tensor, Tensor)
            and not self.alone
            and (mean or (reduce_op == "sum" and tensor.is_floating_point()))
        ):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        batches = [scheduled(loader) for loader in self._eval_loaders]
        if self._between_batches and not all(b is not None and b.equal for b in batches):
            raise ConfigError(
                "all_gather between the batches of an evaluation: ranks have unequal numbers of batches, as no sample"
                " is evaluated twice; gather in on_validation_epoch_end, or update a torchmetrics object"
            )
        return super().all_gather(tensor, group, sync_grads)

    @property
    def _between_batches(self) -> bool:
        return bool(self._eval_loaders) and self.trainer._logger_connector._first_loop_iter is not None

    def _start(self, loaders: Any) -> None:
        self._eval_loaders = CombinedLoader(loaders, "sequential").flattened
        self._levelled = self.alone
        if not self.alone:
            self._require_sequential()
            level_lists(self.module, self.peers.gather)

    def _end(self) -> None:
        self._eval_loaders = []
        if not self.alone:
            unlevel_lists(self.module)

    def _step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if not self._levelled:  # not before: callbacks may just have put averaged weights and buffers into the module
            level_buffers(self.module)
            self._levelled = True
        self.seed_draws("step", self.batches_begun - 1)
        batches = scheduled(self._eval_loaders[args[2] if len(args) > 2 else 0])
        if isinstance(batches, EvalBatches) and batches.borrowed:
            with taken_back(self.module, self.trainer._results):
                output = getattr(self.module, name)(*args, **kwargs)
        else:
            output = getattr(self.module, name)(*args, **kwargs)
        widen(self.trainer._results)
        if self.trainer._evaluation_loop.batch_progress.is_last_batch and not self.alone:
            self._require_same_keys(name)
        return output

    def _require_same_keys(self, step: str) -> None:
        """Every rank comes by after its last batch. Other keys, or in another order, would wait for one another."""
        results = (self.trainer._results or {}).items()
        keys = [key.removeprefix(f"{result.meta.fx}.") for key, result in results if _is_reduced(result)]
        self.peers.require_equal(
            f"what {step} logged for all ranks (sync_dist=True, or torchmetrics objects)",
            keys,
            "log the same keys in the same order on every rank, whatever is in a batch; a torchmetrics object that is"
            " updated only with some samples counts only these",
        )

    def _require_sequential(self) -> None:
        """Of a batch made of several loaders' no part can be taken back."""
        loop, batches = self.trainer._evaluation_loop, [scheduled(loader) for loader in self._eval_loaders]
        lacking = [b.total for b in batches if isinstance(b, EvalBatches) and 0 < b.total < self.world_size]
        mode = loop._combined_loader._mode if loop._combined_loader is not None else "sequential"
        if lacking and mode != "sequential":
            raise ConfigError(
                f"a CombinedLoader of mode {mode!r} has a part of {lacking[0]} samples for {self.world_size} processes:"
                " use fewer processes, or mode 'sequential'"
            )


def scheduled(loader: Any) -> TrainBatches | EvalBatches | None:
    """This rank's batches where a loader has a schedule, otherwise None."""
    batches = getattr(loader, "sampler", None)
    return batches if isinstance(batches, TrainBatches | EvalBatches) else None


def level_buffers(module: nn.Module) -> None:
    """Give every rank rank 0's buffers; all ranks call it.

    DDP does so before a forward pass in training only. BatchNorm's running statistics differ between ranks until then,
    and metrics would depend on which rank a sample is evaluated on (FAULTS 21).
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():  # one message a dtype: BatchNorm alone has three buffers a layer
        together = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        dist.broadcast(together, src=0)
        for buffer, piece in zip(buffers, together.split([b.numel() for b in buffers]), strict=True):
            buffer.detach().copy_(piece.view_as(buffer))


def _is_reduced(result: Any) -> bool:
    """Whether a logged result (Lightning's _ResultMetric) is computed by all ranks together."""
    return not result.is_tensor or (result.meta.sync.should and not result.meta.sync.rank_zero_only)
