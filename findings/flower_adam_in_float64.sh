#!/usr/bin/env bash
# flwr 1.42.0, torch 2.13.0: FedAdam sends a float32 model as float64. Its bias correction is a NumPy
# scalar of float64, which NumPy 2 lets decide the dtype of what it is multiplied with: from the
# second round on each client receives twice the bytes, and the result is float64. Under FedAvg,
# FedYogi and FedAdagrad the model stays float32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 "flwr[simulation]==1.42.0" ray==2.55.1
cd "$folder"
cat > fleet.py <<'PYTHON'
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedYogi
from flwr.simulation import run_simulation

ROUNDS = 3
client, server, found = ClientApp(), ServerApp(), {}
model = torch.nn.Linear(100, 100)


@client.train()
def train(message, context):
    arrays = message.content["arrays"]
    received = sum(array.numpy().nbytes for array in arrays.values())
    own = torch.nn.Linear(100, 100)
    own.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        own.weight += 0.01
    metrics = MetricRecord({"num-examples": 10, "received": received})
    content = RecordDict({"arrays": ArrayRecord(own.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server.main()
def main(grid, context):
    for make in (FedAvg, FedYogi, FedAdagrad, FedAdam):
        first = ArrayRecord(model.state_dict())
        end = make(fraction_evaluate=0.0).start(
            grid=grid, initial_arrays=first, num_rounds=ROUNDS
        )
        received = [int(end.train_metrics_clientapp[n + 1]["received"]) for n in range(ROUNDS)]
        dtypes = {str(value.dtype) for value in end.arrays.to_torch_state_dict().values()}
        found[make.__name__] = received, dtypes


run_simulation(
    server, client, 2,
    backend_config={
        "init_args": {"num_cpus": 2, "include_dashboard": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0},
    },
)
size = 4 * sum(p.numel() for p in model.parameters())
for name, (received, dtypes) in found.items():
    print(f"{name}: a client receives {received} bytes a round, and the result is {dtypes}")
    twice = name == "FedAdam"
    assert received == [size, *[size * (1 + twice)] * (ROUNDS - 1)], received
    assert dtypes == {"torch.float64" if twice else "torch.float32"}, dtypes
PYTHON
OMP_NUM_THREADS=1 env/bin/python fleet.py 2> said || { tail -20 said; exit 1; }
