"""One system that trains, in a process of its own: `python -m ingot.bench.trainee` and a task.

It makes some steps, and says what they took as one line of JSON on stdout. The task is a
JSON object, as `ingot.bench.train` makes it.

    ingot      `ingot.training`'s own step: bf16 weights with masters of 32 bits, or float32
    eager      `ingot.bench.plain` as it is, float32 weights, bf16 by autocast
    compile    the same under torch.compile
    trainer    transformers' own GPT-2 and its Trainer, bf16 by its option

All have the same weights, the same batches (random tokens, a function of the step's number), the
same AdamW (on float32, decay of matrices but the embeddings; torch's fused one, ours through
`ingot.ops.adamw`), and clip to a norm of 1.

The first two steps do not count: memory is touched, things are compiled, the optimizer makes its
state. Between them unused memory is given back, and what is left is what the process holds between
two steps; the peak is of the steps from then on. Activations are what is allocated at the end of a
forward and was not before it.
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
from typing import Any

import torch
from torch import Tensor, nn

from ingot.bench import plain
from ingot.core.targets import IGNORE_INDEX
from ingot.data import TokenBatch
from ingot.training.optimizer import AdamW, Optimizers, decays

WARM = 2
_LR = 1e-4


def batch(number: int, size: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, (size, length): the next token, and none behind the last.

    >>> tokens, targets = batch(0, 2, 3, 100)
    >>> bool((targets[:, :-1] == tokens[:, 1:]).all()), targets[:, -1].tolist()
    (True, [-100, -100])
    """
    random = torch.Generator().manual_seed(number)
    tokens_BL = torch.randint(vocabulary, (size, length), generator=random)
    targets_BL = torch.full_like(tokens_BL, IGNORE_INDEX)
    targets_BL[:, :-1] = tokens_BL[:, 1:]
    return tokens_BL, targets_BL


class Clock:
    """The seconds and losses of steps, and the memory they take."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.resting = self.activations = self._used = 0
        self._laps: dict[str, float] = {}
        self._last = 0.0

    def begin(self) -> None:
        """A step begins."""
        if len(self.steps) == WARM - 1:
            _trim()
            self.resting, self._used = _status("VmRSS"), _used()
            _reset_peak()
        self._laps, self._last = {}, perf_counter()

    def lap(self, part: str) -> None:
        """A part of the step ends."""
        now = perf_counter()
        self._laps[part], self._last = now - self._last, now
        if part == "forward" and len(self.steps) == WARM - 1:
            self.activations = max(_used() - self._used, 0)

    def end(self, loss: float) -> None:
        """The step ends, with its last part."""
        self.lap("update")
        self.steps.append({**self._laps, "loss": loss})

    def report(self, version: str) -> dict[str, Any]:
        """What is said of all of it."""
        return {
            "version": version,
            "losses": [step.pop("loss") for step in self.steps],
            "steps": self.steps[WARM:],
            "resting": self.resting,
            "activations": self.activations,
            "peak": _status("VmHWM"),
        }


def _status(key: str) -> int:
    """Bytes by /proc; where there is none, the most that the process ever had."""
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
    """Bytes that are allocated, as the C library counts them (glibc); 0 where it does not."""
    with suppress(OSError, AttributeError):
        count = ctypes.CDLL("libc.so.6").mallinfo2
        count.restype = _Mallinfo
        found = count()
        return found.uordblks + found.hblkhd
    return 0


def _trim() -> None:
    """Give unused memory back to the system, where the C library can (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def ingot(task: dict[str, Any], clock: Clock) -> str:
    """Our own step."""
    from ingot.interop import hf
    from ingot.training.clip import Clipper, Norm
    from ingot.training.precision import Masters, Precision
    from ingot.training.recompute import recompute
    from ingot.training.step import Batch, Losses, Step

    class Timed(Step):
        def _losses(self, piece: Batch, step: int, index: int, grad_output: float) -> Tensor:
            found = super()._losses(piece, step, index, grad_output)
            clock.lap("forward")
            return found

    model = hf.load(task["model"], dtype=torch.float32)
    masters = Masters(model, Precision(task["precision"]), split=True)
    config = AdamW(lr=_LR, moments=task["moments"])
    optimizers = Optimizers(config, model, masters.weights, masters.low)
    step = Timed(model, masters, optimizers, Clipper(Norm(), len(masters.weights)), Losses())
    recompute(model, task["recompute"])
    for number, (tokens_BL, targets_BL) in enumerate(_batches(task, model.config.vocab_size)):
        lengths = [task["length"]] * task["batch"]
        packed = TokenBatch(tokens_BL.flatten(), targets_BL.flatten(), lengths, [])
        clock.begin()
        found = step.gradients([packed], number)
        clock.lap("backward")
        step.update(1.0)
        clock.end(found.loss)
    return importlib.metadata.version("ingot")


def eager(task: dict[str, Any], clock: Clock) -> str:
    """Plain PyTorch."""
    model = plain.load(Path(task["model"]))
    return _plain(model, model, task, clock)


def compiled(task: dict[str, Any], clock: Clock) -> str:
    """Plain PyTorch under torch.compile."""
    model = plain.load(Path(task["model"]))
    return _plain(model, torch.compile(model), task, clock)


def _plain(model: plain.GPT2, run: Callable[..., Any], task: dict[str, Any], clock: Clock) -> str:
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


def trainer(task: dict[str, Any], clock: Clock) -> str:
    """transformers' Trainer; what it does between steps, data included, does not count."""
    import accelerate  # noqa: F401  # without which Trainer says so much later
    import transformers

    class Told(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.end(float(trainer.last))

    class Timed(transformers.Trainer):
        last: Any = 0.0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            clock.lap("forward")
            return found

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.last = super().training_step(*args, **kwargs)
            clock.lap("backward")
            return self.last

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(samples)  # pyright: ignore

    transformers.utils.logging.set_verbosity_error()
    dropouts = {f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=torch.float32, attn_implementation="sdpa", **dropouts
    )
    options = transformers.TrainingArguments(
        output_dir=task["folder"],
        per_device_train_batch_size=task["batch"],
        max_steps=WARM + task["steps"],
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
    samples = [
        {"input_ids": tokens_L, "labels": targets_L.roll(1)}  # which it rolls back
        for pair in _batches(task, model.config.vocab_size)
        for tokens_L, targets_L in zip(*pair, strict=True)
    ]
    trainer = Timed(
        model=model,
        args=options,
        train_dataset=samples,  # pyright: ignore[reportArgumentType]
        optimizers=(_adamw(model), None),
        callbacks=[Told()],
    )
    trainer.train()
    return transformers.__version__


def _batches(task: dict[str, Any], vocabulary: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(WARM + task["steps"]):
        yield batch(number, task["batch"], task["length"], vocabulary)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that ingot makes for such a model."""
    decay, known = decays(model), dict(model.named_parameters())
    if not isinstance(model, plain.GPT2):  # transformers' matrices of GPT-2 are in Conv1D
        decay = {
            n: p.dim() >= 2 and ".wte." not in n and ".wpe." not in n for n, p in known.items()
        }
    groups: list[dict[str, Any]] = [
        {"params": [known[n] for n, yes in decay.items() if yes], "weight_decay": 0.1},
        {"params": [known[n] for n, yes in decay.items() if not yes], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=_LR, betas=(0.9, 0.95), eps=1e-8, fused=True)


SYSTEMS = {"ingot": ingot, "eager": eager, "compile": compiled, "trainer": trainer}
NEEDS: dict[str, Iterable[str]] = {"trainer": ("transformers", "accelerate")}


def main() -> None:
    """Do the task that is given, and tell."""
    # What libraries print goes to stderr; stdout is ours alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task, clock = json.loads(sys.argv[1]), Clock()
    version = SYSTEMS[task["system"]](task, clock)
    print(json.dumps(clock.report(version)), file=answers, flush=True)


if __name__ == "__main__":
    main()
