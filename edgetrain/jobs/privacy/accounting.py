"""What noise and rounds spend of a privacy budget: from releases to epsilon, and back.

The accountant is Google's `dp-accounting`, and nothing is accounted by other means. It is imported
when it is used: a machine that is told the noise need not have it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from edgetrain.errors import ConfigError, require

ACCOUNTANTS = ("pld", "rdp")

TIGHT_UP_TO = 50.0
"""An epsilon above which the loose accountant's is reported: the difference is of no use, and the
privacy loss distribution of such releases fills the memory."""

CLOSE = 2e-3
"""How much less than its target an epsilon may be, as a share, when noise is searched."""

LEAST = 1e-3
"""The smallest target epsilon."""

NOISES = (1e-3, 1e6)
"""Noise multipliers are searched between these."""


@dataclass(frozen=True)
class Releases:
    """What is released about one unit (a member, or an example of one), as an accountant counts it:
    `count` Gaussian mechanisms of sensitivity 1 and standard deviation `noise`, each on a unit that
    takes part with probability `rate`."""

    noise: float
    count: int
    rate: float = 1.0


@dataclass(frozen=True)
class Promise:
    """(epsilon, delta)-differential privacy, and what it is about."""

    unit: str
    """member or example."""
    where: str
    """The machine that adds the noise: everything it sends is protected."""
    clip: float
    noise: float
    delta: float
    count: int
    """Releases: rounds for a member; steps, or passes over its shard, for an example."""
    rate: float
    """The probability that an example is in a step, or a member in a round; 1: no gain by that."""
    epsilon: float | None
    """None: there is no noise, or none worth the name, and no promise."""
    accountant: str
    noise_source: str = "the operating system's generator"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def epsilon(releases: Releases, delta: float, accountant: str = "pld") -> float | None:
    """The smallest epsilon for which the releases are (epsilon, delta)-differentially private.

    Adjacent are two data sets of which one has the unit, and the other nothing in its place. None:
    without noise there is none. Of releases without sampling the exact value is known (Balle and
    Wang, ICML 2018, theorem 8); with Poisson sampling "pld" adds up privacy loss distributions
    (Doroshenko et al., PoPETs 2022), rounded up, and "rdp" Renyi divergences (Mironov, Talwar and
    Zhang, 2019), which is never less. Raises ConfigError for values out of range.
    """
    if not 0 < delta < 1:
        raise ConfigError(f"delta = {delta:g}", "allowed is more than 0 and less than 1")
    if not 0 <= releases.rate <= 1:
        raise ConfigError(f"sample rate {releases.rate:g}", "allowed are 0 to 1")
    if not releases.noise >= 0:
        raise ConfigError(f"noise = {releases.noise:g}", "allowed are 0 and more")
    if releases.count < 0:
        raise ConfigError(f"{releases.count} rounds", "allowed are 0 and more")
    if accountant not in ACCOUNTANTS:
        raise ConfigError(f"no accountant '{accountant}'", f"known: {', '.join(ACCOUNTANTS)}")
    if releases.noise == 0 or math.isinf(releases.noise):
        return None if releases.noise == 0 else 0.0
    if releases.count == 0 or releases.rate == 0:
        return 0.0
    library = _library()
    if releases.rate == 1.0 and accountant == "pld":
        sigma = releases.noise / math.sqrt(releases.count)
        with _quietly():
            return float(library.get_epsilon_gaussian(sigma, delta))
    loose = _composed(library, "rdp", releases, delta)
    if accountant == "rdp" or loose > TIGHT_UP_TO:
        return loose
    return min(loose, _composed(library, "pld", releases, delta))


def _composed(library: Any, accountant: str, releases: Releases, delta: float) -> float:
    event = library.GaussianDpEvent(releases.noise)
    if releases.rate < 1.0:
        event = library.PoissonSampledDpEvent(releases.rate, event)
    kind = library.rdp.RdpAccountant if accountant == "rdp" else library.pld.PLDAccountant
    found = kind()
    with _quietly():
        found.compose(event, releases.count)
        return float(found.get_epsilon(delta))


def noise_for(
    target: float, count: int, delta: float, rate: float = 1.0, accountant: str = "pld"
) -> float:
    """A noise multiplier for which `epsilon` is hardly less than the target. ConfigError."""
    if not (target >= LEAST and math.isfinite(target)):
        raise ConfigError(f"epsilon = {target:g}", f"allowed are {LEAST:g} and more")

    def spent(noise: float, how: str) -> float:
        found = epsilon(Releases(noise, count, rate), delta, how)
        # Enough noise has an epsilon of 0, of which there is no logarithm.
        return math.inf if found is None else max(found, 1e-9)

    low, high = NOISES
    if spent(high, "rdp") > target:
        raise ConfigError(
            f"epsilon = {target:g} at delta = {delta:g} would take a noise above {high:g}",
            "ask for a larger epsilon, or train for fewer steps",
        )
    # The loose accountant is quick, and never below the tight one: it says where to look.
    while high / low > 1.002:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle, "rdp") <= target else (middle, high)
    return high if accountant == "rdp" else _tighter(lambda n: spent(n, accountant), target, high)


def _tighter(spent: Callable[[float], float], target: float, enough: float) -> float:
    """The least noise that is enough, to CLOSE in epsilon: regula falsi between logarithms, where
    epsilon is nearly a straight line, as each look costs a second."""
    high, above = enough, math.log(spent(enough) / target)
    low, below = 0.0, 0.0
    while above < -CLOSE:
        if not below:
            noise = high * math.exp(1.1 * above)
        else:
            share = above / (above - below)
            # A little to the side that is enough, so that it ends there.
            noise = high * (low / high) ** (share * 0.98)
        found = math.log(spent(noise) / target)
        if found <= 0:
            high, above = noise, found
        else:
            low, below = noise, found
        if low and high / low < 1 + CLOSE / 4:
            break
    return high


def _library() -> Any:
    require("the privacy accountant", "private", "dp_accounting")
    with _quietly():
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    return dp_accounting


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """It warns of Renyi orders that it leaves out, which makes its answer no smaller; and of
    divergences that are 0."""
    import numpy as np

    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with np.errstate(divide="ignore"):
            yield
    finally:
        log.setLevel(before)
