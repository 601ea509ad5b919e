"""What a journal belongs to: the network's file, the property's file, and the settings that decide what a domain means.

A journal says "this region is closed". That stays true only for the network, the property and the rounding allowance it
was found with, so a resume with anything else is refused. Importing this module loads no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parverify.config import Settings
from parverify.errors import UsageError

_CHUNK = 1 << 20


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


def identify(model: str | Path, spec: str | Path, settings: Settings) -> Identity:
    """The identity of a run.

    Args:
        model, spec: the files; each may exist as `.gz` only.
        settings: of the run.

    Raises:
        UsageError: if a file can't be read.
    """
    matter = {
        "dtype": settings.dtype,
        "method": settings.method,
        "branching.kind": settings.branching.kind,
        "bounds.allowance": settings.bounds.allowance,
    }
    return Identity(_hash(model), _hash(spec), {name: str(value) for name, value in matter.items()})


def _hash(path: str | Path) -> str:
    place = next((Path(f"{path}{ending}") for ending in ("", ".gz") if Path(f"{path}{ending}").is_file()), Path(path))
    found = hashlib.sha256()
    try:
        with open(place, "rb") as handle:
            while chunk := handle.read(_CHUNK):
                found.update(chunk)
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror or error}") from error
    return found.hexdigest()
