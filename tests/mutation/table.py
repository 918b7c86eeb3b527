"""The table of guards: how each is dropped from the real code, and what must fail then.

The names are those of the explorer's table, which drops the same guards in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from jobqueue.lifecycle import RULES, State, Verb
from tests.mutation import batches, drops, killers, races
from tests.mutation.gate import Killer, Mutant

# Where a write is decided by rows that were chosen before: whether it asks them again matters only
# if somebody can come between the two.
ONE_WRITER: Final = {
    "sqlite": "its transaction has the only write lock: nobody comes between choice and write"
}
# Where many outcomes are one statement, that is a second way to write the fence.
NO_BATCHES: Final = dict.fromkeys(
    ("sqlite", "mariadb"), "many outcomes are written one by one, as one alone is"
)


def verb(which: Verb) -> str:
    """Return the name of the guard that a verb happens only in its own states."""
    sources = " or ".join(state for state in State if state in RULES[which].sources)
    return f"verb: {which} only from {sources}"


def _column(name: str, *more: Killer) -> Mutant:
    conformance = killers.conformance(f"test_{name}_alone_counts")
    in_batches = batches.of_each_form(batches.one_moved, name)
    return Mutant(drops.without_column(name), (conformance, *in_batches, *more))


def _in_batches(
    change: Callable[..., drops.Statement],
    kill: Callable[..., Killer],
    *args: Any,
    forms: Sequence[str] = batches.FORMS,
) -> tuple[Mutant, ...]:
    """Drop it from the statement for many rows alone, in each of its forms."""
    return tuple(
        Mutant(
            drops.in_batches(form, change),
            (kill(*args, form),),
            NO_BATCHES,
            note=f"in batches {form}",
        )
        for form in forms
    )


def _column_of_batches(name: str) -> tuple[Mutant, ...]:
    """Without any column but the id; only in this one do the rows differ."""
    return _in_batches(drops.ids_alone, batches.one_moved, name)


def _column_of_sweeps(name: str) -> Mutant:
    """Let the first job of a page stand for others, which differ from it in this."""
    killer = batches.each_stale_job_is_taken(name)
    return Mutant(drops.sweeping_without_column(name), (killer,), note="each job's own, in sweeps")


def _null(name: str, *more: Killer) -> Mutant:
    """NULL equals nothing in SQL: a column that was NULL must be compared otherwise."""
    killer = killers.conformance(f"test_{name}_alone_counts")
    return Mutant(drops.skipping_nulls, (killer, *more), note="where it was NULL")


def _setback(which: Verb) -> tuple[Mutant, ...]:
    in_batches = batches.of_each_form(batches.asked_while_its_batch_waits, which)
    both = (races.asked_while_it_waits(which), *in_batches)
    return (
        Mutant(drops.deaf_to_cancel(which), both, note="in the table of verbs"),
        Mutant(drops.answering("cancel_requested", {}), both, note="in the statement"),
        *_in_batches(
            drops.ids_alone,
            batches.asked_while_its_batch_waits,
            which,
            forms=batches.FORMS[1:] if which in batches.NEVER_ALIKE else batches.FORMS,
        ),
    )


FENCE: Final[Mapping[str, tuple[Mutant, ...]]] = {
    "fingerprint: version": (
        _column(
            "version",
            killers.stale_page_edits_nothing,
            killers.claim_at_the_same_instant_is_another,
        ),
        *_column_of_batches("version"),
        _column_of_sweeps("version"),
        Mutant(
            drops.in_batches(batches.OF_MANY_VERSIONS, drops.no_versions),
            (batches.one_moved("version", batches.OF_MANY_VERSIONS),),
            NO_BATCHES,
            note="alone, in batches of many versions",
        ),
    ),
    "fingerprint: state": (_column("state"), *_column_of_batches("state")),
    "fingerprint: attempt": (
        _column("attempt"),
        *_column_of_batches("attempt"),
        _column_of_sweeps("attempt"),
    ),
    "fingerprint: claimed_by": (
        _column("claimed_by"),
        _null("claimed_by"),
        *_column_of_batches("claimed_by"),
        _column_of_sweeps("claimed_by"),
        Mutant(
            drops.putting_all_in_one_statement,
            batches.of_each_form(batches.job_of_another_claim_is_settled_too),
            NO_BATCHES,
            note="each job's own, in batches",
        ),
        Mutant(
            drops.settling_all_completions_as_one,
            (batches.job_of_another_claim_is_settled_too(batches.ALIKE, None),),
            note="each job's own, of those that complete as one",
        ),
    ),
    "fingerprint: claimed_at": (
        _column("claimed_at"),
        _null("claimed_at"),
        *_column_of_batches("claimed_at"),
        _column_of_sweeps("claimed_at"),
    ),
    "fingerprint: attempted_at": (
        _column("attempted_at"),
        _null("attempted_at", *batches.of_each_form(batches.one_was_begun_meanwhile)),
        *_column_of_batches("attempted_at"),
        _column_of_sweeps("attempted_at"),
    ),
    "fence: version rises": (
        Mutant(drops.keeping_the_version, (killers.stale_page_edits_nothing,)),
        *_in_batches(drops.leaving("version"), batches.versions_rise),
        Mutant(
            drops.claiming_without_a_new_version,
            (killers.claim_and_promotion_raise_the_version,),
            note="with claims and promotions",
        ),
    ),
    "coordinator: expected version": (
        Mutant(
            drops.ignoring_the_expected_version,
            (killers.stale_page_of_a_coordinator_does_nothing,),
        ),
    ),
}

VERBS: Final[Mapping[str, tuple[Mutant, ...]]] = {
    verb(Verb.PROMOTE): (
        Mutant(
            drops.without_states(State.SCHEDULED),
            (races.second_promoter_of_the_same_rows_promotes_none,),
            ONE_WRITER,
            note="in the write",
        ),
        Mutant(
            drops.both(drops.choosing_from_any_state("due"), drops.without_states(State.SCHEDULED)),
            (killers.waiting_job_is_not_promoted,),
            note="in choice and write",
        ),
    ),
    verb(Verb.CLAIM): (
        Mutant(
            drops.without_states(State.WAITING),
            (
                killers.chosen_job_that_is_held_is_not_claimed,
                races.second_claimer_of_the_same_rows_gets_none,
            ),
            note="in the write",
        ),
        Mutant(
            drops.both(
                drops.choosing_from_any_state("claimable"), drops.without_states(State.WAITING)
            ),
            (killers.held_job_is_not_claimed,),
            note="in choice and write",
        ),
    ),
    **{
        verb(each): (Mutant(drops.from_any_state(each), (killers.misused(each),)),)
        for each in killers.MISUSES
    },
    "progress: only while running": (
        Mutant(drops.in_any_state, (killers.report_of_a_job_that_does_not_run_is_not_allowed,)),
    ),
    "cancel request: only while running": (
        Mutant(drops.in_any_state, (killers.request_to_a_job_that_does_not_run_is_not_allowed,)),
    ),
    "batch: state": (
        Mutant(
            drops.answering("in_states", {}),
            (races.second_claimer_of_the_same_rows_gets_none,),
        ),
    ),
    **{f"cancel: in {each}": _setback(each) for each in Verb if RULES[each].yields_to_cancel},
}

LEASES: Final[Mapping[str, tuple[Mutant, ...]]] = {
    "lease: alive": (
        Mutant(
            drops.answering("alive", {}),
            (
                killers.dead_worker_renews_nothing,
                killers.dead_worker_claims_nothing,
                killers.jobs_of_a_dead_worker_are_taken,
            ),
        ),
    ),
    "claim: liveness": (
        Mutant(drops.claiming_without_a_lease, (killers.dead_worker_claims_nothing,)),
        Mutant(
            drops.writing_without_a_lease,
            (races.worker_that_is_swept_while_it_claims_keeps_nothing,),
            ONE_WRITER,
            note="in the write",
        ),
    ),
    "renewal: only while alive": (
        Mutant(drops.renewing_whatever_the_lease, (killers.dead_worker_renews_nothing,)),
    ),
    "sweep: staleness cutoff": (
        Mutant(drops.answering("silent_since", {}), (races.renewed_lease_is_kept,)),
        Mutant(
            drops.fencing_by_an_old_lease,
            (races.prolonged_lease_is_kept,),
            note="of the lease that was read",
        ),
    ),
    "sweep: worker fence": (
        Mutant(drops.taking_jobs_without_the_worker, (killers.silent_worker_is_fenced,)),
    ),
    "sweep: worker first": (
        Mutant(drops.worker_last, (races.worker_is_fenced_before_its_jobs_are_looked_at,)),
    ),
    "sweep: the holder's lease": (
        Mutant(drops.judging("stale"), (killers.jobs_of_a_live_worker_are_left_alone,)),
        Mutant(
            drops.judging(None), (killers.jobs_of_a_dead_worker_are_taken,), note="nobody's ends"
        ),
        Mutant(
            drops.asking_who_lives_first,
            (races.job_of_a_new_worker_is_left_alone,),
            note="read after the rows",
        ),
    ),
    "reconciliation: unknown rows": (
        Mutant(drops.releasing_nothing_unknown, (killers.unknown_job_is_handed_back,)),
    ),
    "reconciliation: same execution": (
        Mutant(
            drops.comparing_presence_only,
            (killers.taken_job_is_told_lost, killers.newer_execution_is_handed_back),
        ),
        Mutant(
            drops.answering("is_same_execution", False),
            (killers.known_job_is_kept,),
            note="nothing is the same",
        ),
    ),
}

LOST_REPLIES: Final[Mapping[str, tuple[Mutant, ...]]] = {
    "settled version": (
        Mutant(
            drops.answering("is_settled_from", True),
            (killers.operators_completion_is_not_the_owners,),
        ),
        Mutant(
            drops.answering("is_settled_from", False),
            (killers.own_completion_is_recognised,),
            note="never read",
        ),
    ),
    "settled version: left by the owner": (
        Mutant(
            drops.marking_nothing,
            (
                killers.own_completion_is_recognised,
                killers.own_completion_that_was_rerun_is_known,
                *batches.of_each_form(batches.own_completions_are_recognised),
            ),
        ),
        *_in_batches(drops.leaving("settled_version"), batches.own_completions_are_recognised),
    ),
    "settled version: only the owner's": (
        Mutant(
            drops.marking_for_anybody,
            (
                killers.operators_completion_is_not_the_owners,
                *batches.of_each_form(batches.operators_completions_are_not_the_owners),
            ),
        ),
    ),
    "same claim": (
        Mutant(
            drops.answering("is_same_claim", True),
            (
                killers.completion_in_another_history_is_not_this_ones,
                killers.job_of_another_history_is_told_lost,
            ),
        ),
    ),
    "settling event: version": (
        Mutant(
            drops.without_key("settling_event", "version"),
            (killers.own_retry_of_an_earlier_execution_is_not_this_ones,),
        ),
    ),
    "settling event: actor": (
        Mutant(
            drops.without_key("settling_event", "actor"),
            (killers.operators_retry_is_not_the_owners,),
        ),
    ),
    "settling event: kind": (
        Mutant(drops.without_key("settling_event", "kind__in"), (killers.own_release_is_no_retry,)),
    ),
    "rerun event: settled version": (
        Mutant(
            drops.without_key("rerun_event", "detail__settled_version"),
            (killers.rerun_of_an_operators_completion_is_not_the_owners,),
        ),
    ),
    "rerun event: state": (
        Mutant(
            drops.without_key("rerun_event", "from_state"),
            (killers.own_failure_that_was_rerun_is_no_completion,),
        ),
    ),
    "lost reply: looked for": (
        Mutant(
            drops.looking_for_no_trace,
            (
                killers.own_completion_is_recognised,
                killers.own_completion_that_was_rerun_is_known,
                killers.own_retry_is_recognised,
            ),
        ),
        Mutant(
            drops.taking_any_outcome,
            (killers.another_result_is_no_lost_reply,),
            note="of this outcome",
        ),
    ),
}

TIMES: Final[Mapping[str, tuple[Mutant, ...]]] = {
    "due time: claim": (
        Mutant(
            drops.at_any_time,
            (killers.job_is_not_claimed_early, killers.chosen_job_is_not_claimed_early),
        ),
    ),
    "due time: promote": (
        Mutant(drops.at_any_time, (killers.job_is_not_promoted_early,)),
        Mutant(
            drops.writing_at_any_time,
            (races.job_put_off_meanwhile_is_not_promoted,),
            ONE_WRITER,
            note="in the write",
        ),
    ),
    "prune: finished before": (
        Mutant(drops.answering("finished_before", {}), (races.job_finished_again_is_not_pruned,)),
    ),
    "progress: Greatest": (Mutant(drops.last_report_wins, (killers.late_report_lowers_nothing,)),),
}

TABLE: Final[Mapping[str, tuple[Mutant, ...]]] = {
    **FENCE,
    **VERBS,
    **LEASES,
    **LOST_REPLIES,
    **TIMES,
}
