#!/usr/bin/env bash
# flwr 1.42.0: how many clients a round of FedAvg takes is counted before it waits for min_available_nodes.
# With fraction_train=1.0 and min_available_nodes=6 a server that is up before its clients waits for all
# six, and trains with two (min_train_nodes): the share was taken of those that were there when it began
# to wait, none. From the second round on it is six. Here the list of nodes is empty when it is asked
# for the first time, as that of a server is that starts first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "flwr[simulation]==1.42.0" ray==2.55.1 numpy==2.4.6
cd "$folder"
cat > fleet.py <<'PYTHON'
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

CLIENTS, ROUNDS = 6, 3
client, server, found = ClientApp(), ServerApp(), {}


@client.train()
def train(message, context):
    arrays = message.content["arrays"]
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)


class Counted(FedAvg):
    """Counts the clients of each round."""

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.clients.append(len(replies))
        return super().aggregate_train(server_round, replies)


def late(grid):
    """The grid, without nodes when it is asked for them the first time."""
    nodes, calls = grid.get_node_ids, []

    def get_node_ids():
        calls.append(None)
        return [] if len(calls) == 1 else nodes()

    grid.get_node_ids = get_node_ids


@server.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < CLIENTS:
        pass
    for comes in ("clients first", "server first"):
        if comes == "server first":
            late(grid)
        strategy = Counted(
            fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS
        )
        strategy.clients = found[comes] = []
        first = ArrayRecord({"w": Array(np.zeros(4, np.float32))})
        strategy.start(grid=grid, initial_arrays=first, num_rounds=ROUNDS)


run_simulation(
    server, client, CLIENTS,
    backend_config={
        "init_args": {"num_cpus": 2, "include_dashboard": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0},
    },
)
for comes, clients in found.items():
    print(f"{comes}: {clients} of {CLIENTS} clients in the rounds")
assert found == {"clients first": [6, 6, 6], "server first": [2, 6, 6]}
PYTHON
OMP_NUM_THREADS=1 env/bin/python fleet.py 2> said || { tail -20 said; exit 1; }
