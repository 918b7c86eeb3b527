"""What may be stored as JSON: one verdict on every engine, and what is accepted is read back."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict, namedtuple
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobqueue import payload
from jobqueue.models import Job
from jobqueue.payload import MAX_DEPTH, check_payload, clean_text, read_payload
from jobqueue.testing.factories import JobFactory
from tests.asserting import exactly

LIMIT = 1_048_576


class Colour(str, enum.Enum):  # noqa: UP042  (not StrEnum: str() gives another text)
    RED = "red"


class Unlike(str):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Level(enum.IntEnum):
    HIGH = 3


Point = namedtuple("Point", "x y")


def check(value: Any) -> Any:
    return check_payload(value, "args", LIMIT)


def nested(levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


# -- refused


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "is nan, which JSON can't hold"),
        (math.inf, "is inf, which JSON can't hold"),
        (-math.inf, "is -inf, which JSON can't hold"),
        (2**63, "is a number beyond 64 bits: of 64 bits"),
        (-(2**63), "is a number beyond 64 bits: of 64 bits"),
        (2**70, "is a number beyond 64 bits: of 71 bits"),
        pytest.param(2**16_609, "is a number beyond 64 bits: of 16610 bits", id="5000 digits"),
        (1e23, "is a number beyond 64 bits: 1e+23"),
        ("a\x00b", "contains a NUL character"),
        ("\ud800", "contains a lone surrogate, which is not Unicode text"),
        (b"x", "is a bytes, which JSON can't hold: b'x'"),
        ({1}, "is a set, which JSON can't hold: {1}"),
        (Decimal("1.5"), "is a Decimal, which JSON can't hold: Decimal('1.5')"),
        (1j, "is a complex, which JSON can't hold: 1j"),
        (range(2), "is a range, which JSON can't hold: range(0, 2)"),
        (MappingProxyType({}), "is a mappingproxy, which JSON can't hold: mappingproxy({})"),
        (
            datetime(2026, 1, 1, tzinfo=UTC),
            "is a datetime, which JSON can't hold: "
            "datetime.datetime(2026, 1, 1, 0, 0, tzinfo=datetime.timezone.utc)",
        ),
    ],
)
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda value: value, "args"),
        (lambda value: [0, value], "args[1]"),
        (lambda value: ({"a": [value]},), "args[0]['a'][0]"),
    ],
    ids=["bare", "in a list", "deep"],
)
def test_a_value_is_refused_with_the_path_to_it(
    wrap: Any, path: str, value: Any, message: str
) -> None:
    """encode/django-rest-framework#5235: engines differ on these; here all of them refuse."""
    with pytest.raises(ValueError, match=exactly(f"{path} {message}")):
        check(wrap(value))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (1, "args[0] has a key that is not a string: 1"),
        (None, "args[0] has a key that is not a string: None"),
        (True, "args[0] has a key that is not a string: True"),
        (("a",), "args[0] has a key that is not a string: ('a',)"),
        ("a\x00", "a key of args[0] contains a NUL character"),
        ("\udfff", "a key of args[0] contains a lone surrogate, which is not Unicode text"),
    ],
    ids=repr,
)
def test_a_key_is_refused_with_the_path_to_it(key: Any, message: str) -> None:
    with pytest.raises(ValueError, match=exactly(message)):
        check([{key: 1}])


def test_long_values_and_keys_are_cut_in_messages() -> None:
    with pytest.raises(ValueError, match="which JSON can't hold") as refused:
        check([{"k" * 5000: b"x" * 5000}])
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("loop", [[], {}], ids=["list", "dict"])
def test_a_circular_structure_is_refused(loop: Any) -> None:
    loop.append(loop) if isinstance(loop, list) else loop.update(a=loop)
    with pytest.raises(ValueError, match=f" is nested more than {MAX_DEPTH} levels deep$"):
        check(loop)


@pytest.mark.timeout(20)
def test_a_small_structure_that_is_huge_as_json_is_refused_at_once() -> None:
    """Thirty lists, each holding the one before it twice, are two to the thirtieth values."""
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value, value]
    with pytest.raises(ValueError, match=r" takes more than 1,048,576 bytes as JSON; at most"):
        check(value)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("x" * LIMIT, "1,048,578"),
        ("é" * (LIMIT // 2), "1,048,578"),
        (["x" * 10_000_000], "10,000,004"),
        ([1] * LIMIT, "more than 1,048,576"),
        ({"k" * LIMIT: 1}, "1,048,582"),
    ],
    ids=["one too many", "in bytes of UTF-8", "10 MB", "many", "key"],
)
def test_what_is_too_large_is_refused(value: Any, size: str) -> None:
    """KasperskyLab/klara#23, and 10 MB arguments: refused early, with what to do instead."""
    message = (
        f"args takes {size} bytes as JSON; at most 1,048,576 are allowed "
        "(JOBQUEUE['MAX_PAYLOAD_BYTES']): store it elsewhere and pass a reference"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        check(value)


def test_what_just_fits_is_accepted() -> None:
    for value in ("x" * (LIMIT - 2), [1] * ((LIMIT - 1) // 2), {"k" * (LIMIT - 6): 1}):
        assert check(value) == value


# -- accepted


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, (2,)), [1, [2]]),
        (Point(1, 2), [1, 2]),
        (OrderedDict(a=1), {"a": 1}),
        (Colour.RED, "red"),
        ({Colour.RED: 1}, {"red": 1}),
        (Level.HIGH, 3),
        (True, True),
        (-0.0, 0.0),
        (1e16, 10**16),
        (2**63 - 1, 2**63 - 1),
        (1 - 2**63, 1 - 2**63),
        (9.2e18, 9_200_000_000_000_000_000),
        ("", ""),
        ({"": None}, {"": None}),
        ("\uffff\U0001f600é", "\uffff\U0001f600é"),
        ([], []),
    ],
    ids=repr,
)
def test_what_is_read_back_is_plain(alias: str, value: Any, plain: Any) -> None:
    """encode/django-rest-framework#5235: equal on all engines, in type as well."""
    seen = check(value)
    read = Job.objects.get(pk=JobFactory(args=[seen]).pk).args[0]
    assert (seen, type(seen)) == (plain, type(plain))
    assert (read, type(read)) == (plain, type(plain))
    assert math.copysign(1, read) == 1 if plain == 0 else True


text = st.text(st.characters(codec="utf-8", exclude_characters="\x00"))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(-(2.0**62), 2.0**62)
    | st.floats(0, 1)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(args=st.lists(json_values, max_size=4), kwargs=st.dictionaries(text, json_values))
def test_what_is_accepted_reads_back_equal(
    alias: str, args: list[Any], kwargs: dict[str, Any]
) -> None:
    row = JobFactory(
        args=check(args),
        kwargs=check(kwargs),
        metadata=check(kwargs),
        checkpoint=check(args),
        completed=True,
        result=check(kwargs),
    )
    row.refresh_from_db()
    assert (row.args, row.kwargs, row.metadata) == (args, kwargs, kwargs)
    assert (row.checkpoint, row.result) == (args, kwargs)


@settings(deadline=None)
@given(value=json_values)
def test_the_text_is_what_json_writes(value: Any) -> None:
    plain, written = read_payload(value, "args", LIMIT)
    assert written == json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def test_keys_that_are_the_same_text_are_one() -> None:
    keys = {Unlike("red"): 1, Unlike("red"): 2}
    assert len(keys) == 2
    assert read_payload(keys, "kwargs", LIMIT) == ({"red": 2}, '{"red":2}')


@pytest.mark.parametrize("inner", [1, "x", [], {}], ids=repr)
def test_the_deepest_that_is_accepted_is_stored_on_every_engine(alias: str, inner: Any) -> None:
    deepest = nested(MAX_DEPTH, inner)
    job = JobFactory(args=check(deepest), kwargs=check({"a": nested(MAX_DEPTH - 1, inner)}))
    job.refresh_from_db()
    assert job.args == deepest
    assert job.kwargs == {"a": nested(MAX_DEPTH - 1, inner)}

    with pytest.raises(ValueError, match=f" is nested more than {MAX_DEPTH} levels deep$"):
        check(nested(MAX_DEPTH + 1, inner))


# -- text that must be stored, whatever it holds


@pytest.mark.parametrize(
    ("text", "limit", "cleaned"),
    [
        ("plain", 100, "plain"),
        ("a\x00b", 100, "a\\x00b"),
        ("a\ud800b", 100, "a\\ud800b"),
        ("x" * 300, 100, "x" * 48 + "..." + "x" * 49),
        ("x" * 300, 5, "x...x"),
        ("x" * 300, 300, "x" * 300),
        ("a" * 150 + "b" * 150, 200, "a" * 92 + "\n[... cut ...]\n" + "b" * 93),
    ],
)
def test_clean_text_fits_any_engine(text: str, limit: int, cleaned: str) -> None:
    assert clean_text(text, limit) == cleaned


@given(
    st.text(st.characters() | st.characters(categories=["Cs"]) | st.just("\x00")),
    st.integers(3, 300),
)
def test_clean_text_never_exceeds_its_limit_and_passes_the_check(text: str, limit: int) -> None:
    cleaned = clean_text(text, limit)
    assert len(cleaned) <= limit
    payload.check_text(cleaned, "text")
