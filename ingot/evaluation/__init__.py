"""Evaluation tasks: their file format, metrics, stored samples, and the client of a server.

`ingot.evaluate` (`ingot.workflows.evaluate`) runs a task on a model. Nothing here imports torch.
"""
