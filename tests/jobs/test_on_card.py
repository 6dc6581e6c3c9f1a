"""What a card lacks of its job is found before it is written: the task is made as a device will."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from edgetrain import tasks
from edgetrain.errors import ConfigError
from edgetrain.jobs import bundles
from edgetrain.jobs.on_card import Card, check
from edgetrain.provisioning.cards import archive

pytestmark = pytest.mark.real

LOCKS = archive.workers().folder.glob("*.txt")
LOCKED = {
    name.replace("-", "_")
    for lock in LOCKS
    for name in re.findall(r"^([a-z0-9-]+)==", lock.read_text(), re.MULTILINE)
}
MODULES = {"edgetrain", "zmq", "torchgen", "functorch", *LOCKED} - {"pyzmq"}
"""What is in the worker archive for a Raspberry Pi."""
DIGITS = Path(tasks.__file__).with_name("digits.csv.gz")
OWN = """
import torch
from edgetrain.tasks.starter import Task as Sine

class Task(Sine):
    pass
"""


def job(task: str = "edgetrain.tasks:digits", more: str = "") -> bytes:
    return f'task = "{task}"\n{more}\n[fleet]\nmembers = 2\n'.encode()


def bundle() -> tuple[str, bytes, str]:
    content = bundles.pack({"mine.py": OWN.encode()})
    return "my.bundle", content, bundles.digest_of(content)


def test_the_documented_first_job_can_be_made_on_a_card():
    page = (Path(__file__).parents[2] / "docs/how-to/flashing.md").read_text()
    (named,) = re.findall(r"edgetrain init job.toml members=8 task=(\S+)", page)
    assert check(Card(job(named), MODULES)) == ""


def test_what_a_card_has_is_enough(tmp_path):
    shutil.copy(DIGITS, tmp_path)
    assert check(Card(job(), MODULES, tmp_path)) == ""
    assert check(Card(job(), MODULES)) == "", "digits come with edgetrain"
    assert check(Card(job("my.bundle#mine:Task"), MODULES, None, bundle())) == ""


LACKING = {
    "a data set": (job("edgetrain.tasks:mnist"), False, "no train-images", 'job.data = "FOLDER"'),
    "the file of a data set": (
        job(), True, "/etc/edgetrain/current/data/digits.csv.gz", "job.data",
    ),
    "code of one's own": (
        job("mine:Task"), False, "no module 'mine'", "edgetrain bundle make mine.py"
    ),
    "a model to start from": (
        job("edgetrain.tasks:sized", 'start = "m.safetensors"'), False,
        "start = '/etc/edgetrain/current/m.safetensors': there is no such file", "job.data",
    ),
    "what masks need": (
        job("edgetrain.tasks:sized", "strategy.secure = true").replace(b"= 2", b"= 4"), False,
        "needs cryptography", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LACKING)
def test_what_a_card_lacks_is_refused(tmp_path, what):
    text, data, said, way_out = LACKING[what]
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(ConfigError) as refused:
        check(Card(text, MODULES, tmp_path if data else None))
    assert refused.value.message.startswith("no card has what the job's task needs: ")
    assert said in refused.value.message
    assert way_out in refused.value.hint
    assert str(tmp_path) not in str(refused.value)


def test_what_only_the_worker_has_cannot_be_tried_here():
    code = "import not_on_this_machine\n" + OWN
    content = bundles.pack({"mine.py": code.encode()})
    own = ("my.bundle", content, bundles.digest_of(content))
    card = Card(job("my.bundle#mine:Task"), {*MODULES, "not_on_this_machine"}, None, own)
    assert check(card) == "the worker has not_on_this_machine, and this machine has not"
    with pytest.raises(ConfigError, match="No module named 'not_on_this_machine'"):
        check(Card(job("my.bundle#mine:Task"), MODULES, None, own))


def test_its_process_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    check(Card(job("edgetrain.tasks:sized"), MODULES))
    assert list(tmp_path.iterdir()) == []
