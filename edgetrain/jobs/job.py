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
"""Who adds up contributions, as `fleet.topology` spells it."""

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
    """Who trains, on what, over which network."""

    members: int = ranged(4, 1, 1_000_000, "training processes")
    device: str = key("host", "device profile(s): 'raspberry-pi-4b', 'raspberry-pi-4b:6, host:2'")
    network: str = key("none", "network profile(s): 'wan-200ms', 'wifi:4, 4g-bad:4'")
    hub_network: str = key("none", "network profile(s) of the hubs' own links, as of members")
    nat: str = key("", "members to which nobody can connect: '0-2 5'")
    sites: str = key("", "members behind one shared uplink: 'home-fixed: 0-3, 4g-good: 4 5'")
    gateways: bool = key(False, "a site may merge its rounds first: `edgetrain gateway`")
    congestion: str = key("cubic", "TCP's congestion control on all links: cubic, reno, bbr, …")
    pace_s: float = ranged(0.0, 0.0, 3600.0, "seconds a step takes; 0: as the device profile says")
    online_s: float = ranged(0.0, 0.0, 1e9, "simulated: mean seconds until a device goes; 0: never")
    offline_s: float = ranged(60.0, 0.0, 1e9, "simulated: mean seconds until it starts anew")
    backend: str = key("auto", "how the network is emulated: auto, packet, tc, stream or none")
    topology: str = key("star", "who adds up (star: the hub)", choices=TOPOLOGIES)
    topology_trust: bool = key(
        False, "members may see each other's contributions: auto may take direct"
    )
    placement: str = key(
        "", "members are stages of one model: 'pipeline=4 microbatches=16'; '': each holds it all"
    )
    activations: str = key("float32", "what stages pass on", choices=("float32", "bf16", "int8"))


@dataclass(frozen=True)
class Train:
    """What a member does between exchanges."""

    steps: int = ranged(400, 1, 10**9, "optimizer steps of each member")
    batch: int = ranged(16, 1, 10**6, "samples in a step, per member")
    accumulate: int = ranged(1, 1, 10**6, "batches whose mean gradient is a step's")
    optimizer: dict[str, Any] = key(_sgd, "sgd, adamw, …: torch's, or lars, lamb")
    lr_reference_batch: int = ranged(
        0, 0, 10**9, "samples in a step of all members that lr is for; it grows with them; 0: as is"
    )
    schedule: str = key(
        "", "learning rate: 'warmup(20) | cosine', linear, step(0.5, 100); '': same"
    )
    clip: float = ranged(0.0, 0.0, 1e12, "length (L2) that gradients are cut to; 0: they are not")
    evaluate_every: int = ranged(0, 0, 10**9, "steps between evaluations; 0: about 50 in a run")
    hold_out: float = ranged(0.0, 0.0, 0.9, "share of its data that a member is evaluated on")
    target: float = ranged(0.0, 0.0, 1e12, "figure that counts as trained; 0: the task's own")
    threads: int = ranged(1, 1, 1024, "torch threads of each member")
    accelerator: str = key("auto", "where the model is", choices=("auto", "cpu", "cuda"))
    frozen: str = key("equal", "frozen weights and buffers", choices=FROZEN)


@dataclass(frozen=True)
class StrategyTable:
    """How members exchange what they learn."""

    name: str = key("dga", "see `edgetrain strategies`")
    local_steps: int = ranged(
        0, 0, 10**9, "local steps in a round (K); 0: the strategy's, fewer in a short run"
    )
    delay: int | Literal["auto"] = ranged(
        AUTO, 0, 10**9, "local steps a reply may take (D), or 'auto'"
    )
    final_sync: float | Literal["auto"] = ranged(
        AUTO, 0.0, 1.0, "share of the steps, at the end, in short rounds without delay; 0: none"
    )
    correction: str = key(
        "", "paper, predict or variates (unequal data), decay (equal), auto; '': as the name"
    )
    codec: str = key("fp32", "how contributions are encoded")
    reply_codec: str = key("", "how replies are encoded; '': like contributions")
    merge: str = key("mean", "how contributions become one; see `edgetrain strategies`")
    outer: str = key("", "what the hub makes of it: 'nesterov(0.7, 0.9)'; '': as the strategy says")
    ranges: int = ranged(
        1, 1, 1 << 20, "ranges of the vector that hubs share; codecs are cut at their borders"
    )
    weighting: str = key("", "what a member counts for ('': as the strategy says)", choices=WEIGHTS)
    cohort: float = ranged(
        0.0, 0.0, 100_000.0, "members drawn for a round: a number, or a share below 1; 0: all"
    )
    sampling: str = key("uniform", "how they are drawn: uniform, weighted, poisson, available")
    cohort_extra: int = ranged(0, 0, 100_000, "drawn besides; the first `cohort` answers count")
    buffers: str = key("mean", "normalisation's running statistics", choices=BUFFERS)
    personal: str = key("", "layers that members train and keep: 'head.*, *.bn*'; '': none")
    head_steps: int = ranged(0, 0, 10**9, "first steps of a round, for personal layers alone")
    secure: bool = key(False, "mask contributions, so that the hub learns only their sum")
    threshold: int = ranged(0, 0, 100_000, "secure: members that a sum takes; 0: more than 2/3")
    honest_hub: bool = key(False, "secure: the hub is trusted, thresholds may be above 1/2")
    clip_range: float = ranged(8.0, 2**-20, 2**20, "secure: elements are cut to +-clip_range")


@dataclass(frozen=True)
class HubTable:
    """How patient the hub is."""

    quorum: int = ranged(1, 1, 100_000, "contributions a round needs to close at its deadline")
    min_members: int = ranged(0, 0, 100_000, "members that are enough to begin; 0: all")
    start_after_s: float = ranged(60.0, 0.0, 10**7, "once they are here, wait so for the others")
    deadline_s: float | Literal["auto"] = ranged(
        60.0, 0.01, 86_400.0, "then a round closes without the late ones; 'auto': from arrivals"
    )
    lost_after_s: float = ranged(5.0, 0.1, 86_400.0, "an unreachable member is dropped after")
    heartbeat_s: float = ranged(1.0, 0.05, 60.0, "the hub sends to every member this often")
    hub_timeout_s: float = ranged(600.0, 1.0, 10**7, "members wait so long for the hub")
    max_model_mb: float = ranged(
        0.0, 0.0, 1e9, "largest model it takes, as float32; 0: by free memory"
    )
    rejoin_s: float = ranged(60.0, 1.0, 10**7, "a restored hub waits so for the others")
    empty_after_s: float = ranged(3600.0, 1.0, 10**7, "and so for the first, or for any")
    fsync: str = key("always", "when the journal reaches the disk: always, round-every N, never")
    on_disk_full: str = key(
        "stop", "on a full disk (go on: without the journal)", choices=("stop", "go on")
    )
    snapshot_every: int = ranged(0, 0, 10**9, "rounds between snapshots of the base; 0: by size")
    replica: str = key("", "tcp://HOST:PORT of a second hub that takes over; '': there is none")
    status_s: float = ranged(5.0, 0.0, 3600.0, "members say how they are this often; 0: never")
    hubs: list[str] = key(
        list, "all hubs, the first leads: ['tcp://a:5555', 'tcp://b:5555']; []: one"
    )
    message_s: float = ranged(0.001, 0.0, 10.0, "simulated: seconds the hub takes for a message")

    @property
    def longest_deadline_s(self) -> float:
        return 60.0 if self.deadline_s == AUTO else self.deadline_s


@dataclass(frozen=True)
class CheckpointTable:
    """How sparingly a member writes its checkpoint, where it is told to keep one."""

    every_s: float = ranged(600.0, 0.0, 1e9, "seconds between two checkpoints of a member")
    share: float = ranged(0.02, 1e-6, 1.0, "of a member's time that writing them may take")
    mb_an_hour: float = ranged(256.0, 1e-3, 1e9, "megabytes that they may write in an hour")

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
    """When and how the job runs on GPU servers, on one group of processes that hold it together."""

    cluster: str = key("", "a cluster.toml with [[server]] tables; '': this machine")
    placement: str = key("auto", "auto, edge (never on servers), or 'data=2 pipeline=2'")
    precision: str = key("fp32", "of matrix products on servers", choices=("fp32", "bf16"))
    fallback: str = key("never", "from devices to servers", choices=FALLBACKS)
    snapshot_every: int = ranged(0, 0, 10**9, "steps between snapshots; 0: about ten in a run")
    hang_s: float = ranged(600.0, 1.0, 1e6, "silence of a stopped rank that ends an attempt")
    compile: str = key("", "backend of torch.compile ('': not compiled)", choices=COMPILERS)
    layer_keep: float = ranged(1.0, 0.0, 1.0, "chance that the last block is kept in the end")
    async_snapshots: bool = key(True, "train on while one is written; takes a copy in memory")
    check: str = key("auto", "compare a batch with one process first", choices=("auto", "off"))
    shares: int = ranged(1, 1, 100_000, "members whose data a group beside devices has")
    after_s: float = ranged(
        30.0, 0.1, 1e6, "when-needed: a group steps in for devices gone so long"
    )
    back_s: float = ranged(60.0, 0.1, 1e6, "and out when enough have been back for so long")
    data: dict[str, Any] = key(dict, "options of the task that differ on servers")


@dataclass(frozen=True)
class Job:
    """A training job: its keys and their defaults (`docs/reference/jobs.md`)."""

    task: str = key("edgetrain.tasks:digits", "model, data, loss, evaluation: 'module:object'")
    name: str = key("", "of the run folder; '': the task's name")
    seed: int = ranged(0, 0, 2**63 - 1, "of initial parameters, partition, batches, network")
    start: str = key("", "a model.safetensors to begin from; '': parameters drawn by the seed")
    data: dict[str, Any] = key(dict, "options of the task: folder, partition, …")
    fleet: Fleet = key(Fleet)
    train: Train = key(Train)
    strategy: StrategyTable = key(StrategyTable)
    hub: HubTable = key(HubTable)
    checkpoint: CheckpointTable = key(CheckpointTable)
    privacy: Privacy = key(Privacy)
    servers: ServersTable = key(ServersTable)
    faults: list[dict[str, Any]] = key(list, "what goes wrong with links, and when; a list")
    absences: list[dict[str, Any]] = key(list, "simulated: devices that are off, and when; a list")

    @property
    def first_members(self) -> int:
        """Members with which training may begin."""
        return self.hub.min_members or self.fleet.members

    @property
    def cohort(self) -> Cohort | None:
        """Who has a part in which round; None: all members in all."""
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
