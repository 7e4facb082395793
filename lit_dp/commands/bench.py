"""`python -m lit_dp bench overhead | scaling | loader`: what it costs, measured here, against the loop by hand.

Only the options are read here, without torch or Lightning: each benchmark has a module of its own.
"""

import argparse
import difflib
import os
import shlex
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from lit_dp.errors import ConfigError

MODELS = ("mlp", "cnn", "resnet18")
PARTS = ("steps", "epochs", "memory", "start")
LAUNCHERS = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID")


def main(arguments: list[str]) -> None:
    """Run the benchmark that was typed, and print and save its report.

    Raises:
        ConfigError: a launcher has started this process: a benchmark starts its own.
    """
    parser, benchmarks = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.benchmark != "loader":  # whose config has options of its own
        benchmarks[options.benchmark].error(f"unrecognized arguments: {rest[0]}")
    if set_by_launcher := [name for name in LAUNCHERS if name in os.environ]:
        raise ConfigError(f"{set_by_launcher[0]} is set: bench starts its processes itself; type it without a launcher")
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    options.command = f"OMP_NUM_THREADS={threads} python -m lit_dp bench {shlex.join(arguments)}"
    options.rest = rest
    import_module(f"lit_dp.commands.bench_{options.benchmark}").run(options)


def _parser() -> tuple["Options", dict[str, "Options"]]:
    parser = Options(prog="python -m lit_dp bench", description="Measures what it costs, against loops by hand.")
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    benchmarks = {"overhead": _overhead, "scaling": _scaling, "loader": _loader}
    return parser, {name: add(commands, name) for name, add in benchmarks.items()}


def _overhead(commands: Any, name: str) -> "Options":
    parser = commands.add_parser(
        name,
        help="step, epoch, start and memory of fit against raw loops, Lightning and accelerate",
        description="Times (a) the tutorial's raw loop, (b) a tuned one, (c) Lightning's ddp, (d) exact_ddp as fit runs"
        " it, (e) the same with virtual ranks, (f) accelerate if it is installed, (g) Lightning with nothing; in turn,"
        " each in fresh processes.",
    )
    add = parser.add_argument
    add("--model", choices=(*MODELS, "all"), default="all", help="mlp, cnn, resnet18 or all of them [all]")
    add("--processes", type=_at_least(1), default=2, metavar="W", help="processes; mlp is also run on one [2]")
    add("--repetitions", type=_at_least(1), default=5, metavar="N", help="trainings a kind, in turn: A B C C B A [5]")
    add("--steps", type=_at_least(1), default=100, metavar="N", help="timed steps of a training, after 5 others [100]")
    add("--epochs", type=_at_least(1), default=1, metavar="N", help="whole epochs a training of the CNN [1]")
    add("--data", default="data", metavar="ROOT", help="folder of FashionMNIST/; synthetic where it is not [data]")
    add("--kinds", default="abcdefg", metavar="abd", help="which of the kinds a to g [abcdefg]")
    add("--parts", default=",".join(PARTS), metavar="P,P", help=f"what is measured [{','.join(PARTS)}]")
    _add_name(parser, name)
    return parser


def _scaling(commands: Any, name: str) -> "Options":
    parser = commands.add_parser(
        name,
        help="strong and weak scaling of exact_ddp, exposed communication, bus bandwidth",
        description="Trains a small net on 1, 2, 4 ... processes, with the same global batch (strong) and with the same"
        " batch a process (weak), each beside as many processes that do the same work without communication.",
    )
    add = parser.add_argument
    add("--processes", type=_numbers, default=[1, 2, 4], metavar="W,W", help="numbers of processes [1,2,4]")
    add("--repetitions", type=_at_least(1), default=5, metavar="N", help="trainings of each, in turn [5]")
    add("--steps", type=_at_least(1), default=30, metavar="N", help="timed steps of a training, after 5 others [30]")
    add("--batch", type=_at_least(1), default=64, metavar="N", help="samples a step on one process [64]")
    add(
        "--emulate-ms-per-layer",
        type=float,
        metavar="F",
        help="backward sleeps F ms a layer in place of computing, so that many ranks fit on few cores",
    )
    _add_name(parser, name)
    return parser


def _loader(commands: Any, name: str) -> "Options":
    parser = commands.add_parser(
        name,
        help="what a config's training loader delivers, what its model consumes, how many workers",
        description="Any option of fit may follow, as in --data.batch_size 128.",
    )
    add = parser.add_argument
    add("--config", action="append", metavar="NAME", help="YAML file or shipped config [digits]")
    add("--workers", type=_numbers_from_0, metavar="N,N", help="numbers of workers [0,1,2,4 ... up to the cores]")
    add("--processes", type=_at_least(1), metavar="W", help="processes that share this host [as fit would start]")
    add("--repetitions", type=_at_least(1), default=5, metavar="N", help="measurements of each, in turn [5]")
    add("--batches", type=_at_least(1), default=50, metavar="N", help="timed batches of a measurement [50]")
    _add_name(parser, name)
    return parser


def _add_name(parser: "Options", name: str) -> None:
    parser.add_argument("--name", default=name, help=f"run folder below runs/bench; counted up if it is there [{name}]")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} up")
        return int(text)

    return number


def _numbers(text: str, least: int = 1) -> list[int]:
    return sorted({_at_least(least)(part) for part in text.split(",")})


def _numbers_from_0(text: str) -> list[int]:
    return _numbers(text, 0)


class Options(argparse.ArgumentParser):
    """argparse whose errors are one line, with what was probably meant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            option = message.removeprefix("unrecognized arguments: ").split("=")[0].split()[0]
            message = f"there is no option {option}{_like(option, list(self._option_string_actions))}"
        self.exit(2, f"error: {message} (options: {self.prog} --help)\n")


def _like(word: str, words: list[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f", did you mean {close[0]}?" if close else ""
