"""A virtual environment for each peer, made once and kept in the cache directory."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.report import NotRun, tell

INSTALL_TIMEOUT = 900


def default_cache() -> Path:
    """Return the directory that is used when none is given."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "jobqueue-benchmarks"


def python_of(cache: Path, name: str, requires: Sequence[str], oldest: str) -> str:
    """Return the interpreter of an environment with ``requires`` in it, made if need be.

    Raises:
        NotRun: there is no Python that is new enough, or pip couldn't install.
    """
    interpreter = newest_python(oldest)
    wanted = "\n".join([interpreter, *requires])
    directory = cache / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python, done = directory / "bin" / "python", directory / "installed"
    if done.exists():
        return str(python)
    tell(f"  installing {' '.join(requires)}")
    shutil.rmtree(directory, ignore_errors=True)
    cache.mkdir(parents=True, exist_ok=True)
    _run([interpreter, "-m", "venv", str(directory)], "a virtual environment could not be made")
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *requires]
    _run(install, f"pip could not install {' '.join(requires)}")
    done.write_text(wanted)
    return str(python)


def newest_python(oldest: str) -> str:
    """Return the newest Python on this machine, at least ``oldest``, that can make environments."""
    best: tuple[tuple[int, ...], str] | None = None
    for candidate in _candidates():
        version = _version(candidate)
        if version and (best is None or version > best[0]):
            best = (version, candidate)
    least = tuple(map(int, oldest.split(".")))
    if best is None or best[0] < least:
        raise NotRun(f"it needs Python {oldest}, and none was found")
    return best[1]


def _candidates() -> Iterator[str]:
    yield sys.executable
    for minor in range(11, 15):
        if found := shutil.which(f"python3.{minor}"):
            yield found
    for found in sorted(Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python")):
        yield str(found)


def _version(python: str) -> tuple[int, ...] | None:
    """Return its version; ``None`` if it doesn't run, or is a Debian Python without ``venv``."""
    script = "import ensurepip, sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run(
            [python, "-I", "-c", script], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None


def _run(command: list[str], failure: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotRun(f"{failure} within {INSTALL_TIMEOUT} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NotRun(f"{failure}: {last[:300]}")
