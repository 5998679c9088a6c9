"""Training on several ranks: functions that are applied to a model."""
