"""A job, as a file says it: tables of plain values, each with its range and a line of explanation.

Nothing is read and nothing is looked up here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from edgetrain import extensions
from edgetrain.files.tables import key, ranged

if TYPE_CHECKING:
    from edgetrain.exchange.member.checkpoint import Sparing
    from edgetrain.strategies.cohort import Cohort


AUTO: Final = "auto"
"""A delay that is measured, and a final sync that is chosen, as job files spell them."""

DIRECT = "direct"
"""Members host the reducers."""

COLLECTIVES = ("ring", "butterfly", "tree")
"""Topologies that add up in an order of their own: a job with one has other bits than a star."""

TOPOLOGIES = ("star", DIRECT, *COLLECTIVES, AUTO)
"""Machines that add up contributions, as in `fleet.topology`."""

FROZEN = ("equal", "first", "own")
BUFFERS = ("mean", "local")
WEIGHTS = ("", "alike", "samples", "shares")
FALLBACKS = ("never", "when-needed", "when-faster")
COMPILERS = ("", "inductor", "aot_eager", "eager")
"""Backends of torch.compile; ones with "eager" show whether a model can be compiled."""


def _sgd() -> dict[str, Any]:
    return {"name": "sgd", "lr": 0.05, "momentum": 0.9}


@dataclass(frozen=True)
class Fleet:
    """The members, their devices and their networks."""

    members: int = ranged(4, 1, 1_000_000, "training processes")
    device: str = key("host", "device profile(s): 'raspberry-pi-4b', 'raspberry-pi-4b:6, host:2'")
    network: str = key("none", "network profile(s): 'wan-200ms', 'wifi:4, 4g-bad:4'")
    hub_network: str = key("none", "network profile(s) of the hubs' own links")
    nat: str = key("", "members behind a router, unreachable for others: '0-2 5'")
    sites: str = key("", "members with a shared uplink: 'home-fixed: 0-3, 4g-good: 4 5'")
    gateways: bool = key(False, "a site may merge its rounds first: `edgetrain gateway`")
    congestion: str = key("cubic", "TCP's congestion control on all links: cubic, reno, bbr, …")
    pace_s: float = ranged(0.0, 0.0, 3600.0, "seconds of a step; 0: from the device profile")
    online_s: float = ranged(0.0, 0.0, 1e9, "simulated: mean seconds to a power cut; 0: never")
    offline_s: float = ranged(60.0, 0.0, 1e9, "simulated: mean seconds until the device is back")
    backend: str = key("auto", "emulation of the network: auto, packet, tc, stream or none")
    topology: str = key("star", "adds up contributions (star: the hub)", choices=TOPOLOGIES)
    topology_trust: bool = key(
        False, "members may see each other's contributions, so auto may take direct"
    )
    placement: str = key(
        "", "members as stages of one model: 'pipeline=4 microbatches=16'; '': each has all of it"
    )
    activations: str = key("float32", "numbers between stages", choices=("float32", "bf16", "int8"))


@dataclass(frozen=True)
class Train:
    """Local training of a member."""

    steps: int = ranged(400, 1, 10**9, "optimizer steps of each member")
    batch: int = ranged(16, 1, 10**6, "samples in a step, per member")
    accumulate: int = ranged(1, 1, 10**6, "batches in a step, with the mean of their gradients")
    optimizer: dict[str, Any] = key(_sgd, "optimizer: torch's (sgd, adamw, …), lars or lamb")
    lr_reference_batch: int = ranged(
        0, 0, 10**9, "linear scaling: samples in a step of all members, meant by lr; 0: off"
    )
    schedule: str = key(
        "", "learning rate: 'warmup(20) | cosine', linear, step(0.5, 100); '': same"
    )
    clip: float = ranged(0.0, 0.0, 1e12, "maximum length (L2) of a gradient; 0: no limit")
    evaluate_every: int = ranged(0, 0, 10**9, "steps between evaluations; 0: about 50 in a run")
    hold_out: float = ranged(0.0, 0.0, 0.9, "share of each member's data kept for evaluation")
    target: float = ranged(0.0, 0.0, 1e12, "goal of the task's figure; 0: the task's own")
    threads: int = ranged(1, 1, 1024, "torch threads of each member")
    accelerator: str = key("auto", "device of the model", choices=("auto", "cpu", "cuda"))
    frozen: str = key("equal", "frozen weights and buffers of all members", choices=FROZEN)


@dataclass(frozen=True)
class StrategyTable:
    """The exchange between members and hub."""

    name: str = key("dga", "strategy: see `edgetrain strategies`")
    local_steps: int = ranged(
        0, 0, 10**9, "local steps in a round (K); 0: the strategy's default, fewer in a short run"
    )
    delay: int | Literal["auto"] = ranged(
        AUTO, 0, 10**9, "local steps before a reply is needed (D), or 'auto'"
    )
    final_sync: float | Literal["auto"] = ranged(
        AUTO, 0.0, 1.0, "share of the steps, at the end, in short rounds without a delay; 0: none"
    )
    correction: str = key(
        "", "paper, predict or variates (unequal data), decay (equal), auto; '': from name"
    )
    codec: str = key("fp32", "codec of contributions")
    reply_codec: str = key("", "codec of replies; '': like contributions")
    merge: str = key("mean", "rule that merges contributions; see `edgetrain strategies`")
    outer: str = key("", "the hub's optimizer: 'nesterov(0.7, 0.9)'; '': the strategy's default")
    ranges: int = ranged(
        1, 1, 1 << 20, "ranges of the vector, shared by hubs; codecs are cut at their borders"
    )
    weighting: str = key("", "weight of a member ('': the strategy's default)", choices=WEIGHTS)
    cohort: float = ranged(
        0.0, 0.0, 100_000.0, "members drawn for a round: a number, or a share below 1; 0: all"
    )
    sampling: str = key("uniform", "how members are drawn: uniform, weighted, poisson, available")
    cohort_extra: int = ranged(0, 0, 100_000, "more members drawn; the first `cohort` count")
    buffers: str = key("mean", "running statistics of normalisation layers", choices=BUFFERS)
    personal: str = key("", "layers trained and kept by each member: 'head.*, *.bn*'; '': none")
    head_steps: int = ranged(0, 0, 10**9, "first steps of a round, for the personal layers only")
    secure: bool = key(False, "mask contributions: the hub learns only their sum")
    threshold: int = ranged(0, 0, 100_000, "secure: members needed for a sum; 0: more than 2/3")
    honest_hub: bool = key(False, "secure: trust the hub, and allow thresholds above 1/2")
    clip_range: float = ranged(8.0, 2**-20, 2**20, "secure: elements are clipped to +-clip_range")


@dataclass(frozen=True)
class HubTable:
    """Deadlines, heartbeats, journal and limits of the hub."""

    quorum: int = ranged(1, 1, 100_000, "contributions needed to close a round at its deadline")
    min_members: int = ranged(0, 0, 100_000, "members needed to begin training; 0: all")
    start_after_s: float = ranged(60.0, 0.0, 10**7, "seconds to wait for the others then")
    deadline_s: float | Literal["auto"] = ranged(
        60.0, 0.01, 86_400.0, "seconds until a round closes without late members; 'auto': measured"
    )
    lost_after_s: float = ranged(5.0, 0.1, 86_400.0, "seconds until a lost member is dropped")
    heartbeat_s: float = ranged(1.0, 0.05, 60.0, "seconds between two heartbeats")
    hub_timeout_s: float = ranged(600.0, 1.0, 10**7, "seconds members try to reach the hub")
    max_model_mb: float = ranged(
        0.0, 0.0, 1e9, "largest model allowed, as float32; 0: by free memory"
    )
    rejoin_s: float = ranged(60.0, 1.0, 10**7, "seconds a restored hub waits for the others")
    empty_after_s: float = ranged(3600.0, 1.0, 10**7, "seconds a hub waits without a member")
    fsync: str = key("always", "journal to the disk: always, round-every N, never")
    on_disk_full: str = key(
        "stop", "on a full disk: stop, or go on without a journal", choices=("stop", "go on")
    )
    snapshot_every: int = ranged(0, 0, 10**9, "rounds between snapshots of the base; 0: by size")
    replica: str = key("", "tcp://HOST:PORT of a second hub, to take over; '': none")
    status_s: float = ranged(5.0, 0.0, 3600.0, "seconds between two reports of a member; 0: never")
    hubs: list[str] = key(
        list, "all hubs, the lead first: ['tcp://a:5555', 'tcp://b:5555']; []: one hub"
    )
    message_s: float = ranged(0.001, 0.0, 10.0, "simulated: seconds of the hub for a message")

    @property
    def longest_deadline_s(self) -> float:
        return 60.0 if self.deadline_s == AUTO else self.deadline_s


@dataclass(frozen=True)
class CheckpointTable:
    """Limits of a member's checkpoint writing."""

    every_s: float = ranged(600.0, 0.0, 1e9, "minimum seconds between two checkpoints of a member")
    share: float = ranged(0.02, 1e-6, 1.0, "largest share of a member's time for writing them")
    mb_an_hour: float = ranged(256.0, 1e-3, 1e9, "maximum megabytes written in an hour")

    def sparing(self) -> Sparing:
        """As `checkpoint` takes it."""
        from edgetrain.exchange.member.checkpoint import Sparing

        return Sparing(self.every_s, self.share, 1e6 * self.mb_an_hour)


@dataclass(frozen=True)
class Privacy:
    """Differential privacy: the protected unit, the noise, and the machine that adds it."""

    unit: str = key("none", "protected unit: none, example, or member (all its data)")
    clip: float = ranged(1.0, 1e-9, 1e12, "maximum length (L2) of one unit's part")
    noise: float = ranged(0.0, 0.0, 1e6, "noise multiplier: standard deviation / clip")
    epsilon: float = ranged(0.0, 0.0, 1e6, "in place of noise: budget of the whole job")
    delta: float = ranged(1e-5, 1e-100, 0.5, "chance of a breach of epsilon")
    where: str = key("member", "noise is added by: member, or hub (a trusted one)")
    sampling: str = key("poisson", "of examples: poisson, or shuffle (hides less)")


@dataclass(frozen=True)
class ServersTable:
    """The job on GPU servers, in one group of processes with the model divided among them."""

    cluster: str = key("", "a cluster.toml with [[server]] tables; '': this machine")
    placement: str = key("auto", "auto, edge (never on servers), or 'data=2 pipeline=2'")
    precision: str = key("fp32", "matrix products on servers", choices=("fp32", "bf16"))
    fallback: str = key("never", "move from devices to servers", choices=FALLBACKS)
    snapshot_every: int = ranged(0, 0, 10**9, "steps between snapshots; 0: about ten in a run")
    hang_s: float = ranged(600.0, 1.0, 1e6, "seconds of a rank's silence that end an attempt")
    compile: str = key("", "backend of torch.compile ('': not compiled)", choices=COMPILERS)
    layer_keep: float = ranged(1.0, 0.0, 1.0, "chance of the last block to be kept in the end")
    async_snapshots: bool = key(True, "train during a snapshot's write; takes a copy in memory")
    check: str = key("auto", "compare a batch with one process first", choices=("auto", "off"))
    shares: int = ranged(1, 1, 100_000, "members' shares of data for a group beside devices")
    after_s: float = ranged(30.0, 0.1, 1e6, "seconds until a group steps in for lost devices")
    back_s: float = ranged(60.0, 0.1, 1e6, "seconds until it leaves, once enough are back")
    data: dict[str, Any] = key(dict, "options of the task on servers")


@dataclass(frozen=True)
class Job:
    """A training job: its keys and their defaults (`docs/reference/jobs.md`)."""

    task: str = key("edgetrain.tasks:digits", "model, data, loss, evaluation: 'module:object'")
    name: str = key("", "name of the run folder; '': the task's name")
    seed: int = ranged(0, 0, 2**63 - 1, "seed of initial parameters, partition, batches, network")
    start: str = key("", "initial model, a model.safetensors; '': parameters drawn by the seed")
    data: dict[str, Any] = key(dict, "options of the task: folder, partition, …")
    fleet: Fleet = key(Fleet)
    train: Train = key(Train)
    strategy: StrategyTable = key(StrategyTable)
    hub: HubTable = key(HubTable)
    checkpoint: CheckpointTable = key(CheckpointTable)
    privacy: Privacy = key(Privacy)
    servers: ServersTable = key(ServersTable)
    faults: list[dict[str, Any]] = key(list, "faults of links, with their times; a list")
    absences: list[dict[str, Any]] = key(list, "simulated: absences of devices, with times; a list")

    @property
    def first_members(self) -> int:
        """Members with which training may begin."""
        return self.hub.min_members or self.fleet.members

    @property
    def cohort(self) -> Cohort | None:
        """The sample of members in each round; None: all members."""
        if not (table := self.strategy).cohort:
            return None
        from edgetrain.strategies.cohort import Cohort  # of a job that has one

        is_private = self.privacy.unit == "member" and self.privacy.where == "hub"
        return Cohort.of(self.seed, self.fleet.members, table, is_private)

    def digest(self) -> str:
        """Of everything that members of one job must agree on; where they run is not part of it.

        Nor is `start`: a member that joins is given the fleet's parameters. A topology is, where
        it changes bits. Behind "+" is a digest of the code of what it names of a user's own.
        """
        data = {key: value for key, value in self.data.items() if key not in ("folder", "download")}
        agreed = {
            "task": self.task,
            "seed": self.seed,
            "data": data,
            "members": self.fleet.members,
            "train": _agreed(
                self.train, "threads", "evaluate_every", "target", "accelerator", "frozen"
            ),
            "strategy": _agreed(self.strategy),
            "privacy": dataclasses.asdict(self.privacy),
        }
        if self.servers.shares != 1:
            agreed["shares"] = self.servers.shares
        if self.fleet.placement:
            agreed["placement"] = f"{self.fleet.placement} {self.fleet.activations}"
        if self.fleet.topology in COLLECTIVES:
            agreed["topology"] = self.fleet.topology
        text = json.dumps(agreed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32] + extensions.mark(text)

    def to_dict(self) -> dict[str, Any]:
        """All keys as plain values, in the order of the file."""
        return dataclasses.asdict(self)


def _agreed(table: Train | StrategyTable, *own: str) -> dict[str, Any]:
    """The values that all members agree on: without keys that are each member's `own`."""
    return {key: value for key, value in dataclasses.asdict(table).items() if key not in own}
