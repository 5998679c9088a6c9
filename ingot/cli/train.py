"""`ingot train`: a recipe into a trained model."""

from __future__ import annotations

import json as json_format
import shutil
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ingot.cli import escape_markup
from ingot.core import config, lineage, log, paths
from ingot.core.errors import IngotError

if TYPE_CHECKING:
    from torch import nn

    from ingot.data import TokenDataset
    from ingot.nn import Decoder
    from ingot.training.checkpoint import Checkpoint
    from ingot.training.recipe import Recipe
    from ingot.training.trainer import Trainer

MODEL = "model"


def train(
    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")],
    overrides: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY=VALUE ...]")
    ] = (),
    run: Path | None = None,
    resume: tyro.conf.FlagCreatePairsOff[bool] = False,
    export: Path | None = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Train the model of a recipe. Killed at any moment, the run goes on with `--resume` as if
    nothing had happened. Ctrl-C ends it behind the step that is being made, with a checkpoint.

    A decoder is written as a model directory at the end, for `ingot generate`; `--export` writes
    one of a run that is being made or was stopped, as it was at its newest checkpoint.

    Examples: `ingot train recipes/xor.toml`, `ingot train recipes/digits.toml steps=100
    optimizer.lr=3e-3`, `ingot train recipes/digits.toml --resume` for the newest run of it,
    `ingot train recipes/stdlib-10m.toml --export model`.

    Args:
        recipe: A TOML file.
        overrides: Values instead of the recipe's: dotted.key=value.
        run: The directory of the run; a new one below the runs if left out.
        resume: Go on with the run in `--run`, or with the newest of this name.
        export: Train nothing; write the model of that run to this directory.
        json: Print the result as JSON.
    """
    from ingot.observe.tensorboard import TensorBoardLogger
    from ingot.training.recipe import Recipe

    wanted = config.load(Recipe, recipe, overrides)
    directory = _directory(wanted.name, run, resume or export is not None)
    if export is not None:
        _print(_exported(directory, export), json)
        return
    try:
        trainer = _trainer(wanted, directory)
    except BaseException:
        with suppress(OSError):
            directory.rmdir()  # empty still: the run has not begun
        raise
    if resume and trainer.resume():
        log.logger(__name__).info("going on behind step %d", trainer.step)
    log.logger(__name__).info("the run is in %s", escape_markup(str(directory)))
    with _reported(directory):
        with TensorBoardLogger(directory, trainer.step) as board, _stopping(trainer):
            score = trainer.run(board.add)
        if score is None:
            raise KeyboardInterrupt  # what is there is saved, and the exit says that it is not all
        with trainer.ema_weights():
            path = directory / MODEL
            if path.exists():  # of a run that was finished before, and went on
                shutil.rmtree(path)
            model = _write(trainer.model, wanted, trainer.datasets.tokens, trainer.step, path)
    result: dict[str, Any] = {"run": str(directory), "steps": trainer.step, **score.metrics()}
    if model:
        result["model"] = str(path)
    _print(result, json)


def _directory(name: str, run: Path | None, resume: bool) -> Path:
    if not resume:
        if run is None:
            return paths.create_run_dir(name)
        if run.exists() and (not run.is_dir() or any(run.iterdir())):
            raise IngotError(
                f"{run} has something in it",
                hint="go on with it by --resume, or name a directory that does not exist yet",
            )
        return run
    if run is None:
        found = [path for path in paths.find_runs(name) if (path / "recipe.toml").is_file()]
        if not found:
            raise IngotError(
                f"there is no run of '{name}' in {paths.runs()}",
                hint="start one without --resume, or name its directory by --run",
            )
        return found[-1]
    if not (run / "recipe.toml").is_file():
        raise IngotError(f"{run} is no run", hint="start it without --resume")
    return run


def _trainer(recipe: Recipe, directory: Path) -> Trainer:
    from ingot.training.trainer import Trainer

    model = None
    if recipe.init_from is not None:
        from ingot.interop import hf

        model = hf.load(recipe.init_from)
    trainer = Trainer(recipe, directory, model, _peak(recipe))
    decoder = _decoder(trainer)
    if decoder is not None:  # what cannot be written at the end had better be known now
        from ingot.interop import hf

        hf.write_config(decoder.config, decoder.source_config, recipe.precision.dtype)
    return trainer


def _peak(recipe: Recipe) -> float | None:
    """FLOP/s of the machine's matmuls, if they were measured before: that takes 12 seconds."""
    from ingot.bench.machine import cached_peaks

    found, dtype = cached_peaks(), "bf16" if recipe.precision.value == "bf16" else "fp32"
    peak = found.matmul[dtype] if found else None
    return peak.value * 1e9 if peak else None


def _decoder(trainer: Trainer) -> Decoder | None:
    from ingot.nn import Decoder

    return trainer.model if isinstance(trainer.model, Decoder) else None


def _write(
    model: nn.Module, recipe: Recipe, corpus: TokenDataset | None, step: int, path: Path
) -> bool:
    """Write a decoder as a model directory, with its tokenizer and its lineage; nothing else."""
    from ingot.data import tokenizer
    from ingot.interop import hf
    from ingot.nn import Decoder

    if corpus is None or not isinstance(model, Decoder):
        return False
    with paths.atomic_directory(path) as temporary:
        hf.save(model, temporary)
        tokenizer.copy_files(corpus.directory, temporary)
        start = recipe.init_from
        if start is not None and (start / lineage.NAME).is_file():
            shutil.copyfile(start / lineage.NAME, temporary / lineage.NAME)
        lineage.append(temporary, "train", recipe=recipe.name, steps=step, data=corpus.hash)
    return True


def _exported(directory: Path, path: Path) -> dict[str, Any]:
    """Write the model of a run as it was at its newest whole checkpoint; the run is only read."""
    from ingot.interop import hf
    from ingot.training.recipe import Recipe, build_model, load_datasets

    recipe = config.load(Recipe, directory / "recipe.toml")
    model = hf.load(recipe.init_from) if recipe.init_from else build_model(recipe)
    model.to(recipe.precision.dtype)
    found, datasets = _filled(model, directory, recipe), load_datasets(recipe.data)
    if found.metadata["data"] != datasets.fingerprint:
        raise IngotError(
            f"the run in {directory} was trained on other data than is there now",
            hint="restore the data that it was started with: its vocabulary is needed",
        )
    if not _write(model, recipe, datasets.tokens, found.step, path):
        raise IngotError(
            f"{directory} is of no decoder, and a model directory is for decoders",
            hint="its weights are in its checkpoints, as safetensors",
        )
    return {"run": str(directory), "steps": found.step, "model": str(path)}


def _filled(model: nn.Module, directory: Path, recipe: Recipe) -> Checkpoint:
    """Give a model the weights of the newest checkpoint of a run, which may be going on."""
    from ingot.nn.weights import WeightsError
    from ingot.training.checkpoint import Checkpoints

    kept = Checkpoints(directory / "checkpoints", recipe.keep_checkpoints)
    while found := kept.latest():
        try:
            found.load_into(model)
            return found
        except (WeightsError, OSError):
            if found.path.exists():
                raise  # else the run has deleted it meanwhile, and there is a newer one
    raise IngotError(
        f"{directory} has no whole checkpoint yet",
        hint=f"wait for the first: it writes one every {recipe.checkpoint_every} steps",
    )


@contextmanager
def _reported(directory: Path) -> Generator[None]:
    """Write the report of a run at its end, whatever that is; none is worth losing a run for."""
    from ingot.observe import report

    ended = "finished"
    try:
        yield
    except KeyboardInterrupt:
        ended = "stopped"
        raise
    except BaseException as error:
        ended = error.message if isinstance(error, IngotError) else type(error).__name__
        raise
    finally:
        try:
            path = report.write(directory, ended)
            log.logger(__name__).info("the report is %s", escape_markup(str(path)))
        except Exception as error:  # also what a library may come up with
            log.logger(__name__).warning("no report: %s", error)


@contextmanager
def _stopping(trainer: Trainer) -> Generator[None]:
    """Have Ctrl-C and SIGTERM end the run behind its step; a second one ends it at once."""

    def stop(number: int, frame: object) -> None:
        log.logger(__name__).info("stopping behind this step")
        trainer.stop()
        for signum, old in before.items():
            signal.signal(signum, old)

    before: dict[signal.Signals, Any] = {
        signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


def _print(result: dict[str, Any], json: bool) -> None:
    if json:
        print(json_format.dumps(result, indent=2))  # noqa: T201
        return
    for name, value in result.items():
        shown = f"{value:.4g}" if isinstance(value, float) else escape_markup(str(value))
        log.stdout().print(f"{name.replace('_', ' '):16} {shown}", highlight=False, soft_wrap=True)
