"""A custom decoder: plain PyTorch around `ingot.nn.Attention`.

Its twist: attention and MLP of a block read the same input, in parallel, and each channel of their
sum is scaled by a learned gain before it is added to the residual stream; every second layer has a
sliding window of 16 tokens. The model is trained for a few steps and then decoded from a paged KV
cache. The logits of every token are bitwise equal to those of one forward over the whole text.

All it takes is batch-invariant layers: `ingot.nn.Linear` instead of `torch.nn.Linear`. Elementwise
operations are batch-invariant anyway.
"""

import torch
from torch import nn

from ingot import ops
from ingot.nn import Attention, BatchLayout, Embedding, KVCache, KVSpec, Linear, RMSNorm, Rope


class TwistBlock(nn.Module):
    def __init__(self, dim, layer):
        super().__init__()
        window = 16 if layer % 2 else None
        self.norm = RMSNorm(dim)
        self.attention = Attention(
            dim, heads=4, kv_heads=2, rope=Rope(), sliding_window=window, layer=layer
        )
        self.up, self.down = Linear(dim, 4 * dim), Linear(4 * dim, dim)
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x, layout):
        h = self.norm(x)
        update = self.attention(h, layout) + self.down(ops.relu_squared(self.up(h)))
        return x + self.gain * update


class Twist(nn.Module):
    def __init__(self, vocab_size=256, dim=64, layers=4):
        super().__init__()
        self.tok_embed = Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(TwistBlock(dim, layer) for layer in range(layers))
        self.norm = RMSNorm(dim)

    def forward(self, tokens, layout):
        x = self.tok_embed(tokens)
        for block in self.blocks:
            x = block(x, layout)
        return self.norm(x)

    def logits(self, hidden):
        return ops.linear(hidden, self.tok_embed.weight)


torch.manual_seed(0)
text = torch.tensor(list(b"One model, from training to serving, through the same kernels. " * 2))
model = Twist()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
layout = BatchLayout.packed([len(text) - 1])
for _ in range(30):
    optimizer.zero_grad()
    hidden = model(text[:-1], layout)
    loss = ops.linear_cross_entropy(hidden, model.tok_embed.weight, text[1:]).mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss:.3f}")

with torch.inference_mode():
    expected = model.logits(model(text, BatchLayout.packed([len(text)])))
    kv_cache = KVCache(KVSpec.of(model), num_blocks=40, block_size=4)  # pyright: ignore
    block_table = torch.randperm(40)[None]
    logits = []
    for position in range(len(text)):  # one token per step, keys and values in blocks anywhere
        layout = BatchLayout.paged(kv_cache, [1], [position + 1], block_table)
        logits.append(model.logits(model(text[position : position + 1], layout)))
assert torch.equal(torch.cat(logits), expected)
print(f"{len(text)} tokens decoded one by one: the same bits")
