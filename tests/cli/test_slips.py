"""What a slip costs: a wrong name is refused before torch is loaded, and leaves nothing behind; a
mistake in the user's own code is shown by that code."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys

import pytest
from command_line import EDGETRAIN, edgetrain, environment, running, write_tiny

from edgetrain import strategies
from edgetrain.__main__ import carry_out, main
from edgetrain.cli.parser import VERBS, parser
from edgetrain.errors import RENAMED, ConfigError, did_you_mean, in_words
from edgetrain.jobs.reading import keys, parse

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("own_imports")]

SLIPS = {
    "run strategy=dag": "did you mean 'dga'?",
    "run codec=tokp(0.01)": "did you mean 'topk'?",
    "run network=wan-20ms": "did you mean 'wan-200ms'?",
    "run device=raspbery-pi-4b": "did you mean 'raspberry-pi-4b'?",
    "run optimizer=sdg": "did you mean 'sgd'?",
    "run strategy.merge=krmu": "did you mean 'krum'?",
    "simulate strategy=dag": "did you mean 'dga'?",
    "simulate members=4 quorum=5": "the job has only 4 members",
    "run accelerator=gpu": "did you mean 'cuda'?",
    "run --steps 20": "a key of the job has no dashes: steps=…",
    "compare --local-steps 20": "a key of the job has no dashes: local_steps=…",
    "run --runz a": "did you mean '--runs'?",
    "run strategy=DGA": "did you mean 'dga'?",
    "run codec=INT8": "did you mean 'int8'?",
    "run device=rpi4": "did you mean 'raspberry-pi-4b'?",
    "run device=pi5": "did you mean 'raspberry-pi-5'?",
    "run rtt=abc": "milliseconds: rtt=500, or network=rtt-500ms",
    "run rtt=200ms steps=x": "train.steps = 'x'",
    "run strategy=dga steps=2 nowhere.toml": "no job file 'nowhere.toml'",
    "run a.toml b.toml": "'b.toml' is not an override, and there is one job file at most",
    "run members = 4": "a key reads members=4",
    "run members= 4": "a key reads members=4",
    "run members=four": "allowed is an integer from 1",
    "run members=0": "allowed is an integer from 1",
    "run epochs=3": "did you mean 'steps'?",
    "run rounds=10": "did you mean 'steps'?",
    "run clients=4": "did you mean 'members'?",
    "run workers=4": "did you mean 'members'?",
    "run learning_rate=0.1": "did you mean 'lr'?",
    "run compression=int8": "did you mean 'codec'?",
    "run model=resnet": "did you mean 'task'?",
    "run dataset=cifar10": "did you mean 'data'?",
    "run batch_size=8": "did you mean 'batch'?",
    "run fleet.member=3": "did you mean 'fleet.members'?",
    "run steps=2.5": "allowed is an integer from 1",
    "run pace_s=20ms": "allowed is a number from 0",
    "run delay=-3": "an integer or 'auto'",
    "run secure=yes": "allowed is true or false",
    "run codec=topk(2)": "topk keeps a share in (0, 1]",
    "run codec=topk": "as in topk(0.01), for 1 %",
    "run device=rpi5": "did you mean 'raspberry-pi-5'?",
    "run strategy=FedAvg(3)": "did you mean 'fedavg'?",
    "run --lr 0.1": "a key of the job has no dashes: lr=…",
    "run --strategy dga": "a key of the job has no dashes: strategy=…",
    "run --member 4": "did you mean 'members'? (a key of the job has no dashes)",
    "run --batch-size 4": "did you mean 'batch'? (a key of the job has no dashes)",
    "run --simulated": "`edgetrain simulate` does that",
    "run --vmap off": "`edgetrain simulate` does that",
    "simulate --resume x": "`edgetrain run` does that",
    "simulate --cluster c.toml": "`edgetrain run` does that",
    "simulate --emulate": "`edgetrain run` does that",
    "compare --strategy dga": "did you mean '--strategies'?",
    "compare --topologies stars": "did you mean 'star'?",
    "hub members=4 strategy=fedavg cohort=2 --any-job": "leave out --any-job",
    "hub --port 5555": "did you mean '--bind'?",
    "train job.toml": "did you mean 'run'?",
    "start job.toml": "did you mean 'run'?",
    "demo": "did you mean 'compare'?",
    "list": "did you mean 'runs'?",
    "simulation members=3": "did you mean 'simulate'?",
    "sweep": "a sweep needs an axis (as in --rtt 0,50,100)",
    "sweep --rtt a,b": "milliseconds: rtt=500",
    "sweep --set foo=1,2": "no axis 'foo'",
    "report nosuch": "nosuch does not exist",
    "completion powershell": "known: bash, fish, zsh",
    "run lr=fast": "lr = 'fast' (allowed is a finite number)",
    "run optimizer=adam momentum=0.9": "no key 'momentum' in a job (the optimizer's is optimizer.m",
    "run task=digits": "did you mean 'edgetrain.tasks:digits'?",
    "run task=edgetrain.tasks:digit": "did you mean 'digits'?",
    "run data.partition=nonsense": "no partition 'nonsense'",
    "sweep --rtt 0,50 task=digits": "did you mean 'edgetrain.tasks:digits'?",
    "compare strategy=dag": "did you mean 'dga'?",
    "compare strategy=dga": "--strategies sync-sgd,dga",
    "compare --strategies sync-sgd,dag": "did you mean 'dga'?",
    "compare codec=in8": "did you mean 'int8'?",
    "run --simulate members=4": "`edgetrain simulate` does that",
    "sweep --strategy fedavg,dag": "did you mean 'dga'?",
    "sweep --codec fp32,in8": "did you mean 'int8'?",
    "sweep --network none,wan-20ms": "did you mean 'wan-200ms'?",
    "sweep --device host,raspbery-pi-4b --members 1,2": "did you mean 'raspberry-pi-4b'?",
    "sweep --set optimizer=sgd,adma": "did you mean 'adam'?",
    "capacity network=wan-20ms": "did you mean 'wan-200ms'?",
    "capacity optimizer=sdg": "did you mean 'sgd'?",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """The status, the words and the heavy modules of each slip, all in one new process."""
    folder = tmp_path_factory.mktemp("slips")
    code = f"""
import contextlib, io, json, sys, time
from edgetrain.__main__ import main
from edgetrain import strategies
from edgetrain.cli.parser import VERBS, parser
for words in {list(SLIPS)!r}:
    said, began = io.StringIO(), time.process_time()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            status = main(words.split())
        except SystemExit as ended:
            status = ended.code
    spent = time.process_time() - began
    heavy = [name for name in ("torch", "matplotlib") if name in sys.modules]
    print(json.dumps([words, status, said.getvalue(), heavy, spent]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    found = {words: rest for words, *rest in map(json.loads, done.stdout.splitlines())}
    assert not list(folder.iterdir())
    return found


@pytest.mark.parametrize("words", SLIPS)
def test_a_wrong_name_is_refused_before_torch_is_loaded(refused, words):
    status, said, heavy, _ = refused[words]
    assert status == 2
    assert said.count("\n") == 1, said
    assert SLIPS[words] in said
    assert len(said) < 300
    assert heavy == []


def test_a_slip_costs_half_a_second_of_processor_time_at_most(refused):
    assert max(spent for *_, spent in refused.values()) < 0.5


MISSING = {
    "simulate": "greenlet",
    "sweep --rtt 0,50": "greenlet",
}


def test_a_missing_extra_is_named_before_torch_is_loaded(tmp_path):
    """Tried in one interpreter that forks for each."""
    code = f"""
import importlib.util as u, numpy, os, sys
found = u.find_spec
for words, package in {MISSING!r}.items():
    if not os.fork():
        u.find_spec = lambda name, *more: name != package and found(name, *more) or None
        from edgetrain.__main__ import main
        print(words, main(words.split()), "torch" in sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"{words} 2 False" for words in MISSING], done
    said = done.stderr.splitlines()
    assert len(said) == len(MISSING)
    assert all("pip install" in line and "[lab]'" in line for line in said)
    assert not list(tmp_path.iterdir())


WANT_TORCH = ("run", "simulate", "compare", "compare --simulate", "sweep --rtt 0,50")


def test_without_torch_what_needs_it_says_so_in_a_line(tmp_path):
    code = f"""
import os, sys
sys.modules["torch"] = None
from edgetrain.__main__ import main
for words in {WANT_TORCH!r}:
    if not os.fork():
        print(words, main(words.split()), flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True,
        text=True,
    )  # fmt: skip
    assert {f"{words} 2" for words in WANT_TORCH} <= set(done.stdout.splitlines()), done
    assert [line.count("torch is not installed") for line in done.stderr.splitlines()] == [1] * 5
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("words", [["run", ""], ["simulate", "", "members=2"], ["hub", ""]])
def test_an_empty_word_is_refused_in_a_line(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_the_torch_here_lacks_is_asked_of_it_and_named(capsys):
    def lacks():
        from torch.distributed import NoSuchThing  # noqa: F401

    assert carry_out(lacks, argparse.Namespace(debug=False)) == 2
    said = capsys.readouterr().err
    assert said.startswith("edgetrain: the torch here lacks what this needs: cannot import name")
    assert said.count("\n") == 1


def test_a_task_beside_no_job_file_is_found_in_the_current_folder(tmp_path):
    write_tiny(tmp_path)
    done = edgetrain("run", "task=tiny:Tiny", "members=2", "steps=2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_without_the_current_folder_on_its_path_and_with_ascii_streams_a_task_trains(tmp_path):
    write_tiny(tmp_path)
    code = (
        "import sys; sys.path.remove(''); from edgetrain.__main__ import main; sys.exit(main(%r))"
    )
    words = ["simulate", "task=tiny:Tiny", "members=2", "pace_s=0.01", "steps=2"]
    env = environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    program = [sys.executable, "-c", code % words]
    done = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("ascii").startswith("loading torch ...\n")


def test_a_stream_of_another_encoding_is_printed_to(tmp_path):
    env = environment(PYTHONIOENCODING="latin-1", PYTHONUTF8="0")
    words = "networks", "list"
    done = subprocess.run([*EDGETRAIN, *words], cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "São Paulo" in done.stdout.decode("latin-1")


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_former_name_is_answered_with_the_new_one(old, new, capsys):
    known = {full.rpartition(".")[2]: full for full in keys()}
    if new in known:
        table = known[new].partition(".")[0]
        for words in (f"{old}=1", f"{table}.{old}=1"):
            with pytest.raises(ConfigError) as refused:
                parse({}, [words])
            assert str(refused.value).endswith(f"{old}' in a job (it is called '{new}' now)")
        with pytest.raises(ConfigError) as refused:
            parse({table: {old: 1}})
        assert str(refused.value).endswith(f"'{table}.{old}' (it is called '{new}' now)")
    elif new in (*VERBS, "resume"):
        with pytest.raises(SystemExit):
            main([old] if new in VERBS else ["control", "runs/a", old])
        assert f"'{old}'; it is called '{new}' now (see" in capsys.readouterr().err
    else:
        with pytest.raises(ConfigError) as refused:
            strategies.find(f"dga({old})")
        assert str(refused.value).endswith(f"= {old} (it is called '{new}' now)")


def test_the_nearest_name_has_the_same_letters():
    assert did_you_mean("dag", ["fedavg", "dga"]) == "did you mean 'dga'?"


# -- the first line, and what a refusal leaves ----------------------------------------------------


def test_the_first_lines_say_what_is_waited_for(tmp_path):
    job = write_tiny(tmp_path, fleet={"members": 2}, train={"steps": 2})
    with running("run", job, cwd=tmp_path, program=EDGETRAIN) as command:
        assert command.until("…") == "loading torch …\n"
        assert command.said == "loading torch …\n"
        assert command.until("…") == "starting 2 members …\n"
        assert command.finish() == 0


def test_the_first_line_comes_without_torch():
    code = """
import sys
from edgetrain.cli import running
def loading(arguments):
    print([name for name in ("torch", "matplotlib") if name in sys.modules])
    raise SystemExit
running.say_loading = loading
from edgetrain.__main__ import main
from edgetrain import strategies
from edgetrain.cli.parser import VERBS, parser
main(["run"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "words",
    [
        ["run", "absences=[{at_s = 1, for_s = 1}]", "strategy=fedavg"],
        ["compare", "absences=[{at_s = 1, for_s = 1}]", "--strategies", "fedavg,dga"],
        ["simulate", "device=host:1,raspberry-pi-4b:1"],
    ],
    ids=" ".join,
)
def test_a_run_that_is_refused_leaves_no_folder(words, tmp_path, monkeypatch, capsys):
    job = write_tiny(tmp_path, fleet={"members": 2}, train={"steps": 2})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("edgetrain.training.emulated.warm_up", lambda: None)
    assert main([words[0], job, *words[1:]]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    runs = tmp_path / "runs"
    assert not runs.exists() or not list(runs.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["simulate"],
        ["capacity"],
        ["sweep", "--members", "1,2"],
        ["compare", "--simulate"],
    ],
    ids=" ".join,
)
def test_the_step_of_this_machine_is_measured_once_and_told(words, tmp_path, monkeypatch, capsys):
    job = write_tiny(tmp_path, fleet={"members": 2}, train={"steps": 2})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("edgetrain.training.host_pace.MEASURED", {})
    assert main([words[0], job, *words[1:]]) == 0
    said = capsys.readouterr().out
    assert said.count("device 'host': a step takes") == 1
    assert "pace_s=" in said


# -- mistakes in the user's task ------------------------------------------------------------------

MINE = """
import torch


def helper(x):
    return x.nope


class Mine:
    name, metric, better, target = "mine", "loss", "lower", None

    def __init__(self, where="", seed=0):
        self.where = where

    def model(self):
        self.slip("model")
        return torch.nn.Linear(3, 4)

    def samples(self, member, members):
        return 10

    def batches(self, member, members, batch, seed):
        self.slip("batches")
        while True:
            yield (torch.randn(batch, 3),)

    def loss(self, model, batch):
        self.slip("loss")
        return model(batch[0]).square().mean()

    def evaluate(self, model):
        self.slip("evaluate")
        return {"loss": 1.0}

    def slip(self, where):
        if self.where == "memory" and where == "loss":
            torch.empty(1 << 50)
        if self.where == where:
            helper(1)
"""


@pytest.mark.parametrize(("where", "simulate"), [("loss", False), ("memory", True)])
def test_a_mistake_in_a_task_is_a_line_and_the_users_frames(where, simulate, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    words = ["task=mine:Mine", f"data.where={where}", "members=2", "steps=3"]
    verb, more = ("simulate", "pace_s=0.1") if simulate else ("run", "network=none")
    done = edgetrain(verb, *words, more, cwd=tmp_path)
    assert done.returncode == 2
    first, *frames = done.stderr.splitlines()
    if where == "memory":
        assert "out of memory" in first
        assert "lower train.batch" in first
    else:
        assert "AttributeError: 'int' object has no attribute 'nope' (in helper, mine.py" in first
    assert any("in loss" in line for line in frames)
    assert not any("edgetrain" in line or "site-packages" in line for line in frames)
    assert "Traceback" not in done.stderr
    assert "finished" not in done.stdout


def test_a_mistake_in_a_model_is_shown_before_anything_starts(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    done = edgetrain("run", "task=mine:Mine", "data.where=model", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("edgetrain: AttributeError: ")
    assert "(in helper, mine.py line 6)" not in done.stdout
    assert not (tmp_path / "runs").exists()


def test_words_for_an_exception_of_edgetrains_own_name_no_frame_of_the_user():
    with pytest.raises(TypeError) as raised:
        did_you_mean("a", 1)
    raised.value.__traceback__ = raised.value.__traceback__.tb_next  # not this test's own frame
    assert in_words(raised.value).startswith("TypeError: ")
    assert "\n" not in in_words(raised.value)


def every_parser(parser):
    """This parser, and those of its verbs and their verbs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from every_parser(each)


def test_every_help_has_an_example_and_names_nothing_private():
    parsers = list(every_parser(parser()))
    assert len(parsers) > 40
    for each in parsers:
        said = each.format_help()
        assert not re.search(r"(?<![\w-])_[a-z]", said), each.prog
        # As a command below a line that ends in a colon.
        assert re.search(r":\n  (edgetrain|torchrun) ", each.epilog or ""), each.prog


@pytest.mark.parametrize(
    "words", [["capacity", "--members", "x"], ["capacity", "--rounds", "0"]], ids=str
)
def test_a_wrong_number_is_told_in_words(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert "_count" not in line
    assert "is not a whole number from 1" in line
