"""All-reduce algorithms as DDP communication hooks, on the CPU as well: `all_reduce` of `exact_ddp`."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lit_dp.collectives import Algorithm, hooks
from lit_dp.collectives.hooks import GradientExchange, register
from lit_dp.engine.parity import sha256
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.errors import ConfigError
from tests.ranks import RankFailed, run_ranks
from tests.training import Job, quiet_trainer

JOB = Job(samples=48, epochs=2)


def train(all_reduce: str, **kwargs: Any) -> tuple[str, Tensor]:
    """SHA-256 and values of the weights after training on this rank."""
    module, data = JOB.build()
    strategy = ExactDDPStrategy(all_reduce=all_reduce, timeout=30, **kwargs)
    quiet_trainer(strategy=strategy, max_epochs=JOB.epochs, limit_val_batches=0).fit(module, datamodule=data)
    weights = dict(module.named_parameters())
    return sha256(weights), torch.cat([w.detach().flatten() for w in weights.values()])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_algorithm_trains_the_same_weights(world_size: int) -> None:
    native = run_ranks(world_size, train, "native")[0][1]
    for algorithm in Algorithm:
        by_rank = run_ranks(world_size, train, algorithm.value)
        assert len({digest for digest, _ in by_rank}) == 1, f"{algorithm}: replicas differ"
        torch.testing.assert_close(by_rank[0][1], native, rtol=1e-6, atol=1e-6, msg=algorithm.value)


@pytest.mark.parametrize(("compression", "tolerance"), [("fp16", 1e-2), ("bf16", 5e-2), ("powersgd", 0.3)])
def test_compressions_train_nearly_the_same(compression: str, tolerance: float) -> None:
    native = run_ranks(2, train, "native")[0][1]
    by_rank = run_ranks(2, train, compression)
    assert by_rank[0][0] == by_rank[1][0]
    difference = (by_rank[0][1] - native).abs().max()
    assert 0 < difference < tolerance  # it did compress, and not too much


def test_powersgd_with_several_buckets_does_not_hang_on_gloo() -> None:
    """FACTS: it hangs with two buckets. Ours makes one, whatever the size."""
    assert run_ranks(2, _powersgd_buckets, timeout=60) == [1, 1]


def _powersgd_buckets() -> int:
    class Big(Callback):
        def on_train_end(self, trainer, pl_module) -> None:  # type: ignore
            sizes = trainer.strategy.model._get_ddp_logging_data()["bucket_sizes"]  # pyright: ignore
            self.buckets = len(str(sizes).split(","))

    module, data = JOB.build()
    module.network = nn.Sequential(nn.Flatten(), nn.Linear(36, 3000), nn.Linear(3000, 1500), nn.Linear(1500, 4))
    big = Big()
    strategy = ExactDDPStrategy(all_reduce="powersgd", timeout=20)
    quiet_trainer(strategy=strategy, max_steps=14, max_epochs=-1, limit_val_batches=0, callbacks=[big]).fit(
        module, datamodule=data
    )
    return big.buckets


def test_state_of_powersgd_is_saved_and_comes_back(tmp_path: Path) -> None:
    whole = run_ranks(2, _powersgd_part, tmp_path, 2, None)
    run_ranks(2, _powersgd_part, tmp_path, 1, None)
    resumed = run_ranks(2, _powersgd_part, tmp_path, 2, tmp_path / "1.ckpt")
    assert resumed == whole
    saved = torch.load(tmp_path / "1.ckpt", weights_only=True)
    first, second = saved["lit_dp.exchange"]
    assert first["iter"] == second["iter"] > 10
    assert not torch.equal(first["error_dict"][0], second["error_dict"][0])  # each rank has its own

    del saved["lit_dp.exchange"]  # what Lightning would have saved
    torch.save(saved, tmp_path / "without.ckpt")
    assert run_ranks(2, _powersgd_part, tmp_path, 2, tmp_path / "without.ckpt") != whole
    with pytest.raises(RankFailed, match="left out on 2 processes; 3 run"):
        run_ranks(3, _powersgd_part, tmp_path, 2, tmp_path / "1.ckpt")


def _powersgd_part(folder: Path, epochs: int, checkpoint: Path | None) -> str:
    module, data = Job(samples=96).build()
    module.network = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.Tanh(), nn.Linear(64, 4))
    strategy = ExactDDPStrategy(all_reduce="powersgd", timeout=20)
    trainer = quiet_trainer(strategy=strategy, max_epochs=epochs, limit_val_batches=0)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    if checkpoint is None:
        trainer.save_checkpoint(folder / f"{epochs}.ckpt")
    return sha256(dict(module.named_parameters()))


def test_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"'rign'.*ring.*powersgd"):
        ExactDDPStrategy(all_reduce="rign")


# --- overlap and errors ---


def test_backward_goes_on_while_a_bucket_is_exchanged() -> None:
    for events in run_ranks(2, _events):
        # The first bucket's exchange began before backward had computed the gradients of the last layer to be done.
        assert events.index("exchange") < events.index("first layer")


def _events() -> list[str]:
    dist.init_process_group("gloo")
    events: list[str] = []
    layers = [nn.Linear(300, 300) for _ in range(4)]
    layers[0].register_full_backward_hook(lambda *args: events.append("first layer"))
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.3)  # type: ignore
    real = hooks.all_reduce
    began = threading.Event()

    def slow(*args: Any) -> Tensor:
        events.append("exchange")
        began.set()
        time.sleep(0.05)
        return real(*args)

    hooks.all_reduce = slow
    for layer in layers[:1]:
        layer.register_full_backward_pre_hook(lambda *args: _wait(began))
    exchange = register(model, "ring", torch.device("cpu"))
    assert isinstance(exchange, GradientExchange)
    for _ in range(3):  # buckets stand from the second step on
        events.clear()
        began.clear()
        model(torch.ones(4, 300, requires_grad=True)).sum().backward()
    exchange.close()
    return events


def _wait(event: threading.Event) -> None:
    event.wait(5)


def test_an_error_in_the_exchange_reaches_backward() -> None:
    with pytest.raises(RankFailed, match="lost a cable"):
        run_ranks(2, _broken)


def _broken() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(3, 3))

    def broken(*args: Any) -> Tensor:
        raise RuntimeError("lost a cable")

    hooks.all_reduce = broken
    register(model, "ring", torch.device("cpu"))
    model(torch.ones(1, 3)).sum().backward()
