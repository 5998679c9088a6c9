"""A recipe: everything that decides a run, as one TOML file.

    name = "digits"
    steps = 600
    batch = 128

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
from ingot.training.guard import Guard
from ingot.training.mix import Mix
from ingot.training.precision import Precision
from ingot.training.recompute import Recompute
from ingot.training.schedule import Schedule

ModelConfig = DecoderConfig | DenseConfig | CNNConfig | ResNetConfig | GRUConfig
_MODELS: dict[type, Any] = {
    DecoderConfig: Decoder,
    DenseConfig: Dense,
    CNNConfig: CNN,
    ResNetConfig: ResNet,
    GRUConfig: GRU,
}


@dataclass(frozen=True, kw_only=True)
class Xor:
    """The four cases of exclusive or, which are also what is held out."""

    kind: Literal["xor"] = "xor"


@dataclass(frozen=True, kw_only=True)
class Digits:
    """scikit-learn's 1797 digits of 8 x 8."""

    kind: Literal["digits"] = "digits"
    held_out: float = 0.2


@dataclass(frozen=True, kw_only=True)
class Mnist:
    """A folder with the IDX files of MNIST or one of its likes."""

    kind: Literal["mnist"] = "mnist"
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Text:
    """Text of any source that `ingot tokenize` knows, as packed tokens."""

    kind: Literal["text"] = "text"
    source: str
    """A file, a folder, or "stdlib": Python's own library."""
    field: str = "text"
    vocab: int | None = None
    """Tokens of a vocabulary that is trained on the text: 4096 if nothing is said. Or else:"""
    tokenizer: Path | None = None
    """A model directory whose vocabulary is taken."""
    length: int = 512
    """Tokens of a sample."""
    validation: float = 0.01
    corpus: Path | None = None
    """Where the tokens are kept; in the cache if left out."""

    @property
    def directory(self) -> Path:
        """Where the tokens are kept."""
        if self.corpus is not None:
            return self.corpus
        made = repr((self.source, self.field, self.vocab, self.tokenizer, self.validation))
        return paths.cache("corpora", hashlib.sha256(made.encode()).hexdigest()[:16])


DataConfig = Xor | Digits | Mnist | Text


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run.

    >>> Recipe(
    ...     name="xor", steps=100, batch=4, data=Xor(),
    ...     model=DenseConfig(in_features=2, hidden_dims=(8,), out_features=2),
    ... ).precision
    <Precision.FP32: 'fp32'>
    """

    name: str
    steps: int
    batch: int
    """Samples of a step."""
    data: DataConfig
    model: ModelConfig | None = None
    """A model to make; or else:"""
    start: Path | None = None
    """A model directory whose decoder is trained on."""
    seed: int = 0
    accumulate: int = 1
    """Pieces that a batch is computed in, one after another: less memory, the same result."""
    precision: Precision = Precision.FP32
    optimizer: optimizer.Config = field(default_factory=optimizer.AdamW)
    schedule: Schedule = field(default_factory=Schedule)
    clip: clip.Config = field(default_factory=clip.Norm)
    guard: Guard = field(default_factory=Guard)
    dropout: float = 0.0
    """Of a decoder's branches; other models have a dropout of their own."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    mix: Mix | None = None
    """Of images with others of their batch."""
    ema: float = 0.0
    """The decay of a running mean of the weights, which is then what is evaluated; 0 is none."""
    recompute: Recompute = "none"
    evaluate_every: int = 0
    """Steps from one evaluation to the next; 0 is only at the end."""
    evaluate_batches: int = 64
    """The most batches of what is held out that an evaluation takes."""
    checkpoint_every: int = 100
    keep: int = 3
    """Checkpoints that are kept besides the best."""

    def __post_init__(self) -> None:
        check_bounds(self, steps=(1, 10**9), batch=(1, 2**24), seed=(0, 2**63 - 1), keep=(1, 10**4))
        check_bounds(self, accumulate=(1, 2**20), checkpoint_every=(1, 10**9), ema=(0.0, 0.999999))
        check_bounds(self, evaluate_every=(0, 10**9), evaluate_batches=(1, 10**9))
        check_bounds(self, dropout=(0.0, 0.99), label_smoothing=(0.0, 0.99), z_loss=(0.0, 1.0))
        if self.batch % self.accumulate:
            raise ConfigError(
                f"a batch of {self.batch} in {self.accumulate} pieces",
                hint="give a batch that is a multiple of accumulate",
            )
        if (self.model is None) is (self.start is None):
            raise ConfigError(
                "a recipe has a model to make, or one to start from",
                hint="give either a [model] or start = a model directory",
            )
        if self.model is not None:
            self.check(self.model)

    def check(self, model: ModelConfig) -> None:
        """Require a model that fits the data and the rest."""
        text = isinstance(self.data, Text)
        if text is not isinstance(model, DecoderConfig | GRUConfig):
            raise ConfigError(
                f"a {type(model).__name__} for data of the kind '{self.data.kind}'",
                hint="text is for decoders and GRUs, the rest for dense, cnn and resnet",
            )
        if isinstance(self.data, Text) and self.data.length > model.max_seq_len:  # pyright: ignore
            raise ConfigError(
                f"samples of {self.data.length} tokens for a max_seq_len of {model.max_seq_len}",  # pyright: ignore
                hint="give a shorter data.length, or a longer model.max_seq_len",
            )
        if self.dropout and not isinstance(model, DecoderConfig):
            raise ConfigError(
                "dropout beside a model that is no decoder", hint="give model.dropout instead"
            )
        if text and self.mix:
            raise ConfigError("text cannot be mixed", hint="leave mix out")

    def same_future(self, other: Recipe) -> Recipe:
        """This recipe with what may change when a run goes on taken from another."""
        free = ("steps", "accumulate", "keep", "checkpoint_every", "evaluate_every", "recompute")
        return replace(self, **{name: getattr(other, name) for name in free})


def new_model(recipe: Recipe) -> nn.Module:
    """The model of a recipe, with fresh weights.

    >>> from ingot.nn import preset
    >>> type(new_model(Recipe(name="tiny", steps=1, batch=1, model=preset("tiny"),
    ...                       data=Text(source="stdlib")))).__name__
    'Decoder'
    """
    assert recipe.model is not None
    return _MODELS[type(recipe.model)].from_config(recipe.model, seed=recipe.seed)


@dataclass(frozen=True)
class Sets:
    """What is trained on and what is held out."""

    train: Any
    held_out: Any
    fingerprint: str
    """What the data is: a run does not go on with other data."""
    corpus: data.Corpus | None = None


def open_data(config: DataConfig) -> Sets:
    """The data of a recipe; text is tokenized if that was not done before.

    >>> len(open_data(Xor()).train)
    4
    """
    match config:
        case Xor():
            return Sets(data.xor(), data.xor(), "xor")
        case Digits(held_out=share):
            train, held_out = data.digits().split(share)
            return Sets(train, held_out, f"digits {share}")
        case Mnist(folder=folder):
            train, held_out = data.mnist(folder, "train"), data.mnist(folder, "t10k")
            return Sets(train, held_out, f"mnist {len(train)} {len(held_out)}")
        case Text() as text:
            return _text(text)


def _text(text: Text) -> Sets:
    source = data.Source(text.source, text.field)
    text.directory.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"vocab": text.vocab, "tokenizer": text.tokenizer}
    corpus = data.prepare(source, text.directory, validation=text.validation, **options)
    train, held_out = (data.Packed(p, text.length) for p in (corpus.train, corpus.validation))
    return Sets(train, held_out, corpus.hash, corpus)
