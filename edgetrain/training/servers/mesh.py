"""The ranks of a group as a mesh: pipeline x replicate x shard x sequence x tensor.

Ranks with slices of the same sequences hold the same parameters and add their gradients up, as
replicas do: for torch's sharding they are replicas. A mesh of their own has their groups.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from edgetrain.errors import ConfigError
from edgetrain.jobs.placement.words import Placement
from edgetrain.training.member.train import device_for

AXES = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Ranks:
    """A placement on the processes of this group, and the place of this one in it."""

    placement: Placement
    rank: int
    mesh: DeviceMesh
    device: torch.device
    slices: DeviceMesh | None = None
    """(…, ring, ulysses): the ranks with slices of the same sequences; None: each has whole
    ones."""
    experts: DeviceMesh | None = None
    """(…, copies, single, expert, …): the ranks that each have a part of all experts, and those
    with the same part; None: each has all experts."""
    owners: dist.ProcessGroup | None = None
    """The ranks that share one optimizer (ZeRO-1); None: each has its own, or its shard."""

    @classmethod
    def of(cls, placement: Placement, device: torch.device) -> Ranks:
        """The mesh of a placement over the process group that is there: all ranks call it."""
        p, s = placement, placement.divided
        ranks = torch.arange(p.ranks).reshape(p.pipeline, p.data // s, s, p.sequence, p.tensor)
        flat = ranks.transpose(2, 3).reshape(p.pipeline, -1, s, p.tensor)
        mesh = DeviceMesh(device.type, flat, mesh_dim_names=AXES)
        slices = None
        if p.sequence > 1:
            rings = ranks.transpose(3, 4).reshape(-1, p.ring, p.ulysses)
            slices = DeviceMesh(device.type, rings, mesh_dim_names=("rest", "ring", "ulysses"))
        experts = None
        if p.experts > 1:
            shape = (p.pipeline, p.data // p.experts, 1, p.experts, p.sequence * p.tensor)
            names = ("pipeline", "copies", "single", "expert", "rest")
            experts = DeviceMesh(
                device.type, torch.arange(p.ranks).reshape(shape), mesh_dim_names=names
            )
        owners = None
        if p.zero == 1:
            grid = torch.arange(p.ranks).reshape(p.pipeline, -1, p.shard, p.sequence, p.tensor)
            columns = grid.movedim(2, -1).reshape(-1, p.shard)
            found = DeviceMesh(device.type, columns, mesh_dim_names=("rest", "owner"))
            owners = found["owner"].get_group()
        return cls(placement, dist.get_rank(), mesh, device, slices, experts, owners)

    def place(self, axis: str) -> int:
        return self.mesh.get_local_rank(axis)

    @property
    def data_rank(self) -> int:
        return self.place("replicate") // self.placement.sequence * self.placement.divided + (
            self.place("shard")
        )

    @property
    def slice(self) -> int:
        return self.place("replicate") % self.placement.sequence

    def rank_at(self, pipeline: int, within: int = 0) -> int:
        """The global rank at a place: `within` those that hold the same stage."""
        return pipeline * self.placement.width + within

    @property
    def stages(self) -> list[int]:
        return self.placement.stages_of(self.place("pipeline"))

    def holder(self, stage: int) -> int:
        """The place along the pipeline of the ranks that hold a stage."""
        found = range(self.placement.pipeline)
        return next(p for p in found if stage in self.placement.stages_of(p))


def open_group(
    rank: int,
    world: int,
    port: int,
    host: str = "127.0.0.1",
    accelerator: str = "auto",
    local: int | None = None,
    hang_s: float | None = None,
) -> torch.device:
    """Join the process group whose store listens at host:port; the device of this rank, the
    `local`-th of its machine, as `train.accelerator` wants it. An exchange that takes `hang_s`
    fails; None: as torch says. ConfigError for CUDA that is not there."""
    device = _device(accelerator, rank if local is None else local)
    if host == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = store_at(host, port, world_size=world, is_master=False)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    wait = None if hang_s is None else timedelta(seconds=hang_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    return device


def join_torchrun(accelerator: str) -> torch.device:
    """Join the process group that torchrun's environment describes; the device of this rank."""
    device = _device(accelerator, int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    return device


def _device(accelerator: str, local: int) -> torch.device:
    place = device_for(accelerator)
    if place.type == "cpu":
        return place
    if local >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"rank {local + 1} of a machine with {count} GPU{'s'[: count > 1]}",
            "a GPU takes one rank: a smaller placement, or train.accelerator = 'cpu'",
        )
    place = torch.device("cuda", local)
    torch.cuda.set_device(place)
    return place


def open_store(address: str = "127.0.0.1") -> TCPStore:
    """A store on a free port of this address only, for one attempt; it lives as long as the
    object."""
    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    return store_at(address, port, is_master=True, master_listen_fd=listening.detach())


def store_at(host: str, port: int, **how: Any) -> TCPStore:
    """torch's store, which `how` is for, with what this build of it has (Debian's has no libuv)."""
    try:
        return TCPStore(host, port, wait_for_workers=False, **how)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        return TCPStore(host, port, wait_for_workers=False, use_libuv=False, **how)
