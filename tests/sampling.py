"""Which of an op's samples the fast tier takes.

The samples of an op are partly a matrix: "odd_gelu" is the shape "odd" with an activation. The fast
tier takes every shape alone and each variant with two shapes, a different second one for the next
variant. The slow tier takes all.
"""

from __future__ import annotations

from collections.abc import Iterable


def fast_samples(names: Iterable[str]) -> set[str]:
    """Return the names of the samples to take.

    >>> shapes = ["typical", "odd", "large"]
    >>> found = fast_samples([*shapes, *(f"{s}_{v}" for v in ("gelu", "silu") for s in shapes)])
    >>> sorted(found - set(shapes))
    ['large_silu', 'odd_gelu', 'typical_gelu', 'typical_silu']
    """
    known = list(names)
    variants: dict[str, list[str]] = {}
    for name in known:
        if variant := _variant(name, known):
            variants.setdefault(variant, []).append(name)
    left_out: set[str] = set()
    for number, (first, *others) in enumerate(variants.values()):
        second = others[number % len(others)] if others else first
        left_out |= {*others} - {first, second}
    return {*known} - left_out


def _variant(name: str, names: Iterable[str]) -> str:
    """Return what follows the shape in a name: "gelu_tanh" in "odd_gelu_tanh"."""
    shapes = [shape for shape in names if name.startswith(f"{shape}_")]
    return name.removeprefix(min(shapes, key=len, default=name)).removeprefix("_")
