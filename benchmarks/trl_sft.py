"""Compares the tokens, the loss mask and the loss of conversations with those of TRL.

    pip install "trl>=1.16,<2" datasets
    python benchmarks/trl_sft.py MODEL ROWS.jsonl [NUMBER]

MODEL is a directory with SmolLM2's chat template, which lacks the `{% generation %}` that TRL needs
for `assistant_only_loss`; it is added here. Prints what both compute on the first NUMBER rows, and
exits with an error if they differ.
"""

# pyright: basic
from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset  # pyright: ignore[reportMissingImports]

from ingot.data import ChatDataset, encode_rows, read_rows
from ingot.data.chat_dataset import MaskedSequences
from ingot.interop import hf
from ingot.interop.tokenizer import Tokenizer
from ingot.nn.loss import token_losses
from ingot.workflows.chat_data import row_encoder

_MESSAGE = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
_MARKED = (
    "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
)


def main(directory: Path, source: Path, number: int) -> None:
    """Compare the first rows of a file."""
    rows = [json.loads(line) for line in source.read_text().splitlines()[:number]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        encoded = encode_rows(
            read_rows(file), row_encoder(Tokenizer.load(directory)), max_length=1 << 16
        )
        trainer = _trl(directory, rows, Path(folder))
    for index, theirs in enumerate(trainer.train_dataset):
        tokens, trained = (array.tolist() for array in encoded[index])
        labels = theirs["labels"]
        assert theirs["input_ids"][: len(tokens)] == tokens, f"row {index}: other tokens"
        assert [label != -100 for label in labels[: len(tokens)]] == trained, f"row {index}: mask"
        # TRL's samples go on with the newline after the last EOS token.
        assert all(label == -100 for label in labels[len(tokens) :]), f"row {index}: more trained"
    ours, theirs = _our_loss(directory, encoded), _their_loss(trainer)
    print(  # noqa: T201
        f"{len(rows)} rows: same tokens and masks; loss {theirs:.7f} (TRL {trl.__version__}), "
        f"{ours:.7f} (ingot), over {int(encoded.trained_N.sum())} tokens"
    )
    assert abs(ours - theirs) < 1e-3


def _trl(directory: Path, rows: list[dict], folder: Path) -> trl.SFTTrainer:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert _MESSAGE in tokenizer.chat_template, "not SmolLM2's chat template"
    tokenizer.chat_template = tokenizer.chat_template.replace(_MESSAGE, _MARKED)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = trl.SFTConfig(
        output_dir=str(folder),
        assistant_only_loss=True,
        max_length=None,
        per_device_train_batch_size=len(rows),
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    return trl.SFTTrainer(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


@torch.no_grad()
def _their_loss(trainer: trl.SFTTrainer) -> float:
    batch = next(iter(trainer.get_train_dataloader()))
    count = (batch["labels"] != -100).sum()
    return float(trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count))


def _our_loss(directory: Path, encoded: MaskedSequences) -> float:
    dataset = ChatDataset(encoded, 1 << 16)
    batch = dataset.batch(range(len(dataset)))
    model = hf.load(directory, dtype=torch.float32)
    with torch.inference_mode():
        losses = token_losses(
            model, batch.tokens, batch.targets, batch.lengths, target_rows=batch.target_rows
        )
    return float(losses.double().sum() / (batch.targets != -100).sum())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 16)
