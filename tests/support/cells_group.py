"""What the calls of a ``PGTransport`` leave behind."""

from __future__ import annotations

from typing import Final

from tests.support.outcomes import Cells, row

__all__ = ["GROUP"]

_SUITE: Final = "pg/test_pg_conformance.py::TestPGTransport::"
_CALLS: Final = "pg/test_pg_transport.py::"
_DEATHS: Final = "pg/test_pg_processes.py::"
_CUT: Final = "semantics/test_group.py::test_a_receive_that_is_cut_short"
_ENDS: Final = "semantics/test_ends.py::"

_KILLED: Final = _DEATHS + "test_a_receiver_killed_half_way_disturbs_no_other"

GROUP: Final[Cells] = {
    **row(
        "PGTransport.send_checkpoint",
        ("sent / whole", _SUITE + "test_several_receivers_get_it_at_once"),
        (
            "well / told",
            _CALLS + "test_what_cannot_be_sent_is_told_at_once",
            "pg/test_pg_unsendable.py::test_a_receiver_that_comes_later_for_that_step",
            _CALLS + "test_a_template_that_does_not_fit_is_told",
        ),
        (
            "broken / broken",
            _CALLS + "test_a_deadline_breaks_the_group",
            _CALLS + "test_what_had_no_time_breaks_nothing",
            _DEATHS + "test_a_receiver_stopped_half_way",
        ),
        (
            "broken / broken",
            "faults/test_pg_interruptions.py::test_a_cancel_at_every_await",
            _CALLS + "test_a_cancel_anywhere_ends_both_ends_at_once",
        ),
        ("broken", _DEATHS + "test_a_sender_killed_half_way"),
        ("broken", _KILLED, _DEATHS + "test_a_dead_peer_is_an_error_at_once"),
    ),
    **row(
        "PGTransport.recv_checkpoint",
        ("whole / sent", _SUITE + "test_what_arrives_is_independent"),
        (
            "nothing, well / told",
            _CALLS + "test_another_step_is_refused_before_anything_moves",
            _CALLS + "test_limits_hold_before_anything_is_allocated",
        ),
        ("nothing, broken / broken", _CUT),
        (
            "nothing, broken / broken",
            _CUT,
            "faults/test_pg_interruptions.py::test_a_cancel_at_every_await",
        ),
        ("broken", _KILLED),
        ("nothing, broken", _DEATHS + "test_a_dead_peer_is_an_error_at_once"),
    ),
    **row(
        "PGTransport.recv_checkpoint, into=",
        ("filled / sent", _SUITE + "test_a_template_is_filled"),
        (
            "untouched, well / told",
            _CALLS + "test_a_flipped_bit_is_noticed",
            _SUITE + "test_a_template_that_does_not_fit_is_untouched",
        ),
        ("either, broken / broken", _CUT),
        ("either, broken / broken", _CUT),
        ("broken", _KILLED),
        ("untouched, broken", _DEATHS + "test_a_sender_killed_half_way"),
    ),
    **row(
        "PGTransport.recv_checkpoint, into=, direct=True",
        ("filled / sent", _SUITE + "test_a_template_is_filled"),
        ("torn, well / told", _CALLS + "test_a_flipped_bit_is_noticed"),
        (
            "loose, broken / broken",
            _CUT,
            _DEATHS + "test_a_sender_stopped_half_way",
        ),
        ("loose, broken / broken", _CUT),
        ("broken", _KILLED),
        ("loose, broken", _DEATHS + "test_a_sender_killed_half_way"),
    ),
    **row(
        "PGTransport.disallow_checkpoint",
        ("none", _CALLS + "test_disallow_waits_for_a_send_that_is_under_way"),
        ("as before", _ENDS + "test_another_loop"),
        ("as cancel", "semantics/test_group.py::test_a_cancelled_withdrawal"),
        ("as before", "semantics/test_group.py::test_a_cancelled_withdrawal"),
        ("broken", _DEATHS + "test_a_sender_killed_half_way"),
        ("none, broken", "semantics/test_deaths.py::test_a_withdrawal_ends"),
    ),
    **row(
        "PGTransport.shutdown",
        (
            "closed / broken",
            _CALLS + "test_shutdown_ends_calls_at_once",
            "semantics/test_group.py::test_the_other_end_of_a_shutdown",
        ),
        ("as before", _ENDS + "test_another_loop"),
        ("as cancel", _ENDS + "test_a_cancelled_end"),
        ("closing / broken", _ENDS + "test_a_cancelled_end"),
        ("broken", _DEATHS + "test_a_sender_killed_half_way"),
        ("closed", _DEATHS + "test_a_dead_peer_is_an_error_at_once"),
    ),
}
