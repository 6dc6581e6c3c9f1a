"""The ranks of a group as a mesh: pipeline x replicate x shard x tensor."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from edgetrain.errors import ConfigError
from edgetrain.jobs.placement.words import Placement

AXES = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Ranks:
    """A placement on the processes of this group, and the place of this one in it."""

    placement: Placement
    rank: int
    mesh: DeviceMesh
    device: torch.device

    @classmethod
    def of(cls, placement: Placement, device: torch.device) -> Ranks:
        """The mesh of a placement over the process group that is there: all ranks call it."""
        shape = (
            placement.pipeline,
            placement.data // placement.shard,
            placement.shard,
            placement.tensor,
        )
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
        return cls(placement, dist.get_rank(), mesh, device)

    def place(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self.mesh.get_local_rank(axis)

    @property
    def data_rank(self) -> int:
        """Which part of the batch this rank has."""
        return self.place("replicate") * self.placement.shard + self.place("shard")

    def rank_at(self, pipeline: int, data: int = 0, tensor: int = 0) -> int:
        """The global rank at a place."""
        return (pipeline * self.placement.data + data) * self.placement.tensor + tensor

    @property
    def stages(self) -> list[int]:
        """The stages that this rank holds."""
        return self.placement.stages_of(self.place("pipeline"))

    def holder(self, stage: int) -> int:
        """The place along the pipeline of the ranks that hold a stage."""
        found = range(self.placement.pipeline)
        return next(p for p in found if stage in self.placement.stages_of(p))


def open_group(
    rank: int, world: int, port: int, host: str = "127.0.0.1", accelerator: str = "auto"
) -> torch.device:
    """Join the process group whose store listens at host:port; the device of this rank, as
    `train.accelerator` wants it. ConfigError for CUDA that is not there."""
    device = _device(accelerator, rank)
    if host == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore(host, port, world, is_master=False, wait_for_workers=False)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    return device


def join_torchrun(accelerator: str) -> torch.device:
    """Join the process group that torchrun's environment describes; the device of this rank."""
    device = _device(accelerator, int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    return device


def _device(accelerator: str, local: int) -> torch.device:
    there = torch.cuda.is_available() and accelerator != "cpu"
    if accelerator == "cuda" and not there:
        raise ConfigError(
            f"train.accelerator = 'cuda': torch {torch.__version__} finds no GPU here",
            "say 'auto' or 'cpu', or install a driver and a torch built for CUDA",
        )
    if not there:
        return torch.device("cpu")
    place = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(place)
    return place


def open_store() -> TCPStore:
    """A store on a free port of this machine, for one attempt; it lives as long as the object."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
