#!/usr/bin/env bash
# hivemind 1.1.12, torch 2.13.0: a mean of two peers under Float16Compression. The peer that averages
# takes its own part uncompressed, and sends the other one the difference to what it received. Outside
# of what half precision holds the two ends differ, and neither is the mean: of 1e5 on both peers one
# has 82,752 and the other 117,248. Of 1e-9 and 3e-9, the size of Adam's second moments, one peer has
# half of its own value and the other keeps its own. Uncompressed both have the mean.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet hivemind==1.1.12 torch==2.13.0 numpy
cd "$folder"
cat > peers.py <<'PYTHON'
import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Float16Compression, NoCompression

LOOPBACK = {
    "host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "use_relay": False, "use_auto_relay": False,
    "start": True,
}


def mean(peers, values, compression, name):
    """The values that each of two peers has of 1,000 equal elements after one round."""
    averagers = [
        DecentralizedAverager(
            [torch.full((1000,), value)], peer, prefix=name, compression=compression,
            target_group_size=2, min_group_size=2, min_matchmaking_time=2.0, request_timeout=1.0,
            allow_state_sharing=False, start=True,
        )
        for peer, value in zip(peers, values)
    ]
    steps = [each.step(wait=False, timeout=60) for each in averagers]
    ends = []
    for step, averager in zip(steps, averagers):
        step.result(60)
        with averager.get_tensors() as tensors:
            assert tensors[0].dtype == torch.float32
            ends.append(sorted({float(f"{value:.4g}") for value in tensors[0].tolist()}))
    for averager in averagers:
        averager.shutdown()
    return ends


if __name__ == "__main__":
    first = hivemind.DHT(**LOOPBACK)
    second = hivemind.DHT(initial_peers=[str(a) for a in first.get_visible_maddrs()], **LOOPBACK)
    for number, (compression, values, expected) in enumerate((
        (NoCompression(), (1e5, 1e5), [(1e5, 1e5)]),
        (NoCompression(), (1e-9, 3e-9), [(2e-9, 2e-9)]),
        (Float16Compression(), (1.0, 3.0), [(2.0, 2.0)]),
        (Float16Compression(), (1e5, 1e5), [(82750.0, 117200.0), (117200.0, 82750.0)]),
        (Float16Compression(), (1e-9, 3e-9), [(5e-10, 3e-9), (1e-9, 1.5e-9)]),
    )):
        (one,), (other,) = mean((first, second), values, compression, f"mean{number}")
        print(f"{type(compression).__name__}, {values[0]:g} and {values[1]:g}: "
              f"the first peer has {one:g}, the second {other:g}", flush=True)
        assert (one, other) in expected, (one, other)
    second.shutdown()
    first.shutdown()
PYTHON
OMP_NUM_THREADS=1 timeout 240 env/bin/python peers.py 2> said || { tail -20 said; exit 1; }
