"""Runs training steps of one system in its own process: `python -m ingot.bench.train_worker TASK`.

TASK is a JSON object, as `ingot.bench.train` writes it; the measurements are printed as one line of
JSON on stdout.

    ingot      `ingot.training`'s train step: bf16 weights with 32-bit master weights, or float32
    eager      `ingot.bench.gpt2_baseline`: float32 weights, bf16 by autocast
    compile    the same under torch.compile
    trainer    transformers' model and its Trainer, with its bf16 option
    lora       ingot, training a LoRA adapter of rank 16 on all linear layers
    peft       the same with PEFT and Trainer; weights of the base in the precision of the run

All have the same weights, the same batches (random tokens, a function of the step number), the same
AdamW (in float32, weight decay on matrices except the embeddings; torch's fused one, for ingot
`ingot.ops.adamw`), and clip gradients to a norm of 1.

Two warm-up steps are not counted: page faults, compilation, allocation of the optimizer state.
Between them unused memory is returned to the system, and the rest is what the process holds between
two steps; the peak is that of the steps from then on. Activations are what is allocated at the end
of a forward pass and was not at its start.
"""

# pyright: basic
from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ingot.bench import gpt2_baseline
from ingot.core.targets import IGNORE_INDEX
from ingot.data import TokenBatch
from ingot.training.optimizer import AdamWConfig, Optimizers, select_decayed

if TYPE_CHECKING:
    from ingot.nn.lora import LoraConfig

WARMUP_STEPS = 2
LORA_RANK = 16
_LR = 1e-4


def batch(number: int, size: int, seq_len: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, (size, seq_len): the next token; ignored after the last one.

    >>> tokens, targets = batch(0, 2, 3, 100)
    >>> bool((targets[:, :-1] == tokens[:, 1:]).all()), targets[:, -1].tolist()
    (True, [-100, -100])
    """
    random = torch.Generator().manual_seed(number)
    tokens_BL = torch.randint(vocabulary, (size, seq_len), generator=random)
    targets_BL = torch.full_like(tokens_BL, IGNORE_INDEX)
    targets_BL[:, :-1] = tokens_BL[:, 1:]
    return tokens_BL, targets_BL


class StepClock:
    """Records the seconds and losses of steps, and the memory they take."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.idle_bytes = self.activation_bytes = self._used = 0
        self._laps: dict[str, float] = {}
        self._last = 0.0

    def begin(self) -> None:
        """Start a step."""
        if len(self.steps) == WARMUP_STEPS - 1:
            _trim()
            self.idle_bytes, self._used = _status("VmRSS"), _used()
            _reset_peak()
        self._laps, self._last = {}, perf_counter()

    def lap(self, part: str) -> None:
        """End a part of the step."""
        now = perf_counter()
        self._laps[part], self._last = now - self._last, now
        if part == "forward" and len(self.steps) == WARMUP_STEPS - 1:
            self.activation_bytes = max(_used() - self._used, 0)

    def end(self, loss: float) -> None:
        """End the step with its last part, the optimizer."""
        self.lap("optimizer")
        self.steps.append({**self._laps, "loss": loss})

    def report(self, version: str) -> dict[str, Any]:
        """Return the measurements as `WorkerReport` decodes them."""
        return {
            "version": version,
            "losses": [step.pop("loss") for step in self.steps],
            "steps": self.steps[WARMUP_STEPS:],
            "idle_bytes": self.idle_bytes,
            "activation_bytes": self.activation_bytes,
            "peak_bytes": _status("VmHWM"),
        }


def _status(key: str) -> int:
    """Bytes as /proc reports them; without /proc, the peak of the whole process."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reset_peak() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class _Mallinfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def _used() -> int:
    """Bytes allocated, as glibc counts them; 0 with another C library."""
    with suppress(OSError, AttributeError):
        count = ctypes.CDLL("libc.so.6").mallinfo2
        count.restype = _Mallinfo
        info = count()
        return info.uordblks + info.hblkhd
    return 0


def _trim() -> None:
    """Return unused memory to the system (glibc only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def ingot(task: dict[str, Any], clock: StepClock) -> str:
    """Run the train step of `ingot.training`."""
    return _run_ingot(task, clock)


def lora(task: dict[str, Any], clock: StepClock) -> str:
    """Run the train step of `ingot.training` for a LoRA adapter."""
    from ingot.nn.lora import LoraConfig

    return _run_ingot(task, clock, LoraConfig(rank=LORA_RANK, alpha=2.0 * LORA_RANK))


def _run_ingot(task: dict[str, Any], clock: StepClock, adapter: LoraConfig | None = None) -> str:
    from ingot.interop import hf
    from ingot.training.clip import ClipNormConfig, Clipper
    from ingot.training.objective import CrossEntropy
    from ingot.training.precision import MasterWeights, Precision
    from ingot.training.step import TrainStep, TrainStepHooks

    class Timer(TrainStepHooks):
        def after_forward(self, index: int) -> None:
            clock.lap("forward")

    model = hf.load(task["model"], dtype=torch.float32)
    if adapter:
        model.add_lora(adapter, seed=0)
    masters = MasterWeights(model, Precision(task["precision"]), split=True)
    config = AdamWConfig(lr=_LR, state_dtype=task["state_dtype"])
    optimizers = Optimizers(config, model, masters.weights, masters.low_bits)
    clipper = Clipper(ClipNormConfig(), len(masters.weights))
    step = TrainStep(model, masters, optimizers, clipper, CrossEntropy(), Timer())
    model.set_recompute(task["recompute"])
    for number, (tokens_BL, targets_BL) in enumerate(_batches(task, model.config.vocab_size)):
        lengths = [task["seq_len"]] * task["batch_size"]
        packed = TokenBatch(tokens_BL.flatten(), targets_BL.flatten(), lengths, [])
        clock.begin()
        stats = step.forward_backward([packed], number)
        clock.lap("backward")
        step.optimizer_step(1.0)
        clock.end(stats.loss)
    return importlib.metadata.version("ingot")


def eager(task: dict[str, Any], clock: StepClock) -> str:
    """Run the baseline in eager mode."""
    model = gpt2_baseline.load(Path(task["model"]))
    return _run_baseline(model, model, task, clock)


def compiled(task: dict[str, Any], clock: StepClock) -> str:
    """Run the baseline under torch.compile."""
    model = gpt2_baseline.load(Path(task["model"]))
    return _run_baseline(model, torch.compile(model), task, clock)


def _run_baseline(
    model: gpt2_baseline.GPT2, run: Callable[..., Any], task: dict[str, Any], clock: StepClock
) -> str:
    optimizer = _adamw(model)
    for tokens_BL, targets_BL in _batches(task, model.wte.num_embeddings):
        clock.begin()
        with torch.autocast("cpu", torch.bfloat16, enabled=task["precision"] == "bf16"):
            loss = run(tokens_BL, targets_BL)
        clock.lap("forward")
        loss.backward()
        clock.lap("backward")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.end(float(loss.detach()))
    return torch.__version__


def trainer(task: dict[str, Any], clock: StepClock) -> str:
    """Run transformers' Trainer."""
    return _run_trainer(_transformers_model(task, torch.float32), task, clock)


def peft(task: dict[str, Any], clock: StepClock) -> str:
    """Run transformers' Trainer for a LoRA adapter of PEFT."""
    import peft

    base = _transformers_model(
        task, torch.bfloat16 if task["precision"] == "bf16" else torch.float32
    )
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        target_modules="all-linear",
        fan_in_fan_out=base.config.model_type == "gpt2",  # its Conv1D
    )
    model = peft.get_peft_model(base, config)
    transformers_version = _run_trainer(model, task, clock)
    return f"{peft.__version__}, transformers {transformers_version}"


def _transformers_model(task: dict[str, Any], dtype: torch.dtype) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    dropouts = {f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")}
    config = transformers.AutoConfig.from_pretrained(task["model"], **dropouts)
    return transformers.AutoModelForCausalLM.from_pretrained(
        task["model"], config=config, dtype=dtype, attn_implementation="sdpa"
    )


def _run_trainer(model: Any, task: dict[str, Any], clock: StepClock) -> str:
    """Run Trainer; its work between steps, data included, is not counted."""
    import accelerate  # noqa: F401  # without it, Trainer fails much later
    import transformers

    class StepTimes(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.end(float(trainer.last))

    class TimedTrainer(transformers.Trainer):
        last: Any = 0.0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            clock.lap("forward")
            return loss

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.last = super().training_step(*args, **kwargs)
            clock.lap("backward")
            return self.last

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(samples)  # pyright: ignore

    samples = [
        {"input_ids": tokens_L, "labels": targets_L.roll(1)}  # the model shifts labels back
        for pair in _batches(task, model.config.vocab_size)
        for tokens_L, targets_L in zip(*pair, strict=True)
    ]
    trainer = TimedTrainer(
        model=model,
        args=_trainer_arguments(task),
        train_dataset=samples,  # pyright: ignore[reportArgumentType]
        optimizers=(_adamw(model), None),
        callbacks=[StepTimes()],
    )
    trainer.train()
    return transformers.__version__


def _trainer_arguments(task: dict[str, Any]) -> Any:
    import transformers

    return transformers.TrainingArguments(
        output_dir=task["folder"],
        per_device_train_batch_size=task["batch_size"],
        max_steps=WARMUP_STEPS + task["steps"],
        bf16=task["precision"] == "bf16",
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )


def _batches(task: dict[str, Any], vocabulary: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(WARMUP_STEPS + task["steps"]):
        yield batch(number, task["batch_size"], task["seq_len"], vocabulary)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's AdamW with the parameter groups that ingot uses for such a model."""
    decay = select_decayed(model)
    known = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not isinstance(model, gpt2_baseline.GPT2):  # transformers' GPT-2 has its matrices in Conv1D
        decay = {
            n: p.dim() >= 2 and ".wte." not in n and ".wpe." not in n for n, p in known.items()
        }
    groups: list[dict[str, Any]] = [
        {"params": [known[n] for n, yes in decay.items() if yes], "weight_decay": 0.1},
        {"params": [known[n] for n, yes in decay.items() if not yes], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=_LR, betas=(0.9, 0.95), eps=1e-8, fused=True)


SYSTEMS = {
    "ingot": ingot,
    "eager": eager,
    "compile": compiled,
    "trainer": trainer,
    "lora": lora,
    "peft": peft,
}
REQUIRED_PACKAGES: dict[str, Iterable[str]] = {
    "trainer": ("transformers", "accelerate"),
    "peft": ("transformers", "accelerate", "peft"),
}


def main() -> None:
    """Run the task given on the command line and print the measurements."""
    # Output of libraries goes to stderr; stdout is for the report alone.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task, clock = json.loads(sys.argv[1]), StepClock()
    version = SYSTEMS[task["system"]](task, clock)
    print(json.dumps(clock.report(version)), file=output, flush=True)


if __name__ == "__main__":
    main()
