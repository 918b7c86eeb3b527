"""The example's work: checksum and count the files of a directory tree, one job per file."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

CHUNK: Final = 1 << 20
# Not part of the standard library, though they live in its directory.
NOT_STANDARD: Final = frozenset({"site-packages", "dist-packages", "__pycache__"})


class UnusableTree(Exception):
    """A directory whose files can't all be checksummed."""


def checksum(path: str, pace: float = 0.0) -> dict[str, Any]:
    """Return the SHA-256 and the numbers of bytes and of line ends of a file: the jobs' handler.

    Args:
        path: the file.
        pace: seconds to sleep once the file is read, which stands in for slower work: so that
            there is time to strike a worker while it runs a job.
    """
    digest, size, lines = hashlib.sha256(), 0, 0
    with Path(path).open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
            lines += chunk.count(b"\n")
    time.sleep(pace)
    return {"sha256": digest.hexdigest(), "bytes": size, "lines": lines}


def recompute(path: str) -> dict[str, Any]:
    """Return the same as ``checksum``, found in another way; for a file that is gone, an error."""
    try:
        with Path(path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            lines = sum(line.endswith(b"\n") for line in file)
    except OSError as error:
        return {"error": str(error)}
    return {"sha256": digest.hexdigest(), "bytes": size, "lines": lines}


def standard_library() -> Path:
    """Return the directory of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_files(
    root: Path,
    *,
    skip_directories: Collection[str] = (),
    skip_files: Collection[Path] = (),
) -> list[Path]:
    """Return the regular files below ``root`` in order; links are not followed.

    Raises:
        UnusableTree: no such directory, no file in it, or one that can't be read or named.
    """
    root = Path(os.path.abspath(root))  # noqa: PTH100  (resolve() would follow links)
    if not root.exists():
        raise UnusableTree(f"There is no directory {str(root)!r}.")
    if not root.is_dir():
        raise UnusableTree(f"{str(root)!r} is not a directory.")
    files = sorted(file for file in _walk(root, skip_directories) if file not in skip_files)
    if not files:
        raise UnusableTree(f"There are no files below {str(root)!r}.")
    for file in files:
        _require_usable(file)
    return files


def _walk(root: Path, skip_directories: Collection[str]) -> Iterator[Path]:
    for directory, names, files in os.walk(root, onerror=_refuse):
        names[:] = [name for name in names if name not in skip_directories]
        for name in files:
            file = Path(directory, name)
            if file.is_file() and not file.is_symlink():
                yield file


def _require_usable(file: Path) -> None:
    try:
        str(file).encode()
    except UnicodeEncodeError:
        raise UnusableTree(
            f"The name of {os.fsencode(file)!r} is not Unicode text, and no job can carry it."
        ) from None
    try:
        file.open("rb").close()
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    raise UnusableTree(f"{str(error.filename)!r} can't be read: {error.strerror}.") from error
