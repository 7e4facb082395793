"""`python -m lit_dp`: run a command; what a person can mend is printed as one line, without a traceback."""

import re
import sys
from collections.abc import Callable

LOST_PEER = re.compile(r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed", re.IGNORECASE)


def main() -> None:
    """Run the command that was typed."""

    def run() -> None:
        from lit_dp.cli import LitCLI

        LitCLI()

    guarded(run)


def guarded(run: Callable[[], None]) -> None:
    """Call `run`. Exit code 0, or 1 (the run failed), or 2 (what was typed or configured cannot work)."""
    from lit_dp.errors import ConfigError, RunError

    try:
        run()
    except ConfigError as error:
        sys.exit(_say(error, 2))
    except RunError as error:
        sys.exit(_say(error, 1))
    except RuntimeError as error:
        if not LOST_PEER.search(str(error)):
            raise
        sys.exit(_say(RuntimeError("stopped, because a rank that it exchanges with has stopped"), 1))
    finally:
        _leave_process_group()


def _say(error: Exception, code: int) -> int:
    from lightning.pytorch.utilities import rank_zero_only

    rank = getattr(rank_zero_only, "rank", 0)
    if code == 1 or rank == 0:  # a configuration is the same on all ranks: rank 0 speaks for them
        where = f"rank {rank}: " if code == 1 else ""
        print(f"error: {where}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code


def _leave_process_group() -> None:
    """Lightning does not: without it some gloo exits abort after a successful run."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
