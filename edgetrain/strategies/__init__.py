"""Strategies: a member's half, a merge rule and an outer rule make a name in the table.

The table is data; the halves are pure (no socket, no clock, no thread, no codec). This module
imports neither torch nor numpy until a half is built, so that the command line can list the table
at once.

To add a strategy, write its half (`half.MemberHalf`) in a file of its own, a function here that
builds it, and a row.

Doors: arrivals, closing, cohort, factored, half, lbfgs, merging, merging.private, merging.rule,
outer, outer_rules, spelling.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgetrain import extensions
from edgetrain.errors import ConfigError, did_you_mean, refuse_first
from edgetrain.strategies.spelling import Parameter as Parameter
from edgetrain.strategies.spelling import arguments_of, spelled, split

if TYPE_CHECKING:
    from edgetrain.strategies.arrivals import ArrivalRule, ArrivalTerms
    from edgetrain.strategies.drift import Drift
    from edgetrain.strategies.factored import Factors
    from edgetrain.strategies.half import Contributes, MemberHalf
    from edgetrain.strategies.lbfgs import Lbfgs
    from edgetrain.strategies.merging.rule import RoundRule, SliceRule
    from edgetrain.strategies.outer_rules import OuterRule
    from edgetrain.vectors.pool import VectorPool
    from edgetrain.vectors.vector import Vector


VARIATES = "variates"
"""The correction that acts on gradients, before the optimizer (`variates.py`)."""


@dataclass(frozen=True)
class Setting:
    """The vectors and numbers that a member's half works on."""

    params: Vector
    """The model's flat parameters, float32 [elements]. Shared with the model. With variates as many
    elements more behind them, which are not the model's."""
    gradient: Vector
    """The model's flat gradient, float32 [elements]. Shared with the model."""
    local_steps: int
    delay: int
    memory: VectorPool | None = None
    """Pool in which contributions are made; None: the half makes its own vectors."""
    factors: Factors | None = None
    """Factors by which gradients are averaged in two trips; None: in one."""
    momentum: float = 0.0
    """Momentum of the member's optimizer; 0: it has none."""
    members: int = 1
    """Members that the job starts with."""
    hides_first: bool = False
    """Whether no reply is waited for at the beginning: `codec = "auto"` measures links by trips."""
    correction: str = ""
    """One of the row's corrections; `member_half` fills it in."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A row of the table: the properties of a strategy.

    `find` gives a row with its arguments. Modules outside `edgetrain.strategies` never compare a
    strategy's name, or `contributes`: they read the property they depend on. The defaults are those
    of strategies with displacements.
    """

    name: str
    summary: str
    source: str
    build: Callable[..., MemberHalf]
    """Makes a new half from a Setting, and from the arguments, if there are parameters."""
    parameters: tuple[Parameter, ...] = ()
    arguments: tuple[float, ...] = ()
    """Values of the parameters; () in the table."""
    corrections: tuple[str, ...] = ()
    """Possible stand-ins for a round in flight, the default first; (): none."""
    correction: str = ""
    """The chosen stand-in."""
    outer: str = ""
    """The hub's optimizer for the merged contribution, spelled as in `outer`; "": none."""
    local_steps: int = 5
    """Default number of local steps in a round."""
    delays: bool = False
    """Whether replies may be delayed; otherwise `delay` is 0."""
    weighted: bool = False
    """Whether members count by their samples; otherwise all count the same."""
    contributes: Contributes = "displacement"
    """A word for people (`edgetrain strategies`). Ask for one of the properties below instead."""
    moves_params: bool = True
    """Whether a reply moves the parameters. Otherwise contributions are gradients, and the reply
    takes the gradient's place before the optimizer's step. The half says it, too."""
    hub_keeps_base: bool = True
    """Whether the hub keeps the base, and can send it to a member. Otherwise a member's checkpoint
    has it."""
    allows_late_join: bool = True
    """Whether a member may join after the start, or come back without its state."""
    has_local_steps: bool = True
    """Whether members take several steps between two exchanges: `local_steps`."""
    keeps_late: bool = True
    """Whether a contribution to a closed round goes into the next open one; otherwise it is
    dropped."""
    has_variates: bool = False
    """Whether contributions have members' mean gradients behind their displacements, to correct the
    gradients of their optimizers (`variates`)."""
    is_synchronous: bool = True
    """Whether a round has one contribution of each member, and its reply answers these. Otherwise
    contributions are merged as they arrive (`arrivals`), and members apply arrived replies
    (`out_of_step`)."""
    closing: Callable[..., ArrivalRule] | None = None
    """Asynchronous strategies: makes the rule that closes rounds, see `closing_rule`."""
    deals: bool = False
    """Whether the hub hands out slices of a batch held by all members, and moves the base by their
    results; members take no steps of their own."""
    adjusts_gradient: bool = False
    """Whether `before_step` reads or changes the gradient: the batched simulator must not step rows
    before it has."""

    @property
    def ranges(self) -> int:
        """Ranges of the parameters, exchanged in turn: the argument P; 1: every round exchanges
        all of them."""
        return self.argument("P", 1)

    def argument(self, name: str, default: int = 0) -> int:
        """The whole number given as this argument; `default`: it has none."""
        named = zip(self.parameters, self.arguments, strict=False)
        return next((int(value) for parameter, value in named if parameter.name == name), default)

    def wants_one_in_flight(self, stay_together: bool) -> bool:
        """Whether it learns more with one round in flight, as long as the delay. `stay_together`:
        members' data are known to be similar."""
        if self.correction == "auto":
            return not stay_together
        return self.correction in ("predict", "eager")

    @property
    def learns_from_replies(self) -> bool:
        """Whether members compare replies with their own contributions. With privacy of members
        they would compare the noise."""
        return self.correction in ("predict", "decay", "eager") or self.has_variates

    def without_choice(self) -> Strategy:
        """This strategy for replies without information about members' data: `auto` becomes the
        plain correction."""
        return replace(self, correction="paper") if self.correction == "auto" else self

    def closing_rule(self, terms: ArrivalTerms) -> ArrivalRule:
        """The hub's rule for closing rounds, of an asynchronous strategy."""
        assert self.closing is not None
        return self.closing(terms, *self.arguments)

    def search(self) -> Lbfgs:
        """A new search for a hub with slices: it moves the base."""
        from edgetrain.strategies.lbfgs import Lbfgs

        assert self.deals
        return Lbfgs(self.argument("history"), _SEARCHES[self.argument("search")])

    def merge_rule(self, text: str = "mean") -> SliceRule | RoundRule:
        """A fresh merge rule for the hub, as `merging` spells them; ConfigError."""
        from edgetrain.strategies import merging

        if not self.is_synchronous and text.strip() == "mean":
            return merging.sum_rule()
        return merging.parse(text, keeps_late=self.keeps_late)

    def outer_rule(self) -> OuterRule | None:
        """A fresh outer rule for the hub; None: replies are merged contributions as they are."""
        if not self.outer:
            return None
        from edgetrain.strategies import outer

        return outer.parse(self.outer)

    @property
    def spelling(self) -> str:
        """Spelling in a job, with the names of its parameters: "fedprox(mu)"."""
        return spelled(self.name, [parameter.name for parameter in self.parameters])

    @property
    def spelled(self) -> str:
        """With its arguments, but for defaults at the end: "fedprox(0.01)", "fedavg | momentum(1,
        0.9)", "dga | weighed". `find(strategy.spelled)` gives an equal strategy; so it travels in
        `Welcome.strategy`."""
        words = [self.correction] if self.correction not in ("", *self.corrections[:1]) else []
        row = row_of(self.name)
        pairs = [*zip(self.parameters, self.arguments, strict=False)]
        while pairs and not words and pairs[-1][0].default == pairs[-1][1]:
            pairs.pop()
        values = [parameter.spell(value) for parameter, value in pairs]
        parts = [spelled(self.name, [*values, *words])]
        parts += [self.outer] * (self.outer != row.outer)
        parts += [WEIGHED[self.weighted]] * (self.weighted != row.weighted)
        return " | ".join(parts)

    def corrected(self, correction: str) -> Strategy:
        """This strategy with another correction; ConfigError for one that it does not have."""
        if correction in self.corrections:
            corrects = correction == VARIATES
            found = replace(
                self, correction=correction, adjusts_gradient=corrects, has_variates=corrects
            )
            return found.stepped(self.outer) if corrects and self.outer else found
        if not self.corrections:
            raise ConfigError(
                f"{self.name}: correction = {correction}: there is no delay to correct",
                "leave it out, or choose dga",
            )
        raise ConfigError(
            f"{self.name}: correction = {correction}", did_you_mean(correction, self.corrections)
        )

    def stepped(self, text: str) -> Strategy:
        """This strategy with another outer rule, as `outer` spells it; ConfigError."""
        from edgetrain.strategies import outer

        what = f"{self.name}: outer = {text}"
        refuse_first(
            (not self.moves_params, f"{what}: its replies are gradients, and each member's own "
             "optimizer steps on them", "leave it out, or choose diloco or fedavg"),
            (self.deals, f"{what}: the hub moves the base by a search of its own",
             "leave it out, or choose diloco or fedavg"),
            (self.has_variates, f"{what}: members compare their contributions with the mean, and "
             "would get a step on it", "leave it out, or choose fedavg"),
        )  # fmt: skip
        return replace(self, outer=outer.parse(text).spelled)

    def member_half(self, setting: Setting) -> MemberHalf:
        """A fresh member's half over a model's flat parameters and gradient (both shared)."""
        return self.build(replace(setting, correction=self.correction), *self.arguments)


def _gradient(setting: Setting) -> MemberHalf:
    from edgetrain.strategies.factored import Factored
    from edgetrain.strategies.gradient import Gradient

    params, gradient, memory = setting.params, setting.gradient, setting.memory
    if setting.factors is None:
        return Gradient(params, gradient, memory)
    return Factored(params, gradient, setting.factors, memory)


def _correction(setting: Setting, word: str) -> Drift | None:
    """What stands for rounds in flight with this correction; None: own progress."""
    from edgetrain.strategies.choice import FirstRounds
    from edgetrain.strategies.drift import Drift
    from edgetrain.strategies.eager import Eager
    from edgetrain.strategies.leaving import Leaving

    size, momentum, choice = setting.params.size, setting.momentum, None
    if word == "auto":  # plain SGD takes rates at which own swings up within the first rounds
        word, choice = "predict" if momentum else "decay", FirstRounds(size)
    if word == "eager":
        return Eager(size, setting.members)
    rule = {"predict": Drift, "decay": Leaving}.get(word)
    drift = rule and rule(size, momentum, choice, functools.partial(_correction, setting))
    if drift is not None and setting.hides_first:
        drift.waits = 0
    return drift


def _displacement(setting: Setting) -> MemberHalf:
    from edgetrain.strategies.displacement import Displacement

    if setting.correction == VARIATES:
        return _variates(setting)
    drift = _correction(setting, setting.correction)
    return Displacement(setting.params, setting.local_steps, setting.delay, setting.memory, drift)


def _uncorrected(setting: Setting) -> MemberHalf:
    from edgetrain.strategies.uncorrected import Uncorrected

    return Uncorrected(setting.params, setting.local_steps, setting.delay, setting.memory)


def _fedprox(setting: Setting, mu: float) -> MemberHalf:
    from edgetrain.strategies.fedprox import FedProx

    return FedProx(setting.params, setting.gradient, mu, setting.local_steps, setting.memory)


def _variates(setting: Setting) -> MemberHalf:
    from edgetrain.strategies.variates import Variates

    params, gradient, memory = setting.params, setting.gradient, setting.memory
    return Variates(params, gradient, setting.local_steps, setting.delay, memory)


def _streaming(setting: Setting, count: float, alpha: float) -> MemberHalf:
    from edgetrain.strategies.streaming import Streaming

    return Streaming(setting.params, int(count), alpha, setting.local_steps, setting.delay)


def _at_base(setting: Setting, *arguments: float) -> MemberHalf:
    from edgetrain.strategies.at_base import AtBase

    return AtBase(setting.params, setting.gradient, setting.memory)


def _out_of_step(setting: Setting, lead: float = math.inf, fetch: float = 0) -> MemberHalf:
    from edgetrain.strategies.out_of_step import OutOfStep

    return OutOfStep(
        setting.params,
        setting.local_steps,
        setting.delay,
        setting.memory,
        lead=lead,
        fetch=int(fetch),
        stands_in=setting.correction == "own",
    )


def _fedbuff(setting: Setting, most: float, exponent: float) -> MemberHalf:
    return _out_of_step(setting)


def _downpour(setting: Setting, fetch: float) -> MemberHalf:
    return _out_of_step(setting, fetch=fetch)


def _buffered(pace: ArrivalTerms, most: float, exponent: float) -> ArrivalRule:
    from edgetrain.strategies.arrivals import Buffered

    return Buffered(int(most), exponent, pace.deadline_s)


def _bounded(pace: ArrivalTerms, lead: float) -> ArrivalRule:
    from edgetrain.strategies.arrivals import Bounded

    return Bounded(lead, pace.members)


def _summed(pace: ArrivalTerms, fetch: float) -> ArrivalRule:
    from edgetrain.strategies.arrivals import Summed

    arrivals = math.ceil(pace.members * fetch / pace.local_steps)
    return Summed(min(max(1, arrivals), pace.members), deadline_s=pace.deadline_s)


_SEARCHES = ("armijo", "wolfe")

_ROWS = (
    Strategy(
        name="sync-sgd",
        build=_gradient,
        summary="average gradients every step and wait for the mean: what DDP does",
        source="Li et al., PyTorch Distributed, VLDB 2020",
        local_steps=1,
        contributes="gradient",
        moves_params=False,
        hub_keeps_base=False,
        allows_late_join=False,
        has_local_steps=False,
        keeps_late=False,
        adjusts_gradient=True,
    ),
    Strategy(
        name="local-sgd",
        build=_displacement,
        summary="K local steps, then wait for the mean of all members",
        source="Stich, Local SGD Converges Fast, ICLR 2019",
    ),
    Strategy(
        name="fedavg",
        build=_displacement,
        summary="local-sgd with members weighted by the samples they hold",
        source="McMahan et al., AISTATS 2017",
        weighted=True,
    ),
    Strategy(
        name="fedprox",
        build=_fedprox,
        parameters=(Parameter("mu", 0.0, 1000.0),),
        summary="fedavg whose local steps are held near the round's start, for unequal data",
        source="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
        weighted=True,
        adjusts_gradient=True,
    ),
    Strategy(
        name="scaffold",
        build=_variates,
        summary="fedavg whose gradients lead where the fleet's do, by control variates, for "
        "unequal data",
        source="Karimireddy et al., SCAFFOLD, ICML 2020, option II",
        weighted=True,
        has_variates=True,
        adjusts_gradient=True,
    ),
    Strategy(
        name="diloco",
        build=_displacement,
        summary="local-sgd with long rounds, whose mean the hub takes as a step with momentum",
        source="Douillard et al., DiLoCo, 2023, algorithm 1",
        outer="nesterov(0.7, 0.9)",
        local_steps=20,
    ),
    Strategy(
        name="eager",
        build=_displacement,
        summary="diloco that goes on while the mean travels: the last one stands in, own part new",
        source="Kale et al., Eager Updates for Overlapped Communication and Computation in DiLoCo, "
        "2025",
        corrections=("eager",),
        correction="eager",
        outer="nesterov(0.7, 0.9)",
        local_steps=20,
        delays=True,
    ),
    Strategy(
        name="fedavgm",
        build=_displacement,
        summary="fedavg with momentum at the hub, for unequal data",
        source="Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019, "
        "section 4.2",
        outer="momentum(1, 0.9)",
        weighted=True,
    ),
    *(
        Strategy(
            name=f"fed{rule}",
            build=_displacement,
            summary=f"fedavg with {rule.capitalize()} at the hub",
            source="Reddi et al., Adaptive Federated Optimization, ICLR 2021, algorithm 2",
            outer=outer,
            weighted=True,
        )
        for rule, outer in (
            ("adam", "adam(0.03, 0.9, 0.99, 0.001)"),
            ("yogi", "yogi(0.03, 0.9, 0.99, 0.001)"),
            ("adagrad", "adagrad(0.03, 0.001)"),
        )
    ),
    Strategy(
        name="dga",
        build=_displacement,
        summary="K local steps, go on for D more while the mean travels, then correct",
        source="Zhu et al., NeurIPS 2021; dga(predict): docs/explanation/dga.md",
        corrections=("auto", "paper", "predict", "decay", VARIATES),
        correction="auto",
        delays=True,
    ),
    Strategy(
        name="dga-uncorrected",
        build=_uncorrected,
        summary="an ablation, not for training: dga without its correction term, so a stale mean "
        "is all",
        source="Zhu et al., Delayed Gradient Averaging, NeurIPS 2021, what the correction is "
        "measured by",
        delays=True,
    ),
    Strategy(
        name="streaming-diloco",
        build=_streaming,
        parameters=(Parameter("P", 1), Parameter("alpha", 0.0, 1.0)),
        summary="K local steps, in which P fragments of the model are exchanged one after the "
        "other, each mixed in D steps later",
        source="Douillard et al., Streaming DiLoCo, 2025",
        outer="nesterov(0.7, 0.9)",
        local_steps=20,
        delays=True,
    ),
    Strategy(
        name="fedbuff",
        build=_fedbuff,
        closing=_buffered,
        parameters=(Parameter("M", 1, most_members=True), Parameter("a", 0.0, 100.0)),
        summary="K local steps and on without waiting: each M arrivals make a reply, old ones "
        "count less, by (1 + age)^-a",
        source="Nguyen et al., Buffered Asynchronous Aggregation, AISTATS 2022",
        corrections=("own", "none"),
        correction="own",
        delays=True,
        is_synchronous=False,
    ),
    Strategy(
        name="ssp",
        build=_out_of_step,
        closing=_bounded,
        parameters=(Parameter("s", 0, may_be_inf=True),),
        summary="K local steps, at most s rounds ahead of the slowest; 0 waits for all, inf for "
        "nobody",
        source="Ho et al., Stale Synchronous Parallel, NeurIPS 2013; Li et al., OSDI 2014",
        corrections=("own", "none"),
        correction="own",
        delays=True,
        is_synchronous=False,
    ),
    Strategy(
        name="async-sgd",
        build=_downpour,
        closing=_summed,
        parameters=(Parameter("fetch", 1),),
        summary="push every K steps, in full, and take what has come every `fetch` steps "
        "(Downpour)",
        source="Dean et al., Large Scale Distributed Deep Networks, NIPS 2012",
        outer="adagrad(0.03, 0.001)",
        corrections=("own", "none"),
        correction="own",
        delays=True,
        is_synchronous=False,
    ),
    Strategy(
        name="lbfgs",
        build=_at_base,
        parameters=(
            Parameter("history", 1, default=10),
            Parameter("slices", 1, default=8),
            Parameter("batch", 1, default=0, words=("all",)),
            Parameter("copies", 0, default=1),
            Parameter("search", 0, default=0, words=_SEARCHES, has_numbers=False),
        ),
        summary="the hub hands out slices of a batch that all members hold, slow ones twice, and "
        "moves the model by L-BFGS (Sandblaster)",
        source="Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.2",
        local_steps=1,
        contributes="gradient",
        has_local_steps=False,
        deals=True,
    ),
)

TABLE: dict[str, Strategy] = {row.name: row for row in _ROWS}


def row_of(name: str) -> Strategy:
    """The row of a strategy, of the table or of a user's own. ConfigError with the near miss."""
    return replace(extensions.find("strategy", name, TABLE, Strategy), name=name)


WEIGHED = ("alike", "weighed")
"""Whether members count by the weights that they join with, as a strategy spells it."""


def find(text: str) -> Strategy:
    """The strategy that a job spells as `text`, as "dga", "dga(predict)" or "fedprox(0.01)"; behind
    bars its outer rule, and whether members are weighed, if not the row's: "fedavg | nesterov(0.7,
    0.9)", "fedavg | alike".

    ConfigError with the near miss for a name, with what is allowed for an argument.
    """
    # Simulated members look up the same rows in each round. A user's own may be loaded anew.
    row = TABLE.get(text.partition("|")[0].partition("(")[0].strip())
    return (_find.__wrapped__ if extensions.loaded else _find)(text, row)


@functools.lru_cache(64)  # for each row of the table: another may be put into its place
def _find(text: str, known: Strategy | None) -> Strategy:
    whole, weighs, last = text.rpartition("|")
    if weighs and last.strip() in WEIGHED:
        return replace(find(whole), weighted=bool(WEIGHED.index(last.strip())))
    before, bar, outer = text.partition("|")
    name, arguments = split(before)
    row = row_of(name)
    row = row.stepped(outer.strip()) if bar else row
    if row.corrections and len(arguments) > len(row.parameters):
        row = row.corrected(arguments.pop(len(row.parameters)))
    return replace(row, arguments=arguments_of(name, row.spelling, row.parameters, arguments))
