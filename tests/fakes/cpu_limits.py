"""What torch refuses on CPUs, and its words for it."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)
from torch.distributed.device_mesh import init_device_mesh


def context_parallel():
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (2,))
    query, layer = torch.randn(1, 2, 8, 4), torch.nn.Linear(4, 4)
    with context_parallel(mesh, buffers=[query], buffer_seq_dims=[2]):
        hidden = layer(query)
        F.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)


def nccl():
    dist.new_group(backend="nccl")


def symmetric_memory():
    import torch.distributed._symmetric_memory as memory

    memory.rendezvous(memory.empty(4, device="cpu"), dist.group.WORLD)


def copies_beside_the_stream():
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    DefaultStager(StagingOptions())


def bf16_hook():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(None, bf16_compress_hook)


LIMITS = (context_parallel, nccl, symmetric_memory, copies_beside_the_stream, bf16_hook)


def words_of(place: int) -> str:
    """What torch says of one of LIMITS; "": it works."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            LIMITS[place]()
        except Exception as error:
            return str(error).strip().splitlines()[0]
    return ""
