"""Training: step, trainer, optimizers, schedules, checkpoints."""
