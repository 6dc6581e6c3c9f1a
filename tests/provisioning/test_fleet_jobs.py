"""Jobs on devices over a real sshd, as their user types them: digits to 97 %, a device that comes
later, a second job, another address of the hub. `make test-fleet`.
"""

from __future__ import annotations

import os
import subprocess
import time

import pytest
import ssh_fleet
from real_town import RealTown, real_site

from edgetrain.exchange.keys.pairs import spell
from edgetrain.runs.folder import read_metrics, read_summary

WHY_NOT = ssh_fleet.missing(make=True)
NAMES = [f"pi-{i}" for i in range(8)]
LATE = NAMES[-1]
JOB = """\
name = "{name}"
[fleet]
members = 8
[train]
steps = {steps}
[strategy]
name = "dga"
local_steps = 5
delay = 5
[hub]
heartbeat_s = 0.5
min_members = 7
start_after_s = 1
"""


def up(monkeypatch, folder, names, job, *others):
    """Machines that are not set up yet."""
    with ssh_fleet.fleet(folder) as fleet:
        monkeypatch.setenv("PATH", f"{fleet.folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        made = RealTown(fleet, names, real_site, job, *others)
        for machine in fleet.machines.values():
            fleet.start(machine)
        for machine in fleet.machines.values():
            fleet.wait_until_up(machine)
        yield made


@pytest.fixture
def town(monkeypatch, tmp_path_factory):
    job = JOB.format(name="first", steps=250)
    yield from up(monkeypatch, tmp_path_factory.mktemp("fleet"), NAMES, job)


@pytest.fixture
def town_with_hub(monkeypatch, tmp_path_factory):
    """Four machines, and one that has the hub."""
    job = JOB.format(name="first", steps=250).replace("= 8", "= 4").replace("= 7", "= 4")
    yield from up(monkeypatch, tmp_path_factory.mktemp("fleet"), NAMES[:4], job, "hub-pi")


SITE, ALONE, GATE = NAMES[:2], NAMES[2], "gate"


@pytest.fixture
def town_with_gateway(monkeypatch, tmp_path_factory):
    """Two machines at a site, its gateway, and one beside them that joins the hub itself."""
    job = JOB.format(name="first", steps=60).replace("= 8", "= 3\ngateways = true")
    job = job.replace("= 7", "= 3") + "deadline_s = 120\nlost_after_s = 120\n"
    folder = tmp_path_factory.mktemp("fleet")
    yield from up(monkeypatch, folder, [*SITE, ALONE], job, "", GATE, SITE)


def done(town, *words):
    """What a command of edgetrain prints."""
    found = subprocess.run(
        town.edgetrain(*words), cwd=town.folder, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def digest_of_slots(machine):
    return {name: d for name, d in machine.state().items() if name.startswith("opt/")}


def wait_for(town, condition):
    """Wait for something that a running command brings about; what it is, or None if it ended."""
    while town.running.poll() is None:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(town.running.communicate())


def started(town, job, rounds=1):
    """`run JOB --cluster`, and its run folder after this many rounds."""
    before = set((town.folder / "runs").glob("*"))
    words = town.edgetrain("run", job, "--cluster", "cluster.toml")
    town.running = subprocess.Popen(
        words, cwd=town.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )

    def trains():
        for folder in set((town.folder / "runs").glob("*")) - before:
            if len(list(read_metrics(folder, "round"))) >= rounds:
                return folder
        return None

    return wait_for(town, trains)


def ended(town, folder):
    """What a run printed, and its summary."""
    out, err = town.running.communicate(timeout=900)
    assert town.running.returncode == 0, out + err
    return out, read_summary(folder)


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
@pytest.mark.fleet
@pytest.mark.timeout(1800)
def test_two_jobs_a_device_that_comes_later_and_another_address_of_the_hub(town, capsys):
    done(town, "devices", "provision", "cluster.toml", "--worker", "worker.tar")
    late = town.fleet.machines[LATE]
    town.fleet.stop(late)
    folder = started(town, "job.toml")
    assert LATE not in str([x for x in read_metrics(folder) if x.get("event") == "joined"])
    town.fleet.start(late)
    out, summary = ended(town, folder)
    assert f"{LATE}             FAILED   unreachable" in out
    figure = summary["final"][summary["metric"]]
    assert figure >= 0.97, summary
    rounds = [line for line in read_metrics(folder) if line["kind"] == "round"]
    assert len(rounds[0]["members"]) == len(NAMES) - 1
    assert len(rounds[-1]["members"]) == len(NAMES)
    assert not [x for x in read_metrics(folder) if x.get("event") in ("refused", "error")]
    bases = town.bases()
    assert len(set(map(tuple, bases.values()))) == 1, bases
    with capsys.disabled():
        print(f"\ndigits, {LATE} late: {figure:.1%}, {len(rounds)} rounds, bases {bases}")

    cards = {name: digest_of_slots(m) for name, m in town.fleet.machines.items()}
    for words in ("del 10.77.0.254/24", "add 10.77.0.253/24"):
        subprocess.run(
            town.fleet.space.within(*f"ip address {words} dev bridge0".split()), check=True
        )
    cluster = town.folder / "cluster.toml"
    cluster.write_text(cluster.read_text().replace("10.77.0.254", "10.77.0.253"))
    (town.folder / "second.toml").write_text(JOB.format(name="second", steps=40))
    out, summary = ended(town, started(town, "second.toml"))
    assert summary["status"] == "finished"
    assert {name: digest_of_slots(m) for name, m in town.fleet.machines.items()} == cards
    bases = town.bases()
    assert {len(each) for each in bases.values()} == {2}
    assert len(set(map(tuple, bases.values()))) == 1, bases


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
@pytest.mark.fleet
@pytest.mark.timeout(1800)
def test_a_hub_on_a_device_loses_its_power_and_its_run_folder_comes_home(town_with_hub, capsys):
    town, machines = town_with_hub, town_with_hub.fleet.machines
    before = town.state()
    done(town, "devices", "provision", "cluster.toml", "--worker", "worker.tar")
    again = done(town, "devices", "provision", "cluster.toml", "--check")
    assert "5 of 5 devices are reached and set up, 0 of them would be changed" in again
    hub = machines["hub-pi"].root
    own = (hub / "var/lib/edgetrain-keys/key").read_text().split()
    assert spell(town.ring.pair().public) not in own
    assert own[1] in (machines["pi-0"].root / "var/lib/edgetrain-keys/hubs").read_text()
    assert not [path for path in town.ring.path.iterdir() if own[3] in path.read_text()]
    listed = (hub / "etc/edgetrain/hub/members").read_text()
    assert sorted(line.split()[1] for line in listed.splitlines()) == NAMES[:4]

    folder = started(town, "job.toml", rounds=5)
    town.fleet.start(machines["hub-pi"])  # its power is cut, and back
    out, summary = ended(town, folder)
    figure = summary["final"][summary["metric"]]
    assert figure >= 0.97, summary
    assert sorted(path.name for path in (folder / "members").iterdir()) == NAMES[:4]
    bases = town.bases()
    assert len(set(map(tuple, bases.values()))) == 1, bases
    with capsys.disabled():
        print(f"\ndigits, hub on a device, its power cut: {figure:.1%}, bases {bases}\n{out}")
        print(done(town, "devices", "status", "cluster.toml"))

    out, summary = ended(town, started(town, "job.toml"))
    assert summary["status"] == "finished", "the same job again is another run"
    done(town, "devices", "remove", "cluster.toml", NAMES[3], "--yes")
    assert NAMES[3] not in (hub / "etc/edgetrain/hub/members").read_text()
    done(town, "devices", "remove", "cluster.toml", *NAMES[:3], "hub-pi", "--yes")
    left = {
        name: set(found.items()) ^ set(before[name].items()) for name, found in town.state().items()
    }
    assert not any(left.values()), left


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
@pytest.mark.fleet
@pytest.mark.timeout(1800)
def test_the_gateway_of_a_site_loses_its_power_and_the_site_goes_on(town_with_gateway, capsys):
    town, machines = town_with_gateway, town_with_gateway.fleet.machines
    before = town.state()
    done(town, "devices", "provision", "cluster.toml", "--worker", "worker.tar")
    again = done(town, "devices", "provision", "cluster.toml", "--check")
    assert "4 of 4 devices are reached and set up, 0 of them would be changed" in again
    gate = machines[GATE].root
    own = (gate / "var/lib/edgetrain-keys/key").read_text().split()
    assert not [path for path in town.ring.path.iterdir() if own[3] in path.read_text()]
    for name in SITE:
        pins = (machines[name].root / "var/lib/edgetrain-keys/hubs").read_text()
        assert f"tcp://{machines[GATE].address}:5555 {own[1]}" in pins
    listed = (gate / "etc/edgetrain/hub/members").read_text()
    assert sorted(line.split()[1] for line in listed.splitlines()) == SITE

    folder = started(town, "job.toml", rounds=4)
    town.fleet.start(machines[GATE])  # its power is cut, and back
    out, summary = ended(town, folder)
    assert summary["status"] == "finished"
    assert summary["rounds"] == 12, summary
    last = list(read_metrics(folder, "round"))[-1]
    assert sorted(last["members"]) == ["barn", "m2"], "the site is back, as one member"
    site = read_summary(folder / "gateways" / GATE)
    assert sorted(path.name for path in (folder / "members").iterdir()) == [*SITE, ALONE]
    bases = town.bases()
    assert len(set(map(tuple, bases.values()))) == 1, bases
    at_site, above = site["hub"]["received_bytes"], site["hub"]["above_sent_bytes"]
    with capsys.disabled():
        print(f"\ndigits behind a gateway, its power cut: {summary['final']}, bases {bases}")
        print(f"to the gateway since: {at_site:,} bytes, on to the hub: {above:,}\n{out}")
        print(done(town, "devices", "status", "cluster.toml"))
    assert above < 0.6 * at_site

    (town.folder / "site/more").write_text("the next version")
    town.pack("next.tar")
    updated = done(town, "devices", "update", "cluster.toml", "--worker", "next.tar")
    out, summary = ended(town, started(town, "job.toml"))
    assert summary["status"] == "finished", "the same job again is another run"
    with capsys.disabled():
        print(updated, done(town, "devices", "status", "cluster.toml"))
    slots = {m.root.joinpath("opt/edgetrain/current").readlink() for m in machines.values()}
    assert {str(slot) for slot in slots} == {"b"}

    done(town, "devices", "remove", "cluster.toml", SITE[0], "--yes")
    assert SITE[0] not in (gate / "etc/edgetrain/hub/members").read_text()
    done(town, "devices", "remove", "cluster.toml", SITE[1], ALONE, GATE, "--yes")
    left = {
        name: set(found.items()) ^ set(before[name].items()) for name, found in town.state().items()
    }
    assert not any(left.values()), left
