"""Predicts step time and memory of training on a GPU cluster, and ranks parallel layouts.

    hardware   data sheets of GPUs and links; a cluster of them
    workload   the shape of a model, and what one training step processes
    plan       one parallel layout: degrees, micro-batch size, recomputation
    cost       step time of a plan by part, as a function of about a dozen constants
    memory     bytes per GPU of a plan by part
    published  published training runs, the data that the constants are fitted to
    fit        fits the constants, and calibrates them with a user's own runs
    accuracy   errors on runs that the constants have not seen
    search     enumerates the plans that fit into memory, and ranks them

The planner is arithmetic: nothing here imports torch or needs a GPU.
"""

from __future__ import annotations
