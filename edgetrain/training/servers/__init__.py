"""A job on a group of processes that hold one model together: torch.distributed, as planned.

The only place that imports torch.distributed. What it does not write again: sharding
(`fully_shard`), schedules (`torch.distributed.pipelining`), divided layers (`parallelize_module`),
snapshots (DCP).
"""
