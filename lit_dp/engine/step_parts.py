"""The parts of a step in seconds, over steps and ranks, as a table that names the rank for which the others wait."""

import statistics
from array import array
from collections.abc import Iterable

PARTS = {
    "data": "waiting for data",
    "copy": "copy to the device",
    "forward": "forward",
    "backward": "backward",
    "exchange": "exposed communication",
    "optimizer": "optimizer",
    "logging": "logging",
    "checkpoints": "checkpoints",
    "callbacks": "callbacks",
    "rest": "rest",
}
COLUMNS = 4
"""Ranks that have a column each; of more, the least and the most is told."""
NOTICEABLE = 0.02
"""Of a step: a rank that is later than the others by less is no straggler."""


class Parts:
    """What one rank has measured.

    Attributes:
        seconds: by part, over all steps.
        busy: seconds of each step without exposed communication: what a rank takes itself.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.busy = array("d")

    def add(self, step: Iterable[tuple[str | None, float]]) -> None:
        """Durations of a step, one after the other, each with its part."""
        busy = 0.0
        for part, seconds in step:
            if part is not None:
                self.seconds[part] += seconds
                busy += seconds * (part != "exchange")
        self.busy.append(busy)

    @property
    def step(self) -> float:
        """Mean seconds of a step."""
        return sum(self.seconds.values()) / len(self.busy)


class StepTimes:
    """What all ranks have measured; as text, a table.

    Attributes:
        ranks: by rank.
    """

    def __init__(self, ranks: list[Parts]) -> None:
        self.ranks = ranks

    def milliseconds(self, part: str) -> list[float]:
        """Of a mean step, by rank."""
        return [1000 * parts.seconds[part] / len(parts.busy) for parts in self.ranks]

    def lag(self) -> tuple[int, float, float]:
        """Which rank is the last most often, in which share of steps, and by how many seconds it then is later than the
        next (the median)."""
        lags: dict[int, list[float]] = {}
        for busy in zip(*(parts.busy for parts in self.ranks), strict=False):
            next_to_last, last = sorted(busy)[-2:]
            lags.setdefault(busy.index(last), []).append(last - next_to_last)
        rank = max(lags, key=lambda rank: (len(lags[rank]), -rank))
        return rank, len(lags[rank]) / len(self.ranks[0].busy), statistics.median(lags[rank])

    def __str__(self) -> str:
        step = statistics.mean(parts.step for parts in self.ranks)
        rows = [["ms a step", *self._heads(), "share"]]
        for part, title in PARTS.items():
            values = self.milliseconds(part)
            if any(values):
                rows.append([title, *_cells(values), f"{statistics.mean(values) / step / 10:.1f} %"])
        rows.append(["a step", *_cells([1000 * parts.step for parts in self.ranks]), "100.0 %"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        return "\n".join([f"step profile, of {len(self.ranks[0].busy):,} steps", *lines, *self._straggler(step)])

    def _heads(self) -> list[str]:
        if len(self.ranks) <= COLUMNS:
            return [f"rank {rank}" for rank in range(len(self.ranks))]
        return ["mean", "least", "most"]

    def _straggler(self, step: float) -> list[str]:
        if len(self.ranks) == 1:
            return []
        rank, share, seconds = self.lag()
        if seconds < NOTICEABLE * step or share < 1.5 / len(self.ranks):
            return [f"no straggler: the last of a step is rank {rank} in {share:.0%} of steps"]
        others = "the other waits" if len(self.ranks) == 2 else "the others wait"
        return [f"straggler: rank {rank} is the last in {share:.0%} of steps; {others} {1000 * seconds:.2f} ms for it"]


def _cells(values: list[float]) -> list[str]:
    shown = values if len(values) <= COLUMNS else [statistics.mean(values), min(values), max(values)]
    return [f"{value:.3f}" for value in shown]
