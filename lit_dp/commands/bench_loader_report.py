"""What follows from what `bench loader` measured: what limits, how many workers, and the table."""

from typing import Any

from lit_dp.commands.bench_report import Spread, Table, cores

SMALL = 0.05
"""The share of a step that loading in the process itself may take before workers are worth their start."""


def suggestion(delivered: dict[int, float], consumed: float, spare: int) -> tuple[int, str]:
    """How many workers, and why. All rates are samples a second of one process.

    Args:
        delivered: by the loader, by number of workers.
        consumed: by the model.
        spare: cores that a process has for workers, beside the one it computes on.
    """
    if 0 in delivered and (share := consumed / (consumed + delivered[0])) < SMALL:
        return 0, f"loading in the process itself takes {share:.1%} of a step"
    possible = {count: rate for count, rate in delivered.items() if 0 < count <= spare}
    if not possible:
        return 0, f"no core is left for workers: {spare} a process, beside those that compute"
    enough = [count for count, rate in sorted(possible.items()) if rate >= consumed]
    if enough:
        return enough[0], f"the fewest that deliver what the model consumes, on {spare} spare cores a process"
    best = max(possible, key=lambda count: possible[count])
    return best, f"the most that {spare} spare cores a process deliver; the model waits for data all the same"


def limit(delivered: dict[int, float], copied: float, consumed: float, workers: int) -> str:
    """What a training with so many workers waits for: the slowest of what goes on side by side.

    Without workers loading does not go on beside the step: what takes longer is named.
    """
    rate = delivered.get(workers, max(delivered.values()))
    slowest = min((consumed, "model"), (copied, "copy to the device"), (rate, "loading"))[1]
    if slowest != "loading":
        return slowest
    more = [count for count in delivered if count > workers]
    alone = delivered.get(0, rate)
    if workers and rate < 0.5 * workers * alone and not any(delivered[count] > 1.2 * rate for count in more):
        return "workers (sending batches between processes, or too few cores for them)"
    return "decoding and augmentation"


def table(results: dict[str, Any]) -> Table:
    """A line a number of workers, then copy and model."""
    need = Spread.of(results["model_samples_per_second"]).median
    measured = {f"loader, {count} workers": rates for count, rates in results["loader_samples_per_second"].items()}
    measured["copy to the device and normalisation"] = results["copy_samples_per_second"]
    measured["model: forward, backward, step"] = results["model_samples_per_second"]
    lines = []
    for name, rates in measured.items():
        rate = Spread.of(rates)
        milliseconds = f"{1000 * results['batch_size'] / rate.median:.4g}"
        cells = [f"{rate.median:,.0f} [{rate.low:,.0f}, {rate.high:,.0f}]", milliseconds, f"{rate.median / need:.3g}"]
        lines.append([name, *cells])
    header = ["what", "samples/s and process", "ms a batch", "of the model's rate"]
    notes = [
        f"What limits: {results['limit']}.",
        f"Suggested: --data.num_workers {results['suggested_workers']} ({results['why']}; the config has"
        f" {results['workers_of_the_config']}).",
    ]
    where = f"{results['processes']} processes on {cores()} cores"
    return Table(f"Loader of {results['title']}, {where}", header, lines, notes)
