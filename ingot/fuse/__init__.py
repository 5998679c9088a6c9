"""Fusion: any PyTorch model through ingot's kernels.

model = torch.compile(model, backend="ingot")
model = ingot.optimize(model, tokens); print(model.report)

graph    calls under one name; what a pass may not change
pattern  expressions that match calls
mask     what an attention mask lets a query see
passes   the rewrites: pattern, condition, replacement
rewrite  runs the passes
proof    compares each rewrite with what it replaced
backend  the entry points, and Inductor for the rest
export   a rewritten model as a file, for processes without its source
"""
