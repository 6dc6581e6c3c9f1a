"""A user's own code in a job: found, checked, compared, and never brought in by the network."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import types
from pathlib import Path

import codec_cases
import numpy as np
import pytest
from every_strategy import OUT_OF_STEP, SPELLED

import edgetrain
from edgetrain import codecs, extensions, strategies, testing
from edgetrain.__main__ import main
from edgetrain.cli.completion import names
from edgetrain.codecs import Codec
from edgetrain.codecs.dense import Dense
from edgetrain.errors import BadPayload, ConfigError
from edgetrain.exchange.hub.admission import Admission
from edgetrain.exchange.hub.terms import Terms
from edgetrain.exchange.messages import Join
from edgetrain.extensions import modules
from edgetrain.jobs import bundles
from edgetrain.jobs.grid import variants
from edgetrain.jobs.reading import parse
from edgetrain.jobs.resolved import look_beside, look_up
from edgetrain.strategies import Strategy
from edgetrain.strategies.displacement import Displacement
from edgetrain.strategies.fedprox import FedProx
from edgetrain.strategies.merging.rule import Mean

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples/extensions"
PAGE = (ROOT / "docs/how-to/extensions.md").read_text("utf-8")


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    """Neither what was loaded, nor its modules, nor where they were looked for."""
    before, path = set(sys.modules), list(sys.path)
    monkeypatch.setattr(extensions, "loaded", {})
    yield
    look_beside(None)
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).partition("/site-packages")[1] == "":
            del sys.modules[name]


def job_with(beside=EXAMPLES, *words):
    look_beside(beside)
    return parse({}, words)


# -- the laws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelled", [*SPELLED, *OUT_OF_STEP, "lbfgs"])
def test_every_strategy_keeps_the_laws(spelled):
    testing.check_strategy(spelled)


@pytest.mark.parametrize("spec", [s for s in codec_cases.ALL if not s.startswith("powersgd")])
def test_every_codec_keeps_the_laws(spec):
    testing.check_codec(spec)


@pytest.mark.parametrize("spelled", [
    "mean", "median", "trimmed-mean(0.2)", "krum(1)", "multi-krum(1)", "centered-clip(9)",
    "norm-clip(9)", "norm-bound(2x)",
])  # fmt: skip
def test_every_merge_rule_keeps_the_laws(spelled):
    testing.check_merge_rule(spelled)


class Longer(Dense):
    def encode_part(self, part, salt=0):
        return bytes(super().encode_part(part, salt)) + b"!"


class Changes(Dense):
    def encode_part(self, part, salt=0):
        part *= 2
        return super().encode_part(part, salt)


class Trusts(Dense):
    def check(self, payload, elements):
        """Whatever."""

    def apply(self, payload, weight, out):
        if len(payload) == 4 * out.size:
            super().apply(payload, weight, out)


class Forgets(Codec):
    name = "forgets"

    def encode_part(self, part, salt=0):
        return part[: part.size // 2].tobytes()

    def check(self, payload, elements):
        if len(payload) != 4 * (elements // 2):
            raise BadPayload("forgets")

    def apply(self, payload, weight, out):
        half = np.frombuffer(payload, np.float32)
        if weight is None:
            out[:] = 0
        out[: half.size] += (1 if weight is None else np.float32(weight)) * half

    def max_bytes(self, elements):
        return 2 * elements


@pytest.mark.parametrize(("codec", "says"), [
    (Longer(), "bytes where max_bytes says"), (Changes(), "encode changes the vector"),
    (Trusts(), "an empty payload is decoded"), (Forgets(), "is never sent"), (3, "int"),
])  # fmt: skip
def test_a_codec_that_breaks_a_law_is_told_which(codec, says):
    with pytest.raises(ConfigError, match=says):
        testing.check_codec(codec)


class First(Mean):
    def merge(self, pieces, out):
        pieces[0].read(out)


class Sum(Mean):
    def merge(self, pieces, out):
        out[:] = 0
        for piece in pieces:
            piece.add(1.0, out)


class Nothing(Mean):
    def merge(self, pieces, out):
        """Leaves what is there."""


@pytest.mark.parametrize(("rule", "says"), [
    (First(), "the order of members"), (Sum(), "all send the same"), (Nothing(), "unwritten"),
    (object(), "neither merge nor merge_round"),
])  # fmt: skip
def test_a_merge_rule_that_breaks_a_law_is_told_which(rule, says):
    with pytest.raises(ConfigError, match=says):
        testing.check_merge_rule(rule)


class Unsaid(FedProx):
    adjusts_gradient = False


class Apart(Displacement):
    def apply(self, reply):
        super().apply(piece + np.float32(0.001) for piece in reply)


class Amnesiac(FedProx):
    """It remembers what it has seen, and a checkpoint does not say so."""

    seen = 0

    def before_step(self):
        self.seen += 1
        self.gradient *= 1 / self.seen


def unsaid(setting):
    return Unsaid(setting.params, setting.gradient, 0.1, setting.local_steps)


def apart(setting):
    return Apart(setting.params, setting.local_steps)


def amnesiac(setting):
    return Amnesiac(setting.params, setting.gradient, 0.1, setting.local_steps)


@pytest.mark.parametrize(("build", "adjusts", "says"), [
    (unsaid, True, "its row has adjusts_gradient = True"), (apart, False, "sum of all replies"),
    (amnesiac, True, "forgotten something"), (lambda setting: 0, False, "pickle"),
])  # fmt: skip
def test_a_strategy_that_breaks_a_law_is_told_which(build, adjusts, says):
    row = Strategy(name="x", summary="", source="", build=build, adjusts_gradient=adjusts)
    with pytest.raises(ConfigError, match=says):
        testing.check_strategy(row)


# -- found -----------------------------------------------------------------------------------------


def test_a_job_names_what_lies_beside_it():
    found = look_up(job_with(
        EXAMPLES, "strategy=feddyn:feddyn(0.1)", "merge=fedexp:FedExP", "steps=12",
        "codec=*w: coarse:Coarse(9); fp32", "schedule=warmup(2) | more:halving(2)",
        "network=more:field_radio:3, wifi", "device=more:board", "data.partition=more:by_turns",
    ))  # fmt: skip
    assert found.strategy.spelled == "feddyn:feddyn(0.1)"
    assert strategies.find(found.strategy.spelled) == found.strategy
    assert found.strategy.outer_rule().begins == {"total": 0.0}
    assert found.codec.name == "*w: coarse.Coarse(9); fp32"
    assert codecs.parse(found.codec.name) == found.codec
    assert found.merge.own.__name__ == "FedExP"
    from edgetrain.fleet.assignment import devices_of, networks_of
    from edgetrain.fleet.networks import load
    from edgetrain.jobs.schedule import parse as schedule
    from edgetrain.tasks.partition import partition

    assert networks_of(found.job.fleet.network) == ["more.field_radio"] * 3 + ["wifi"]
    assert (load("more.field_radio").rtt_ms, devices_of("more:board")) == (1000, ["more.board"])
    rates = schedule(found.job.train.schedule, 12)
    assert [rates.factor(step) for step in (0, 2, 6, 7, 11)] == [0.5, 1, 1, 0.5, 0.5]
    shards = partition("more:by_turns", np.zeros(7, int), 3, 0)
    assert [list(shard) for shard in shards] == [[0, 3, 6], [1, 4], [2, 5]]
    other = ["fedcm:fedcm(0.1)", "fedavg | more:Damped(0.5)"]
    assert [each.strategy.name for each in variants(found.job, other)] == other


@pytest.mark.parametrize(("word", "says"), [
    ("strategy=feddyn:fedyn", "module 'feddyn' has no 'fedyn'"),
    ("strategy=feddyn:FedDyn", "no Strategy"), ("strategy=nowhere:x", "no module 'nowhere'"),
    ("codec=feddyn:FedDyn", "no Codec"), ("codec=coarse:Coarse(900)", "allowed are 1 to 127"),
    ("codec=coarse:Coarse(1, 2)", "positional arguments"), ("merge=feddyn:feddyn", "no type"),
    ("merge=feddyn:Total", "neither merge nor merge_round"),
    ("strategy=json:loads", "a module of Python"),
    ("strategy=numpy:mean", "does not say"), ("strategy=edgetrain.tasks:digits", "does not say"),
    ("outer=fedexp:FedExP", "no OuterRule"),
    ("codec=topk(0.1) | coarse:Coarse", "cannot code values"),
    ("strategy=feddny", "no strategy 'feddny'"),
])  # fmt: skip
def test_what_is_not_what_it_says_costs_one_line(word, says):
    with pytest.raises(ConfigError, match=says) as caught:
        look_up(job_with(EXAMPLES, word))
    assert "\n" not in str(caught.value)


def test_a_law_that_is_broken_is_the_message_of_the_job(tmp_path):
    (tmp_path / "half_own.py").write_text(
        "from edgetrain.strategies.merging.rule import Mean\n"
        "class First(Mean):\n    def merge(self, pieces, out):\n        pieces[0].read(out)\n"
    )
    with pytest.raises(ConfigError, match=r"half_own:First.*the order of members matters"):
        look_up(job_with(tmp_path, "merge=half_own:First"))


def test_the_network_brings_no_code_in(tmp_path, monkeypatch):
    (tmp_path / "evil_own.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    for find in (strategies.find, codecs.parse):
        with pytest.raises(ConfigError):
            find("evil_own:thing")
    assert "evil_own" not in sys.modules


def test_a_bundle_runs_only_where_it_is_allowed(tmp_path):
    (tmp_path / "mine.bundle").write_bytes(bundles.make(EXAMPLES / "feddyn.py"))
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    look_beside(tmp_path, keys)
    job = parse({}, ["strategy=mine.bundle#feddyn:feddyn(0.1)"])
    with pytest.raises(ConfigError, match="is not allowed on this device"):
        look_up(job)
    allowed = bundles.Allowed(keys)
    allowed.allow(bundles.digest_of((tmp_path / "mine.bundle").read_bytes()))
    assert look_up(job).strategy.outer == "feddyn:Total"
    assert look_up(job).strategy.outer_rule() is not None


def test_a_package_that_is_installed_adds_names(tmp_path, monkeypatch, capsys):
    (tmp_path / "packaged_own.py").write_text((EXAMPLES / "fedcm.py").read_text())
    info = tmp_path / "packaged_own-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged_own\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[edgetrain.strategies]\nfedcm = packaged_own:fedcm\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert look_up(job_with(tmp_path, "strategy=fedcm(0.2)")).strategy.arguments == (0.2,)
    assert strategies.find("fedcm(0.2)").spelled == "fedcm(0.2)"
    assert "fedcm" in names("strategy")
    assert main(["strategies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["installed"] == {"strategy": ["fedcm"]}


# -- compared --------------------------------------------------------------------------------------


def test_another_code_is_another_job_and_the_hub_says_so(tmp_path):
    plain = job_with(tmp_path).digest()
    digests = []
    for text in ("", "# other\n"):
        extensions.loaded.clear()
        sys.modules.pop("code_own", None)
        (tmp_path / "code_own.py").write_text((EXAMPLES / "fedcm.py").read_text() + text)
        job = job_with(tmp_path, "strategy=code_own:fedcm(0.1)")
        found = look_up(job)
        digests.append(job.digest())
    one, other = digests
    assert one != other
    assert one.partition("+")[0] == other.partition("+")[0]
    assert job_with(tmp_path).digest() == plain, "a job without extensions has the digest it had"
    terms = Terms(found.strategy, found.local_steps, found.delay, one, 10)
    admission = Admission(terms, *[None] * 4, finished=False, tail=None)
    join = Join(edgetrain.exchange.messages.PROTOCOL, other, "model", 4, "m1", 1.0, 0)
    code, reason = admission.why_not(b"", join)
    assert code == "job"
    assert reason.startswith("the hub's extensions have the code")
    assert one.partition("+")[2] in reason
    assert other.partition("+")[2] in reason


# -- strangers -------------------------------------------------------------------------------------


def trained(spelled, curvatures, optima, rounds, local_steps=4, rate=0.1):
    """The base after so many rounds of members with a quadratic each, in float64 steps."""
    row, params = strategies.find(spelled), [np.zeros(3, np.float32) for _ in optima]
    gradients = [np.zeros(3, np.float32) for _ in optima]
    settings = [
        strategies.Setting(p, g, local_steps, 0) for p, g in zip(params, gradients, strict=True)
    ]
    halves = [row.member_half(setting) for setting in settings]
    outer = row.outer_rule()
    if outer is not None:
        outer.start(3)
    for _ in range(rounds):
        given = []
        for half, p, g, a, b in zip(halves, params, gradients, curvatures, optima, strict=True):
            for _ in range(local_steps):
                g[:] = a * (p - b)
                half.before_step()
                p -= np.float32(rate) * g
                half.note_rate(rate)
                own = half.after_step()
            given.append(own.copy())
        merged = np.mean(given, axis=0, dtype=np.float32)
        if outer is not None:
            outer.step(merged, 0)
        for half in halves:
            half.apply([merged.copy()])
    return halves[0].base


CURVED = ([0.2, 1.0, 3.0], [np.float32([1, -1, 2]), np.float32([4, 0, 0]), np.float32([-2, 1, 1])])


def test_feddyn_ends_at_the_optimum_of_all_where_fedavg_does_not():
    look_up(job_with(EXAMPLES, "strategy=feddyn:feddyn(0.1)"))
    curvatures, optima = CURVED
    best = sum(a * b for a, b in zip(curvatures, optima, strict=True)) / sum(curvatures)
    assert np.linalg.norm(trained("fedavg", *CURVED, 400) - best) > 0.3
    assert np.linalg.norm(trained("feddyn:feddyn(0.5)", *CURVED, 400) - best) < 1e-4


def test_fedcm_is_its_papers_algorithm():
    look_up(job_with(EXAMPLES, "strategy=fedcm:fedcm(0.3)"))
    base, direction = np.zeros(3), np.zeros(3)
    for _ in range(7):
        ends = []
        for a, b in zip(*CURVED, strict=True):
            x = base.copy()
            for _ in range(4):
                x -= 0.1 * (0.3 * a * (x - b) + 0.7 * direction)
            ends.append(x)
        new = np.mean(ends, axis=0)
        direction, base = (base - new) / 0.4, new
    np.testing.assert_allclose(trained("fedcm:fedcm(0.3)", *CURVED, 7), base, rtol=1e-4, atol=1e-5)
    one = trained("fedcm:fedcm(1)", *CURVED, 5)
    assert one.tobytes() == trained("local-sgd", *CURVED, 5).tobytes()


class Plain:
    """A contribution that is not encoded."""

    def __init__(self, vector):
        self.vector = vector

    def read(self, out):
        out[:] = self.vector

    def add(self, weight, out):
        out += np.float32(weight) * self.vector


def test_fedexp_steps_further_the_more_members_disagree():
    look_up(job_with(EXAMPLES, "merge=fedexp:FedExP"))
    own = np.random.default_rng(0).standard_normal((5, 12)).astype(np.float32)
    rule = strategies.merging.parse("fedexp:FedExP(0.001)")
    merged = np.empty(12, np.float32)
    rule.merge_round([[Plain(each)] for each in own], [merged])
    mean = own.astype(np.float64).mean(0)
    factor = (own.astype(np.float64) ** 2).sum() / (2 * 5 * ((mean**2).sum() + 0.001))
    assert factor > 1
    np.testing.assert_allclose(merged, factor * mean, rtol=1e-5)
    testing.check_merge_rule(rule)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path):
    assert len(path.read_text("utf-8").splitlines()) <= 60


# -- the page --------------------------------------------------------------------------------------


def test_the_page_runs(monkeypatch):
    page = types.ModuleType("page_own")  # whose classes go to other processes
    monkeypatch.setitem(sys.modules, "page_own", page)
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        assert len(code.splitlines()) <= 32
        exec(compile(code, "extensions.md", "exec"), page.__dict__)
    for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL):
        tomllib.loads(text)


def test_the_page_has_every_kind():
    for group in modules.GROUPS.values():
        assert f"`{group}`" in PAGE
