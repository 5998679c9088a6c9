"""Hugging Face's own implementation of a model directory, observed at the ops of our decoder.

    model = load(directory, torch.bfloat16, device)
    with probe(model, visit):
        logits_TV = model.logits(tokens_T)

`visit` receives the results under the names of `ingot.nn.probe`. The modules are found by the names
of their tensors, which `ingot.interop.hf_families` has for every family. Two results belong to no
module: the rotated queries and keys are seen by the attention function, and the residual stream
after attention is the input of the next norm.
"""

# pyright: basic
from __future__ import annotations

import importlib.util
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ingot.core.errors import IngotError
from ingot.interop import hf
from ingot.interop.hf_families import FAMILIES
from ingot.nn.config import DecoderConfig, NormPosition
from ingot.nn.probe import Visit


@dataclass(frozen=True, kw_only=True)
class TransformersModel:
    """A causal language model of transformers, and the configuration of our decoder for it."""

    module: Any
    config: DecoderConfig
    description: str
    """Version, dtype and attention implementation."""

    @torch.inference_mode()
    def logits(self, tokens_T: Tensor) -> Tensor:
        """Return the logits of one sequence, (T, V), in the dtype that transformers computes."""
        return self.module(input_ids=tokens_T[None], use_cache=False).logits[0]


def load(directory: Path, dtype: torch.dtype, device: torch.device | str) -> TransformersModel:
    """Load a model directory with transformers. No code from the directory is run."""
    if importlib.util.find_spec("transformers") is None:
        raise IngotError(
            "comparing with transformers needs the package transformers, which is not installed",
            hint="pip install 'ingot[transformers]'",
        )
    import transformers
    from transformers.utils import logging

    config = hf.describe(directory).config
    logging.disable_progress_bar()
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    details = f"{str(dtype).removeprefix('torch.')}, {module.config._attn_implementation} attention"
    return TransformersModel(
        module=module.to(device).eval(),
        config=config,
        description=f"transformers {transformers.__version__} ({details})",
    )


@contextmanager
def probe(model: TransformersModel, visit: Visit) -> Generator[None]:
    """Call `visit` with the result of every op while the context is active."""
    modules, handles = _Modules(model.module), list[RemovableHandle]()
    try:
        handles.append(_on_input(modules.layer(0), visit, "embedding"))
        for layer in range(model.config.layers):
            handles += _attach(modules, model.config, layer, visit)
        handles.append(_on_output(modules.find("norm"), visit, "norm"))
        with _rotated(model, visit):
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Modules:
    """Modules of transformers by the names of ours."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = FAMILIES[module.config.model_type].tensor_names  # pyright: ignore

    def find(self, ours: str, layer: int | None = None) -> nn.Module:
        """Return the module that has the weight of our module of this name."""
        theirs = self.names[f"{ours}.weight"]
        assert isinstance(theirs, str)
        return self._get(theirs, layer)

    def projections(self, layer: int) -> list[nn.Module]:
        """Return the projections of queries, keys and values, or the one module of all three."""
        theirs = self.names["blocks.{i}.attention.qkv.weight"]
        names = theirs if isinstance(theirs, tuple) else (theirs,)
        return [self._get(name, layer) for name in names]

    def layer(self, layer: int) -> Any:
        """Return a block."""
        theirs = self.names["blocks.{i}.attention_norm.weight"]
        assert isinstance(theirs, str)
        return self.module.get_submodule(theirs.format(i=layer).rsplit(".", 2)[0])

    def _get(self, tensor: str, layer: int | None) -> nn.Module:
        return self.module.get_submodule(tensor.format(i=layer).removesuffix(".weight"))


def _attach(
    modules: _Modules, config: DecoderConfig, layer: int, visit: Visit
) -> list[RemovableHandle]:
    name, block = f"blocks.{layer}", modules.layer(layer)
    post_norm, is_moe = config.norm_position is NormPosition.POST, config.is_moe_layer[layer]
    out, attention_norm, mlp_norm = (
        modules.find(f"blocks.{{i}}.{of}", layer)
        for of in ("attention.out", "attention_norm", "mlp_norm")
    )
    handles = [
        _on_output(attention_norm, visit, f"{name}.attention_norm"),
        *_on_projections(modules.projections(layer), config, visit, f"{name}.attention"),
        _on_input(out, visit, f"{name}.attention"),
        _on_output(mlp_norm, visit, f"{name}.mlp_norm"),
    ]
    if config.qk_norm is not None:
        for of in ("attention.q_norm", "attention.k_norm"):
            module = modules.find(f"blocks.{{i}}.{of}", layer)
            handles.append(_on_output(module, visit, f"{name}.{of}"))
    last = "mlp" if is_moe else "mlp.down"
    if is_moe:
        handles.append(_on_output(block.mlp.gate, visit, f"{name}.mlp.router"))
    else:
        down = modules.find("blocks.{i}.mlp.down", layer)
        handles.append(_on_input(down, visit, f"{name}.mlp.hidden"))
    if post_norm:
        handles += [
            _on_output(out, visit, f"{name}.attention.out"),
            _on_input(block.mlp, visit, f"{name}.attention_residual"),
            _on_output(block.mlp, visit, f"{name}.{last}"),
            _on_output(block, visit, f"{name}.mlp_residual"),
        ]
    else:
        handles += [
            _on_input(mlp_norm, visit, f"{name}.attention.out"),
            _on_output(block, visit, f"{name}.{last}"),
        ]
    return handles


def _on_projections(
    projections: list[nn.Module], config: DecoderConfig, visit: Visit, name: str
) -> list[RemovableHandle]:
    if len(projections) > 1:
        parts = zip("qkv", projections, strict=True)
        return [_on_output(module, visit, f"{name}.{part}") for part, module in parts]
    heads = (config.heads, config.kv_heads, config.kv_heads)
    widths = [count * config.head_dim for count in heads]

    def hook(_: nn.Module, args: Any, output: Tensor) -> None:
        for part, value in zip("qkv", output.split(widths, dim=-1), strict=True):
            visit(f"{name}.{part}", value[0])

    return [projections[0].register_forward_hook(hook)]


def _on_input(module: nn.Module, visit: Visit, name: str) -> RemovableHandle:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
        visit(name, (args[0] if args else kwargs["hidden_states"])[0])

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _on_output(module: nn.Module, visit: Visit, name: str) -> RemovableHandle:
    def hook(_: nn.Module, args: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        visit(name, value if value.dim() == 2 else value[0])  # a router returns (T, experts)

    return module.register_forward_hook(hook)


@contextmanager
def _rotated(model: TransformersModel, visit: Visit) -> Generator[None]:
    """Visit the rotated queries and keys, which the attention function is called with."""
    if model.config.rope is None:
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    name = model.module.config._attn_implementation
    attend = FUNCTIONS[name]

    def probed(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        for part, value in (("q", query), ("k", key)):  # (1, heads, T, head_dim)
            visit(f"blocks.{module.layer_idx}.attention.{part}_rope", value.transpose(1, 2)[0])
        return attend(module, query, key, *args, **kwargs)

    FUNCTIONS[name] = probed
    try:
        yield
    finally:
        del FUNCTIONS[name]
