"""A run from its recipe to its result: steps, evaluations, checkpoints, and what a person sees.

Everything that decides what comes next is in a checkpoint: the optimizer's weights and state, the
place in the data, the running statistics of clipping and of the guard, the running mean of the
weights, the buffers of the model, torch's generator. Dropout, mixing and the learning rate are
functions of the seed and the step. So a run that was killed goes on from its newest checkpoint and
makes the same steps again, to the bit.

    run/
        recipe.toml          what was run, with everything that was left to its default
        environment.json     on what
        metrics.jsonl        every step and evaluation
        checkpoints/         the last few and the best
        offenders/           the samples of batches that were refused
        validation.safetensors   log-probabilities of held-out text, to compare a server's with
"""

# pyright: basic
from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ingot.core import config, log
from ingot.core.device import detect
from ingot.core.errors import ConfigError
from ingot.core.paths import write_atomic
from ingot.data import Loader
from ingot.nn import Decoder, DecoderConfig
from ingot.observe.metrics import Metrics
from ingot.training.checkpoint import Checkpoint, Checkpoints
from ingot.training.clip import Clipper
from ingot.training.ema import EMA
from ingot.training.evaluate import Score, evaluate, save_logprobs
from ingot.training.guard import Diverged, Watch, save_offender
from ingot.training.optimizer import AdamW, Optimizers
from ingot.training.precision import Masters
from ingot.training.recipe import Recipe, Text, new_model, open_data
from ingot.training.recompute import recompute
from ingot.training.step import Batch, Gradients, Losses, Step

RECIPE = "recipe.toml"
_TELL_EVERY = 10.0  # seconds between lines where there is no bar


class Trainer:
    """One run in a directory; `resume` first to go on with what is there.

    `model` is what the recipe starts from, if it does. `peak` is what the machine's matmuls reach
    at most, in FLOP/s, if that is known.
    """

    def __init__(
        self,
        recipe: Recipe,
        directory: Path,
        model: nn.Module | None = None,
        peak: float | None = None,
    ) -> None:
        self.recipe, self.directory, self.peak = recipe, directory, peak
        self.sets = open_data(recipe.data)
        self.model = new_model(recipe) if model is None else model
        self._check()
        split = isinstance(recipe.optimizer, AdamW)
        self.masters = masters = Masters(self.model, recipe.precision, split)
        optimizers = Optimizers(recipe.optimizer, self.model, masters.weights, masters.low)
        clipper = Clipper(recipe.clip, len(self.masters.weights))
        losses = Losses(
            label_smoothing=recipe.label_smoothing,
            z_loss=recipe.z_loss,
            mix=recipe.mix,
            seed=recipe.seed,
        )
        self.stepper = Step(self.model, self.masters, optimizers, clipper, losses)
        recompute(self.model, recipe.recompute)
        self.ema = EMA(masters.weights, recipe.ema, masters.low) if recipe.ema else None
        self.watch = Watch(recipe.guard)
        piece = recipe.batch // recipe.accumulate
        self.loader: Loader[Batch] = Loader(self.sets.train, batch=piece, seed=recipe.seed)
        self.checkpoints = Checkpoints(directory / "checkpoints", recipe.keep)
        self.step = 0
        self._stop = False
        self._lines = 0
        self._saved: int | None = None

    def _check(self) -> None:
        made: Any = self.model.config
        self.recipe.check(made)
        if self.sets.corpus and self.sets.corpus.size > made.vocab_size:
            raise ConfigError(
                f"{self.sets.corpus.size} tokens in the vocabulary of the text, "
                f"{made.vocab_size} in the model's",
                hint=f"give model.vocab_size={self.sets.corpus.size} or more",
            )
        if self.recipe.dropout:
            self.model.set_dropout(self.recipe.dropout)  # pyright: ignore

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint; False if there is none."""
        saved = config.load(Recipe, self.directory / RECIPE)
        if other := _differences(saved.same_future(self.recipe), self.recipe):
            raise ConfigError(
                f"the run in {self.directory} has another recipe: {', '.join(other)}",
                hint="resume it with its own recipe, or start a new run",
            )
        found = self.checkpoints.newest()
        self.checkpoints.clear_after(found.step if found else -1)
        if found is None:
            return False
        if found.facts["data"] != self.sets.fingerprint:
            raise ConfigError(
                f"the run in {self.directory} was trained on other data",
                hint="restore the data that it was started with, or start a new run",
            )
        self._load(found)
        self.loader.seek(found.facts["sample"])
        self.watch.load(found.facts["guard"])
        self._lines = found.facts["lines"]
        return True

    def stop(self) -> None:
        """Have the run end behind the step that is being made, with a checkpoint."""
        self._stop = True

    def run(self, tell: Callable[[dict[str, Any]], object] = lambda _: None) -> Score | None:
        """Make the steps that are left. Returns the last evaluation; None if it was stopped.

        `tell` hears of every line of metrics.
        """
        self._describe()
        self._tell = tell
        self._metrics = Metrics(self.directory, self._lines)
        recipe, score = self.recipe, None
        if recipe.guard.policy == "rollback" and self.step == 0:
            self._save(None)
        with log.progress(recipe.name, recipe.steps - self.step) as bar:
            told = _Told(self)
            while self.step < recipe.steps and not self._stop:
                before = self.step
                figures = self._one_step()
                told.tell(figures, bar)
                bar.advance(self.step - before)
                if self._due(recipe.evaluate_every):
                    score = self._evaluate()
                if self._due(recipe.checkpoint_every):
                    self._save(score)
                self.checkpoints.check()
        if self._stop and self.step < recipe.steps:
            self._save(score)
            self.checkpoints.wait()
            return None
        score = score if score and self._due(recipe.evaluate_every) else self._evaluate()
        if not self._due(recipe.checkpoint_every):
            self._save(score)
        self.checkpoints.wait()
        if isinstance(recipe.data, Text):
            with self.averaged():
                save_logprobs(self.model, self.sets.held_out, self.directory)
        return score

    def averaged(self) -> Any:
        """A block in which the model has the running mean of its weights, if there is one."""
        return self.ema.within(self.model) if self.ema else nullcontext()

    def _due(self, every: int) -> bool:
        return bool(every) and self.step > 0 and self.step % every == 0

    def _one_step(self) -> dict[str, Any]:
        start, waited = time.perf_counter(), self.loader.waited
        pieces = [next(self.loader) for _ in range(self.recipe.accumulate)]
        found = self.stepper.gradients(pieces, self.step)
        factor = self.recipe.schedule.factor(self.step, self.recipe.steps)
        figures: dict[str, Any] = {
            "step": self.step + 1,
            "loss": found.loss,
            "lr": self.recipe.optimizer.lr * factor,
            "norm": found.norm,
            "rows": found.rows,
        }
        if refused := self._refused(found, pieces):
            figures["refused"] = refused
        else:
            figures["clip"] = self.stepper.update(factor)
            if self.ema:
                self.ema.update(self.step)
            self.step += 1
        self.masters.grads.clear()
        figures["seconds"] = time.perf_counter() - start
        figures["waited"] = self.loader.waited - waited
        self._note(figures)
        return figures

    def _note(self, figures: dict[str, Any]) -> None:
        self._metrics.add(figures)
        self._tell(figures)

    def _refused(self, found: Gradients, pieces: list[Batch]) -> str | None:
        """Why the update is not made; None if it may be. Acts as the guard's policy says."""
        may_overflow = self.masters.may_overflow
        self.masters.judge(found.finite)
        if not found.finite and may_overflow:
            self.step += 1
            return "the scaled loss overflowed"
        reason = self.watch.reason(found.loss, found.norm)
        if reason is None:
            return None
        number, ids = self.step + 1, [i for piece in pieces for i in piece.ids]
        path = save_offender(self.directory, step=number, reason=reason, ids=ids)
        self._diverged(number, reason, path)
        return reason

    def _diverged(self, number: int, reason: str, path: Path) -> None:
        policy = self.recipe.guard.policy
        if policy == "stop" or self.watch.exhausted:
            self.checkpoints.wait()
            raise Diverged(
                f"step {number} has {reason}; the samples are in {path}",
                hint="lower optimizer.lr or lengthen schedule.warmup, look at these samples, or "
                "go on without them: --resume guard.policy=skip",
            )
        back = self.checkpoints.newest() if policy == "rollback" else None
        if back is None:
            self.step += 1
            log.logger(__name__).warning("step %d skipped: %s (%s)", number, reason, path)
            return
        self._load(back)  # but not its place in the data
        log.logger(__name__).warning("from step %d back to %d: %s", number, back.step, reason)

    def _evaluate(self) -> Score:
        recipe = self.recipe
        with self.averaged():
            score = evaluate(
                self.model,
                self.sets.held_out,
                batch=recipe.batch // recipe.accumulate,
                most=recipe.evaluate_batches,
            )
        self._note({"step": self.step, **score.figures()})
        log.logger(__name__).info("step %d: %s", self.step, _spelled(score.figures()))
        return score

    def _save(self, score: Score | None) -> None:
        if self._saved == self.step:
            return
        self._saved = self.step
        facts = {
            "data": self.sets.fingerprint,
            "sample": self.loader.state()["sample"],
            "guard": self.watch.state(),
            "lines": self._metrics.lines,
        }
        self.checkpoints.save(self.step, self._parts(), facts, score.loss if score else None)

    def _parts(self) -> dict[str, dict[str, Tensor]]:
        return {
            "weights": self.masters.state(),
            "buffers": dict(self.model.named_buffers()),
            "optimizer": self.stepper.optimizers.state(),
            "clip": self.stepper.clipper.state(),
            "ema": self.ema.weights if self.ema else {},
            "rng": {"torch": torch.get_rng_state()},
        }

    def _load(self, saved: Checkpoint) -> None:
        self.masters.load(saved.tensors("weights"))
        for name, buffer in saved.tensors("buffers").items():
            self.model.get_buffer(name).copy_(buffer)
        self.stepper.optimizers.load(saved.tensors("optimizer"))
        self.stepper.clipper.load(saved.tensors("clip"))
        if self.ema:
            self.ema.load(saved.tensors("ema"))
        torch.set_rng_state(saved.tensors("rng")["torch"])
        self.step = self._saved = saved.step

    def _describe(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        config.save(self.recipe, self.directory / RECIPE)
        device = detect()
        known = {
            "cpu": device.cpu.name,
            "isa": device.cpu.isa,
            "cores": device.cpu.cores,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        }
        write_atomic(self.directory / "environment.json", json.dumps(known, indent=2) + "\n")

    def flops(self) -> float | None:
        """FLOPs of a token, without what is computed again; None where nobody has counted."""
        if not isinstance(self.model, Decoder) or not isinstance(self.recipe.data, Text):
            return None
        return flops_per_token(self.model.config, self.recipe.data.length)


def flops_per_token(model: DecoderConfig, length: int) -> float:
    """FLOPs of a dense decoder's forward and backward for a token of sequences of this length.

    Two for each weight that a token is multiplied by, and attention over half the sequence; the
    backward is two forwards.

    >>> from ingot.nn import preset
    >>> f"{flops_per_token(preset('gpt2-124m'), 1024):.3g}"
    '7.98e+08'
    """
    heads = model.heads * model.head_dim
    attention = model.dim * (2 * heads + 2 * model.kv_heads * model.head_dim)
    gates = 3 if model.activation.value == "swiglu" else 2
    matmuls = model.layers * (attention + gates * model.dim * model.ffn_dim)
    scores = model.layers * heads * length
    return 6.0 * (matmuls + model.dim * model.vocab_size + scores)


class _Told:
    """Tells a person how it goes: in the bar, or in a line now and then where there is none."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._last = trainer, time.monotonic()
        self._flops = trainer.flops()
        self._rate = 0.0

    def tell(self, figures: dict[str, Any], bar: log.Progress) -> None:
        rate = figures["rows"] / max(figures["seconds"], 1e-9)
        self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
        text = self._text(figures)
        bar.describe(f"{self._trainer.recipe.name} {text}")
        if time.monotonic() - self._last > _TELL_EVERY and not log.stderr().is_terminal:
            self._last = time.monotonic()
            steps = self._trainer.recipe.steps
            log.logger(__name__).info("step %d of %d: %s", figures["step"], steps, text)

    def _text(self, figures: dict[str, Any]) -> str:
        unit = "tokens" if isinstance(self._trainer.recipe.data, Text) else "samples"
        parts = [
            f"loss {figures['loss']:.4g}",
            f"lr {figures['lr']:.2g}",
            f"norm {figures['norm']:.2g}",
            f"{self._rate:,.0f} {unit}/s",
        ]
        if self._flops and self._trainer.peak:
            parts.append(f"{self._rate * self._flops / self._trainer.peak:.0%} of peak")
        return "  ".join([*parts, f"{_memory() / 1e9:.1f} GB"])


def _memory() -> int:
    """Bytes of memory that the process has now; 0 where nobody says."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _differences(one: Recipe, other: Recipe) -> list[str]:
    return [f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)]


def _spelled(figures: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())
