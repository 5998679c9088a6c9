"""The HTTP server: its APIs, API keys, admission and metrics."""
