"""The mutation gate on real engines: each guard is dropped in the real code, and a test must fail.

``python -m tests.mutation`` prints the whole table; ``tests/test_mutation.py`` holds it.
"""

import pytest

# So that an assertion that kills says what it compared.
pytest.register_assert_rewrite(
    *(f"tests.mutation.{module}" for module in ("batches", "killers", "races"))
)
