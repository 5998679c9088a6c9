"""What limits a model, and what to do about it, in words.

Each rule looks at the profile of a graph for one cause of lost time and returns how much of the
time it concerns.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ingot.fuse.profile import CallProfile

# Shares of the time that a change is estimated to save.
_FLOAT64_SAVING, _MASK_SAVING, _STRIDED_SAVING = 0.5, 0.5, 0.3
_BF16_SAVING, _FUSION_SAVING = 0.1, 0.1  # on most machines; the others hold everywhere
_MIN_SHARE = 0.02
"""Savings below this share of the time are not worth a line."""
_MATMULS = {"linear", "addmm", "matmul", "bmm", "sdpa", "conv2d", "conv1d"}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to do."""

    text: str
    share: float
    """Share of the time that it concerns."""
    saving: float
    """Estimated share of the time that it saves."""
    is_fault: bool = False
    """Whether the model does what it need not do; otherwise it could be faster in another form."""


def advise(calls: Sequence[CallProfile]) -> list[Advice]:
    """Return what to do: faults, then the rest, each with the largest saving first."""
    total = sum(call.seconds for call in calls)
    found = [rule(calls, total) for rule in _RULES] if total else []
    worth = [advice for advice in found if advice is not None and advice.saving >= _MIN_SHARE]
    return sorted(worth, key=lambda advice: (not advice.is_fault, -advice.saving))


def _share(calls: Iterable[CallProfile], total: float) -> float:
    return sum(call.seconds for call in calls) / total


def _at(calls: Iterable[CallProfile]) -> str:
    """Return where the first of some calls is, for the end of a sentence."""
    source = next((call.source for call in calls if call.source), "")
    return f" ({source})" if source else ""


def _float64(calls: Sequence[CallProfile], total: float) -> Advice | None:
    wide = [call for call in calls if call.dtype == "float64"]
    share = _share(wide, total)
    begin = f"it begins at `{wide[0].name}`{_at(wide[:1])}" if wide else ""
    return Advice(
        text=f"{share:.0%} of the time is arithmetic in float64; {begin}: convert to float32",
        share=share,
        saving=share * _FLOAT64_SAVING,
        is_fault=True,
    )


def _dense_mask(calls: Sequence[CallProfile], total: float) -> Advice | None:
    masked = [call for call in calls if {"causal_mask", "empty_mask"} & call.notes]
    share = _share(masked, total)
    causal = any("causal_mask" in call.notes for call in masked)
    fix = "it is causal: pass `is_causal=True`" if causal else "it masks nothing: pass none"
    return Advice(
        text=f"{share:.0%} of the time is attention with a dense mask{_at(masked)}; {fix} instead",
        share=share,
        saving=share * _MASK_SAVING,
        is_fault=True,
    )


def _strided_weight(calls: Sequence[CallProfile], total: float) -> Advice | None:
    strided = [call for call in calls if "strided_weight" in call.notes]
    share = _share(strided, total)
    return Advice(
        text=f"{share:.0%} of the time is linear layers whose weight is not contiguous"
        f"{_at(strided)}: call `.contiguous()` once, when the model is loaded",
        share=share,
        saving=share * _STRIDED_SAVING,
        is_fault=True,
    )


def _float32_matmul(calls: Sequence[CallProfile], total: float) -> Advice | None:
    slow = [call for call in calls if call.name in _MATMULS and call.dtype == "float32"]
    share = _share(slow, total)
    return Advice(
        text=f"{share:.0%} of the time is matmuls in float32{_at(slow)}: if the model allows it, "
        "use bfloat16 (`model.bfloat16()`)",
        share=share,
        saving=share * _BF16_SAVING,
    )


def _elementwise(calls: Sequence[CallProfile], total: float) -> Advice | None:
    small = [call for call in calls if call.name not in _MATMULS]
    share = _share(small, total)
    return Advice(
        text=f"{share:.0%} of the time is calls without a matmul, {len(small)} in number: "
        'fuse them with `torch.compile(model, backend="ingot")`',
        share=share,
        saving=share * _FUSION_SAVING,
    )


_RULES: tuple[Callable[[Sequence[CallProfile], float], Advice | None], ...] = (
    _float64,
    _dense_mask,
    _strided_weight,
    _float32_matmul,
    _elementwise,
)
