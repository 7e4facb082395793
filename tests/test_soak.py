"""The soak (laws L3, L4): `pytest -m soak` kills one training 300 times, and resizes it, and spoils its checkpoints."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from lit_dp.engine.checkpoint_files import newest
from tests.killing import Training, end, kill_at_random, live

KILLS = int(os.environ.get("SOAK_KILLS", "300"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGTERM,)
PROCESSES = (1, 2, 4, 8)
SPOILT = 0.05
"""How often the newest checkpoint is truncated, or has a byte of it flipped, between two lives."""
TRAINING = Training(virtual_ranks=8, samples=94, epochs=max(2, KILLS // 2), pace=0.004)
"""6 steps an epoch; the kills are over before it is."""


def spoil(draw: random.Random, root: Path) -> str:
    """What was done to the newest checkpoint."""
    path = newest(root / "checkpoints")[0]
    if path is None or draw.random() >= SPOILT:
        return ""
    data, place = Path(path).read_bytes(), draw.random()
    at = int(place * len(data))
    if draw.random() < 0.5:
        Path(path).write_bytes(data[:at])
        return "truncated"
    Path(path).write_bytes(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
    return "flipped"


@pytest.mark.soak
def test_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw, begun = random.Random(SEED), time.monotonic()
    codes, sizes, spoilt = Counter[int](), Counter[int](), Counter[str]()
    for number in range(KILLS):
        ranks = draw.choice(PROCESSES)
        life = live(tmp_path, TRAINING, ranks, kill_at_random(draw, steps=4, of=SIGNALS))
        assert not life.over, f"the training was over after {number} kills"
        codes[life.code] += 1
        sizes[ranks] += 1
        spoilt[spoil(draw, tmp_path)] += 1
    assert live(tmp_path, TRAINING, 2).code == 0
    whole = tmp_path / "whole"
    whole.mkdir()
    assert live(whole, TRAINING, 1).code == 0
    assert end(tmp_path) == end(whole)
    del spoilt[""]
    with capsys.disabled():
        print(
            f"\nsoak, seed {SEED}: {KILLS} kills (exit codes {dict(codes)}) on {dict(sizes)} processes, checkpoints"
            f" {dict(spoilt)}; the bits of {end(whole).split()[0]} steps and every sample's uses are those of the"
            f" training that was not killed ({time.monotonic() - begun:.0f} s)"
        )
