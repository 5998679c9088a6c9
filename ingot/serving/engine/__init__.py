"""The engine: requests, scheduler, model runner and sampler."""
