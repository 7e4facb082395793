"""L5: a metric depends neither on the number of processes nor on the batch size, whatever remains at the end."""

import os
import random
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_auroc, multiclass_f1_score
from torchmetrics.retrieval import RetrievalMRR

from lit_dp.engine.evaluation import ExactEvaluation
from lit_dp.engine.monitored import MonitoredValues
from lit_dp.engine.replicas import Replicas
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.errors import ConfigError
from tests.ranks import RankFailed, run_ranks
from tests.training import quiet_trainer

CLASSES = 3
EXACT = ("constant", "acc", "f1")  # ratios of counts: equal bits
SHAPES = [(samples, batch) for samples in range(1, 41) for batch in range(1, 8)]
EDGES = [(1, 1), (1, 7), (2, 1), (3, 1), (3, 2), (4, 4), (5, 2), (7, 3), (40, 7)]

exact = partial(ExactDDPStrategy, timeout=20)


def samples_of(count: int) -> TensorDataset:
    """Probabilities, labels and a value for each of `count` samples; the values are 0, 1, 2, ...

    Not logits: torchmetrics takes a batch whose logits all happen to lie in 0..1 for probabilities.
    """
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(count, CLASSES, generator=generator)
    return TensorDataset(
        logits.softmax(dim=1), torch.randint(CLASSES, (count,), generator=generator), torch.arange(count).float()
    )


def truth(count: int) -> dict[str, float]:
    """The metrics, from all samples at once."""
    logits, labels, values = samples_of(count).tensors
    with warnings.catch_warnings():  # AUROC of a class that never occurs
        warnings.simplefilter("ignore")
        return {
            "constant": 1.0,
            "value": float(values.double().mean()),
            "largest": float(values.max()),
            "acc": float(multiclass_accuracy(logits, labels, CLASSES, average="micro")),
            "f1": float(multiclass_f1_score(logits, labels, CLASSES)),
            "auroc": float(multiclass_auroc(logits, labels, CLASSES)),
            "loss": float(nn.functional.cross_entropy(logits.double(), labels)),
        }


class Measured(LightningModule):
    """Logs every kind of metric of what it is given: torchmetrics objects and plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CLASSES, CLASSES)
        self.counts = MetricCollection(
            {"acc": MulticlassAccuracy(CLASSES, average="micro"), "f1": MulticlassF1Score(CLASSES)}  # type: ignore
        )
        self.auroc = MulticlassAUROC(CLASSES)  # keeps lists of predictions and int64 labels, two- and one-dimensional
        self.loss = MeanMetric()
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, labels, values = batch
        self.batches += 1
        log = partial(self.log, batch_size=len(labels))
        log("constant", 1.0, sync_dist=True)
        log("value", values.mean(), sync_dist=True)
        log("largest", values.max(), sync_dist=True, reduce_fx="max")
        self.counts.update(logits, labels)
        self.auroc.update(logits, labels)
        self.loss.update(nn.functional.cross_entropy(logits, labels), weight=len(labels))
        self.log_dict(self.counts, batch_size=len(labels))  # type: ignore
        log("auroc", self.auroc)
        log("loss", self.loss)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def evaluated(stage: str, module: LightningModule, loader: Any, strategy: Any) -> dict[str, float]:
    """What callbacks read after an evaluation, on this rank."""
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No (positive|negative) samples")  # AUROC, of very small datasets
        warnings.filterwarnings("ignore", message="torch.distributed.nn.functional.all_gather is deprecated")
        warnings.filterwarnings("ignore", message=".*DistributedSampler.*")  # what `ddp` says of faults 1 and 22
        if stage == "fit":
            train = DataLoader(samples_of(4), 2)
            trainer.fit(module, train_dataloaders=train, val_dataloaders=loader)
        else:
            getattr(trainer, stage)(module, loader, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def sweep(stage: str, shapes: list[tuple[int, int]]) -> list[dict[str, float]]:
    results = []
    for count, batch_size in shapes:
        module = Measured()
        results.append(evaluated(stage, module, DataLoader(samples_of(count), batch_size), exact()))
        assert module.batches == -(-max(1, len(range(rank(), count, world_size()))) // batch_size)
    return results


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", ["validate", "test", "fit"])
def test_metrics_are_one_process_s(stage: str, world_size: int) -> None:
    """Shapes are sampled, with another seed for each test; the edges are always there."""
    edges, more = (EDGES, 6) if stage == "validate" else (EDGES[:-1:2], 2)
    shapes = edges + random.Random(f"{stage} {world_size}").sample(SHAPES, more)
    by_rank = run_ranks(world_size, sweep, stage, shapes)
    assert all(results == by_rank[0] for results in by_rank[1:]), "ranks read different values"
    for (count, batch_size), measured in zip(shapes, by_rank[0], strict=True):
        right = truth(count)
        case = f"{count} samples, batch {batch_size}"
        assert measured.keys() == right.keys()
        for name in EXACT:
            assert measured[name] == right[name], f"{name}, {case}"
        for name in right:
            assert measured[name] == pytest.approx(right[name], rel=1e-6, abs=1e-7), f"{name}, {case}"


def means(strategy: Any, batch_size: int, stage: str = "validate") -> dict[str, float]:
    return evaluated(stage, Measured(), DataLoader(samples_of(5), batch_size), strategy)


@pytest.mark.parametrize("stage", ["validate", "fit"])
def test_faults_1_and_22_upstream_pads(stage: str) -> None:
    """PL 7929: values 0..4 on 2 ranks have the mean 2. Fails when upstream has mended `ddp`."""
    assert run_ranks(2, means, "ddp", 2, stage)[0]["value"] == pytest.approx(1.6667, abs=1e-4)
    assert run_ranks(2, means, exact(), 2, stage)[0]["value"] == 2.0


class MeanOfF1(LightningModule):
    """F1 of each batch, averaged: what people log."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = multiclass_f1_score(batch[0], batch[1], CLASSES)
        self.log("f1", value, sync_dist=True, batch_size=len(batch[1]))


def f1_of(module: type[LightningModule]) -> float:
    return evaluated("validate", module(), DataLoader(samples_of(20), 3), exact())["f1"]


def test_fault_3_a_mean_of_batch_values_is_not_the_metric() -> None:
    """PL 4493: no trainer can mend it; torchmetrics objects are the way, and they read the pooled value."""
    assert run_ranks(2, f1_of, Measured)[0] == truth(20)["f1"]
    assert run_ranks(2, f1_of, MeanOfF1)[0] != pytest.approx(truth(20)["f1"], rel=1e-2)


class Unpadded(ExactDDPStrategy):
    """exact_ddp without its correction of the number of samples."""

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return super(ExactEvaluation, self).reduce(tensor, group, reduce_op)


def test_fault_2_floored_counts_make_a_constant_wrong() -> None:
    """PL 21859: with 3 and 2 samples Lightning's own reduction reads 1.25. Fails when upstream has mended it."""
    faulty = run_ranks(2, means, Unpadded(timeout=20), 1)[0]
    assert (faulty["constant"], faulty["value"]) == (1.25, 2.5)
    right = run_ranks(2, means, exact(), 1)[0]
    assert (right["constant"], right["value"]) == (1.0, 2.0)


# --- no exchange within the loop ---


class OnStep(LightningModule):
    """Logs on every step too, with sync_dist: a collective per batch in Lightning."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", batch[2].mean(), on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[2]))


def collectives(module: type[LightningModule], count: int, batch_size: int) -> tuple[int, dict[str, float]]:
    """Collectives of one evaluation, however torch.distributed is asked for them."""
    calls = []

    def counted(function: Any) -> Any:
        return lambda *args, **kwargs: (calls.append(function.__name__), function(*args, **kwargs))[1]

    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "broadcast_object_list"):
        setattr(dist, name, counted(getattr(dist, name)))
    metrics = evaluated("validate", module(), DataLoader(samples_of(count), batch_size), exact())
    return len(calls), metrics


@pytest.mark.parametrize("module", [Measured, OnStep])
def test_collectives_do_not_grow_with_batches(module: type[LightningModule]) -> None:
    few = run_ranks(2, collectives, module, 5, 4)
    many = run_ranks(2, collectives, module, 37, 1)
    assert few[0][0] == few[1][0] == many[0][0] == many[1][0]
    assert many[0][1]["value" if module is Measured else "value_epoch"] == 18.0


# --- state that a rank holds ---


class Normalised(LightningModule):
    """Running statistics that differ between ranks, as they do after training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)

    def on_validation_epoch_start(self) -> None:
        assert not self.norm.training

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.norm(batch[0]).mean(), sync_dist=True, batch_size=len(batch[0]))


def normalised(strategy: Any, count: int) -> float:
    module = Normalised()
    assert module.norm.running_mean is not None
    module.norm.running_mean.fill_(float(os.environ["RANK"]))
    return evaluated("validate", module, DataLoader(samples_of(count), 2), strategy)["mean"]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_fault_21_statistics_of_rank_0_serve_every_sample(count: int) -> None:
    alone = run_ranks(1, normalised, exact(), count)
    for size in (2, 3):
        assert run_ranks(size, normalised, exact(), count) == pytest.approx(alone * size, rel=1e-6)


class TrainedNorm(LightningModule):
    """BatchNorm that trains on other samples on each rank; tells whose statistics validation uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.norm(batch[0]).square().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.norm.running_mean[0]))  # type: ignore

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def statistics_in_fit(strategy: Any) -> list[float]:
    """The running mean in every batch of validation."""
    module = TrainedNorm()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
    data = DataLoader(samples_of(8), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data, data)
    return module.seen


def test_fault_21_in_fit() -> None:
    first, second = run_ranks(2, statistics_in_fit, exact())
    assert first == second
    assert len(set(first)) == 1


class UnlevelledStrategy(ExactDDPStrategy):
    """exact_ddp that does not level buffers before it evaluates."""

    def on_validation_start(self) -> None:
        self._eval_loaders = [self.trainer.val_dataloaders]


def test_statistics_differ_where_they_are_not_levelled() -> None:
    first, second = run_ranks(2, statistics_in_fit, UnlevelledStrategy(timeout=20))
    assert first != second


# --- metrics whose states are lists ---


class Lists(LightningModule):
    """RetrievalMRR keeps lists without a reduction: torchmetrics gathers them item by item."""

    def __init__(self) -> None:
        super().__init__()
        self.mrr = RetrievalMRR()
        self.boxes = ItemList()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, labels, values = batch
        self.mrr.update(logits[:, 0].sigmoid(), labels == 0, indexes=(values % 4).long())
        for value in values:
            self.boxes.update(value)
        self.log("mrr", self.mrr, batch_size=len(labels))  # type: ignore
        self.log("boxes", self.boxes, batch_size=len(labels))


class ItemList(Metric):
    """As detection metrics do it: an item a sample, of its own length; samples without anything are items too."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("items", default=[], dist_reduce_fx=None)

    def update(self, value: Tensor) -> None:
        self.items.append(value.expand(int(value) % 3, 4))  # type: ignore

    def compute(self) -> Tensor:
        return torch.stack([item.sum() for item in self.items]).sum()  # type: ignore


def listed(strategy: Any, count: int, batch_size: int) -> dict[str, float]:
    return evaluated("validate", Lists(), DataLoader(samples_of(count), batch_size), strategy)


@pytest.mark.parametrize(("count", "batch_size"), [(1, 1), (2, 2), (5, 1), (9, 2), (16, 3)])
def test_lists_of_unequal_lengths(count: int, batch_size: int) -> None:
    alone = run_ranks(1, listed, exact(), count, batch_size)[0]
    for measured in run_ranks(3, listed, exact(), count, batch_size):
        assert measured == pytest.approx(alone, rel=1e-6)


# --- several loaders, and steps that do not take the loader's number ---


class Several(LightningModule):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("value", batch[2].mean(), sync_dist=True, batch_size=len(batch[2]))
        self.log(f"sum{dataloader_idx}", batch[2].sum(), sync_dist=True, reduce_fx="sum", add_dataloader_idx=False)


def several() -> dict[str, float]:
    loaders = [DataLoader(samples_of(count), 2) for count in (7, 1, 2)]
    return evaluated("validate", Several(), loaders, exact())


def test_several_loaders() -> None:
    """Ranks have no sample of some loaders, and some of others."""
    means = {f"value/dataloader_idx_{i}": mean for i, mean in enumerate((3.0, 0.0, 0.5))}
    for measured in run_ranks(3, several):
        assert measured == means | {"sum0": 21.0, "sum1": 0.0, "sum2": 1.0}


class Gathering(LightningModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        values = self.all_gather(batch[2])
        assert isinstance(values, Tensor)
        self.log("mean", values.mean(), batch_size=values.numel(), sync_dist=True)


def gathered(count: int) -> float | str:
    try:
        return evaluated("validate", Gathering(), DataLoader(samples_of(count), 1), exact()).get("mean", -1.0)
    except ConfigError as error:
        return str(error)


def test_exchange_within_a_step_is_refused_where_ranks_have_unequal_numbers_of_batches() -> None:
    assert run_ranks(2, gathered, 4)[0] == 1.5
    for message in run_ranks(2, gathered, 5):
        assert "on_validation_epoch_end" in message


class Sometimes(LightningModule):
    """Logs a key only with some samples, or in an order that depends on them."""

    def __init__(self, swap: bool) -> None:
        super().__init__()
        self.swap = swap

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        log = partial(self.log, batch_size=1, sync_dist=True)
        rare = bool((batch[2] == 0).any())
        for key in ("a", "b") if rare or not self.swap else ("b", "a"):
            if rare or self.swap or key == "a":
                log(key, batch[2].max())
        self.log("own", 1.0, rank_zero_only=True, batch_size=1)


def sometimes(swap: bool) -> str:
    try:
        evaluated("validate", Sometimes(swap), DataLoader(samples_of(5), 2), exact())
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("swap", "seen"), [(False, "[['a', 'b'], ['a']]"), (True, "[['a', 'b'], ['b', 'a']]")])
def test_keys_that_differ_between_ranks_are_named_before_ranks_wait_for_one_another(swap: bool, seen: str) -> None:
    for message in run_ranks(2, sometimes, swap):
        assert "what validation_step logged" in message
        assert seen in message


class Together(LightningModule):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        for name, part in batch.items():
            if part is not None:
                self.log(name, part[2].mean(), sync_dist=True, batch_size=len(part[2]))


def together(counts: tuple[int, int]) -> Any:
    loaders = {str(count): DataLoader(samples_of(count), 1) for count in counts}
    try:
        return evaluated("validate", Together(), CombinedLoader(loaders, "max_size"), exact())
    except ConfigError as error:
        return str(error)


def test_combined_loaders() -> None:
    assert run_ranks(2, together, (5, 2)) == [{"5": 2.0, "2": 0.5}] * 2
    for message in run_ranks(2, together, (5, 1)):
        assert "mode 'max_size' has a part of 1 samples for 2 processes" in message


def stages() -> list[float]:
    """One trainer, one module, three stages."""
    module, trainer = Measured(), quiet_trainer(strategy=exact(), max_epochs=1, num_sanity_val_steps=2)
    means = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No (positive|negative) samples")
        trainer.fit(module, DataLoader(samples_of(4), 2), DataLoader(samples_of(1), 2))
        means.append(float(trainer.callback_metrics["value"]))
        for stage, count in ((trainer.validate, 7), (trainer.test, 3)):
            stage(module, DataLoader(samples_of(count), 2), verbose=False)
            means.append(float(trainer.callback_metrics["value"]))
    return means


def test_stages_after_one_another() -> None:
    assert run_ranks(2, stages) == [[0.0, 3.0, 1.0]] * 2


# --- what callbacks act upon ---


class Monitored(LightningModule):
    """A validation value that a rank alone would see otherwise: one goes up where the other goes down."""

    def __init__(self, sync: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(CLASSES, 1)
        self.sync, self.rates = sync, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        sign = 1.0 - 2.0 * self.global_rank if self.trainer.world_size > 1 else 1.0
        value = sign * self.current_epoch + (2 if self.sync else self.global_rank)
        self.log("score", value, sync_dist=self.sync, batch_size=len(batch[2]))

    def on_train_epoch_end(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "score"}}


def acted(folder: Any, strategy: Any, sync: bool, guard: bool) -> dict[str, Any]:
    module = Monitored(sync)
    saved = ModelCheckpoint(folder, monitor="score", mode="min", filename="{epoch}")
    stop = EarlyStopping("score", patience=2)
    trainer = quiet_trainer(
        strategy=strategy,
        max_epochs=4,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[saved, stop],
    )
    if not guard:
        kept = [c for c in trainer.callbacks if not isinstance(c, MonitoredValues | Replicas)]  # type: ignore
        trainer.callbacks = kept  # type: ignore
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
        trainer.fit(module, DataLoader(samples_of(4), 2), DataLoader(samples_of(5), 2))
    return {
        "best": float(saved.best_model_score),  # type: ignore
        "epoch": saved.best_model_path.rsplit("/")[-1],
        "stopped": trainer.current_epoch,
        "rates": module.rates,
        "early": float(stop.best_score),
    }


def test_fault_22_callbacks_read_the_global_value(tmp_path: Any) -> None:
    """Rank 0 has 3 samples of +epoch, rank 1 has 2 of -epoch: epoch/5 + 2 rises, so the first epoch is the best."""
    first, second = run_ranks(2, acted, tmp_path, exact(), True, True)
    assert first == second
    assert (first["best"], first["epoch"], first["stopped"]) == (2.0, "epoch=0.ckpt", 3)
    assert first["early"] == 2.0
    assert first["rates"] == [1.0, 1.0, 0.5]


def test_a_monitored_value_that_differs_is_an_error_on_all_ranks(tmp_path: Any) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, acted, tmp_path, exact(), False, True)
    message = str(failed.value)
    assert message.count("ConfigError: 'score'") == 2
    for part in ("rank 0: 0.0, rank 1: 1.0", "sync_dist=True", "torchmetrics"):
        assert part in message
    assert not list(tmp_path.iterdir())  # it was found before ModelCheckpoint acted


def test_without_the_guard_ranks_act_on_different_values(tmp_path: Any) -> None:
    first, second = run_ranks(2, acted, tmp_path, exact(), False, False)
    assert first["best"] != second["best"]


class TrainMonitored(Monitored):
    """The monitored value comes from training, logged where the module's own epoch ends."""

    validation_step = None  # type: ignore

    def on_train_epoch_end(self) -> None:
        self.log("score", float(self.global_rank))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def acted_in_training(folder: Any) -> str:
    trainer = quiet_trainer(
        strategy=exact(),
        max_epochs=2,
        enable_checkpointing=True,
        limit_val_batches=0,
        callbacks=[ModelCheckpoint(folder, monitor="score", filename="best")],
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
            trainer.fit(TrainMonitored(), DataLoader(samples_of(4), 2))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_monitored_training_value(tmp_path: Any) -> None:
    for message in run_ranks(2, acted_in_training, tmp_path):
        assert "rank 0: 0.0, rank 1: 1.0" in message
