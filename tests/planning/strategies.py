"""Random plans and workloads for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from ingot.planning.hardware import ACCELERATORS, Cluster
from ingot.planning.plan import ParallelPlan, Software
from ingot.planning.workload import SHAPES, TrainingWorkload

small = st.sampled_from([1, 2, 4, 8])
softwares = st.builds(
    Software,
    attention=st.sampled_from(["fused", "fa2", "fa1", "unfused"]),
    eager=st.booleans(),
    sequence_parallel=st.booleans(),
    tp_overlap=st.booleans(),
    dp_overlap=st.booleans(),
    zero=st.sampled_from([0, 1]),
)
plans = st.builds(
    ParallelPlan,
    dp=small,
    fsdp=small,
    tp=small,
    pp=small,
    cp=st.sampled_from([1, 2]),
    micro_batch_size=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "attention", "selective", "third", "full"]),
    software=softwares,
)
workloads = st.builds(
    TrainingWorkload,
    model=st.sampled_from(list(SHAPES.values())),
    seq_len=st.sampled_from([2048, 8192]),
    global_batch_size=st.sampled_from([1024, 4096]),
    precision=st.sampled_from(["bf16", "fp8"]),
)


def cluster_for(plan: ParallelPlan, gpu: str = "h100") -> Cluster:
    """The cluster that a plan needs."""
    return Cluster(accelerator=ACCELERATORS[gpu], gpus=plan.gpus)
