"""SIGTERM, SIGUSR1 or Ctrl-C, to any ranks at any moments: all stop at one step, save once and leave within seconds."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging

from lit_dp.engine import launch
from lit_dp.engine.causes import say, told
from lit_dp.engine.checkpoints import LastCheckpoint, last_path, save
from lit_dp.engine.evaluation import scheduled
from lit_dp.engine.failures import Failures
from lit_dp.engine.lifeline import die_with_parent
from lit_dp.engine.position import Moment
from lit_dp.engine.signal_pipe import SignalPipe
from lit_dp.engine.stopping import StopAgreement, Tick
from lit_dp.errors import SAVED

SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
LAST = 1 << 40


class Preempted(SystemExit):
    """The training was asked to stop and has been saved; ends the process with exit code `SAVED`."""

    def __init__(self) -> None:
        super().__init__(SAVED)


class Preemption(Callback):
    """Listens to signals while a training runs. Nothing is exchanged between ranks until one comes.

    A stop is made before an optimizer step, or between two batches of a validation, which then begins anew when the
    training goes on. A second Ctrl-C ends this process at once. On Slurm SIGUSR1 (`sbatch --signal=USR1@60`) also
    requeues the job; SIGTERM does not, since that is what `scancel` sends.
    """

    def __init__(self) -> None:
        self._signals: SignalPipe | None = None
        self._listener: threading.Thread | None = None
        self._agreement: StopAgreement | None = None
        self._phase = 0
        self._interrupts = 0

    # --- signals ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        failures: Failures | None = getattr(trainer.strategy, "failures", None)
        if stage != "fit" or failures is None or threading.current_thread() is not threading.main_thread():
            return
        # Lightning's handler broadcasts, from within the handler, and so does every step (PL 20806, 21487).
        trainer._signal_connector.register_signal_handlers = lambda: None
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        self._agreement = StopAgreement(trainer.world_size, failures.channel.post)
        failures.listeners.append(self._agreement.receive)
        self._phase = self._interrupts = 0
        self._signals = SignalPipe(SIGNALS)
        trainer.strategy.barrier("preemption")  # nobody asks before all of them hear it
        self._listener = threading.Thread(target=self._listen, args=[self._signals], name="lit_dp signals", daemon=True)
        self._listener.start()
        _children.adopt()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()
        self._agreement = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        failures: Failures | None = getattr(trainer.strategy, "failures", None)
        if self._signals is not None and failures is not None and failures.of_another:
            self._signals.replace(signal.SIGTERM, partial(_last_words, exception))
        self._close()
        if isinstance(exception, Preempted):
            for signum in SIGNALS - {signal.SIGINT}:  # torchrun sends SIGTERM to all as soon as one has ended
                signal.signal(signum, signal.SIG_IGN)
            _children.end()

    def _close(self) -> None:
        signals, self._signals = self._signals, None
        if signals is None:
            return
        if self._listener is not None:
            signals.wake()
            self._listener.join()
        signals.close()
        _children.are_workers = False

    def _listen(self, signals: SignalPipe) -> None:
        """In a thread of its own: the main thread may be waiting in a collective, where Python runs no handler."""
        while self._signals is signals:
            for signum in signals.wait():
                self._interrupts += signum == signal.SIGINT
                if self._interrupts > 1:
                    os._exit(128 + signal.SIGINT)
                assert self._agreement is not None
                self._agreement.ask(int(signum))

    # --- where to stop ---

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._phase += 1
            self._stop_before(trainer, (self._phase,), "step")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._phase += 1

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._agreement is None or trainer.sanity_checking or not _may_stop_within(trainer):
            return
        # The last batch of every loader is followed by what ranks do together, and they have unequal numbers of them.
        last = batch_idx + 1 >= trainer.num_val_batches[dataloader_idx]  # pyright: ignore[reportIndexIssue]
        tick = (self._phase, dataloader_idx, LAST if last else batch_idx)
        self._stop_before(trainer, tick, "validation")

    def _stop_before(self, trainer: Trainer, tick: Tick, moment: Moment) -> None:
        agreement = self._agreement
        if agreement is None or not agreement.stops_before(tick):
            return
        assert agreement.asked is not None
        saved = _save(trainer, moment)
        if trainer.is_global_zero:
            name = signal.Signals(agreement.asked.content).name
            print(
                f"{name} on rank {agreement.asked.rank}: stopped after step {trainer.global_step:,}, {saved}",
                file=sys.stderr,
                flush=True,
            )
            if agreement.asked.content == signal.SIGUSR1:
                requeue()
        raise Preempted


def _last_words(error: BaseException, *_: object) -> NoReturn:
    """A handler while this rank ends because another has: srun ends all then, and does not wait for their words."""
    say(told(error) or "")
    os._exit(1)


class _Children:
    """What is forked while a training listens to signals (loader workers) does not: it goes when its parent goes."""

    are_workers = False

    def adopt(self) -> None:
        self.are_workers = True
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        if method == "forkserver":  # it inherits what is blocked, and hands it on; see WorkerStart
            resource_tracker.ensure_running()  # unblocks them
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            forkserver.ensure_running()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        # At the end of a process multiprocessing sends them SIGTERM, after which they go on for a while, and waits.
        Finalize(None, self.end, exitpriority=100)

    def after_fork(self) -> None:
        if self.are_workers:
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGINT, signal.SIGUSR1):  # those of the terminal and of Slurm reach them, too
                signal.signal(signum, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(signal.SIGKILL)

    def end(self) -> None:
        """Those that nobody needs any more, without waiting for what they read."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's takes it for a failure
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()


_children = _Children()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_children.after_fork)


def _save(trainer: Trainer, moment: Moment) -> str:
    callback = next((c for c in trainer.callbacks if isinstance(c, LastCheckpoint)), None)  # pyright: ignore
    if callback is not None:
        path = callback.save(trainer, moment)
    elif trainer.checkpoint_callbacks:
        save(trainer, path := last_path(trainer), moment)
    else:
        return "saved nothing, as checkpoints are switched off"
    return f"saved {path}; --resume auto goes on from there"


def _may_stop_within(trainer: Trainer) -> bool:
    """Not where averaged weights stand in for the trained ones, nor where gradients of a step have been accumulated,
    which no checkpoint holds, nor where loaders do not tell their last batch, or are not read one after the other."""
    loaders, loop = trainer.strategy._eval_loaders, trainer.fit_loop.epoch_loop  # pyright: ignore
    averaging = any(isinstance(c, WeightAveraging) for c in trainer.callbacks)  # pyright: ignore
    told = all(scheduled(loader) is not None for loader in loaders) and loop.val_loop._is_sequential
    return told and not averaging and not loop._should_accumulate()


def requeue() -> None:
    """Have Slurm run this job again; nothing happens without Slurm."""
    if launch.detect().launcher != "slurm":
        return
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
    if not re.fullmatch(r"[0-9_]+", job):
        return
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        words = "requeued" if done.returncode == 0 else f"could not be requeued: {done.stderr.strip()}"
        print(f"Slurm job {job} {words}", file=sys.stderr, flush=True)
