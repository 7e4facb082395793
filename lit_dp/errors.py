"""Errors a person can act on: printed as one line, without a traceback (see `__main__`)."""


class ConfigError(ValueError):
    """What was typed or configured cannot work. Found before training; exit code 2."""


class RunError(RuntimeError):
    """The run met something that it cannot go on with (a corrupt file, a full disk). Exit code 1."""


REPORT = "lit_dp_report"
"""Attribute of an exception that a rank has told the others of: what is to be said of it (`engine.causes.Report`)."""

SAVED = 75
"""Exit code of a training that was asked to stop, and was saved: EX_TEMPFAIL, run it again to go on. No failure."""
