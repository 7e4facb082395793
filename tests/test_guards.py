"""L8 and FAULTS 17, 19: a run stops, on all ranks, where a number is not finite or replicas are not equal."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import SumMetric

from lit_dp.engine import nonfinite, suspects
from lit_dp.engine.checksums import bits_of, checksums
from lit_dp.engine.ledger import Ledger
from lit_dp.engine.monitored import MonitoredValues
from lit_dp.engine.nonfinite import NonFinite, look_finite, poisoned
from lit_dp.engine.parity import first_difference, sha256
from lit_dp.engine.replicas import Replicas
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.errors import ConfigError, RunError
from tests.ranks import run_ranks
from tests.training import SEED, Job, adamw, momentum, quiet_trainer, through_lightning

exact = partial(ExactDDPStrategy, timeout=20)


def trainer_with(guards: list[Any], **options: Any) -> Any:
    """A trainer with these guards in the place of its own."""
    trainer = quiet_trainer(num_sanity_val_steps=0, **{"max_epochs": 1, "limit_val_batches": 0, **options})
    others = [callback for callback in trainer.callbacks if not isinstance(callback, NonFinite | Replicas)]  # type: ignore
    trainer.callbacks = guards + others  # type: ignore
    return trainer


# --- a number that is not finite ---

BAD = 7
"""The sample that does it: in order, in batches of 2, rank 1 of 2 has it in its second batch, with sample 5."""


class Rows(Dataset):
    def __init__(self, samples: int = 16) -> None:
        self.rows = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], index


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(self.shard(0, 1))

    def shard(self, index: int, count: int) -> Any:
        return [Rows()[i] for i in range(index, 16, count)]


class Tiny(LightningModule):
    """What `fault` does to a batch that holds the bad sample: `input` is NaN; the `loss` is infinite, by a constant;
    the `gradient` of a finite loss is NaN."""

    def __init__(self, fault: str = "none", optimizer: Callable[..., Any] = momentum) -> None:
        super().__init__()
        self.fault, self.optimizer = fault, optimizer
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.steps = SumMetric()

    def loss(self, batch: Any) -> Tensor:
        inputs, bad = batch[0], BAD in batch[1].tolist()
        if bad and self.fault == "input":
            inputs = inputs * torch.nan
        hidden = nn.functional.dropout(torch.relu(self.norm(self.first(inputs))), 0.3)
        loss = self.last(hidden).square().mean()
        if bad and self.fault == "loss":
            loss = loss + torch.inf
        if bad and self.fault == "gradient":
            loss = loss + (self.first.weight.sum() * 0).abs().sqrt()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.update(1.0)
        self.log("steps", self.steps, on_epoch=True, on_step=False)
        return self.loss(batch[0] if len(batch) == 1 else batch)  # of a list of one loader

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Watched(Callback):
    """Digests of the weights, the optimizer's state and the buffers, at the start and the end of each batch."""

    def __init__(self) -> None:
        self.before: list[tuple[str, ...]] = []
        self.after: list[tuple[str, ...]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:  # type: ignore
        self.before.append(digests(trainer, pl_module))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:  # type: ignore
        self.after.append(digests(trainer, pl_module))


def digests(trainer: Any, module: LightningModule) -> tuple[str, ...]:
    entries = [entries for optimizer in trainer.optimizers for entries in optimizer.state.values()]
    state = {f"{i}/{k}": v for i, e in enumerate(entries) for k, v in e.items() if isinstance(v, Tensor)}
    return tuple(sha256(part) for part in (dict(module.named_parameters()), state, dict(module.named_buffers())))


def fit(
    module: Callable[[], LightningModule],
    mode: Any = "stop",
    loader: Callable[[], Any] | None = None,
    strategy: Any = None,
    guards: Callable[[], list[Any]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What becomes of a training on this rank: its error, the states that were watched, and what is left."""
    seed_everything(SEED, verbose=False)
    built, watched = module(), Watched()
    options["callbacks"] = [*[make() for make in options.pop("callbacks", [])], watched]
    how = strategy if callable(strategy) else partial(exact, nonfinite=mode, **(strategy or {}))
    trainer = trainer_with([NonFinite(mode)] if guards is None else guards(), strategy=how(), **options)
    error = ""
    try:
        trainer.fit(built, DataLoader(Rows(), 2) if loader is None else loader())
    except (RunError, ConfigError) as caught:
        error = str(caught)
    return {
        "error": error,
        "before": watched.before,
        "after": watched.after,
        "left": digests(trainer, built),
        "finite": suspects.are_finite(built.state_dict().values()),
        "steps": float(trainer.callback_metrics.get("steps", 0)),
        "drawn": float(torch.rand(())),
    }


@pytest.mark.parametrize("callbacks", [[], [Ledger]], ids=["", "with the ledger, which takes indices"])
@pytest.mark.parametrize("fault", ["input", "loss"])
def test_a_loss_of_one_rank_stops_all_before_the_step(fault: str, callbacks: list[Any]) -> None:
    for result in run_ranks(2, partial(fit, partial(Tiny, fault), callbacks=callbacks)):
        assert result["error"] == (
            "non-finite loss at step 2 (epoch 1) on rank 1: samples 5, 7. The step was not taken, weights are as before"
            " it; mend the samples or the loss, or leave such steps out with --trainer.strategy.nonfinite skip"
        )
        assert len(result["before"]) == 2
        assert result["left"][:2] == result["before"][1][:2]


def by_default() -> str:
    trainer = quiet_trainer(strategy=exact(), max_epochs=1)
    try:
        trainer.fit(Tiny("loss"), DataLoader(Rows(), 2))
    except RunError as error:
        return str(error)
    return ""


def test_guards_are_on_by_default() -> None:
    for error in run_ranks(2, by_default):
        assert "non-finite loss at step 2 (epoch 1) on rank 1: samples 5, 7." in error
    kinds = [type(callback) for callback in quiet_trainer(strategy="exact_ddp", devices=1).callbacks]  # type: ignore
    assert kinds[:3] == [MonitoredValues, Replicas, NonFinite]


def test_ignored_it_reaches_all_weights() -> None:
    for result in run_ranks(2, fit, partial(Tiny, "input"), "ignore"):
        assert (result["error"], result["finite"], len(result["after"])) == ("", False, 4)


def test_without_the_poison_finite_gradients_hide_a_loss() -> None:
    for result in run_ranks(2, partial(fit, partial(Tiny, "loss"), strategy=partial(exact, nonfinite="ignore"))):
        assert (result["error"], len(result["after"])) == ("", 4)


def test_a_gradient_is_traced_by_computing_it_again() -> None:
    for result in run_ranks(2, fit, partial(Tiny, "gradient")):
        assert result["error"].startswith(
            "non-finite gradient of first.weight at step 2 (epoch 1), where losses are finite, on rank 1: samples 5, 7."
        )
        assert result["left"][:2] == result["before"][1][:2]


def test_the_micro_batch_is_named() -> None:
    """Of 4 micro-batches in a step, the second of rank 1 has the sample; what the last one gives is finite."""
    for fault, words in (
        ("loss", "on rank 1: samples 5, 7."),
        ("gradient", "each rank's last micro-batch alone gives"),
    ):
        for result in run_ranks(2, partial(fit, partial(Tiny, fault), accumulate_grad_batches=4)):
            assert "at step 1 (epoch 1)" in result["error"]
            assert words in result["error"]
            assert result["left"][:2] == result["before"][0][:2]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_virtual_rank_is_named(world_size: int) -> None:
    """It is virtual rank 3 of 4 that has sample 7, in its first step."""
    for fault in ("input", "loss", "gradient"):
        for result in run_ranks(world_size, partial(fit, partial(Tiny, fault), strategy={"virtual_ranks": 4})):
            assert "at step 1 (epoch 1)" in result["error"]
            assert f" on virtual rank 3 (process {world_size - 1}): samples 3, 7." in result["error"]
            assert result["left"][:2] == result["before"][0][:2]


def test_one_process() -> None:
    for fault in ("input", "loss", "gradient"):
        (result,) = run_ranks(1, fit, partial(Tiny, fault))
        assert re.search(r"at step 4 \(epoch 1\)(, where losses are finite,)? on samples 6, 7\. ", result["error"])
        assert result["left"][:2] == result["before"][3][:2]


def test_what_is_said_of_samples() -> None:
    def said(loader: Callable[[], Any]) -> str:
        first, second = run_ranks(2, fit, partial(Tiny, "loss"), "stop", loader)
        assert first["error"] == second["error"]
        return first["error"].split(". ")[0].split("(epoch 1) on ")[1]

    assert said(lambda: DataLoader(Rows(), 2, num_workers=2)) == "rank 1: samples 5, 7"
    assert said(lambda: [DataLoader(Rows(), 2)]) == "rank 1: samples 5, 7"
    assert said(lambda: DataLoader(Rows(64), 9)) == "rank 1: samples 1, 3, 5, 7, 9, 11, 13, 15, … (9 in all)"
    assert said(lambda: DataLoader(Stream(), 2)) == "rank 1: batch 1 of the epoch (its loader does not tell samples)"


class Everywhere(Tiny):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.nan


def test_a_fault_of_all_ranks() -> None:
    for result in run_ranks(2, fit, Everywhere):
        assert "in all 2 micro-batches: rank 0: samples 0, 2; rank 1: samples 1, 3." in result["error"]


class Diverging(Tiny):
    """Finite gradients, and a learning rate so large that the first step makes weights infinite."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * 1e4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e38)


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_weights_that_are_not_finite_stop_the_next_step(mode: str) -> None:
    """Also where steps are to be left out: it would never end."""
    for result in run_ranks(2, fit, Diverging, mode):
        assert re.match(
            r"non-finite loss at step 2 \(epoch 1\): parameter [\w.]+ is not finite itself", result["error"]
        )
        assert "lower the learning rate" in result["error"]


# --- leaving such a step out ---

SKIPS: list[tuple[int, dict[str, Any], Any]] = [
    (2, {}, momentum),
    (2, {}, adamw),
    (1, {}, adamw),
    (2, {"strategy": {"virtual_ranks": 4}}, momentum),
    (1, {"strategy": {"virtual_ranks": 4}}, momentum),
    (2, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}, adamw),
    (2, {"strategy": {"gradient_as_bucket_view": True, "all_reduce": "bf16"}}, adamw),
]


@pytest.mark.parametrize("fault", ["input", "loss", "gradient"])
@pytest.mark.parametrize(("world_size", "options", "optimizer"), SKIPS)
def test_a_step_left_out_changes_nothing(
    world_size: int, options: dict[str, Any], optimizer: Any, fault: str, capfd: pytest.CaptureFixture
) -> None:
    results = run_ranks(world_size, partial(fit, partial(Tiny, fault, optimizer), "skip", **options))
    virtual = options.get("strategy", {}).get("virtual_ranks")
    k = virtual // world_size if virtual else options.get("accumulate_grad_batches", 1)
    bad = BAD // (2 * world_size * k)  # the step whose samples hold it
    for result in results:
        starts, ends = result["before"][::k], result["after"][k - 1 :: k]
        assert result["error"] == ""
        assert ends[bad] == starts[bad]
        assert [end[0] != start[0] for start, end in zip(starts, ends, strict=True)] == [
            step != bad for step in range(len(starts))
        ]
        assert result["finite"]
        assert [end[:2] for end in ends] == [end[:2] for end in results[0]["after"][k - 1 :: k]]  # of rank 0
    assert capfd.readouterr().out.count("step left out: non-finite") == 1


def test_without_buffers_put_back_statistics_are_nan() -> None:
    def faulty() -> dict[str, Any]:
        nonfinite.put_back = lambda module, buffers: None
        return fit(partial(Tiny, "input"), "skip")

    (result,) = run_ranks(1, faulty)  # with more, DDP would put rank 0's in their place
    assert (result["error"], result["finite"]) == ("", False)


def test_computing_again_leaves_no_trace() -> None:
    """In metrics, and in the generators where these are not seeded for each step."""

    def run(fault: str, faulty: str) -> tuple[float, float]:
        if faulty == "metrics":
            suspects.taken_back = lambda module, logged: nullcontext()
        if faulty == "draws":
            suspects.isolated = torch.random.fork_rng = lambda *args: nullcontext()  # type: ignore
        result = fit(partial(Tiny, fault), "skip", strategy={"seeded_draws": False})
        return result["steps"], result["drawn"]

    def traces(fault: str, faulty: str = "") -> list[tuple[float, float]]:
        return run_ranks(2, run, fault, faulty)

    right = traces("none")
    assert [steps for steps, _ in right] == [8.0, 8.0]  # 4 of each rank
    assert traces("gradient") == right
    assert [steps for steps, _ in traces("gradient", "metrics")] == [10.0, 10.0]
    assert all(drawn != right[0][1] for _, drawn in traces("gradient", "draws"))


# --- what else takes steps ---


class Manual(Tiny):
    """Two optimizers, a step each in a batch; the fault is in the second's loss."""

    def __init__(self, fault: str = "none") -> None:
        super().__init__(fault)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, healthy in zip(self.optimizers(), (True, False), strict=True):  # type: ignore
            loss = self.loss([batch[0], torch.zeros(1)] if healthy else batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [momentum(self.first.parameters()), momentum([*self.norm.parameters(), *self.last.parameters()])]


def test_manual_optimization() -> None:
    for fault in ("input", "loss"):
        for result in run_ranks(2, fit, partial(Manual, fault)):
            assert "non-finite loss at step 4 (epoch 1) on rank 1: samples 5, 7." in result["error"]
        for result in run_ranks(2, fit, partial(Manual, fault), "skip"):
            assert (result["error"], result["finite"], len(result["after"])) == ("", True, 4)
    for result in run_ranks(2, fit, partial(Manual, "gradient")):
        assert result["error"] == ""  # it is not the second optimizer's parameter whose gradient is bad


class Lbfgs(Tiny):
    def __init__(self, fault: str, later: bool) -> None:
        super().__init__(fault)
        self.later, self.calls = later, 0

    def loss(self, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(batch if self.calls > 1 or not self.later else [batch[0], torch.zeros(1)])

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


def test_lbfgs() -> None:
    """Which calls for a loss several times a step."""

    def all_at_once() -> DataLoader:
        return DataLoader(Rows(), 8)

    for result in run_ranks(2, fit, partial(Lbfgs, "loss", False), "stop", all_at_once):
        assert "step 1 (epoch 1) on rank 1: samples 1, 3, 5, 7, 9, 11, 13, 15. The" in result["error"]
        assert "weights are as before it" in result["error"]
        assert result["left"][0] == result["before"][0][0]
    for result in run_ranks(2, fit, partial(Lbfgs, "loss", True), "stop", all_at_once):
        assert "weights are those of a trial" in result["error"]
        assert result["left"][0] != result["before"][0][0]
    for result in run_ranks(2, fit, partial(Lbfgs, "loss", True), "skip", all_at_once):
        assert result["error"].startswith("nonfinite 'skip' cannot undo the trials of LBFGS")


def test_powersgd_cannot_leave_a_step_out() -> None:
    for result in run_ranks(2, partial(fit, Tiny, "skip", strategy={"all_reduce": "powersgd"})):
        assert "and all_reduce 'powersgd'" in result["error"]


class Overflowing(Tiny):
    """Gradients that are too large, in the second batch of every rank."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + ((self.first.weight.sum() * 0).abs().sqrt() if 4 <= int(batch[1][0]) < 8 else 0)


def with_scaler(module: Callable[[], LightningModule], mode: str) -> tuple[dict[str, Any], float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # pyright: ignore[reportPrivateImportUsage]
    return fit(module, mode, plugins=[MixedPrecision("16-mixed", "cpu", scaler)]), scaler.get_scale()


def test_an_overflow_is_the_scalers_business() -> None:
    """... and a loss that is not finite is not, though the scaler would leave its step out as well, in silence."""
    for result, scale in run_ranks(2, with_scaler, Overflowing, "stop"):
        assert (result["error"], scale, result["after"][1][0]) == ("", 2.0, result["before"][1][0])
    for result, _ in run_ranks(2, with_scaler, partial(Tiny, "input"), "stop"):
        assert "non-finite loss at step 2 (epoch 1) on rank 1: samples 5, 7." in result["error"]
    for result, scale in run_ranks(2, with_scaler, partial(Tiny, "input"), "skip"):
        assert (result["error"], scale, result["finite"]) == ("", 2.0, True)
        assert result["after"][1] == result["before"][1]
    for result, scale in run_ranks(2, with_scaler, partial(Tiny, "input"), "ignore"):
        assert (result["error"], scale) == ("", 2.0)


class Sparse(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 2, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.table(batch[1]).square().sum()
        return loss * torch.nan if BAD in batch[1].tolist() else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sparse_gradients() -> None:
    for result in run_ranks(2, fit, Sparse):
        assert "non-finite loss at step 2 (epoch 1) on rank 1: samples 5, 7." in result["error"]


def test_a_quick_look_that_overflows_is_followed_by_an_exact_one() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        large = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)
        assert not look_finite([large])
        assert suspects.are_finite([large])
        for bad in (torch.nan, torch.inf, -torch.inf):
            assert not look_finite([torch.zeros(3, dtype=dtype), torch.tensor([1.0, bad, 2.0], dtype=dtype)])
    assert look_finite([])


# --- it costs no bit ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_poison_changes_no_bit_of_a_finite_loss(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    few = torch.tensor([0.0, -0.0, info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 2], dtype=dtype)
    losses = torch.cat((few, torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)))
    assert bits_of(poisoned(losses)).equal(bits_of(losses))
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert poisoned(torch.tensor(bad, dtype=dtype)).isnan()


@pytest.mark.parametrize("job", [Job(75, 4, 2, adamw, accumulate=2, clip_norm=0.5), Job(bf16=True)], ids=["", "bf16"])
def test_a_training_has_the_same_bits(job: Job) -> None:
    def trace(mode: Any) -> Any:
        return run_ranks(2, through_lightning, job, exact(nonfinite=mode), [NonFinite(mode)])

    assert first_difference(trace("stop"), trace("ignore")) is None
    assert first_difference(trace("skip"), trace("ignore")) is None


# --- replicas ---


def compared(every_n_steps: int = 2) -> list[Any]:
    return [Replicas(every_n_steps)]


class Parting(Callback):
    """Changes one bit of what `rank` holds, after the step that `at` counts from 1."""

    def __init__(self, what: str, at: int = 3, rank: int = 1) -> None:
        self.what, self.at, self.rank = what, at, rank

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.at and trainer.global_rank == self.rank:
            optimizer, weight = trainer.optimizers[0], pl_module.last.weight
            if self.what == "lr":
                optimizer.param_groups[0]["lr"] *= 1.5
            else:
                bits_of(weight if self.what == "weight" else optimizer.state[weight]["momentum_buffer"])[2] += 1


def part(what: str, at: int = 3, rank: int = 1, **options: Any) -> dict[str, Any]:
    return fit(Tiny, guards=compared, callbacks=[partial(Parting, what, at, rank)], **options)


@pytest.mark.parametrize(
    ("what", "at", "name"),
    [
        ("weight", 3, "parameter last.weight"),
        ("state", 4, "optimizer state momentum_buffer of last.weight"),
        ("lr", 3, "lr of param group 0"),
    ],
)
def test_replicas_that_part_are_found(what: str, at: int, name: str) -> None:
    """In 4 steps: at the second comparison, or at the one when training ends."""
    for result in run_ranks(2, partial(part, what, at)):
        assert result["error"].startswith(f"replicas differ after 4 steps: {name} of rank 1 ")
        last = 4 if at == 4 else 2
        assert f"is not that of rank 0. When last looked at, after {last} steps, they were equal" in result["error"]
        assert f"resume from a checkpoint of step {last} or earlier" in result["error"]


def test_the_minority_is_named() -> None:
    for result in run_ranks(3, partial(part, "weight", at=2, rank=0)):
        assert "parameter last.weight of rank 0 is not that of rank 1" in result["error"]


def test_without_the_guard_they_part_unseen() -> None:
    first, second = run_ranks(2, partial(fit, Tiny, guards=list, callbacks=[partial(Parting, "weight")]))
    assert (first["error"], second["error"]) == ("", "")
    assert first["left"][0] != second["left"][0]


def test_one_process_compares_nothing() -> None:
    (result,) = run_ranks(1, partial(part, "weight", rank=0))
    assert (result["error"], len(result["after"])) == ("", 8)


def test_nothing_is_saved_of_replicas_that_have_parted(tmp_path: Path) -> None:
    def run(guard: bool) -> dict[str, Any]:
        saved = ModelCheckpoint(tmp_path / str(guard), every_n_train_steps=1, save_top_k=-1, filename="{step}")
        return fit(
            Tiny,
            guards=partial(compared, 100) if guard else list,
            callbacks=[partial(Parting, "weight"), lambda: saved],
            enable_checkpointing=True,
        )

    for result in run_ranks(2, run, True):
        assert "replicas differ after 3 steps: parameter last.weight of rank 1" in result["error"]
    assert sorted(path.name for path in (tmp_path / "True").iterdir()) == ["step=1.ckpt", "step=2.ckpt"]
    run_ranks(2, run, False)
    assert len(list((tmp_path / "False").iterdir())) == 4


HEALTHY: dict[str, dict[str, Any]] = {
    "BatchNorm, whose statistics differ": {},
    "without DDP's broadcast, virtual ranks": {"strategy": {"virtual_ranks": 4}},
    "adamw": {"module": partial(Tiny, optimizer=adamw)},
    "LBFGS": {"module": partial(Lbfgs, "none", False)},
    "manual": {"module": Manual},
    "powersgd": {"strategy": {"all_reduce": "powersgd"}},
    "find_unused_parameters": {"strategy": {"find_unused_parameters": True}},
}


@pytest.mark.parametrize("options", HEALTHY.values(), ids=HEALTHY.keys())
def test_replicas_that_are_equal_are_left_alone(options: dict[str, Any]) -> None:
    for result in run_ranks(2, partial(fit, **{"module": Tiny, "guards": partial(compared, 1), **options})):
        assert result["error"] == ""


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers.*deprecated")
def test_buffers_that_nothing_levels() -> None:
    strategy = {"forward_sync_buffers": False}
    for result in run_ranks(2, partial(fit, Tiny, guards=partial(compared, 1), strategy=strategy)):
        assert "replicas differ after 1 steps: buffer norm.running_mean of rank 1" in result["error"]
        assert "leave that at its default" in result["error"]


# --- checksums ---

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.complex128, torch.float8_e4m3fn])
def test_checksums_see_every_bit_and_place(dtype: torch.dtype) -> None:
    def of(tensor: Tensor) -> int:
        return checksums({"it": tensor})["it"]

    generator = torch.Generator().manual_seed(0)
    tensor = (torch.randn(5, 4, 3, 3, generator=generator) * 3).to(dtype)
    forms = [
        tensor,
        tensor.to(memory_format=torch.channels_last),
        tensor.transpose(0, 1),
        tensor[:, ::2],
        tensor[0, 0, 0, 0],
    ]
    for form in forms:
        same = form.clone(memory_format=torch.preserve_format)
        assert of(same) == of(form)
        elements = bits_of(same)
        for place in range(len(elements)):
            elements[place] ^= 1
            assert of(same) != of(form)
            elements[place] ^= 1
        assert of(same) == of(form)
    assert of(tensor[:0]) == of(tensor[:0])
    flat = bits_of(tensor.clone())
    for i, j in ((0, 1), (3, 90), (17, 18)):
        swapped = flat.clone()
        swapped[[i, j]] = flat[[j, i]]
        assert (of(swapped) != of(flat)) == (flat[i] != flat[j])


def test_checksums_see_neighbours_that_are_a_bit_off() -> None:
    """+1, -1, -1, +1: with weights 1, 3, 5, 7 their sum would be the same."""
    tensor = torch.randint(-(2**30), 2**30, (4,), dtype=torch.int32)
    assert checksums({"": tensor}) != checksums({"": tensor + torch.tensor([1, -1, -1, 1], dtype=torch.int32)})


def test_checksums_of_large_tensors_and_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_dp.engine.checksums.CHUNK", 8)
    tensor = torch.arange(20)
    moved = torch.cat((tensor[8:16], tensor[:8], tensor[16:]))
    assert checksums({"": tensor}) == checksums({"": tensor.clone()}) != checksums({"": moved})
    assert checksums({"a": 0.1, "b": 1}) != checksums({"a": 0.1 + 1e-17 + 2e-17, "b": 1})


# --- parameters that DDP does not know ---


class Unfreezing(BaseFinetuning):
    """Lightning's own way: frozen before DDP wraps the module, and trained from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer)


class Late(Callback):
    """Within an epoch."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.first.requires_grad_(False)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.first.requires_grad_(batch_idx > 0)


class Replacing(Callback):
    """Puts a new layer in the place of one that DDP knows."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            pl_module.first = nn.Linear(3, 4)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.first.parameters())})


class TrainableOnly(Tiny):
    def configure_optimizers(self) -> Any:
        return momentum([p for p in self.parameters() if p.requires_grad])


class InConfigure(Tiny):
    """After DDP has wrapped the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        self.first.requires_grad_(True)
        return super().configure_optimizers()


WAYS: dict[str, tuple[Any, list[Any], int]] = {
    "BaseFinetuning": (TrainableOnly, [Unfreezing], 5),
    "in midst of an epoch": (Tiny, [Late], 2),
    "replaced": (Tiny, [Replacing], 2),
    "in configure_optimizers": (InConfigure, [], 1),
}


@pytest.mark.filterwarnings("ignore:The parameters .* will be ignored")
@pytest.mark.parametrize(("module", "callbacks", "step"), WAYS.values(), ids=WAYS.keys())
def test_fault_17_parameters_that_ddp_does_not_know(module: Any, callbacks: list[Any], step: int) -> None:
    run = partial(fit, module, guards=partial(compared, 100), callbacks=callbacks, max_epochs=2)
    for result in run_ranks(2, run):
        assert f"are trained at step {step}: first.weight, first.bias. Their gradients" in result["error"]
        assert len(result["after"]) == step - 1
    (result,) = run_ranks(1, run)
    assert result["error"] == ""


@pytest.mark.parametrize("world_size", [1, 2])
def test_virtual_ranks_do_not_know_them_either(world_size: int) -> None:
    run = partial(fit, Tiny, guards=compared, callbacks=[Late], strategy={"virtual_ranks": 4})
    for result in run_ranks(world_size, run):
        assert "first.weight, first.bias. Their gradients" in result["error"]


def test_without_the_guard_they_part() -> None:
    first, second = run_ranks(2, partial(fit, Tiny, guards=list, callbacks=[Late]))
    assert (first["error"], second["error"]) == ("", "")
    assert first["left"][0] != second["left"][0]


def test_frozen_parameters_and_ones_that_ddp_is_to_ignore_are_left_alone() -> None:
    for result in run_ranks(2, partial(fit, Ignoring, guards=partial(compared, 1))):
        assert result["error"] == ""


class Ignoring(Tiny):
    """The first layer is each rank's own, by the user's will, and the last one's bias does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.last.bias.requires_grad_(False)
        self._ddp_params_and_buffers_to_ignore = ["first.weight", "first.bias"]
