"""How much of what quantization costs does quantization-aware training recover?

    python benchmarks/qat.py DIRECTORY [STEPS] [QAT_STEPS] [KEY=VALUE ...]

Trains recipes/stdlib-10m.toml for STEPS steps. Its model is trained further for QAT_STEPS by
recipes/stdlib-10m-qat.toml, and by the same recipe without its [qat], so that both have seen the
same text. KEY=VALUE overrides both recipes, but model.* the first and qat.* the second.

Prints the validation loss of each model in bfloat16 and in the format of [qat], rounded to nearest
and by GPTQ, in nats per token; and the gap recovered,

    (float model quantized - QAT) / (float model quantized - float model)

for the float models that were trained as long. Runs that are in DIRECTORY already are continued.
"""

# pyright: basic
from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import ingot
from ingot.compression import GPTQ, RoundToNearest, quantize
from ingot.core import config
from ingot.interop import hf
from ingot.nn.formats import WeightFormat
from ingot.training.evaluate import evaluate
from ingot.training.recipe import Datasets, Recipe, load_datasets

_RECIPES = Path(__file__).parents[1] / "recipes"
_CALIBRATION, _VALIDATION = 16, 128  # samples


def main(directory: Path, steps: int, qat_steps: int, options: list[str]) -> None:
    """Train the three models and print their losses."""
    shared = [option for option in options if not option.startswith("qat.")]
    recipe = config.load(Recipe, _RECIPES / "stdlib-10m.toml", [f"steps={steps}", *shared])
    base = _train(recipe, directory / "float")
    others = [option for option in options if not option.startswith("model.")]
    others = [f"init_from={base}", f"steps={qat_steps}", *others]
    qat_recipe = config.load(Recipe, _RECIPES / "stdlib-10m-qat.toml", others)
    assert qat_recipe.qat is not None
    qat = _train(qat_recipe, directory / "qat")
    longer = _train(replace(qat_recipe, qat=None), directory / "float-longer")
    data, format = load_datasets(recipe.data), qat_recipe.qat.weight_format
    print(format)  # noqa: T201
    _losses("float", base, data, format)
    losses = _losses("float, trained as long", longer, data, format)
    trained = _loss(qat, data)
    _print("QAT", trained)
    for method in ("round to nearest", "GPTQ"):
        gap = losses[method] - losses["bfloat16"]
        share = (losses[method] - trained) / gap
        print(f"{method}: gap {gap:.4f}, of which QAT recovers {share:.0%}")  # noqa: T201


def _losses(name: str, model: Path, data: Datasets, format: WeightFormat) -> dict[str, float]:
    """Print and return the losses of a model, by how it is quantized."""
    methods = {"bfloat16": None, "round to nearest": RoundToNearest(), "GPTQ": GPTQ()}
    losses: dict[str, float] = {}
    for key, method in methods.items():
        losses[key] = _loss(model, data, format, method)
        _print(f"{name}, {key}", losses[key])
    return losses


def _train(recipe: Recipe, run_dir: Path) -> Path:
    if not (run_dir / "model").exists():
        ingot.train(recipe, run_dir=run_dir, resume=run_dir.exists())
    return run_dir / "model"


def _loss(
    model: Path,
    data: Datasets,
    format: WeightFormat | None = None,
    method: RoundToNearest | GPTQ | None = None,
) -> float:
    """Return the validation loss of a model, quantized first if a method is given."""
    decoder = hf.load(model)
    if format and method:
        batch = data.train.batch(range(_CALIBRATION))
        sequences = [tokens.tolist() for tokens in batch.tokens.split(batch.lengths)]
        quantize(decoder, format, method, sequences if method.calibrated else ())
    return evaluate(decoder, data.validation, batch_size=1, max_batches=_VALIDATION).loss


def _print(name: str, loss: float) -> None:
    print(f"{name:<45} {loss:.4f}")  # noqa: T201


if __name__ == "__main__":
    overrides = [arg for arg in sys.argv[2:] if "=" in arg]
    counts = [int(arg) for arg in sys.argv[2:] if "=" not in arg]
    counts += [700, 100][len(counts) :]
    main(Path(sys.argv[1]), counts[0], counts[1], overrides)
