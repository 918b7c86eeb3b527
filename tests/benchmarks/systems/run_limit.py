"""The limit: what plain SQL does on the very tables of this project. One psycopg connection each.

No lease, no fence, no history, no retries, no validation: claim by batch, run, complete by id.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import child
import django_child
import handlers
import psycopg

ABOUT = {
    "name": "limit",
    "rate": 80000,
    "enqueues": 20000,
    "done": {"postgresql": "SELECT count(*) FROM jobqueue_job WHERE finished_at IS NOT NULL"},
    "benchmarks": ["enqueue", "drain", "latency", "sweep", "growth", "fence", "bloat"],
    "settings": ["default", "tuned"],
}
BATCH = 500
CLAIM = """
UPDATE jobqueue_job SET state = 'running', claimed_by = 'limit', claimed_at = now(),
    attempted_at = now(), attempt = attempt + 1, version = version + 1
WHERE id = ANY(ARRAY(
    SELECT id FROM jobqueue_job
    WHERE queue = 'default' AND state = 'waiting' AND run_after <= now()
    ORDER BY priority DESC, run_after, id LIMIT %s FOR UPDATE SKIP LOCKED
))
RETURNING id, version, attempt, claimed_at, attempted_at, task, args, kwargs
"""
COMPLETE = """
UPDATE jobqueue_job SET state = 'completed', finished_at = now(), unique_key = NULL,
    settled_version = version, version = version + 1
WHERE id = ANY(%(ids)s)
"""
# The same, and only where each row is still the execution that was claimed: what the batch has in
# common as scalars, and the versions as an array beside the ids.
COMPLETE_FENCED = """
UPDATE jobqueue_job AS j SET state = 'completed', finished_at = now(), unique_key = NULL,
    settled_version = j.version, version = j.version + 1
FROM unnest(%(ids)s::bigint[], %(versions)s::bigint[]) AS e (id, version)
WHERE j.id = e.id AND j.version = e.version AND j.state = 'running' AND j.attempt = %(attempt)s
    AND j.claimed_by = 'limit' AND j.claimed_at = %(claimed_at)s
    AND j.attempted_at = %(attempted_at)s
"""


def connect(place):
    return psycopg.connect(
        host=place["host"], user=place["user"], dbname=place["dbname"], autocommit=True
    )


def setup(place):
    django_child.configure(place, ["jobqueue"])
    django_child.migrate()


def columns_like(connection, task):
    """Return the columns of a job as this project stores it, but for id and times."""
    row = connection.execute("SELECT to_jsonb(j) FROM jobqueue_job j LIMIT 1").fetchone()
    if row is None:
        raise SystemExit("there is no job to be like")
    left_out = {"id", "run_after", "enqueued_at"}
    columns = {name: value for name, value in row[0].items() if name not in left_out}
    return {**columns, "task": task, "queue": "default"}


def enqueue(place, jobs, handler="noop", single=False):
    seed(place)
    with connect(place) as connection:
        columns = columns_like(connection, f"handlers.{handlers.BLOCKING[handler].__name__}")
        columns = {name: value for name, value in columns.items() if value is not None}
        if single:
            put = one_by_one(connection, columns, insert_of(columns))
        else:
            put = by_unnest(connection, columns)
        return child.timed(jobs, put, single)


def seed(place):
    """Have this project store one job, out of the way, to show what its rows are."""
    django_child.configure(place, ["jobqueue"])
    django_child.start()
    from jobqueue.enqueue import enqueue

    enqueue("handlers.noop", [0], queue="warm")


def as_parameter(value):
    return json.dumps(value) if isinstance(value, dict | list) else value


def insert_of(columns):
    return (
        f"INSERT INTO jobqueue_job ({', '.join(columns)}) "
        f"VALUES ({', '.join(f'%({name})s' for name in columns)}) RETURNING id"
    )


def one_by_one(connection, columns, statement):
    values = {name: as_parameter(value) for name, value in columns.items()}

    def store(number):
        connection.execute(statement, {**values, "args": json.dumps([number])}).fetchone()

    return store


def by_unnest(connection, columns):
    """Store many: what differs between them comes as an array, what doesn't as it is."""
    rest = [name for name in columns if name != "args"]
    statement = (
        f"INSERT INTO jobqueue_job (args, {', '.join(rest)}) "
        f"SELECT e.args, {', '.join(f'%({name})s' for name in rest)} "
        "FROM unnest(%(args)s::jsonb[]) AS e (args) RETURNING id"
    )
    values = {name: as_parameter(columns[name]) for name in rest}

    def store(numbers):
        arguments = [json.dumps([number]) for number in numbers]
        connection.execute(statement, {**values, "args": arguments}).fetchall()

    return store


def worker(place, processes, threads, settings, handler):
    handle = handlers.BLOCKING[handler]
    with connect(place) as connection, ThreadPoolExecutor(threads) as pool:
        if handler == "stamp":
            listen(connection, handle)
        while True:
            jobs = connection.execute(CLAIM, [BATCH]).fetchall()
            if not jobs:
                time.sleep(0.05)
                continue
            if handler == "noop":
                for job in jobs:
                    handle(*job[-2], **job[-1])
            else:
                list(pool.map(lambda job: handle(*job[-2], **job[-1]), jobs))
            connection.execute(COMPLETE, {"ids": [job[0] for job in jobs]})


def listen(connection, handle):
    """Claim, run, complete, wait to be told; in this order, for what came before it listened."""
    connection.execute("LISTEN bench")
    while True:
        for job in connection.execute(CLAIM, [1]).fetchall():
            handle(*job[-2], **job[-1])
            connection.execute(COMPLETE, {"ids": [job[0]]})
        for _ in connection.notifies(stop_after=1):
            pass


def latency(place, jobs, stamps):
    seed(place)
    with connect(place) as connection:
        columns = columns_like(connection, "handlers.stamp")
        columns = {name: value for name, value in columns.items() if value is not None}
        statement = (
            f"WITH born AS ({insert_of(columns)}) SELECT id, pg_notify('bench', '') FROM born"
        )
        store = one_by_one(connection, columns, statement)
        return child.one_at_a_time(jobs, stamps, store)


def sweep(place, batch):
    """Schedule all running jobs again, by id, as a sweep does."""
    with connect(place) as connection:
        began, taken, last = time.perf_counter(), 0, 0
        while True:
            rows = connection.execute(
                "SELECT id FROM jobqueue_job WHERE state IN ('claimed', 'running') AND id > %s "
                "ORDER BY id LIMIT %s",
                [last, batch],
            ).fetchall()
            if not rows:
                return {"jobs": taken, "seconds": time.perf_counter() - began}
            ids = [row[0] for row in rows]
            taken += connection.execute(
                "UPDATE jobqueue_job SET state = 'scheduled', claimed_by = NULL, "
                "claimed_at = NULL, run_after = now() + interval '1 minute', "
                "version = version + 1 WHERE id = ANY(%s)",
                [ids],
            ).rowcount
            last = ids[-1]


def claim(place, size, times):
    with connect(place) as connection:
        seconds = []
        for _ in range(times + 1):
            began = time.perf_counter()
            jobs = connection.execute(CLAIM, [size]).fetchall()
            seconds.append(time.perf_counter() - began)
            assert len(jobs) == size, f"{len(jobs)} of {size} claimed"
    return {"seconds": seconds[1:]}


def run_through(place, jobs, batch):
    with connect(place) as connection:
        seconds, done = [], 0
        while done < jobs:
            began = time.perf_counter()
            done += len(claim_and_complete(connection, min(batch, jobs - done), COMPLETE))
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "jobs": done}


def claim_and_complete(connection, batch, complete):
    claimed = connection.execute(CLAIM, [batch]).fetchall()
    assert claimed, "there was nothing to claim"
    ids, versions, attempts, claimed_at, attempted_at, *_ = zip(*claimed, strict=True)
    values = {"ids": list(ids)}
    if complete is COMPLETE_FENCED:
        values |= {"versions": list(versions), "attempt": attempts[0]}
        values |= {"claimed_at": claimed_at[0], "attempted_at": attempted_at[0]}
    done = connection.execute(complete, values).rowcount
    assert done == len(claimed), f"{done} of {len(claimed)} completed"
    return claimed


def fence(place, pairs, batch):
    """Claim and complete batches by id, and fenced, in pairs."""
    with connect(place) as connection:

        def once(is_fenced):
            claim_and_complete(connection, batch, COMPLETE_FENCED if is_fenced else COMPLETE)

        return child.in_pairs(pairs, once)


if __name__ == "__main__":
    verbs = (setup, enqueue, worker, latency, sweep, claim, run_through, fence)
    child.main({verb.__name__: verb for verb in verbs})
