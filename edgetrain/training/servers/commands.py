"""The commands that start a group's ranks on several servers, for a scheduler or a person."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from edgetrain.errors import ConfigError
from edgetrain.fleet.cluster import Cluster
from edgetrain.jobs.placement.machines import Servers
from edgetrain.jobs.placement.question import check_trust
from edgetrain.jobs.placement.replanning import ranks_of
from edgetrain.jobs.placement.search import Found
from edgetrain.training.servers.interfaces import host_name

PORT = 29400


def commands(
    chosen: Found, servers: Servers, cluster: Cluster, words: Sequence[str], runs: str
) -> list[str]:
    """A torchrun command for each server that the placement uses, in order. `words` are the job
    file and overrides, as the user gave them.

    ConfigError for several hosts whose network is not trusted: gloo and NCCL neither encrypt nor
    authenticate. ConfigError for a placement whose servers run different numbers of ranks.
    """
    placement = chosen.placement
    check_trust(chosen, cluster, servers)
    counts = {server: len(ranks) for server, ranks in ranks_of(chosen, servers).items()}
    used = [cluster.servers[index] for index in counts]
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{e.name} {n}" for e, n in zip(used, counts.values(), strict=True))
        raise ConfigError(f"torchrun wants as many ranks on each server: {told}", "other words")
    head = host_name(used[0].host) if len(used) > 1 else "127.0.0.1"
    found = []
    for node, (entry, count) in enumerate(zip(used, counts.values(), strict=True)):
        environment = ""
        if entry.interface:
            environment = f"GLOO_SOCKET_IFNAME={shlex.quote(entry.interface)} "
            environment += f"NCCL_SOCKET_IFNAME={shlex.quote(entry.interface)} "
        argv = [
            "torchrun", f"--nnodes={len(used)}", f"--node-rank={node}",
            f"--nproc-per-node={count}", f"--master-addr={head}", f"--master-port={PORT}",
            "--max-restarts=0", "-m", "edgetrain", "rank", *words,
            "--placement", str(placement), "--run-folder", runs,
        ]  # fmt: skip
        found.append(f"# on {entry.name} ({entry.host})")
        found.append(environment + shlex.join(argv))
    return found
