"""Names of the spans in a trace of torch.profiler that `ingot profile` looks for.

A span is `torch.profiler.record_function(name)`: a few microseconds when nothing is profiled.
"""

WINDOW = "ingot: window"
"""All that is profiled."""
STEP = "ingot: step"
DATA = "ingot: wait for data"
REQUESTS = "ingot: wait for requests"
COMMUNICATION = "ingot: communication"
"""The beginning of a name, which ends with the kind of collective."""
