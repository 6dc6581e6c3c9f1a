"""A loop of one's own that joins the lead of several hubs joins all of them."""

from __future__ import annotations

import contextlib
from functools import partial

import numpy as np
import torch
from children import HubThread, batch, flat, in_threads, optimizer
from torch import nn

import edgetrain
from edgetrain.exchange.hub.lead import LeadHub
from edgetrain.exchange.hub.shared import SharedHub
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.vectors.ranges import Stretch, shared

RANGES = 2


def loop(address, index):
    found = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))  # 643 parameters
    with torch.no_grad():
        for each in found.parameters():
            each.fill_(0.1)
    optim = optimizer("sgd", found)
    with edgetrain.join(address, found, optim, name=f"m{index}"):
        for step in range(8):
            optim.zero_grad()
            x, y = batch(index, step)
            nn.functional.cross_entropy(found(x), y).backward()
            optim.step()
    return flat(found)


def trained(hubs):
    sockets = [HubSocket("tcp://127.0.0.1:0", 1 << 24) for _ in range(hubs)]
    at = [f"tcp://127.0.0.1:{socket.port}" for socket in sockets]
    own = shared(RANGES, hubs) if hubs > 1 else [Stretch(RANGES, 0, RANGES)]
    rows = [(a, "", s.first, s.end) for a, s in zip(at[1:], own[1:], strict=True)]
    kinds = [partial(LeadHub, connect=None, address=at[0], rows=rows)] + [SharedHub] * (hubs - 1)
    with contextlib.ExitStack() as stack:
        for socket, stretch, kind in zip(sockets, own, kinds, strict=True):
            thread = HubThread(
                socket, "dga", every=2, delay=2, codec="int8", stretch=stretch, kind=kind
            )
            stack.enter_context(thread.serving())
        return in_threads(*[partial(loop, at[0], index) for index in range(2)])


def test_it_ends_with_the_bits_of_one_hub():
    one, several = (trained(hubs) for hubs in (1, RANGES))
    assert np.array_equal(one[0], one[1])
    assert [each.tobytes() for each in several] == [each.tobytes() for each in one]
