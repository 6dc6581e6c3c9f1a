"""A model as an ONNX file: written, quantised, and computed by onnxruntime, without torch.

Nothing here knows runs or folders. onnx and onnxruntime are imported inside functions: they come
with an extra.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgetrain.errors import ConfigError
from edgetrain.tasks.meta import quiet
from edgetrain.tasks.protocol import Task

MOST_BYTES = 2_000_000_000
"""Limit of the parameters in one ONNX file: protobuf holds less than 2 GiB."""
SAMPLE_ROWS = 8
TRACED_ROWS = 4
"""Rows of the input that a model is traced with; torch.export takes one row for a constant."""
_MISSING = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")


def input_of(task: Task, model: nn.Module) -> Tensor:
    """What the task's evaluation calls the model with first: one tensor, a row for each sample.
    ConfigError for a model that takes anything else."""
    calls: list[tuple[Any, Any]] = []

    def keep(_: nn.Module, args: Any, kwargs: Any) -> None:
        if not calls:
            calls.append((args, kwargs))

    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        task.evaluate(model)
    finally:
        hook.remove()
    if not calls:
        raise ConfigError(
            f"task '{task.name}' never calls the model that it evaluates",
            "evaluate(model) has to call model(inputs)",
        )
    args, kwargs = calls[0]
    if len(args) != 1 or kwargs:
        names = [*(f"input {place + 1}" for place in range(len(args))), *kwargs]
        raise ConfigError(
            f"the model of task '{task.name}' takes {', '.join(names)}: only models of one input "
            "can be exported",
            "--torch writes any model",
        )
    given = args[0]
    if not isinstance(given, Tensor) or not given.dim() or given.dtype == torch.bfloat16:
        kind = f"{given.dtype}" if isinstance(given, Tensor) else type(given).__name__
        raise ConfigError(
            f"the model of task '{task.name}' takes a {kind}, and no tensor with a row for each "
            "sample",
            "--torch writes any model",
        )
    return given.detach().cpu()


def write_onnx(model: nn.Module, given: Tensor, path: Path) -> None:
    """Write the model, which is put into eval mode, for any number of rows like `given`.
    ConfigError, also where it changes its weights in eval mode."""
    import onnx

    size = sum(each.numel() * each.element_size() for each in model.state_dict().values())
    if size > MOST_BYTES:
        raise ConfigError(
            f"the model has {size / 1e9:.1f} GB of parameters: one ONNX file holds "
            f"{MOST_BYTES / 1e9:.0f} GB",
            "--torch writes any model",
        )
    traced = torch.cat([given] * TRACED_ROWS)[:TRACED_ROWS]
    model.eval()
    before = {name: each.detach().clone() for name, each in model.state_dict().items()}
    with torch.no_grad():
        outputs = model(traced)
    # Not the file's weights: torch computes a batch norm into the convolution before it.
    after = model.state_dict()
    for name, came in before.items():
        kept = after.get(name, came)
        if not np.array_equal(kept.double().numpy(), came.double().numpy(), equal_nan=True):
            raise ConfigError(
                f"the model changes its '{name}' when it is only evaluated: the file would "
                "hold another one than the run",
                "change it in training alone (self.training); --torch writes any model",
            )
    if not isinstance(outputs, Tensor):
        raise ConfigError(
            f"the model returns a {type(outputs).__name__}: only models of one output tensor can "
            "be exported",
            "--torch writes any model",
        )
    rows = {0: torch.export.Dim("rows")}
    try:
        with _quiet():
            program = torch.onnx.export(
                model, (traced,), dynamo=True, dynamic_shapes=(rows,), verbose=False,
                input_names=["inputs"], output_names=["outputs"],
            )  # fmt: skip
            assert program is not None
            graph = program.model_proto
    except Exception as error:  # torch's exporter raises what its parts raise
        raise _refused(error) from error
    if not graph.graph.input[0].type.tensor_type.shape.dim[0].dim_param:
        raise ConfigError(
            f"the model computes {TRACED_ROWS} samples at once and no other number",
            "read the number of samples from the input's shape",
        )
    del graph.graph.value_info[:]  # shapes in between, with names that quantising stumbles over
    onnx.save(graph, path)


def write_int8(plain: Path, path: Path) -> None:
    """Quantise an ONNX file: weights once, to int8, activations when it computes, to uint8.

    Dynamic, as onnxruntime calls it. Ranges of activations that are taken from samples beforehand
    (static) cost char_lm an eighth of its loss, and are no better for digits.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    try:
        with _quiet():
            quantize_dynamic(plain, path, weight_type=QuantType.QInt8)
    except Exception as error:
        raise ConfigError(
            f"onnxruntime cannot quantise the model: {type(error).__name__}: {_first_line(error)}",
            "export --onnx without --int8",
        ) from error


def write_sample(model: nn.Module, given: Tensor, path: Path) -> None:
    """Write some rows of input and what the trained model makes of them, as arrays of NumPy."""
    some = given[:SAMPLE_ROWS]
    with torch.no_grad():
        np.savez(path, inputs=some.numpy(), outputs=model.eval()(some).numpy())


class Compared(nn.Module):
    """What an ONNX file computes, for Task.evaluate; beside it what the model would have given.

    onnxruntime computes the outputs, on the CPU; the model is only compared with them.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        """ConfigError for a file that onnxruntime does not run."""
        super().__init__()
        import onnxruntime

        try:
            self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise self._cannot(path.name, error) from error
        self._name, self._model = path.name, [model.eval()]  # a list: no part of this module
        self.here = nn.Parameter(torch.zeros(()))  # tasks ask a model's parameters where they are
        self.differs = 0.0
        """Greatest difference of an output from the model's so far."""
        self.largest = 0.0
        """Greatest output of the model so far, without its sign."""

    def forward(self, inputs: Tensor) -> Tensor:
        try:
            found = self._session.run(None, {"inputs": inputs.cpu().numpy()})[0]
        except Exception as error:
            raise self._cannot(self._name, error) from error
        with torch.no_grad():
            wanted = self._model[0](inputs).numpy()
        if found.shape != wanted.shape:
            raise ConfigError(
                f"{self._name} gives outputs {found.shape} where the model gives {wanted.shape}",
                "the model's code depends on values, and ONNX holds one way through it",
            )
        if wanted.size:
            self.differs = float(np.maximum(self.differs, np.abs(found - wanted).max()))
            self.largest = float(np.maximum(self.largest, np.abs(wanted).max()))
        return torch.from_numpy(found)

    @staticmethod
    def _cannot(name: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"onnxruntime does not run {name}: {_first_line(error)}", "--torch writes any model"
        )


def _refused(error: Exception) -> ConfigError:
    """The reason at the end of the chain of errors that torch's exporter raises."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    for each in causes:
        if isinstance(each, ModuleNotFoundError):
            return ConfigError(
                f"torch's exporter needs the package {each.name}, which is not installed",
                f"pip install {each.name}; --torch writes any model",
            )
        if operator := _MISSING.search(str(each)):
            return ConfigError(
                f"ONNX has no operator for {operator[1]}, which the model uses",
                "--torch writes any model",
            )
    return ConfigError(
        f"torch cannot export the model to ONNX: {_first_line(causes[-1])}",
        "what it computes may depend on its input's shape, not on values; --torch writes any model",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters say: what fails is said in one line."""
    with quiet(), contextlib.redirect_stdout(io.StringIO()):
        yield
