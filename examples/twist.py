"""A decoder of your own: plain PyTorch around `ingot.nn.Attention`.

Its twist: attention and MLP of a block read the same input, side by side, and each channel of
what they find is weighted by a learned gain before it is added; every second layer looks back 16
tokens only. It is trained for a few steps and then decoded from a paged pool, and the logits of
every token are, bit for bit, those of one forward over the whole text.

All it takes is layers that are exact: `ingot.nn.Linear` where you would write `torch.nn.Linear`.
What is elementwise is exact as it is.
"""

import torch
from torch import nn

from ingot import ops
from ingot.nn import Attention, BatchLayout, Embedding, KVCache, KVSpec, Linear, RMSNorm, Rope


class Block(nn.Module):
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
        found = self.attention(h, layout) + self.down(ops.relu_squared(self.up(h)))
        return x + self.gain * found


class Twist(nn.Module):
    def __init__(self, vocabulary=256, dim=64, layers=4):
        super().__init__()
        self.tok_embed = Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, layer) for layer in range(layers))
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
model, layout = Twist(), BatchLayout.packed([len(text)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(30):
    optimizer.zero_grad()
    hidden = model(text[:-1], BatchLayout.packed([len(text) - 1]))
    loss = ops.linear_cross_entropy(hidden, model.tok_embed.weight, text[1:]).mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss:.3f}")

with torch.inference_mode():
    whole = model.logits(model(text, layout))
    pool = KVCache(KVSpec.of(model), num_blocks=40, block_size=4)
    blocks = torch.randperm(40)[None]
    steps = []
    for at in range(len(text)):  # a token a step, its keys and values in blocks anywhere
        step = BatchLayout.paged(pool, [1], [at + 1], blocks)
        steps.append(model.logits(model(text[at : at + 1], step)))
assert torch.equal(torch.cat(steps), whole)
print(f"{len(text)} tokens decoded one by one: the same bits")
