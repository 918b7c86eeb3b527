"""What may be stored as JSON: the same verdict on every engine, or an error naming the place.

PostgreSQL's jsonb refuses NaN, NUL characters and lone surrogates and reads large floats back as
other numbers, MySQL turns large integers into floats and MariaDB stops at 32 levels; each would
lose a value or strand a job late. They are all refused here, early, on every engine.
"""

from __future__ import annotations

import json
import math
from typing import Any

# MariaDB's JSON functions (JSON_VALID guards the column) stop at 32 levels.
MAX_DEPTH = 30
MAX_NUMBER = 2**63 - 1


def check_text(text: str, place: str) -> None:
    """Raise ``ValueError``, naming ``place``, if some engine can't store ``text``."""
    if "\x00" in text:
        raise ValueError(f"{place} contains a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place} contains a lone surrogate, which is not Unicode text") from None


def clean_text(text: str, limit: int) -> str:
    """Return ``text`` as any engine can store it: cut in the middle to ``limit`` characters."""
    text = text.replace("\x00", "\\x00").encode(errors="backslashreplace").decode()
    if len(text) <= limit:
        return text
    mark = "\n[... cut ...]\n" if limit > 100 else "..."
    head = (limit - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (limit - head - len(mark)) :]


def check_payload(value: Any, place: str, max_bytes: int) -> Any:
    """Return ``value`` as the JSON types that will be read back (tuples become lists).

    Args:
        value: the payload.
        place: its name in messages, such as ``args``.
        max_bytes: the largest size as JSON text in UTF-8.

    Raises:
        ValueError: something in it can't be stored, naming the path to it.
    """
    if value is None or value is True or value is False:
        return value
    plain = _Plain(max_bytes).read(value, place, 0)
    size = len(json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode())
    if size > max_bytes:
        raise ValueError(_too_large(place, f"{size:,}", max_bytes))
    return plain


class _Plain:
    """Turns a payload into the types that ``json`` gives back, its subclasses' whims aside."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # Each item takes two bytes at least. Lists that hold one list many times over are small
        # in memory and without end as JSON.
        self._left = max_bytes // 2 + 1

    def read(self, value: Any, path: str, depth: int) -> Any:
        """Return ``value`` as plain types, or raise ``ValueError`` naming the path to the fault."""
        if depth > MAX_DEPTH:
            raise ValueError(f"{path} is nested more than {MAX_DEPTH} levels deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            check_text(value, path)
            return str.__str__(value)
        if isinstance(value, int | float):
            return _number(value, path)
        if isinstance(value, list | tuple):
            self._take(len(value), path)
            return [
                self.read(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)
            ]
        if isinstance(value, dict):
            self._take(len(value), path)
            return {
                _key(key, path): self.read(item, f"{path}[{key!r:.80}]", depth + 1)
                for key, item in value.items()
            }
        raise ValueError(
            f"{path} is a {type(value).__name__}, which JSON can't hold: {value!r:.80}"
        )

    def _take(self, items: int, path: str) -> None:
        self._left -= items
        if self._left < 0:
            raise ValueError(_too_large(path, f"more than {self._max_bytes:,}", self._max_bytes))


def _number(value: float, path: str) -> int | float:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path} is {value}, which JSON can't hold")
    if abs(value) > MAX_NUMBER:
        shown = f"{value!r}" if isinstance(value, float) else f"of {value.bit_length()} bits"
        raise ValueError(f"{path} is a number beyond 64 bits: {shown}")
    if isinstance(value, int):
        return int(value)
    # From 1e16 on PostgreSQL reads back an integer, not always this one; and it has no -0.0.
    return int(value) if abs(value) >= 1e16 else float(value) + 0.0


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{path} has a key that is not a string: {key!r:.80}")
    check_text(key, f"a key of {path}")
    return str.__str__(key)


def _too_large(place: str, size: str, max_bytes: int) -> str:
    return (
        f"{place} takes {size} bytes as JSON; at most {max_bytes:,} are allowed "
        "(JOBQUEUE['MAX_PAYLOAD_BYTES']): store it elsewhere and pass a reference"
    )
