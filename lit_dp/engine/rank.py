"""A process among the ranks of a run: who the others are, and what all of them learn when one cannot go on."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lit_dp.engine.failures import Failures
from lit_dp.engine.loaders import last_delivered
from lit_dp.engine.peers import Peers
from lit_dp.engine.rendezvous import renew
from lit_dp.errors import ConfigError, RunError


class RankStrategy(DDPStrategy):
    """Lightning's DDP, in which a rank that fails tells the others, and a save that fails does so on all of them."""

    failures: Failures | None = None

    @property
    def alone(self) -> bool:
        """Whether this is the only process: then neither DDP nor a process group is needed."""
        return self.num_processes * self.num_nodes == 1

    @property
    def peers(self) -> Peers:
        return Peers(self.global_rank, self.world_size)

    @property
    def module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def trainer(self) -> Trainer:
        return self.module.trainer

    def join(self) -> None:
        """Let the ranks talk before Lightning needs it; all of them call it, once a launcher has started them all."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        renew()
        super().setup_distributed()

    def watch_for_failures(self) -> None:
        """From here on. All ranks call it."""
        host = self.cluster_environment.main_address if self.cluster_environment is not None else "127.0.0.1"
        self.failures = Failures(self.peers, host, self._doing)

    def teardown(self) -> None:
        if self.failures is not None:
            self.failures.leave()
        super().teardown()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Rank 0 writes; where it cannot, all ranks raise its RunError or ConfigError, and go on as they please."""
        error: ConfigError | RunError | None = None
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        except (ConfigError, RunError) as refused:
            error = refused
        if (error := self.peers.from_first(error)) is not None:
            raise error

    def on_exception(self, exception: BaseException) -> None:
        if self.failures is not None and not isinstance(exception, SystemExit | KeyboardInterrupt):
            self.failures.report(exception)

    def _doing(self) -> str:
        """What this rank is at, for the message of a failure."""
        trainer = self.trainer
        if not trainer.training:
            return str(trainer.state.stage or trainer.state.fn)
        samples = [
            str(sample)
            for loader in CombinedLoader(trainer.train_dataloader, "sequential").flattened
            for sample in last_delivered(loader)
        ]
        on = f", on samples {', '.join(samples[:8])}{' ...' if len(samples) > 8 else ''}" if samples else ""
        return f"epoch {trainer.current_epoch + 1}, step {trainer.global_step + 1:,}{on}"
