"""A calibration that was stopped goes on: what is finished is not run again, what is not, is."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgetrain.errors import ConfigError
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.training import both_ways, emulated, finished
from edgetrain.training.finished import FILE, Finished, digest_of
from edgetrain.training.simulated import simulation

SUMMARY = {
    "metric": "loss", "steps_per_second": 10.0, "wait_s": 0.0, "sent_bytes": 1,
    "received_bytes": 1, "final": {"loss": 1.0}, "target_seconds": None, "emulation": {},
}  # fmt: skip
NAMES = [f"job {number}" for number in range(5)]
PLANNED = dict.fromkeys(NAMES, SimpleNamespace(sites=(), network_profiles={}))
DIGESTS = {name: f"digest of {name}" for name in NAMES}


class Runs:
    """Runs that are counted, and the one at which Ctrl-C comes."""

    def __init__(self):
        self.emulated, self.simulated, self.stop_at = [], [], None

    def emulate(self, plan, inside, watch=None):
        return self._run(self.emulated, inside)

    def simulate(self, plan, inside):
        return self._run(self.simulated, inside)

    def _run(self, runs, inside):
        if len(self.emulated) + len(self.simulated) == self.stop_at:
            raise KeyboardInterrupt
        runs.append(inside.name)
        return SUMMARY


@pytest.fixture
def runs(monkeypatch):
    found = Runs()
    monkeypatch.setattr(emulated, "run", found.emulate)
    monkeypatch.setattr(simulation, "run", found.simulate)
    monkeypatch.setattr(both_ways, "read_metrics", lambda folder, kind: [])
    return found


def calibrate(folder, at_once, *, resumed=False, digests=DIGESTS):
    """As the command does; the pairs, in order."""
    with Finished(folder, digests, resumed=resumed) as kept:
        if at_once == 1:
            return [
                both_ways.run(name, each, folder, 1, lambda how: None, lambda: 0.0, kept)
                for name, each in PLANNED.items()
            ]
        told = both_ways.run_side_by_side(
            PLANNED, folder, 1, at_once, lambda name, how: None, lambda: 0.0, kept
        )
        return list(told)


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("stop_at", range(0, 10, 3))
def test_nothing_that_has_ended_is_run_again(tmp_path, runs, at_once, stop_at):
    runs.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        calibrate(tmp_path, at_once)
    runs.stop_at = None
    pairs = calibrate(tmp_path, at_once, resumed=True)
    assert [pair.name for pair in pairs] == NAMES
    # Of those that ran side by side when Ctrl-C came one may have ended unnoticed.
    assert 5 <= len(runs.emulated) <= 5 + (at_once - 1)
    assert len(runs.simulated) == 5
    assert calibrate(tmp_path, at_once, resumed=True) == pairs
    assert len(runs.simulated) == 5, "all are finished"


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_a_file_cut_anywhere_costs_at_most_what_is_behind_it(tmp_path_factory, runs, data):
    folder = tmp_path_factory.mktemp("cut")
    calibrate(folder, 1)
    lines = (folder / FILE).read_bytes()
    cut = data.draw(st.integers(0, len(lines)))
    (folder / FILE).write_bytes(lines[:cut])
    runs.emulated.clear()
    runs.simulated.clear()
    whole = lines[:cut].count(b"\n") + (lines[cut : cut + 1] == b"\n")
    assert len(calibrate(folder, 1, resumed=True)) == 5
    assert len(runs.emulated) + len(runs.simulated) == 10 - whole
    runs.emulated.clear()
    calibrate(folder, 1, resumed=True)
    assert not runs.emulated, "what was run again is kept"


def test_other_settings_other_versions_and_failures_are_run_again(tmp_path, runs, monkeypatch):
    calibrate(tmp_path, 1)
    other = DIGESTS | {"job 3": "with other settings"}
    calibrate(tmp_path, 1, resumed=True, digests=other)
    assert len(runs.emulated) == 6
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    for line in lines:
        if "pair" in line:
            line["pair"]["incomplete"] = "emulated, it is incomplete"
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(Finished(tmp_path, DIGESTS, resumed=True)) == 0
    monkeypatch.setattr(finished, "__version__", "0.0.0")
    runs.emulated.clear()
    calibrate(tmp_path, 1, resumed=True)
    assert len(runs.emulated) == 5


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no finished\.jsonl in it.*leave out --resume"):
        Finished(tmp_path, DIGESTS, resumed=True)


def test_one_calibration_at_a_time_writes_a_folder(tmp_path):
    said = r"another calibration is at work in .*leave out --resume"
    with Finished(tmp_path, DIGESTS), pytest.raises(ConfigError, match=said):
        Finished(tmp_path, DIGESTS, resumed=True)
    with Finished(tmp_path, DIGESTS, resumed=True):
        pass


def test_the_digest_is_of_what_is_run_and_not_of_where_its_files_lie(tmp_path):
    def digest(folder, *overrides, rate=10, draws=8):
        path = tmp_path / folder / "line.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'title = "x"\n[both]\nrate_mbit = {rate}\n[source]\nrate_mbit = "chosen: a test"\n'
        )
        return digest_of("job", plan(load(None, [f"network={path}", *overrides])), draws)

    assert digest("a") == digest("b")
    others = [digest("a", rate=20), digest("a", "members=5"), digest("a", draws=1)]
    assert len({digest("a"), *others}) == 4


def test_a_pair_comes_back_as_it_was(tmp_path, runs):
    pairs = calibrate(tmp_path, 1)
    drawn = dataclasses.replace(pairs[0], drawn_s=(0.1, 0.2), final=(None, 0.5), trusted=None)
    Finished(tmp_path, DIGESTS).add_pair("job 0", drawn)
    assert Finished(tmp_path, DIGESTS, resumed=True).pair("job 0") == drawn
