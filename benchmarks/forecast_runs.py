"""Small training runs for `ingot.forecast`: made here, shipped as ingot/forecast/runs.npz.

    python -m benchmarks.forecast_runs train --family text --runs 120 --out DIRECTORY
    python -m benchmarks.forecast_runs pack --out DIRECTORY
    python -m benchmarks.forecast_runs judge --out DIRECTORY

`train` trains runs 0 to N - 1 of a family that DIRECTORY does not have yet. The recipe of a run
depends on the family and its number alone: model, batch size, steps, optimizer, schedule and a
learning rate from a hundredth of a good one to far too high. One in eight warms up to such a rate
over the whole run (a ramp). The guard is off, so runs diverge until the loss is not finite.

`--diverging` draws runs for the alarm (`benchmarks/forecast_alarm.py`), without clipping: 30 %
ramps, 55 % with a rate 10 to 200 times too high, most of them with a warm-up, and 15 % healthy.

`pack` writes the curves of the runs in DIRECTORY as one compressed file, and what is learned from
them. `judge` measures the forecasts (`benchmarks/forecast_judge.py`).
"""

# pyright: basic
from __future__ import annotations

import argparse
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import forecast_judge
from ingot.core import config, log
from ingot.forecast import learned, runs
from ingot.forecast.runs import RunLibrary
from ingot.nn import CNNConfig, DecoderConfig, DenseConfig, GRUConfig, Rope
from ingot.observe import metrics
from ingot.training.clip import AdaGCConfig, ClipNormConfig, ZClipConfig
from ingot.training.guard import Diverged, SpikeGuardConfig
from ingot.training.optimizer import AdamWConfig, LionConfig, SGDConfig
from ingot.training.precision import Precision
from ingot.training.recipe import DigitsData, Recipe, TextData, XorData
from ingot.training.schedule import LRSchedule
from ingot.training.trainer import RECIPE, Trainer
from ingot.workflows.forecast import make_library

PACKAGE = Path(runs.__file__).parent

BINS = 50
_SGD, _LION = 50.0, 0.1  # good learning rates, relative to AdamW's
_CHOSEN_ON = {"xor": 150, "digits": 150, "text": 117}
"""Number of runs on which the constants of `ingot.forecast` were chosen; later ones are fresh."""
_Drawn = tuple[dict[str, Any], float]  # keys of the recipe, AdamW's good learning rate


def draw(family: str, number: int, diverging: bool = False) -> Recipe:
    """Return the recipe of a run."""
    if diverging:
        return _draw_diverging(family, number)
    rng = np.random.default_rng([zlib.crc32(family.encode()), number])
    keys, good = _FAMILIES[family](rng)
    steps = int(rng.choice([200, 300, 400, 600]))
    ramp = rng.random() < 0.125
    too_high = rng.random() < 0.15
    low, high = (1.0, 2.3) if ramp or too_high else (-1.3, 0.7)
    lr = good * 10 ** rng.uniform(low, high)
    return Recipe(
        name=f"{family}-{number}",
        steps=steps,
        optimizer=_optimizer(rng, lr),
        schedule=_schedule(rng, steps, ramp),
        clip=_clip(rng),
        eval_every=steps // BINS,
        **_ALONE,
        seed=number,
        **keys,
    )


def _draw_diverging(family: str, number: int) -> Recipe:
    """Return a run without clipping: 30 % ramps, 55 % with a rate that is too high.

    Half of the decoders compute in bf16, and the second moment's beta is up to 0.9999.
    """
    rng = np.random.default_rng([zlib.crc32(f"{family} alarm".encode()), number])
    keys, good = (_small_text if family == "text" else _FAMILIES[family])(rng)
    steps = int(rng.choice([200, 300] if family in _OF_TEXT else [300, 600]))
    kind = rng.random()
    ramp = kind < 0.3
    low, high = (1.0, 2.3) if kind < 0.85 else (-1.3, 0.5)
    lr = good * 10 ** rng.uniform(low, high)
    warmup = steps if ramp else int(steps * rng.choice([0.0, 0.05, 0.1, 0.2, 0.3]))
    shape: Any = rng.choice(["constant", "cosine", "wsd"])
    bf16 = family == "text" and rng.random() < 0.5
    keys["eval_batches"] = 1
    return Recipe(
        name=f"{family}-{number}",
        steps=steps,
        optimizer=_optimizer_without_brakes(rng, lr),
        schedule=LRSchedule(kind=shape, warmup_steps=warmup),
        clip=ClipNormConfig(max_norm=1e4),
        precision=Precision.BF16 if bf16 else Precision.FP32,
        **_ALONE,
        seed=number,
        **keys,
    )


_ALONE: dict[str, Any] = {
    "guard": SpikeGuardConfig(policy="skip", z_threshold=1e6, patience=0),
    "device": "cpu",
    "checkpoint_every": 10**9,
}


def _xor(rng: np.random.Generator) -> _Drawn:
    widths = tuple(int(rng.choice([4, 8, 16, 32])) for _ in range(rng.integers(1, 3)))
    model = DenseConfig(in_features=2, hidden_dims=widths, out_features=2)
    return {"data": XorData(), "model": model, "global_batch_size": 4}, 0.02


def _digits(rng: np.random.Generator) -> _Drawn:
    dropout = float(rng.choice([0.0, 0.0, 0.2]))
    if rng.random() < 0.6:
        widths = tuple(int(rng.choice([16, 32, 64])) for _ in range(rng.integers(1, 4)))
        dense: dict[str, Any] = {"in_features": 64, "out_features": 10, "dropout": dropout}
        model: Any = DenseConfig(hidden_dims=widths, **dense)
    else:
        model = CNNConfig(widths=(int(rng.choice([4, 8, 16])), 16), num_classes=10, dropout=dropout)
    smoothing = float(rng.choice([0.0, 0.0, 0.1]))
    batch = int(rng.choice([8, 16, 32, 64]))
    keys = {"data": DigitsData(), "model": model, "global_batch_size": batch}
    return {**keys, "label_smoothing": smoothing, "eval_batches": 360 // batch}, 0.003


def _text(rng: np.random.Generator) -> _Drawn:
    return _decoder(rng, dims=(32, 48, 64, 96), lengths=(64, 128), batches=(4, 8, 16))


def _small_text(rng: np.random.Generator) -> _Drawn:
    return _decoder(rng, dims=(32, 48), lengths=(32, 64), batches=(2, 4, 8))


def _decoder(
    rng: np.random.Generator,
    *,
    dims: tuple[int, ...],
    lengths: tuple[int, ...],
    batches: tuple[int, ...],
) -> _Drawn:
    dim = int(rng.choice(dims))
    length, batch = int(rng.choice(lengths)), int(rng.choice(batches))
    model = DecoderConfig(
        vocab_size=512,
        dim=dim,
        layers=int(rng.integers(1, 4)),
        heads=dim // 16,
        kv_heads=dim // 16,
        head_dim=16,
        ffn_dim=8 * dim // 3 // 8 * 8,
        max_seq_len=length,
        rope=Rope(),
        tie_embeddings=bool(rng.random() < 0.5),
    )
    data = TextData(source="stdlib", vocab_size=512, seq_len=length)
    keys = {"data": data, "model": model, "global_batch_size": batch}
    return {**keys, "eval_batches": 4096 // (length * batch)}, 0.004


def _recurrent(rng: np.random.Generator) -> _Drawn:
    length = int(rng.choice([32, 64]))
    dim, layers = int(rng.choice([32, 64])), int(rng.integers(1, 4))
    model = GRUConfig(vocab_size=512, dim=dim, layers=layers)
    data = TextData(source="stdlib", vocab_size=512, seq_len=length)
    return {"data": data, "model": model, "global_batch_size": int(rng.choice([4, 8]))}, 0.004


_FAMILIES: dict[str, Callable[[np.random.Generator], _Drawn]] = {
    "xor": _xor,
    "digits": _digits,
    "text": _text,
    "recurrent": _recurrent,
}
_OF_TEXT = ("text", "recurrent")


def _optimizer(rng: np.random.Generator, lr: float) -> Any:
    kind = rng.random()
    decay = float(rng.choice([0.0, 0.01, 0.1]))
    if kind < 0.2:
        return SGDConfig(lr=_SGD * lr, momentum=float(rng.choice([0.0, 0.9])))
    if kind < 0.35:
        return LionConfig(lr=_LION * lr, weight_decay=10 * decay)
    return AdamWConfig(lr=lr, betas=(0.9, float(rng.choice([0.95, 0.999]))), weight_decay=decay)


def _optimizer_without_brakes(rng: np.random.Generator, lr: float) -> Any:
    betas = float(rng.choice([0.8, 0.9, 0.9, 0.95])), float(rng.choice([0.95, 0.99, 0.999, 0.9999]))
    decay = float(rng.choice([0.0, 0.01, 0.1]))
    kind = rng.random()
    if kind < 0.1:
        return SGDConfig(lr=_SGD * lr, momentum=float(rng.choice([0.0, 0.9])))
    if kind < 0.15:
        return LionConfig(lr=_LION * lr, weight_decay=10 * decay)
    return AdamWConfig(lr=lr, betas=betas, weight_decay=decay)


def _schedule(rng: np.random.Generator, steps: int, ramp: bool) -> LRSchedule:
    kind: Any = rng.choice(["constant", "linear", "cosine", "polynomial", "wsd", "wsd"])
    warmup = int(steps * rng.choice([0.0, 0.02, 0.05, 0.1]))
    shape = {"decay_ratio": float(rng.uniform(0.1, 0.5))} if kind == "wsd" else {}
    floor = float(rng.choice([0.0, 0.0, 0.1]))
    warmup = steps if ramp else warmup
    return LRSchedule(kind=kind, warmup_steps=warmup, min_lr_ratio=floor, **shape)


def _clip(rng: np.random.Generator) -> Any:
    kind = rng.random()
    if kind < 0.1:
        return ZClipConfig()
    if kind < 0.2:
        return AdaGCConfig()
    return ClipNormConfig(max_norm=1e4 if kind < 0.5 else 1.0)


def train(family: str, number: int, out: Path, diverging: bool) -> str:
    """Train a run, keep its recipe and metrics, and return how it ended."""
    torch.set_num_threads(1)
    recipe = draw(family, number, diverging)
    target = out / f"{family}-{number:04}"
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        try:
            Trainer(recipe, directory).run()
            ended = "finished"
        except Diverged as error:
            ended = error.message
        target.mkdir(parents=True, exist_ok=True)
        config.save(recipe, target / RECIPE)
        content = (directory / metrics.NAME).read_text()
        (target / f"{metrics.NAME}.part").write_text(content)
        (target / f"{metrics.NAME}.part").rename(target / metrics.NAME)  # complete: the run exists
    return f"{target.name}: {ended}"


def train_all(family: str, runs: int, out: Path, processes: int, diverging: bool) -> None:
    """Train what is missing."""
    missing = [n for n in range(runs) if not (out / f"{family}-{n:04}" / metrics.NAME).exists()]
    draw(family, 0).data.load()  # tokenizes the text once  # pyright: ignore
    if processes == 1:
        for number in missing:
            print(train(family, number, out, diverging), flush=True)  # noqa: T201
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for ended in pool.map(train, repeat(family), missing, repeat(out), repeat(diverging)):
            print(ended, flush=True)  # noqa: T201


def read_all(out: Path) -> dict[str, tuple[Recipe, list[dict[str, Any]]]]:
    """Read recipe and metrics of all runs, by name."""
    directories = sorted(path.parent for path in out.glob(f"*/{metrics.NAME}"))
    return {
        path.name: (config.load(Recipe, path / RECIPE), metrics.read(path)) for path in directories
    }


def pack(out: Path) -> None:
    """Write the library of the package and what is learned from it."""
    library = make_library(read_all(out).values())
    library.save(PACKAGE / runs.NAME)
    learned.learn(RunLibrary.load(), ("validation_loss", "loss")).save(PACKAGE / learned.NAME)
    size = (PACKAGE / runs.NAME).stat().st_size
    print(f"{len(library)} runs, {size:,} bytes")  # noqa: T201


def judge(out: Path) -> None:
    """Write the table of errors to benchmarks/results/forecast.csv."""
    found = read_all(out)
    library = make_library(found.values())
    kept = np.isfinite(library.log_loss["validation_loss"]).all(1)
    ramps = np.array([r.schedule.warmup_steps == r.steps for r, _ in found.values()])
    numbers = ((name.partition("-")[0], int(name[-4:])) for name in found)
    fresh = np.array([number >= _CHOSEN_ON[family] for family, number in numbers])
    cases = list(forecast_judge.forecast_all(library.select(kept), ramps[kept], fresh[kept]))
    rows = list(forecast_judge.summarize(cases))
    forecast_judge.write(rows, Path(__file__).parent / "results" / "forecast.csv")


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["train", "pack", "judge"])
    parser.add_argument("--family", choices=list(_FAMILIES), default="text")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--diverging", action="store_true", help="runs for the alarm")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    log.setup()
    if arguments.command == "train":
        train_all(
            arguments.family,
            arguments.runs,
            arguments.out,
            arguments.processes,
            arguments.diverging,
        )
    elif arguments.command == "pack":
        pack(arguments.out)
    else:
        judge(arguments.out)


if __name__ == "__main__":
    main()
