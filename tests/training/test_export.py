"""`edgetrain export`: files of a trained run, evaluated; what is refused leaves nothing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.torch_version import TorchVersion

from edgetrain import errors
from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import metrics_path, write_job, write_summary
from edgetrain.tasks import held, weights
from edgetrain.training import export as exporting
from edgetrain.training.export import export, holds

# onnxruntime.quantization puts a folder of its own on sys.path.
pytestmark = pytest.mark.usefixtures("own_imports")
ONNX = pytest.mark.skipif(
    bool([name for name in exporting.PACKAGES if errors.find_spec(name) is None])
    or TorchVersion(torch.__version__) < (2, 9),  # whose exporter fails for some models
    reason="pip install 'edgetrain[export]' 'torch>=2.9'",
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "on_a_pi.py"


def finished(folder, *words, steps=0, status="finished"):
    """The folder of a run that trained for some steps in this process."""
    job = load(None, words)
    task = task_of(job)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), 0.005)
    batches = task.batches(0, 1, 32, 0)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(model, next(batches)).backward()
        optimizer.step()
    folder.mkdir(parents=True)
    write_job(folder, job.to_dict())
    metrics_path(folder).touch()
    write_summary(folder, {"status": status, "metric": task.metric, "final": task.evaluate(model)})
    weights.save(model, folder / weights.FILE)
    return folder


class Line:
    """A task whose model and whose way of asking it are the test's."""

    name, metric, better, target = "line", "loss", "lower", None
    x = torch.linspace(-1, 1, 12).reshape(6, 2)

    def __init__(self, module=None, ask=None):
        self.module = module or (lambda: nn.Linear(2, 2))
        self.ask = ask or (lambda model, x: model(x))

    def model(self):
        return self.module()

    def samples(self, index, members):
        return 6

    def batches(self, index, members, batch, seed):
        while True:
            yield self.x[:batch], self.x[:batch]

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def evaluate(self, model):
        with torch.no_grad():
            found = self.ask(model, self.x)
            return {"loss": float(sum(each.abs().sum() for each in found))}


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("line") / "run", f"task={held.spelled(Line())}")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A trained run, exported on the command line; and what that said."""
    run = finished(tmp_path_factory.mktemp("digits") / "run", steps=150)
    with redirect_stdout(StringIO()) as said:
        assert main(["export", str(run), "--onnx", "--int8", "--torch"]) == 0
    return run, said.getvalue()


def rows_of(run):
    said = json.loads((run / "export" / "export.json").read_text())
    return said, {row["file"]: row for row in said["files"]}


# -- what is written ------------------------------------------------------------------------------


@ONNX
def test_digits_is_within_half_a_point_and_int8_has_less_than_half_the_bytes(digits):
    said, rows = rows_of(digits[0])
    assert rows.keys() == set(exporting.FILES.values())
    assert said["trained"]["accuracy"] == said["final"] > 0.9
    for row in rows.values():
        assert row["holds"]
        assert abs(row["figures"]["accuracy"] - said["final"]) <= 0.005
        assert row["bytes"] == (digits[0] / "export" / row["file"]).stat().st_size
    assert rows["model.onnx"]["outputs_differ"] <= 1e-4 < rows["model.int8.onnx"]["outputs_differ"]
    assert rows["model.int8.onnx"]["bytes"] <= 0.45 * rows["model.onnx"]["bytes"]


@ONNX
def test_the_table_has_each_file_beside_the_trained_model(digits):
    lines = digits[1].splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("as trained"))
    assert [line.split()[0] for line in lines[first + 1 : first + 4]] == [
        "model.pt", "model.onnx", "model.int8.onnx",
    ]  # fmt: skip
    assert all(line.endswith(" holds") for line in lines[first + 1 : first + 4])


@ONNX
def test_a_transformer_is_within_a_hundredth_of_its_loss(tmp_path):
    run = finished(
        tmp_path / "run", "task=edgetrain.tasks:char_lm", "data.limit_bytes=200000", steps=40
    )
    export(run, ["onnx", "int8"])
    said, rows = rows_of(run)
    for row in rows.values():
        assert row["holds"]
        assert row["figures"]["loss"] <= 1.01 * said["trained"]["loss"]
    assert rows["model.onnx"]["outputs_differ"] <= 1e-4
    assert rows["model.int8.onnx"]["bytes"] <= 0.45 * rows["model.onnx"]["bytes"]


@pytest.mark.real
@ONNX
@pytest.mark.parametrize("file", ["model.onnx", "model.int8.onnx"])
def test_the_example_runs_where_there_is_no_torch(digits, file):
    """With onnxruntime and NumPy alone; samples one by one give what they give together."""
    folder = digits[0] / "export"
    code = (
        "import runpy, sys\nsys.modules |= {'torch': None, 'edgetrain': None}\n"
        f"sys.argv = {[str(EXAMPLE), str(folder / file), str(folder / 'sample.npz')]!r}\n"
        f"found = runpy.run_path({str(EXAMPLE)!r})\n"
        "run = lambda each: found['session'].run(None, {'inputs': each[None]})[0]\n"
        "one = [run(each) for each in found['inputs']]\n"
        "assert abs(found['np'].concatenate(one) - found['outputs']).max() < 0.5\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("sample ")]) == 8
    assert "the same: 100%" in done.stdout


def test_torchs_file_loads_with_every_name_and_nothing_but_weights(tmp_path):
    run = finished(tmp_path / "run", "task=edgetrain.tasks:char_lm", "data.limit_bytes=50000")
    export(run, ["torch"], tmp_path / "out")
    model = task_of(load(run / "job.toml")).model()
    model.load_state_dict(torch.load(tmp_path / "out" / "model.pt", weights_only=True))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.pt", "export.json"}


@ONNX
def test_of_a_private_job_no_sample_leaves(line, tmp_path):
    job = load(line / "job.toml", ["privacy=member", "noise=1", "delay=0"])
    run = finished(tmp_path / "run", f"task={job.task}")
    write_job(run, job.to_dict())
    export(run, ["int8"], tmp_path / "private")
    left = {path.name for path in (tmp_path / "private").iterdir()}
    assert left == {"model.int8.onnx", "export.json"}


class Measuring(nn.Sequential):
    """What a forward pass in training mode changes, and a table that no file holds."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 2))
        self.register_buffer("table", torch.randn(2), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.table


def ends_in_training(model, x):
    found = model.eval()(x)
    model.train()
    return found


def looks_at_other_weights(model, x):
    found = model.eval()(x)
    if isinstance(model, Measuring):
        model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    return found


def asks_with_gradients(model, x):
    with torch.enable_grad():
        return model(x)


ASKED = [ends_in_training, looks_at_other_weights, asks_with_gradients, lambda m, x: m.train()(x)]


@ONNX
@pytest.mark.parametrize("ask", ASKED)
def test_files_hold_the_weights_of_the_run_whatever_its_evaluation_does(ask, tmp_path):
    import onnx

    run = finished(tmp_path / "run", f"task={held.spelled(Line(Measuring, ask))}", steps=4)
    files = {row["file"]: row for row in export(run, list(exporting.FILES))["files"]}
    torch.manual_seed(0)
    model = Measuring().eval()
    model.load_state_dict(safetensors.torch.load_file(run / weights.FILE))
    trained = model.state_dict()
    written = torch.load(run / "export" / "model.pt", weights_only=True)
    graph = onnx.load(run / "export" / "model.onnx").graph.initializer
    in_onnx = {each.name: torch.tensor(onnx.numpy_helper.to_array(each)) for each in graph}
    assert {"0.running_mean", "2.weight"} <= in_onnx.keys() & trained.keys()
    for name, value in trained.items():
        assert torch.equal(written[name], value)
        assert torch.equal(in_onnx.get(name, value), value)
    if ask is not ASKED[-1]:  # whose figures differ each time
        assert files["model.onnx"]["outputs_differ"] <= 1e-6
        assert files["model.pt"]["holds"]
        assert files["model.onnx"]["holds"]
    sample = np.load(run / "export" / "sample.npz")
    np.testing.assert_allclose(
        sample["outputs"], model(torch.tensor(sample["inputs"])).detach(), atol=1e-6
    )


class Convolving(nn.Sequential):
    """What torch's exporter computes into one: a convolution and the batch norm behind it."""

    def __init__(self):
        super().__init__(nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 2, 1), nn.BatchNorm1d(2),
                         nn.Flatten(), nn.Linear(4, 2))  # fmt: skip


@ONNX
def test_a_convolution_may_take_in_its_norm(tmp_path):
    import onnx

    run = finished(tmp_path / "run", f"task={held.spelled(Line(Convolving))}", steps=4)
    (file,) = export(run, ["onnx"])["files"]
    assert file["holds"]
    nodes = onnx.load(run / "export" / "model.onnx").graph.node
    assert "BatchNormalization" not in [node.op_type for node in nodes], "as torch writes it"


# -- the bar --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "better", "trained", "found", "fine"),
    [
        ("accuracy", "higher", 0.970, 0.966, True),
        ("accuracy", "higher", 0.970, 0.964, False),
        ("accuracy", "higher", 0.970, 0.999, True),
        ("loss", "lower", 2.0, 2.019, True),
        ("loss", "lower", 2.0, 2.021, False),
        ("loss", "lower", -2.0, -1.99, True),
        ("loss", "lower", 2.0, math.nan, False),
        ("psnr", "higher", 30.0, 29.6, False),
    ],
)
def test_the_bar(metric, better, trained, found, fine):
    assert holds(metric, better, trained, found) is fine


@given(
    st.sampled_from(["accuracy", "loss"]), st.sampled_from(["higher", "lower"]),
    st.floats(-100, 100), st.floats(-100, 100), st.floats(0, 100),
)  # fmt: skip
def test_what_is_better_than_a_file_that_holds_holds(metric, better, trained, found, more):
    assert holds(metric, better, trained, trained)
    further = found + more if better == "higher" else found - more
    assert holds(metric, better, trained, found) <= holds(metric, better, trained, further)


def test_a_file_below_the_bar_is_kept_and_called_so(line, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exporting, "FIGURE_BAR", -0.5)
    assert main(["export", str(line), "--torch", "-o", str(tmp_path / "out")]) == 1
    found = capsys.readouterr()
    assert "BELOW IT" in found.out
    assert "below the bar, kept all the same: model.pt" in found.err
    assert (tmp_path / "out" / "model.pt").exists()


@ONNX
def test_outputs_that_are_no_numbers_do_not_hold(tmp_path):
    class Root(nn.Linear):
        def forward(self, x):
            return super().forward(x).sqrt()

    run = finished(tmp_path / "run", f"task={held.spelled(Line(lambda: Root(2, 2)))}")
    (row,) = export(run, ["onnx"])["files"]
    assert (row["holds"], row["outputs_differ"], row["figures"]["loss"]) == (False, None, None)
    assert "NaN" not in (run / "export" / "export.json").read_text()


@pytest.mark.parametrize("change", [lambda held: held.fill_(math.nan), torch.Tensor.int])
def test_a_model_without_numbers_is_not_said_to_hold(tmp_path, change, capsys):
    run = finished(tmp_path / "run")
    path = run / weights.FILE
    save_file({name: change(held) for name, held in load_file(path).items()}, path)
    assert main(["export", str(run), "--torch"]) == 2
    found = capsys.readouterr()
    assert ("holds" in found.out, "model.safetensors" in found.err) == (False, True)
    assert not (run / "export").exists()


# -- what is refused ------------------------------------------------------------------------------


def unfinished(run):
    (run / "summary.json").unlink()


def several(run):
    finished(run / "other", "members=1")
    metrics_path(run).unlink()
    (run / "again").mkdir()
    metrics_path(run / "again").touch()


RUNS = {
    "is not over": unfinished,
    "stopped in the middle: its status is 'interrupted'": (
        lambda run: write_summary(run, {"status": "interrupted"})
    ),
    "has no model.safetensors": lambda run: (run / weights.FILE).unlink(),
    "has 2 runs": several,
    "is no run folder": lambda run: metrics_path(run).unlink(),
    "is there already": lambda run: (run / "export").mkdir(),
    "cannot be read": lambda run: (run / weights.FILE).write_bytes(b"nothing"),
}


@pytest.mark.parametrize("said", RUNS)
def test_a_folder_that_cannot_be_exported_is_refused_by_name(said, tmp_path):
    run = finished(tmp_path / "run", "task=edgetrain.tasks:sized", "data.elements=10")
    RUNS[said](run)
    before = sorted(run.iterdir())
    with pytest.raises(ConfigError, match=said):
        export(run, ["torch"])
    assert sorted(run.iterdir()) == before


def test_formats_and_packages_that_are_not_there(line, monkeypatch):
    with pytest.raises(ConfigError, match=r"no format 'onx'.*did you mean 'onnx'"):
        export(line, ["onx"])
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs onnx and .* \(pip install -e '.*\[exp"):
        export(line, ["onnx"])


class Bessel(nn.Linear):
    def forward(self, x):
        return torch.special.i1e(super().forward(x))


class OfList(nn.Linear):
    def forward(self, x):
        return super().forward(x[0])


class ByValue(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 5 else x


class Twice(nn.Linear):
    def forward(self, x, scale=None):
        return super().forward(x), x


class Squares(nn.Linear):
    def forward(self, x):
        return super().forward(x) ** (2 if x.shape[0] == 4 else 1)


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen.add_(x.sum(0).detach() + 1)
        return super().forward(x) + self.seen


MODELS = {
    "changes its 'seen' when it is only evaluated": Line(Counting),
    "ONNX has no operator for prims.bessel_i1e": Line(lambda: Bessel(2, 2)),
    "torch cannot export the model to ONNX": Line(lambda: ByValue(2, 2)),
    "the model returns a tuple": Line(lambda: Twice(2, 2)),
    r"takes input 1, input 2: only models of one": (
        Line(lambda: nn.Bilinear(2, 2, 2), lambda model, x: model(x, x))
    ),
    r"takes input 1, scale: only models": (
        Line(lambda: Twice(2, 2), lambda model, x: model(x, scale=1))
    ),
    "takes a list, and no tensor": Line(lambda: OfList(2, 2), lambda model, x: model([x])),
    "never calls the model": Line(ask=lambda model, x: x),
    "4 samples at once and no other number": Line(lambda: Squares(2, 2)),
    r"cannot evaluate model.onnx: AttributeError": (
        Line(ask=lambda model, x: [model(x), model.weight])
    ),
}


@ONNX
def test_a_package_that_torchs_exporter_lacks_is_not_the_models_fault(tmp_path, monkeypatch):
    def lacks(*args, **named):
        try:
            import no_such_package  # noqa: F401
        except ImportError as error:
            raise RuntimeError("cannot translate") from error

    run = finished(tmp_path / "run", f"task={held.spelled(Line())}")
    monkeypatch.setattr(torch.onnx, "export", lacks)
    with pytest.raises(ConfigError, match="needs the package no_such_package, which is not"):
        export(run, ["onnx"])


@ONNX
@pytest.mark.parametrize("said", MODELS)
def test_a_model_that_onnx_cannot_say_is_refused_by_name(said, tmp_path):
    run = finished(tmp_path / "run", f"task={held.spelled(MODELS[said])}")
    before = sorted(run.iterdir())
    with pytest.raises(ConfigError, match=said) as refused:
        export(run, ["onnx"])
    assert "\n" not in str(refused.value)
    assert sorted(run.iterdir()) == before
