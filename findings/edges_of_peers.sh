#!/usr/bin/env bash
# flwr 1.42.0, nvflare 2.9.0: what becomes of a round where members differ. Flower's FedAvg, three clients
# that add 1, 2 and 4 to zeros: a client that raises is left out, one with no examples counts nothing,
# and a round in which none has any ends the run with a ZeroDivisionError. Whole numbers come back as
# float64 and are no whole numbers: of 200 indices, equal on three clients of equally many examples, 23 are
# the one below when they are filled into whole numbers again, as load_state_dict does. Half precision stays half precision, the sum
# included. NVFlare's FedAvg multiplies by the weights first and divides last: of half precision 100
# times 1,000 examples is infinite.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/flower"
"$folder/flower/bin/pip" install --quiet "flwr[simulation]==1.42.0" ray==2.55.1 numpy==2.4.6
python3 -m venv "$folder/nvflare"
"$folder/nvflare/bin/pip" install --quiet nvflare==2.9.0 numpy==2.4.6
cd "$folder"
cat > fleet.py <<'PYTHON'
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

EXAMPLES = {
    "unequal": (1, 1, 6), "one empty": (0, 10, 10), "all empty": (0, 0, 0),
}
FIRST = {"half": np.zeros(200, np.float16), "whole numbers": np.arange(200)}
client, server, found = ClientApp(), ServerApp(), {}


@client.train()
def train(message, context):
    number, case = context.node_config["partition-id"], message.content["config"]["case"]
    if case == "one raises" and number == 0:
        raise ValueError("no data on this device")
    value = message.content["arrays"]["w"].numpy()
    if case != "whole numbers":
        value = value + value.dtype.type((1, 2, 4)[number])
    metrics = MetricRecord({"num-examples": EXAMPLES.get(case, (10, 10, 10))[number]})
    content = RecordDict({"arrays": ArrayRecord({"w": Array(value)}), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server.main()
def main(grid, context):
    for case in ("equal", "unequal", "one raises", "one empty", "half", "whole numbers", "all empty"):
        first = ArrayRecord({"w": Array(FIRST.get(case, np.zeros(200, np.float32)))})
        try:
            end = FedAvg(fraction_evaluate=0.0, min_train_nodes=3).start(
                grid=grid, initial_arrays=first, num_rounds=1,
                train_config=ConfigRecord({"case": case}),
            )
            found[case] = end.arrays["w"].numpy()
        except ZeroDivisionError as error:
            found[case] = error


run_simulation(
    server, client, 3,
    backend_config={
        "init_args": {"num_cpus": 2, "include_dashboard": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0},
    },
)
print("Flower, all empty:", type(found.pop("all empty")).__name__)
whole = found.pop("whole numbers")
cut = int((whole.astype(np.int64) != np.arange(200)).sum())
print(f"Flower, whole numbers: {whole.dtype}, {cut} of 200 indices become the one below")
assert whole.dtype == np.float64 and cut == 23
for case, dtype, mean in (
    ("equal", np.float32, 7 / 3), ("unequal", np.float32, 27 / 8), ("one raises", np.float32, 3),
    ("one empty", np.float32, 3), ("half", np.float16, 7 / 3),
):
    value = found.pop(case)
    apart = abs(float(value[0]) - mean)
    print(f"Flower, {case}: {value.dtype}, {value[0]:.4f}, {apart:.1g} from the mean")
    assert value.dtype == dtype and apart < (1e-2 if case == "half" else 1e-6)
assert not found
PYTHON
OMP_NUM_THREADS=1 flower/bin/python fleet.py 2> said || { tail -20 said; exit 1; }
nvflare/bin/python - <<'PYTHON'
import warnings

import numpy as np
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

warnings.simplefilter("ignore")


def mean(values, weights):
    helper = WeightedAggregationHelper()
    for number, (value, weight) in enumerate(zip(values, weights)):
        helper.add({"w": value}, weight, f"site-{number}", 0)
    return helper.get_result()["w"]


half, single = (mean([np.full(2, 100, dtype)] * 2, [1000, 3000]) for dtype in (np.float16, np.float32))
print(f"NVFlare, 100 on both sites: {single[0]:g} of {single.dtype}, {half[0]:g} of {half.dtype}")
assert np.allclose(single, 100) and np.isinf(half).all()
whole = mean([np.arange(200)] * 3, [10, 10, 10])
cut = int((whole.astype(np.int64) != np.arange(200)).sum())
print(f"NVFlare, whole numbers: {whole.dtype}, {cut} of 200 indices become the one below")
assert whole.dtype == np.float64 and cut == 0
try:
    mean([np.ones(2, np.float32)] * 2, [0, 0])
    raise SystemExit("a mean of nobody")
except ZeroDivisionError:
    print("NVFlare, all empty: ZeroDivisionError")
PYTHON
