"""Loading tasks, and what every task promises."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tasks_files import cifar_files, mnist_files, write
from torch import nn

from edgetrain import tasks
from edgetrain.errors import TaskError
from edgetrain.tasks import Task, load_task
from edgetrain.tasks.classification import Both, Mirror, Shift, Stack
from edgetrain.tasks.protocol import METHODS_OF_TASK


@pytest.fixture(params=["digits", "mnist", "cifar10", "char_lm"])
def task(request, tmp_path) -> Task:
    options = {"partition": "dirichlet(0.5)"}
    if request.param == "mnist":
        options["folder"] = str(write(tmp_path, mnist_files()))
    if request.param == "cifar10":
        options["folder"] = str(write(tmp_path, cifar_files()))
    return load_task(f"edgetrain.tasks:{request.param}", options)


def test_keeps_the_protocol(task):
    assert isinstance(task, Task)
    assert {name for name, value in vars(Task).items() if callable(value)} >= {*METHODS_OF_TASK}


def test_batches_are_the_same_for_the_same_arguments_and_of_equal_shapes(task):
    def first(seed: int, member: int = 1) -> list[tuple[torch.Tensor, ...]]:
        return list(itertools.islice(task.batches(member, 3, 4, seed), 12))

    for one, other in zip(first(0), first(0), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    shapes = {tuple(tensor.shape for tensor in batch) for batch in first(0)}
    assert len(shapes) == 1
    assert all(shape[0] == 4 for shape in shapes.pop())
    for another in (first(1), first(0, member=2)):
        assert any(not torch.equal(a[0], b[0]) for a, b in zip(first(0), another, strict=True))


def test_shards_add_up(task):
    assert sum(task.samples(member, 3) for member in range(3)) == task.samples(0, 1)


def test_a_step_lowers_the_loss_of_its_batch(task):
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = next(task.batches(0, 3, 8, seed=0))
    before = task.loss(model, batch)
    before.backward()
    assert before.shape == ()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    assert task.loss(model, batch).item() < before.item()


def test_equal_seeds_start_equal_models(task):
    def weights() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return list(task.model().parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(), weights(), strict=True))


def test_evaluation_gives_its_metric_and_leaves_the_model_as_it_was(task):
    model = nn.Sequential(task.model(), nn.Dropout(0.5))
    model.train()
    model[0].eval()
    figures = task.evaluate(model)
    assert {task.metric, "loss"} <= set(figures)
    assert figures == task.evaluate(model)
    assert [model.training, model[0].training, model[1].training] == [True, False, True]
    assert all(p.grad is None for p in model.parameters())


def test_a_mode_is_restored_when_evaluation_fails():
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 1)).train()
    with pytest.raises(RuntimeError):
        tasks.digits().evaluate(model)
    assert model.training


@pytest.mark.real
def test_digits_holds_out_a_fifth_and_imports_no_heavy_package():
    code = (
        "import sys; from edgetrain.tasks import load_task;"
        "t = load_task('edgetrain.tasks:digits', {});"
        "print(t.samples(0, 1), sorted({'sklearn', 'scipy', 'zmq'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "1438 []"


def test_digits_learns_in_large_batches():
    """Eight members' batches as one, as sync-sgd sees them: past the target in 150 steps."""
    task = tasks.digits()
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shards = [task.batches(member, 8, 16, seed=0) for member in range(8)]
    for _ in range(150):
        parts = [next(shard) for shard in shards]
        batch = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    assert task.evaluate(model)["accuracy"] > task.target


def test_digits_are_the_file_of_the_uci_and_need_no_download():
    data = Path(tasks.__file__).with_name("digits.csv.gz").read_bytes()
    assert (
        hashlib.sha256(gzip.decompress(data)).hexdigest()
        == "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
    )
    with pytest.raises(TaskError, match="nothing to download"):
        tasks.digits(download=True)


def test_char_lm_reads_a_file_a_folder_and_pythons_own_sources(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second " * 200)
    (tmp_path / "a.txt").write_bytes(b"first, " * 200)
    (tmp_path / "c.md").write_bytes(b"no")
    folder, file = tasks.char_lm(str(tmp_path)), tasks.char_lm(str(tmp_path / "b.txt"))
    assert bytes(folder.text) == b"first, " * 200 + b"second " * 200
    assert bytes(file.text) == b"second " * 200
    assert bytes(tasks.char_lm(limit_bytes=1500).text).startswith(b'"""')
    assert tasks.char_lm(str(tmp_path), limit_bytes=1500).samples(0, 1) < folder.samples(0, 1)


def test_char_lm_predicts_the_next_byte_and_only_from_those_before(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(250)) * 20)
    task = tasks.char_lm(str(tmp_path), context=8)
    inputs, targets = next(task.batches(0, 1, 32, 0))
    assert torch.equal((inputs + 1) % 250, targets)
    model = task.model()
    changed = inputs.clone()
    changed[:, -1] = 255
    assert torch.allclose(model(inputs)[:, :-1], model(changed)[:, :-1])


def test_char_lm_never_trains_on_what_it_holds_out():
    task = tasks.char_lm()
    assert not {*task.train} & {*task.test}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"folder": "/nowhere/at/all"}, "too short for ten blocks"),
        ({"context": 0}, r"data\.context = 0"),
        ({"limit_bytes": 0}, r"data\.limit_bytes = 0"),
        ({"limit_bytes": 640}, "too short for ten blocks of 64"),
    ],
)
def test_char_lm_refuses_what_is_no_text(options, says):
    with pytest.raises(TaskError, match=says):
        load_task("edgetrain.tasks:char_lm", options)


def test_a_stack_is_its_parts_joined():
    parts = [np.arange(12).reshape(6, 2), np.arange(100, 104).reshape(2, 2), np.ones((1, 2), int)]
    indices = np.array([8, 0, 6, 5, 7, 5])
    joined = Stack(parts)
    assert len(joined) == 9
    np.testing.assert_array_equal(joined[indices], np.concatenate(parts)[indices])


def varied(augment, image):
    return augment.apply(image, augment.draw(len(image), np.random.default_rng(0)))


def test_one_augmentation_after_another_is_both():
    image = np.arange(2 * 3 * 6 * 6, dtype=np.uint8).reshape(2, 3, 6, 6)
    rng = np.random.default_rng(0)
    shift, mirror = Shift(2), Mirror()
    first = shift.apply(image, shift.draw(2, rng))
    second = mirror.apply(first, mirror.draw(2, rng))
    np.testing.assert_array_equal(varied(Both(shift, mirror, columns=2), image), second)


@pytest.mark.parametrize("members", [2, 5])
def test_gathered_draws_are_the_batches(members):
    task = tasks.digits()
    wanted = [next(task.batches(m, members, 3, 7)) for m in range(members)]
    inputs, labels = task.gather([next(task.draws(m, members, 3, 7)) for m in range(members)])
    for member, (x, y) in enumerate(wanted):
        assert torch.equal(inputs[member], x)
        assert torch.equal(labels[member], y)


def test_a_shift_moves_whole_images_and_keeps_their_shape():
    image = np.zeros((50, 2, 5, 4), np.uint8)
    image[:, 0, 2, 2], image[:, 1, 2, 2] = 1, 2
    moved = varied(Shift(1), image)
    assert moved.shape == image.shape
    assert (moved[:, 0] * 2 == moved[:, 1]).all()
    rows, columns = np.nonzero(moved[:, 0])[1:]
    assert set(rows) == {1, 2, 3}
    assert set(columns) == {1, 2, 3}
    assert len(rows) == 50
    np.testing.assert_array_equal(varied(Shift(1, share=0.0), image), image)


def test_a_mirror_turns_some_images():
    image = np.tile(np.arange(4, dtype=np.uint8), (50, 1, 2, 1))
    turned = varied(Mirror(), image.copy())[:, 0, 0, 0] == 3
    assert 5 < turned.sum() < 45


MODULE = """
class Bare:
    name, metric, better, target = "bare", "loss", "lower", None
    def model(self): ...
    def samples(self, member, members): ...
    def batches(self, member, members, batch, seed): ...
    def loss(self, model, batch): ...
    def evaluate(self, model): ...

def good(size=1):
    task = Bare()
    task.size = size
    return task

def needy(folder):
    return Bare()

def open_ended(**options):
    task = Bare()
    task.options = options
    return task

def fails():
    raise ValueError("of its own")

def sideways():
    task = Bare()
    task.better = "bigger"
    return task

number = 3

from functools import partial
from os import mkdir
from torch import save
later = partial(mkdir, "made")

class Half:
    name = "half"
    def model(self): ...
"""


@pytest.fixture
def module(tmp_path, own_imports) -> Path:
    (tmp_path / "my_task.py").write_text(MODULE)
    (tmp_path / "broken_task.py").write_text("import nothing_like_this\n")
    (tmp_path / "torn_task.py").write_text("def (\n")
    return tmp_path


def test_a_task_beside_the_job_is_found(module):
    assert load_task("my_task:good", {"size": 2}, beside=module).name == "bare"
    assert load_task("my_task:open_ended", {"anything": 2}, beside=module).name == "bare"
    assert sys.path[-1] == str(module.resolve())


def test_defaults_go_only_where_they_are_taken(module):
    defaults = {"size": 1, "seed": 7}
    assert load_task("my_task:good", {}, defaults=defaults, beside=module).size == 1
    assert load_task("my_task:good", {"size": 2}, defaults=defaults, beside=module).size == 2
    taken = load_task("my_task:open_ended", {"size": 2}, defaults=defaults, beside=module)
    assert taken.options == {"size": 2, "seed": 7}


@pytest.mark.parametrize(
    ("spec", "options", "says"),
    [
        ("edgetrain.tasks.digits", {}, "not module:object"),
        (":digits", {}, "not module:object"),
        ("edgetrain.tasks:", {}, "not module:object"),
        ("edgetrain.task:digits", {}, "no module 'edgetrain.task'"),
        ("no_such_package.tasks:digits", {}, "no module 'no_such_package'"),
        ("edgetrain.tasks:digit", {}, "did you mean 'digits'"),
        ("edgetrain.tasks:digits", {"partitoin": "iid"}, "did you mean 'partition'"),
        ("edgetrain.tasks:digits", {"partition": "even"}, "iid, dirichlet"),
        ("edgetrain.tasks:digits", {"seed": "x"}, r"data\.seed = 'x'"),
        ("my_task:needy", {}, r"missing a required argument: 'folder'.*\[data\]"),
        ("my_task:fails", {}, "failed: ValueError: of its own"),
        ("builtins:print", {}, "is not called: 'builtins' is a module of Python"),
        ("os:mkdir", {"path": "made"}, "is not called: 'os' is a module of Python"),
        ("my_task:mkdir", {"path": "made"}, "is not called: 'posix' is a module of Python"),
        ("my_task:later", {}, "is not called: 'functools' is a module of Python"),
        ("my_task:save", {"obj": 1, "f": "made"}, "the package 'torch' does not say that it has"),
        ("torch:save", {"obj": 1, "f": "made"}, "the package 'torch' does not say that it has"),
        ("numpy:save", {"file": "made", "arr": 1}, "the package 'numpy' does not say that it has"),
        ("edgetrain.files.writing:write_text", {}, "the package 'edgetrain' does not say"),
        ("my_task:number", {}, "is a int, not a factory"),
        ("my_task:Half", {}, "lacks metric, better, target, samples, batches, loss, evaluate"),
        ("my_task:sideways", {}, "better = 'bigger'"),
        ("broken_task:x", {}, "cannot be imported: ModuleNotFoundError.*nothing_like_this"),
        ("torn_task:x", {}, "cannot be imported: SyntaxError"),
    ],
)
def test_a_bad_task_gets_one_clear_sentence(module, spec, options, says, monkeypatch):
    monkeypatch.chdir(module)
    with pytest.raises(TaskError, match=says):
        load_task(spec, options, beside=module)
    assert not list(module.glob("made*")), "nothing of others' was called"


def test_an_installed_package_may_say_that_it_has_tasks(module, monkeypatch):
    (module / "site/packaged").mkdir(parents=True)
    (module / "site/packaged/__init__.py").write_text(MODULE)
    info = module / "site/packaged-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged\nVersion: 1\n")
    (info / "top_level.txt").write_text("packaged\n")
    monkeypatch.syspath_prepend(module / "site")
    with pytest.raises(TaskError, match="the package 'packaged' does not say"):
        load_task("packaged:good", {}, beside=module)
    (info / "entry_points.txt").write_text("[edgetrain.tasks]\ngood = packaged:good\n")
    assert load_task("packaged:good", {}, beside=module).name == "bare"
