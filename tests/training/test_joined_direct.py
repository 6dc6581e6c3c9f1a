"""A loop of one's own joins a job whose members reduce, by the job's file."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from children import HubThread, in_threads, joined
from torch import nn

import edgetrain
from edgetrain.errors import ConfigError, Refused
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.training.hub import HubRequest, serve_job
from edgetrain.training.stopping import Stop

MEMBERS, STEPS = 3, 8


@pytest.fixture
def job_file(tmp_path):
    """Writes the file of a job with this topology."""

    def write(topology, **other):
        words = {"ranges": 3, "local_steps": 2, "delay": 2, **other}
        table = "\n".join(f"{key} = {value}" for key, value in words.items())
        path = tmp_path / f"{topology}{other.get('local_steps', '')}.toml"
        path.write_text(
            f'[fleet]\nmembers = {MEMBERS}\ntopology = "{topology}"\n'
            f'[train]\nsteps = {STEPS}\n[strategy]\nname = "dga"\ncodec = "int8"\n{table}\n'
        )
        return path

    return write


def trained(path, *files):
    """The models of loops that join with these files, at a hub with the job of `path`."""
    socket = HubSocket("tcp://127.0.0.1:0", 1 << 24)
    thread = HubThread(socket)
    thread.hub = hub_of(resolve(load(path)))
    address = f"tcp://127.0.0.1:{socket.port}"
    try:
        thread.begin()
        loops = [partial(joined, address, i, STEPS, file) for i, file in enumerate(files)]
        found = in_threads(*loops)
    finally:
        thread.end()
        socket.close()
    return [each.tobytes() for each in found], [note.reason for note in thread.notes]


def test_it_ends_with_the_bits_of_a_star(job_file):
    star, _ = trained(job_file("star"), *[None] * MEMBERS)
    direct = job_file("direct")
    found, notes = trained(direct, *[direct] * MEMBERS)
    assert any(re.fullmatch(r"direct: (m\d(, )?){3} reduce 3 ranges", note) for note in notes)
    assert found == star
    assert len(set(found)) == 1


def test_a_loop_without_the_file_is_told_to_bring_it(job_file):
    with pytest.raises(Refused, match="members connect to each other") as refused:
        trained(job_file("direct"), None)
    assert "job_file=" in str(refused.value)


def test_a_file_of_another_job_is_refused(job_file):
    with pytest.raises(Refused, match="the hub runs job"):
        trained(job_file("direct"), job_file("direct", local_steps=4))


def test_a_file_of_a_star_is_refused_before_anything_connects(job_file):
    with pytest.raises(ConfigError, match=r"fleet\.topology = 'star'"):
        edgetrain.join("tcp://127.0.0.1:1", *nothing(), job_file=job_file("star"))


def nothing():
    found = nn.Linear(2, 2)
    return found, torch.optim.SGD(found.parameters(), 0.1)


def test_a_hub_of_any_job_is_refused(job_file):
    job = load(job_file("direct"))
    request = HubRequest(job, "tcp://127.0.0.1:0", insecure=True, any_job=True, journal=False)
    with pytest.raises(ConfigError, match=r"--any-job and fleet\.topology = 'direct'"):
        serve_job(request, Stop(), print, print)
