"""Jobs on a group of processes, as their users start them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys

import pytest
from command_line import edgetrain, environment, write_tiny
from run_folder_page import rows

from edgetrain.__main__ import main
from edgetrain.cli import rank
from edgetrain.runs.folder import read_metrics
from edgetrain.tasks import profiling

pytestmark = pytest.mark.usefixtures("own_imports")

TINY = {"fleet": {"members": 2}, "train": {"steps": 12}}
SERVERS = """
trusted = {trusted}
[[server]]
name = "a"
host = "10.0.0.1"
profile = "gpu-server"
accelerators = 2
interface = "eth0"
[[server]]
name = "b"
host = "10.0.0.2"
profile = "gpu-server"
accelerators = 2
"""


@pytest.mark.real
def test_run_and_resume(tmp_path, monkeypatch, capsys):
    job = write_tiny(tmp_path, **TINY, servers={"placement": "data=2"})
    done = edgetrain("run", job, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["placement"] == "data=2"
    assert summary["status"] == "finished"
    folder = tmp_path / summary["folder"]
    assert {"model.safetensors", "snapshots"} <= {path.name for path in folder.iterdir()}
    assert set(summary) - {"folder", "picture"} <= rows("## summary.json")
    for kind in ("step", "eval", "event"):
        keys = {key for record in read_metrics(folder, kind) for key in record}
        assert keys <= rows("Every line has") | rows(f"**{kind}**: ")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--resume", summary["folder"], "steps=20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume", "nowhere"], "no job file 'nowhere/job.toml'"),
        (["--print-commands"], "runs on its devices, not on a group"),
        (["servers.placement=data=3"], "data=3 does not divide the job's 2 members"),
        (["servers.placement=data=2", "accelerator=cuda"], "finds no GPU here"),
        (["servers.placement=data=2", "--print-commands"], "servers of a cluster.toml"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    job = [] if "--resume" in words else [write_tiny(tmp_path, **TINY)]
    assert main(["run", *job, *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len([line for line in error.splitlines() if line.startswith("edgetrain: ")]) == 1


CHARS = ["task=edgetrain.tasks:char_lm", "data.limit_bytes=20000", "members=4", "batch=4"]
DIGITS = ["task=edgetrain.tasks:digits", "members=4", "batch=4"]
EXPERTS = [*CHARS, "data.experts=6"]
BAD = [
    (
        CHARS,
        "servers.placement=data=4 cluster=cluster.toml",
        "4 ranks, the servers have 2 (data=2, or more servers)",
    ),
    (CHARS, "servers.placement=tensor=3", "does not divide the model's 4 heads (tensor=2)"),
    (CHARS, "servers.placement=data=3", "does not divide the job's 4 members"),
    (CHARS, "servers.placement=microbatches=3", "of a rank's 16 samples (microbatches=2)"),
    (CHARS, "servers.placement=pipeline=9", "9 stages of a model with 4 layers (at most 4)"),
    (CHARS, "servers.placement=pipeline=2_schedule=1fb1", "did you mean '1f1b'"),
    (CHARS, "servers.placement=recompute=4-9", "recompute=9 of a model with 4 layers (0 to 3)"),
    (CHARS, "servers.placement=data=2_shard=2_zero=5", "zero=5 (0, 1, 2 or 3)"),
    (CHARS, "servers.placement=sequence=3", "does not divide the 64 positions"),
    (CHARS, "servers.placement=data=2 optimizer=lbfgs", "computes the loss again"),
    (CHARS, "servers.placement=data=2 privacy.unit=example privacy.noise=1", "clips and noises"),
    (CHARS, "servers.placment=data=2", "did you mean 'servers.placement'"),
    (CHARS, "servers.compile=induktor", "did you mean 'inductor'"),
    (CHARS, "servers.layer_keep=2", "servers.layer_keep = 2"),
    (CHARS, "servers.placement=data=2 cluster=nowhere.toml", "nowhere.toml"),
    (
        EXPERTS,
        "servers.placement=data=4_experts=4",
        "experts=4 does not divide the model's 6 experts (experts=2)",
    ),
    (EXPERTS, "servers.placement=sequence=2", "6 experts, which take whole sequences"),
    (EXPERTS, "data.layers=1", "data.experts = 6 with data.layers = 1"),
    (CHARS, "servers.placement=data=2_experts=2", "the model has no experts"),
    (CHARS, "servers.placement=data=4_experts=3", "experts=3 does not divide data=4"),
    (DIGITS, "servers.placement=tensor=2", "does not say how its layers are divided"),
    (DIGITS, "servers.placement=sequence=2", "never calls scaled_dot_product_attention"),
]


@pytest.fixture(scope="module")
def seen_once():
    """A model is looked at once for all that is said of it: names and shapes -> its layers."""
    layers, profile = {}, profiling.profile

    def of(task, batch):
        names = tuple((name, tuple(p.shape)) for name, p in task.model().named_parameters())
        if names not in layers:
            layers[names] = profile(task, batch)
        return layers[names]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "profile", of)
        yield


@pytest.mark.usefixtures("seen_once")
@pytest.mark.parametrize(("job", "words", "said"), BAD, ids=[words for _, words, _ in BAD])
def test_bad_input_is_one_line_with_what_works(tmp_path, monkeypatch, capsys, job, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(
        '[[server]]\nname = "a"\nhost = "local"\naccelerators = 2\n'
    )
    given = [word.replace("_schedule", " schedule").replace("_shard", " shard")
             .replace("_experts", " experts")
             .replace("_zero", " zero") for word in words.split()]  # fmt: skip
    assert main(["run", *job, *given]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in lines if line.startswith("edgetrain: ")]) == 1, lines
    assert said in " ".join(lines)
    assert not (tmp_path / "runs").exists()


def test_a_job_that_fits_nowhere_is_refused_before_it_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["task=edgetrain.tasks:char_lm", "data.width=2048", "data.heads=16", "data.layers=6"]
    assert main(["run", *words, "device=raspberry-pi-4b"]) == 2
    error = capsys.readouterr().err
    assert "the job fits nowhere: needs" in error
    assert "raspberry-pi-4b has 3.4 GB" in error
    assert not (tmp_path / "runs").exists()


def commands(tmp_path, capsys, trusted):
    (tmp_path / "cluster.toml").write_text(SERVERS.format(trusted=trusted))
    job = write_tiny(
        tmp_path, fleet={"members": 4}, train={"steps": 4},
        servers={"placement": "data=4", "cluster": "cluster.toml"},
    )  # fmt: skip
    status = main(["run", job, "--print-commands"])
    return status, capsys.readouterr()


@pytest.mark.real
def test_commands_for_several_servers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, told = commands(tmp_path, capsys, "true")
    lines = [line for line in told.out.splitlines() if "torchrun" in line]
    assert status == 0
    assert len(lines) == 2
    assert lines[0].startswith("GLOO_SOCKET_IFNAME=eth0")
    for node, line in enumerate(lines):
        assert f"--nnodes=2 --node-rank={node} --nproc-per-node=2" in line
        assert "--master-addr=10.0.0.1" in line
        assert "--max-restarts=0 -m edgetrain rank job.toml" in line


def test_servers_over_a_strange_network_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, told = commands(tmp_path, capsys, "false")
    assert status == 2
    assert "without encryption or authentication" in told.err


@pytest.mark.real
def test_the_printed_command_trains(tmp_path):
    """The example of `edgetrain rank --help`, on this machine."""
    job = write_tiny(tmp_path, **TINY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = re.sub(r"\\\n", " ", rank.EXAMPLES.split("example:")[1].split("\n\n")[0]).split()
    words = [w.replace("29400", str(port)).replace("job.toml", job) for w in words]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words[1:]],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert summary["steps"] == 12
    assert (tmp_path / "runs" / "mine" / "model.safetensors").exists()
