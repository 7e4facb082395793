"""Where in the program a rank is, as a person would look for it: a line of their own code, or what a library does."""

import linecache
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

LIBRARIES = ("lit_dp", "lightning", "lightning_utilities", "torch", "torchmetrics", "jsonargparse")
TELLING = ("lightning.", "lit_dp.")
NOT_TELLING = (
    "lightning.pytorch.strategies",
    *(f"lit_dp.engine.{name}" for name in ("calls", "evaluation", "peers", "rank", "strategy")),
)
ENTRY = "_call_and_handle_interrupt"
"""Lightning's function around a whole fit, validate, test or predict: whatever is further out has started it."""
FAILING = "_interrupt"
"""Lightning's function that deals with an exception out of it."""
RESULT = "lightning.pytorch.trainer.connectors.logger_connector.result"


class Place(NamedTuple):
    """Where a rank is, from within outwards, up to where a training or evaluation was started.

    Attributes:
        logged: what is reduced over ranks there, if it was logged with sync_dist=True.
        library: the innermost function of Lightning or lit_dp that tells something.
        function, line: the innermost of the user's own code.
    """

    logged: str = ""
    library: str = ""
    function: str = ""
    line: str = ""

    def __str__(self) -> str:
        return self.line or self.logged or self.library


def place(frame: FrameType | None) -> Place:
    """Where a thread is whose innermost frame is given; where it was, if an exception has ended that."""
    found, frames = Place(), _outwards(frame)
    for inner, _ in _outwards(frame):
        if inner.f_code.co_name == FAILING and isinstance(error := inner.f_locals.get("exception"), BaseException):
            frames = _raised_at(error.__traceback__)
    for frame, number in frames:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if code.co_name == ENTRY:
            break
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.11
        if not is_library(code.co_filename):
            line = linecache.getline(code.co_filename, number).strip()
            return found._replace(function=name, line=f"{Path(code.co_filename).name}:{number} `{line}`")
        if module == RESULT and not found.logged:
            found = found._replace(logged=_logged(frame))
        if not found.library and module.startswith(TELLING) and not module.startswith(NOT_TELLING):
            found = found._replace(library=f"`{name}` of {module}")
    return found


def _outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """A frame and those that called it."""
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _raised_at(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Frames that an exception came through, from where it was raised."""
    passed = []
    while traceback is not None:
        passed.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return reversed(passed)


@cache
def is_library(file: str) -> bool:
    """Whether a source file is not the user's own."""
    if file.startswith("<"):  # importlib's, dataclasses', what torch compiles
        return True
    path, standard = Path(file), Path(sysconfig.get_path("stdlib"))
    loaded = [getattr(sys.modules.get(name), "__file__", None) for name in LIBRARIES]
    if any(path.is_relative_to(Path(origin).parent) for origin in loaded if origin):
        return True
    return path.is_relative_to(standard) and not {"site-packages", "dist-packages"} & {*path.parts}


def _logged(frame: FrameType) -> str:
    meta = getattr(frame.f_locals.get("self"), "meta", None)
    return f"the reduction of {meta.name!r}, which {meta.fx} logged with sync_dist=True" if meta is not None else ""
