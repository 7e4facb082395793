"""`python -m lit_dp fit | validate | test | predict`: LightningCLI with our defaults and one folder a run."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger

from lit_dp.data import ImageDataModule
from lit_dp.engine import launch
from lit_dp.engine.checkpoint_files import examine, hyperparameters
from lit_dp.engine.checkpoints import BestCheckpoint, LastCheckpoint
from lit_dp.engine.ledger import Ledger
from lit_dp.engine.parity import sha256
from lit_dp.engine.plan import PrintPlan
from lit_dp.engine.predictions import PredictionFile
from lit_dp.engine.progress import EpochLines
from lit_dp.engine.progress_bar import ProgressBar
from lit_dp.engine.restart import choose, mode
from lit_dp.engine.run_folder import RunFolder, SaveRunConfig, run_folder_of
from lit_dp.errors import ConfigError
from lit_dp.processes import start_ranks
from lit_dp.trainer import Trainer
from lit_dp.usage import Parser, condensed, config_name, with_shipped_configs


def _quieten() -> None:
    """Leave the terminal to what a person reads: no advertisements, no notes about internals."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (
        ".*isinstance\\(treespec, LeafSpec\\)",  # Lightning 2.6.6 on torch 2.14
        ".*does not have many workers",  # data in memory needs none
        ".*smaller than the logging interval",  # we log by epoch
        ".*is not supported by the model summary",  # bf16-mixed
        ".*callbacks used to create the checkpoint need to be provided",  # evaluation saves none
        "Checkpoint directory .* exists and is not empty",  # where a run is resumed, that is its place
        "The `srun` command is available",  # the plan says who started how many processes
        "The dirpath has changed from",  # a run that goes on in a new folder looks for the best of its own there
    ):
        warnings.filterwarnings("ignore", text)


class LitCLI(LightningCLI):
    """Parses a config, builds model, data and trainer, and runs the command that was typed.

    Args:
        args: command line, `sys.argv[1:]` by default.
        run: False only builds `model`, `datamodule` and `trainer` from a config without a command.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        _quieten()
        super().__init__(
            model_class=LightningModule,
            subclass_mode_model=True,
            datamodule_class=LightningDataModule,
            subclass_mode_data=True,
            trainer_class=Trainer,
            trainer_defaults={
                "default_root_dir": "runs",
                "max_epochs": 10,
                # by its class, so that --trainer.strategy.virtual_ranks and the like find it
                "strategy": {"class_path": "lit_dp.ExactDDPStrategy"},
            },
            parser_class=Parser,
            parser_kwargs={"prog": "python -m lit_dp", "description": "Data-parallel training that proves itself."},
            save_config_callback=SaveRunConfig,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            args=args,
            run=run,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", type=str | None, default=None, help="Run folder below trainer.default_root_dir.")
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(LastCheckpoint, "last")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self._typed = args is None  # arguments that a program gives run in the program's own process
        if args is None or isinstance(args, list):
            args = with_shipped_configs(sys.argv[1:] if args is None else args)
        parse: Any = parser.parse_object if isinstance(args, dict) else parser.parse_args
        self.config = parse(args)
        self._given = parse(args, defaults=False)

    def _parse_ckpt_path(self) -> None:
        """Lay the hyperparameters that a checkpoint holds under what the command line and the config give. Lightning
        lays them over (PL PR 21455, FAULTS 18)."""
        if not (command := self.config.get("subcommand")):
            return
        path = self._checkpoint_of(self.config[command])
        saved = hyperparameters(path) if path is not None and not examine(path, every_record=False).fault else {}
        given = self._given[command].get("model") or Namespace()
        kind = saved.get("_class_path")
        saved = {name: value for name, value in saved.items() if not name.startswith("_")}
        if not saved or (kind is not None and given.get("class_path") not in (None, kind)):
            return
        names = {name for name in saved if f"init_args.{name}" not in given}
        model = {"class_path": kind or self.config[command].model.class_path}
        model["init_args"] = {name: value for name, value in saved.items() if name in names}
        self.config = self.parser.parse_object({command: {"model": model}}, self.config)

    def _checkpoint_of(self, config: Namespace) -> Path | None:
        """The local file that a command starts from. Where a job is started again it is told the same as before."""
        resume, path = config.get("resume"), config.get("ckpt_path")
        if self.config.subcommand == "fit" and (resume := mode(resume, path)) not in ("never", "again"):
            name = config.name or config_name(config.config)
            choice = choose(resume, Path(config.trainer.default_root_dir) / name / "checkpoints")
            if choice.refusal is not None and launch.detect().world_size in (None, 1):  # others would wait for this one
                raise ConfigError(choice.refusal)
            path = choice.path
        return Path(path) if path is not None and Path(path).is_file() else None

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "plan": {"model", "datamodule"}}

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand] if self.subcommand else self.config
        config.name = config.name or config_name(config.config)
        if self.subcommand == "predict" and config.return_predictions is None:
            config.return_predictions = False  # they go to a file; Lightning would keep them all on every rank
        if self.subcommand == "plan":
            self._plan_only(config)
        elif self._typed and self.subcommand in ("fit", "validate", "test", "predict"):
            start_ranks(config.trainer)

    def _plan_only(self, config: Any) -> None:
        """Keep the devices that are planned for from being looked for: one process plans for any number."""
        config.devices = config.devices or config.trainer.devices
        config.nodes = config.nodes or launch.hosts(launch.detect(), config.trainer.num_nodes)
        for name, value in {"devices": 1, "num_nodes": 1, "accelerator": "cpu", "precision": None}.items():
            config.trainer[name] = value

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ConfigError:
            raise
        except ValueError as error:  # jsonargparse takes a class's own refusal for a type that does not fit
            if "Does not validate" not in str(error):
                raise
            raise ConfigError(condensed(str(error))) from error

    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        logger = self._get(self.config_init, "trainer").logger
        return super().instantiate_trainer(logger=self._loggers(logger), **kwargs)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> LightningTrainer:
        lines = config["enable_progress_bar"] is not False
        config["enable_progress_bar"] = lines and sys.stdout.isatty()  # bars are for terminals, lines for log files too
        saves = self.subcommand == "fit" and config["enable_checkpointing"] is not False and not config["fast_dev_run"]
        config["enable_checkpointing"] = saves
        saved = callbacks if saves else [c for c in callbacks if not isinstance(c, ModelCheckpoint | LastCheckpoint)]
        bars = [ProgressBar()] if config["enable_progress_bar"] else []
        own_data = isinstance(self.datamodule, ImageDataModule)  # whose batches tell their indices under any strategy
        ledger = Ledger(indices_of=(lambda batch: batch.indices) if own_data else None)
        said = [PrintPlan(), EpochLines()] if lines else []
        return super()._instantiate_trainer(config, [*saved, *bars, *said, ledger, PredictionFile()])

    def _loggers(self, configured: Any) -> list[Logger] | bool:
        """The run folder first, then what the config adds; `logger: false` writes nothing."""
        if configured is False:
            return False
        more = configured if isinstance(configured, list) else [configured]
        return [self._run_folder(), *(logger for logger in more if isinstance(logger, Logger))]

    def _run_folder(self) -> CSVLogger:
        root = Path(self._get(self.config_init, "trainer").default_root_dir)
        name = self._get(self.config_init, "name")
        if self.subcommand in (None, "fit"):
            resume, ckpt_path = (self._get(self.config_init, key, default=None) for key in ("resume", "ckpt_path"))
            return RunFolder(root, name, resume=mode(resume, ckpt_path))
        # What a checkpoint is found to be worth lies beside it.
        of_checkpoint = run_folder_of(self._get(self.config_init, "ckpt_path"))
        return (
            RunFolder(of_checkpoint, self.subcommand) if of_checkpoint else RunFolder(root, f"{name}/{self.subcommand}")
        )

    def _check(self) -> None:
        """Find in this process, before others are started and a folder is made, what is wrong."""
        checkpoint = self._get(self.config_init, "ckpt_path")
        if checkpoint not in (None, "best", "last") and "://" not in str(checkpoint) and not Path(checkpoint).is_file():
            raise ConfigError(f"there is no checkpoint {checkpoint}: give --ckpt_path a file, as fit prints it")
        if check := getattr(self.datamodule, "check", None):
            virtual_ranks = getattr(self.trainer.strategy, "virtual_ranks", None)
            check(world_size=virtual_ranks or self.trainer.num_devices * self.trainer.num_nodes)
        if check := getattr(self.model, "check", None):
            check(self.datamodule)

    before_fit = before_validate = before_test = before_predict = _check

    def after_fit(self) -> None:
        """Draw the curves and say what came out and what to type next."""
        folder = self.trainer.log_dir  # all ranks: it broadcasts
        if not self.trainer.is_global_zero or folder is None:
            return
        from lit_dp.commands.plots import draw_curves, draw_step_profile

        draw_curves(Path(folder) / "metrics.csv", Path(folder) / "curves.png")
        profile = getattr(self.trainer, "step_profile", None)
        if profile is not None and profile.times is not None:
            draw_step_profile(profile.times, Path(folder) / "step_profile.png")
        self._say_what_came_out(folder)

    def _say_what_came_out(self, folder: str) -> None:
        if self.trainer.should_stop:
            print(f"stopped early, after {self.trainer.current_epoch} of {self.trainer.max_epochs} epochs")
        print(f"weights SHA-256 {sha256(self.model.state_dict())[:16]}")  # what raw_ddp prints for the same training
        saved = self.trainer.checkpoint_callback
        if not isinstance(saved, ModelCheckpoint) or not saved.best_model_path:
            return
        if saved.best_model_score is not None:
            print(f"best {saved.monitor} {float(saved.best_model_score):.4f}")
        checkpoint = _relative(saved.best_model_path)
        print(f"checkpoint {checkpoint}")
        print(f"next: python -m lit_dp test --config {_relative(folder)}/config.yaml --ckpt_path {checkpoint}")

    def after_test(self) -> None:
        """Draw the confusion matrix, where the module counted one."""
        folder = self.trainer.log_dir
        counts = getattr(self.model, "confusion_matrix", None)
        if self.trainer.is_global_zero and folder is not None and counts is not None:
            from lit_dp.commands.plots import draw_confusion

            draw_confusion(counts.cpu(), getattr(self.datamodule, "classes", None), Path(folder) / "confusion.png")


def _relative(path: str | Path) -> Path:
    """As one would type it: relative to the working folder where it lies below it."""
    path = Path(path)
    return path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path
