"""What a gradient exchange remembers between steps (PowerSGD's errors), in the checkpoint."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lit_dp.collectives.hooks import powersgd_state, restore_powersgd
from lit_dp.engine.peers import Peers
from lit_dp.errors import ConfigError

STATE = "lit_dp.exchange"


class ExchangeState(Callback):
    """Saves every rank's state of the exchange, and gives each its own back.

    Lightning saves no state of communication hooks (FAULTS 32), and rank 0's alone would be wrong: what compression
    left out of a gradient differs from rank to rank.
    """

    def __init__(self) -> None:
        self._restored: list[dict[str, Any]] | None = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """On all ranks, as Trainer.save_checkpoint."""
        if (state := _state(trainer)) is not None:
            checkpoint[STATE] = Peers(trainer.global_rank, trainer.world_size).gather(powersgd_state(state))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._restored = checkpoint.get(STATE)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises ConfigError where the number of processes has changed."""
        state, restored = _state(trainer), self._restored
        if state is None or restored is None:
            return
        if len(restored) != trainer.world_size:
            raise ConfigError(
                f"the checkpoint holds what powersgd left out on {len(restored)} processes; {trainer.world_size} run:"
                f" resume on {len(restored)}, or with another all_reduce"
            )
        restore_powersgd(state, restored[trainer.global_rank], trainer.strategy.root_device)


def _state(trainer: Trainer) -> PowerSGDState | None:
    exchange = getattr(trainer.strategy, "exchange", None)
    return exchange if isinstance(exchange, PowerSGDState) else None
