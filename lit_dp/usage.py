"""How the command line talks to a person: short help, one-line errors, shipped configs by name."""

import argparse
import difflib
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from lit_dp.errors import ConfigError

DEFAULT_CONFIG = "digits"
COMMON = {
    "config": "YAML file, or the name of a shipped config; several are laid over each other",
    "name": "run folder below trainer.default_root_dir; counted up if it is there",
    "seed_everything": "seed of weights, order of samples and dropout",
    "devices": "devices a host to plan for, here or not",
    "nodes": "hosts to plan for",
    "ckpt_path": "checkpoint to evaluate (fit: to resume from, as --resume)",
    "resume": "auto: from the newest checkpoint of the run folder; required; never; or a path",
    "profile": "step: where the time of a step goes, printed at the end",
    "model": "LightningModule, by import path; then --model.ARGUMENT VALUE",
    "data": "LightningDataModule, by import path; then --data.ARGUMENT VALUE",
    "trainer.accelerator": "auto, cpu, gpu, ...",
    "trainer.devices": "devices a host; auto: all accelerators, or two CPU processes",
    "trainer.num_nodes": "hosts; auto: as many as the launcher says",
    "trainer.strategy": "how devices work together",
    "trainer.max_epochs": "passes over the data",
    "trainer.precision": "32-true, bf16-mixed, 16-mixed, ...",
    "trainer.accumulate_grad_batches": "micro-batches an optimizer step",
    "trainer.gradient_clip_val": "largest norm of the gradient",
    "trainer.fast_dev_run": "true: one batch of everything, nothing written",
    "trainer.default_root_dir": "folder of all runs",
    "checkpoint.monitor": "which value makes a checkpoint the best one",
    "checkpoint.mode": "whether the best is its max or its min",
    "last.every_n_steps": "optimizer steps between two saves of last.ckpt, beside each epoch's",
}
"""The options that --help shows; the others are in `--print_config=`."""

BENCH = "\n    bench               Measure what it costs, beside other trainers: overhead | scaling | loader.\n"
"""The command that `__main__` runs without this parser."""


class Parser(LightningArgumentParser):
    """LightningArgumentParser whose help fits on a screen and whose errors are one line."""

    def format_help(self) -> str:
        """A command's common options, a line each with their defaults, and where to find the rest."""
        actions = {action.dest: action for action in self._actions}
        rows = [(f"--{name}", text, actions[name].default) for name, text in COMMON.items() if name in actions]
        if not any(name in actions for name in ("model", "data")):
            return super().format_help() + BENCH
        width = max(len(option) for option, _, _ in rows)
        lines = [
            f"  {option:{width}}  {text}{'' if default in (None, argparse.SUPPRESS) else f' [{_short(default)}]'}"
            for option, text, default in rows
        ]
        command = self._command()
        return "\n".join(
            [
                f"usage: {command} [--config CONFIG] [--OPTION VALUE ...]",
                "",
                *lines,
                "",
                f"Shipped configs: {', '.join(sorted(shipped_configs()))}. Without one, {DEFAULT_CONFIG} is run.",
                f"Every option and value: {command} --print_config=   (without the = only those that are set)",
                f"Options of a class:     {command} --model.help lit_dp.LitClassifier",
                "",
            ]
        )

    def format_usage(self) -> str:
        return f"usage: {self._command()}\n"

    def _command(self) -> str:
        return self.prog.replace(" [options]", "")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say in one line what is wrong and what was probably meant; exit code 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        sys.stderr.write(f"error: {self._one_line(message)} (options: {self._command()} --help)\n")
        sys.exit(2)

    def _one_line(self, message: str) -> str:
        if match := re.match(r"[Uu]nrecognized arguments: (\S+)", message):
            return f"there is no option {match[1]}{did_you_mean(match[1].split('=')[0], self._option_strings())}"
        return condensed(message)

    def _option_strings(self) -> list[str]:
        parsers = [self, *getattr(self, "subcommand_parsers", [])]
        return [option for parser in parsers for action in parser._actions for option in action.option_strings]


def _short(default: Any) -> str:
    """A default as one would type it: a class by its name."""
    return default["class_path"].rsplit(".", 1)[-1] if hasattr(default, "class_path") else str(default)


NOISE = re.compile(
    r"Does not validate against|Subtypes: |Errors:|Given value|Expected a <class 'NoneType'>|Expected a path but"
)


def condensed(message: str) -> str:
    """jsonargparse's indented tree of refused alternatives, as `key: class: the reason that counts`."""
    keys = re.findall(r'Parser key "([^"]+)":', message)
    classes = re.findall(r"Problem with given class_path '([^']+)'", message)
    text = re.sub(r"Parser key \"[^\"]+\":|Problem with given class_path '[^']+':", "", message)
    lines = [line.strip(" -") for line in text.splitlines()]
    reasons = dict.fromkeys(line for line in lines if line and not NOISE.match(line))
    telling = [line for line in reasons if not line.startswith("Expected a <class")]
    reason = "; ".join(telling or reasons) or " ".join(lines)
    if match := re.search(r"Option '(\w+)' is not accepted", reason):
        callee = (re.findall(r"class_path='([^']+)'", reason) or classes)[-1]
        return f"{'.'.join(keys)}: {callee} has no argument {match[1]!r}{did_you_mean(match[1], _arguments(callee))}"
    if match := re.search(r"Expected a dot import path string: (\S+)", reason):
        return f"{'.'.join(keys)}: {match[1]} names no class; give its import path, as in torch.optim.SGD"
    return f"{'.'.join(keys)}{': ' if keys else ''}{reason}"[:500]


def _arguments(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def did_you_mean(word: str, words: list[str]) -> str:
    """`, did you mean X?` for the word most like it, or nothing."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""


def shipped_configs() -> dict[str, Path]:
    """The configs that lit_dp brings, by name: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).parent
    folder = next(f for f in (here / "configs", here.parent / "configs") if f.is_dir())
    return {path.stem: path for path in folder.glob("*.yaml")}


def with_shipped_configs(args: list[str]) -> list[str]:
    """Replace `--config NAME` by the shipped file of that name; without any config or model take the default one.

    Raises:
        ConfigError: neither a file nor a shipped config has that name.
    """
    args = ["--print_config=skip_unset" if arg == "--print_config" else arg for arg in args]
    resolved: list[str] = []
    for arg in args:
        option, equals, value = arg.partition("=")
        if option == "--resume.force":
            arg = f"--resume_force={value or 'true'}"
        if equals and option in ("--config", "-c"):
            arg = f"--config={_config_file(value)}"
        elif resolved and resolved[-1] in ("--config", "-c"):
            arg = _config_file(arg)
        resolved.append(arg)
    given = any(re.match(r"(--config|-c|--model|--help|-h|--\w+\.help)(=|$)", arg) for arg in args)
    if given or not args or args[0].startswith("-"):
        return resolved
    return [args[0], "--config", _config_file(DEFAULT_CONFIG), *resolved[1:]]


def _config_file(value: str) -> str:
    configs = shipped_configs()
    if Path(value).exists() or "://" in value or value.lstrip().startswith("{"):
        return value
    if value in configs:
        return str(configs[value])
    raise ConfigError(
        f"config {value!r} is neither a file nor a shipped config ({', '.join(sorted(configs))})"
        f"{did_you_mean(Path(value).stem, list(configs))}"
    )


def config_name(config: Any) -> str:
    """Name for a run from the files that --config named: the stem of the last, or "run"."""
    paths = [Path(str(path)) for path in config or [] if path is not None]
    return paths[-1].stem if paths else "run"
