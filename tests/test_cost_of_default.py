"""Without virtual ranks `exact_ddp` costs nothing over Lightning's `ddp`: bytes on the wire, and memory."""

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lit_dp.engine.strategy import ExactDDPStrategy
from tests.ranks import run_ranks
from tests.test_collectives import kernel_bytes_sent
from tests.training import Job, quiet_trainer

JOB = Job(samples=512, batch_size=8, epochs=1)
FROM, TO = 6, 16  # DDP's buckets stand from the third step on


class Costs(Callback):
    """Bytes that this process sent between two steps, and those of the tensors it holds then."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:  # type: ignore
        if batch_idx == FROM:
            self.sent = kernel_bytes_sent()
        if batch_idx == TO:
            self.sent = kernel_bytes_sent() - self.sent
            self.held = tensor_bytes()


def tensor_bytes() -> int:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    gradients = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages |= {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in gradients}
    return sum(storages.values())


def costs(strategy: Any) -> tuple[int, int]:
    torch.manual_seed(0)
    module, data = JOB.build()
    measured = Costs()
    quiet_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0, callbacks=[measured]).fit(
        module, datamodule=data
    )
    return measured.sent, measured.held


def exact(**kwargs: Any) -> tuple[int, int]:
    return costs(ExactDDPStrategy(timeout=30, **kwargs))


def with_virtual_ranks() -> tuple[int, int]:
    return exact(virtual_ranks=4)


@pytest.mark.parametrize("world_size", [2, 3])
def test_default_sends_and_holds_no_more_than_ddp(world_size: int) -> None:
    lightning = run_ranks(world_size, costs, "ddp")
    ours = run_ranks(world_size, exact)
    for (their_bytes, their_memory), (our_bytes, our_memory) in zip(lightning, ours, strict=True):
        assert their_bytes > 10 * 4 * sum(p.numel() for p in JOB.build()[0].parameters()) / 2  # it was measured
        assert our_bytes <= their_bytes
        assert our_memory <= their_memory + 10_000  # seeds of generators and the like
    # Lightning broadcasts on every step to look for SIGTERM (PL 21487, FAULTS 29).
    assert sum(sent for sent, _ in ours) < sum(sent for sent, _ in lightning)


def test_the_measure_sees_what_is_more() -> None:
    """With virtual ranks a step holds a second copy of the gradients and takes more micro-batches."""
    plain, virtual = run_ranks(2, exact)[0], run_ranks(2, with_virtual_ranks)[0]
    assert virtual[0] != plain[0]
