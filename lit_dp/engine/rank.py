"""A process among the ranks of a run: who the others are, and what all of them learn when one cannot go on."""

import socket
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dp.engine.calls import JointStrategy
from lit_dp.engine.causes import Report, cause
from lit_dp.engine.doing import doing
from lit_dp.engine.failures import Failures
from lit_dp.engine.peers import Peers
from lit_dp.engine.rendezvous import renew
from lit_dp.errors import REPORT, ConfigError, RunError


class FirstToHear(Callback):
    """Tells the other ranks of a failure before any other callback deals with it, which may take its time, or need
    them: a checkpoint that is saved on exceptions does."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        trainer.strategy.on_exception(exception)


class RankStrategy(JointStrategy):
    """Lightning's DDP, in which a rank that fails tells the others, and a save that fails does so on all of them."""

    failures: Failures | None = None
    _fails_unheard = False

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

    def setup_distributed(self) -> None:
        renew()
        super().setup_distributed()

    def watch_for_failures(self) -> None:
        """From here on. All ranks call it."""
        host = self.cluster_environment.main_address if self.cluster_environment is not None else "127.0.0.1"
        self.failures = Failures(self.peers, host, lambda: doing(self.trainer))

    def teardown(self) -> None:
        self._fails_unheard = False
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
        if isinstance(exception, SystemExit | KeyboardInterrupt):
            return
        if self.failures is not None and not self.failures.left:
            self.failures.report(exception)
        elif not self._fails_unheard:
            self._fails_unheard = True
            exception.__dict__[REPORT] = Report(cause(exception, f"rank {self.global_rank} on {socket.gethostname()}"))

    def meet(self, kind: str, group: Any = None) -> None:
        if self._fails_unheard:  # a callback that saves on exceptions, for one, would wait for the others
            raise RunError(f"no {kind}: this rank fails, and other ranks do not know")
        super().meet(kind, group)
