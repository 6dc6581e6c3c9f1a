"""A plain PyTorch loop that trains with others: the added lines are marked `# edgetrain`.

    edgetrain hub members=2 --any-job           # one terminal, or one machine
    python examples/your_own_loop.py 0          # another: the first half of the data
    python examples/your_own_loop.py 1          # another: the second half

On several machines, start the hub with --bind tcp://eth0:5555, enrol the others (docs/security.md),
and give the address that it prints after the number.
"""

import sys

import torch
from sklearn.datasets import load_digits

import edgetrain

half = int(sys.argv[1])
hub = sys.argv[2] if len(sys.argv) > 2 else "tcp://localhost:5555"

digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32)
y = torch.tensor(digits.target)
mine = torch.arange(half, 1500, 2)  # what is above 1500 is for testing

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
    right = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
print(f"accuracy on unseen digits: {right:.3f}")
