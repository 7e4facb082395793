"""FAULTS 11 and 20 under the real torchrun: who started how many, and threads by one rule."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import lit_dp, torch
from lit_dp.errors import ConfigError
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lit_dp.Trainer(accelerator="cpu", **quiet)
said = [f"processes {trainer.world_size}", f"threads {torch.get_num_threads()}", f"rule {trainer.cpu_threads}"]
try:
    lit_dp.Trainer(accelerator="cpu", devices=1, strategy="auto", **quiet)
except ConfigError as error:
    said.append(str(error))
print("\\n".join(said), flush=True)
"""


def test_what_each_of_two_processes_sees(tmp_path: Path) -> None:
    script = tmp_path / "see.py"
    script.write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if "OMP_NUM_THREADS" not in name}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.stdout.count("processes 2") == 2
    assert done.stdout.count(f"threads {threads}\n") == 2
    assert done.stdout.count("torchrun's OMP_NUM_THREADS=1 aside") == 2
    assert done.stdout.count("processes started by torchrun: 2") == 2
    assert done.stdout.count("2 whole trainings would run side by side") == 2
