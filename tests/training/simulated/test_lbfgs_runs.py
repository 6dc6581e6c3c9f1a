"""lbfgs in virtual time: the bits do not depend on who computes; in one line what cannot be."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from edgetrain import strategies
from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.deal import SliceSums
from edgetrain.fleet import catalog
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import create, read_metrics
from edgetrain.runs.reports.live.frame import run_table
from edgetrain.runs.reports.live.watch import FolderWatch
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.slices import Slices
from edgetrain.training.simulated import simulation
from edgetrain.vectors.vector import checksum

JOB = [
    "data.partition=shared(all)",
    "steps=5",
    "evaluate_every=5",
    "network=wan-200ms",
    "batch=512",
]


def trained(folder, name, *words):
    inside = create(folder, name)
    simulation.run(plan(load(None, [*JOB, *words])), inside)
    return inside


def base_of(inside) -> str:
    """The checksum of the base at the end, which all members report."""
    said = [line["reason"] for line in read_metrics(inside, "event")]
    (base,) = {found[1] for each in said if (found := re.search(r"base (\w{16})", each))}
    return base


def slices_of(words):
    """The slices of a job's batch, and the model's vectors."""
    task = task_of(load(None, words))
    torch.manual_seed(0)
    model = task.model()
    flat = FlatModel(model)
    return Slices(task, model, flat, (0, 1), 0, 512, 0), flat


def alone(steps: int, of: int, row: str) -> str:
    """The checksum of the base that one process comes to, without hub or messages."""
    slices, flat = slices_of(JOB)
    search = strategies.find(row).search()
    search.start(flat.elements)
    for step in range(steps):
        sums, wants = SliceSums(), search.wants_gradient
        for number in range(of):
            loss, samples = slices.compute(number, of, wants)
            flat.pull_gradient()
            sums.add(number, samples, loss, flat.gradient.copy() if wants else None)
        mean = sums.mean()
        flat.params += search.move(flat.params.copy(), mean.loss, mean.vector, step + 1 == steps)
        flat.push_params()
    return f"{checksum(flat.params):016x}"


BOARDS = "device=raspberry-pi-zero-2w:2, raspberry-pi-5:3, raspberry-pi-4b:3"


def test_bits_do_not_depend_on_how_many_members_compute_nor_on_their_speed(tmp_path):
    one = trained(tmp_path, "one", "members=1", "strategy=lbfgs(4, 16)", "pace_s=0.3")
    eight = trained(tmp_path, "eight", "members=8", "strategy=lbfgs(4, 2)", BOARDS)
    assert base_of(one) == base_of(eight) == alone(5, 16, "lbfgs(4, 2)")
    rounds = [*read_metrics(eight, "round")]
    assert [line["slices"] for line in rounds] == [16] * 5
    assert rounds[-1]["loss"] < rounds[0]["loss"]
    watch = FolderWatch(one)
    watch.read()
    assert "80, 0, 0" in run_table([watch.state()], 200).plain


@pytest.mark.parametrize("kind", ["armijo", "wolfe"])
def test_one_two_and_four_hubs_find_the_same(tmp_path, monkeypatch, kind):
    close, ends = simulation.Simulation.close, []

    def kept(self):
        ends.append({member.training.half.base.tobytes() for member in self.members})
        close(self)

    monkeypatch.setattr(simulation.Simulation, "close", kept)
    found = []
    for hubs in (1, 2, 4):
        names = [f"tcp://hub{number}:5555" for number in range(hubs)]
        words = ["members=3", f"strategy=lbfgs(4, 3, all, 1, {kind})", "steps=8", "ranges=8"]
        words += ["pace_s=0.3", "evaluate_every=1000000", f"hubs={names if hubs > 1 else []}"]
        inside = trained(tmp_path, f"{hubs}", *words)
        losses = [line["loss"] for line in read_metrics(inside, "round") if "loss" in line]
        (base,) = ends[-1]
        found.append((np.frombuffer(base, np.float32), losses[:8]))
    for base, losses in found[1:]:
        length = np.linalg.norm(found[0][0])
        assert np.linalg.norm(base - found[0][0]) <= 1e-6 * length
        assert losses == pytest.approx(found[0][1], rel=1e-6)


def test_a_job_whose_loss_falls_no_further_ends(tmp_path):
    words = ["members=2", "strategy=lbfgs(5, 2, 16)", "steps=500", "pace_s=0.01"]
    inside = trained(tmp_path, "short", *words)
    rounds = [*read_metrics(inside, "round")]
    assert len(rounds) < 200
    assert rounds[-1]["loss"] < 1e-4
    events = [*read_metrics(inside, "event")]
    assert [e["member"] for e in events if e["event"] == "finished"].count("m1") == 1
    assert base_of(inside)
    assert json.loads((inside / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.partition=iid"], "slices are of a batch that all members hold"),
        (["secure=true"], "masks are removed from the sum"),
        (["merge=median"], "compares members"),
        (["codec=int8"], "has to be whole, and not rounded"),
        (["reply_codec=fp16"], "has to be whole, and not rounded"),
        (["privacy=example", "noise=1"], "members' data are private"),
        (["strategy=lbfgs(0)"], "history = 0 (allowed are whole numbers from 1"),
        (["strategy=lbfgs(10, 8, 0)"], "batch = 0 (allowed are whole numbers from 1"),
        (
            ["strategy=lbfgs(10, 8, all, 1, golden)"],
            "search = golden (allowed are armijo and wolfe)",
        ),
        (["strategy=lbfgs | adam"], "the hub moves the base by a search of its own"),
        (["topology=direct"], "hands out work"),
        (["quorum=2"], "says how many contributions make a round"),
        (["replica=tcp://127.0.0.1:1"], "hub.replica"),
        (["gateways=true"], "hands out work"),
        (["accumulate=2"], "samples are taken a few at a time already"),
        (["train.clip=1"], "lbfgs and train.clip = 1.0: the hub's search says how long a step is"),
        (["schedule=linear"], "lbfgs and train.schedule = 'linear'"),
        (["lr_reference_batch=64"], "lbfgs and train.lr_reference_batch = 64"),
        (["local_steps=5"], "exchanges gradients at every step"),
        (["delay=5"], "lbfgs and strategy.delay = 5: it waits"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(load(None, ["strategy=lbfgs", "data.partition=shared(all)", *words]))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["strategy=lbfgs(10, 8, 100000)"], "the data have"),
        (["strategy=lbfgs(10, 8, 16)"], "cuts a batch into 32 slices, and it has 16 samples"),
        (["data.partition=shared(64)"], "members hold other data"),
    ],
)
def test_what_the_data_do_not_have_is_refused_before_anything_starts(words, said):
    with pytest.raises(ConfigError) as refused:
        plan(load(None, ["strategy=lbfgs", "data.partition=shared(all)", *words]))
    assert said in str(refused.value)


def test_the_losses_of_five_iterations_are_torch_s(tmp_path):
    words = ["members=2", "strategy=lbfgs(10, 3, 300, 1, wolfe)", "steps=8", "pace_s=0.3"]
    inside = trained(tmp_path, "digits", *words)
    ours = [line["loss"] for line in read_metrics(inside, "round")]
    task = task_of(load(None, [*JOB, *words]))
    torch.manual_seed(0)
    model = task.model()
    slices = Slices(task, model, FlatModel(model), (0, 2), 300, 512, 0)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.LBFGS(
        parameters, lr=1, max_iter=5, history_size=10, line_search_fn="strong_wolfe"
    )
    theirs = []

    def closure():
        total, gradients = torch.zeros(()), [torch.zeros_like(each) for each in parameters]
        for number in range(6):
            loss, samples = slices.compute(number, 6, gradient=True)
            total = total + loss * samples / 300
            for mean, each in zip(gradients, parameters, strict=True):
                mean += each.grad * (samples / 300)
        for mean, each in zip(gradients, parameters, strict=True):
            each.grad.copy_(mean)
        theirs.append(total.item())
        return total

    optimizer.step(closure)
    count = min(len(theirs), len(ours))
    assert count >= 6
    # Line searches make more of what the order of sums does: 8e-5 by the last, on one processor.
    assert ours[:count] == pytest.approx(theirs[:count], rel=5e-4)


def test_copies_keep_a_board_ten_times_slower_from_holding_up_the_batch(tmp_path):
    """Virtual seconds, exact, of boards whose computing is what takes time."""
    profile = catalog.load("devices", "raspberry-pi-4b")[0].read_text()
    boards = []
    for name, slower in (("fast", 1), ("slow", 10)):
        text = re.sub(r"(?m)^train_gflops = [\d.]+$", f"train_gflops = {0.119 / slower}", profile)
        text = re.sub(r"(?m)^dispatch_s = [\d.e-]+$", f"dispatch_s = {0.0099 * slower}", text)
        boards.append(str(tmp_path / f"{name}.toml"))
        (tmp_path / f"{name}.toml").write_text(text)
    fast, slow = boards

    def batch(name: str, device: str, copies: int):
        words = ["members=8", "steps=1", "network=none", "hub.message_s=0", f"device={device}"]
        inside = trained(
            tmp_path, name, *words, f"strategy=lbfgs(10, 6, 480, {copies})", "batch=16"
        )
        (line,) = read_metrics(inside, "round")
        return line

    equal = batch("equal", fast, 1)
    copied = batch("copied", f"{fast}:7, {slow}", 1)
    alone = batch("alone", f"{fast}:7, {slow}", 0)
    assert equal["wasted"] == alone["wasted"] == 0
    assert copied["t"] <= 1.3 * equal["t"]
    assert alone["t"] >= 3 * equal["t"]
    assert 0 < copied["wasted"] <= 0.1 * copied["slices"]
