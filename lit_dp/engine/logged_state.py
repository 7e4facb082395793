"""What was logged and counted in the epoch so far, in the checkpoint: means and metrics of a resumed epoch are those of
the whole epoch. Lightning saves neither."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from lit_dp.engine.peers import Peers
from lit_dp.errors import ConfigError

STATE = "lit_dp.logged"
META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
META = (*META, "dataloader_idx", "metric_attribute")
State = dict[str, Any]


class LoggedState(Callback):
    """Saves, and gives back, every rank's sums behind what training logs by epoch, and the states of torchmetrics
    objects. When an epoch is over only those remain that are not logged, hence not reset.

    On another number of processes rank 0 goes on with the sum of all.
    """

    def __init__(self) -> None:
        self._restored: list[State] = []
        self._of_training: set[str] = set()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A validation that is cut off begins anew: of the metrics only those go into a checkpoint that held something
        before it."""
        self._of_training = {name for name, metric in _metrics(pl_module) if metric.update_called}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """On all ranks, as Trainer.save_checkpoint."""
        results = trainer.fit_loop.epoch_loop._results
        over = _over(trainer)
        reset = {part for r in results.values() if over and not r.is_tensor for part in r.value.modules()}
        mine = {
            "results": {key: _result_state(r) for key, r in results.items() if not over and not r.has_reset},
            "metrics": {
                name: _metric_state(metric)
                for name, metric in _metrics(pl_module)
                if metric not in reset and self._counts(trainer, name, metric)
            },
        }
        checkpoint[STATE] = Peers(trainer.global_rank, trainer.world_size).gather(mine)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._restored = checkpoint.get(STATE, [])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises ConfigError where a metric's states cannot be put together for another number of processes."""
        by_rank, self._restored = self._restored, []
        if not by_rank:
            return
        device = trainer.strategy.root_device
        others = len(by_rank) != trainer.world_size
        if not others:
            by_rank = [by_rank[trainer.global_rank]]
        for name, metric in _metrics(pl_module):
            if states := [state["metrics"][name] for state in by_rank if name in state["metrics"]]:
                together = _together(name, metric, states)  # on all ranks, which raise together
                if not (others and trainer.global_rank):
                    _restore_metric(metric, together, max(state["updates"] for state in states), device)
        results = [state["results"] for state in by_rank]
        if others and trainer.global_rank:
            results = [_emptied(of_rank) for of_rank in results]
        self._restore_results(trainer, pl_module, results, device)

    def _counts(self, trainer: Trainer, name: str, metric: Metric) -> bool:
        return metric.update_called and (not trainer.validating or name in self._of_training)

    def _restore_results(self, trainer: Trainer, module: LightningModule, by_rank: list[State], device: Any) -> None:
        results = trainer.fit_loop.epoch_loop._results
        for key in dict.fromkeys(key for state in by_rank for key in state):
            states = [state[key] for state in by_rank if key in state]
            results[key] = _result(states, trainer, module, device)
        if results:
            # Otherwise the first batch would find an epoch that begins, and reset them.
            trainer._logger_connector._first_loop_iter = True


def _over(trainer: Trainer) -> bool:
    """Whether no epoch is under way: Lightning is about to reset what was logged in the last one."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return epochs.started == epochs.processed


def _metrics(module: LightningModule) -> list[tuple[str, Metric]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


def _metric_state(metric: Metric) -> State:
    return {"updates": metric.update_count, "state": {name: _copied(v) for name, v in metric.metric_state.items()}}


def _copied(value: Any) -> Any:
    return [item.detach().cpu() for item in value] if isinstance(value, list) else value.detach().cpu().clone()


def _result_state(result: _ResultMetric) -> State:
    meta = {name: getattr(result.meta, name) for name in META}
    sync = {"should": result.meta.sync.should, "rank_zero_only": result.meta.sync.rank_zero_only}
    values = {name: _copied(getattr(result, name)) for name in result.metric_state} if result.is_tensor else {}
    # What was logged on one of the steps before is logged again with every step.
    step = _copied(result._forward_cache) if isinstance(result._forward_cache, Tensor) else None
    return {"meta": meta, "reduce": result.meta.reduce_fx.__name__, "sync": sync, "values": values, "step": step}


def _emptied(results: State) -> State:
    """For a rank whose share rank 0 takes over: the same keys, so that all ranks join the same reductions."""
    return {
        key: {**r, "values": r["values"] if r["reduce"] in ("max", "min") else _zeros(r["values"])}
        for key, r in results.items()
    }


def _zeros(values: State) -> State:
    return {name: torch.zeros_like(value) for name, value in values.items()}


def _result(states: list[State], trainer: Trainer, module: LightningModule, device: torch.device) -> _ResultMetric:
    """A logged value as Lightning would have it now; `states` are of the same key on different ranks."""
    first = states[0]
    meta = _Metadata(**first["meta"], reduce_fx=getattr(torch, first["reduce"]))
    sync = first["sync"]
    meta.sync = _Sync(_should=sync["should"], fn=trainer.strategy.reduce, rank_zero_only=sync["rank_zero_only"])
    result = _ResultMetric(meta, is_tensor=bool(first["values"]))
    result._update_count = 1
    result._forward_cache = first["step"].to(device) if first["step"] is not None else None
    if not result.is_tensor:
        result.value = module.get_submodule(meta.metric_attribute or "")
    # What is not reduced over ranks is rank 0's own.
    states = states if sync["should"] else states[:1]
    for name in first["values"]:
        together = torch.stack([state["values"][name] for state in states])
        reduced = {"max": together.amax, "min": together.amin}.get(first["reduce"], together.sum)(0)
        setattr(result, name, reduced.to(device))
    return result


def _together(name: str, metric: Metric, states: list[State]) -> State:
    """The state of a metric on all ranks together; `states` are those of the ranks, or of one."""
    merged = {}
    for entry, reduction in metric._reductions.items():
        values = [state["state"][entry] for state in states]
        if len(values) > 1 and reduction not in MERGES:
            raise ConfigError(
                f"{name} of {type(metric).__name__} holds {entry!r}, which cannot be put together for another number"
                f" of processes in the midst of an epoch: resume on {len(states)}"
            )
        merged[entry] = MERGES[reduction](values) if len(values) > 1 else values[0]
    return merged


def _restore_metric(metric: Metric, state: State, updates: int, device: torch.device) -> None:
    for entry, value in state.items():
        setattr(metric, entry, [item.to(device) for item in value] if isinstance(value, list) else value.to(device))
    metric._update_count, metric._computed = updates, None


def _joined(values: list[Any]) -> Any:
    lists = all(isinstance(value, list) for value in values)
    return [item for value in values for item in value] if lists else torch.cat([torch.as_tensor(v) for v in values])


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values)


MERGES: dict[Any, Any] = {
    dim_zero_sum: lambda values: _stacked(values).sum(0),
    dim_zero_max: lambda values: _stacked(values).amax(0),
    dim_zero_min: lambda values: _stacked(values).amin(0),
    dim_zero_cat: _joined,
}
