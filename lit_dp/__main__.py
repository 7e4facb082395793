"""`python -m lit_dp`: run a command; what a person can mend is printed as one line, without a traceback."""

import atexit
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

LOST_PEER = re.compile(r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed", re.IGNORECASE)


def main() -> None:
    """Run the command that was typed."""

    def run() -> None:
        if sys.argv[1:2] == ["bench"]:
            from lit_dp.commands.bench import main as bench

            bench(sys.argv[2:])
            return
        from lit_dp.cli import LitCLI

        LitCLI()

    guarded(run)


def entry() -> NoReturn:
    """What the command runs: as `main`, and then the process ends without taking down, object by object, what it has
    imported. That takes seconds where ranks were forked, which a job that is preempted does not have."""
    code: object = 0
    try:
        main()
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    atexit._run_exitfuncs()  # those of loggers, and of loader workers
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def guarded(run: Callable[[], None]) -> None:
    """Call `run`. Exit code 0; 1 (the run failed); 2 (what was typed or configured cannot work); or 75 (stopped by a
    signal, and saved: to be run again). Of several ranks that fail only the first says why."""
    from lit_dp.errors import REPORT, ConfigError, RunError

    try:
        run()
    except Exception as error:
        known = isinstance(error, ConfigError | RunError)
        text = error.__dict__.get(REPORT)
        if text is None and not known and not LOST_PEER.search(str(error)):
            raise
        _say(_without_report(error) if text is None else text, error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    finally:
        _leave_process_group()


def _without_report(error: Exception) -> str:
    """The text for a failure that was not shared with other ranks: before they could talk, or with `strategy: ddp`."""
    from lightning.pytorch.utilities import rank_zero_only

    from lit_dp.errors import ConfigError, RunError

    rank = getattr(rank_zero_only, "rank", 0)
    if isinstance(error, ConfigError):  # a configuration is the same on all ranks: rank 0 speaks for them
        return f"error: {' '.join(str(error).split())}" if rank == 0 else ""
    if not isinstance(error, RunError):
        return f"error: rank {rank}: stopped, because a rank that it exchanges with has stopped"
    return f"error: rank {rank}: {' '.join(str(error).split())}"


def _say(text: str, error: Exception) -> None:
    """Print as the last of all: through the supervisor where there is one, which waits until all ranks are gone."""
    from lit_dp.engine.lifeline import tell_cause

    if not text:
        return
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun prints what is in it at its end
        from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

        ErrorHandler().record_exception(error)
    if not tell_cause(text):
        print(text, file=sys.stderr, flush=True)


def _leave_process_group() -> None:
    """Lightning does not: without it some gloo exits abort after a successful run."""
    dist = sys.modules.get("torch.distributed")  # not imported just to leave
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    entry()
