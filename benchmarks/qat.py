"""How much of what quantization costs does quantization-aware training recover?

    python benchmarks/qat.py DIRECTORY [STEPS] [QAT_STEPS] [--bits 3] [KEY=VALUE ...]

Trains recipes/stdlib-10m.toml for STEPS steps. Its model is trained further for QAT_STEPS by
recipes/stdlib-10m-qat.toml, and by the same recipe without its [qat], so that both have seen the
same text. KEY=VALUE overrides both recipes, but model.* the first and qat.* the second. With
`--bits 3`, weights have 8 of the 16 values of int4, so what is trained runs in the same kernels.

Prints the validation loss of each model in bfloat16 and in the format of [qat], rounded to nearest
and by GPTQ, in nats per token; and the gap recovered,

    (float model quantized - QAT) / (float model quantized - float model)

for the float models that were trained as long. Runs that are in DIRECTORY already are continued.
"""

# pyright: basic
from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

import ingot
from ingot.compression import GPTQ, RoundToNearest, quantize
from ingot.core import config
from ingot.interop import hf
from ingot.nn.formats import Int4, WeightFormat
from ingot.nn.formats.format import Grid
from ingot.nn.qat import QatConfig
from ingot.training.evaluate import evaluate
from ingot.training.recipe import Datasets, Recipe, load_datasets

_RECIPES = Path(__file__).parents[1] / "recipes"
_CALIBRATION, _VALIDATION = 16, 128  # samples


class _Int3(Int4):
    """Symmetric int4 with the 8 values around zero: q from 4 to 11, of which 8 is zero."""

    def grid(self, weight_ND: Tensor, shrink: float = 1.0) -> Grid:
        """Return the grid whose lowest value, -4, is the value of largest magnitude."""
        whole = super().grid(weight_ND, 2 * shrink)
        return Grid(whole.scale_NG, whole.zero_NG, 4, 11)


@dataclass(frozen=True, kw_only=True)
class _Qat3(QatConfig):
    @property
    def weight_format(self) -> WeightFormat:
        """The format of the weights."""
        return _Int3(group=self.group)


def main(directory: Path, steps: int, qat_steps: int, bits: int, options: list[str]) -> None:
    """Train the three models and print their losses."""
    shared = [option for option in options if not option.startswith("qat.")]
    recipe = config.load(Recipe, _RECIPES / "stdlib-10m.toml", [f"steps={steps}", *shared])
    base = _train(recipe, directory / "float")
    others = [option for option in options if not option.startswith("model.")]
    others = [f"init_from={base}", f"steps={qat_steps}", *others]
    qat_recipe = config.load(Recipe, _RECIPES / "stdlib-10m-qat.toml", others)
    assert qat_recipe.qat is not None
    if bits == 3:
        qat_recipe = replace(qat_recipe, qat=_Qat3(group=qat_recipe.qat.group, symmetric=True))
    assert qat_recipe.qat is not None
    qat = _train(qat_recipe, directory / "qat")
    longer = _train(replace(qat_recipe, qat=None), directory / "float-longer")
    data, format = load_datasets(recipe.data), qat_recipe.qat.weight_format
    print(f"{bits} bits, {format}")  # noqa: T201
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
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("steps", type=int, nargs="?", default=700)
    parser.add_argument("qat_steps", type=int, nargs="?", default=100)
    parser.add_argument("--bits", type=int, choices=(3, 4), default=4)
    args, overrides = parser.parse_known_args()
    main(args.directory, args.steps, args.qat_steps, args.bits, overrides)
