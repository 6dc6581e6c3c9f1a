"""The table of topologies, and what `auto` takes from it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from command_line import environment
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.jobs import rules, topology
from edgetrain.jobs.capacity.question import Options, question_of
from edgetrain.jobs.grid import in_topologies
from edgetrain.jobs.plan import check, plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.topology import TopologyRow, choose, table

WORDS = ("members=8", "device=raspberry-pi-4b", "pace_s=0.05", "network=rtt-100ms")
SITES = "sites=home-fixed: 0-3, home-fixed: 4-6"


def rows_of(*words, parameters=10_000):
    found = check(load(None, [*WORDS, *words]))
    return {
        row.name: row for row in table(question_of(found, Options(parameters=parameters)), found)
    }


def row(name, averaging_s, steps=10.0, refused=""):
    return TopologyRow(name, name, 1, 0.1, 0.1, averaging_s, steps, 0, 0, refused, "")


# -- the table ------------------------------------------------------------------------------------


def test_the_table_has_each_topology_once_and_marks_what_is_refused():
    found = check(load(None, WORDS))
    rows = rows_of()
    assert list(rows) == ["star", "2 hubs", "4 hubs", "direct", "ring", "butterfly", "tree"]
    for each in rows.values():
        refused = rules.why_not_topology(each.topology or "hubs", found)
        assert (each.refused, each.way_out) == (refused or ("", ""))


def test_a_job_with_sites_may_have_gateways_which_spare_the_line_between_sites():
    """Seven of eight members are at two sites; the other one has the way to the hub for itself."""
    rows = rows_of(SITES)
    assert rows["gateways"].wan_bytes == pytest.approx(rows["star"].wan_bytes * 3 / 8)
    assert rows["gateways"].lan_bytes == pytest.approx(rows["star"].wan_bytes * 7 / 8)
    assert rows["star"].lan_bytes == 0
    assert rows["direct"].lan_bytes > 0
    assert "gateways" not in rows_of()


def test_a_delay_hides_the_averaging_and_the_steps_a_second_say_so():
    waits, hides = (rows_of("strategy=dga", f"delay={delay}", "final_sync=0") for delay in (0, 10))
    assert hides["star"].steps_per_second == pytest.approx(20, rel=0.03)
    assert waits["star"].steps_per_second < 17


def test_a_smaller_codec_is_in_the_table():
    big, small = (
        rows_of("strategy=fedavg", f"codec={codec}", parameters=1_000_000)["star"]
        for codec in ("fp32", "int8")
    )
    assert small.wan_bytes == pytest.approx(big.wan_bytes / 3.9, rel=0.02)
    assert small.idle_s < big.idle_s


# -- what auto takes ------------------------------------------------------------------------------


def test_auto_takes_the_most_steps_a_second():
    rows = [row("star", 0.6, 10), row("direct", 0.5, 12)]
    assert choose(rows, trusts=True).topology == "direct"
    assert choose(rows[::-1], trusts=True).topology == "direct"


@pytest.mark.parametrize(("direct_s", "taken"), [(0.5, "direct"), (0.55, "star"), (0.7, "star")])
def test_of_equally_fast_ones_auto_takes_the_star_unless_another_is_much_sooner(direct_s, taken):
    assert choose([row("star", 0.6), row("direct", direct_s)], trusts=True).topology == taken


def test_auto_takes_direct_only_with_trust_and_says_so():
    found = choose([row("star", 0.6), row("direct", 0.1, 99)], trusts=False)
    assert found.topology == "star"
    assert "direct is left out, because fleet.topology_trust = false" in found.why
    refused = choose([row("star", 0.6), row("direct", 0.1, 99, "masks")], trusts=True)
    assert refused.topology == "star"
    assert "direct is left out, because masks" in refused.why


@given(st.lists(st.sampled_from(["ring", "butterfly", "tree", "2 hubs"]), unique=True))
def test_auto_never_takes_what_has_other_bits_or_other_machines(names):
    rows = [row("star", 9.0, 1.0), *(row(name, 0.1, 99.0) for name in names)]
    assert choose(rows, trusts=True).topology == "star"


def test_a_planned_job_has_the_topology_that_auto_took(monkeypatch):
    found = plan(load(None, [*WORDS, "topology=auto"]))
    assert found.job.fleet.topology == "star"
    assert found.topology_choice.startswith("topology auto: star, with averaging in 0.")
    assert plan(load(None, WORDS)).topology_choice == ""
    out = plan(load(None, [*WORDS, "topology=auto", "strategy=ssp(1)"]))
    assert "star, because members are out of step" in out.topology_choice


def test_a_hub_takes_the_star_because_it_does_not_know_the_links():
    found = topology.take_star(check(load(None, ["topology=auto"])), "links are not known")
    assert found.job.fleet.topology == "star"
    assert found.topology_choice == "topology auto: star, because links are not known"
    named = check(load(None, WORDS))
    assert topology.take_star(named, "?") is named


def test_compare_gives_the_job_each_topology_and_takes_no_name_twice():
    job = load(None, WORDS)
    found = in_topologies(job, ["star", "direct", "ring", "gateways"])
    assert [each.fleet.topology for each in found] == ["star", "direct", "ring", "star"]
    assert [each.fleet.gateways for each in found] == [False, False, False, True]
    assert {each.strategy for each in found} == {job.strategy}
    for names in (["star", "star"], ["star", "auto"]):
        with pytest.raises(ConfigError, match="name each once"):
            in_topologies(job, names)


# -- the command ----------------------------------------------------------------------------------

SIZES = ("--parameters", "1000", "--step-seconds", "0.1")


def test_the_command_prints_the_table_and_draws_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["topology", *SIZES, SITES, "members=8", "--picture", "a.png"]) == 0
    said = capsys.readouterr().out
    for name in ("star ", "2 hubs", "gateways", "direct", "ring", "butterfly", "tree"):
        assert f"\n{name}" in said
    assert "topology auto: star" in said
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert max(map(len, said.splitlines())) <= 92
    why = "2 hubs, 4 hubs, direct: strategy.ranges = 1 leaves several reducers nothing to share"
    assert " ".join(said.split()).count(f"{why} (set strategy.ranges = 16)") == 1


@pytest.mark.real
def test_the_command_answers_in_json_without_torch(tmp_path):
    code = f"""
import sys
from edgetrain.__main__ import main
main(["topology", *{SIZES!r}, "--json"])
assert "torch" not in sys.modules and "greenlet" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["table"][0]["name"] == "star"
    assert found["auto"].startswith("topology auto: star")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*SIZES, "topology=rign"], "fleet.topology = 'rign' (did you mean 'ring'?)"),
        (["--parameters", "1.5"], "not a whole number"),
        ([*SIZES, "network=wify"], "did you mean 'wifi'"),
        ([*SIZES, "strategy=ssp(1)"], "depends on when contributions arrive"),
    ],
)
def test_what_cannot_be_worked_out_is_one_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["topology", *words])
    except SystemExit as ended:  # argparse's own refusal
        status = ended.code
    assert status == 2
    assert says in capsys.readouterr().err
