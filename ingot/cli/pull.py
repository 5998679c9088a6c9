"""`ingot pull`: download a model from the Hugging Face hub."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import tyro

from ingot.cli.import_ import print_summary, summary


def pull(
    repo: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ORG/NAME")],
    directory: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DIR]")] = None,
    revision: str = "main",
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Download a model from the Hugging Face hub.

    Only weights (safetensors), configuration and tokenizer files are downloaded, never code. Hashes
    are checked, and an interrupted download resumes. Other commands take the model by its
    name. Set HF_TOKEN for private or gated models, HF_ENDPOINT for a mirror.

    Examples: `ingot pull HuggingFaceTB/SmolLM2-135M-Instruct`,
    `ingot pull Qwen/Qwen3-0.6B qwen3 --revision main`.

    Args:
        repo: The repository on the hub.
        directory: The directory to create; by default ingot's data directory keeps the model.
        revision: A branch, a tag or a commit.
        json: Print JSON instead of text.
    """
    import time

    from ingot.interop import hub

    start = time.monotonic()
    path = hub.pull(repo, directory, revision=revision)
    result = summary(path, time.monotonic() - start)
    if json:
        print(json_format.dumps(result, indent=2))  # noqa: T201
    else:
        print_summary(result, name=None if directory else repo)
