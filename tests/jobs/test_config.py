"""The job: every key typed, ranged, documented, and misspelt ones answered with the near miss."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import ConfigError, TaskError
from edgetrain.jobs.grid import text_of
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.reading import keys, load, parse

JOBS = Path(__file__).parents[2] / "docs/reference/jobs.md"


def value_of(job, key):
    for part in key.split("."):
        job = job[part] if isinstance(job, dict) else getattr(job, part)
    return job


RANGED = {key: spec for key, spec in keys().items() if "low" in spec.metadata}


def test_defaults_are_within_their_ranges_and_load_as_they_are():
    assert load(None) == Job() == parse({})
    assert parse(Job().to_dict()) == Job()


@given(st.data(), st.sampled_from(list(RANGED)))
def test_ranged_keys_take_their_range_and_nothing_else(data, key):
    spec = RANGED[key]
    low, high = spec.metadata["low"], spec.metadata["high"]
    whole = type(spec.metadata["low"]) is int
    inside = data.draw(st.integers(low, high) if whole else st.floats(low, high))
    assert value_of(parse({}, [f"{key}={inside!r}"]), key) == inside
    for outside in (low - 1, high + 1, -(10**30), 10**30):
        with pytest.raises(ConfigError, match=rf"{key} = .*allowed is .* from .* to"):
            parse({}, [f"{key}={outside}"])
    for wrong in ("true", "'text'", "[1]", "{}", "nan", "inf", "" if whole else "''"):
        with pytest.raises(ConfigError, match=rf"{key} = .*allowed is"):
            parse({}, [f"{key}={wrong}"])
    if whole:
        with pytest.raises(ConfigError):
            parse({}, [f"{key}=1.5"])


def test_a_whole_number_will_do_for_seconds():
    found = parse({"hub": {"lost_after_s": 7}}).hub.lost_after_s
    assert (found, type(found)) == (7.0, float)


@pytest.mark.parametrize(
    ("table", "hint"),
    [
        ({"sede": 1}, "no key 'sede' (did you mean 'seed'?)"),
        ({"fleet": {"memebrs": 1}}, "no key 'fleet.memebrs' (did you mean 'members'?)"),
        ({"strategy": {"dely": 1}}, "no key 'strategy.dely' (did you mean 'delay'?)"),
        ({"zzz": 1}, "no key 'zzz' (known: "),
        ({"fleet": 3}, "fleet = 3 (allowed is a table)"),
        ({"data": 3}, "data = 3 (allowed is a table"),
        ({"task": 3}, "task = 3 (allowed is text"),
        ({"fault": []}, "no key 'fault' (did you mean 'faults'?)"),
        ({"faults": {"kind": "down"}}, "faults = {'kind': 'down'} (allowed is a list of tables)"),
        ({"faults": [3]}, "faults[0] = 3 (allowed is a table)"),
        ({"fleet": {"site": ""}}, "no key 'fleet.site' (did you mean 'sites'?)"),
        ({"fleet": {"congestion": 3}}, "fleet.congestion = 3 (allowed is text)"),
        (
            {"strategy": {"delay": "soon"}},
            "strategy.delay = 'soon' (allowed is an integer or 'auto'",
        ),
    ],
)
def test_what_cannot_be_is_named_with_the_file(table, hint):
    with pytest.raises(ConfigError) as caught:
        parse(table, source="job.toml")
    assert f"job.toml: {hint}" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("partition=dirichlet(0.3)", "data.partition", "dirichlet(0.3)"),
        ("steps=7", "train.steps", 7),
        ("network=wan-200ms", "fleet.network", "wan-200ms"),
        ("network='wifi:4, 4g-bad:4'", "fleet.network", "wifi:4, 4g-bad:4"),
        ("device=raspberry-pi-4b:6, host:2", "fleet.device", "raspberry-pi-4b:6, host:2"),
        ("strategy=fedavg", "strategy.name", "fedavg"),
        ("strategy.delay=20", "strategy.delay", 20),
        ("delay=auto", "strategy.delay", "auto"),
        ("codec=topk(0.01) | q2", "strategy.codec", "topk(0.01) | q2"),
        ("lr=0.5", "train.optimizer.lr", 0.5),
        ("optimizer.momentum=0", "train.optimizer.momentum", 0),
        ("optimizer=adam", "train.optimizer", {"name": "adam"}),
        ("optimizer={name='adamw', lr=1e-3}", "train.optimizer", {"name": "adamw", "lr": 0.001}),
        ("data.partition=dirichlet(0.3)", "data.partition", "dirichlet(0.3)"),
        ("data.held_out=10", "data.held_out", 10),
        (" seed = 3 ", "seed", 3),
        ("name=a=b", "name", "a=b"),
        ("hub.heartbeat_s=2", "hub.heartbeat_s", 2.0),
        ("sites=home-fixed: 0-3, 4g-good: 4 5", "fleet.sites", "home-fixed: 0-3, 4g-good: 4 5"),
        ("congestion=reno", "fleet.congestion", "reno"),
        (
            "faults=[{ kind = 'down', at_s = 1, for_s = 2.5, members = [0] }]",
            "faults",
            [{"kind": "down", "at_s": 1, "for_s": 2.5, "members": [0]}],
        ),
    ],
)
def test_overrides_by_full_and_short_keys(override, key, value):
    assert value_of(parse({}, [override]), key) == value


def test_overrides_win_one_after_the_other_and_leave_the_table_alone():
    table = {"fleet": {"members": 3}, "data": {"folder": "x"}}
    job = parse(table, ["members=4", "members=5", "data.seed=1"])
    assert job.fleet.members == 5
    assert job.data == {"folder": "x", "seed": 1}
    assert table == {"fleet": {"members": 3}, "data": {"folder": "x"}}


def test_lr_keeps_the_rest_of_the_optimizer():
    assert parse({}, ["lr=0.5"]).train.optimizer == {"name": "sgd", "lr": 0.5, "momentum": 0.9}
    assert parse({}, ["optimizer=adam", "lr=0.5"]).train.optimizer == {"name": "adam", "lr": 0.5}
    assert parse({}, ["lr=0.5", "optimizer=adam"]).train.optimizer == {"name": "adam", "lr": 0.5}


def test_a_table_is_one_word():
    table = {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.99], "amsgrad": True}
    assert parse({}, [f"optimizer={text_of(table)}"]).train.optimizer == table


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("steps", "'steps' is not an override (it reads key=value"),
        ("=3", "'=3' is not an override"),
        (f"{'a.' * 50_000}a=1", "…' has 50001 parts"),
        (f"data.{'a.' * 50_000}a=1", "…' has 50002 parts"),
        ("netwrok=wifi", "no key 'netwrok' in a job (did you mean 'network'?)"),
        ("fleet.netwrok=wifi", "no key 'fleet.netwrok' in a job (did you mean 'fleet.network'?)"),
        ("fleet.members.x=1", "no key 'fleet.members.x'"),
        ("seed.x=1", "no key 'seed.x'"),
    ],
)
def test_overrides_that_are_none(override, hint):
    with pytest.raises(ConfigError) as caught:
        parse({}, [override])
    assert hint in str(caught.value)


def test_a_short_key_that_two_tables_have_is_none():
    names = [key.rsplit(".", 1)[-1] for key in keys()]
    assert names.count("name") == 2
    assert parse({}, ["name=x"]).name == "x", "the job's own"
    assert value_of(parse({}, ["fleet.network=none"]), "fleet.network") == "none"
    with pytest.raises(ConfigError, match=r"hub\.snapshot_every or servers\.snapshot_every"):
        parse({}, ["snapshot_every=5"])


@given(st.lists(st.text(max_size=20), max_size=3))
def test_any_text_is_a_job_or_a_config_error(overrides):
    with contextlib.suppress(ConfigError):
        assert isinstance(parse({}, overrides), Job)


@given(st.sampled_from(list(keys())), st.text(max_size=12))
def test_any_value_is_a_job_or_a_config_error(key, text):
    try:
        job = parse({}, [f"{key}={text}"])
    except ConfigError:
        return
    assert parse(json.loads(json.dumps(job.to_dict()))) == job


def test_faults_are_copied_not_shared():
    table = {"faults": [{"kind": "down", "at_s": 1, "for_s": 2}]}
    job = parse(table)
    table["faults"][0]["kind"] = "rate"
    assert job.faults[0]["kind"] == "down"


def test_files(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('name = "x"\n[train]\nsteps = 3\n')
    assert load(path, ["steps=4"]).train.steps == 4
    path.write_text("[train]\nsetps = 3\n")
    with pytest.raises(ConfigError, match=r"job\.toml: no key 'train.setps'.*'steps'"):
        load(path)
    path.write_text("a = \n")
    with pytest.raises(ConfigError, match=r"job\.toml is not TOML"):
        load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"job\.toml is in UTF-16"):
        load(path)
    with pytest.raises(ConfigError, match=r"no job file .*edgetrain init"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path)


# -- digest ---------------------------------------------------------------------------------------

AGREED = ["seed=1", "task=a:b", "members=9", "steps=9", "batch=9", "lr=0.9", "optimizer=adam",
          "strategy=fedavg", "local_steps=9", "delay=9", "codec=bf16", "reply_codec=bf16",
          "data.partition=iid", "schedule=cosine", "train.clip=1", "final_sync=0", "ranges=2",
          "weighting=alike", "correction=predict", "outer=sgd"]  # fmt: skip
LOCAL = ["data.folder=/somewhere", "data.download=true", "network=wifi", "device=laptop",
         "name=x", "target=0.9", "pace_s=1", "backend=none", "lost_after_s=9", "deadline_s=9",
         "heartbeat_s=2", "quorum=2", "sites=home-fixed: 0-1", "congestion=reno",
         "faults=[{kind='down', at_s=1, for_s=1}]"]  # fmt: skip


def test_the_digest_is_of_what_members_must_agree_on():
    digests = {override: parse({}, [override]).digest() for override in AGREED}
    assert len({*digests.values(), Job().digest()}) == len(AGREED) + 1
    assert re.fullmatch("[0-9a-f]{32}", Job().digest())


@pytest.mark.parametrize("override", LOCAL)
def test_the_digest_does_not_depend_on_where_a_member_runs_or_its_data_lies(override):
    assert parse({}, [override]).digest() == Job().digest()


def test_the_digest_does_not_depend_on_the_order_of_keys():
    one = parse({"data": {"a": 1, "b": 2}, "seed": 1})
    other = parse({"seed": 1, "data": {"b": 2, "a": 1}})
    assert one.digest() == other.digest()


# -- documentation --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", keys())
def test_every_key_is_explained_with_its_default(key):
    assert keys()[key].metadata["doc"]
    rows = re.findall(rf"^\| `{re.escape(key)}` \| `(.*?)` \|", JOBS.read_text("utf-8"), re.M)
    assert len(rows) == 1, f"docs/reference/jobs.md has {len(rows)} rows for {key}"
    assert tomllib.loads(f"v = {rows[0]}")["v"] == value_of(Job(), key)


def test_no_key_is_documented_that_is_none():
    rows = re.findall(r"^\| `([\w.]+)` \| `", JOBS.read_text("utf-8"), re.M)
    assert set(rows) == set(keys())


def test_a_job_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Job().seed = 3


@pytest.mark.parametrize("way", ["relative", "home", "absolute", "beside"])
def test_a_folder_of_data_begins_at_the_job_file_as_start_does(
    way, tmp_path, monkeypatch, own_imports
):
    """Whatever the working folder is; `~` is the home folder, for tasks of one's own, too."""
    job, home, elsewhere = (tmp_path / name for name in ("job", "home", "elsewhere"))
    for folder in (job / "texts", home / "texts", elsewhere):
        folder.mkdir(parents=True)
    (job / "own.py").write_text("def task(folder): raise ValueError(folder)\n")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(home))
    said, wanted = {
        "relative": ("texts", job / "texts"),
        "home": ("~/texts", home / "texts"),
        "absolute": (str(home / "texts"), home / "texts"),
        "beside": ("../home/texts", job / "../home/texts"),
    }[way]
    with pytest.raises(TaskError, match=re.escape(f"ValueError: {wanted}")):
        task_of(parse({"task": "own:task", "data": {"folder": said}}), job)
    (wanted / "a.txt").write_text("to be or not to be, " * 100)
    made = task_of(parse({"task": "edgetrain.tasks:char_lm", "data": {"folder": said}}), job)
    assert made.name == "char-lm"


@pytest.mark.parametrize("name", ["char_lm", "cifar10", "mnist", "digits"])
def test_a_missing_folder_of_data_is_said_to_be_missing(name, tmp_path):
    job = parse({"task": f"edgetrain.tasks:{name}", "data": {"folder": "gone"}})
    with pytest.raises(ConfigError, match=f"'gone': no folder {tmp_path}/gone .*job file"):
        task_of(job, tmp_path)
