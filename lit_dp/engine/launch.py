"""Who started this process, how many it started, and how many CPU threads each of them gets.

Everything is read from environment variables, in the order in which Lightning chooses its ClusterEnvironment, so that
what is reported is what Lightning does. Lightning never looks for Kubernetes: `cluster_environment` is to tell it.
"""

import importlib.util
import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.kubeflow import KubeflowEnvironment

from lit_dp.errors import ConfigError

CPU_PROCESSES = 2
"""Processes of one host without an accelerator: the least that exchanges gradients."""

Launcher = Literal["torchrun", "slurm", "lsf", "mpi", "kubernetes", "lit_dp"]
_OURS = "_LIT_DP_OMP_NUM_THREADS"  # the OMP_NUM_THREADS that we set: any other value is the user's
_OWN_HOSTS = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_ALSO_READ = (*_OWN_HOSTS, "GROUP_RANK", "SLURM_JOB_NAME", "SLURM_STEP_NUM_TASKS", "SLURM_CPUS_ON_NODE")


@dataclass(frozen=True)
class Launch:
    """What the launcher's variables (`sources`) say; None where they do not say it.

    `lit_dp` is our supervisor, or Lightning's launcher in a program that builds a trainer: the parent knows no counts,
    the config makes them; its children, and what is started by hand with LOCAL_RANK, know what they were told. `why` is
    a line for the plan, `counts` the numbers in it.
    """

    launcher: Launcher
    world_size: int | None = None
    local_world_size: int | None = None
    hosts: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    sources: dict[str, str] = field(default_factory=dict)
    counts: str = ""
    why: str = ""


class _Names(NamedTuple):
    """One launcher's variables. It was it if all `signs` are set, none of `unless`, and `least` processes run."""

    launcher: Launcher
    signs: str = ""
    variables: str = "- - - - -"  # of world size, local world size, hosts, rank, local rank
    unless: str = ""
    least: int = 0


# fmt: off
_LAUNCHERS = (  # Lightning's order first
    _Names("torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE RANK LOCAL_RANK"),
    _Names("slurm", "SLURM_NTASKS", "SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_NNODES SLURM_PROCID SLURM_LOCALID"),
    _Names("lsf", "LSB_JOBID LSB_DJOB_RANKFILE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_SIZE",
           "JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_SIZE - JSM_NAMESPACE_RANK JSM_NAMESPACE_LOCAL_RANK"),
    _Names("mpi", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE -"
           " OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK", least=2),
    _Names("mpi", "PMI_SIZE", "PMI_SIZE MPI_LOCALNRANKS - PMI_RANK MPI_LOCALRANKID", least=2),
    # One process a pod, so pods are hosts; LOCAL_RANK or NODE_RANK say that somebody starts several in each.
    _Names("kubernetes", "MASTER_ADDR RANK WORLD_SIZE", "WORLD_SIZE - WORLD_SIZE RANK -", "LOCAL_RANK NODE_RANK", 2),
    _Names("lit_dp", "LOCAL_RANK", "WORLD_SIZE LOCAL_WORLD_SIZE - - LOCAL_RANK"),
    _Names("lit_dp"),
)
_AT_THE_LAUNCHER = {  # what to type there for d processes on each of n hosts
    "torchrun": "torchrun --nnodes {n} --nproc-per-node {d}",
    "slurm": "sbatch --nodes={n} --ntasks-per-node={d}, and srun before python",
    "lsf": "jsrun --np {p}",
    "mpi": "mpirun -n {p}",
    "kubernetes": "torchrun --nnodes {n} --nproc-per-node {d} --node-rank $RANK --master-addr $MASTER_ADDR in {n} pods",
    "lit_dp": "unset LOCAL_RANK WORLD_SIZE",
}
# fmt: on


def detect(env: Mapping[str, str] = os.environ) -> Launch:
    """Find the launcher; nothing is set and nobody is asked. Raises ConfigError where a count is not a number."""
    names = next(names for names in _LAUNCHERS if _started_by(names, env))
    variables, signs = names.variables.split(), names.signs.split()
    world_size, local, hosts, rank, local_rank = (_number(env, name) for name in variables)
    if world_size:  # of processes a host and hosts, the one that is not told follows from the other
        local = local or (world_size // hosts if hosts else 1 if world_size == 1 else None)
        hosts = hosts or (world_size // local if local else None)
    local_rank = 0 if local == 1 else local_rank
    if names.launcher == "lit_dp" and not _number(env, "NODE_RANK" if "NODE_RANK" in env else "GROUP_RANK"):
        rank = local_rank  # on the first host they are the same
    sources = {name: env[name] for name in (*signs, *variables, *_ALSO_READ) if name in env}
    counts = ", ".join(f"{name}={env[name]}" for name in dict.fromkeys(variables[:3]) if name in env)
    seen = [f"{name} is set" for name in (*signs, "no other launcher's variable")[:1] if name not in variables[:3]]
    why = f"{names.launcher} ({'; '.join([*seen, counts] if counts else seen)})"
    if names.launcher == "lit_dp" and "LIT_DP_SUPERVISED" in env:  # by our supervisor, which looked before it set them
        why = "lit_dp (no other launcher's variable is set)"
    return Launch(names.launcher, world_size, local, hosts, rank, local_rank, sources, counts, why)


def cluster_environment(launch: Launch) -> ClusterEnvironment | None:
    """The plugin to give to Lightning's Trainer where Lightning does not find the launcher by itself, or None."""
    return KubeflowEnvironment() if launch.launcher == "kubernetes" else None


def processes_per_host(launch: Launch, requested: Any, accelerators: int) -> Any:
    """What `devices: auto` means: all accelerators; on the CPU what the launcher started on this host, or two.

    Anything but `auto` (4, "4", [0, 2], -1) is returned as it is.
    """
    return requested if requested != "auto" else accelerators or launch.local_world_size or CPU_PROCESSES


def hosts(launch: Launch, requested: int | Literal["auto"]) -> int:
    """What `num_nodes: auto` means: the hosts that the launcher started processes on, or this one."""
    return (launch.hosts or 1) if requested == "auto" else requested


def check(
    launch: Launch,
    devices: int,
    num_nodes: int,
    distributed: bool,
    sampler_replicas: int | None = None,
    sampler_rank: int | None = None,
) -> None:
    """Raise ConfigError before the first step if launcher, trainer and sampler disagree. No communication.

    Call it before Lightning's Trainer is built, whose own refusals (a few of these) come as other errors and say less.
    `devices` are processes a host; `distributed` is False for a single-process strategy, which `strategy: auto` picks
    for one device; the last two are `num_replicas` and `rank` of a DistributedSampler that the user made. A static
    rendezvous without `--node-rank` hangs in torchrun, where nothing of ours runs; with our own launcher it is found.
    """
    d, n = (devices, num_nodes) if distributed else (1, 1)
    asked = f"devices {devices} x num_nodes {num_nodes}" + ("" if distributed else ", strategy of a single process")
    sampler = _sampler(launch, d * n, asked, sampler_replicas, sampler_rank)
    for problem in chain(_start(launch, d, n), _world(launch, d, n, asked), sampler):
        raise ConfigError(problem)


def _start(launch: Launch, d: int, n: int) -> Iterator[str]:
    """What makes Lightning wait for processes that nobody starts, or not see those that were started."""
    who, of, world = launch.launcher, launch.sources, launch.world_size or 0
    if who != "lit_dp" and not world:
        yield f"{launch.why}: the number of processes is not set; start with {who}, or type unset {next(iter(of))}"
    if who == "mpi" and importlib.util.find_spec("mpi4py") is None:
        yield f"mpi started {world} processes ({launch.counts}); Lightning asks mpi4py for them; pip install mpi4py"
    if who == "slurm" and world > 1 and "SLURM_STEP_NUM_TASKS" not in of:
        alone = f"1 process would wait for {world - 1} more ({launch.counts})"
        yield f"{alone}: srun did not start it (SLURM_STEP_NUM_TASKS is not set); type srun before python"
    if who == "slurm" and world > 1 and "SLURM_NTASKS_PER_NODE" not in of:
        yield f"Lightning takes {launch.counts} only with tasks a host; type --ntasks-per-node in place of --ntasks"
    if who == "lit_dp" and "LOCAL_RANK" not in of and (tasks := _number(of, "SLURM_STEP_NUM_TASKS") or 0) > 1:
        alone = f"srun started {tasks} processes (SLURM_STEP_NUM_TASKS={tasks}), each a whole training of its own"
        yield f"{alone}: Lightning leaves a job named {of.get('SLURM_JOB_NAME')} alone; type srun --job-name=lit_dp"
    if who == "lit_dp" and n > 1 and (lacking := _unnumbered(of, n)):
        ours = "NODE_RANK=R MASTER_ADDR=HOST0 MASTER_PORT=29500 before python"
        torchrun = f"torchrun --nnodes {n} --nproc-per-node {d} --node-rank R --master-addr HOST0"
        yield f"num_nodes {n}, but {lacking}: hosts would wait for one another; type on host R {ours}, or {torchrun}"


def _unnumbered(of: Mapping[str, str], hosts: int) -> str:
    of = {"NODE_RANK": of["GROUP_RANK"], **of} if "GROUP_RANK" in of else of
    missing = " and ".join(name for name in _OWN_HOSTS if name not in of)
    beyond = not missing and (_number(of, "NODE_RANK") or 0) >= hosts
    return f"{missing} not set" if missing else f"NODE_RANK={of['NODE_RANK']} is not below it" if beyond else ""


def _world(launch: Launch, d: int, n: int, asked: str) -> Iterator[str]:
    world, local, hosts = launch.world_size, launch.local_world_size, launch.hosts
    if world is None or (world == d * n and local in (None, d) and hosts in (None, n)):
        return
    harm = "ranks would take one another's places" if world == d * n else "ranks would wait for one another"
    if d * n == 1 < world:
        harm = f"{world} whole trainings would run side by side, without exchange"
    elif world < d * n:
        harm = f"only {world} of {d * n} shares of the data would be used"
    said = f"processes started by {launch.launcher}: {world} ({launch.counts}), trainer's: {d * n} ({asked})"
    ours = f"--trainer.devices {local} --trainer.num_nodes {hosts}{' --trainer.strategy ddp' * (world > 1)}, or "
    theirs = _AT_THE_LAUNCHER[launch.launcher].format(d=d, n=n, p=d * n)
    yield f"{said}: {harm}; type {ours if (local or 0) * (hosts or 0) == world else ''}{theirs}"


def _sampler(launch: Launch, world: int, asked: str, replicas: int | None, rank: int | None) -> Iterator[str]:
    instead = "leave num_replicas and rank out, or pass trainer.world_size and trainer.global_rank"
    if replicas is not None and replicas != world:
        harm = "never used" if replicas > world else "used more than once"
        said = f"the sampler's num_replicas: {replicas}, the trainer's processes: {world} ({asked}; {launch.why})"
        yield f"{said}: samples would be {harm}; {instead}"
    if rank is not None and launch.rank is not None and rank != launch.rank:
        yield f"the sampler's rank: {rank}, this process's: {launch.rank} ({launch.why}); {instead}"


def set_cpu_threads(
    launch: Launch, local_processes: int, env: MutableMapping[str, str] = os.environ, virtual_ranks: int | None = None
) -> tuple[int, str]:
    """Set the CPU threads of this process, and through `env` of its children; return their number and why.

    One rule on every launcher, since the bits of gradients depend on the number of threads. The first that applies:
    `LIT_DP_CPU_THREADS`; the user's `OMP_NUM_THREADS`; the host's cores divided by `local_processes`, at least 1. With
    virtual ranks the cores are divided by these: the placement law wants one number on 1, 2, 4 ... processes.

    torchrun gives OMP_NUM_THREADS=1 to two or more processes where nothing is set, and nothing tells it from a 1 of the
    user's. There a 1 is taken for torchrun's: the rule must give on torchrun what it gives elsewhere, and the printed
    reason says how to insist. Slurm may bind each task to cores of its own, so that affinity is a share already: there
    the cores are SLURM_CPUS_ON_NODE. What we set is marked, so that children and later trainers apply the rule anew.
    """
    threads, why = _threads(launch, local_processes, env, virtual_ranks)
    torch.set_num_threads(threads)
    if not why.startswith("OMP_NUM_THREADS"):
        env["OMP_NUM_THREADS"] = env[_OURS] = str(threads)
    return threads, why


def _threads(launch: Launch, processes: int, env: Mapping[str, str], virtual_ranks: int | None) -> tuple[int, str]:
    if (insisted := _number(env, "LIT_DP_CPU_THREADS", least=1)) is not None:
        return insisted, f"LIT_DP_CPU_THREADS={insisted}"
    users = _number(env, "OMP_NUM_THREADS", least=1) if env.get("OMP_NUM_THREADS") != env.get(_OURS) else None
    aside = users == 1 and launch.launcher == "torchrun" and (launch.local_world_size or 1) > 1
    if users is not None and not aside:
        return users, f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']}"
    cores, shares = _cores(launch), virtual_ranks or processes
    why = f"{cores} cores / {shares} {'virtual ranks' if virtual_ranks else 'processes'}"
    return max(1, cores // shares), why + "; torchrun's OMP_NUM_THREADS=1 aside, LIT_DP_CPU_THREADS=1 insists" * aside


def _cores(launch: Launch) -> int:
    if launch.launcher == "slurm" and "SLURM_CPUS_ON_NODE" in launch.sources:
        return int(launch.sources["SLURM_CPUS_ON_NODE"])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has it not


def _started_by(names: _Names, env: Mapping[str, str]) -> bool:
    if names.launcher == "slurm" and env.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return False  # Lightning's word for an allocation in which one starts processes oneself
    seen = env.keys() >= {*names.signs.split()} and not env.keys() & {*names.unless.split()}
    return seen and (_number(env, names.variables.split()[0]) or 0) >= names.least


def _number(env: Mapping[str, str], name: str, least: int = 0) -> int | None:
    text = env.get(name, "").split(",")[0].strip()  # OpenMP allows a list, a number for each level of nesting
    if name in env and (not text.isdecimal() or int(text) < least):
        raise ConfigError(f"the variable {name}={env[name]!r} is no whole number from {least} up; type unset {name}")
    return int(text) if name in env else None
