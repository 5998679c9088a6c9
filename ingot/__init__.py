"""Train, serve and verify language models with one PyTorch model and batch-invariant kernels.

    llm = ingot.LLM("smollm2")
    llm.generate(["Hello", "Once upon a time"], ingot.SamplingParams(temperature=0.8))
    ingot.Embedder("minilm").embed(["Hello", "Once upon a time"])
    ingot.train("recipes/xor.toml")
    ingot.serve("smollm2")
    ingot.evaluate("task.jsonl", "smollm2")
    ingot.compress("smollm2", "smollm2-int8", Int8())
    ingot.optimize(model, tokens)

`import ingot` is cheap: it imports neither torch nor anything that does. Packages and functions are
loaded when they are first named:

>>> import ingot
>>> ingot.ops.rms_norm.name
'rms_norm'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.fuse.backend import optimize as optimize
    from ingot.serving.engine.sampling_params import SamplingParams as SamplingParams
    from ingot.workflows.compare import compare as compare
    from ingot.workflows.compress import compress as compress
    from ingot.workflows.embed import Embedder as Embedder
    from ingot.workflows.evaluate import evaluate as evaluate
    from ingot.workflows.llm import LLM as LLM
    from ingot.workflows.plan import plan as plan
    from ingot.workflows.serve import serve as serve
    from ingot.workflows.train import train as train

__version__ = "0.1.0"

_PACKAGES = ("core", "ops", "fuse", "nn", "data", "interop", "training", "serving", "workflows")
_NAMES = {
    "Embedder": "ingot.workflows.embed",
    "LLM": "ingot.workflows.llm",
    "SamplingParams": "ingot.serving.engine.sampling_params",
    "compare": "ingot.workflows.compare",
    "compress": "ingot.workflows.compress",
    "evaluate": "ingot.workflows.evaluate",
    "optimize": "ingot.fuse.backend",
    "plan": "ingot.workflows.plan",
    "serve": "ingot.workflows.serve",
    "train": "ingot.workflows.train",
}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"ingot.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'ingot' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*_PACKAGES, *_NAMES, "__version__"]
