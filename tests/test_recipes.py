import io
import math

import pytest
import torch

from lit_dp.errors import ConfigError
from lit_dp.recipes import WarmupCosine


def optimizer(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def rates(schedule: WarmupCosine, calls: int) -> list[float]:
    """The first group's learning rate now and after each of `calls` steps."""
    seen = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(calls):
        schedule.optimizer.step()
        schedule.step()
        seen.append(schedule.optimizer.param_groups[0]["lr"])
    return seen


def test_it_rises_in_a_line_and_falls_as_half_a_cosine() -> None:
    schedule = WarmupCosine(optimizer(2.0), total=8, warmup=4, start=0.5)
    half = math.sqrt(0.5)
    assert rates(schedule, 8) == pytest.approx([1, 1.25, 1.5, 1.75, 2, 1 + half, 1, 1 - half, 0], abs=1e-15)


def test_without_warm_up_it_begins_at_the_full_rate() -> None:
    assert rates(WarmupCosine(optimizer(0.1), total=2), 2) == pytest.approx([0.1, 0.05, 0.0], abs=1e-15)


def test_it_stays_at_exactly_zero_after_the_end() -> None:
    assert rates(WarmupCosine(optimizer(0.1), total=3, warmup=1), 6)[3:] == [0.0] * 4


def test_it_is_torchs_cosine_from_the_end_of_the_warm_up() -> None:
    ours = WarmupCosine(optimizer(0.3), total=50, warmup=10)
    torchs = optimizer(0.3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(torchs, T_max=40)
    expected = [0.3]
    for _ in range(40):
        torchs.step()
        cosine.step()
        expected.append(torchs.param_groups[0]["lr"])
    assert rates(ours, 50)[10:] == pytest.approx(expected, abs=1e-12)


def test_groups_keep_their_ratio() -> None:
    two = optimizer(1.0, 0.1)
    schedule = WarmupCosine(two, total=9, warmup=3)
    for _ in range(8):
        first, second = schedule.get_last_lr()
        assert second == pytest.approx(first / 10, rel=1e-12)
        two.step()
        schedule.step()


@pytest.mark.parametrize("stop", [1, 3, 4, 7, 12])
def test_resume_has_the_bits_of_a_run_that_was_not_stopped(stop: int) -> None:
    whole = rates(WarmupCosine(optimizer(0.7), total=11, warmup=4), 12)
    first = WarmupCosine(optimizer(0.7), total=11, warmup=4)
    assert rates(first, stop) == whole[: stop + 1]
    file = io.BytesIO()
    torch.save({"schedule": first.state_dict(), "optimizer": first.optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    # Built with another length: what was saved counts.
    resumed = WarmupCosine(optimizer(0.7), total=99)
    resumed.optimizer.load_state_dict(state["optimizer"])
    resumed.load_state_dict(state["schedule"])
    assert rates(resumed, 12 - stop) == whole[stop:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total": 0}, "total 0"),
        ({"total": 5, "warmup": 5}, "warmup is 5"),
        ({"total": 5, "warmup": -1}, "warmup is -1"),
        ({"total": 5, "start": 1.5}, "start is 1.5"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WarmupCosine(optimizer(0.1), **arguments)
