"""Plan again: with the servers that are left, or with less memory than the last placement took."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.jobs.placement.decision import Question, check
from edgetrain.jobs.placement.machines import Servers
from edgetrain.jobs.placement.search import Found, Work, evaluate, search
from edgetrain.jobs.placement.words import EDGE, Placement, parse


@dataclass(frozen=True)
class Placed:
    """A placement, and the ranks that each server runs, by the server's place in the cluster."""

    found: Found
    ranks: dict[int, tuple[int, ...]]


def ranks_of(found: Found, servers: Servers) -> dict[int, tuple[int, ...]]:
    """The ranks of each server that a placement uses, in order; `found.servers` are its places."""
    width = found.placement.width
    ranks: dict[int, list[int]] = {}
    for stage, first in enumerate(found.servers):
        left, server = list(range(stage * width, (stage + 1) * width)), first
        while left:
            # A stage that is wider than a server takes the next ones whole.
            most = max(1, servers.servers[server].accelerators)
            count = len(left) if most >= width else min(most, len(left))
            ranks.setdefault(server, []).extend(left[:count])
            left, server = left[count:], server + 1
    return {server: tuple(each) for server, each in ranks.items()}


def place_again(
    question: Question, lost: Collection[int] = (), below_bytes: float = math.inf
) -> Placed | None:
    """The placement without the servers `lost`, whose ranks all take less than `below_bytes`.

    The job's own words, where they can still be had; else the fastest that fits. None: nothing.
    """
    assert question.servers is not None
    kept = [at for at in range(len(question.servers.servers)) if at not in lost]
    if not kept:
        return None
    servers = replace(question.servers, servers=tuple(question.servers.servers[at] for at in kept))
    fitting = [f for f in _candidates(question, servers) if max(f.bytes) < below_bytes]
    if not fitting:
        return None
    best = fitting[0]
    ranks = {kept[server]: each for server, each in ranks_of(best, servers).items()}
    moved = replace(best, servers=tuple(kept[server] for server in best.servers))
    return Placed(moved, ranks)


def nearest(question: Question, placement: Placement) -> Iterator[Found]:
    """Placements with one word less that the job could have instead, those of most ranks first."""
    plain = Placement()
    stages: dict[str, Any] = {"schedule": plain.schedule, "stages": 1, "cuts": ()}
    shard: dict[str, Any] = {"shard": 1, "zero": 0, "experts": 1}
    changes: list[dict[str, Any]] = [
        {"microbatches": 1}, {"recompute": False}, {"norms": "whole"}, stages, {"zero": 2}, shard,
        {"ulysses": 1}, {"tensor": 1, "norms": "whole"}, {"sequence": 1, "ulysses": 1},
        {"pipeline": 1, **stages}, {"data": 1, **shard},
    ]  # fmt: skip
    others = {str(each): each for each in (replace(placement, **c) for c in changes)}
    others.pop(str(placement), None)
    for other in sorted(others.values(), key=lambda each: -each.ranks):
        try:
            assert question.servers is not None
            other.check()
            check(other, question.model, question.servers, question.work)
        except ConfigError:
            continue
        found = evaluate(question.model, question.servers, question.work, other)
        if isinstance(found, Found):
            yield found


def _candidates(question: Question, servers: Servers) -> Sequence[Found]:
    """As the words say, then all kinds by their seconds, each also in ways that keep less."""
    model, work, found = question.model, question.work, []
    if question.placement not in ("auto", EDGE):
        words = parse(question.placement)
        try:
            check(words, model, servers, work)
            found.append(evaluate(model, servers, work, words))
        except ConfigError:
            pass  # not with these servers
    others, _ = search(model, servers, work)
    leaner = [
        evaluate(model, servers, work, each)
        for other in others
        for each in _leaner(other.placement, work)
    ]
    fit = [each for each in (*others, *leaner) if isinstance(each, Found)]
    fit.sort(key=lambda each: each.seconds)
    return [each for each in (*found, *fit) if isinstance(each, Found)]


def _leaner(placement: Placement, work: Work) -> Iterator[Placement]:
    """The same with more micro-batches, with recomputation, and with both."""
    samples = work.members // placement.data * work.batch
    for parts in range(placement.microbatches, samples + 1):
        if samples % parts or (placement.schedule == "interleaved" and parts % placement.pipeline):
            continue
        for again in (placement.recompute, True):
            yield replace(placement, microbatches=parts, recompute=again)
