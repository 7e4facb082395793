"""Who started us (engine/launch.py): Lightning's answer, an error where the numbers disagree, one thread rule.

Nothing is started: launchers are told apart by their variables, and so are they here.
"""

import itertools
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch.distributed import run as torchrun

from lit_dp.engine.launch import Launch, check, cluster_environment, detect, processes_per_host, set_cpu_threads
from lit_dp.errors import ConfigError
from tests.ranks import torchrun_env

TORCHRUN = torchrun_env(rank=1, world_size=2, port=29500)
TORCHRUN_2X2 = TORCHRUN | {"RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
ALLOCATION = {
    "SLURM_JOB_ID": "7007",
    "SLURM_JOB_NAME": "digits",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SLURM = ALLOCATION | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
SLURM_ONE = {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
INTERACTIVE = ALLOCATION | {"SLURM_JOB_NAME": "interactive"}
BASH = SLURM_ONE | {"SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "1"}
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1"}
PODS = {"MASTER_ADDR": "digits-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}
CHILD = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
LIGHTNINGS_NAME = {
    "torchrun": "TorchElasticEnvironment",
    "slurm": "SLURMEnvironment",
    "lsf": "LSFEnvironment",
    "mpi": "MPIEnvironment",
    "kubernetes": "KubeflowEnvironment",
    "lit_dp": "LightningEnvironment",
}


@pytest.fixture
def jsrun(tmp_path) -> dict[str, str]:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"launch-node\n{socket.gethostname()}\n")
    return {
        "LSB_JOBID": "7007",
        "LSB_DJOB_RANKFILE": str(hosts),
        "JSM_NAMESPACE_SIZE": "2",
        "JSM_NAMESPACE_RANK": "1",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
    }


@pytest.fixture
def mpi4py(monkeypatch) -> None:
    """An mpi4py that knows of one host, and of Open MPI's and MPICH's variables."""
    asked = lambda *names: int(next((os.environ[name] for name in names if name in os.environ), 1))  # noqa: E731
    rank = lambda: asked("OMPI_COMM_WORLD_RANK", "PMI_RANK")  # noqa: E731
    world = SimpleNamespace(Get_size=lambda: asked("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"), Get_rank=rank)
    module = SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=world), __spec__=object())
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    monkeypatch.setattr("lightning.fabric.plugins.environments.mpi._MPI4PY_AVAILABLE", True)


@pytest.fixture
def lightning(monkeypatch) -> Callable[..., _AcceleratorConnector]:
    """Lightning's choices (cluster environment, strategy) for a set of variables."""
    monkeypatch.setattr(shutil, "which", lambda _: None)  # a real srun here would make it warn

    def choose(env: dict[str, str], devices: int = 1, strategy: str = "auto") -> _AcceleratorConnector:
        with mock.patch.dict(os.environ, env, clear=True):
            plugin = cluster_environment(detect())
            return _AcceleratorConnector(devices=devices, accelerator="cpu", strategy=strategy, plugins=plugin)

    return choose


@pytest.fixture
def eight_cores(monkeypatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    yield
    torch.set_num_threads(threads)


# ---- who


@pytest.mark.parametrize(
    ("env", "launcher", "numbers"),  # world size, local world size, hosts, rank, local rank
    [
        ({}, "lit_dp", (None, None, None, None, None)),
        ({"WORLD_SIZE": "8"}, "lit_dp", (None, None, None, None, None)),  # an image's variable, not a launcher's
        (CHILD, "lit_dp", (2, None, None, 1, 1)),
        (CHILD | {"NODE_RANK": "1", "WORLD_SIZE": "4"}, "lit_dp", (4, None, None, None, 1)),
        (TORCHRUN, "torchrun", (2, 2, 1, 1, 1)),
        (TORCHRUN_2X2, "torchrun", (4, 2, 2, 3, 1)),
        (SLURM, "slurm", (4, 2, 2, 3, 1)),
        (SLURM_ONE, "slurm", (1, 1, 1, 0, 0)),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, "slurm", (1, 1, 1, 0, 0)),
        (ALLOCATION, "slurm", (4, 2, 2, 0, 0)),
        (INTERACTIVE, "lit_dp", (None, None, None, None, None)),
        (BASH, "lit_dp", (None, None, None, None, None)),
        (OPENMPI, "mpi", (2, 2, 1, 1, 1)),
        (MPICH, "mpi", (2, None, None, 1, None)),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "1"}, "lit_dp", (None, None, None, None, None)),
        (PODS, "kubernetes", (3, 1, 3, 2, 0)),
        (PODS | {"WORLD_SIZE": "1", "RANK": "0"}, "lit_dp", (None, None, None, None, None)),  # one pod, its own GPUs
        (PODS | {"NODE_RANK": "2"}, "lit_dp", (None, None, None, None, None)),  # a parent in each pod
    ],
)
def test_reads_each_launchers_variables(env, launcher, numbers):
    launch = detect(env)
    assert launch.launcher == launcher
    assert (launch.world_size, launch.local_world_size, launch.hosts, launch.rank, launch.local_rank) == numbers
    assert launch.sources.items() <= env.items()


@pytest.mark.parametrize(
    ("env", "why"),
    [
        (TORCHRUN_2X2, "torchrun (TORCHELASTIC_RUN_ID is set; WORLD_SIZE=4, LOCAL_WORLD_SIZE=2, GROUP_WORLD_SIZE=2)"),
        (SLURM, "slurm (SLURM_NTASKS=4, SLURM_NTASKS_PER_NODE=2, SLURM_NNODES=2)"),
        (PODS, "kubernetes (MASTER_ADDR is set; WORLD_SIZE=3)"),
        (CHILD, "lit_dp (LOCAL_RANK is set; WORLD_SIZE=2)"),
        ({}, "lit_dp (no other launcher's variable is set)"),
    ],
)
def test_says_why_in_a_line(env, why):
    assert detect(env).why == why


def test_agrees_with_lightning_on_every_mixture_of_variables(lightning, jsrun, mpi4py):
    parts = [TORCHRUN, SLURM_ONE, {"SLURM_JOB_NAME": "bash"}, jsrun, OPENMPI, PODS, CHILD]
    seen = set()
    for chosen in itertools.product([False, True], repeat=len(parts)):
        env = dict(item for part, used in zip(parts, chosen, strict=True) if used for item in part.items())
        launch, lightnings = detect(env), lightning(env).cluster_environment
        assert type(lightnings).__name__ == LIGHTNINGS_NAME[launch.launcher], env
        seen.add(launch.launcher)
    assert seen == set(LIGHTNINGS_NAME)


@pytest.mark.parametrize("env", [TORCHRUN, TORCHRUN_2X2, SLURM, SLURM_ONE, PODS, "jsrun"])
def test_reads_the_numbers_that_lightning_reads(env, lightning, request):
    env = request.getfixturevalue(env) if isinstance(env, str) else env
    launch, lightnings = detect(env), lightning(env).cluster_environment
    with mock.patch.dict(os.environ, env, clear=True):
        numbers = lightnings.world_size(), lightnings.global_rank(), lightnings.local_rank()
    assert (launch.world_size, launch.rank, launch.local_rank) == numbers
    assert lightnings.creates_processes_externally


def test_lightning_does_not_find_pods_by_itself(lightning):
    """Why `cluster_environment` exists; fails when upstream detects them."""
    with mock.patch("tests.test_launch.cluster_environment", return_value=None):
        found = lightning(PODS).cluster_environment
    assert type(found).__name__ == "LightningEnvironment"
    assert [cluster_environment(detect(env)) for env in ({}, CHILD, TORCHRUN, SLURM, OPENMPI)] == [None] * 5


def test_a_count_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match=r"variable WORLD_SIZE='two' is no whole number.*unset WORLD_SIZE"):
        detect(TORCHRUN | {"WORLD_SIZE": "two"})


@pytest.mark.parametrize(
    ("env", "requested", "accelerators", "processes"),
    [
        ({}, "auto", 8, 8),
        ({}, "auto", 0, 2),
        (CHILD, "auto", 0, 2),  # as its parent
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}, "auto", 0, 4),
        (SLURM, "auto", 0, 2),
        (PODS, "auto", 0, 1),
        (TORCHRUN, 3, 8, 3),
        (TORCHRUN, "3", 0, "3"),
        ({}, -1, 8, -1),
        ({}, [0, 2], 8, [0, 2]),
    ],
)
def test_what_devices_auto_means(env, requested, accelerators, processes):
    assert processes_per_host(detect(env), requested, accelerators) == processes


# ---- disagreement (FAULTS 11, 43)


def refusal(env: dict[str, str], devices: int, num_nodes: int = 1, distributed: bool = True, **sampler: int) -> str:
    with pytest.raises(ConfigError) as error:
        check(detect(env), devices, num_nodes, distributed, **sampler)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_fault_11_torchrun_and_a_single_process_trainer(lightning):
    ours = lightning(TORCHRUN, devices=1, strategy="auto")
    assert isinstance(ours.strategy, SingleDeviceStrategy)  # upstream: two trainings, and not a word
    assert refusal(TORCHRUN, devices=1, distributed=False) == (
        "processes started by torchrun: 2 (WORLD_SIZE=2, LOCAL_WORLD_SIZE=2), trainer's: 1 (devices 1 x num_nodes 1,"
        " strategy of a single process): 2 whole trainings would run side by side, without exchange; type"
        " --trainer.devices 2 --trainer.num_nodes 1 --trainer.strategy ddp, or torchrun --nnodes 1 --nproc-per-node 1"
    )


def test_fault_11_one_slurm_task_and_two_devices(lightning):
    lightnings = lightning(SLURM_ONE, devices=2, strategy="ddp").cluster_environment
    with mock.patch.dict(os.environ, SLURM_ONE, clear=True):
        lightnings.validate_settings(num_devices=2, num_nodes=1)  # upstream: half of the samples, and not a word
    assert refusal(SLURM_ONE, devices=2) == (
        "processes started by slurm: 1 (SLURM_NTASKS=1, SLURM_NNODES=1), trainer's: 2 (devices 2 x num_nodes 1):"
        " only 1 of 2 shares of the data would be used; type --trainer.devices 1 --trainer.num_nodes 1, or"
        " sbatch --nodes=1 --ntasks-per-node=2, and srun before python"
    )


@pytest.mark.parametrize(("replicas", "harm"), [(4, "never used"), (1, "used more than once")])
def test_fault_11_a_sampler_for_another_number_of_processes(replicas, harm):
    for env in (TORCHRUN, CHILD, {}):
        said = refusal(env, devices=2, sampler_replicas=replicas)
        assert f"num_replicas: {replicas}, the trainer's processes: 2 (devices 2 x num_nodes 1; " in said
        assert detect(env).why in said
        assert f"would be {harm}; leave num_replicas" in said


def test_a_sampler_of_another_rank():
    said = refusal(TORCHRUN, devices=2, sampler_replicas=2, sampler_rank=0)
    assert said.startswith("the sampler's rank: 0, this process's: 1 (torchrun (")


@pytest.mark.parametrize(
    ("env", "devices", "num_nodes", "parts"),
    [
        # --nnodes against num_nodes, also where the products are equal
        (TORCHRUN_2X2, 2, 1, ["4 (WORLD_SIZE=4", "GROUP_WORLD_SIZE=2", "2 (devices 2 x num_nodes 1)", "num_nodes 2 "]),
        (TORCHRUN_2X2, 4, 1, ["LOCAL_WORLD_SIZE=2", "4 (devices 4 x num_nodes 1)", "--nnodes 1 --nproc-per-node 4"]),
        (TORCHRUN, 2, 2, ["2 (WORLD_SIZE=2", "4 (devices 2 x num_nodes 2)", "only 2 of 4", "--nnodes 2"]),
        # --ntasks-per-node against devices, --nodes against num_nodes
        (SLURM, 4, 2, ["4 (SLURM_NTASKS=4, SLURM_NTASKS_PER_NODE=2", "8 (devices 4", "--ntasks-per-node=4"]),
        (SLURM, 2, 1, ["SLURM_NNODES=2", "2 (devices 2 x num_nodes 1)", "--trainer.devices 2 --trainer.num_nodes 2"]),
        (SLURM_ONE | {"SLURM_NTASKS_PER_NODE": "4"}, 1, 1, ["SLURM_NTASKS_PER_NODE=4", "type sbatch --nodes=1"]),
        # Pods hold one process each; several GPUs a pod are torchrun's work
        (PODS, 8, 3, ["3 (WORLD_SIZE=3)", "24 (devices 8 x num_nodes 3)", "--nproc-per-node 8 --node-rank $RANK"]),
        (PODS, 1, 1, ["kubernetes: 3 (WORLD_SIZE=3)", "--trainer.devices 1 --trainer.num_nodes 3"]),
        # Started by hand as Lightning's children are
        (CHILD, 1, 1, ["lit_dp: 2 (WORLD_SIZE=2)", "2 whole trainings", "unset LOCAL_RANK WORLD_SIZE"]),
    ],
)
def test_other_counts_than_the_launchers(env, devices, num_nodes, parts):
    said = refusal(env, devices, num_nodes)
    assert [part for part in parts if part not in said] == []


def test_mpi_counts(mpi4py, jsrun):
    assert "mpi: 2 (OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_LOCAL_SIZE=2)" in refusal(OPENMPI, 4)
    assert refusal(MPICH, 4).endswith("type mpirun -n 4")
    assert refusal(jsrun, 4).endswith("type jsrun --np 4")
    check(detect(OPENMPI), 2, 1, True)


def test_mpi_without_mpi4py_is_invisible_to_lightning(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert re.search(r"mpi started 2 processes \(PMI_SIZE=2\).*pip install mpi4py", refusal(MPICH, 2))


def test_a_batch_step_without_srun():
    said = refusal(ALLOCATION, 2, 2)
    assert said.startswith("1 process would wait for 3 more (SLURM_NTASKS=4, ")
    assert said.endswith("srun did not start it (SLURM_STEP_NUM_TASKS is not set); type srun before python")


def test_slurm_tasks_without_tasks_per_node(lightning):
    env = {name: value for name, value in SLURM.items() if name != "SLURM_NTASKS_PER_NODE"}
    with pytest.raises(RuntimeError, match="ntasks"):  # why `check` comes before the Trainer is built
        lightning(env)
    assert "SLURM_NTASKS=4, SLURM_NNODES=2 only with tasks a host; type --ntasks-per-node" in refusal(env, 2, 2)


def test_srun_in_an_interactive_job():
    said = refusal(INTERACTIVE | {"SLURM_STEP_NUM_TASKS": "2"}, 2)
    assert said.startswith("srun started 2 processes (SLURM_STEP_NUM_TASKS=2), each a whole training of its own")
    assert said.endswith("a job named interactive alone; type srun --job-name=lit_dp")
    check(detect(INTERACTIVE), 2, 1, True)
    check(detect(BASH), 2, 1, True)


@pytest.mark.parametrize(
    ("env", "lacking"),
    [
        ({}, "NODE_RANK and MASTER_ADDR and MASTER_PORT not set"),
        ({"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}, "NODE_RANK not set"),
        ({"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "NODE_RANK": "2"}, "NODE_RANK=2 is not below it"),
    ],
)
def test_fault_43_hosts_without_a_number(env, lacking):
    said = refusal(env, 4, 2)
    assert said.startswith(f"num_nodes 2, but {lacking}: hosts would wait for one another; type on host R NODE_RANK=R ")
    assert said.endswith("or torchrun --nnodes 2 --nproc-per-node 4 --node-rank R --master-addr HOST0")


def test_torchrun_without_its_counts():
    assert refusal({"TORCHELASTIC_RUN_ID": "x"}, 2).endswith("start with torchrun, or type unset TORCHELASTIC_RUN_ID")


@pytest.mark.parametrize(
    ("env", "devices", "num_nodes"),
    [
        ({}, 1, 1),
        ({}, 8, 1),
        ({"NODE_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}, 4, 2),
        ({"GROUP_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}, 4, 2),
        ({"WORLD_SIZE": "8"}, 2, 1),
        (CHILD, 2, 1),
        ({"LOCAL_RANK": "0"}, 1, 1),  # a second trainer: Lightning has taken WORLD_SIZE away after the first
        (TORCHRUN, 2, 1),
        (TORCHRUN_2X2, 2, 2),
        (SLURM, 2, 2),
        (SLURM_ONE, 1, 1),
        (PODS, 1, 3),
    ],
)
def test_agreement_is_silent(env, devices, num_nodes):
    launch = detect(env)
    check(launch, devices, num_nodes, True, devices * num_nodes, launch.rank)


def test_one_process_needs_no_distributed_strategy():
    for env in ({}, SLURM_ONE, torchrun_env(rank=0, world_size=1, port=29500)):
        check(detect(env), 1, 1, False, sampler_replicas=1, sampler_rank=0)


# ---- CPU threads (FAULTS 20)


def threads(env: dict[str, str], processes: int = 2, **options: int) -> int:
    """Apply the rule to `env`; what torch then uses."""
    number, _ = set_cpu_threads(detect(env), processes, env, **options)
    assert torch.get_num_threads() == number
    return number


def test_fault_20_one_thread_count_on_every_launcher(eight_cores):
    own, bound = {}, SLURM | {"SLURM_CPUS_ON_NODE": "8"}
    assert threads(own) == 4
    assert threads(own | CHILD) == 4  # inherits what its parent set
    assert threads(TORCHRUN | {"OMP_NUM_THREADS": "1"}) == 4
    assert threads(TORCHRUN.copy()) == 4
    assert threads(PODS.copy(), processes=1) == 8
    with mock.patch(
        "os.sched_getaffinity", return_value={0, 1, 2, 3}, create=True
    ):  # Slurm bound the task to its share
        assert threads(bound) == 4


def test_at_least_one_thread(eight_cores):
    assert threads({}, processes=16) == 1


def test_virtual_ranks_fix_the_threads_for_every_placement(eight_cores):
    assert [threads({}, processes, virtual_ranks=4) for processes in (1, 2, 4)] == [2, 2, 2]
    assert [threads({}, processes) for processes in (1, 2, 4)] == [8, 4, 2]


def test_the_users_own_number_wins(eight_cores):
    for env in ({}, CHILD, TORCHRUN, SLURM, PODS):
        assert threads(env | {"OMP_NUM_THREADS": "3"}) == 3
        assert threads(env | {"OMP_NUM_THREADS": "3", "LIT_DP_CPU_THREADS": "1"}) == 1
    assert threads({"OMP_NUM_THREADS": "1"}) == 1
    assert threads({"OMP_NUM_THREADS": "3,2"}) == 3
    # One process: torchrun does not set it, so it is the user's.
    assert threads(torchrun_env(rank=0, world_size=1, port=29500) | {"OMP_NUM_THREADS": "1"}, processes=1) == 1


def test_the_reason_is_given(eight_cores):
    reason = lambda env, **options: set_cpu_threads(detect(env), 2, env, **options)[1]  # noqa: E731
    assert reason({}) == "8 cores / 2 processes"
    assert reason({}, virtual_ranks=4) == "8 cores / 4 virtual ranks"
    assert reason({"OMP_NUM_THREADS": "3"}) == "OMP_NUM_THREADS=3"
    assert reason({"LIT_DP_CPU_THREADS": "1"}) == "LIT_DP_CPU_THREADS=1"
    aside = "8 cores / 2 processes; torchrun's OMP_NUM_THREADS=1 aside, LIT_DP_CPU_THREADS=1 insists"
    assert reason(TORCHRUN | {"OMP_NUM_THREADS": "1"}) == aside


def test_a_second_trainer_applies_the_rule_again(eight_cores):
    env: dict[str, str] = {}
    assert [threads(env, processes) for processes in (1, 2)] == [8, 4]
    assert env["OMP_NUM_THREADS"] == "4"
    env["OMP_NUM_THREADS"] = "3"  # the user's, from here on
    assert [threads(env, processes) for processes in (1, 2)] == [3, 3]


def test_lightning_leaves_our_number_alone(eight_cores):
    with mock.patch.dict(os.environ, {}, clear=True):
        set_cpu_threads(Launch("lit_dp"), 4)
        _set_num_threads_if_needed(num_processes=1)
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (2, "2")


def test_torchrun_still_sets_one_thread():
    """Why a 1 is set aside there; fails when upstream stops doing it."""
    with mock.patch.dict(os.environ, {"PATH": os.environ["PATH"]}, clear=True):
        torchrun.config_from_args(torchrun.parse_args(["--nproc-per-node=2", "train.py"]))
        assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("value", ["0", "many", "-2"])
def test_a_thread_number_that_is_none_is_named(value):
    for name in ("OMP_NUM_THREADS", "LIT_DP_CPU_THREADS"):
        with pytest.raises(ConfigError, match=rf"{name}='{value}' is no whole number from 1 up"):
            threads({name: value})
