"""Train a model from a recipe: the run, its report and the exported model directory.

    result = ingot.train("recipes/digits.toml", ["optimizer.lr=3e-3"])
    result.metrics["validation_loss"], result.run_dir

    run = TrainingRun("recipes/digits.toml", resume=True)    # the newest run of that name
    run.stop()                                               # from a signal handler or a thread
    run.train()

A decoder or classifier is exported as a model directory when its run is finished, with quantized
weights after quantization-aware training, and a LoRA adapter as a PEFT directory; `export` writes
that of a run at its newest checkpoint.
"""

# pyright: basic
from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ingot.core import config, lineage, log, paths
from ingot.core.errors import IngotError
from ingot.data import tokenizer as tokenizers
from ingot.interop import classifier, hf, peft
from ingot.nn import Decoder
from ingot.nn.qat import convert_qat
from ingot.nn.weights import WeightsError
from ingot.observe import report
from ingot.observe.tensorboard import TensorBoardLogger
from ingot.parallel.ranks import Ranks, connect, name_silent_ranks
from ingot.parallel.trace import write_collectives
from ingot.training.checkpoint import Checkpoint, Checkpoints
from ingot.training.evaluate import EvalResult
from ingot.training.objective import DPOConfig
from ingot.training.recipe import Datasets, Recipe, build_model
from ingot.training.trainer import Trainer
from ingot.workflows.alarm import LiveAlarm
from ingot.workflows.chat_data import load_datasets
from ingot.workflows.forecast import LiveForecast
from ingot.workflows.reference import add_reference

MODEL = "model"
RECIPE = "recipe.toml"
LOGS = "ranks"  # output of the other ranks
_GENERATION_CONFIG = "generation_config.json"  # the tokens that end a turn
_LOG = log.logger(__name__)

OnMetrics = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The outcome of `train` or `export`."""

    run_dir: Path
    steps: int
    finished: bool
    """False if the run was stopped; it has a checkpoint then."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Results of the last evaluation."""
    model_dir: Path | None = None
    """The exported model directory; None if the model is a GRU."""


def train(
    recipe: Path | str | Recipe,
    overrides: Sequence[str] = (),
    *,
    run_dir: Path | None = None,
    resume: bool = False,
    peak_flops: float | None = None,
    on_metrics: OnMetrics = lambda metrics: None,
) -> TrainResult:
    """Train the model of a recipe and return where it is.

    Args:
        recipe: A TOML file, or a `Recipe`.
        overrides: Values that replace those of a file: `dotted.key=value`.
        run_dir: The directory of the run; by default a new one in `core.paths.runs()`.
        resume: Continue the run in `run_dir`, or the newest one of the recipe's name, from its
            newest checkpoint.
        peak_flops: FLOP/s that the machine can reach, to report model FLOPs utilization.
        on_metrics: Called with the metrics of each step.
    """
    run = TrainingRun(recipe, overrides, run_dir=run_dir, resume=resume, peak_flops=peak_flops)
    return run.train(on_metrics)


class TrainingRun:
    """A run that is ready to train; its arguments are those of `train`."""

    def __init__(
        self,
        recipe: Path | str | Recipe,
        overrides: Sequence[str] = (),
        *,
        run_dir: Path | None = None,
        resume: bool = False,
        peak_flops: float | None = None,
    ) -> None:
        self.recipe = _read_recipe(recipe, overrides)
        self.ranks = connect(self.recipe.parallel.timeout_s, self.recipe.device)
        resume = resume or _is_restarted(run_dir)
        self.directory = self._find_directory(run_dir, resume)
        try:
            self.trainer = build_trainer(self.recipe, self.directory, peak_flops, self.ranks)
        except BaseException:
            with suppress(OSError):
                self.directory.rmdir()  # still empty: nothing was trained
            raise
        if resume and self.trainer.resume():
            _LOG.info("resuming from step %d", self.trainer.step)

    def _find_directory(self, run_dir: Path | None, resume: bool) -> Path:
        """Return the directory of the run, which the main rank chooses."""
        main = self.ranks.is_main
        found = choose_directory(self.recipe.name, run_dir, resume) if main else Path()
        return Path(self.ranks.share(str(found)))

    def stop(self) -> None:
        """Stop after the current step, with a checkpoint. May be called from a signal handler."""
        self.trainer.stop()

    def train(self, on_metrics: OnMetrics = lambda metrics: None) -> TrainResult:
        """Train to the end of the recipe or until `stop`, and export a finished model."""
        _LOG.info("the run is in %s", self.directory)
        with _naming_silent_ranks(self.ranks, self.directory):
            if self.ranks.is_main:
                return self._train(on_metrics)
            return self._result(self.trainer.run(), None)

    def _train(self, on_metrics: OnMetrics) -> TrainResult:
        trainer, directory = self.trainer, self.directory
        with _reporting(directory) as outcome:
            with TensorBoardLogger(directory, trainer.step) as board:
                forecasts = LiveForecast(self.recipe, directory)
                forecasts.resume(trainer.step)
                alarm = LiveAlarm(self.recipe, directory, trainer)
                alarm.resume(trainer.step)

                def log_metrics(metrics: dict[str, Any]) -> None:
                    board.add(metrics)
                    if (found := forecasts.add(metrics)) is not None:
                        board.add(found)
                    alarm.add(metrics)
                    on_metrics(metrics)

                score = trainer.run(log_metrics)
            if score is None:
                outcome.append("stopped")
                return self._result(None, None)
            path = directory / MODEL
            if path.exists():  # of the finished run that this one continues
                shutil.rmtree(path)
            with trainer.ema_weights():
                model = trainer.model
                if self.ranks.size > 1:  # it has only some of the rows
                    model, _ = _load_model(self.recipe, directory)
                exported = _write_model(model, self.recipe, trainer.datasets, trainer.step, path)
        return self._result(score, path if exported else None)

    def _result(self, score: EvalResult | None, model_dir: Path | None) -> TrainResult:
        return TrainResult(
            run_dir=self.directory,
            steps=self.trainer.step,
            finished=score is not None,
            metrics=score.metrics() if score else {},
            model_dir=model_dir,
        )


def export(
    recipe: Path | str | Recipe,
    model_dir: Path,
    overrides: Sequence[str] = (),
    *,
    run_dir: Path | None = None,
) -> TrainResult:
    """Write the model of a run at its newest complete checkpoint; the run is only read.

    The run may still be training. `run_dir` is its directory; by default that of the newest run of
    the recipe's name.
    """
    directory = find_run(_read_recipe(recipe, overrides).name, run_dir)
    own = config.load(Recipe, directory / RECIPE)
    model, checkpoint = _load_model(own, directory)
    datasets = load_datasets(own)
    if checkpoint.metadata["data"] != datasets.fingerprint:
        raise IngotError(
            f"{directory}: the data has changed since the run was started",
            hint="restore the data: its tokenizer belongs to the model",
        )
    if not _write_model(model, own, datasets, checkpoint.step, model_dir):
        raise IngotError(
            f"{directory}: a GRU cannot be exported as a model directory",
            hint="use the weights in its checkpoints, which are safetensors",
        )
    return TrainResult(
        run_dir=directory, steps=checkpoint.step, finished=False, model_dir=model_dir
    )


def choose_directory(name: str, run_dir: Path | None, resume: bool) -> Path:
    """Return the directory of a run to continue, or that of a new one."""
    return find_run(name, run_dir) if resume else _create_directory(name, run_dir)


def find_run(name: str, run_dir: Path | None = None) -> Path:
    """Return the directory of a run: `run_dir`, or the newest run of this name."""
    if run_dir is not None:
        if not (run_dir / RECIPE).is_file():
            raise IngotError(
                f"{run_dir}: not the directory of a run", hint="start the run without resuming"
            )
        return run_dir
    directories = [path for path in paths.find_runs(name) if (path / RECIPE).is_file()]
    if not directories:
        raise IngotError(
            f"no run of '{name}' in {paths.runs()}",
            hint="start one without resuming, or give its directory",
        )
    return directories[-1]


def _read_recipe(recipe: Path | str | Recipe, overrides: Sequence[str]) -> Recipe:
    if isinstance(recipe, Recipe):
        if overrides:
            raise IngotError(
                "overrides: they apply to a recipe file only",
                hint="change the Recipe with dataclasses.replace",
            )
        return recipe
    return config.load(Recipe, recipe, overrides)


def _is_restarted(run_dir: Path | None) -> bool:
    """Return whether torchrun has started this process again, after a rank had failed."""
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return count > 0 and run_dir is not None and (run_dir / RECIPE).is_file()


def _create_directory(name: str, run_dir: Path | None) -> Path:
    if run_dir is None:
        return paths.create_run_dir(name)
    if run_dir.exists() and not (
        run_dir.is_dir() and all(path.name == LOGS for path in run_dir.iterdir())
    ):
        raise IngotError(
            f"{run_dir}: not an empty directory",
            hint="continue the run with --resume, or name a directory that does not exist yet",
        )
    return run_dir


def build_trainer(
    recipe: Recipe,
    directory: Path,
    peak_flops: float | None,
    ranks: Ranks,
    datasets: Datasets | None = None,
) -> Trainer:
    """Load model and data of a recipe, unless the data is given; `directory` is that of the run."""
    model = None if recipe.init_from is None else hf.load(recipe.init_from)
    datasets = _load_datasets(recipe, ranks) if datasets is None else datasets
    trainer = Trainer(recipe, directory, model, peak_flops, datasets, ranks)
    if isinstance(recipe.objective, DPOConfig):  # before a checkpoint is loaded
        add_reference(trainer.model, trainer.datasets)
    if isinstance(
        trainer.model, Decoder
    ):  # fail now rather than when the trained model is exported
        hf.write_config(trainer.model.config, trainer.model.source_config, recipe.precision.dtype)
        if recipe.adapter:
            _to_peft(trainer.model, recipe)
        if recipe.qat:
            hf.check_quantizable(trainer.model)
    return trainer


def _load_datasets(recipe: Recipe, ranks: Ranks) -> Datasets:
    """Load the data; the main rank first, which tokenizes the text if that was not done before."""
    if not ranks.is_main:
        ranks.barrier()
    datasets = load_datasets(recipe)
    if ranks.is_main:
        ranks.barrier()
    return datasets


def _write_model(
    model: nn.Module, recipe: Recipe, datasets: Datasets, step: int, path: Path
) -> bool:
    """Write a model, or the adapter of a decoder, with its lineage; return False for a GRU."""
    if isinstance(model, classifier.Classifier):
        row_shape = datasets.train.batch([0]).x.shape[1:]
        with paths.atomic_directory(path) as temporary:
            classifier.save(model, temporary, row_shape)
            lineage.append(
                temporary, "train", recipe=recipe.name, steps=step, data=datasets.fingerprint
            )
        return True
    if datasets.tokenizer_dir is None or not isinstance(model, Decoder):
        return False
    with paths.atomic_directory(path) as temporary:
        if recipe.adapter:
            peft.write(_to_peft(model, recipe), temporary)
        elif recipe.qat:
            hf.save(convert_qat(model, recipe.qat.weight_format), temporary)
        else:
            hf.save(model, temporary)
        tokenizers.copy_files(datasets.tokenizer_dir, temporary)
        for name in (lineage.NAME, _GENERATION_CONFIG):
            if recipe.init_from is not None and (recipe.init_from / name).is_file():
                shutil.copyfile(recipe.init_from / name, temporary / name)
        facts = {"qat": str(recipe.qat.weight_format)} if recipe.qat else {}
        lineage.append(
            temporary, "train", recipe=recipe.name, steps=step, data=datasets.fingerprint, **facts
        )
    return True


def _to_peft(model: Decoder, recipe: Recipe) -> peft.Adapter:
    assert recipe.adapter is not None
    base = None if recipe.init_from is None else str(recipe.init_from)
    return peft.from_weights(model.lora_weights(), recipe.adapter, model, base)


def _load_model(recipe: Recipe, directory: Path) -> tuple[nn.Module, Checkpoint]:
    """Return the model of a run at its newest checkpoint, and the checkpoint."""
    model = hf.load(recipe.init_from) if recipe.init_from else build_model(recipe)
    if recipe.adapter and isinstance(model, Decoder):
        model.add_lora(recipe.adapter, recipe.seed)
    model.to(recipe.precision.dtype)
    return model, _load_checkpoint(model, directory, recipe)


def _load_checkpoint(model: nn.Module, directory: Path, recipe: Recipe) -> Checkpoint:
    """Load the newest checkpoint of a run, which may still be training, into a model."""
    checkpoints = Checkpoints(directory / "checkpoints", recipe.keep_checkpoints)
    while checkpoint := checkpoints.latest():
        try:
            checkpoint.load_into(model)
            return checkpoint
        except (WeightsError, OSError):
            if checkpoint.path.exists():
                raise
            # Otherwise the run has deleted it meanwhile, and has a newer one.
    raise IngotError(
        f"{directory}: no complete checkpoint yet",
        hint=f"wait for the first: there is one every {recipe.checkpoint_every} steps",
    )


@contextmanager
def _naming_silent_ranks(ranks: Ranks, directory: Path) -> Generator[None]:
    """Say which ranks do not answer, and in which collective, if one has failed or timed out."""
    try:
        yield
    except RuntimeError as error:
        if ranks.size == 1:
            raise
        path = directory / LOGS / f"{ranks.rank}-collectives.json"
        last, silent = write_collectives(path), name_silent_ranks()
        if not silent:
            raise
        names = ", ".join(map(str, silent))
        raise IngotError(
            f"rank {names}: does not answer in {last} ({error})"[:300],
            hint="its process is stopped, killed or unreachable; continue with --resume. The "
            f"latest collectives are in {path}",
        ) from error


@contextmanager
def _reporting(directory: Path) -> Generator[list[str]]:
    """Write the report of a run when it ends, however it ends; a failing report is logged."""
    outcome: list[str] = []
    try:
        yield outcome
    except KeyboardInterrupt:
        outcome.append("stopped")
        raise
    except BaseException as error:
        outcome.append(error.message if isinstance(error, IngotError) else type(error).__name__)
        raise
    finally:
        try:
            path = report.write(directory, (outcome or ["finished"])[0])
            _LOG.info("the report is %s", path)
        except Exception as error:  # also from a plotting library
            _LOG.warning("no report: %s", error)
