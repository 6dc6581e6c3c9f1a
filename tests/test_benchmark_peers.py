"""benchmarks/peers.py and simulations.py: what they refuse, count and conclude, without a peer."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def peers(monkeypatch, own_imports):
    monkeypatch.syspath_prepend(FOLDER)
    import peers

    return peers


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--systems", "ddp,dgq"], "no system 'dgq' (did you mean 'dga'?)"),
        (["--python", "flower"], "NAME=PYTHON is needed"),
        (["--python", "flwer=python3"], "no environment 'flwer' (did you mean 'flower'?)"),
        (["--python", "flower=no-such-python"], "no such program"),
        (["--install", "flwer"], "no environment 'flwer'"),
        (["--seeds", "a"], "--seeds a (whole numbers"),
        (["--members", "1"], "--members 1 (two or more)"),
        (["--network", "wan-20ms"], "no network profile 'wan-20ms'"),
    ],
)
def test_a_slip_is_refused_in_one_line(peers, words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["peers.py", *words])
    assert peers.main() == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


def test_a_system_that_is_not_installed_says_how_to(peers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers.environments, "HOME", tmp_path)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--systems", "torchft"])
    assert peers.main() == 2
    assert "(python benchmarks/peers.py --install torchft)" in capsys.readouterr().err
    assert "torchft" not in peers.usual()


def test_what_does_not_begin_keeps_what_its_hosts_said(peers, tmp_path, monkeypatch):
    def run(profiles, member, hub, seed):
        folder = Path(member[member.index("--folder") + 1])
        (folder / "1.log").write_text("why")

    monkeypatch.setattr(peers.lab, "run", run)
    monkeypatch.setattr(peers.peer, "mark", lambda variables: None)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--systems", "ddp"])
    arguments = peers.arguments_of(argparse.ArgumentParser())
    arguments.logs = tmp_path
    found = peers.train("ddp", arguments, 0, 0)
    assert found.step_s is None
    place = Path(found.problem.removeprefix("it did not begin, see "))
    assert (place / "1.log").read_text() == "why"


def test_the_limit_counts_from_when_members_have_met(peers, tmp_path, monkeypatch):
    now, looks = [0.0], []
    monkeypatch.setattr(peers.time, "monotonic", lambda: now[0])
    with peers.limit(5, tmp_path):
        look = peers.signal.getsignal(peers.signal.SIGALRM)
        for second in range(130):
            now[0] = float(second)
            if second == 100:
                (tmp_path / "0.jsonl").write_text("{}")
            looks.append(second)
            look()
    assert looks[-1] == 106


def test_two_links_of_a_mesh_are_one_of_the_network(peers):
    whole = peers.networks.load("4g-medium")
    half = peers.meshed(whole)
    assert 2 * half.rtt_ms == whole.rtt_ms
    assert 2 * half.up.mean_loss_percent == pytest.approx(whole.up.mean_loss_percent, rel=0.01)
    assert half.up.rate_mbit == whole.up.rate_mbit


def test_a_diary_that_ends_early_says_after_how_many_steps(peers):
    arguments = argparse.Namespace(members=2, target=0.9, task="digits", steps=20)
    spent = {"sent": 40, "received": 20, "cpu_s": 1.0}
    first = [
        {"t": 10.0, "begins": 0},
        {"t": 15.0, "step": 5, "figure": 0.5, **spent},
        {"t": 20.0, "step": 10, "figure": 0.95, **spent},
    ]
    second = [{"t": 9.0, "begins": 1}, {"t": 19.0, "step": 10, **spent}]
    found = peers.judge("ddp", 3, [first, second], arguments)
    assert (found.step_s, found.target_s, found.final) == (1.1, 11.0, 0.95)
    assert (found.sent, found.received, found.cpu_s) == (4.0, 2.0, 0.1)
    assert found.problem == "after 10 steps"
    assert peers.judge("ddp", 3, [first, second[:1]], arguments).step_s is None


def test_the_verdict_takes_the_best_of_the_others(peers):
    def at(name, *targets):
        return [peers.Found(name, seed, 1.0, target) for seed, target in enumerate(targets)]

    found = [*at("ddp", 60.0, 50.0, 70.0), *at("powersgd", 40.0, None, None)]
    found += [*at("hivemind", None), *at("dga-topk", 10.0), *at("dga", None)]
    text = peers.verdict(found, {"limit": 100})
    assert text.splitlines() == [
        "ours: dga, topk: 6.0 times sooner than the first synchronous peer, DDP, gloo",
        "ours: dga, topk: more than 10.0 times sooner than the first other peer",
    ]


def test_each_environment_is_locked_by_hashes(peers):
    assert peers.environments.known() == ["flower", "hivemind", "pfl", "torchft"]
    for name in peers.environments.known():
        first, *lines = (FOLDER / "locks" / f"{name}.txt").read_text().splitlines()
        assert peers.environments.LOCKED_FOR in first
        assert lines
        assert all("==" in line and " --hash=sha256:" in line for line in lines)


@pytest.mark.real
def test_processes_are_found_by_what_they_were_started_with(peers):
    code = "held = bytearray(50_000_000); print(flush=True); input()"
    marked = peers.Peak({"EDGETRAIN_PEERS": "mine"})
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={"EDGETRAIN_PEERS": "mine"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        from processes import Marked, cpu_seconds, memory_bytes

        assert Marked(EDGETRAIN_PEERS="mine")() == [process.pid]
        assert Marked(EDGETRAIN_PEERS="other")() == []
        assert 50_000_000 < memory_bytes([process.pid]) < 100_000_000
        assert cpu_seconds([process.pid]) > 0
        process.stdin.close()
    assert marked.memory_bytes == 0


def test_the_job_of_the_simulations_is_one_that_edgetrain_takes(peers):
    import simulations

    assert simulations.edgetrain_simulation(members=2, rounds=1, local_steps=1) > 0


def test_simulations_refuse_an_unknown_system(peers, monkeypatch, capsys):
    import simulations

    monkeypatch.setattr(sys, "argv", ["simulations.py", "--systems", "flour"])
    assert simulations.main() == 2
    assert capsys.readouterr().err == (
        "simulations.py: no system 'flour' (did you mean 'flower'?)\n"
    )
