"""The socket of orders: silent connections hold nobody up, and a killed hub's is removed."""

from __future__ import annotations

import json
import shutil
import socket

import pytest

from edgetrain.errors import ConfigError
from edgetrain.runs.folder import METRICS, ORDERS, runs_in, socket_path
from edgetrain.training.orders import MOST_WAITING, Orders, give_order


def connected(folder):
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    with socket_path(folder) as path:
        connection.connect(path)
    return connection


@pytest.mark.parametrize("silent", [MOST_WAITING - 1, MOST_WAITING, 3 * MOST_WAITING])
def test_silent_connections_do_not_keep_an_order_waiting(tmp_path, silent):
    orders, held = Orders(tmp_path), []
    for _ in range(silent):
        held.append(connected(tmp_path))
        assert list(orders.poll()) == []
    teller = connected(tmp_path)
    teller.sendall(b'{"order": ["pause"]}\n')
    (order,) = orders.poll()
    assert order.words == ("pause",)
    order.answer({"done": True})
    assert json.loads(teller.recv(100)) == {"done": True}
    orders.close()
    for each in (teller, *held):
        each.close()


@pytest.mark.parametrize("look", [runs_in, lambda folder: runs_in(folder.parent), None])
def test_the_socket_of_a_killed_hub_is_removed_at_the_next_look(tmp_path, look):
    run = tmp_path / ("deep" * 20) / "run"
    run.mkdir(parents=True)
    for name in (METRICS, "job.toml"):
        (run / name).touch()
    live = Orders(run)
    runs_in(run)
    assert (run / ORDERS).is_socket(), "a hub that listens keeps its own"
    live.close()
    with socket.socket(socket.AF_UNIX) as killed, socket_path(run) as path:
        killed.bind(path)
    if look is not None:
        look(run)
    else:
        with pytest.raises(ConfigError, match="its hub has ended"):
            give_order(run, ["stop"])
    shutil.copytree(run, tmp_path / "copy")
    assert not (run / ORDERS).exists()
