"""What every engine must do: a suite to run on a database, a driver or a broker of your own.

Mix it with Django's ``TransactionTestCase`` and name the alias::

    from django.test import TransactionTestCase
    from jobqueue.testing.conformance import ConformanceMixin

    class OurDatabaseConforms(ConformanceMixin, TransactionTestCase):
        using = "default"
        databases = {"default"}

Its tests use the public interface and the factories alone, but where they stand in for a writer
who breaks the rules: that one writes SQL. Some open a second connection, so the database must be
one that several connections share.
"""

from jobqueue.testing.conformance.births import Births
from jobqueue.testing.conformance.claims import Claims
from jobqueue.testing.conformance.columns import Columns
from jobqueue.testing.conformance.fence import Fence
from jobqueue.testing.conformance.outcomes import Outcomes
from jobqueue.testing.conformance.sweeps import Sweeps
from jobqueue.testing.conformance.workers import Workers

__all__ = ["ConformanceMixin"]


class ConformanceMixin(Births, Claims, Columns, Fence, Outcomes, Sweeps, Workers):
    """All of the suite. Set ``using`` to the alias; override ``broker`` to test another one.

    A broker is anything that has ``register``, ``claim``, ``heartbeat``, ``settle`` and ``leave``
    as in ``jobqueue.broker``.
    """
