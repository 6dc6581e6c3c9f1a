"""`edgetrain privacy`: compute epsilon from noise, or noise from epsilon, before training."""

from __future__ import annotations

import argparse

from edgetrain.cli import common
from edgetrain.errors import ConfigError

HELP = "epsilon of some noise, or the noise for an epsilon"
ABOUT = "Differential privacy ahead of time: what a job promises, and what a promise costs."
EXAMPLES = """\
examples:
  edgetrain privacy --noise 1.1 --rounds 1000                      what is epsilon?
  edgetrain privacy --noise 1.1 --rounds 1000 --sample-rate 0.01   each takes part in 1 of 100
  edgetrain privacy --epsilon 3 --rounds 1000 --sample-rate 0.01   which noise is needed?
  edgetrain privacy job.toml privacy=example noise=1.1             of a whole job

Noise is a multiplier: its standard deviation divided by the clip. A round is whatever releases
something about the unit: a step for examples (--sample-rate: batch / samples of the shard), a round
for members. What the figure means, and what it does not: docs/how-to/privacy.md
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    parser.add_argument("--noise", type=float, help="noise multiplier; prints epsilon")
    parser.add_argument("--epsilon", type=float, help="prints the noise multiplier it takes")
    parser.add_argument("--rounds", type=int, help="releases: steps, or rounds")
    parser.add_argument(
        "--sample-rate", type=float, default=1.0, help="chance to be in a round (default: 1)"
    )
    parser.add_argument("--delta", type=float, default=1e-5, help="(default: 1e-5)")
    parser.add_argument(
        "--accountant", choices=("pld", "rdp"), default="pld",
        help="pld is tight; rdp is what older papers report, and never less (default: pld)",
    )  # fmt: skip
    common.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    given = [arguments.noise is not None, arguments.epsilon is not None]
    if arguments.job and not any(given):
        return _of_job(arguments)
    if sum(given) != 1 or arguments.job:
        raise ConfigError(
            "what is to be found?",
            "give --noise (for epsilon) or --epsilon (for noise) with --rounds, or a job",
        )
    if arguments.rounds is None:
        raise ConfigError("--rounds is missing", "steps for examples, rounds for members")
    from edgetrain.jobs.privacy.accounting import Releases, epsilon, noise_for
    from edgetrain.jobs.privacy.promise import LITTLE

    rounds, rate, delta = arguments.rounds, arguments.sample_rate, arguments.delta
    noise = arguments.noise
    if noise is None:
        noise = noise_for(arguments.epsilon, rounds, delta, rate, arguments.accountant)
    found = epsilon(Releases(noise, rounds, rate), delta, arguments.accountant)
    text = "none: without noise there is no promise" if found is None else f"{found:.6g}"
    if found is not None and found > LITTLE:
        text += f"   very weak guarantee (epsilon > {LITTLE:g})"
    lines = [f"noise    {noise:.6g}", f"epsilon  {text}", f"delta    {delta:g}"]
    answer = {
        "noise": noise, "epsilon": found, "delta": delta, "rounds": rounds, "sample_rate": rate,
        "accountant": arguments.accountant,
    }  # fmt: skip
    return common.answer(arguments, answer, "\n".join(lines))


def _of_job(arguments: argparse.Namespace) -> int:
    from edgetrain.jobs.plan import plan
    from edgetrain.jobs.privacy.promise import said

    job, beside = common.job_of(arguments)
    if job.privacy.unit == "none":
        raise ConfigError(
            "this job has no privacy", "say privacy=example noise=1.1, or privacy=member"
        )
    promise = plan(job, beside).promise
    assert promise is not None
    found = promise.to_dict()
    what = {"example": "steps of a member", "member": "rounds"}[promise.unit]
    lines = [
        said(found),
        f"noise {promise.noise:.6g} x clip {promise.clip:g}, {promise.count} {what}"
        + (f", each {promise.unit} in {promise.rate:.3g} of them" if promise.rate < 1 else ""),
    ]
    return common.answer(arguments, found, "\n".join(lines))
