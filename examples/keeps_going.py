"""A loop that may be killed at any moment, and goes on where it was when it is started again.

    edgetrain hub members=1 --any-job            # one terminal, or one machine
    python examples/keeps_going.py checkpoint    # another: kill it (kill -9), and start it again

Which batch comes next follows from `member.steps` alone, so no batch counts twice and none is left
out, however often the power goes.
"""

import signal
import sys

import torch

import edgetrain
from edgetrain.tasks import digits

STEPS = 1000
folder = sys.argv[1]
hub = sys.argv[2] if len(sys.argv) > 2 else "tcp://localhost:5555"

train, test = digits().train, digits().test
x, unseen = (torch.tensor(part.pixels / 16).float().flatten(1) for part in (train, test))
y, right = (torch.tensor(part.labels) for part in (train, test))


def batch(number: int) -> torch.Tensor:
    """Batch `number` of an endless shuffled pass over the digits: 47 make an epoch."""
    epoch, place = divmod(number, 47)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    return order[30 * place : 30 * (place + 1)]


model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
state = {"scheduler": scheduler}
member = edgetrain.join(hub, model, optimizer, name="pi-0", checkpoint=folder, state=state)
while scheduler.last_epoch < member.begins_at:  # what was not in the checkpoint yet
    scheduler.step()
signal.signal(signal.SIGTERM, member.stop)  # a step that has begun is finished and kept
print(f"begins with batch {member.steps}", flush=True)

for _ in range(member.begins_at, STEPS):
    chosen = batch(member.steps)
    loss = torch.nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()

member.close()  # and the checkpoint is gone
with torch.no_grad():
    accuracy = (model(unseen).argmax(1) == right).float().mean()
print(f"accuracy on unseen digits: {accuracy:.3f}")
