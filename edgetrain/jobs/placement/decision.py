"""Where a job runs, and why: its devices, or a group of processes on servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from edgetrain.errors import ConfigError, refuse_first
from edgetrain.jobs.placement.bars import refuse
from edgetrain.jobs.placement.formulas import Kept, bubble, edge_bytes
from edgetrain.jobs.placement.machines import Servers
from edgetrain.jobs.placement.search import Found, TooLarge, Work, evaluate, kind_of, search
from edgetrain.jobs.placement.words import EDGE, Placement, parse
from edgetrain.tasks.layers import Model

SHOWN = 3
"""Kinds of placement that lack memory, each told with what it needs."""


@dataclass(frozen=True)
class Board:
    """A kind of device: what a process can have of its memory, and seconds of a step there."""

    name: str
    usable_bytes: float
    seconds: float | None
    """Seconds of the whole fleet's step with its exchange; None: no speed in the profile."""


@dataclass(frozen=True)
class Question:
    """All that decides where a job runs."""

    model: Model
    work: Work
    strategy: str
    kept_on_edge: str
    """A key of formulas.EDGE_BYTES."""
    boards: tuple[Board, ...]
    """Boards of the fleet, each kind once."""
    others: tuple[Board, ...]
    """Other boards of the catalog."""
    placement: str = "auto"
    fallback: str = "never"
    servers: Servers | None = None
    edge_problem: str = ""
    """What else keeps the job from its devices."""
    group_problem: str = ""
    """What keeps the job from servers."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edge:
    """What the fleet's own devices make of the job."""

    needs_bytes: float
    board: Board
    """The one with the least memory."""
    seconds: float | None
    problem: str
    """Why not; "": they hold it."""


@dataclass(frozen=True)
class Decision:
    """Where the job runs, the alternatives in order, and why each other place was refused."""

    chosen: str
    """"edge", a placement's words, or "" where it fits nowhere."""
    why: str
    edge: Edge
    found: tuple[Found, ...] = ()
    """The fastest placement of each kind; the chosen one first, if it is one of them."""
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def placement(self) -> Placement | None:
        """Placement of the group; None: the job runs on devices, or nowhere."""
        if not self.chosen or self.chosen == EDGE:
            return None
        return self.found[0].placement


def _unknown(placement: Placement) -> str:
    """Nothing is in the way of a placement that nobody tries."""
    return ""


def decide(question: Question, try_out: Callable[[Placement], str] = _unknown) -> Decision:
    """Decide. `try_out` says why a placement cannot be built, or "": what comes first has been
    tried. ConfigError for a placement in words that these servers cannot have."""
    model, work = question.model, question.work
    activations = model.saved_bytes * work.batch
    needs = edge_bytes(model.parameters, question.kept_on_edge, work.kept.slots, activations)
    board = min(question.boards, key=lambda each: each.usable_bytes)
    seconds = [each.seconds for each in question.boards]
    known = [each for each in seconds if each is not None]
    slowest = max(known) if len(known) == len(seconds) else None
    problem = question.edge_problem
    if needs > board.usable_bytes:
        problem = (
            f"needs {_gb(needs)} a member, {board.name} has {_gb(board.usable_bytes)}"
            f"{_nearest(question.others, needs)}"
        )
    edge = Edge(needs, board, slowest, problem)
    words = question.placement
    if words not in ("auto", EDGE):
        return _as_told(question, edge, parse(words), try_out)
    found, refused = _group(question, try_out)
    needed, faster = question.fallback == "when-needed", question.fallback == "when-faster"
    if words == EDGE or not (needed or faster):
        refused = [*_offer(found, words), *refused]
        chosen = "" if edge.problem else EDGE
        why = edge.problem or "the devices hold it, and the job does not ask for servers"
        return Decision(chosen, why, edge, tuple(found), tuple(refused), question.notes)
    best = found[0] if found else None
    if edge.problem:
        why = edge.problem if best else "; ".join((edge.problem, *refused[:1]))
        chosen = str(best.placement) if best else ""
        return Decision(chosen, why, edge, tuple(found), tuple(refused), question.notes)
    if faster and best and edge.seconds is not None and best.seconds < edge.seconds:
        why = f"a step takes {_s(best.seconds)} there and {_s(edge.seconds)} on the devices"
        chosen = str(best.placement)
        return Decision(chosen, why, edge, tuple(found), tuple(refused), question.notes)
    why = "the devices hold it" if needed else "the devices hold it, and servers are not faster"
    return Decision(EDGE, why, edge, tuple(found), tuple(refused), question.notes)


def _nearest(others: tuple[Board, ...], needs: float) -> str:
    room = [each for each in others if each.usable_bytes >= needs]
    if not room:
        return "; no device of the catalog holds it"
    best = min(room, key=lambda each: each.usable_bytes)
    step = "" if best.seconds is None else f", at {_s(best.seconds)} a step"
    return f"; {best.name} would hold it{step}"


def _group(
    question: Question, try_out: Callable[[Placement], str]
) -> tuple[list[Found], list[str]]:
    if question.group_problem:
        return [], [f"servers: {question.group_problem}"]
    if question.servers is None:
        return [], [
            "servers: the job names none (servers.cluster = a cluster.toml with [[server]] tables)"
        ]
    found, refused = search(question.model, question.servers, question.work)
    said = _nearest_first(refused)
    while found and (reason := try_out(found[0].placement)):
        said.insert(0, f"{found[0].placement}: {reason}")
        first = found.pop(0).placement
        plain = replace(first, schedule=Placement.schedule, stages=1, cuts=())
        if first.all_stages > first.pipeline:  # the same kind, without a schedule of its own
            other = evaluate(question.model, question.servers, question.work, plain)
            found += [other] if isinstance(other, Found) else []
            found.sort(key=lambda each: each.seconds)
    return found, said


def _said(refused: TooLarge) -> str:
    return (
        f"{refused.kind}: needs {_gb(refused.needs_bytes)} on a rank, which has "
        f"{_gb(refused.usable_bytes)}"
    )


def _nearest_first(refused: list[TooLarge]) -> list[str]:
    """A line for each of the kinds that lack least memory, and one for all others."""
    refused = sorted(refused, key=lambda each: each.needs_bytes / each.usable_bytes)
    said, others = [_said(each) for each in refused[:SHOWN]], refused[SHOWN:]
    if others:
        most = max(each.needs_bytes for each in others)
        said.append(f"{len(others)} other kinds: need up to {_gb(most)} on a rank")
    return said


def _offer(found: list[Found], words: str) -> list[str]:
    if not found:
        return []
    asked = "servers.placement = 'edge'" if words == EDGE else "servers.fallback = 'never'"
    best = found[0]
    return [f"servers: {asked}; {best.placement} would take {_s(best.seconds)} a step"]


def _as_told(
    question: Question, edge: Edge, placement: Placement, try_out: Callable[[Placement], str]
) -> Decision:
    """The job runs as its words say, or nowhere."""
    if question.group_problem:
        return Decision("", f"servers: {question.group_problem}", edge, notes=question.notes)
    servers = question.servers
    if servers is None:
        return Decision("", _group(question, try_out)[1][0], edge, notes=question.notes)
    check(placement, question.model, servers, question.work)
    result = evaluate(question.model, servers, question.work, placement)
    problem = _said(result) if isinstance(result, TooLarge) else try_out(result.placement)
    others, refused = _group(question, try_out if problem else _unknown)
    if isinstance(result, TooLarge) or problem:
        why = f"{placement}: {problem}"
        if others:
            why += f"; {others[0].placement} {'fits' if isinstance(result, TooLarge) else 'runs'}"
        return Decision("", why, edge, tuple(others), tuple(refused), question.notes)
    rest = [each for each in others if kind_of(each.placement) != kind_of(result.placement)]
    found, notes = (result, *rest), (*question.notes, *_idle(result.placement, question.work))
    why = "servers.placement says so"
    return Decision(str(result.placement), why, edge, found, tuple(refused), notes)


def _idle(placement: Placement, work: Work) -> list[str]:
    stages, parts = placement.pipeline, placement.microbatches * work.accumulate
    if parts >= stages:
        return []
    idle, least = (bubble(stages, each, placement.stages) for each in (parts, 4 * stages))
    return [
        f"{parts} micro-batches for {stages} stages: ranks are idle for {idle:.0%} of a step "
        f"({least:.0%} with microbatches={4 * stages})"
    ]


def check(placement: Placement, model: Model, servers: Servers, work: Work) -> None:
    """ConfigError for a placement that these servers, this model or this batch cannot have, with
    both numbers and the nearest that works."""
    refuse(placement, work.bars)
    layers, width = len(model.layers), placement.width
    if placement.ranks > servers.ranks:
        raise ConfigError(
            f"placement: {placement} is {placement.ranks} ranks, the servers have {servers.ranks}",
            f"{_shorter(placement, model, servers, work)}, or more servers",
        )
    cut = placement.cuts[-1] if placement.cuts else 0
    again = placement.recompute[-1] if isinstance(placement.recompute, tuple) else 0
    data, micro, tensor = placement.data, placement.microbatches, placement.tensor
    samples = work.members // data * work.batch
    refuse_first(
        (placement.all_stages > layers,
         f"placement: {placement.all_stages} stages of a model with {layers} layers",
         f"at most {layers}"),
        (cut >= layers, f"placement: a cut at {cut} of {layers} layers", ""),
        (again >= layers, f"placement: recompute={again} of a model with {layers} layers",
         f"0 to {layers - 1}"),
        (work.members % data, f"placement: data={data} does not divide the job's {work.members} "
         "members, whose batches its ranks share", f"data={_below(data, work.members)}"),
        (samples % micro, f"placement: microbatches={micro} of a rank's {samples} samples",
         f"microbatches={_below(micro, samples)}"),
        (tensor > 1 and not model.heads, f"placement: tensor={tensor}, and the model does not say "
         "how its layers are divided", "a model's tensor_plan does; or leave tensor out"),
        (tensor > 1 and not model.is_divided, f"placement: tensor={tensor}, and no name of a layer "
         "matches a pattern of the model's tensor_plan", "other patterns, or leave tensor out"),
        (model.heads % tensor,
         f"placement: tensor={tensor} does not divide the model's {model.heads} heads",
         f"tensor={_below(tensor, model.heads)}"),
    )  # fmt: skip
    _check_sequence(placement, model)
    count, experts = placement.experts, model.experts
    word = "norms=split" if placement.sequence == 1 else f"sequence={placement.sequence}"
    refuse_first(
        (count > 1 and not experts, f"placement: experts={count}, and the model has no experts",
         "leave experts out"),
        (experts % count, f"placement: experts={count} does not divide the model's {experts} "
         "experts", f"experts={_below(count, experts, placement.data)}"),
        (experts and (placement.sequence > 1 or placement.norms == "split"), f"placement: {word}, "
         f"and the model has {experts} experts, which take whole sequences",
         f"leave {word.partition('=')[0]} out"),
    )  # fmt: skip
    most = max(server.accelerators for server in servers.servers)
    if placement.pipeline > 1 and width > most:
        raise ConfigError(
            f"placement: a stage of {width} ranks, and no server has more than {most}",
            "fewer data, sequence or tensor ranks, or a longer pipeline",
        )


def _shorter(placement: Placement, model: Model, servers: Servers, work: Work) -> str:
    """The axis, in words, that has to be shorter and how long it may be, for the most ranks that
    work."""
    found = []
    for order, axis in enumerate(("tensor", "sequence", "pipeline", "data")):
        for size in range(getattr(placement, axis) - 1, 0, -1):
            change: dict[str, Any] = {axis: size}
            nearest = replace(placement, **change)
            if nearest.ranks <= servers.ranks and _works(nearest, model, servers, work):
                found.append((nearest.ranks, order, f"{axis}={size}"))
                break
    return max(found)[2] if found else "fewer ranks"


def _works(placement: Placement, model: Model, servers: Servers, work: Work) -> bool:
    try:
        placement.check()
        check(placement, model, servers, work)
    except ConfigError:
        return False
    return True


def _below(count: int, *wholes: int) -> int:
    return max((n for n in range(1, count) if not any(whole % n for whole in wholes)), default=1)


def _check_sequence(placement: Placement, model: Model) -> None:
    count, ulysses, heads = placement.sequence, placement.ulysses, model.heads // placement.tensor
    if count == 1:
        return
    refuse_first(
        (not model.length, f"placement: sequence={count}, and the model never calls "
         "scaled_dot_product_attention", "leave sequence out"),
        (not model.knows_place, f"placement: sequence={count}, and the model cannot be told which "
         "positions it sees",
         "a module with `first_place`, or the input position_ids (docs/how-to/gpu-servers.md)"),
        (model.length % count,
         f"placement: sequence={count} does not divide the {model.length} positions of a sample",
         f"sequence={_below(count, model.length)}"),
        (heads % ulysses,
         f"placement: ulysses={ulysses} does not divide the {heads} heads of a rank",
         f"ulysses={_below(ulysses, heads)}"),
    )  # fmt: skip


def kept_by(precision: str, slots: int, copied: bool = False) -> Kept:
    """What a rank keeps of each parameter. `copied`: snapshots are copies in its own memory."""
    return Kept(2.0 if precision == "bf16" else 4.0, slots, copied)


def _gb(count: float) -> str:
    return f"{count / 1e9:.3g} GB"


def _s(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s"
