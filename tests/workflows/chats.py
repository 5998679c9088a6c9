"""A recipe for conversations that trains in seconds, and its tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.training.recipe import ChatData, Recipe
from tests.interop import templates
from tests.interop.templates import FAMILIES
from tests.training.runs import TINY, WORDS


def write_rows(path: Path, count: int = 60) -> Path:
    """Write conversations of one or two turns, some of them as prompt and completion."""
    rows: list[dict[str, Any]] = []
    for i in range(count):
        words = [WORDS[(i * k) % len(WORDS)] for k in range(1, 9)]
        messages = [
            {"role": "user", "content": " ".join(words[: 1 + i % 4])},
            {"role": "assistant", "content": " ".join(words[2 : 4 + i % 4])},
        ]
        if i % 3 == 0:
            messages += [
                {"role": "user", "content": words[0]},
                {"role": "assistant", "content": words[1]},
            ]
        if i % 7 == 0:
            rows.append({"prompt": messages[:1], "completion": messages[1:]})
        else:
            rows.append({"messages": messages})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def recipe(tmp_path: Path, family: str = "smollm2", **options: Any) -> Recipe:
    """A small decoder on conversations, with everything on that keeps state."""
    inner = templates.train_inner()
    directory = templates.save(FAMILIES[family], inner, tmp_path / "tokenizer")
    source = write_rows(tmp_path / "chats.jsonl")
    known: dict[str, Any] = {
        "name": "chat",
        "steps": 8,
        "global_batch_size": 4,
        "model": replace(TINY, vocab_size=inner.get_vocab_size(), max_seq_len=256),
        "data": ChatData(
            source=str(source), tokenizer=directory, seq_len=256, validation_fraction=0.2
        ),
        "checkpoint_every": 4,
        "eval_every": 4,
        "dropout": 0.1,
        "ema_decay": 0.9,
    }
    return Recipe(**{**known, **options})
