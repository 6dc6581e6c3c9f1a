"""TensorBoard, MLflow and Weights & Biases themselves: what they read back is metrics.jsonl
(`make test-trackers`, in an environment of its own)."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from edgetrain.__main__ import main
from edgetrain.runs.folder import read_metrics
from edgetrain.runs.tracking.trackers import Curves

pytestmark = [pytest.mark.trackers, pytest.mark.filterwarnings("ignore")]  # theirs, not ours

WORDS = ["members=3", "steps=40", "strategy=dga", "network=rtt-200ms", "pace_s=0.05"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    assert main(["simulate", *WORDS, "--runs", str(runs)]) == 0
    (folder,) = runs.iterdir()
    return folder


@pytest.fixture(scope="module")
def curves(run):
    """What metrics.jsonl says: {(member, tag): [(at, value)]}."""
    found = collections.defaultdict(list)
    for point in Curves(32).points(read_metrics(run)):
        found[point.member, point.tag].append((point.at, point.value))
    assert len(found) > 30
    return found


def test_tensorboards_own_reader_gives_back_the_lines(run, curves):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(["track", str(run), "--to", "tensorboard"]) == 0
    read = {}
    for member in {member for member, _ in curves}:
        events = EventAccumulator(str(run / "tensorboard" / member), {"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            read[member, tag] = [(each.step, each.value) for each in events.Scalars(tag)]
    expected = {key: [(at, np.float32(v)) for at, v in each] for key, each in curves.items()}
    assert read == expected
    assert main(["track", str(run), "--to", "tensorboard"]) != 0, "nothing is written twice"


def test_mlflow_on_sqlite_has_the_lines_and_the_job(run, curves, tmp_path):
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/runs.db"
    assert main(["track", str(run), "--to", "mlflow", "--into", uri, "--project", "x"]) == 0
    client = MlflowClient(tracking_uri=uri)
    within = client.get_experiment_by_name("x").experiment_id
    (found,) = client.search_runs([within])
    assert found.info.status == "FINISHED"
    assert found.data.params["train.steps"] == "40"
    for (member, tag), points in curves.items():
        name = f"{tag}/{member}" if member else tag
        history = client.get_metric_history(found.info.run_id, name)
        assert sorted((each.step, each.value) for each in history) == sorted(points), name


def test_wandb_offline_takes_all(run, tmp_path):
    assert main(["track", str(run), "--to", "wandb", "--offline", "--into", str(tmp_path)]) == 0
    (written,) = tmp_path.rglob("*.wandb")
    assert written.stat().st_size > 10_000
