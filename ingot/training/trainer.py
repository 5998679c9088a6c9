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
        bad_batches/           the samples of batches that were refused
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
from ingot.observe.metrics import MetricsLog
from ingot.training.checkpoint import Checkpoint, Checkpoints
from ingot.training.clip import Clipper
from ingot.training.ema import EMA
from ingot.training.evaluate import EvalResult, evaluate, save_logprobs
from ingot.training.guard import Diverged, SpikeDetector, dump_bad_batch
from ingot.training.optimizer import AdamWConfig, Optimizers
from ingot.training.precision import MasterWeights
from ingot.training.recipe import Recipe, TextData, build_model, load_datasets
from ingot.training.recompute import recompute
from ingot.training.step import Batch, LossConfig, StepStats, TrainStep

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
        peak_flops: float | None = None,
    ) -> None:
        self.recipe, self.directory, self.peak_flops = recipe, directory, peak_flops
        self.datasets = load_datasets(recipe.data)
        self.model = build_model(recipe) if model is None else model
        self._check()
        split = isinstance(recipe.optimizer, AdamWConfig)
        self.master_weights = masters = MasterWeights(self.model, recipe.precision, split)
        optimizers = Optimizers(recipe.optimizer, self.model, masters.weights, masters.low_bits)
        clipper = Clipper(recipe.clip, len(self.master_weights.weights))
        losses = LossConfig(
            label_smoothing=recipe.label_smoothing,
            z_loss=recipe.z_loss,
            mixup=recipe.mixup,
            seed=recipe.seed,
        )
        self.train_step = TrainStep(self.model, self.master_weights, optimizers, clipper, losses)
        recompute(self.model, recipe.recompute)
        self.ema = (
            EMA(masters.weights, recipe.ema_decay, masters.low_bits) if recipe.ema_decay else None
        )
        self.spike_detector = SpikeDetector(recipe.guard)
        piece = recipe.global_batch_size // recipe.grad_accum_steps
        self.loader: Loader[Batch] = Loader(self.datasets.train, batch_size=piece, seed=recipe.seed)
        self.checkpoints = Checkpoints(directory / "checkpoints", recipe.keep_checkpoints)
        self.step = 0
        self._stop = False
        self._lines = 0
        self._saved: int | None = None

    def _check(self) -> None:
        made: Any = self.model.config
        self.recipe.check(made)
        if self.datasets.tokens and self.datasets.tokens.vocab_size > made.vocab_size:
            raise ConfigError(
                f"{self.datasets.tokens.vocab_size} tokens in the vocabulary of the text, "
                f"{made.vocab_size} in the model's",
                hint=f"give model.vocab_size={self.datasets.tokens.vocab_size} or more",
            )
        if self.recipe.dropout:
            self.model.set_dropout(self.recipe.dropout)  # pyright: ignore

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint; False if there is none."""
        saved = config.load(Recipe, self.directory / RECIPE)
        if other := _differences(saved.with_resumable_fields(self.recipe), self.recipe):
            raise ConfigError(
                f"the run in {self.directory} has another recipe: {', '.join(other)}",
                hint="resume it with its own recipe, or start a new run",
            )
        found = self.checkpoints.latest()
        self.checkpoints.quarantine_after(found.step if found else -1)
        if found is None:
            return False
        if found.metadata["data"] != self.datasets.fingerprint:
            raise ConfigError(
                f"the run in {self.directory} was trained on other data",
                hint="restore the data that it was started with, or start a new run",
            )
        self._load(found)
        self.loader.seek(found.metadata["sample"])
        self.spike_detector.load_state_dict(found.metadata["spike_detector"])
        self._lines = found.metadata["metrics_lines"]
        return True

    def stop(self) -> None:
        """Have the run end behind the step that is being made, with a checkpoint."""
        self._stop = True

    def run(
        self, on_metrics: Callable[[dict[str, Any]], object] = lambda _: None
    ) -> EvalResult | None:
        """Make the steps that are left. Returns the last evaluation; None if it was stopped.

        `on_metrics` hears of every line of metrics.
        """
        self._describe()
        self._on_metrics = on_metrics
        self._metrics = MetricsLog(self.directory, self._lines)
        recipe, score = self.recipe, None
        if recipe.guard.policy == "rollback" and self.step == 0:
            self._save(None)
        with log.progress(recipe.name, recipe.steps - self.step) as bar:
            told = _ConsoleLogger(self)
            while self.step < recipe.steps and not self._stop:
                before = self.step
                figures = self._one_step()
                told.tell(figures, bar)
                bar.advance(self.step - before)
                if self._due(recipe.eval_every):
                    score = self._evaluate()
                if self._due(recipe.checkpoint_every):
                    self._save(score)
                self.checkpoints.check()
        if self._stop and self.step < recipe.steps:
            self._save(score)
            self.checkpoints.wait()
            return None
        score = score if score and self._due(recipe.eval_every) else self._evaluate()
        if not self._due(recipe.checkpoint_every):
            self._save(score)
        self.checkpoints.wait()
        if isinstance(recipe.data, TextData):
            with self.ema_weights():
                save_logprobs(self.model, self.datasets.validation, self.directory)
        return score

    def ema_weights(self) -> Any:
        """A block in which the model has the running mean of its weights, if there is one."""
        return self.ema.applied_to(self.model) if self.ema else nullcontext()

    def _due(self, every: int) -> bool:
        return bool(every) and self.step > 0 and self.step % every == 0

    def _one_step(self) -> dict[str, Any]:
        start, waited = time.perf_counter(), self.loader.wait_seconds
        pieces = [next(self.loader) for _ in range(self.recipe.grad_accum_steps)]
        found = self.train_step.forward_backward(pieces, self.step)
        factor = self.recipe.schedule.lr_factor(self.step, self.recipe.steps)
        figures: dict[str, Any] = {
            "step": self.step + 1,
            "loss": found.loss,
            "lr": self.recipe.optimizer.lr * factor,
            "grad_norm": found.grad_norm,
            "num_rows": found.num_rows,
        }
        if refused := self._refused(found, pieces):
            figures["skipped"] = refused
        else:
            figures["clip_factor"] = self.train_step.optimizer_step(factor)
            if self.ema:
                self.ema.update(self.step)
            self.step += 1
        self.master_weights.grads.clear()
        figures["seconds"] = time.perf_counter() - start
        figures["data_seconds"] = self.loader.wait_seconds - waited
        self._note(figures)
        return figures

    def _note(self, figures: dict[str, Any]) -> None:
        self._metrics.add(figures)
        self._on_metrics(figures)

    def _refused(self, found: StepStats, pieces: list[Batch]) -> str | None:
        """Why the update is not made; None if it may be. Acts as the guard's policy says."""
        may_overflow = self.master_weights.may_overflow
        self.master_weights.update_loss_scale(found.finite)
        if not found.finite and may_overflow:
            self.step += 1
            return "the scaled loss overflowed"
        reason = self.spike_detector.check(found.loss, found.grad_norm)
        if reason is None:
            return None
        number, ids = self.step + 1, [i for piece in pieces for i in piece.sample_ids]
        path = dump_bad_batch(self.directory, step=number, reason=reason, sample_ids=ids)
        self._diverged(number, reason, path)
        return reason

    def _diverged(self, number: int, reason: str, path: Path) -> None:
        policy = self.recipe.guard.policy
        if policy == "stop" or self.spike_detector.exhausted:
            self.checkpoints.wait()
            raise Diverged(
                f"step {number} has {reason}; the samples are in {path}",
                hint="lower optimizer.lr, raise schedule.warmup_steps, inspect the samples, or "
                "skip them: --resume guard.policy=skip",
            )
        back = self.checkpoints.latest() if policy == "rollback" else None
        if back is None:
            self.step += 1
            log.logger(__name__).warning("step %d skipped: %s (%s)", number, reason, path)
            return
        self._load(back)  # but not its place in the data
        log.logger(__name__).warning("from step %d back to %d: %s", number, back.step, reason)

    def _evaluate(self) -> EvalResult:
        recipe = self.recipe
        with self.ema_weights():
            score = evaluate(
                self.model,
                self.datasets.validation,
                batch_size=recipe.global_batch_size // recipe.grad_accum_steps,
                max_batches=recipe.eval_batches,
            )
        self._note({"step": self.step, **score.metrics()})
        log.logger(__name__).info("step %d: %s", self.step, _spelled(score.metrics()))
        return score

    def _save(self, score: EvalResult | None) -> None:
        if self._saved == self.step:
            return
        self._saved = self.step
        metadata = {
            "data": self.datasets.fingerprint,
            "sample": self.loader.state_dict()["sample"],
            "spike_detector": self.spike_detector.state_dict(),
            "metrics_lines": self._metrics.lines,
        }
        self.checkpoints.save(self.step, self._tensors(), metadata, score.loss if score else None)

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {
            "weights": self.master_weights.state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "optimizer": self.train_step.optimizers.state_dict(),
            "clipper": self.train_step.clipper.state_dict(),
            "ema": self.ema.weights if self.ema else {},
            "rng": {"torch": torch.get_rng_state()},
        }

    def _load(self, saved: Checkpoint) -> None:
        self.master_weights.load_state_dict(saved.tensors("weights"))
        for name, buffer in saved.tensors("buffers").items():
            self.model.get_buffer(name).copy_(buffer)
        self.train_step.optimizers.load_state_dict(saved.tensors("optimizer"))
        self.train_step.clipper.load_state_dict(saved.tensors("clipper"))
        if self.ema:
            self.ema.load_state_dict(saved.tensors("ema"))
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
        """FLOPs of a token, without what is computed again; None where nobody has num_targets."""
        if not isinstance(self.model, Decoder) or not isinstance(self.recipe.data, TextData):
            return None
        return flops_per_token(self.model.config, self.recipe.data.seq_len)


def flops_per_token(model: DecoderConfig, seq_len: int) -> float:
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
    scores = model.layers * heads * seq_len
    return 6.0 * (matmuls + model.dim * model.vocab_size + scores)


class _ConsoleLogger:
    """Tells a person how it goes: in the bar, or in a line now and then where there is none."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._last = trainer, time.monotonic()
        self._flops = trainer.flops()
        self._rate = 0.0

    def tell(self, figures: dict[str, Any], bar: log.Progress) -> None:
        rate = figures["num_rows"] / max(figures["seconds"], 1e-9)
        self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
        text = self._text(figures)
        bar.describe(f"{self._trainer.recipe.name} {text}")
        if time.monotonic() - self._last > _TELL_EVERY and not log.stderr().is_terminal:
            self._last = time.monotonic()
            steps = self._trainer.recipe.steps
            log.logger(__name__).info("step %d of %d: %s", figures["step"], steps, text)

    def _text(self, figures: dict[str, Any]) -> str:
        unit = "tokens" if isinstance(self._trainer.recipe.data, TextData) else "samples"
        parts = [
            f"loss {figures['loss']:.4g}",
            f"lr {figures['lr']:.2g}",
            f"norm {figures['grad_norm']:.2g}",
            f"{self._rate:,.0f} {unit}/s",
        ]
        if self._flops and self._trainer.peak_flops:
            parts.append(f"{self._rate * self._flops / self._trainer.peak_flops:.0%} of peak")
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
