"""How DDP lays gradients out in buckets: after a run's first step as in its later ones, also where the run is resumed.

DDP begins with one bucket and lays the gradients out anew after the first step, in the order in which they arrived. A
run that is resumed would begin with one bucket again. On more than two ranks the order in which a native all-reduce
adds depends on a gradient's place in its bucket: the first step would have other bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Layout = list[list[int]]
"""Indices of the parameters that are trained, one list a bucket."""


def layout(model: Any) -> Layout:
    """That of the steps after the first; empty before, and without DDP. All ranks call it, between two steps."""
    if not isinstance(model, DistributedDataParallel):
        return []
    model.reducer._rebuild_buckets()  # otherwise done when the second step begins
    logger: Any = model.logger
    logger.set_runtime_stats_and_log()  # otherwise when the third does
    said = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    return [[int(index) for index in bucket.split()] for bucket in said.split(",") if bucket.strip()]


@contextmanager
def laid_out(given: Layout) -> Iterator[None]:
    """Let a model that is wrapped meanwhile begin with this layout; as usual where it is empty, or of another model."""
    c10d: Any = dist
    usual = c10d._compute_bucket_assignment_by_size

    def chosen(tensors: list[Any], limits: list[int], *more: Any, **named: Any) -> tuple[Layout, list[int]]:
        if sorted(index for bucket in given for index in bucket) != list(range(len(tensors))):
            return usual(tensors, limits, *more, **named)
        return given[::-1], [limits[-1]] * len(given)  # DDP reverses both

    c10d._compute_bucket_assignment_by_size = chosen
    try:
        yield
    finally:
        c10d._compute_bucket_assignment_by_size = usual
