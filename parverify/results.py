"""The results file of a run: seeded with `unknown`, replaced atomically, and closed by the first final verdict.

A reader finds either what stood there before the run, or `unknown`, or the whole final text, never a part of one:
each text is written to a temporary file in the same folder, synced, and renamed over the old one. A run that is killed
leaves `unknown`; `timeout` stands there only if the clock ended the run. Importing this module loads no numpy and no
torch, because the process that watches the clock does so while neither is loaded.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parverify.errors import ParverifyError, UsageError

SEED = "unknown"
_WHERE = "name a file in a folder where you may write"


def format_witness(x: Sequence[float], y: Sequence[float]) -> str:
    """A witness as VNN-COMP wants it, `((X_0 v)\\n (X_1 v)\\n ... (Y_0 v))`, with 17 significant digits.

    17 digits name a float64 uniquely, so reading the text gives back exactly the numbers that were replayed.

    Args:
        x: the flat input.
        y: the flat output that onnxruntime gave for it.

    Raises:
        ParverifyError: if there is no input or a number is not finite; then there is no witness.
    """
    named = [("X", i, value) for i, value in enumerate(x)] + [("Y", i, value) for i, value in enumerate(y)]
    odd = [f"{letter}_{i}" for letter, i, value in named if not math.isfinite(value)]
    if odd or not len(x):
        raise ParverifyError("the witness is empty" if not odd else f"the witness is not finite at {odd[0]}")
    return "(" + "\n ".join(f"({letter}_{i} {float(value):.17g})" for letter, i, value in named) + ")"


def jsonable(value: Any) -> Any:
    """`value` with everything that JSON can't hold replaced: arrays by lists, infinities and NaN by their names."""
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value.value) if hasattr(value, "value") else str(value)


def to_json(value: Any) -> str:
    """`jsonable(value)` as indented JSON that ends with a newline."""
    return json.dumps(jsonable(value), indent=2, allow_nan=False) + "\n"


class AtomicFile:
    """A file whose content is only ever replaced as a whole.

    The folder is made where it is missing. A link is followed, so that the file it names is replaced and the link
    stays. Devices, pipes and folders are refused: a rename would put a plain file in their place.

    Args:
        path: where the file stands or shall stand.
        option: the option that named it, for messages.

    Raises:
        UsageError: if nothing can be written there.
    """

    def __init__(self, path: str | Path, *, option: str = "the file") -> None:
        self.path = Path(os.path.realpath(path))
        self._option = option
        if str(path) in ("", "-"):
            raise UsageError(f"{option}: {'the name is empty' if not str(path) else '- is no file'}", "name a file")
        try:
            if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
                raise UsageError(f"{option}: {path} is not a regular file", "name a file, not a folder or a device")
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{option}: can't write {path}: {error.strerror or error}", _WHERE) from error

    def probe(self) -> None:
        """Raise `UsageError` if nothing can be written there; the content stays as it is."""
        self._replace(None)

    def write(self, text: str) -> None:
        """Replace the content.

        Raises:
            UsageError: if it can't be written; the old content stands then.
        """
        self._replace(text)

    def _replace(self, text: str | None) -> None:
        scratch = self.path.with_name(f".{self.path.name[:200]}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            with open(scratch, "w", encoding="utf-8") as handle:
                handle.write(text or "")
                handle.flush()
                os.fsync(handle.fileno())
            if text is None:
                scratch.unlink()
            else:
                os.replace(scratch, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise UsageError(f"{self._option}: can't write {self.path}: {error.strerror or error}", _WHERE) from error


class ResultsFile:
    """The answer of one run in the form that VNN-COMP reads: the verdict's word, for `sat` the witness below it.

    Args:
        path: the file, or None to keep the verdict in memory only.

    Raises:
        UsageError: if nothing can be written there; raised before any work, by seeding the file.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._lock = threading.Lock()
        self._verdict: str | None = None
        self._file = None if path is None else AtomicFile(path, option="--results-file")
        if self._file is not None:
            self._file.write(SEED + "\n")

    @property
    def verdict(self) -> str | None:
        """The final verdict, or None while there is none."""
        return self._verdict

    def finish(self, word: str, witness: str = "") -> bool:
        """Write the final verdict, unless there is one already.

        Args:
            word: the verdict.
            witness: the text below it; required for `sat`, and only there.

        Returns:
            Whether this call's verdict is the final one.
        """
        if (word == "sat") != bool(witness):
            raise ParverifyError(f"verdict {word} {'with' if witness else 'without'} a witness")
        with self._lock:
            if self._verdict is not None:
                return False
            if self._file is not None:
                self._file.write(f"{word}\n{witness}\n" if witness else f"{word}\n")
            self._verdict = word
            return True


def read_verdict(path: str | Path) -> str:
    """The first line of a results file, lower case; `error` where there is none, as VNN-COMP counts it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.readline().strip().lower() or "error"
    except OSError:
        return "error"
