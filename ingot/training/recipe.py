"""A recipe: everything that decides a training run, as one TOML file.

    name = "digits"
    steps = 600
    global_batch_size = 128

    [model]
    kind = "cnn"
    widths = [32, 64]
    num_classes = 10

    [data]
    kind = "digits"

Keys that are left out have defaults, and the resolved recipe is saved with the run. Any value can
be overridden on the command line: `ingot train recipes/digits.toml steps=100 optimizer.lr=3e-3`.

To add a model, add its config and class to `MODELS`. To add data, write a config with a `load`
method and add it to `DataConfig`.
"""

# pyright: basic
from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    LoraConfig,
    ResNet,
    ResNetConfig,
)
from ingot.nn.qat import QatConfig
from ingot.nn.recompute import RecomputePolicy
from ingot.parallel.config import ParallelConfig
from ingot.parallel.context import check_context
from ingot.parallel.expert import check_experts
from ingot.parallel.mesh import mesh_shape
from ingot.parallel.stage import STAGES_PER_RANK, check_stages
from ingot.parallel.tensor import check_divisible
from ingot.training import clip, optimizer
from ingot.training.forecast import ForecastConfig
from ingot.training.gradients import default_shards
from ingot.training.guard import SpikeGuardConfig
from ingot.training.mixup import MixupConfig
from ingot.training.objective import (
    CrossEntropy,
    CrossEntropyConfig,
    DPOConfig,
    Objective,
    ObjectiveConfig,
    SFTConfig,
)
from ingot.training.precision import Precision
from ingot.training.preference import DPO
from ingot.training.schedule import LRSchedule

MODELS: dict[type, Any] = {
    DecoderConfig: Decoder,
    DenseConfig: Dense,
    CNNConfig: CNN,
    ResNetConfig: ResNet,
    GRUConfig: GRU,
}
"""The models that a recipe can build, by the type of their config."""

if TYPE_CHECKING:
    ModelConfig = Any
else:
    ModelConfig = reduce(or_, MODELS)


@dataclass(frozen=True)
class Datasets:
    """The training and validation data of a run."""

    train: Any
    validation: Any
    fingerprint: str
    """Identity of the data; a run cannot be resumed with other data."""
    tokenizer_dir: Path | None = None
    """Directory of the tokenizer, for text: it is exported with the model."""
    vocab_size: int | None = None
    """Number of tokens of the tokenizer."""


@dataclass(frozen=True, kw_only=True)
class XorData:
    """The four cases of exclusive or, for training and validation."""

    kind: Literal["xor"] = "xor"

    def load(self) -> Datasets:
        """Return the datasets."""
        return Datasets(data.xor(), data.xor(), "xor")


@dataclass(frozen=True, kw_only=True)
class DigitsData:
    """The 1797 handwritten 8 x 8 digits of scikit-learn."""

    kind: Literal["digits"] = "digits"
    validation_fraction: float = 0.2
    """Fraction of the samples used for validation."""

    def load(self) -> Datasets:
        """Split the digits."""
        train, validation = data.digits().split(self.validation_fraction)
        return Datasets(train, validation, f"digits {self.validation_fraction}")


@dataclass(frozen=True, kw_only=True)
class MnistData:
    """The IDX files of MNIST or of a dataset in the same format."""

    kind: Literal["mnist"] = "mnist"
    directory: Path
    """The directory that holds the four files."""

    def load(self) -> Datasets:
        """Read the files; the test images are used for validation."""
        train, test = data.mnist(self.directory, "train"), data.mnist(self.directory, "t10k")
        return Datasets(train, test, f"mnist {len(train)} {len(test)}")


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text from any source that `ingot tokenize` reads, as packed tokens."""

    kind: Literal["text"] = "text"
    source: str
    """A file, a directory, or "stdlib": Python's standard library."""
    field: str = "text"
    """Name of the text field in JSON objects and tables."""
    vocab_size: int | None = None
    """Train a tokenizer with this many tokens on the text; 4096 unless `tokenizer` is given."""
    tokenizer: Path | None = None
    """Use the tokenizer of this model directory."""
    seq_len: int = 512
    """Tokens of a sample."""
    validation_fraction: float = 0.01
    """Fraction of the documents used for validation."""
    cache_dir: Path | None = None
    """Directory of the tokens; by default a directory in ingot's cache."""

    @property
    def dataset_dir(self) -> Path:
        """Directory of the tokens."""
        if self.cache_dir is not None:
            return self.cache_dir
        key = (self.source, self.field, self.vocab_size, self.tokenizer, self.validation_fraction)
        return paths.cache("corpora", hashlib.sha256(repr(key).encode()).hexdigest()[:16])

    def load(self) -> Datasets:
        """Open the tokens; the text is tokenized first if that was not done before."""
        self.dataset_dir.parent.mkdir(parents=True, exist_ok=True)
        tokens = data.tokenize(
            data.Source(self.source, self.field),
            self.dataset_dir,
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            validation_fraction=self.validation_fraction,
        )
        splits = (tokens.train, tokens.validation)
        train, validation = (data.PackedDataset(split, self.seq_len) for split in splits)
        return Datasets(train, validation, tokens.hash, tokens.directory, tokens.vocab_size)


@dataclass(frozen=True, kw_only=True)
class _RowData:
    """Rows of text and messages, encoded with a tokenizer and its chat template."""

    source: str
    """A .jsonl, .parquet or .arrow file, or a directory of such files."""
    validation_source: str | None = None
    """Rows for validation; by default `validation_fraction` of the rows of `source`."""
    validation_fraction: float = 0.05
    """Fraction of the rows used for validation, chosen by the hash of their content."""
    tokenizer: Path | None = None
    """Model directory with the tokenizer and the chat template; by default `init_from`."""
    seq_len: int = 1024
    """Most tokens of a sequence; a sample of chat data holds one or several conversations."""
    excess_length_strategy: Literal["raise", "drop"] = "raise"
    """What happens with a row longer than `seq_len`; none is cut."""
    chat_template_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""

    def __post_init__(self) -> None:
        check_bounds(self, seq_len=(1, data.MAX_LENGTH), validation_fraction=(0.0, 0.5))

    @property
    def _drop_long(self) -> bool:
        return self.excess_length_strategy == "drop"

    def _fingerprint(self, *splits: Any) -> str:
        hashes = " ".join(split.sequences.hash() for split in splits)
        return hashlib.sha256(f"{hashes} {self.seq_len}".encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ChatData(_RowData):
    """Conversations and completions, of which the assistant's tokens are trained."""

    kind: Literal["chat"] = "chat"

    def load(self, encode: data.EncodeRow, tokenizer_dir: Path, vocab_size: int) -> Datasets:
        """Encode the rows and pack them; `encode` knows the tokenizer of `tokenizer_dir`."""
        splits = data.split_rows(self.source, self.validation_source, self.validation_fraction)
        options = {"max_length": self.seq_len, "drop_long": self._drop_long}
        train, validation = (
            data.ChatDataset(data.encode_rows(rows, encode, **options), self.seq_len)
            for rows in splits
        )
        fingerprint = self._fingerprint(train, validation)
        return Datasets(train, validation, fingerprint, tokenizer_dir, vocab_size)


@dataclass(frozen=True, kw_only=True)
class PreferenceData(_RowData):
    """Preference pairs: rows with `prompt`, `chosen` and `rejected`. A sample is a pair."""

    kind: Literal["preference"] = "preference"

    def load(self, encode: data.EncodeRow, tokenizer_dir: Path, vocab_size: int) -> Datasets:
        """Encode the pairs; `encode` knows the tokenizer of `tokenizer_dir`."""
        where = (self.source, self.validation_source, self.validation_fraction)
        splits = data.split_rows(*where, data.read_pairs)
        options = {"max_length": self.seq_len, "drop_long": self._drop_long}
        train, validation = (
            data.PairDataset(data.encode_pairs(rows, encode, **options)) for rows in splits
        )
        fingerprint = self._fingerprint(train, validation)
        return Datasets(train, validation, fingerprint, tokenizer_dir, vocab_size)


RowData = ChatData | PreferenceData
DataConfig = XorData | DigitsData | MnistData | TextData | RowData


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a training run.

    >>> Recipe(
    ...     name="xor", steps=100, global_batch_size=4, data=XorData(),
    ...     model=DenseConfig(in_features=2, hidden_dims=(8,), out_features=2),
    ... ).precision
    <Precision.FP32: 'fp32'>
    """

    name: str
    """Name of the run; part of its directory's name."""
    steps: int
    """Number of optimizer steps."""
    global_batch_size: int
    """Samples of a step, over all micro-batches."""
    data: DataConfig
    """Training and validation data."""
    model: ModelConfig | None = None
    """The model to initialize randomly. Give either this or `init_from`."""
    init_from: Path | None = None
    """A model directory whose decoder is trained further."""
    adapter: LoraConfig | None = None
    """Train a LoRA adapter instead of the weights of `init_from`, which are frozen."""
    qat: QatConfig | None = None
    """Quantization-aware training: a decoder computes with quantized weights, and is exported with
    them."""
    objective: ObjectiveConfig | None = None
    """What is minimized; by default "sft" for chat data, "dpo" for preference data and
    "cross_entropy" for other data."""
    device: str = "auto"
    """Device to train on: "auto", "cpu", "cuda", "cuda:1", "xpu" or another torch device."""
    seed: int = 0
    """Seed of the initial weights, the data order, dropout and mixup."""
    grad_accum_steps: int = 1
    """Micro-batches of a step, computed one after another: less memory for activations."""
    precision: Precision = Precision.FP32
    """Dtype of weights, activations and gradients; the optimizer's weights are in float32."""
    optimizer: optimizer.OptimizerConfig = field(default_factory=optimizer.AdamWConfig)
    """Optimizer and its options."""
    schedule: LRSchedule = field(default_factory=LRSchedule)
    """Learning rate over the run."""
    clip: clip.ClipConfig = field(default_factory=clip.ClipNormConfig)
    """Gradient clipping."""
    guard: SpikeGuardConfig = field(default_factory=SpikeGuardConfig)
    """Handling of non-finite losses and loss spikes."""
    forecast: ForecastConfig = field(default_factory=ForecastConfig)
    """Forecasts of the run while it trains."""
    dropout: float = 0.0
    """Dropout of a decoder's residual branches; other models have `model.dropout`."""
    label_smoothing: float = 0.0
    """Probability mass that is spread evenly over all classes."""
    z_loss: float = 0.0
    """Weight of the squared log-partition function, for language models."""
    mixup: MixupConfig | None = None
    """Mixing of the images of a batch."""
    ema_decay: float = 0.0
    """Decay of an EMA of the weights, which is then evaluated and exported; 0 for none."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the run is divided among ranks, if there are several."""
    recompute: RecomputePolicy = "none"
    """Activation recomputation of decoders: "none", "selective" or "full"."""
    eval_every: int = 0
    """Steps between two evaluations; 0 to evaluate only at the end."""
    eval_batches: int = 64
    """Maximum number of validation batches of an evaluation."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""
    keep_checkpoints: int = 3
    """Number of latest checkpoints to keep, in addition to the best."""

    def __post_init__(self) -> None:
        check_bounds(self, steps=(1, 10**9), global_batch_size=(1, 2**24), seed=(0, 2**63 - 1))
        check_bounds(self, grad_accum_steps=(1, 2**20), ema_decay=(0.0, 0.999999))
        check_bounds(self, checkpoint_every=(1, 10**9), keep_checkpoints=(1, 10**4))
        check_bounds(self, eval_every=(0, 10**9), eval_batches=(1, 10**9))
        check_bounds(self, dropout=(0.0, 0.99), label_smoothing=(0.0, 0.99), z_loss=(0.0, 1.0))
        if self.global_batch_size % self.grad_accum_steps:
            raise ConfigError(
                "global_batch_size: must be a multiple of grad_accum_steps, "
                f"got {self.global_batch_size} and {self.grad_accum_steps}",
                hint="change one of the two",
            )
        if self.grad_accum_steps % self.batch_shards:
            raise ConfigError(
                f"parallel.batch_shards: must divide grad_accum_steps, {self.grad_accum_steps}, "
                f"got {self.batch_shards}",
                hint="change one of the two",
            )
        self._set_objective()
        if isinstance(self.data, RowData) and not (self.data.tokenizer or self.init_from):
            raise ConfigError(
                f"data.tokenizer: {self.data.kind} data needs a tokenizer with a chat template",
                hint="set init_from to a chat model, or data.tokenizer to its directory",
            )
        if (self.model is None) is (self.init_from is None):
            raise ConfigError(
                "a recipe needs exactly one of model and init_from",
                hint="give either a [model] table or init_from = a model directory",
            )
        if self.adapter and self.init_from is None:
            raise ConfigError(
                "adapter: must be added to a trained model",
                hint="give init_from = a model directory instead of a [model] table",
            )
        if self.adapter and self.qat:
            raise ConfigError(
                "qat: trains the weights that an adapter freezes", hint="remove [qat] or [adapter]"
            )
        if self.model is not None:
            self.check_model(self.model)

    @property
    def batch_shards(self) -> int:
        """Parts of the global batch whose gradients are summed pairwise."""
        return self.parallel.batch_shards or default_shards(self.grad_accum_steps)

    def check_ranks(self, size: int) -> None:
        """Raise a `ConfigError` unless the run can be divided among this number of ranks."""
        if size == 1 and self.parallel.local_steps == 1:
            return
        if size < 1:
            raise ConfigError(f"ranks: must be at least 1, got {size}", hint="give --ranks 2")
        pp, dp, fsdp, _, _ = mesh_shape(self.parallel, size)
        data = dp * fsdp
        if self.batch_shards % data:
            raise ConfigError(
                f"{data} ranks: must divide the shards of the global batch, {self.batch_shards}",
                hint=f"set grad_accum_steps to a multiple of {data}, and for more than 8 ranks "
                "parallel.batch_shards: then the run has the same bits on fewer ranks, too",
            )
        if pp > 1:
            self._check_pipeline(pp, self.grad_accum_steps // data)
        if not self.optimizer.elementwise:
            raise ConfigError(
                f"optimizer.kind: '{self.optimizer.kind}' needs whole matrices, which are sharded "
                "on several ranks",
                hint="use adamw, lion or sgd, or one rank",
            )
        if self.parallel.cp > 1:
            self._check_context()
        if self.parallel.ep > 1 and self.model is not None:
            check_experts(self.model, self.parallel.ep)
        if self.parallel.tp > 1:
            self._check_tensor_parallel()
        single = {"adapter": self.adapter, "qat": self.qat, "mixup": self.mixup}
        single["objective.kind=dpo"] = isinstance(self.objective, DPOConfig)
        single["precision=fp16"] = self.precision is Precision.FP16
        for name, used in single.items():
            if used:
                raise ConfigError(f"{name}: runs on one rank only", hint="remove --ranks")

    def _check_context(self) -> None:
        size = self.parallel.cp
        if self.precision is not Precision.BF16:
            raise ConfigError(
                "parallel.cp: needs precision=bf16: in float32, the bits of gradients depend on "
                "the number of tokens",
                hint="set precision=bf16",
            )
        if not isinstance(self.data, TextData) or self.data.seq_len % size:
            raise ConfigError(
                f"parallel.cp: needs text in sequences whose length is a multiple of {size}",
                hint="change data.seq_len, or remove parallel.cp",
            )
        if self.model is not None:
            check_context(self.model, size)

    def _check_tensor_parallel(self) -> None:
        if self.precision is not Precision.BF16 and self.parallel.tp_bitwise:
            raise ConfigError(
                "parallel.tp: needs precision=bf16; the bits of float32 gradients depend on the "
                "shapes of the layers",
                hint="set precision=bf16, or parallel.tp_bitwise=false",
            )
        if self.model is not None:
            check_divisible(self.model, self.parallel.tp)

    def _check_pipeline(self, pp: int, micro_batches: int) -> None:
        """Raise a `ConfigError` unless the micro-batches of a rank, and the model, fit."""
        if self.model is not None:
            check_stages(self.model, pp, self.parallel.schedule)
        interleaved = STAGES_PER_RANK[self.parallel.schedule] > 1
        if micro_batches < pp or (interleaved and micro_batches % pp):
            wanted = "a multiple of" if interleaved else "at least"
            raise ConfigError(
                f"parallel.pp: the schedule '{self.parallel.schedule}' needs {wanted} {pp} "
                f"micro-batches for each of the ranks that divide the batch, got {micro_batches}",
                hint="raise grad_accum_steps, or lower parallel.pp",
            )

    def _set_objective(self) -> None:
        """Fill in the default objective, so that it is saved with the run."""
        by_data = {"chat": SFTConfig, "preference": DPOConfig}
        needed = by_data.get(self.data.kind, CrossEntropyConfig)
        if self.objective is None:
            object.__setattr__(self, "objective", needed())
        elif type(self.objective) is not needed:
            raise ConfigError(
                f"objective: '{self.objective.kind}' cannot be trained on '{self.data.kind}' data",
                hint=f'remove it, or set objective.kind="{needed.kind}"',
            )

    def check_model(self, model: ModelConfig) -> None:
        """Raise a `ConfigError` unless the model fits the data and the options."""
        is_text = isinstance(self.data, TextData | RowData)
        is_language_model = hasattr(model, "vocab_size")
        if is_text is not is_language_model:
            raise ConfigError(
                f"model: {type(model).__name__} cannot be trained on '{self.data.kind}' data",
                hint="use a decoder or a GRU for text, a dense model, CNN or ResNet otherwise",
            )
        # The engine that scores pairs samples a token after each sequence.
        max_len = getattr(model, "max_seq_len", 0) - isinstance(self.data, PreferenceData)
        if isinstance(self.data, TextData | RowData) and self.data.seq_len > max_len:
            raise ConfigError(
                f"data.seq_len: must be at most {max_len} for the model's max_seq_len of "
                f"{model.max_seq_len}, got {self.data.seq_len}",
                hint="lower data.seq_len or raise model.max_seq_len",
            )
        if self.dropout and not hasattr(MODELS[type(model)], "set_dropout"):
            raise ConfigError("dropout: only applies to decoders", hint="set model.dropout instead")
        if self.recompute != "none" and not hasattr(MODELS[type(model)], "set_recompute"):
            raise ConfigError("recompute: only applies to decoders", hint="remove recompute")
        if self.qat and not isinstance(model, DecoderConfig):
            raise ConfigError("qat: only applies to decoders", hint="remove [qat]")
        if is_text and self.mixup:
            raise ConfigError("mixup: does not apply to text", hint="remove mixup")

    def with_resumable_fields(self, other: Recipe) -> Recipe:
        """Return this recipe with the fields that may change on resume taken from another."""
        free = ("steps", "grad_accum_steps", "keep_checkpoints", "checkpoint_every", "eval_every")
        free = (*free, "recompute", "device", "forecast")
        parallel = self.parallel.with_resumable_fields(other.parallel)
        return replace(self, parallel=parallel, **{name: getattr(other, name) for name in free})


def build_model(recipe: Recipe) -> nn.Module:
    """Build the model of a recipe with random weights, on the CPU.

    The weights are the same whatever device the run uses.

    >>> from ingot.nn import preset
    >>> type(build_model(Recipe(name="tiny", steps=1, global_batch_size=1, model=preset("tiny"),
    ...                         data=TextData(source="stdlib")))).__name__
    'Decoder'
    """
    assert recipe.model is not None
    return MODELS[type(recipe.model)].from_config(recipe.model, seed=recipe.seed)


def build_objective(recipe: Recipe) -> Objective:
    """Build the objective of a recipe.

    >>> model = DenseConfig(in_features=2, hidden_dims=(8,), out_features=2)
    >>> build_objective(Recipe(name="xor", steps=1, global_batch_size=4, data=XorData(),
    ...                        model=model, label_smoothing=0.1)).label_smoothing
    0.1
    """
    if isinstance(recipe.objective, DPOConfig):
        return DPO(config=recipe.objective)
    return CrossEntropy(
        label_smoothing=recipe.label_smoothing,
        z_loss=recipe.z_loss,
        mixup=recipe.mixup,
        seed=recipe.seed,
    )


def load_datasets(config: DataConfig) -> Datasets:
    """Load the data of a recipe; text is tokenized if that was not done before.

    Rows need a chat template: `ingot.workflows.chat_data` loads it.

    >>> len(load_datasets(XorData()).train)
    4
    """
    assert not isinstance(config, RowData)
    return config.load()
