"""A plain PyTorch loop that trains with others: the added lines are marked `# edgetrain`.

    edgetrain hub members=2 --any-job           # one terminal, or one machine
    python examples/your_own_loop.py 0          # another: the first half of the data
    python examples/your_own_loop.py 1          # another: the second half

On several machines, start the hub with --bind tcp://eth0:5555, enrol the others
(docs/explanation/security.md), and give the address that it prints after the number.
"""

import sys

import torch

import edgetrain
from edgetrain.tasks import digits

half = int(sys.argv[1])
hub = sys.argv[2] if len(sys.argv) > 2 else "tcp://localhost:5555"

train, test = digits().train, digits().test
x, unseen = (torch.tensor(part.pixels / 16).float().flatten(1) for part in (train, test))
y, right = (torch.tensor(part.labels) for part in (train, test))
mine = torch.arange(half, len(x), 2)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
member = edgetrain.join(hub, model, optimizer)  # edgetrain

for _ in range(20):
    for chosen in mine[torch.randperm(len(mine))].split(32):
        loss = torch.nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

member.close()  # edgetrain: waits for the last replies; the model is the fleet's now
with torch.no_grad():
    accuracy = (model(unseen).argmax(1) == right).float().mean()
print(f"accuracy on unseen digits: {accuracy:.3f}")
