"""What an exported model predicts, with onnxruntime and NumPy alone: no torch, no edgetrain.

    edgetrain export --onnx --int8 -o for-the-pi     # where the run is
    pip install onnxruntime                          # on the Pi, with this file and the folder
    python3 on_a_pi.py for-the-pi/model.int8.onnx for-the-pi/sample.npz

The sample has inputs that the task was evaluated on, and what the trained model made of them; of
inputs of your own say `session.run(None, {"inputs": array})[0]`.
"""

import sys

import numpy as np
import onnxruntime

model, sample = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
with np.load(sample) as arrays:
    inputs, trained = arrays["inputs"], arrays["outputs"]

outputs = session.run(None, {"inputs": inputs})[0]
predicted, expected = outputs.argmax(-1), trained.argmax(-1)
for place, (here, there) in enumerate(zip(predicted, expected, strict=True)):
    print(f"sample {place}: {here} (trained model: {there})")
print(f"the same: {(predicted == expected).mean():.0%}")
print(f"outputs differ by at most {np.abs(outputs - trained).max():.1e}")
