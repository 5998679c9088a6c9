"""Exports a rewritten model, for processes without the source of the model.

    program = export(model, {"input_ids": tokens})
    torch.export.save(program, "model.pt2")

A process that loads it needs torch and ingot, not the package of the model: `import ingot.ops`
registers the ops, then `torch.export.load` reads it. AOTInductor compiles the program to a package
that needs no compiler where it is loaded; it calls ingot's ops through the dispatcher, so they must
be registered there as well.
"""

# pyright: basic
from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from ingot.fuse.backend import as_arguments, dynamic_dims, rewrite_graph
from ingot.fuse.report import record


def export(
    model: nn.Module, example_inputs: Tensor | Sequence[Any] | Mapping[str, Any]
) -> ExportedProgram:
    """Rewrite a model for inference and export it; arguments as those of `ingot.optimize`.

    Outputs in classes that are mappings, such as those of transformers, become a dict.

    >>> from ingot.fuse.export import export
    >>> program = export(torch.nn.Linear(8, 8), torch.ones(2, 8))  # doctest: +SKIP
    """
    from torch.export._trace import _export_to_torch_ir

    args, kwargs = as_arguments(example_inputs)
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    shapes = {
        name: dict.fromkeys(dims, Dim.AUTO) if (dims := dynamic_dims(value)) else None
        for name, value in arguments.items()
    }
    with torch.no_grad():
        module = _export_to_torch_ir(model, args, kwargs, dynamic_shapes=shapes)
        _return_dicts(module.graph)
        record(rewrite_graph(module, pytree.tree_leaves((args, kwargs))))
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)


def _return_dicts(graph: fx.Graph) -> None:
    """Return a dict instead of another class of mappings, which only its package can load."""
    codegen: Any = graph._codegen
    spec = codegen.pytree_info.out_spec
    outputs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    if isinstance(outputs, Mapping):
        plain = pytree.tree_structure(dict(outputs))
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=plain)
