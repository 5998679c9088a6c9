"""Forecasts of training runs: final loss, time of arrival, and divergence."""
