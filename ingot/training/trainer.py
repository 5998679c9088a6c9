"""A training run from its recipe to its result: steps, evaluations, checkpoints and logs.

Everything that decides the next step is in a checkpoint: the optimizer's weights and state, the
position in the data, the running statistics of clipping and of the spike detector, the EMA, the
model's buffers and torch's random state. Dropout, mixup and the learning rate are functions of the
seed and the step. Frozen weights, those of the base of a LoRA adapter, are not copied: their hash
is. So a killed run resumes from its latest checkpoint and repeats the same steps, bit-for-bit.

    run/
        recipe.toml          the resolved recipe
        environment.json     hardware and versions
        metrics.jsonl        a line for every step and evaluation
        checkpoints/         the latest few and the best
        bad_batches/         the sample ids of batches that were skipped
        validation.safetensors   log-probabilities of validation text, to compare with a server's

The model, its gradients and all optimizer state are on the device of the recipe. The loader, the
clipper and the spike detector work on the host. Nothing draws from the device's random generator.
"""

# pyright: basic
from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ingot.core import config, log
from ingot.core.device import detect, resolve
from ingot.core.errors import ConfigError
from ingot.core.paths import write_atomic
from ingot.data import Loader
from ingot.nn import Decoder
from ingot.nn.qat import prepare_qat_
from ingot.nn.quantized import QuantizedModule
from ingot.nn.weights import hash_tensors
from ingot.observe.metrics import MetricsLog
from ingot.parallel.compression import Int8Rounding
from ingot.parallel.context import split_context
from ingot.parallel.diloco import OuterOptimizer
from ingot.parallel.mesh import Mesh
from ingot.parallel.ranks import Ranks, sent_bytes, waited_seconds
from ingot.parallel.replicas import check_replicas
from ingot.parallel.shard import ShardedModel
from ingot.parallel.stage import Stage, cut_stages
from ingot.parallel.tensor import take_rows
from ingot.training.checkpoint import Checkpoint, Checkpoints, name_rows
from ingot.training.clip import Clipper
from ingot.training.console import ConsoleLogger
from ingot.training.ema import EMA, apply_weights
from ingot.training.evaluate import EvalResult, evaluate, save_logprobs
from ingot.training.flops import flops_per_token
from ingot.training.guard import Diverged, SpikeDetector, bad_batch_path, dump_bad_batch
from ingot.training.objective import Batch
from ingot.training.optimizer import Optimizers
from ingot.training.precision import MasterWeights
from ingot.training.recipe import (
    Datasets,
    Recipe,
    RowData,
    TextData,
    build_model,
    build_objective,
    load_datasets,
)
from ingot.training.step import StepStats, TrainStep, merge_stats

if TYPE_CHECKING:
    from ingot.parallel.pipeline import Pipeline

RECIPE = "recipe.toml"
_ACTIONS = ("checkpoint", "lower_lr")  # after an alarm
_OF_REPLICA = ("weights", "optimizer", "clipper")  # what differs between local steps


class Trainer:
    """One run in a directory; call `resume` first to continue the run that is there.

    `model` is the model of `recipe.init_from`, if that is given; `datasets` is the data of the
    recipe, if it is loaded already. `peak_flops` is the machine's peak in FLOP/s, if it is known,
    for the utilization that is logged. `ranks` are the processes that compute the run together; the
    main one writes its files.
    """

    def __init__(
        self,
        recipe: Recipe,
        directory: Path,
        model: nn.Module | None = None,
        peak_flops: float | None = None,
        datasets: Datasets | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = Ranks() if ranks is None else ranks
        recipe.check_ranks(self.ranks.size)
        self.recipe, self.directory, self.peak_flops = recipe, directory, peak_flops
        self.device = resolve(recipe.device)
        self.mesh = self._step_mesh = Mesh.build(self.ranks, recipe.parallel, self.device.type)
        if recipe.parallel.local_steps > 1:
            self._step_mesh = self.mesh.replica()
        self.datasets = load_datasets(recipe.data) if datasets is None else datasets
        self.model = build_model(recipe) if model is None else model
        self._check()
        self.model.to(self.device)
        if recipe.adapter:
            self.model.add_lora(recipe.adapter, recipe.seed)  # pyright: ignore
        if recipe.qat:
            prepare_qat_(self.model, recipe.qat.weight_format)  # pyright: ignore
        shard_batches = recipe.grad_accum_steps // recipe.batch_shards
        self.objective = build_objective(recipe)
        self.train_step = self._build_step(shard_batches)
        self.outer = self._build_outer() if recipe.parallel.local_steps > 1 else None
        self.ema: EMA | None = None
        if recipe.ema_decay:
            masters = self.master_weights
            self.ema = EMA(masters.weights, recipe.ema_decay, masters.low_bits)
        self.spike_detector = SpikeDetector(recipe.guard)
        self._micro_batch_size = recipe.global_batch_size // recipe.grad_accum_steps
        self.loader = self._build_loader(shard_batches)
        place = directory / "checkpoints"
        self.checkpoints = Checkpoints(place, recipe.keep_checkpoints, self.ranks)
        self.step, self.lr_scale = 0, 1.0
        self._stop = False
        self._asked: set[str] = set()
        self._metrics: MetricsLog | None = None
        self._metrics_lines = 0
        self._saved_step: int | None = None

    def _build_step(self, shard_batches: int) -> TrainStep:
        """Divide the model among the ranks, and build what updates it."""
        recipe, seed = self.recipe, self.recipe.seed + self._replica
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        stages = self._cut() if self.mesh.pp.size > 1 else None
        split = recipe.optimizer.updates_split_weights
        self.master_weights = masters = MasterWeights(self.model, recipe.precision, split)
        rounding = Int8Rounding(seed) if recipe.parallel.compresses else None
        self.sharded = self._shard(shard_batches, stages, rounding) if self.ranks.size > 1 else None
        self.pipeline = self._connect(stages, shard_batches) if stages else None
        return TrainStep(
            self.model,
            masters,
            Optimizers(recipe.optimizer, self.model, masters.weights, masters.low_bits),
            Clipper(recipe.clip, len(names)),
            self.objective,
            seed=seed,
            sharded=self.sharded,
            mesh=self._step_mesh,
            shard_batches=shard_batches,
            rounding=rounding,
            names=names,
            pipeline=self.pipeline,
        )

    @property
    def _replica(self) -> int:
        """The index of this rank's replica, if replicas train on their own."""
        return self.mesh.dp.rank if self.recipe.parallel.local_steps > 1 else 0

    def _cut(self) -> list[Stage]:
        """Remove the layers of other ranks of the pipeline from the model."""
        return cut_stages(self.model, self.mesh.pp, self.recipe.parallel.schedule)

    def _connect(self, stages: list[Stage], shard_batches: int) -> Pipeline:
        """Connect the stages of all ranks by the schedule."""
        from ingot.parallel.pipeline import Pipeline

        assert self.sharded is not None
        count = self.recipe.grad_accum_steps // self.mesh.data.size
        schedule = self.recipe.parallel.schedule
        return Pipeline(stages, self.sharded, schedule, count, shard_batches)

    def _shard(
        self, shard_batches: int, stages: list[Stage] | None, rounding: Int8Rounding | None
    ) -> ShardedModel:
        """Shard the model and its master weights over the ranks."""
        masters = self.master_weights
        if self.mesh.cp.size > 1:
            split_context(self.model, self.mesh.cp)
        dtype = self.recipe.precision.dtype if shard_batches == 1 else torch.float32
        add = masters.gradients.add
        options: dict[str, Any] = {
            "grad_dtype": dtype,
            "expert_parallel": self.recipe.parallel.ep > 1,
            "stages": stages,
            "rounding": rounding,
            "tp_bitwise": self.recipe.parallel.tp_bitwise,
        }
        sharded = ShardedModel(self.model, self._step_mesh, add, **options)
        masters.shard(sharded)
        return sharded

    def _build_outer(self) -> OuterOptimizer:
        assert self.sharded is not None
        weights = {name: self.master_weights.whole(name) for name in self.master_weights.weights}
        parallel, rows = self.recipe.parallel, self.sharded.rows
        seed = self.recipe.seed if parallel.compresses else None
        return OuterOptimizer(weights, self.mesh.dp, parallel, seed=seed, rows=rows)

    def _build_loader(self, shard_batches: int) -> Loader[Batch]:
        mesh = self.mesh
        return Loader(
            self.datasets.train,
            batch_size=self._micro_batch_size,
            seed=self.recipe.seed,
            rank=mesh.data.rank if self.outer is None else mesh.alternating_rank,
            world_size=mesh.data.size,
            consecutive=shard_batches,
        )

    def _check(self) -> None:
        if self.ranks.size > 1 and any(True for _ in self.model.buffers()):
            raise ConfigError(
                "model: has buffers that training changes, such as running means, which differ "
                "between ranks",
                hint="train it on one rank",
            )
        model_config: Any = self.model.config
        self.recipe.check_model(model_config)
        vocab_size = self.datasets.vocab_size
        if vocab_size and vocab_size > model_config.vocab_size:
            raise ConfigError(
                f"model.vocab_size: must be at least the tokenizer's {vocab_size}, "
                f"got {model_config.vocab_size}",
                hint=f"set model.vocab_size={vocab_size} or more",
            )
        if self.recipe.dropout:
            self.model.set_dropout(self.recipe.dropout)  # pyright: ignore
        if self.recipe.recompute != "none":
            self.model.set_recompute(self.recipe.recompute)  # pyright: ignore

    def resume(self) -> bool:
        """Continue from the latest intact checkpoint; return False if there is none."""
        saved = config.load(Recipe, self.directory / RECIPE)
        if changed := _differences(saved.with_resumable_fields(self.recipe), self.recipe):
            raise ConfigError(
                f"{self.directory}: the run has another recipe, {', '.join(changed)} differ",
                hint="resume with the run's own recipe, or start a new run",
            )
        checkpoint = self.checkpoints.latest()
        self.ranks.barrier()  # others may still be reading
        if self.ranks.is_main:
            self.checkpoints.quarantine_after(checkpoint.step if checkpoint else -1)
        self.ranks.barrier()
        if checkpoint is None:
            return False
        if checkpoint.metadata["data"] != self.datasets.fingerprint:
            raise ConfigError(
                f"{self.directory}: the run was trained on other data",
                hint="restore the data that it was started with, or start a new run",
            )
        if checkpoint.metadata.get("base") != self._base_hash:
            raise ConfigError(
                f"{self.directory}: the weights of init_from have changed since the run started",
                hint="restore the model that it was started with, or start a new run",
            )
        self._load(checkpoint)
        self.loader.load_state_dict(checkpoint.metadata["loader"])
        self.spike_detector.load_state_dict(checkpoint.metadata["spike_detector"])
        self._metrics_lines = checkpoint.metadata["metrics_lines"]
        self.lr_scale = checkpoint.metadata.get("lr_scale", 1.0)
        return True

    def stop(self) -> None:
        """Ask the run to write a checkpoint and return after the current step."""
        self._stop = True

    def ask(self, action: str) -> None:
        """After the current step, write a "checkpoint", or halve the learning rate: "lower_lr"."""
        self._asked.add(action)

    def run(
        self, on_metrics: Callable[[dict[str, Any]], object] = lambda _: None
    ) -> EvalResult | None:
        """Run the remaining steps. Returns the last evaluation; None if `stop` was called.

        `on_metrics` is called with every line of metrics.
        """
        self._on_metrics = on_metrics
        if self.ranks.is_main:
            self._write_description()
            self._metrics = MetricsLog(self.directory, self._metrics_lines)
        recipe, result = self.recipe, None
        if recipe.guard.policy == "rollback" and self.step == 0:
            self._save(None)
        with log.progress(recipe.name, recipe.steps - self.step) as bar:
            console = self._build_console()
            while self.step < recipe.steps and not self._stopping():
                before = self.step
                metrics = self.run_step()
                console.log(metrics, bar)
                bar.advance(self.step - before)
                if recipe.forecast.alarm in _ACTIONS:
                    self._respond(result)
                if self._is_due(recipe.eval_every):
                    result = self._evaluate()
                if self._is_due(recipe.checkpoint_every):
                    self._save(result)
                self.checkpoints.raise_pending_error()
        if self._stop and self.step < recipe.steps:
            self._save(result)
            self.checkpoints.wait()
            return None
        result = result if result and self._is_due(recipe.eval_every) else self._evaluate()
        if not self._is_due(recipe.checkpoint_every):
            self._save(result)
        self.checkpoints.wait()
        if isinstance(recipe.data, TextData | RowData):
            with self.ema_weights():
                last = self.pipeline is None or self.pipeline.is_last
                save_logprobs(
                    self.model,
                    self.datasets.validation,
                    self.directory,
                    write=last and self.mesh.is_main,
                    pipeline=self.pipeline,
                )
                self._reshard()
        return result

    def _build_console(self) -> ConsoleLogger:
        recipe, flops = self.recipe, self.flops()
        unit = "tokens" if isinstance(recipe.data, TextData | RowData) else "samples"
        share = flops / self.peak_flops if flops and self.peak_flops else None
        return ConsoleLogger(recipe.name, recipe.steps, self.device, unit=unit, peak_share=share)

    def _stopping(self) -> bool:
        """Return whether `stop` was called, on any rank: all have to do the same steps."""
        stopping = any(flag for (flag,) in self.ranks.gather([float(self._stop)]))
        if stopping:
            self._stop = True  # but never to False: a signal may have come meanwhile
        return stopping

    def _respond(self, result: EvalResult | None) -> None:
        """Do what any rank was asked for."""
        asked = self.ranks.gather([float(action in self._asked) for action in _ACTIONS])
        self._asked.clear()
        save, lower = (any(flags) for flags in zip(*asked, strict=True))
        self.lr_scale *= 0.5 if lower else 1.0
        if save:
            self._save(result)

    def _reshard(self) -> None:
        if self.sharded:
            self.sharded.reshard()

    def ema_weights(self) -> Any:
        """Return a context in which the model has the EMA of its weights, if there is one, or those
        of the last synchronization, if replicas train on their own."""
        found = self.ema or self.outer
        return apply_weights(found.weights, self.model) if found else nullcontext()

    def _is_due(self, every: int) -> bool:
        return bool(every) and self.step > 0 and self.step % every == 0

    def run_step(self) -> dict[str, Any]:
        """Run one step and return its metrics; outside of `run`, they are not logged."""
        start, waited = time.perf_counter(), self.loader.wait_seconds
        before, sent, comm = self.step, sent_bytes(), waited_seconds()
        count = self.recipe.grad_accum_steps // self.mesh.data.size
        micro_batches = [next(self.loader) for _ in range(count)]
        stats = self.train_step.forward_backward(micro_batches, self.step)
        if self.outer:
            stats = merge_stats(stats, self.mesh.dp)
        lr_factor = self.lr_scale * self.recipe.schedule.lr_factor(self.step, self.recipe.steps)
        metrics: dict[str, Any] = {
            "step": self.step + 1,
            "loss": stats.loss,
            "lr": self.recipe.optimizer.lr * lr_factor,
            "grad_norm": stats.grad_norm,
            "num_rows": stats.num_rows,
            **stats.metrics,
        }
        if reason := self._reason_to_skip(stats, micro_batches):
            metrics["skipped"] = reason
        else:
            metrics |= self.train_step.optimizer_step(lr_factor)
            if self.ema and not self.outer:
                self.ema.update(self.step)
            self.step += 1
        self.train_step.clear_grads()
        if self.outer and self.step > before:
            self._synchronize(self.outer)
        metrics["seconds"] = time.perf_counter() - start
        metrics["data_seconds"] = self.loader.wait_seconds - waited
        if self.ranks.size > 1:
            metrics["sent_bytes"] = sent_bytes() - sent
            for kind, seconds in waited_seconds().items():
                metrics[f"{kind}_seconds"] = seconds - comm.get(kind, 0.0)
        self._record(metrics)
        return metrics

    def _synchronize(self, outer: OuterOptimizer) -> None:
        """Give all replicas the same weights, after `local_steps` and after the last step."""
        every = self.recipe.parallel.local_steps
        if self.step % every and self.step < self.recipe.steps:
            return
        outer.set_step(self.step)
        self.master_weights.map(outer.update)
        if self.ema:
            self.ema.update(-(-self.step // every) - 1)

    def _record(self, metrics: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.add(metrics)
            self._on_metrics(metrics)

    def _reason_to_skip(self, stats: StepStats, micro_batches: list[Batch]) -> str | None:
        """Return why the update must be skipped, after applying the guard's policy; else None."""
        may_overflow = self.master_weights.may_overflow
        self.master_weights.update_loss_scale(stats.finite)
        if not stats.finite and may_overflow:
            self.step += 1
            return "the scaled loss overflowed"
        reason = self.spike_detector.check(stats.loss, stats.grad_norm)
        if reason is None:
            return None
        number = self.step + 1
        own = [float(i) for micro_batch in micro_batches for i in micro_batch.sample_ids]
        sample_ids = [int(i) for of_rank in self.mesh.data.gather(own) for i in of_rank]
        path = bad_batch_path(self.directory, number)
        if self.ranks.is_main:
            dump_bad_batch(path, step=number, reason=reason, sample_ids=sample_ids)
        self._handle_bad_batch(number, reason, path)
        return reason

    def _handle_bad_batch(self, number: int, reason: str, path: Path) -> None:
        policy = self.recipe.guard.policy
        if policy == "stop" or self.spike_detector.exhausted:
            self.checkpoints.wait()
            raise Diverged(
                f"step {number}: {reason}; the sample ids are in {path}",
                hint="lower optimizer.lr, raise schedule.warmup_steps, inspect the samples, or "
                "skip them: --resume guard.policy=skip",
            )
        checkpoint = self._latest_checkpoint() if policy == "rollback" else None
        if checkpoint is None:
            self.step += 1
            log.logger(__name__).warning("step %d skipped: %s (%s)", number, reason, path)
            return
        self._load(checkpoint)  # but keep the position in the data
        log.logger(__name__).warning(
            "step %d: %s; rolled back to step %d", number, reason, checkpoint.step
        )

    def _latest_checkpoint(self) -> Checkpoint | None:
        self.checkpoints.wait()
        self.ranks.barrier()  # the main rank completes it
        return self.checkpoints.latest()

    def _evaluate(self) -> EvalResult:
        with self.ema_weights():
            result = evaluate(
                self.model,
                self.datasets.validation,
                batch_size=self._micro_batch_size,
                max_batches=self.recipe.eval_batches,
                objective=self.objective,
                ranks=self.mesh.data,
                pipeline=self.pipeline,
            )
            self._reshard()
        self._record({"step": self.step, **result.metrics()})
        log.logger(__name__).info("step %d: %s", self.step, _format_metrics(result.metrics()))
        return result

    def _save(self, result: EvalResult | None) -> None:
        if self._saved_step == self.step:
            return
        self._saved_step = self.step
        metadata = {
            "data": self.datasets.fingerprint,
            "base": self._base_hash,
            "loader": self.loader.state_dict(),
            "spike_detector": self.spike_detector.state_dict(),
            "metrics_lines": self._metrics.lines if self._metrics else 0,
            "lr_scale": self.lr_scale,
        }
        self.checkpoints.save(self.step, self._tensors(), metadata, result.loss if result else None)

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return what this rank saves: its rows, in the first replica, and what others have, too,
        if it is the main rank of its layers or of all.

        Replicas that train on their own save both, under names of their own."""
        parts, mesh = self._state(), self._step_mesh
        if self.sharded is None:
            return parts
        if not self.outer:
            own = (tensor for part in _OF_REPLICA for tensor in parts[part].values())
            check_replicas(self.mesh, own, self.step)
        rows: dict[str, dict[str, Tensor]] = {}
        for part, tensors in parts.items():
            for name, tensor in tensors.items():
                if self.sharded.has_rows(name, tensor):
                    if self.sharded.owns(name):
                        own = self.sharded.split_rows(name, tensor)
                        rows.setdefault(part, {}).update((name_rows(name, r), t) for r, t in own)
                elif mesh.is_main if self.sharded.has_weight(name) else mesh.world.is_main:
                    rows.setdefault(part, {})[name] = tensor
        if self._replica:
            return {self._name_part(part): rows[part] for part in _OF_REPLICA if part in rows}
        return rows

    def _name_part(self, part: str) -> str:
        own = self._replica and part in _OF_REPLICA
        return f"replica-{self._replica}/{part}" if own else part

    def _state(self) -> dict[str, dict[str, Tensor]]:
        return {
            "weights": self.master_weights.state_dict(),
            "buffers": self._buffers(),
            "optimizer": self.train_step.optimizers.state_dict(),
            "clipper": self.train_step.clipper.state_dict(),
            "ema": self.ema.state_dict() if self.ema else {},
            "outer": self.outer.state_dict() if self.outer else {},
            "rng": {"torch": torch.get_rng_state()},
        }

    def _buffers(self) -> dict[str, Tensor]:
        """Return the buffers that training changes: not those of quantized weights."""
        modules = self.model.named_modules()
        frozen = tuple(f"{name}." for name, m in modules if isinstance(m, QuantizedModule))
        return {n: b for n, b in self.model.named_buffers() if not n.startswith(frozen)}

    def _load(self, checkpoint: Checkpoint) -> None:
        def read(part: str) -> dict[str, Tensor]:
            found, sharded = checkpoint.tensors(self._name_part(part)), self.sharded
            if sharded is None:
                return found
            return {
                name: take_rows(tensor, sharded.rows(name))
                if sharded.has_rows(name, tensor)
                else tensor
                for name, tensor in found.items()
                if name.startswith("|") or sharded.has_weight(name)
            }

        self.master_weights.load_state_dict(read("weights"))
        for name, buffer in checkpoint.tensors("buffers").items():
            self.model.get_buffer(name).copy_(buffer)
        self.train_step.optimizers.load_state_dict(read("optimizer"))
        clipper = checkpoint.tensors(self._name_part("clipper"))
        self.train_step.clipper.load_state_dict(clipper)
        if self.ema:
            self.ema.load_state_dict(read("ema"))
        if self.outer:
            self.outer.load_state_dict(read("outer"))
        torch.set_rng_state(checkpoint.tensors("rng")["torch"])
        self.step = self._saved_step = checkpoint.step

    @cached_property
    def _base_hash(self) -> str | None:
        """SHA-256 of the frozen weights; None if all are trained."""
        frozen = {n: p for n, p in self.model.named_parameters() if not p.requires_grad}
        for name, module in self.model.named_modules():
            if isinstance(module, QuantizedModule):
                fields = module.get()._asdict().items()
                frozen |= {f"{name}.{field}": t for field, t in fields if t is not None}
        return hash_tensors(frozen) if frozen else None

    def _write_description(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        config.save(self.recipe, self.directory / RECIPE)
        cpu = detect().cpu
        environment = {
            "device": str(self.device),
            "cpu": cpu.name,
            "isa": cpu.isa,
            "cores": cpu.cores,
            "ranks": self.ranks.size,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        }
        write_atomic(self.directory / "environment.json", json.dumps(environment, indent=2) + "\n")

    def flops(self) -> float | None:
        """Return the model FLOPs of a token, without recomputation; None for other models."""
        if not isinstance(self.model, Decoder) or not isinstance(self.recipe.data, TextData):
            return None
        frozen = self.recipe.adapter is not None
        return flops_per_token(self.model.config, self.recipe.data.seq_len, frozen)


def _differences(one: Recipe, other: Recipe) -> list[str]:
    return [f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)]


def _format_metrics(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())
