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
    """Saves, and gives back, every rank's sums behind what training logs by epoch, the states of torchmetrics objects,
    and the values that callbacks and schedulers monitor.

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
        mine = {
            "results": {key: _result_state(r) for key, r in results.items() if not r.has_reset},
            "metrics": {n: _metric_state(m) for n, m in _metrics(pl_module) if self._counts(trainer, n, m)},
            "monitored": {name: float(value) for name, value in trainer.callback_metrics.items()},
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
        trainer.callback_metrics.update({k: torch.tensor(v, device=device) for k, v in by_rank[0]["monitored"].items()})
        if len(by_rank) == trainer.world_size:
            by_rank = [by_rank[trainer.global_rank]]
        elif trainer.global_rank:
            by_rank = [_emptied(state) for state in by_rank]
        for name, metric in _metrics(pl_module):
            if states := [state["metrics"][name] for state in by_rank if name in state["metrics"]]:
                _restore_metric(name, metric, states, device)
        self._restore_results(trainer, pl_module, [state["results"] for state in by_rank], device)

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
    return {"meta": meta, "reduce": result.meta.reduce_fx.__name__, "sync": sync, "values": values}


def _emptied(state: State) -> State:
    """For a rank whose share rank 0 takes over: the same keys, so that all ranks join the same reductions."""
    results = {
        key: {**r, "values": {name: v if r["reduce"] in ("max", "min") else v * 0 for name, v in r["values"].items()}}
        for key, r in state["results"].items()
    }
    return {**state, "results": results, "metrics": {}}


def _result(states: list[State], trainer: Trainer, module: LightningModule, device: torch.device) -> _ResultMetric:
    """A logged value as Lightning would have it now; `states` are of the same key on different ranks."""
    first = states[0]
    meta = _Metadata(**first["meta"], reduce_fx=getattr(torch, first["reduce"]))
    sync = first["sync"]
    meta.sync = _Sync(_should=sync["should"], fn=trainer.strategy.reduce, rank_zero_only=sync["rank_zero_only"])
    result = _ResultMetric(meta, is_tensor=bool(first["values"]))
    result._update_count = 1
    if not result.is_tensor:
        result.value = module.get_submodule(meta.metric_attribute or "")
    # What is not reduced over ranks is rank 0's own.
    states = states if sync["should"] else states[:1]
    for name in first["values"]:
        together = torch.stack([state["values"][name] for state in states])
        reduced = {"max": together.amax, "min": together.amin}.get(first["reduce"], together.sum)(0)
        setattr(result, name, reduced.to(device))
    return result


def _restore_metric(name: str, metric: Metric, states: list[State], device: torch.device) -> None:
    for entry, reduction in metric._reductions.items():
        values = [state["state"][entry] for state in states]
        if len(values) == 1:
            merged = values[0]
        elif reduction in MERGES:
            merged = MERGES[reduction](values)
        else:
            raise ConfigError(
                f"{name} of {type(metric).__name__} holds {entry!r}, which cannot be put together for another number"
                f" of processes in the midst of an epoch: resume on {len(states)}"
            )
        on_device = [item.to(device) for item in merged] if isinstance(merged, list) else merged.to(device)
        setattr(metric, entry, on_device)
    metric._update_count, metric._computed = max(state["updates"] for state in states), None


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
