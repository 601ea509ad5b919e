"""Where a journal is, and what it belongs to: the network, the property, and the settings that decide what a domain is.

A journal says "this region is closed". That stays true only for the network, the property and the rounding allowance it
was found with, so a resume with anything else is refused. Importing this module loads no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import parverify
from parverify.config import Settings
from parverify.errors import UsageError

if TYPE_CHECKING:
    from parverify.frontend.query import Query

_CHUNK = 1 << 20


class Network(Protocol):
    """What a torch module has."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its tensors by name."""


@dataclass(frozen=True)
class Keep:
    """Where a run keeps its journal.

    Args:
        folder: of the journal.
        resume: go on with what it holds.
        again: this run was started before, and may have got as far as a journal: go on with it if there is one.
    """

    folder: str
    resume: bool = False
    again: bool = False


@dataclass(frozen=True)
class Identity:
    """Hashes of the inputs, and the settings that matter as text.

    Args:
        network, spec: SHA-256 of the files, in hex.
        settings: name -> value.
    """

    network: str
    spec: str
    settings: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"network": self.network, "spec": self.spec, "settings": dict(self.settings)}

    @staticmethod
    def decode(content: Mapping[str, Any]) -> Identity:
        """The inverse of `encode`."""
        return Identity(str(content["network"]), str(content["spec"]), dict(content["settings"]))

    def differences(self, other: Identity) -> list[str]:
        """What differs, in words; empty where both are the same."""
        found = [name for name, mine, theirs in self._files(other) if mine != theirs]
        for name in sorted({*self.settings, *other.settings}):
            mine, theirs = self.settings.get(name, "nothing"), other.settings.get(name, "nothing")
            if mine != theirs:
                found.append(f"{name} ({mine} there, {theirs} here)")
        return found

    def _files(self, other: Identity) -> list[tuple[str, str, str]]:
        return [("the network", self.network, other.network), ("the property", self.spec, other.spec)]

    def require(self, other: Identity, folder: str | Path) -> None:
        """Raise unless `other`, the run that wants to resume from `folder`, is the same.

        Raises:
            UsageError: names what differs.
        """
        found = self.differences(other)
        if found:
            raise UsageError(
                f"the journal in {folder} is of another run: {', '.join(found)} differs",
                "resume with the same network, property and settings, or name a new folder",
            )


def identify(model: str | Path | Network, spec: str | Path | Query, settings: Settings) -> Identity:
    """The identity of a run.

    Args:
        model, spec: the files, each may exist as `.gz` only, or what stands for them in the library. Of a module its
            structure as text and its state are hashed, not the code of its `forward`.
        settings: of the run.

    Raises:
        UsageError: if a file can't be read.
    """
    matter = {
        "version": parverify.__version__,
        "dtype": settings.dtype,
        "method": settings.method,
        "branching.kind": settings.branching.kind,
        "bounds.allowance": settings.bounds.allowance,
    }
    network = _hash_files(model) if isinstance(model, (str, Path)) else _hash_state(model)
    asked = _hash_files(spec) if isinstance(spec, (str, Path)) else _hash_query(spec)
    return Identity(network, asked, {name: str(value) for name, value in matter.items()})


def _hash_files(path: str | Path) -> str:
    """Of one file, or of several networks `f=first.onnx;g=second.onnx`."""
    found = hashlib.sha256()
    several = "=" in str(path) and not Path(path).exists()
    for part in str(path).split(";") if several else [str(path)]:
        name = part.partition("=")[2] if several else part
        place = next((Path(f"{name}{ending}") for ending in ("", ".gz") if Path(f"{name}{ending}").is_file()), name)
        try:
            with open(place, "rb") as handle:
                while chunk := handle.read(_CHUNK):
                    found.update(chunk)
        except OSError as error:
            raise UsageError(f"can't read {path}: {error.strerror or error}") from error
    return found.hexdigest()


def _hash_state(module: Network) -> str:
    found = hashlib.sha256(str(module).encode())
    for name, tensor in module.state_dict().items():
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _hash_query(query: Query) -> str:
    found = hashlib.sha256(f"{query.n_in} {query.n_out}".encode())
    for part in query.disjuncts:
        for array in (part.lower, part.upper, part.C_y, part.d, part.strict, part.C_x):
            found.update(b"none" if array is None else f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()
