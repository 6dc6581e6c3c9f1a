#!/usr/bin/env bash
# iproute2 6.1.0: `tc qdisc ... netem delay 100ms 20ms distribution NAME`, where the manual calls 20ms
# a random variation. The kernel adds it times what it draws from the table of that name, in units
# of 8192. Only normal's has the deviation 1: pareto's has 0.82, none of the tables but normal's has
# the mean 0, and without a distribution the draws are uniform, 20 ms to either side: 11.5 ms.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
apt-get download -qq iproute2=6.1.0-3 2> said || { cat said; exit 1; }
dpkg -x iproute2_*.deb tree
python3 - <<'PYTHON'
from pathlib import Path

UNIT, DELAY, JITTER = 8192, 100.0, 20.0
EXPECTED = {  # mean, deviation, lowest, highest of a delay of 100 ms with 20 ms
    "normal": (100.0, 20.0, 20, 170), "pareto": (99.3, 16.4, 87, 180),
    "paretonormal": (99.5, 16.7, 70, 178), "experimental": (99.8, 17.6, 74, 180),
}
tables = {path.stem: path for path in Path("tree").rglob("*.dist")}
assert tables.keys() == EXPECTED.keys(), tables
for name, expected in EXPECTED.items():
    lines = tables[name].read_text().splitlines()
    values = [int(word) for line in lines if not line.startswith("#") for word in line.split()]
    delays = [DELAY + JITTER * value / UNIT for value in values]
    mean = sum(delays) / len(delays)
    deviation = (sum((each - mean) ** 2 for each in delays) / len(delays)) ** 0.5
    low, high = min(delays), max(delays)
    print(f"delay 100ms 20ms distribution {name}: {mean:.1f} ms, deviation {deviation:.1f} ms, "
          f"{low:.0f} to {high:.0f} ms")
    found = round(mean, 1), round(deviation, 1), round(low), round(high)
    assert found == expected, found
PYTHON
