"""What does not go together in a job, and why: every such rule stands here."""

from __future__ import annotations

from collections.abc import Sequence

from edgetrain import codecs, strategies
from edgetrain.codecs import Codec
from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.jobs.job import Job, Privacy
from edgetrain.jobs.privacy.promise import PLACES, ROOM, SAMPLINGS, UNITS
from edgetrain.strategies import Strategy, merging


def _codecs(job: Job, strategy: Strategy) -> tuple[Codec, Codec]:
    """Of contributions and of replies. Momentum belongs to the gradients of the members."""
    codec = codecs.parse(job.strategy.codec)
    if codec.gradients_only and not codec.two_trips and strategy.moves_params:
        raise ConfigError(
            f"strategy.codec = '{codec.name}': {strategy.name} sends displacements, which have the "
            "optimizer's momentum in them",
            f"take '{codec.for_displacements().name}', or sync-sgd",
        )
    if codec.momentum and job.train.optimizer.get("momentum"):
        raise ConfigError(
            f"train.optimizer.momentum = {job.train.optimizer['momentum']} and the codec "
            f"'{codec.name}' would count momentum twice",
            "say optimizer.momentum=0: the codec has it, where it can be corrected",
        )
    if codec.two_trips and strategy.moves_params:
        raise ConfigError(
            f"strategy.codec = '{codec.name}': two trips a step are for gradients",
            f"take '{codec.for_displacements().name}', or sync-sgd",
        )
    if not job.strategy.reply_codec:
        return codec, codec.for_replies()
    reply_codec = codecs.parse(job.strategy.reply_codec)
    if codec.two_trips != reply_codec.two_trips:
        raise ConfigError(
            f"strategy.reply_codec = '{reply_codec.name}', strategy.codec = '{codec.name}'",
            "both trips of powersgd go both ways: leave reply_codec out",
        )
    if reply_codec.momentum:
        raise ConfigError(
            f"strategy.reply_codec = '{reply_codec.name}': members have their momentum already",
            f"take '{reply_codec.for_replies().name}'",
        )
    return codec, reply_codec


def why_not_merged(text: str, strategy: Strategy, members: int, codec: Codec) -> str:
    """What speaks against a merge rule in a job, or ""; ConfigError as `merging.parse`."""
    row, rule = merging.find(text), merging.parse(text)
    if strategy.weighted and not row.weighs:
        return (
            f"{strategy.name} weighs members by what they say they hold, and {row.name} counts "
            "each once: use local-sgd or dga, or norm-clip"
        )
    if codec.sums_only and not row.sum_only:
        return (
            f"{codec.name} adds up the factors of all members, and only a sum of them means "
            "anything: use another codec"
        )
    if codec.few_elements and row.elementwise and not row.sum_only:
        return (
            f"{codec.name} sends a few elements of each member, and {row.name} of mostly zeros is "
            "zero: use a codec that sends all of them (int8, sign), or multi-krum"
        )
    fewest = int(getattr(rule, "fewest", 1))
    if members < fewest:
        return f"it needs at least {fewest} members, the job has {members}"
    return ""


def check(job: Job) -> None:
    """ConfigError for a [privacy] table that cannot be, or cannot be in this job."""
    table = job.privacy
    _one_of("unit", table.unit, UNITS)
    _one_of("where", table.where, PLACES)
    _one_of("sampling", table.sampling, SAMPLINGS)
    if table.unit == "none":
        _refuse_idle(table)
        return
    if table.noise and table.epsilon:
        raise ConfigError(
            f"privacy.noise = {table.noise:g} and privacy.epsilon = {table.epsilon:g}: one follows "
            "from the other",
            "leave one of them out",
        )
    refused = _why_not_example(job) if table.unit == "example" else _why_not_member(job)
    if refused:
        raise ConfigError(*refused)


def _one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"privacy.{key} = '{value}'", did_you_mean(value, allowed))


def _refuse_idle(table: Privacy) -> None:
    for key in ("noise", "epsilon"):
        if getattr(table, key):
            raise ConfigError(
                f"privacy.{key} = {getattr(table, key):g} without a privacy.unit protects nothing",
                "say unit = 'example' or unit = 'member'",
            )


def refuse_checkpoint(unit: str) -> None:
    """ConfigError for a private member that would keep a checkpoint."""
    if unit != "none":
        raise ConfigError(
            "a private member keeps no checkpoint: going on from one it would release steps again, "
            "and epsilon does not count them twice",
            "leave out the checkpoint, or privacy",
        )


Refusal = tuple[str, str]
"""What does not go together, and the way out."""


def _why_not_example(job: Job) -> Refusal | None:
    """Everything after the noised gradient only works on it; so all strategies, codecs and merge
    rules may follow."""
    if job.privacy.where != "member":
        return (
            f"privacy.where = '{job.privacy.where}': examples are seen by their member only",
            "leave it out, or protect members: unit = 'member'",
        )
    return None


def _why_not_member(job: Job) -> Refusal | None:
    table = job.privacy
    strategy = strategies.find(job.strategy.name)
    if strategy.weighted:
        return (
            f"privacy with {strategy.name}: weights are what members hold, which is private, and "
            "one of a large weight moves the sum further than clip",
            "take local-sgd or dga, which count all members the same",
        )
    if codecs.parse(job.strategy.codec).two_trips:
        return (
            f"strategy.codec = '{job.strategy.codec}': its second trip depends on the gradient "
            "that was to be noised",
            "take low-rank, or a codec of one trip",
        )
    if table.where == "member":
        return _why_not_masked(job) if job.strategy.secure else None
    if job.strategy.secure:
        return (
            f"strategy.secure with privacy.where = '{table.where}': the hub sees no contribution, "
            "and cannot clip any",
            "where = 'member'",
        )
    if not merging.find(job.strategy.merge).sum_only:
        return (
            f"strategy.merge = '{job.strategy.merge}' with privacy.where = '{table.where}': nobody "
            "knows how far one member can move that rule's result",
            "merge = 'mean', or noise what members send: where = 'member'",
        )
    return _why_not_hub(job) if table.where == "hub" else _why_not_sum(job)


def _why_not_masked(job: Job) -> Refusal | None:
    """Masked elements beyond the span are cut. That spares the promise, and not the learning."""
    table, span = job.privacy, job.strategy.span
    deviation = table.noise * table.clip
    needed = table.clip + ROOM * deviation
    if not table.noise or span >= needed:
        return None
    return (
        f"strategy.span = {span:g} with noise of deviation {deviation:g}: masked elements are cut "
        f"to the span, and these reach {needed:g}",
        f"span = {needed:g}, or less noise, or a smaller clip",
    )


def _why_not_hub(job: Job) -> Refusal | None:
    spelled = job.strategy.reply_codec or job.strategy.codec
    if not codecs.parse(spelled).lossless:
        return (
            f"replies as '{spelled}' with privacy.where = 'hub': a hub that is restored merges "
            "again, with other noise, and both would get out",
            "say reply_codec = 'fp32'",
        )
    return None


def _why_not_sum(job: Job) -> Refusal | None:
    return (
        "privacy.where = 'sum': shares of noise that only add up under masks would have to be "
        "discrete noise, which is not built",
        "where = 'member' (all of the noise in each), or 'hub' (a hub that is trusted)",
    )
