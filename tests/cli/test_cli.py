"""The command line: its help, its errors, and what it leaves behind when it ends in any way."""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import EDGETRAIN, Running, edgetrain, hub, running, write_tiny

from edgetrain.__main__ import main
from edgetrain.cli.parser import parser
from edgetrain.runs.folder import read_job, read_metrics, read_summary
from edgetrain.training import emulated

pytestmark = pytest.mark.usefixtures("own_imports")


def verbs(
    under: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    for action in under._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield (*path, name), inner
                yield from verbs(inner, (*path, name))


VERBS = dict(verbs(parser()))


# -- help -----------------------------------------------------------------------------------------


def test_the_verbs_are_these():
    top = {path[0] for path in VERBS if len(path) == 1}
    assert top == {
        "bundle", "capacity", "codecs", "compare", "completion", "control", "data", "devices",
        "doctor", "export", "gateway", "hub", "init", "keys", "member", "networks", "plan",
        "dashboard", "privacy", "rank", "report", "run", "runs", "simulate",
        "strategies", "sweep", "topology", "track", "watch",
    }  # fmt: skip


@pytest.mark.parametrize("path", [(), *VERBS], ids=" ".join)
def test_help(path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*path, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: edgetrain")
    if len(path) == 1:
        assert f"edgetrain {path[0]}" in text.split("\n\n", 1)[1], "no example"


@pytest.mark.real
def test_answers_can_be_had_as_json(capsys):
    for words in (
        ["strategies"],
        ["codecs"],
        ["devices", "list"],
        ["networks", "list"],
        ["doctor"],
    ):
        assert main([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)


@pytest.mark.real
def test_doctor_says_in_words_what_codes_and_decodes(capsys):
    assert main(["doctor", "--for", "hub"]) == 0
    said = capsys.readouterr().out
    (line,) = [text for text in said.splitlines() if " codecs " in text]
    assert line.split("codecs", 1)[1].strip().startswith(("C with ", "NumPy, "))


# -- errors ---------------------------------------------------------------------------------------


def assert_one_clear_line(status: int, stderr: str, *says: str) -> None:
    assert status == 2, stderr
    assert stderr.startswith("edgetrain: ")
    assert stderr.count("\n") == 1, stderr
    for text in says:
        assert text in stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["steps=0"], ["steps = 0", "from 1 to"]),
        (["netwrok=none"], ["'netwrok'", "did you mean 'network'?"]),
        (["steps"], ["no job file 'steps'", "a key reads steps=200"]),
        (["steps=2", "more"], ["no job file 'more'", "a key reads"]),
        (["strategy=dgaa"], ["'dgaa'", "did you mean 'dga'?"]),
        (
            ["local_steps=5", "strategy=sync-sgd"],
            ["local_steps = 5", "sync-sgd", "choose local-sgd"],
        ),
        (["strategy=sync-sgd", "delay=4"], ["delay = 4", "sync-sgd", "choose dga"]),
        (["network=wan-20ms"], ["'wan-20ms'", "did you mean 'wan-200ms'?"]),
        (["device=raspberry-pi-4"], ["'raspberry-pi-4'", "did you mean 'raspberry-pi-4b'?"]),
        (["members=4", "network=wifi:3"], ["network names 3 members, the job has 4"]),
        (["task=edgetrain.tasks:digit"], ["'digit'", "did you mean 'digits'?"]),
        (["task=nowhere:task"], ["nowhere"]),
        (["optimizer=sgdd"], ["'sgdd'", "did you mean 'sgd'?"]),
        (["codec=topk"], ["topk"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_job_that_cannot_be(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(emulated, "warm_up", lambda: None)  # no fork server inside pytest
    assert_one_clear_line(main(["run", "network=none", *words]), capsys.readouterr().err, *says)
    assert not list(tmp_path.iterdir())


def test_what_is_no_job_file(tmp_path, capsys):
    path = tmp_path / "job.toml"
    status = main(["run", str(path)])
    assert_one_clear_line(status, capsys.readouterr().err, "no job file", "edgetrain init")
    path.write_text("members: 8\n")
    assert_one_clear_line(main(["run", str(path)]), capsys.readouterr().err, "is not TOML")


@pytest.mark.real
def test_an_error_is_one_line_of_a_process_too(tmp_path):
    done = edgetrain("compare", "task=edgetrain.tasks:digit", cwd=tmp_path, program=EDGETRAIN)
    assert_one_clear_line(done.returncode, done.stderr, "'digit'", "did you mean 'digits'?")
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["strategies", "--jsn"], "unrecognized arguments: --jsn"),
        (["member"], "the following arguments are required: --index"),
        (["trian"], "invalid choice: 'trian'"),
    ],
)
def test_arguments_that_cannot_be(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compre"], ["'compre'", "did you mean 'compare'?", "see `edgetrain --help`"]),
        (["networks", "chek"], ["did you mean 'check'?", "see `edgetrain networks --help`"]),
        (["compare", "--simulte"], ["--simulte", "did you mean '--simulate'?"]),
        (["simulate", "--vmap", "offf"], ["'offf'", "did you mean 'off'?"]),
        (["keys", "list", "--jsn"], ["did you mean '--json'?", "see `edgetrain keys list --help`"]),
        (["capacity", "--members", "many"], ["'many' is not a whole number from 1"]),
        (["member"], ["the following arguments are required: --index"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_slip_is_one_line_with_the_nearest_word(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert re.match(r"edgetrain( \w+)*: error: ", said)
    assert said.count("\n") == 1
    for text in says:
        assert text in said


def test_the_bare_command_prints_its_help(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: edgetrain")
    assert "start here:" in said


@pytest.mark.real
def test_debug_shows_where_an_error_came_from(tmp_path):
    done = edgetrain("--debug", "hub", "netwrok=none", cwd=tmp_path, program=EDGETRAIN)
    assert "Traceback" in done.stderr
    assert done.returncode == 1


def test_an_unreachable_hub(tmp_path, capsys):
    with socket.socket() as taken:  # bound and not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["member", "--hub", address, "--index", "0"]) == 75
    assert_one_clear_line(2, capsys.readouterr().err, f"nothing listens at {address}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hub", "hub.local:5555", "--index", "0"], "write tcp://HOST:PORT"),
        (["--hub", "tcp://no-such-host.invalid:1", "--index", "0"], "cannot be resolved"),
        (["--hub", "tcp://localhost:1", "--index", "4"], "--index 4: allowed are 0 to 3"),
    ],
)
def test_a_member_that_cannot_be(words, says, capsys):
    assert main(["member", *words]) == (75 if says == "cannot be resolved" else 2)
    assert_one_clear_line(2, capsys.readouterr().err, says)


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--bind", "tcp://*:5555"], "this machine has no keys (make them with `edgetrain keys in"),
        (["--keys", "nowhere"], "tcp://localhost:5555 lets other machines in"),
        (["--bind", "tcp://no-such-host.invalid:0"], "cannot be resolved"),
        (["--bind", "tcp://203.0.113.7:0"], "is not an address of this machine"),
        (["--bind", "tcp://localhost:65536"], "not an address"),
        (["quorum=9"], "hub.quorum = 9: the job has only 4 members"),
    ],
)
def test_a_hub_that_cannot_be(words, says, capsys):
    assert main(["hub", *words]) == (75 if says == "cannot be resolved" else 2)
    assert_one_clear_line(2, capsys.readouterr().err, says)


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["hub", "--bind", f"tcp://localhost:{port}"]) == 2
    assert_one_clear_line(2, capsys.readouterr().err, f"port {port} on 127.0.0.1 is in use")


@pytest.mark.real
def test_init_writes_a_task_that_trains(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["members=2", "steps=160", "device=raspberry-pi-4b", "network=wan-50ms"]
    assert main(["init", "job.toml", "--task", "sine_of_mine.py", *words]) == 0
    assert main(["simulate", "job.toml", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["status"] == "finished"
    assert summary["final"]["loss"] < 0.1
    before = (tmp_path / "sine_of_mine.py").read_text()
    assert main(["init", "other.toml", "--task", "sine_of_mine.py"]) == 2
    assert not (tmp_path / "other.toml").exists()
    assert (tmp_path / "sine_of_mine.py").read_text() == before


@pytest.mark.parametrize("task", ["mine.txt", "a-b.py", "class.py", "json.py", "folder/mine.py"])
def test_init_refuses_a_task_that_the_job_could_not_name(tmp_path, capsys, monkeypatch, task):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "job.toml", "--task", task]) == 2
    assert_one_clear_line(2, capsys.readouterr().err, "--task")
    assert list(tmp_path.iterdir()) == []


def test_init_does_not_write_over_a_file(tmp_path, capsys):
    path = tmp_path / "job.toml"
    assert main(["init", str(path), "members=3"]) == 0
    before = path.read_text()
    assert main(["init", str(path)]) == 2
    assert_one_clear_line(2, capsys.readouterr().err, "exists already", "--force")
    assert path.read_text() == before


# -- a hub and its members ------------------------------------------------------------------------


@pytest.mark.real
def test_a_model_that_does_not_match_is_refused_and_the_hub_ends_on_a_signal(tmp_path):
    job = write_tiny(tmp_path, fleet={"members": 2})
    with hub(job, "--any-job", "lost_after_s=0.2", "heartbeat_s=0.1", cwd=tmp_path) as (
        serving,
        address,
    ):
        member = ("member", job, "--hub", address, "--index")
        with running(*member, "0", cwd=tmp_path) as first:
            serving.until("m0 joined")
            done = edgetrain(*member, "1", "data.width=5", cwd=tmp_path)
            *said, refused = done.stderr.splitlines(keepends=True)
            assert said == []
            assert f"joining {address} over lo 127.0.0.1\n" in done.stdout
            assert_one_clear_line(
                done.returncode, refused, "model", "16 parameters", "20", "the hub refused"
            )
            first.press_ctrl_c()
            assert first.finish() == 130
        serving.until("m0 left")
        serving.process.send_signal(signal.SIGTERM)
        assert serving.finish() == 143
    assert "Traceback" not in first.said + serving.said


@pytest.mark.real
def test_a_job_that_does_not_match_is_refused(tmp_path):
    job = write_tiny(tmp_path)
    with hub(job, cwd=tmp_path) as (_, address):
        done = edgetrain("member", job, "lr=0.1", "--hub", address, "--index", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "the hub refused: job: " in done.stderr.splitlines()[-1]


@pytest.mark.real
def test_a_hub_and_members_of_their_own_train_together(tmp_path):
    tables = {"fleet": {"members": 2}, "train": {"steps": 20}, "strategy": {"local_steps": 5}}
    job = write_tiny(tmp_path, **tables)
    alone = {"cwd": tmp_path, "program": EDGETRAIN}
    with hub(job, **alone) as (serving, address):
        member = ("member", job, "--hub", address, "--index")
        with running(*member, "0", **alone) as a, running(*member, "1", cwd=tmp_path) as b:
            assert (a.finish(), b.finish()) == (0, 0), a.said + b.said
        assert serving.finish() == 0
    found = {run.name.split("-", 2)[2]: read_summary(run) for run in (tmp_path / "runs").iterdir()}
    assert found.keys() == {"hub", "member-m0", "member-m1"}
    assert found["hub"]["rounds"] == 4
    assert found["member-m0"]["steps"] == 20


# -- a run, and how it ends -----------------------------------------------------------------------


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.mark.real
def test_run_answers_in_json(tmp_path):
    job = write_tiny(tmp_path)
    done = edgetrain("run", job, "steps=12", "members=2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["status"] == "finished"
    assert answer["steps"] == 12
    assert answer["final"].keys() == {"loss"}
    assert answer == read_summary(run_of(tmp_path)) | {"folder": answer["folder"]}
    assert (tmp_path / answer["folder"]) == run_of(tmp_path)


@pytest.mark.real
def test_compare_answers_in_json(tmp_path):
    job = write_tiny(tmp_path)
    words = ("compare", job, "steps=10", "members=2", "--strategies", "fedavg,dga", "--json")
    done = edgetrain(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [run["strategy"] for run in answer["runs"]] == ["fedavg", "dga"]
    assert (tmp_path / answer["picture"]).stat().st_size > 10_000
    assert {p.name for p in run_of(tmp_path).iterdir()} >= {"fedavg", "dga", "job.toml"}


# The stream backend: tests/fleet watches, machine-wide, what the packet backend leaves behind.
LONG = (
    *("steps=1000000", "pace_s=0.01", "members=3"),
    *("lost_after_s=0.5", "heartbeat_s=0.1", "backend=stream"),
)


def in_the_middle(command: Running) -> None:
    command.until("step ")


@pytest.mark.real
@pytest.mark.parametrize("network", ["none", "rtt-20ms"])
def test_ctrl_c_leaves_no_process_and_a_readable_folder(network, tmp_path):
    with running("run", write_tiny(tmp_path), *LONG, f"network={network}", cwd=tmp_path) as command:
        in_the_middle(command)
        assert len(command.workers()) == 4
        command.press_ctrl_c()
        assert command.finish() == 130
        assert not command.left_behind()
    assert command.said.endswith("edgetrain: interrupted\n")
    assert "Traceback" not in command.said
    run = run_of(tmp_path)
    assert f"run folder: runs/{run.name}\npage: runs/{run.name}/report.html\n" in command.said
    summary = read_summary(run)
    assert summary["status"] == "interrupted"
    assert summary["steps"] > 0
    assert read_job(run)["fleet"]["network"] == network
    stepped = {record["member"] for record in read_metrics(run, "step")}
    assert set() < stepped <= {"m0", "m1", "m2"}  # some may have been before their first step


@pytest.mark.real
@pytest.mark.parametrize("network", ["none", "rtt-20ms"])
def test_a_killed_parent_leaves_no_process(network, tmp_path):
    with running("run", write_tiny(tmp_path), *LONG, f"network={network}", cwd=tmp_path) as command:
        in_the_middle(command)
        assert len(command.started()) >= 5
        command.process.kill()
        assert not command.left_behind()
    assert list(read_metrics(run_of(tmp_path), "step"))


@pytest.mark.real
@pytest.mark.parametrize("strategy", ["dga", "sync-sgd"])
def test_a_killed_member_does_not_stop_the_others(strategy, tmp_path):
    # Silent for 5 s is dead here: one that only has no processor for a while is not.
    words = (*LONG, "steps=400", f"strategy={strategy}", "lost_after_s=5")
    with running("run", write_tiny(tmp_path), *words, cwd=tmp_path) as command:
        in_the_middle(command)
        _, _, m1, _ = command.workers()
        m1.kill()
        assert command.finish() == 0, command.said
        assert not command.left_behind()
    run = run_of(tmp_path)
    summary = read_summary(run)
    assert summary["status"] == "finished"
    assert summary["members_lost"] == ["m1"]
    done = {e["member"] for e in read_metrics(run, "event") if e["event"] == "finished"}
    assert done == {"m0", "m2"}
    assert summary["steps"] == 400
    assert "m1" in command.said


@pytest.mark.real
def test_when_all_members_fail_their_error_is_the_runs(tmp_path):
    job = write_tiny(tmp_path)
    done = edgetrain("run", job, "members=2", "steps=40", "lr=1e30", "local_steps=1", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "not finite" in done.stderr
    assert "lower the learning rate" in done.stderr
    assert read_summary(run_of(tmp_path))["status"] == "failed"
