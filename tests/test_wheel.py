"""A wheel works outside the checkout: configs and the embedded digits are inside it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_wheel_trains_outside_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    names = {str(path.relative_to(tmp_path / "installed")) for path in (tmp_path / "installed").rglob("*")}
    assert {"lit_dp/configs/digits.yaml", "lit_dp/assets/digits.npz", "lit_dp/assets/digits.LICENSE.md"} <= names

    script = (
        "import sys, lit_dp, lit_dp.usage;"
        "print(lit_dp.__file__, lit_dp.usage.shipped_configs()['digits']);"
        "sys.argv = 'lit_dp fit --config digits --trainer.devices 1 --trainer.fast_dev_run true'.split();"
        "from lit_dp.__main__ import main; main()"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    where = ended.stdout.split()[:2]
    assert all(Path(path).is_relative_to(tmp_path / "installed") for path in where)
    assert "1,258 samples" in ended.stdout
