"""What may be stored as JSON: the same verdict on every engine, or an error naming the place.

PostgreSQL's jsonb refuses NaN, NUL characters and lone surrogates, MySQL turns large integers
into floats and MariaDB stops at 32 levels; each would lose a value or strand a job late. They are
all refused here, early, on every engine.
"""

from __future__ import annotations

import json
import math
from typing import Any

# MariaDB's JSON functions (JSON_VALID guards the column) stop at 32 levels.
MAX_DEPTH = 30
MAX_INTEGER = 2**63 - 1


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
    plain = _plain(value, place, 0)
    size = len(json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode())
    if size > max_bytes:
        raise ValueError(
            f"{place} takes {size:,} bytes as JSON; at most {max_bytes:,} are allowed "
            "(JOBQUEUE['MAX_PAYLOAD_BYTES']): store it elsewhere and pass a reference"
        )
    return plain


def _plain(value: Any, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"{path} is nested more than {MAX_DEPTH} levels deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        check_text(value, path)
        return str(value)
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise ValueError(f"{path} is an integer of more than 64 bits: {value}")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON can't hold")
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {
            _key(key, path): _plain(item, f"{path}[{key!r}]", depth + 1)
            for key, item in value.items()
        }
    raise ValueError(f"{path} is a {type(value).__name__}, which JSON can't hold: {value!r:.80}")


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{path} has a key that is not a string: {key!r:.80}")
    check_text(key, f"a key of {path}")
    return str(key)
