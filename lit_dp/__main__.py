"""`python -m lit_dp`: run a command; what a person can mend is printed as one line, without a traceback."""

import sys


def main() -> None:
    """Exit code 0, or 1 (the run failed), or 2 (what was typed or configured cannot work)."""
    from lit_dp.cli import LitCLI
    from lit_dp.errors import ConfigError, RunError

    try:
        LitCLI()
    except ConfigError as error:
        sys.exit(_say(error, 2))
    except RunError as error:
        sys.exit(_say(error, 1))
    finally:
        _leave_process_group()


def _say(error: Exception, code: int) -> int:
    from lightning.pytorch.utilities import rank_zero_only

    rank = getattr(rank_zero_only, "rank", 0)
    where = f"rank {rank}: " if rank else ""
    # A configuration is the same on all ranks: rank 0 speaks for them.
    if not (rank and code == 2):
        print(f"error: {where}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code


def _leave_process_group() -> None:
    """Lightning does not: without it some gloo exits abort after a successful run."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
