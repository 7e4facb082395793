"""What is printed of a failure, as the last of all: a traceback, then one line that says who, where, when and what."""

import json
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lit_dp.engine.lifeline import tell_cause
from lit_dp.errors import REPORT, ConfigError, RunError

LIMIT = getattr(select, "PIPE_BUF", 4096) - 16
"""Bytes that reach the supervisor in one piece."""
LINE = 1500
LOST_PEER = re.compile(r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed", re.IGNORECASE)
NOT_ALL_JOINED = re.compile(r"timed? ?out|op\.preamble\.length", re.IGNORECASE)
"""What gloo says when ranks are gone, and when they do not come."""
ORIGIN = re.compile(r"\s*Original Traceback \(most recent call last\):\n(?:[ \t].*\n)*")
"""The traceback within a message that a loader worker's exception has; the innermost exception comes after it."""


def brief(error: BaseException, instead: str = "") -> str:
    """An exception in one line, or what to say `instead` of its words."""
    notes = "\n".join(getattr(error, "__notes__", []))
    words = shortened(" ".join((instead or f"{ORIGIN.sub(' ', str(error))}\n{notes}").split()), LINE)
    if instead or isinstance(error, ConfigError | RunError):
        return words
    return f"{type(error).__name__}: {words}".rstrip(": ")


def cause(error: BaseException, where: str, samples: str = "", instead: str = "") -> str:
    """What to print of an exception. What a person can act on comes without a traceback, and often from all ranks:
    whichever says it had nothing to do with it.

    Args:
        error: the exception.
        where: which rank this is, and what it was doing.
        samples: with which samples.
        instead: to say in place of the exception's words.
    """
    if isinstance(error, ConfigError | RunError):
        return f"error: {brief(error, instead)} ({where})"
    return f"{''.join(traceback.format_exception(error))}error: {where}{samples}: {brief(error, instead)}"


def shortened(text: str, limit: int) -> str:
    """At most `limit` bytes, of which most are the end: what failed is said there."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return text
    gap = "\n...\n" if "\n" in text else " ... "
    head = (limit - len(gap)) // 5
    tail = limit - len(gap) - head
    return data[:head].decode(errors="ignore") + gap + data[-tail:].decode(errors="ignore")


def say(text: str) -> None:
    """Print it as the last of all, through the launcher where it can: it waits until all ranks are gone."""
    if not text:
        return
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun prints what is in it
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        with suppress(OSError), open(file, "w") as opened:
            json.dump({"message": message}, opened)
    if not tell_cause(shortened(text, LIMIT)):
        print(text, file=sys.stderr, flush=True)


class Report:
    """What is to be said of an exception: `text`, or what `after` returns, which may wait until it is time."""

    def __init__(self, text: str = "", after: Callable[[], str] | None = None) -> None:
        self.text, self.after = text, after

    def __call__(self) -> str:
        return self.text if self.after is None else self.after()

    def __reduce__(self) -> tuple[Any, ...]:  # as part of an exception that is sent to another process
        return Report, (self.text,)


def told(error: BaseException | None) -> str | None:
    """What is to be said of an exception, or of the one that was being dealt with when this one came: a callback may
    want to save, and the others be gone by then. None where nothing was reported. To be called when the process ends.
    """
    while error is not None:
        if isinstance(report := error.__dict__.get(REPORT), Report):
            return report()
        error = error.__context__
    return None


def say_when_uncaught() -> None:
    """Let a program of the user's own, which does not catch what a training raises, end as `python -m lit_dp` does."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        text = told(error)
        usual(kind, error, traceback) if text is None else say(text)

    if getattr(usual, "__module__", "") != __name__:
        sys.excepthook = hook
