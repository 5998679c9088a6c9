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
from ingot.nn import Attention, Embedding, KVPool, KVSpec, Linear, Plan, RMSNorm, Rope


class Block(nn.Module):
    def __init__(self, dim, layer):
        super().__init__()
        window = 16 if layer % 2 else None
        self.norm = RMSNorm(dim)
        self.attention = Attention(
            dim, heads=4, kv_heads=2, rope=Rope(), window=window, layer=layer
        )
        self.up, self.down = Linear(dim, 4 * dim), Linear(4 * dim, dim)
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x, positions, plan):
        h = self.norm(x)
        found = self.attention(h, positions, plan) + self.down(ops.relu_squared(self.up(h)))
        return x + self.gain * found


class Twist(nn.Module):
    def __init__(self, vocabulary=256, dim=64, layers=4):
        super().__init__()
        self.embed = Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, layer) for layer in range(layers))
        self.norm = RMSNorm(dim)

    def forward(self, tokens, positions, plan):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, plan)
        return self.norm(x)

    def logits(self, hidden):
        return ops.linear(hidden, self.embed.weight)


torch.manual_seed(0)
text = torch.tensor(list(b"One model, from training to serving, through the same kernels. " * 2))
model, plan = Twist(), Plan.packed([len(text)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(30):
    optimizer.zero_grad()
    hidden = model(text[:-1], plan.positions()[:-1], Plan.packed([len(text) - 1]))
    loss = ops.linear_cross_entropy(hidden, model.embed.weight, text[1:]).mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss:.3f}")

with torch.inference_mode():
    whole = model.logits(model(text, plan.positions(), plan))
    pool = KVPool(KVSpec.of(model), pages=40, page_size=4)
    pages = torch.randperm(40)[None]
    steps = []
    for at in range(len(text)):  # a token a step, its keys and values in pages anywhere
        step = Plan.paged(pool, [1], [at + 1], pages)
        steps.append(model.logits(model(text[at : at + 1], step.positions(), step)))
assert torch.equal(torch.cat(steps), whole)
print(f"{len(text)} tokens decoded one by one: the same bits")
