"""Run `python -m lit_dp ...` in forked ranks: the command line as a person types it, without a new interpreter."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

from tests.ranks import run_ranks


class Ended(NamedTuple):
    """How a command ended on one rank."""

    code: int
    out: str
    err: str


def lit_dp(*args: str | Path, ranks: int = 1, cwd: Path) -> list[Ended]:
    """Run the command on `ranks` ranks as torchrun would start them, in the folder `cwd`; how it ended, by rank."""
    return run_ranks(ranks, _command, [str(arg) for arg in args], cwd)


def _command(args: list[str], cwd: Path) -> Ended:
    from lit_dp.__main__ import main

    os.chdir(cwd)
    sys.argv = ["lit_dp", *args]
    files = [Path(cwd) / f".{name}-{os.getpid()}" for name in ("out", "err")]
    for file, stream in zip(files, (sys.__stdout__, sys.__stderr__), strict=True):
        assert stream is not None
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), stream.fileno())
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not pytest's
    code = 0
    try:
        main()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    for stream in (sys.stdout, sys.stderr):
        assert stream is not None
        stream.flush()
    out, err = (file.read_text() for file in files)
    for file in files:
        file.unlink()
    return Ended(code, out, err)
