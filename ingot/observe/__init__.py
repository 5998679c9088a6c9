"""Metrics, curves and reports of training runs."""
