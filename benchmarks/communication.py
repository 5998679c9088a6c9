"""What does training lose with less communication?

    python benchmarks/communication.py DIRECTORY [--steps N] [--local-steps H] [--ranks N]
        [--systems NAME,NAME] [--init-from MODEL] [KEY=VALUE ...]

trains recipes/stdlib-10m.toml on replicas, one per rank, each time on the same tokens in the same
order:

    plain         float32 sums of gradients in every step
    int8          gradients in int8 (`parallel.grad_compression`)
    diloco        H steps on their own, then float32 (`parallel.local_steps`)
    diloco-int8   the same, then int8

With --init-from, training continues from a model that was trained with this recipe. KEY=VALUE
overrides the recipe. Prints the last validation loss of each, in nats per token, and the bytes that
a rank has sent, both relative to the first. Runs that are in DIRECTORY already are continued.
"""

# pyright: basic
from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from ingot.core import config
from ingot.observe import metrics
from ingot.training.recipe import Recipe, load_datasets
from ingot.workflows.launch import launch

_RECIPE = Path(__file__).parents[1] / "recipes" / "stdlib-10m.toml"
_INT8 = "parallel.grad_compression=int8"


def main(
    directory: Path,
    systems: list[str],
    ranks: int,
    local_steps: int,
    init_from: Path | None,
    to: list[str],
) -> None:
    """Train the systems and print their losses and bytes."""
    diloco = f"parallel.local_steps={local_steps}"
    options = {"plain": [], "int8": [_INT8], "diloco": [diloco], "diloco-int8": [diloco, _INT8]}
    shared = [f"grad_accum_steps={ranks}", f"parallel.dp={ranks}", "device=cpu", *to]
    recipe = _continue_from(init_from, directory) if init_from else _RECIPE
    load_datasets(config.load(Recipe, recipe, shared).data)  # once, not on every rank
    found: list[tuple[float, int]] = []
    for name in systems:
        loss, sent = _train(recipe, directory / name, [*shared, *options[name]], ranks)
        found.append((loss, sent))
        print(  # noqa: T201
            f"{name:12} loss {loss:.4f} ({loss / found[0][0] - 1:+.2%})"
            f"  sent {sent / 1e6:,.1f} MB (1/{found[0][1] / sent:.1f})",
            flush=True,
        )


def _continue_from(model: Path, directory: Path) -> Path:
    """Write the recipe with an initial model instead of a description of it."""
    text = re.sub(r"^\[model\]\n(?:(?!\[).*\n)*", "", _RECIPE.read_text(), flags=re.MULTILINE)
    directory.mkdir(parents=True, exist_ok=True)
    recipe = directory / "continue.toml"
    recipe.write_text(f"init_from = {json.dumps(str(model.resolve()))}\n{text}")
    return recipe


def _train(recipe: Path, run: Path, options: list[str], ranks: int) -> tuple[float, int]:
    """Return the last validation loss and the bytes sent."""
    if not (run / "model").exists():
        resume = ["--resume"] if (run / "recipe.toml").exists() else []
        launch(ranks, ["train", str(recipe), *options, "--run", str(run), *resume], run, quiet=True)
    lines = metrics.read(run)
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    return losses[-1], sum(line.get("sent_bytes", 0) for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--local-steps", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--systems", default="plain,int8,diloco,diloco-int8")
    parser.add_argument("--init-from", type=Path, metavar="MODEL")
    args, overrides = parser.parse_known_args()
    given = [f"steps={args.steps}", *overrides]
    systems = args.systems.split(",")
    main(args.directory, systems, args.ranks, args.local_steps, args.init_from, given)
