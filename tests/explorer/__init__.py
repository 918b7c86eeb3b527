"""One job's life, explored: every interleaving of its actors, and each guard dropped in turn.

The job, its history and the workers' rows are values (``values``); every atomic write to them is a
pure function that goes by production's own guards and plans (``model``, ``writes``). Around them
stand the actors (``actors``), each of whose steps may come at any time:

* two workers that stall or crash anywhere, wake up and go on with what they held; the replies of
  their claims, starts and outcomes may be lost; a heartbeat renews, compares, and releases;
* one or two sweeps, which read that a worker is silent, fence it, read the row, ask who lives, and
  write;
* an operator who completes, fails, releases, asks to stop, cancels by force, reruns, edits, deletes
  and prunes, with the version that he saw or an older one; and anybody who promotes.

``explore`` visits every state, breadth first, and holds each step against ``invariants``.

Bounds, by exploration (``report.EXPLORATIONS``): 2 or 3 claims, 1 to 3 acts of the operator, 1 or 2
executions in hand at once, 1 or 2 sweeps, a budget of 1 or 2 attempts (one more with a rerun that
finds it spent), one figure of progress, 0 or 1.

What is abstracted, so that more can happen and not less:

* Time: a lease runs out, a job falls due or is overdue whenever it likes. The clock itself stands
  still, so that executions can be told apart by their versions alone.
* Versions and attempts are moved to fixed numbers, since only their order and the distance to the
  budget count; that a version rises by exactly one is checked before. The workers are alike, and
  so are the sweeps. A worker crashes when its lease has run out: nobody could tell before.
* What somebody read before the version rose is forgotten once all that can rest on it is found
  refused, as it then is for ever. One exploration forgets nothing.

Not here: batches, ``context.atomic()``, checkpoints, paused queues, a failover that loses commits,
writers outside the rules. An operator who acts without a lock on an old page is fenced as a sweep
is. A job that waits for a worker or a claim beyond the bounds counts as one that will end. Whoever
loses the reply of a *start* is told of a conflict, must not run the job, and gives it back by
reconciliation. Of a deleted job nobody can tell any more what became of it.
"""
