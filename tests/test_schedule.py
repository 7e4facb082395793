"""Laws L2 and L3 on paper: the schedule against torch's own sampler, over thousands of shapes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from lit_dp.engine.schedule import Schedule, evaluation_indices, placement

Draw = Callable[[Schedule, int, int, int], list[int]]  # (schedule, epoch, step, virtual rank) -> samples
Batches = dict[tuple[int, int], list[int]]  # (step, virtual rank) -> samples

TAILS = ("pad", "drop", "exact")
EPOCHS = st.integers(0, 50)
thousand = settings(max_examples=1000, deadline=None)


@st.composite
def schedules(draw: st.DrawFn, max_samples: int = 150) -> Schedule:
    ranks, batch = draw(st.integers(1, 8)), draw(st.integers(1, 7))
    return Schedule(
        samples=draw(st.integers(1, max_samples)),
        global_batch=ranks * batch,
        virtual_ranks=ranks,
        seed=draw(st.integers(0, 2**32 - 1)),
        shuffle=draw(st.booleans()),
        tail=draw(st.sampled_from(TAILS)),
    )


def honest(schedule: Schedule, epoch: int, step: int, rank: int) -> list[int]:
    return schedule.indices(epoch, step, rank).tolist()


def batches(draw: Draw, schedule: Schedule, epoch: int) -> Batches:
    grid = itertools.product(range(schedule.steps_per_epoch), range(schedule.virtual_ranks))
    return {(step, rank): draw(schedule, epoch, step, rank) for step, rank in grid}


def torch_loader(
    schedule: Schedule, epoch: int, ranks: int, rank: int, *, sampler_drops: bool, loader_drops: bool
) -> list[list[int]]:
    """What rank `rank` of a raw DDP run with `ranks` processes reads in an epoch."""
    data: Any = range(schedule.samples)
    sampler = DistributedSampler(
        data, ranks, rank, shuffle=schedule.shuffle, seed=schedule.seed, drop_last=sampler_drops
    )
    sampler.set_epoch(epoch)
    batch = schedule.global_batch // ranks
    return list(DataLoader(data, batch, sampler=sampler, drop_last=loader_drops, collate_fn=list))


def torch_batches(schedule: Schedule, epoch: int) -> Batches:
    """The same from torch alone. For "exact", where it has no equal, one process's batches dealt card by card."""
    if schedule.tail == "exact":
        one = torch_loader(schedule, epoch, 1, 0, sampler_drops=False, loader_drops=False)
        ranks = range(schedule.virtual_ranks)
        return {(step, v): batch[v :: schedule.virtual_ranks] for step, batch in enumerate(one) for v in ranks}
    drop = schedule.tail == "drop"
    return {
        (step, rank): batch
        for rank in range(schedule.virtual_ranks)
        for step, batch in enumerate(
            torch_loader(schedule, epoch, schedule.virtual_ranks, rank, sampler_drops=drop, loader_drops=drop)
        )
    }


def check_accounting(found: Batches, schedule: Schedule) -> None:
    """L3: every sample once, but for the repeats and the losses that the schedule declares."""
    used = Counter(itertools.chain.from_iterable(found.values()))
    assert set(used) <= set(range(schedule.samples))
    assert schedule.samples - len(used) == schedule.dropped
    assert used.total() - len(used) == schedule.padded
    assert max(used.values(), default=0) - min(used.values(), default=0) <= 1  # repeats are spread


def check_counts(found: Batches, schedule: Schedule) -> None:
    for step in range(schedule.steps_per_epoch):
        counts = [len(found[step, rank]) for rank in range(schedule.virtual_ranks)]
        last = step == schedule.steps_per_epoch - 1
        assert counts == schedule.step_counts(step)
        assert counts == sorted(counts, reverse=True)
        assert counts[0] - counts[-1] <= (last and schedule.tail == "exact")
        assert sum(counts) > 0
        if not last or schedule.tail == "drop":
            assert set(counts) == {schedule.per_rank_batch}


def check_laws(draw: Draw, schedule: Schedule, epoch: int) -> None:
    found = batches(draw, schedule, epoch)
    check_accounting(found, schedule)
    check_counts(found, schedule)
    assert found == torch_batches(schedule, epoch)


@given(schedules(), EPOCHS)
@thousand
def test_L3_every_sample_once_and_as_torch_deals_them(schedule: Schedule, epoch: int) -> None:
    check_laws(honest, schedule, epoch)


@pytest.mark.parametrize("tail", TAILS)
def test_the_laws_hold_for_every_small_shape(tail: Any) -> None:
    """Datasets shorter than the ranks, than one step, and just around their multiples."""
    for samples, ranks, batch in itertools.product(range(1, 41), range(1, 5), range(1, 6)):
        check_laws(honest, Schedule(samples, ranks * batch, ranks, seed=7, tail=tail), epoch=3)


FAULTS: dict[str, Draw] = {
    "a seed per rank": lambda s, e, i, v: honest(replace(s, seed=s.seed + v), e, i, v),
    "set_epoch forgotten": lambda s, e, i, v: honest(s, 0, i, v),
    "blocks, not stripes": lambda s, e, i, v: (
        s.order(e)[i * s.global_batch :][: s.global_batch].tensor_split(s.virtual_ranks)[v].tolist()
    ),
    "every rank reads all": lambda s, e, i, v: honest(s, e, i, 0),
    "the last step lost": lambda s, e, i, v: honest(s, e, i, v) if i < s.steps_per_epoch - 1 else [],
    "steps exchanged": lambda s, e, i, v: honest(s, e, s.steps_per_epoch - 1 - i, v),
    "shuffled though asked not to": lambda s, e, i, v: honest(replace(s, shuffle=True), e, i, v),
    "one sample read twice": lambda s, e, i, v: honest(s, e, i, v)[:-1] + honest(s, e, i, v)[:1],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_laws_have_teeth(fault: str) -> None:
    """The property above, on a faulty schedule, must fail."""

    @given(schedules(), EPOCHS)
    @settings(thousand, database=None, phases=[Phase.generate], report_multiple_bugs=False)
    def laws_hold(schedule: Schedule, epoch: int) -> None:
        check_laws(FAULTS[fault], schedule, epoch)

    with pytest.raises(AssertionError):
        laws_hold()


@given(schedules(), EPOCHS)
@settings(thousand, max_examples=400)
def test_L2_the_number_of_processes_changes_nothing(schedule: Schedule, epoch: int) -> None:
    expected = batches(honest, schedule, epoch)
    ranks = schedule.virtual_ranks
    for processes in (w for w in range(1, ranks + 1) if ranks % w == 0):
        places = [placement(ranks, processes, process) for process in range(processes)]
        assert list(itertools.chain(*places)) == list(range(ranks))
        found = [(s, v, i.tolist()) for place in places for s, v, i in schedule.iterate(epoch, place)]
        assert len(found) == len(expected)
        assert {(step, rank): indices for step, rank, indices in found} == expected


@given(schedules(), EPOCHS, st.data())
@settings(thousand, max_examples=400)
def test_L4_an_epoch_begun_at_a_step_is_the_rest_of_the_epoch(
    schedule: Schedule, epoch: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, schedule.steps_per_epoch))
    everything = range(schedule.virtual_ranks)
    whole = [(s, v, i.tolist()) for s, v, i in schedule.iterate(epoch, everything)]
    rest = [(s, v, i.tolist()) for s, v, i in schedule.iterate(epoch, everything, start_step=start)]
    assert rest == whole[start * schedule.virtual_ranks :]
    assert [(s, v) for s, v, _ in whole] == list(itertools.product(range(schedule.steps_per_epoch), everything))


@given(schedules(), st.lists(st.integers(0, 9), max_size=60))
@settings(thousand, max_examples=500)
def test_a_custom_draw_of_any_length_is_striped_by_the_same_rule(schedule: Schedule, drawn: list[int]) -> None:
    """WeightedRandomSampler and friends: repeats, other lengths, nothing at all. Striped positions, looked up."""
    draw = torch.tensor(drawn, dtype=torch.int64)
    found = list(schedule.iterate(0, range(schedule.virtual_ranks), draw=draw))
    if not drawn:
        assert found == []
        return
    positions = replace(schedule, samples=len(drawn), shuffle=False)
    expected = [(s, v, draw[i].tolist()) for s, v, i in positions.iterate(0, range(schedule.virtual_ranks))]
    assert [(s, v, i.tolist()) for s, v, i in found] == expected
    assert all(schedule.split(draw, s, v).tolist() == i for s, v, i in expected)
    assert torch.equal(schedule.complete(schedule.complete(draw)), schedule.complete(draw))


@given(schedules(), EPOCHS)
@settings(thousand, max_examples=500)
def test_drop_is_one_process_and_the_mixture_differs_where_it_is_said_to(schedule: Schedule, epoch: int) -> None:
    """A padding sampler before a dropping loader, as Lightning's `ddp` builds it, adds at most one padded step."""
    drop = replace(schedule, tail="drop")
    ranks, batch = drop.virtual_ranks, drop.global_batch
    one_process = torch_loader(drop, epoch, 1, 0, sampler_drops=True, loader_drops=True)
    assert drop.order(epoch).tolist() == list(itertools.chain.from_iterable(one_process))
    mixtures = [torch_loader(drop, epoch, ranks, v, sampler_drops=False, loader_drops=True) for v in range(ranks)]
    for rank, mixture in enumerate(mixtures):
        own = [indices.tolist() for _, _, indices in drop.iterate(epoch, range(rank, rank + 1))]
        assert mixture[: len(own)] == own
        assert len(mixture) - len(own) == (drop.samples % batch > batch - ranks)


@given(st.integers(0, 200), st.integers(1, 12))
@thousand
def test_L3_evaluation_deals_each_sample_once_and_pads_nothing(samples: int, processes: int) -> None:
    shares = [evaluation_indices(samples, processes, process) for process in range(processes)]
    assert sorted(itertools.chain(*shares)) == list(range(samples))
    assert all(i % processes == process for process, share in enumerate(shares) for i in share)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("tail", TAILS)
def test_L6_an_order_is_a_function_of_seed_plus_epoch_alone(tail: Any) -> None:
    schedule = Schedule(1000, 64, 8, seed=3, tail=tail)
    orders = [tuple(schedule.order(epoch).tolist()) for epoch in range(20)]
    assert len(set(orders)) == 20
    torch.manual_seed(99)  # the global generator is neither read
    before = torch.get_rng_state()
    assert [tuple(schedule.order(epoch).tolist()) for epoch in reversed(range(20))] == orders[::-1]
    assert torch.equal(torch.get_rng_state(), before)  # nor moved
    assert tuple(replace(schedule, seed=5).order(1).tolist()) == orders[3]
    ordered = replace(schedule, shuffle=False)
    assert torch.equal(ordered.order(0), ordered.order(7))
    assert schedule.order(0).dtype == torch.int64


def test_by_hand() -> None:
    """10 samples in order, 2 ranks, 4 a step; then a dataset shorter than its ranks."""
    deal = Schedule(10, 4, 2, shuffle=False)
    assert [deal.indices(0, step, 1).tolist() for step in range(3)] == [[1, 3], [5, 7], [9]]
    assert replace(deal, tail="drop").dropped == 2
    assert replace(deal, samples=9).padded == 1
    assert replace(deal, samples=9, tail="exact").step_counts(2) == [1, 0]
    assert Schedule(3, 8, 8, shuffle=False).order(0).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert Schedule(3, 8, 8, tail="drop").steps_per_epoch == 0


def test_an_epoch_is_shuffled_once_and_batches_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *a, **k: calls.append(a) or randperm(*a, **k))
    found = list(Schedule(100_000, 64, 8).iterate(0, placement(8, 4, 1)))
    assert len(calls) == 1
    assert len(found) == 2 * 1563
    assert {i.untyped_storage().nbytes() for _, _, i in found} == {8 * 8, 4 * 8}  # not the epoch's 800 kB


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Schedule(0, 8, 2), r"samples=0 .*dataset of 1 or more"),
        (lambda: Schedule(9, 100, 8), r"global_batch=100 .*virtual_ranks=8: set global_batch to 96 or 104\."),
        (lambda: Schedule(9, 3, 8), r"global_batch=3 .*set global_batch to 8\."),
        (lambda: Schedule(9, 0, 4), r"set global_batch to 4\."),
        (lambda: Schedule(9, 8, 0), "virtual_ranks=0: set it to 1 or more"),
        (lambda: Schedule(9, 8, 2, tail="padd"), "'pad', 'drop', 'exact'"),  # pyright: ignore[reportArgumentType]
        (lambda: Schedule(9, 4, 2).order(-1), "epoch=-1: epochs are counted from 0"),
        (lambda: Schedule(9, 4, 2).indices(0, 7, 0), r"step=7: an epoch has 3 steps, .* divmod\(step_of_the_run, 3\)"),
        (lambda: Schedule(9, 4, 2).step_counts(-1), "step=-1: an epoch has 3 steps"),
        (lambda: Schedule(3, 4, 2, tail="drop").indices(0, 0, 0), "0 steps.* a smaller global_batch, or another tail"),
        (lambda: Schedule(9, 4, 2).indices(0, 0, 2), "Virtual rank 2 does not exist: choose 0 to 1"),
        (lambda: Schedule(9, 4, 2).iterate(0, range(3)), "Virtual rank 2 does not exist"),
        (lambda: Schedule(9, 4, 2).iterate(0, range(2), 4), "start_step=4: an epoch has 3 steps; start at 0 to 3"),
        (lambda: placement(6, 4, 0), "set virtual_ranks to 4 or 8, or start 1, 2, 3, 6 processes"),
        (lambda: placement(8, 4, 4), "process=4 of processes=4"),
        (lambda: evaluation_indices(-1, 2, 0), "samples=-1: give the length"),
    ],
)
def test_errors_say_what_to_type_instead(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
