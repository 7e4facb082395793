"""How the command line talks to a person: short help, one-line errors, shipped configs by name."""

import argparse
import difflib
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from lit_dp.errors import ConfigError

DEFAULT_CONFIG = "digits"
COMMON = {
    "help", "config", "print_config", "name", "seed_everything", "ckpt_path",
    "model", "data", "checkpoint.monitor", "checkpoint.mode",
    "trainer.max_epochs", "trainer.max_steps", "trainer.accelerator", "trainer.devices", "trainer.num_nodes",
    "trainer.strategy", "trainer.precision", "trainer.accumulate_grad_batches", "trainer.gradient_clip_val",
    "trainer.fast_dev_run", "trainer.default_root_dir",
}  # fmt: skip
"""What --help shows; everything else is in `--print_config=`."""


class Parser(LightningArgumentParser):
    """LightningArgumentParser whose help fits on a screen and whose errors are one line."""

    def format_help(self) -> str:
        """Help of the common options only, with where to find the rest."""
        hidden = [a for a in self._actions if a.dest not in COMMON and not isinstance(a, argparse._SubParsersAction)]
        titles = {group: (group.title, group.description) for group in self._action_groups}
        helps = [(action, action.help) for action in hidden]
        try:
            for action in hidden:
                action.help = argparse.SUPPRESS
            for group in self._action_groups:
                group.description = None
            return f"{super().format_help().rstrip()}\n\n{self._more()}\n"
        finally:
            for action, text in helps:
                action.help = text
            for group, (title, description) in titles.items():
                group.title, group.description = title, description

    def format_usage(self) -> str:
        return f"usage: {self.prog}\n"

    def _more(self) -> str:
        prog = self.prog.replace(" [options]", "")
        shipped = ", ".join(sorted(shipped_configs()))
        return (
            f"Shipped configs: {shipped}.\nEvery option, with its value: {prog} --print_config=\n"
            f"Options of a class: {prog} --model.help lit_dp.LitClassifier, --data.help lit_dp.ImageDataModule"
        )

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say in one line what is wrong and what was probably meant; exit code 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        prog = self.prog.replace(" [options]", "")
        sys.stderr.write(f"error: {self._one_line(message)} (options: {prog} --help)\n")
        sys.exit(2)

    def _one_line(self, message: str) -> str:
        if match := re.match(r"Unrecognized arguments: (\S+)", message):
            return f"there is no option {match[1]}{did_you_mean(match[1].split('=')[0], self._option_strings())}"
        if match := re.search(r"Key '?\"?([\w.]+)\"?'? is not expected|No action for key \"([\w.]+)\"", message):
            key = match[1] or match[2]
            return f"there is no option {key}{did_you_mean(key, [o.lstrip('-') for o in self._option_strings()])}"
        lines = [line.strip(" -") for line in message.splitlines() if line.strip()]
        return " ".join(" ".join(lines).split())[:500]

    def _option_strings(self) -> list[str]:
        parsers = [self, *getattr(self, "subcommand_parsers", [])]
        return [option for parser in parsers for action in parser._actions for option in action.option_strings]


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
        if equals and option in ("--config", "-c"):
            arg = f"--config={_config_file(value)}"
        elif resolved and resolved[-1] in ("--config", "-c"):
            arg = _config_file(arg)
        resolved.append(arg)
    given = any(re.match(r"(--config|-c|--model)(=|$)", arg) for arg in args)
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
