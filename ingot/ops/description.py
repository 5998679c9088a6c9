"""Descriptions of ops, for `ingot ops` and for the page of all ops in the documentation."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import Any

from ingot.ops.record import Op, registry


def rows() -> list[dict[str, Any]]:
    """Return a row per op, sorted by family, as `ingot ops --json` prints it.

    >>> next(row for row in rows() if row["op"] == "silu")["tolerance"]
    {'forward': 2.0, 'backward': 3.0, 'reason': ''}
    """
    return [row(op) for op in sorted(registry().values(), key=lambda op: op.family)]


def row(op: Op[..., Any]) -> dict[str, Any]:
    """Return the row of one op."""
    tolerance = op.tolerance
    return {
        "op": op.name,
        "family": op.family,
        "summary": (op.__doc__ or "").strip().partition("\n")[0],
        "schema": str(op.overload._schema),
        "providers": [
            {
                "name": p.name,
                "batch_invariant": p.batch_invariant,
                "preferred_for": p.preferred_for.reason if p.preferred_for else "",
            }
            for p in op.providers.values()
        ],
        "differentiable": op.gradient is not None,
        "tolerance": {
            "forward": tolerance.forward,
            "backward": tolerance.backward,
            "reason": tolerance.reason,
        },
        "cost": cost_formula(op),
    }


def cost_formula(op: Op[..., Any]) -> dict[str, str]:
    """Return the expressions for bytes and FLOPs, read from the source of the cost function.

    >>> cost_formula(registry()["rms_norm"])
    {'bytes': '2 * x.nbytes + weight.nbytes', 'flops': '4 * x.numel()'}
    """
    for node in ast.walk(ast.parse(source(op.cost))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Cost":
            return {str(k.arg): ast.unparse(k.value) for k in node.keywords}
    raise ValueError(f"the cost of '{op.name}' does not end in `Cost(...)`")


def source(function: Any) -> str:
    """Return the source of a reference or a cost, without its decorator and docstring.

    >>> print(source(registry()["silu"].reference))
    def silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)
    """
    text = textwrap.dedent(inspect.getsource(function))
    definition = ast.parse(text).body[0]
    assert isinstance(definition, ast.FunctionDef)
    start = definition.lineno - 1
    lines = text.splitlines()
    if ast.get_docstring(definition) is not None:
        docstring = definition.body[0]
        del lines[docstring.lineno - 1 : docstring.end_lineno]
    return "\n".join(lines[start:])


def page(op: Op[..., Any], with_family: bool = False) -> str:
    """Return one op as Markdown, for the terminal and the docs; optionally with its family.

    >>> page(registry()["silu"]).splitlines()[0]
    '### silu'
    """
    facts = row(op)
    tolerance, cost = facts["tolerance"], facts["cost"]
    providers = ", ".join(
        f"{p['name']} ({'batch-invariant' if p['batch_invariant'] else 'not batch-invariant'})"
        for p in facts["providers"]
    )
    backward = f", backward {tolerance['backward']:g}x" if op.gradient else ""
    overrides = [
        f"- **on a GPU**: {p['name']} is preferred for {p['preferred_for']}"
        "; not in `ops.batch_invariant()`"
        for p in facts["providers"]
        if p["preferred_for"]
    ]
    bullets = (
        f"- **providers**: {providers}",
        *overrides,
        f"- **error**: at most {tolerance['forward']:g}x plain PyTorch's{backward}"
        + (f"; {tolerance['reason']}" if tolerance["reason"] else ""),
        f"- **gradient**: {'yes' if op.gradient else 'none'}",
        f"- **bytes**: `{cost['bytes']}`",
        f"- **FLOPs**: `{cost['flops']}`",
    )
    blocks = [
        f"### {op.name}",
        f"`{op.name}{str(op.signature).replace(chr(39), '')}`",
        inspect.cleandoc(op.__doc__ or "").partition(">>>")[0].rstrip(),
        "\n".join(bullets),
        *([inspect.cleandoc(family_doc(op))] if with_family else []),
        "Example:",
        f"```python\n{_example(op)}\n```",
        "Reference:",
        f"```python\n{source(op.reference)}\n```",
    ]
    return "\n\n".join(blocks)


def family_doc(op: Op[..., Any]) -> str:
    """Return the description of the op's family: formulas, shapes, papers.

    >>> family_doc(registry()["silu"]).splitlines()[0]
    'Activations, alone and gated.'
    """
    return sys.modules[op.reference.__module__].__doc__ or ""


def _example(op: Op[..., Any]) -> str:
    doc = inspect.cleandoc(op.__doc__ or "")
    return doc[doc.index(">>>") :]
