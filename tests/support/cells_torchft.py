"""What the calls of the transports for torchft leave behind."""

from __future__ import annotations

from typing import Final

from tests.support.outcomes import Cells, row

__all__ = ["TORCHFT"]

_CONTRACT: Final = "torchft/test_contract.py::"
_GROUP: Final = "torchft/test_group.py::"
_HERE: Final = "torchft/test_semantics.py::"
_FORK: Final = _CONTRACT + "TestPoint16Fork::test_a_child_does_not_keep_connections"
_STUCK: Final = _CONTRACT + "TestPoint14Receivers::test_a_dead_one_holds_up_nobody"
_SAME: Final = "as PGTransport"

TORCHFT: Final[Cells] = {
    **row(
        "torchft.HTTPTransport.send_checkpoint",
        (
            "new / served",
            _CONTRACT + "TestPoint6EarlyAndLate::test_an_early_receive_waits",
            _CONTRACT + "TestPoint8Disallow::test_what_was_sent_is_a_copy",
        ),
        (
            "old / told",
            _CONTRACT + "TestPoint12FailedSource::test_what_is_offered_stays",
            _CONTRACT + "TestPoint12FailedSource::test_all_that_wait_are_told_at_once",
        ),
        ("old / told", _HERE + "test_a_send_that_does_not_succeed"),
        ("old / told", _HERE + "test_a_send_that_does_not_succeed"),
        ("cut", _FORK),
        ("new", _STUCK),
    ),
    **row(
        "torchft.HTTPTransport.recv_checkpoint",
        (
            "whole / idle",
            _CONTRACT + "TestPoint9Result::test_two_receives_share_no_memory",
        ),
        ("nothing / idle", _HERE + "test_a_receive_that_does_not_succeed"),
        (
            "nothing / idle",
            _HERE + "test_a_receive_that_does_not_succeed",
            _CONTRACT + "TestPoint13Retries::test_the_deadline_is_one_for_all_attempts",
        ),
        ("nothing / idle", _HERE + "test_a_receive_that_does_not_succeed"),
        ("idle", "semantics/test_deaths.py::test_a_receiver_dies"),
        (
            "nothing",
            _CONTRACT + "TestPoint13Retries::"
            "test_a_dead_source_is_no_reason_to_wait_for_the_deadline",
        ),
    ),
    **row(
        "torchft.HTTPTransport.disallow_checkpoint",
        (
            "none / reads on",
            _CONTRACT + "TestPoint8Disallow::test_a_stuck_reader_is_not_waited_for",
        ),
        (
            "as before / reads on",
            _CONTRACT + "TestPoint8Disallow::test_it_never_raises",
            _CONTRACT
            + "TestPoint8Disallow::test_one_that_comes_to_nothing_is_made_up_for",
        ),
        (
            "as before / reads on",
            _CONTRACT
            + "TestPoint8Disallow::test_one_that_comes_to_nothing_is_made_up_for",
        ),
        ("none / reads on", _HERE + "test_a_withdrawal_that_is_interrupted"),
        ("cut", _FORK),
        ("none", _STUCK),
    ),
    **row(
        "torchft.HTTPTransport.shutdown",
        (
            "closed / evicted",
            _CONTRACT + "TestPoint15Shutdown::test_waiting_it_ends_threads_and_sockets",
        ),
        (
            "closed / evicted",
            "test_sync_facade.py::test_a_last_thing_that_fails_is_logged",
        ),
        (
            "closing / evicted",
            _CONTRACT + "TestPoint15Shutdown::test_without_waiting_it_still_ends",
        ),
        ("closing / evicted", _HERE + "test_an_end_that_is_interrupted"),
        (
            "cut",
            _FORK,
            _CONTRACT + "TestPoint15Shutdown::test_the_interpreter_ends_without_it",
        ),
        ("closed", _CONTRACT + "TestPoint15Shutdown::test_twice_in_any_way"),
    ),
    **row(
        "torchft.PGTransport, every call",
        (_SAME, _GROUP + "test_one_transport_for_all_quorums"),
        (
            _SAME,
            _GROUP + "test_failures_are_told_and_leave_the_group_as_it_is",
            _GROUP + "test_a_template_that_raises_is_told",
        ),
        (_SAME, _GROUP + "test_one_transport_for_all_quorums"),
        (
            _SAME,
            "test_sync_facade.py::test_an_interrupted_caller_leaves_nothing_under_way",
        ),
        (_SAME, "pg/test_pg_processes.py::test_a_sender_killed_half_way"),
        (_SAME, "pg/test_pg_processes.py::test_a_dead_peer_is_an_error_at_once"),
    ),
}
