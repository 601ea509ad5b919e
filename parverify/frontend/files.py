"""Reading files that may be compressed.

Networks and properties come plain or gzip-compressed, and a name may leave the ending `.gz` away. Compression is
recognized by the two magic bytes of the content (RFC 1952, section 2.3.1) and never by the name.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from parverify.errors import UsageError

_GZIP_MAGIC = b"\x1f\x8b"

DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)
"""What reading a damaged or truncated gzip stream raises."""


def find(path: Path) -> Path:
    """The file to read for `path`: `path` itself, or `path` + `.gz` where only that exists.

    Raises:
        UsageError: neither is a file.
    """
    path = Path(path)
    if path.is_file():
        return path
    packed = path.with_name(path.name + ".gz")
    if packed.is_file():
        return packed
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a file")
    raise UsageError(f"no such file: {path} (nor {packed.name} beside it)")


def open_stream(path: Path) -> BinaryIO:
    """Open the unpacked content of `path`, or of `path` + `.gz`, for reading; the caller closes it.

    Raises:
        UsageError: there is no such file, or it can't be opened.
    """
    found = find(path)
    try:
        with found.open("rb") as stream:
            packed = stream.read(2) == _GZIP_MAGIC
        return cast(BinaryIO, gzip.open(found, "rb")) if packed else found.open("rb")
    except OSError as error:
        raise UsageError(f"can't read {found}: {error.strerror or error}") from error


def read_bytes(path: Path) -> bytes:
    """The whole unpacked content of `path`, or of `path` + `.gz`.

    Raises:
        UsageError: there is no such file, it can't be read, or its compressed data is damaged.
    """
    try:
        with open_stream(path) as stream:
            return stream.read()
    except DAMAGED as error:
        raise UsageError(f"can't read {path}: the gzip data is damaged or cut off ({error})") from error
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror or error}") from error
