"""What of a model is not trained: frozen parameters and buffers, but for the statistics of
normalisation. Members do not exchange it.

Either members have equal values, which a digest shows, or all take the first member's values
(`FixedPart`), or each has its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch

from edgetrain.errors import BadMessage, ConfigError
from edgetrain.vectors.blob import blob_digest
from edgetrain.vectors.vector import Buffer

STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "_u", "_v")
"""Ends of the names of buffers that a forward pass changes: of normalisation and of spectral norms.
Each member has its own."""

PERSONAL = "_edgetrain_personal"
"""The attribute of a model with the names of what each member keeps for itself: see personal."""

Named = list[tuple[str, torch.Tensor]]


def plain(name: str) -> str:
    """A parameter's name without what torch.compile and DistributedDataParallel put before it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def personal_of(model: torch.nn.Module) -> frozenset[str]:
    """The names of parameters and buffers that are personal: no member sends them."""
    found: frozenset[str] = getattr(model, PERSONAL, frozenset())
    return found


def fixed_of(model: torch.nn.Module) -> Named:
    """Frozen parameters and buffers of a model by name, without statistics and personal ones."""
    found: Named = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    found += [(name, b) for name, b in model.named_buffers() if not name.endswith(STATISTICS)]
    personal = personal_of(model)
    return [each for each in found if each[0] not in personal]


def digest_of_fixed(model: torch.nn.Module) -> str:
    """24 hexadecimal digits of names, dtypes, shapes and values of what is not trained. "" where
    there is nothing of that kind."""
    found, fixed = hashlib.blake2b(digest_size=12), fixed_of(model)
    for name, tensor in fixed:
        if tensor.is_meta:
            continue
        found.update(f"{plain(name)} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for part in _parts_of(tensor):
            found.update(_bytes_of(part))
    return found.hexdigest() if fixed else ""


SAMPLED = 4096
"""Elements of a tensor, about, by which a change of its values is noticed."""


class Unexchanged:
    """Notices which tensors of a model change although members do not exchange them: buffers but
    for statistics, and parameters that are frozen now, such as a teacher's; or those `named`. By
    `sampled` elements of each, about."""

    def __init__(
        self,
        model: torch.nn.Module,
        named: Callable[[torch.nn.Module], Named] = fixed_of,
        sampled: int = SAMPLED,
    ) -> None:
        self._model, self._named, self._sampled = model, named, sampled
        self._trained = {id(p) for p in model.parameters() if p.requires_grad}
        self._before = {name: _print_of(tensor, sampled) for name, tensor in named(model)}

    def changed(self) -> dict[str, torch.Tensor]:
        """Those that are new or have other values than at first, by name."""
        return {
            name: tensor
            for name, tensor in self._named(self._model)
            if id(tensor) not in self._trained
            and self._before.get(name) != _print_of(tensor, self._sampled)
        }


def _print_of(tensor: torch.Tensor, sampled: int) -> bytes:
    if tensor.is_meta:
        return b""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # left by a gradient of examples
        return b"no values"
    parts = (p.detach().flatten()[:: max(1, p.numel() // sampled)] for p in _parts_of(tensor))
    return hashlib.blake2b(b"".join(map(_bytes_of, parts)), digest_size=12).digest()


def fixed_part_of(model: torch.nn.Module) -> FixedPart | None:
    """Fixed tensors handed out by the first member; None: none. Raises ConfigError."""
    found = FixedPart(model)
    return found if found.size else None


class FixedPart:
    """The tensors of a model that are not trained, as bytes that one member hands to the others.

    In the order of their names: the values of each, raw and little-endian, nothing between them.
    Nothing is encoded or pickled, so that the sender decides only values: names, shapes and dtypes
    are `tensors`, which members compare before they join. The tensors stay the model's; `write`
    changes them in place. ConfigError for tensors that have no such bytes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._named = sorted((plain(name), tensor) for name, tensor in _checked(fixed_of(model)))
        self.tensors = [
            (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._named
        ]
        """(name, shape, dtype) of each, in order."""
        self.size = sum(tensor.numel() * tensor.element_size() for _, tensor in self._named)
        """Bytes."""

    @property
    def digest(self) -> str:
        """Digest of the current values, see vectors.blob. Reads all of them."""
        return blob_digest(self._pieces())

    def read(self) -> Buffer:
        """The values as they are now: `size` bytes, a copy."""
        found = bytearray(self.size)
        at = 0
        for piece in self._pieces():
            found[at : at + piece.nbytes] = piece
            at += piece.nbytes
        return found

    def write(self, blob: Buffer) -> None:
        """Take over the values that another member's `read` gave. BadMessage, with nothing changed,
        unless there are `size` bytes."""
        whole = memoryview(blob).cast("B")
        if whole.nbytes != self.size:
            raise BadMessage(f"fixed tensors of {whole.nbytes} bytes, this model has {self.size}")
        at = 0
        with torch.no_grad():
            for _, tensor in self._named:
                size = tensor.numel() * tensor.element_size()
                if size:  # a copy, so that it begins where a tensor may, and can be written to
                    raw = torch.frombuffer(bytearray(whole[at : at + size]), dtype=torch.uint8)
                    tensor.detach().copy_(raw.view(tensor.dtype).reshape(tensor.shape))
                at += size

    def _pieces(self) -> Iterator[memoryview]:
        for _, tensor in self._named:
            yield _bytes_of(tensor)


def _checked(named: Named) -> Named:
    for name, tensor in named:
        kinds = {
            "sparse": tensor.layout is not torch.strided, "quantised": tensor.is_quantized,
            "without values": tensor.is_meta,
        }  # fmt: skip
        if kind := next((kind for kind, so in kinds.items() if so), ""):
            raise ConfigError(
                f"'{name}' is not trained and {kind}: it cannot be handed to other members",
                "frozen = 'equal' (it is compared) or 'own'",
            )
    return named


_INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor is stored as: a sparse one is indices and values."""
    if tensor.layout is torch.strided:
        return [tensor.int_repr() if tensor.is_quantized else tensor]
    names: tuple[str, ...] = _INDICES.get(tensor.layout, ("indices",))
    stored = tensor.detach().coalesce() if tensor.is_sparse else tensor.detach()
    return [getattr(stored, name)() for name in (*names, "values")]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return raw.numpy().data if raw.numel() else memoryview(b"")
