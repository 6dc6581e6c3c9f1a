#!/usr/bin/env bash
# flwr 1.42.0, nvflare 2.9.0, torch 2.13.0: the bytes of a parameter on the wire. A weight shared by two
# modules, as an embedding and the output layer of most language models, is one parameter and two
# entries of a state_dict: both packages send it twice, and at the other end it is two tensors.
# In half precision a number takes two bytes in both; bfloat16 takes two in NVFlare, and raises a
# TypeError in Flower, whose arrays are NumPy's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/flower"
"$folder/flower/bin/pip" install --quiet flwr==1.42.0 torch==2.13.0 numpy==2.4.6
python3 -m venv "$folder/nvflare"
"$folder/nvflare/bin/pip" install --quiet nvflare==2.9.0 torch==2.13.0 numpy==2.4.6
cd "$folder"
cat > sent.py <<'PYTHON'
import sys

import torch


def by_flower(state):
    from flwr.app import ArrayRecord

    record = ArrayRecord(state)
    back = record.to_torch_state_dict()
    return sum(len(array.data) for array in record.values()), back


def by_nvflare(state):
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.fuel.utils import fobs

    fobs.register(TensorDecomposer)
    sent = fobs.dumps(dict(state))
    return len(sent), fobs.loads(sent)


name, send = {"flower": ("Flower", by_flower), "nvflare": ("NVFlare", by_nvflare)}[sys.argv[1]]
for dtype, width in ((torch.float32, 4), (torch.float16, 2), (torch.bfloat16, 2)):
    embedding, output = torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 1000, bias=False)
    output.weight = embedding.weight
    model = torch.nn.ModuleDict({"embedding": embedding, "output": output}).to(dtype)
    count = sum(parameter.numel() for parameter in model.parameters())
    try:
        sent, back = send(model.state_dict())
    except TypeError as error:
        print(f"{name}, {dtype}: TypeError: {error}")
        assert (name, dtype) == ("Flower", torch.bfloat16)
        continue
    tensors = {value.data_ptr() for value in back.values()}
    print(f"{name}, {dtype}: {sent / count:.2f} bytes a parameter, {len(tensors)} tensors come back")
    assert (name, dtype) != ("Flower", torch.bfloat16)
    assert abs(sent / count - 2 * width) < 0.02 and len(tensors) == 2
PYTHON
for each in flower nvflare; do
    OMP_NUM_THREADS=1 $each/bin/python sent.py $each 2> said || { tail -20 said; exit 1; }
done
