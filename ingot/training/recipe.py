"""A recipe: everything that decides a run, as one TOML file.

    name = "digits"
    steps = 600
    global_batch_size = 128

    [model]
    kind = "cnn"
    widths = [32, 64]
    num_classes = 10

    [data]
    kind = "digits"

What is left out has a default, and the resolved recipe is saved with the run. Any value can be
given on the command line instead: `ingot train recipes/digits.toml steps=100 optimizer.lr=3e-3`.
"""

# pyright: basic
from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ingot import data
from ingot.core import paths
from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError
from ingot.nn import (
    CNN,
    GRU,
    CNNConfig,
    Decoder,
    DecoderConfig,
    Dense,
    DenseConfig,
    GRUConfig,
    ResNet,
    ResNetConfig,
)
from ingot.training import clip, optimizer
from ingot.training.guard import SpikeGuardConfig
from ingot.training.mixup import MixupConfig
from ingot.training.precision import Precision
from ingot.training.recompute import RecomputePolicy
from ingot.training.schedule import LRSchedule

ModelConfig = DecoderConfig | DenseConfig | CNNConfig | ResNetConfig | GRUConfig
_MODELS: dict[type, Any] = {
    DecoderConfig: Decoder,
    DenseConfig: Dense,
    CNNConfig: CNN,
    ResNetConfig: ResNet,
    GRUConfig: GRU,
}


@dataclass(frozen=True, kw_only=True)
class XorData:
    """The four cases of exclusive or, which are also what is held out."""

    kind: Literal["xor"] = "xor"


@dataclass(frozen=True, kw_only=True)
class DigitsData:
    """scikit-learn's 1797 digits of 8 x 8."""

    kind: Literal["digits"] = "digits"
    validation_fraction: float = 0.2


@dataclass(frozen=True, kw_only=True)
class MnistData:
    """A folder with the IDX files of MNIST or one of its likes."""

    kind: Literal["mnist"] = "mnist"
    directory: Path


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text of any source that `ingot tokenize` knows, as packed tokens."""

    kind: Literal["text"] = "text"
    source: str
    """A file, a folder, or "stdlib": Python's own library."""
    field: str = "text"
    vocab_size: int | None = None
    """Tokens of a vocabulary that is trained on the text: 4096 if nothing is said. Or else:"""
    tokenizer: Path | None = None
    """A model directory whose vocabulary is taken."""
    seq_len: int = 512
    """Tokens of a sample."""
    validation_fraction: float = 0.01
    cache_dir: Path | None = None
    """Where the tokens are kept; in the cache if left out."""

    @property
    def dataset_dir(self) -> Path:
        """Where the tokens are kept."""
        if self.cache_dir is not None:
            return self.cache_dir
        made = repr(
            (self.source, self.field, self.vocab_size, self.tokenizer, self.validation_fraction)
        )
        return paths.cache("corpora", hashlib.sha256(made.encode()).hexdigest()[:16])


DataConfig = XorData | DigitsData | MnistData | TextData


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run.

    >>> Recipe(
    ...     name="xor", steps=100, global_batch_size=4, data=XorData(),
    ...     model=DenseConfig(in_features=2, hidden_dims=(8,), out_features=2),
    ... ).precision
    <Precision.FP32: 'fp32'>
    """

    name: str
    steps: int
    global_batch_size: int
    """Samples of a step."""
    data: DataConfig
    model: ModelConfig | None = None
    """A model to make; or else:"""
    init_from: Path | None = None
    """A model directory whose decoder is trained on."""
    seed: int = 0
    grad_accum_steps: int = 1
    """Pieces that a batch is computed in, one after another: less memory, the same result."""
    precision: Precision = Precision.FP32
    optimizer: optimizer.OptimizerConfig = field(default_factory=optimizer.AdamWConfig)
    schedule: LRSchedule = field(default_factory=LRSchedule)
    clip: clip.ClipConfig = field(default_factory=clip.ClipNormConfig)
    guard: SpikeGuardConfig = field(default_factory=SpikeGuardConfig)
    dropout: float = 0.0
    """Of a decoder's branches; other models have a dropout of their own."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    mixup: MixupConfig | None = None
    """Of images with others of their batch."""
    ema_decay: float = 0.0
    """The decay of a running mean of the weights, which is then what is evaluated; 0 is none."""
    recompute: RecomputePolicy = "none"
    eval_every: int = 0
    """Steps from one evaluation to the next; 0 is only at the end."""
    eval_batches: int = 64
    """The most batches of what is held out that an evaluation takes."""
    checkpoint_every: int = 100
    keep_checkpoints: int = 3
    """Checkpoints that are kept besides the best."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            steps=(1, 10**9),
            global_batch_size=(1, 2**24),
            seed=(0, 2**63 - 1),
            keep_checkpoints=(1, 10**4),
        )
        check_bounds(
            self,
            grad_accum_steps=(1, 2**20),
            checkpoint_every=(1, 10**9),
            ema_decay=(0.0, 0.999999),
        )
        check_bounds(self, eval_every=(0, 10**9), eval_batches=(1, 10**9))
        check_bounds(self, dropout=(0.0, 0.99), label_smoothing=(0.0, 0.99), z_loss=(0.0, 1.0))
        if self.global_batch_size % self.grad_accum_steps:
            raise ConfigError(
                f"a batch of {self.global_batch_size} in {self.grad_accum_steps} pieces",
                hint="give a batch that is a multiple of grad_accum_steps",
            )
        if (self.model is None) is (self.init_from is None):
            raise ConfigError(
                "a recipe has a model to make, or one to start from",
                hint="give either a [model] or init_from = a model directory",
            )
        if self.model is not None:
            self.check(self.model)

    def check(self, model: ModelConfig) -> None:
        """Require a model that fits the data and the rest."""
        text = isinstance(self.data, TextData)
        if text is not isinstance(model, DecoderConfig | GRUConfig):
            raise ConfigError(
                f"a {type(model).__name__} for data of the kind '{self.data.kind}'",
                hint="text is for decoders and GRUs, the rest for dense, cnn and resnet",
            )
        if isinstance(self.data, TextData) and self.data.seq_len > model.max_seq_len:  # pyright: ignore
            raise ConfigError(
                f"samples of {self.data.seq_len} tokens for a max_seq_len of {model.max_seq_len}",  # pyright: ignore
                hint="give a shorter data.seq_len, or a longer model.max_seq_len",
            )
        if self.dropout and not isinstance(model, DecoderConfig):
            raise ConfigError(
                "dropout beside a model that is no decoder", hint="give model.dropout instead"
            )
        if text and self.mixup:
            raise ConfigError("text cannot be mixed", hint="leave mixup out")

    def with_resumable_fields(self, other: Recipe) -> Recipe:
        """This recipe with what may change when a run goes on taken from another."""
        free = (
            "steps",
            "grad_accum_steps",
            "keep_checkpoints",
            "checkpoint_every",
            "eval_every",
            "recompute",
        )
        return replace(self, **{name: getattr(other, name) for name in free})


def build_model(recipe: Recipe) -> nn.Module:
    """The model of a recipe, with fresh weights.

    >>> from ingot.nn import preset
    >>> type(build_model(Recipe(name="tiny", steps=1, global_batch_size=1, model=preset("tiny"),
    ...                       data=TextData(source="stdlib")))).__name__
    'Decoder'
    """
    assert recipe.model is not None
    return _MODELS[type(recipe.model)].from_config(recipe.model, seed=recipe.seed)


@dataclass(frozen=True)
class Datasets:
    """What is trained on and what is held out."""

    train: Any
    validation: Any
    fingerprint: str
    """What the data is: a run does not go on with other data."""
    tokens: data.TokenDataset | None = None


def load_datasets(config: DataConfig) -> Datasets:
    """The data of a recipe; text is tokenized if that was not done before.

    >>> len(load_datasets(XorData()).train)
    4
    """
    match config:
        case XorData():
            return Datasets(data.xor(), data.xor(), "xor")
        case DigitsData(validation_fraction=share):
            train, held_out = data.digits().split(share)
            return Datasets(train, held_out, f"digits {share}")
        case MnistData(directory=directory):
            train, held_out = data.mnist(directory, "train"), data.mnist(directory, "t10k")
            return Datasets(train, held_out, f"mnist {len(train)} {len(held_out)}")
        case TextData() as text:
            return _text(text)


def _text(text: TextData) -> Datasets:
    source = data.Source(text.source, text.field)
    text.dataset_dir.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"vocab_size": text.vocab_size, "tokenizer": text.tokenizer}
    corpus = data.tokenize(
        source, text.dataset_dir, validation_fraction=text.validation_fraction, **options
    )
    train, held_out = (
        data.PackedDataset(p, text.seq_len) for p in (corpus.train, corpus.validation)
    )
    return Datasets(train, held_out, corpus.hash, corpus)
