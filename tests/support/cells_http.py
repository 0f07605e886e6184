"""What the calls of an ``HTTPTransport`` leave behind."""

from __future__ import annotations

from typing import Final

from tests.support.outcomes import Cells, Proven, row

__all__ = ["HTTP"]

_SUITE: Final = "test_conformance.py::TestHTTPTransport::"
_LIFETIME: Final = "test_lifetime.py::"
_STORE: Final = "http/test_store.py::"
_SERVER: Final = "http/test_server.py::"
_STEPS: Final = "http/test_steps.py::"
_FOLLOW: Final = "test_follow.py::"
_PROCESS: Final = "http/test_server_process.py::"
_HOST: Final = "test_same_host.py::"
_SOURCES: Final = "test_sources_transport.py::"
_OFFERS: Final = "semantics/test_offers.py::"
_RECEIVES: Final = "semantics/test_receives.py::"
_DEATHS: Final = "semantics/test_deaths.py::"

_SENDER_DIES: Final = ("cut", _DEATHS + "test_a_sender_dies")


_FAILED_SEND: Final = (
    "old / told",
    _OFFERS + "test_a_send_to_a_process_that_does_not_succeed",
)


def _received(
    call: str,
    success: Proven,
    error: str,
    cut: str,
    died: str,
    *,
    there: str = "idle",
    failing: Proven = (_RECEIVES + "test_an_error",),
    outliving: Proven = (),
) -> Cells:
    """Return the row of a receive; ``cut`` is left by a deadline, or by a cancel."""
    return row(
        f"HTTPTransport.recv_checkpoint{call}",
        success,
        (f"{error} / {there}", *failing),
        (f"{cut} / {there}", _RECEIVES + "test_a_deadline"),
        (f"{cut} / {there}", _RECEIVES + "test_a_cancel"),
        (there, _DEATHS + "test_a_receiver_dies"),
        (died, _DEATHS + "test_a_receive_outlives_its_sender", *outliving),
    )


HTTP: Final[Cells] = {
    **row(
        "HTTPTransport.start",
        (
            "running",
            _LIFETIME + "TestStart::test_calls_that_begin_together_start_it_once",
        ),
        ("as before", _OFFERS + "test_a_start_that_fails"),
        (
            "as cancel",
            _LIFETIME + "TestStart::test_a_cancelled_start_keeps_the_address",
        ),
        (
            "as before / waits",
            _LIFETIME + "TestStart::test_a_cancelled_start_keeps_the_address",
        ),
        _SENDER_DIES,
        ("running", _SERVER + "test_a_client_that_leaves_while_it_waits_is_forgotten"),
    ),
    **row(
        "HTTPTransport.send_checkpoint",
        (
            "new / served",
            _SUITE + "test_a_receive_that_comes_first_waits",
            _SUITE + "test_a_new_step_takes_the_place_of_the_old",
            _STORE + "test_a_reader_of_a_superseded_snapshot_keeps_its_bytes",
        ),
        ("old / told", _OFFERS + "test_a_send_that_does_not_succeed"),
        ("old / told", _OFFERS + "test_a_send_that_does_not_succeed"),
        ("old / told", _OFFERS + "test_a_send_that_does_not_succeed"),
        _SENDER_DIES,
        ("new", _OFFERS + "test_a_reader_dies"),
    ),
    **row(
        "HTTPTransport.send_checkpoint, zero_copy=True",
        (
            "new / evicted",
            _STORE + "test_live_memory_is_drained_before_publish_returns",
            _STORE + "test_a_reader_of_live_memory_is_evicted_after_the_grace",
        ),
        ("old / told", _OFFERS + "test_a_send_that_does_not_succeed"),
        (
            "old / told",
            _OFFERS + "test_a_send_that_does_not_succeed",
            _LIFETIME + "TestZeroCopy::test_a_send_that_times_out_leaves_the_old_offer",
        ),
        (
            "old / told",
            _OFFERS + "test_a_send_that_does_not_succeed",
            _STORE + "test_a_cancelled_publish_leaves_live_memory_on_offer",
        ),
        _SENDER_DIES,
        ("new", _OFFERS + "test_a_reader_dies"),
    ),
    **row(
        "HTTPTransport.send_checkpoint, Server(process=True)",
        (
            "new / served",
            _PROCESS + "TestConformance::test_a_receive_that_comes_first_waits",
            _PROCESS + "TestConformance::test_a_new_step_takes_the_place_of_the_old",
            _PROCESS + "TestServing::test_a_slow_reader_keeps_the_old_one",
        ),
        (*_FAILED_SEND, _PROCESS + "TestServing::test_a_failed_send_is_told"),
        _FAILED_SEND,
        (
            *_FAILED_SEND,
            _PROCESS + "TestServing::test_a_cancel_at_any_await_leaves_one_offer",
        ),
        (
            "serves on",
            _DEATHS + "test_a_sender_dies",
            _PROCESS + "TestTheTrainersDeath::test_it_does_not_stay_for_ever",
            _PROCESS + "TestTheTrainersDeath::test_it_ends_too",
        ),
        (
            "new",
            _PROCESS + "TestConformance::test_a_receiver_that_leaves_disturbs_nobody",
            _PROCESS + "TestItsDeath::test_a_send_at_that_moment_is_not_lost",
        ),
    ),
    **row(
        "HTTPTransport.allow_checkpoint",
        (
            "new / served",
            "test_transport_http.py::TestAllow::test_it_is_offered_under_the_new_step",
        ),
        ("old / waits", _OFFERS + "test_a_renaming_that_does_not_succeed"),
        ("as cancel", _OFFERS + "test_a_renaming_that_does_not_succeed"),
        ("old / waits", _OFFERS + "test_a_renaming_that_does_not_succeed"),
        _SENDER_DIES,
        ("new", _OFFERS + "test_a_reader_dies"),
    ),
    **row(
        "HTTPTransport.disallow_checkpoint",
        (
            "none / evicted",
            _SUITE + "test_nothing_is_served_after_disallow",
            _SERVER + "test_retract_evicts_a_reader_that_hangs",
        ),
        ("as before", "semantics/test_ends.py::test_another_loop"),
        ("as cancel", _OFFERS + "test_a_cancelled_withdrawal"),
        (
            "none / reads on",
            _OFFERS + "test_a_cancelled_withdrawal",
            _SUITE + "test_a_cancelled_disallow_can_be_repeated",
        ),
        _SENDER_DIES,
        ("none", _OFFERS + "test_a_reader_dies"),
    ),
    **_received(
        "",
        ("whole / idle", _SUITE + "test_what_arrives_is_independent"),
        error="nothing",
        cut="nothing",
        died="nothing",
    ),
    **_received(
        ", into=",
        ("filled / idle", _SUITE + "test_a_template_is_filled"),
        error="untouched",
        cut="either",
        died="untouched",
    ),
    **_received(
        ", into=, direct=True",
        ("filled / idle", _SUITE + "test_a_template_is_filled"),
        error="torn",
        cut="torn",
        died="torn",
    ),
    **_received(
        ", select=",
        ("whole / idle", _SUITE + "test_what_is_selected_arrives"),
        error="nothing",
        cut="nothing",
        died="nothing",
    ),
    **_received(
        ", select=, into=",
        ("filled / idle", _SUITE + "test_a_template_is_filled_where_selected"),
        error="untouched",
        cut="either",
        died="untouched",
    ),
    **_received(
        ", have=",
        (
            "whole / idle",
            "http/test_delta.py::test_what_has_not_changed_is_not_fetched",
            "http/test_delta.py::test_what_changes_meanwhile_is_fetched",
        ),
        error="nothing",
        cut="nothing",
        died="nothing",
    ),
    **_received(
        ", have=True, into=",
        (
            "filled / idle",
            "http/test_delta.py::test_what_has_not_changed_is_not_fetched",
        ),
        error="untouched",
        cut="either",
        died="untouched",
    ),
    **_received(
        ", share=True",
        (
            "shared / lent",
            _HOST + "TestShare::test_it_is_the_same_state",
            _HOST + "TestShare::test_later_sends_do_not_change_it",
            _HOST + "TestShare::test_what_is_written_is_the_receivers_alone",
        ),
        error="nothing",
        cut="nothing",
        died="shared or nothing",
        there="lent",
        failing=(_RECEIVES + "test_an_error_of_what_is_shared",),
        outliving=(_HOST + "TestProcesses::test_the_senders_death_does_not_matter",),
    ),
    **_received(
        ", metadata=[...]",
        (
            "whole / idle",
            _SOURCES + "test_it_arrives_anew_and_says_who_gave_what",
        ),
        error="nothing",
        cut="nothing",
        died="whole",
        failing=(
            _RECEIVES + "test_an_error",
            "http/test_sources.py::TestAllFail::test_killed_one_after_the_other",
        ),
        outliving=(_SOURCES + "test_a_process_that_ends_or_stops_in_the_middle",),
    ),
    **row(
        "HTTPTransport.steps",
        ("next / idle", _STEPS + "test_every_step_that_is_awaited_is_given"),
        ("kept / idle", _STEPS + "test_a_silent_peer_can_be_given_up"),
        ("as cancel", _STEPS + "test_a_deadline_or_a_cancel_loses_no_step"),
        (
            "kept / idle",
            _STEPS + "test_a_cancel_at_any_moment_loses_no_step",
            _STEPS + "test_an_iterator_that_nobody_asks_holds_nothing",
        ),
        ("idle", _DEATHS + "test_a_receiver_dies"),
        (
            "asks on",
            _STEPS + "test_a_peer_that_starts_again_is_found_again",
            _STEPS + "test_a_silent_peer_can_be_given_up",
        ),
    ),
    **row(
        "HTTPTransport.follow",
        (
            "whole / idle",
            _FOLLOW + "test_each_newer_step_is_received",
            _FOLLOW + "test_no_step_twice_and_none_that_is_torn",
        ),
        ("nothing / idle", _FOLLOW + "test_what_is_wrong_for_good_is_raised"),
        ("asks on", _FOLLOW + "test_a_receive_that_is_late_is_begun_again"),
        (
            "nothing / idle",
            _FOLLOW + "test_a_cancelled_follower_leaves_nothing_behind",
        ),
        ("idle", _DEATHS + "test_a_receiver_dies"),
        (
            "asks on",
            _FOLLOW + "test_a_sender_that_is_away_is_waited_for",
            _FOLLOW + "test_a_restarted_sender_is_followed",
        ),
    ),
    **row(
        "HTTPTransport.shutdown",
        (
            "closed / evicted",
            _SUITE + "test_shutdown_is_idempotent",
            "http/test_embedding.py::TestLifetime::test_readers_get_their_grace",
            "test_defects.py::TestShutdown::test_nobody_listens_afterwards",
        ),
        ("as before", "semantics/test_ends.py::test_another_loop"),
        ("as cancel", _LIFETIME + "TestShutdown::test_a_cancelled_one_goes_on"),
        (
            "closing / evicted",
            _LIFETIME + "TestShutdown::test_a_cancelled_one_goes_on",
            "semantics/test_ends.py::test_a_cancelled_end",
        ),
        _SENDER_DIES,
        ("closed", _OFFERS + "test_a_reader_dies"),
    ),
}
