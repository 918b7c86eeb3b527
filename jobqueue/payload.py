"""What may be stored as JSON: the same verdict on every engine, or an error naming the place.

PostgreSQL's jsonb refuses NaN, NUL characters and lone surrogates and reads large floats back as
other numbers, MySQL turns large integers into floats and MariaDB stops at 32 levels; each would
lose a value or strand a job late. They are all refused here, early, on every engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

# MariaDB's JSON functions (JSON_VALID guards the column) stop at 32 levels.
MAX_DEPTH = 30
MAX_NUMBER = 2**63 - 1


# For text alone: for anything else it first makes what goes through it, and for a payload, which is
# gone through here anyhow, and mostly is small, that takes longer than all the rest.
_quoted: Final = json.JSONEncoder(ensure_ascii=False).encode
_WORDS: Final = {None: "null", True: "true", False: "false"}

# What will be read back, and the JSON text of it.
Payload = tuple[Any, str]


def check_text(text: str, place: str) -> None:
    """Raise ``ValueError``, naming ``place``, if some engine can't store ``text``."""
    if flaw := _flaw(text):
        raise ValueError(f"{place} {flaw}")


def _flaw(text: str) -> str:
    if "\x00" in text:
        return "contains a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "contains a lone surrogate, which is not Unicode text"
    return ""


def clean_text(text: str, limit: int) -> str:
    """Return ``text`` as any engine can store it: cut in the middle to ``limit`` characters."""
    text = text.replace("\x00", "\\x00").encode(errors="backslashreplace").decode()
    if len(text) <= limit:
        return text
    mark = "\n[... cut ...]\n" if limit > 100 else "..."
    head = (limit - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (limit - head - len(mark)) :]


def check_payload(value: Any, place: str, max_bytes: int) -> Any:
    """Return ``value`` as the JSON types that will be read back; see ``read_payload``."""
    if value is None or value is True or value is False:
        return value
    return read_payload(value, place, max_bytes)[0]


def read_payload(value: Any, place: str, max_bytes: int) -> Payload:
    """Return ``value`` as the JSON types that will be read back (tuples become lists), and as text.

    Args:
        value: the payload.
        place: its name in messages, such as ``args``.
        max_bytes: the largest size as JSON text in UTF-8.

    Raises:
        ValueError: something in it can't be stored, naming the path to it.
    """
    try:
        plain, text = _Plain(max_bytes).read(value, 0)
    except _Fault as fault:
        raise ValueError(f"{fault.before}{place}{fault.path} {fault.what}") from None
    size = len(text.encode())
    if size > max_bytes:
        raise ValueError(f"{place} {_too_large(f'{size:,}', max_bytes)}")
    return plain, text


class _Fault(Exception):
    """What can't be stored. Those who hold it add to the path to it, from the inside out."""

    def __init__(self, what: str, before: str = "") -> None:
        self.what = what
        self.before = before
        self.path = ""

    def inside(self, step: str) -> None:
        self.path = step + self.path


class _Plain:
    """Turns a payload into the types that ``json`` gives back, its subclasses' whims aside."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # Each item takes two bytes at least. Lists that hold one list many times over are small
        # in memory and without end as JSON.
        self._left = max_bytes // 2 + 1

    def read(self, value: Any, depth: int) -> Payload:
        """Return ``value`` as plain types, and as text, or raise ``_Fault``."""
        if depth > MAX_DEPTH:
            raise _Fault(f"is nested more than {MAX_DEPTH} levels deep")
        if type(value) is int and -MAX_NUMBER <= value <= MAX_NUMBER:
            return value, repr(value)
        if value is None or value is True or value is False:
            return value, _WORDS[value]
        if isinstance(value, str):
            if flaw := _flaw(value):
                raise _Fault(flaw)
            plain = str.__str__(value)
            return plain, _quoted(plain)
        if isinstance(value, (int, float)):
            number = _number(value)
            return number, repr(number)
        if isinstance(value, (list, tuple)):
            return self._list(value, depth)
        if isinstance(value, dict):
            return self._dict(value, depth)
        raise _Fault(f"is a {type(value).__name__}, which JSON can't hold: {value!r:.80}")

    def _list(self, value: Sequence[Any], depth: int) -> Payload:
        self._take(len(value))
        plain: list[Any] = []
        texts: list[str] = []
        try:
            for item in value:
                read, text = self.read(item, depth + 1)
                plain.append(read)
                texts.append(text)
        except _Fault as fault:
            fault.inside(f"[{len(plain)}]")
            raise
        return plain, f"[{','.join(texts)}]"

    def _dict(self, value: Mapping[Any, Any], depth: int) -> Payload:
        self._take(len(value))
        plain: dict[str, Any] = {}
        texts: dict[str, str] = {}
        for key, item in value.items():
            name = _key(key)
            try:
                plain[name], texts[name] = self.read(item, depth + 1)
            except _Fault as fault:
                fault.inside(f"[{key!r:.80}]")
                raise
        # Not joined on the way: keys of a subclass may be apart from each other, and one as text.
        members = (f"{_quoted(name)}:{text}" for name, text in texts.items())
        return plain, f"{{{','.join(members)}}}"

    def _take(self, items: int) -> None:
        self._left -= items
        if self._left < 0:
            raise _Fault(_too_large(f"more than {self._max_bytes:,}", self._max_bytes))


def _number(value: float) -> int | float:
    if isinstance(value, float) and not math.isfinite(value):
        raise _Fault(f"is {value}, which JSON can't hold")
    if abs(value) > MAX_NUMBER:
        shown = f"{value!r}" if isinstance(value, float) else f"of {value.bit_length()} bits"
        raise _Fault(f"is a number beyond 64 bits: {shown}")
    if isinstance(value, int):
        return int(value)
    # From 1e16 on PostgreSQL reads back an integer, not always this one; and it has no -0.0.
    return int(value) if abs(value) >= 1e16 else float(value) + 0.0


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise _Fault(f"has a key that is not a string: {key!r:.80}")
    if flaw := _flaw(key):
        raise _Fault(flaw, "a key of ")
    return str.__str__(key)


def _too_large(size: str, max_bytes: int) -> str:
    return (
        f"takes {size} bytes as JSON; at most {max_bytes:,} are allowed "
        "(JOBQUEUE['MAX_PAYLOAD_BYTES']): store it elsewhere and pass a reference"
    )
