"""L3 in prediction: one file, in the dataset's order, every sample once, on any number of processes."""

import csv
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler

from lit_dp.engine.pieces import Record, merge
from lit_dp.engine.predictions import PredictionFile
from lit_dp.errors import ConfigError, RunError
from tests.ranks import run_ranks
from tests.training import quiet_trainer


class Numbers(Dataset):
    """Sample i is i / 3, whose decimal digits do not end."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index / 3)


class Stream(IterableDataset):
    def shard(self, index: int, count: int) -> range:
        return range(index, 8, count)

    def __iter__(self) -> Any:
        return iter(range(8))


def columns(batch: Tensor) -> Any:
    return {"third": batch, "whole": (batch * 3).round().long(), "small": batch < 1}


def rows(batch: Tensor) -> Any:
    return {"pair": torch.stack((batch, -batch), 1), "text": [f"{x:.2f}" for x in batch], "both": (batch, batch * 2)}


def ragged(batch: Tensor) -> Any:
    return batch[:, None].repeat(1, len(batch))


def in_views(batch: Tensor) -> Any:
    return {"view": batch[:, None].repeat(1, 1000)[:, 0]}


class Predictor(LightningModule):
    def __init__(self, returns: Callable[[Tensor], Any] = columns) -> None:
        super().__init__()
        self.returns = returns

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.returns(batch)


class Before(Callback):
    """Does something to the pieces on rank 0, between the last batch and the merge. Stands before PredictionFile."""

    def __init__(self, spoil: Callable[[Path], Any]) -> None:
        self.spoil = spoil

    def on_predict_end(self, trainer: Any, pl_module: LightningModule) -> None:
        writer = next(c for c in trainer.callbacks if isinstance(c, PredictionFile))
        for piece in writer._open:
            piece.close()
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            self.spoil(writer._pieces)


def predict(
    folder: Path,
    loaders: Any,
    returns: Callable[[Tensor], Any] = columns,
    spoil: Callable[[Path], Any] | None = None,
    world_size: int = 2,
    **options: Any,
) -> list[Path]:
    """On one rank: the files that rank 0 names, which must be the same on all."""
    before = [Before(spoil)] if spoil else []
    writer = PredictionFile(folder)
    trainer = quiet_trainer(devices=world_size, callbacks=[*before, writer], **options)
    trainer.predict(Predictor(returns), loaders, return_predictions=False)
    return writer.files


def table(file: Path) -> list[list[str]]:
    with file.open(newline="") as lines:
        return list(csv.reader(lines))


def right(indices: Any) -> list[list[str]]:
    """The table of `columns`, with float32 values as Python writes them."""
    thirds = [torch.tensor(i / 3) for i in indices]
    values = [[str(i), repr(x.item()), str(i), str(bool(x < 1))] for i, x in zip(indices, thirds, strict=True)]
    return [["index", "third", "whole", "small"], *values]


def shapes(folder: Path, world_size: int) -> None:
    """All numbers of samples and batch sizes in one start of the ranks."""
    for samples in (1, 2, 3, 5, 10):
        for batch_size in (1, 2, 4):
            here = folder / f"{samples}-{batch_size}"
            (file,) = predict(here, DataLoader(Numbers(samples), batch_size), world_size=world_size)
            assert file == here / "predictions.csv"
            assert table(file) == right(range(samples))
            assert [path.name for path in here.iterdir()] == ["predictions.csv"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_sample_once_in_the_datasets_order(world_size: int, tmp_path: Path) -> None:
    checked = run_ranks(world_size, shapes, tmp_path, world_size)
    assert len(checked) == world_size  # each has compared every file; a difference is RankFailed


@pytest.mark.parametrize("strategy", ["exact_ddp", "ddp"])
def test_loader_workers_change_nothing(strategy: str, tmp_path: Path) -> None:
    loader = DataLoader(Numbers(7), 2, num_workers=2)
    run_ranks(2, run_with, tmp_path, loader, {"strategy": strategy})
    assert table(tmp_path / "predictions.csv") == right(range(7))


def run_with(folder: Path, loaders: Any, options: dict[str, Any]) -> list[Path]:
    return predict(folder, loaders, **options)


def kinds_of_loaders(folder: Path) -> int:
    """More than one rank reads each of these, in any order, and some ranks nothing; how many were compared."""
    data = Numbers(9)
    cases = {
        "drop_last": (DataLoader(data, 4, drop_last=True), range(9)),
        "shuffled": (DataLoader(data, 2, shuffle=True), range(9)),
        "subset": (DataLoader(data, 2, sampler=SubsetRandomSampler([8, 3, 5])), [3, 5, 8]),
        "reversed": (DataLoader(data, 2, sampler=range(8, -1, -1)), range(9)),
        "batches": (DataLoader(data, batch_sampler=BatchSampler(range(9), 4, False)), range(9)),
        "single": (DataLoader(data, batch_size=None), range(9)),
        "repeats": (DataLoader(data, 2, sampler=[1, 4, 1]), [1, 1, 4]),
    }
    for name, (loader, indices) in cases.items():
        (file,) = predict(folder / name, loader)
        assert table(file) == right(indices), name
    (file,) = predict(folder / "limit", DataLoader(data, 2), limit_predict_batches=1)
    assert table(file) == right(range(4))
    return len(cases) + 1


@pytest.mark.filterwarnings("ignore:Your `predict_dataloader`.s sampler has shuffling")
@pytest.mark.filterwarnings("ignore:You are using a custom batch sampler")
def test_any_loader(tmp_path: Path) -> None:
    assert run_ranks(2, kinds_of_loaders, tmp_path) == [8, 8]


def kinds_of_predictions(folder: Path) -> int:
    """How many kinds were compared."""
    loader = DataLoader(Numbers(5), 2)
    thirds = torch.stack([torch.tensor(i / 3) for i in range(5)])
    (file,) = predict(folder / "rows", loader, rows)
    assert file.name == "predictions.pt"
    found = torch.load(file, weights_only=True)
    assert found["index"].tolist() == [0, 1, 2, 3, 4]
    assert found["prediction"]["pair"].equal(torch.stack((thirds, -thirds), 1))
    assert found["prediction"]["text"] == ["0.00", "0.33", "0.67", "1.00", "1.33"]
    assert [part.equal(thirds * (1 + i)) for i, part in enumerate(found["prediction"]["both"])] == [True, True]
    (file,) = predict(folder / "ragged", loader, ragged)  # rank 0 has samples 0, 2 and then 4, rank 1 has 1, 3
    assert [len(row) for row in torch.load(file)["prediction"]] == [2, 2, 2, 2, 1]
    (file,) = predict(folder / "single", DataLoader(Numbers(5), batch_size=None), lambda sample: sample.repeat(3))
    assert torch.load(file)["prediction"].equal(thirds[:, None].repeat(1, 3))
    assert predict(folder / "nothing", loader, lambda _: None) == []
    assert list((folder / "nothing").iterdir()) == []
    return 4


@pytest.mark.filterwarnings("ignore:predict returned None")
def test_any_prediction(tmp_path: Path) -> None:
    assert run_ranks(2, kinds_of_predictions, tmp_path) == [4, 4]


def test_a_file_a_loader(tmp_path: Path) -> None:
    files = run_ranks(2, run_with, tmp_path, [DataLoader(Numbers(3), 2), DataLoader(Numbers(1), 2)], {})
    assert files == [[tmp_path / "predictions-0.csv", tmp_path / "predictions-1.csv"]] * 2
    assert [table(file) for file in files[0]] == [right(range(3)), right(range(1))]


def test_the_run_folder_is_the_default(tmp_path: Path) -> None:
    writer = PredictionFile()
    quiet_trainer(devices=1, default_root_dir=tmp_path, callbacks=[writer]).predict(
        Predictor(), DataLoader(Numbers(2)), return_predictions=False
    )
    assert writer.files == [tmp_path / "predictions.csv"]


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.iterdir()]


def test_a_piece_holds_the_predictions_alone(tmp_path: Path) -> None:
    seen: list[int] = []
    predict(tmp_path, DataLoader(Numbers(4), 4), in_views, lambda pieces: seen.extend(sizes(pieces)), world_size=1)
    assert 0 < seen[0] < 2000  # a pickled view would bring 4,000 floats


def test_lightnings_own_order_is_by_rank() -> None:
    """FAULTS 4: what `predict` returns is striped: every rank has its own part, and nobody the whole."""
    mine = run_ranks(2, returned)
    assert [torch.cat(batches).mul(3).round().int().tolist() for batches in mine] == [[0, 2, 4], [1, 3]]


def returned() -> Any:
    trainer = quiet_trainer(devices=2, strategy="ddp")
    return trainer.predict(Predictor(lambda batch: batch), DataLoader(Numbers(5), 2))


# --- what goes wrong is found, on every rank, and no file is written ---


def refused(folder: Path, loaders: Any, options: dict[str, Any]) -> tuple[str, str, list[str]]:
    try:
        predict(folder, loaders, **options)
    except (ConfigError, RunError) as error:
        return type(error).__name__, str(error), [path.name for path in folder.glob("*")]
    raise AssertionError("nothing was found")


def lose(pieces: Path) -> None:
    (pieces / "rank-1-loader-0").unlink()


def tear(pieces: Path) -> None:
    piece = pieces / "rank-1-loader-0"
    piece.write_bytes(piece.read_bytes()[:-20])


def copy_stale(pieces: Path) -> None:
    shutil.copy(pieces / "rank-0-loader-0", pieces / "rank-1-loader-0")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose, "predictions of 5 of 10 samples are missing (samples 1, 3, 5, 7, 9): no file"),
        (tear, "predictions of 1 of 10 samples are missing (samples 9): no file"),
        (copy_stale, "predictions of 5 of 10 samples are missing (samples 1, 3, 5, 7, 9): no file"),
    ],
)
def test_a_spoilt_piece_is_found(spoil: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    for kind, text, left in run_ranks(2, refused, tmp_path, DataLoader(Numbers(10), 2), {"spoil": spoil}):
        assert kind == "RunError"
        assert message in text
        assert left == []


def test_a_sample_that_is_there_twice_is_found(tmp_path: Path) -> None:
    def again(pieces: Path) -> None:
        piece = pieces / "rank-1-loader-0"
        piece.write_bytes(piece.read_bytes() * 2)

    answers = run_ranks(2, refused, tmp_path, DataLoader(Numbers(4), 2), {"spoil": again})
    assert "predictions of 2 of 4 samples are there too often (samples 1, 3)" in answers[0][1]


def finish(folder: Path) -> None:
    predict(folder, DataLoader(Numbers(7), 2))


def crash(folder: Path) -> None:
    """A run of three ranks is killed before the merge: its pieces stay."""

    def keep(pieces: Path) -> None:
        shutil.copytree(pieces, folder / ".predictions-killed")

    predict(folder, DataLoader(Numbers(9), 2), spoil=keep, world_size=3)


def test_pieces_of_an_earlier_run_do_not_leak_in(tmp_path: Path) -> None:
    run_ranks(3, crash, tmp_path)
    assert len(list((tmp_path / ".predictions-killed").iterdir())) == 3
    run_ranks(2, finish, tmp_path)
    assert table(tmp_path / "predictions.csv") == right(range(7))


def test_a_writer_that_takes_all_pieces_in_a_fixed_folder_is_told_apart(tmp_path: Path) -> None:
    """The faulty way: a folder that two runs share, and whatever pieces lie there."""
    for world_size in (3, 2):
        for rank in range(world_size):
            indices = torch.arange(7)[rank::world_size]
            with (tmp_path / f"rank-{rank}").open("wb") as piece:
                pickle.dump(Record(indices, {"x": indices.float()}), piece)
    with pytest.raises(RunError, match=r"2 of 7 samples are there too often \(samples 2, 5\)"):
        merge(sorted(tmp_path.glob("rank-*")), torch.arange(7), tmp_path / "predictions")
    with pytest.raises(RunError, match="there too often"):
        merge(sorted(tmp_path.glob("rank-*"))[:2] * 2, torch.arange(7), tmp_path / "predictions")


def test_an_earlier_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    (tmp_path / "predictions.csv").write_text("earlier")
    run_ranks(2, refused, tmp_path, DataLoader(Numbers(10), 2), {"spoil": lose})
    assert (tmp_path / "predictions.csv").read_text() == "earlier"


@pytest.mark.parametrize(
    ("loader", "returns", "kind", "message"),
    [
        (DataLoader(Numbers(4), 2), lambda b: {"x": b.sum()}, "RunError", "no rows for a batch of 2 samples"),
        (DataLoader(Numbers(4), 2), lambda b: b[:1], "RunError", "1 rows for a batch of 2 samples"),
        (DataLoader(Numbers(4), 2), lambda b: {"index": b}, "RunError", "rename it"),
        (
            DataLoader(Stream(), 2),
            columns,
            "ConfigError",
            "for ShardedStream does not tell which samples a batch holds",
        ),
    ],
)
def test_what_has_no_rows_or_no_order_is_refused(
    loader: DataLoader, returns: Any, kind: str, message: str, tmp_path: Path
) -> None:
    for found in run_ranks(2, refused, tmp_path, loader, {"returns": returns}):
        assert found[0] == kind
        assert message in found[1]
        assert found[2] == []


def test_a_failing_step_leaves_no_pieces(tmp_path: Path) -> None:
    def fails(batch: Tensor) -> Any:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        predict(tmp_path, DataLoader(Numbers(4)), fails, world_size=1)
    assert list(tmp_path.iterdir()) == []
