"""`python -m lit_dp`: run a command; what a person can mend is printed as one line, without a traceback."""

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

SECONDS_AFTER_RANK_0 = 2
"""What a rank waits before it says that its configuration is wrong, which rank 0 says too."""


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
    from lit_dp.engine.causes import say, told
    from lit_dp.errors import ConfigError

    try:
        run()
    except Exception as error:
        text = told(error)
        say(_without_report(error) if text is None else text)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    finally:
        _leave_process_group()


def _without_report(error: Exception) -> str:
    """The text for a failure that was not shared with other ranks: before they could talk, or with `strategy: ddp`."""
    import socket

    from lightning.pytorch.utilities import rank_zero_only

    from lit_dp.engine.causes import LOST_PEER, brief, cause
    from lit_dp.errors import ConfigError

    rank = getattr(rank_zero_only, "rank", 0)
    if isinstance(error, ConfigError):  # most often the same on all ranks: when rank 0 has ended, launchers end others
        time.sleep(SECONDS_AFTER_RANK_0 * (rank > 0 and "LIT_DP_SUPERVISED" not in os.environ))
        return f"error: {brief(error)}"
    if LOST_PEER.search(str(error)):
        return f"error: rank {rank}: stopped, because a rank that it exchanges with has stopped"
    return cause(error, f"rank {rank} on {socket.gethostname()}")


def _leave_process_group() -> None:
    """Lightning does not: without it some gloo exits abort after a successful run."""
    dist = sys.modules.get("torch.distributed")  # not imported just to leave
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    entry()
