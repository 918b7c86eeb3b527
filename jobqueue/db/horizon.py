"""Who keeps the database from cleaning up: an old snapshot makes each claim walk dead entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from django.db import DatabaseError, connections, transaction


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The oldest snapshot that somebody keeps: who, and for how long, in seconds."""

    holder: str
    age: float

    def __str__(self) -> str:
        return f"{self.holder} has kept a snapshot for {self.age:.0f} s"


# PostgreSQL: what sessions, standbys (their senders) and prepared transactions may still want to
# see. A transaction that has written may hold it by its number alone.
_POSTGRESQL: Final = """
SELECT holder, extract(epoch FROM clock_timestamp() - since)::float8
FROM (
    SELECT format('session %s (%s)', pid, concat_ws(', ', nullif(application_name, ''),
                  nullif(usename, ''), state, nullif(left(query, 80), ''))) AS holder,
           coalesce(xact_start, backend_start) AS since,
           greatest(age(backend_xmin), age(backend_xid)) AS age
    FROM pg_stat_activity
    WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND pid <> pg_backend_pid()
          AND (datname = current_database() OR datname IS NULL)
    UNION ALL
    SELECT format('prepared transaction %s (%s)', gid, owner), prepared, age(transaction)
    FROM pg_prepared_xacts WHERE database = current_database()
) AS held
WHERE since IS NOT NULL -- else this account may not see whose it is
ORDER BY age DESC, since
LIMIT 1
"""


def keeps_old_rows(using: str) -> bool:
    """Say whether what rows were before a change stays in indexes until nobody may want it."""
    return connections[using].vendor == "postgresql"


def oldest_snapshot(using: str) -> Snapshot | None:
    """Return who keeps the oldest snapshot of this database, where it tells; ``None`` if nobody."""
    if not keeps_old_rows(using):
        return None
    try:
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(_POSTGRESQL)
            row = cursor.fetchone()
    except DatabaseError:  # Some accounts may not look.
        return None
    return Snapshot(row[0], row[1]) if row else None
