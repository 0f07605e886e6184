"""What the calls of checkpointers, and of their parts, leave behind."""

from __future__ import annotations

from typing import Final

from tests.support.outcomes import Cells, row

__all__ = ["SAVING"]

_BACKGROUND: Final = "checkpointers/test_background.py::"
_PROCESS: Final = "checkpointers/test_process.py::"
_CRASH: Final = "checkpointers/test_crash.py::"
_RANKS: Final = "checkpointers/test_background_ranks.py::"
_TOGETHER: Final = "checkpointers/test_ranks.py::"
_READER: Final = "checkpointers/test_reader.py::"
_WRITER: Final = "checkpointers/test_writer.py::"
_STAGER: Final = "checkpointers/test_stager.py::"
_SAVES: Final = "semantics/test_saves.py::"
_LOADS: Final = "semantics/test_loads.py::"
_PROCESSES: Final = "semantics/test_processes.py::"
_BARRIERS: Final = "semantics/test_barriers.py::"
_CLI: Final = "test_cli.py::"
_ENDS: Final = "semantics/test_ends.py::"

_KILLED: Final = _CRASH + "TestFinishing::test_a_killed_trainers_saves_are_written"
_TRAINER_DIES: Final = ("later", _KILLED)
_REPLACED: Final = (
    "handed / later",
    _PROCESS + "TestDeath::test_what_waited_is_written_by_the_next_one",
)
_NOBODY: Final = ("—",)

CHECKPOINTER: Final[Cells] = {
    **row(
        "AsyncCheckpointer.save",
        (
            "handed / later",
            _BACKGROUND + "TestSave::test_the_state_may_be_mutated_when_it_returns",
            _KILLED,
        ),
        (
            "failed / before",
            _BACKGROUND + "TestFailure::test_what_cannot_be_staged_fails_its_handle",
            _BACKGROUND + "TestFailure::test_told_so_it_raises",
            _RANKS + "test_a_rank_that_cannot_stage_tells_the_other",
        ),
        ("failed / before", _BACKGROUND + "TestPolicy::test_waiting_has_a_deadline"),
        (
            "nothing / before",
            _SAVES + "test_a_cancel_at_every_await",
            _BACKGROUND + "TestCancel::test_a_save_that_waits",
            _RANKS + "test_a_rank_that_is_cancelled_tells_the_other",
        ),
        _TRAINER_DIES,
        _REPLACED,
    ),
    **row(
        "SaveHandle.written",
        (
            "as before / after",
            _BACKGROUND + "TestSave::test_what_it_saved_can_be_loaded_at_once",
        ),
        (
            "failed / one",
            _BACKGROUND + "TestFailure::test_the_handle_raises",
            _WRITER + "TestFailures::test_a_call_that_fails",
            _WRITER + "TestHooks::test_one_that_fails_after",
        ),
        ("as cancel", _BACKGROUND + "TestCancel::test_waiting_for_the_end"),
        (
            "as before / later",
            _BACKGROUND + "TestCancel::test_waiting_for_the_end",
        ),
        _TRAINER_DIES,
        (
            "failed / one",
            _BACKGROUND + "TestFailure::test_a_dead_child_fails_one_save",
        ),
    ),
    **row(
        "AsyncCheckpointer.load",
        (
            "whole / before",
            _BACKGROUND + "TestSave::test_what_it_saved_can_be_loaded_at_once",
        ),
        ("nothing / before", _READER + "TestDamage::test_anywhere"),
        ("as cancel", _LOADS + "test_a_cancel"),
        ("nothing / before", _LOADS + "test_a_cancel"),
        ("before", _LOADS + "test_a_loader_dies"),
        ("nothing", _LOADS + "test_a_sender_dies"),
    ),
    **row(
        "AsyncCheckpointer.load, state_dict=",
        ("filled / before", _READER + "TestTemplate::test_in_place"),
        ("torn / before", _READER + "TestDamage::test_a_template_is_told_of"),
        ("as cancel", _LOADS + "test_a_cancel"),
        (
            "torn / before",
            _LOADS + "test_a_cancel",
            _BACKGROUND + "TestCancel::test_load",
        ),
        ("before", _LOADS + "test_a_loader_dies"),
        ("torn", _LOADS + "test_a_sender_dies"),
    ),
    **row(
        "AsyncCheckpointer.close, aclose",
        (
            "closed / decided",
            _BACKGROUND + "TestEnd::test_leaving_the_block_writes_what_was_staged",
        ),
        (
            "closed / decided",
            _BACKGROUND + "TestFailure::test_told_so_it_raises",
            _BACKGROUND
            + "TestFailure::test_what_nobody_saw_is_logged_and_returned_by_close",
        ),
        (
            "closed / decided",
            _BACKGROUND + "TestEnd::test_a_writer_that_hangs_does_not_hold_the_end",
        ),
        ("closing / later", _ENDS + "test_a_cancelled_end"),
        (
            "later",
            _CRASH + "TestFinishing::test_an_exit_without_close_loses_nothing",
            _PROCESSES + "test_a_trainer_that_dies_while_it_closes",
        ),
        ("closed / decided", _PROCESSES + "test_a_child_that_dies_at_the_end"),
    ),
    **row(
        "recover",
        (
            "whole / gone",
            _CRASH + "TestRecovery::test_the_last_staged_state_comes_back",
        ),
        (
            "nothing / keeps",
            _CRASH + "TestRecovery::test_nobody_else_may_have_it",
        ),
        (
            "nothing / keeps",
            _SAVES + "test_a_keeper_that_hangs",
            _CRASH + "TestRecovery::test_a_keeper_that_hangs_has_a_deadline",
        ),
        (
            "nothing / keeps",
            _CRASH + "TestRecovery::test_a_cancelled_recovery_leaves_it_where_it_is",
        ),
        ("keeps", _SAVES + "test_a_heir_dies"),
        ("nothing", _SAVES + "test_a_keeper_dies"),
    ),
}

PARTS: Final[Cells] = {
    **row(
        "CheckpointProcess.ready",
        (
            "running",
            _PROCESS
            + "TestChild::test_it_starts_before_it_is_needed_and_without_torch",
        ),
        ("restarts", _PROCESS + "TestFailure::test_a_failed_init_function_is_told"),
        ("restarts", _PROCESS + "TestFailure::test_a_slow_start_has_a_deadline"),
        ("as before", _PROCESSES + "test_a_cancelled_wait_for_the_start"),
        (
            "gone",
            _CRASH + "TestFinishing::test_an_idle_child_ends_with_its_trainer",
            _CRASH
            + "TestFinishing::test_a_child_that_starts_when_the_trainer_is_dead_ends",
        ),
        ("restarts", _PROCESSES + "test_a_child_that_dies_at_its_start"),
    ),
    **row(
        "CheckpointProcess.submit",
        (
            "handed / later",
            _PROCESS + "TestEnd::test_closing_waits_for_what_was_handed_over",
        ),
        (
            "nothing / before",
            _PROCESS + "TestWriting::test_a_keyword_that_is_no_data_is_refused",
        ),
        ("as cancel", _SAVES + "test_a_cancel_at_every_await"),
        ("nothing / before", _SAVES + "test_a_cancel_at_every_await"),
        _TRAINER_DIES,
        _REPLACED,
    ),
    **row(
        "CheckpointProcess.write",
        (
            "as before / after",
            _PROCESS + "TestWriting::test_a_staged_state_is_written_and_committed",
        ),
        ("failed / one", _PROCESS + "TestFailure::test_a_storage_error_arrives_as_one"),
        (
            "failed / one",
            _PROCESS + "TestDeath::test_a_hung_one_is_killed_and_replaced",
        ),
        ("as before / one", _PROCESS + "test_a_cancel_at_every_await_leaves_it_usable"),
        _TRAINER_DIES,
        (
            "failed / one",
            _PROCESS + "TestDeath::test_the_write_fails_at_once_and_the_next_one_works",
        ),
    ),
    **row(
        "Submission.written",
        (
            "as before / after",
            _PROCESS + "TestEnd::test_closing_waits_for_what_was_handed_over",
        ),
        ("failed / one", _PROCESS + "TestEnd::test_a_writer_that_hangs_is_killed"),
        ("as cancel", _PROCESSES + "test_a_cancelled_wait_for_a_write"),
        ("as before / later", _PROCESSES + "test_a_cancelled_wait_for_a_write"),
        _TRAINER_DIES,
        (
            "failed / one",
            _PROCESS + "TestDeath::test_a_killed_child_is_noticed_in_a_moment",
        ),
    ),
    **row(
        "CheckpointProcess.forsake",
        (
            "as before / told",
            _PROCESSES + "test_a_save_that_is_forsaken",
            _RANKS + "test_a_rank_that_cannot_stage_tells_the_other",
        ),
        ("as before / waits", _PROCESSES + "test_a_save_that_is_forsaken"),
        ("as cancel", _PROCESSES + "test_a_save_that_is_forsaken"),
        ("as before / waits", _PROCESSES + "test_a_save_that_is_forsaken"),
        ("waits", _TOGETHER + "TestLate::test_it_times_out"),
        ("restarts / told", _PROCESSES + "test_a_save_that_is_forsaken"),
    ),
    **row(
        "CheckpointProcess.close, aclose",
        (
            "closed / decided",
            _PROCESS + "TestEnd::test_closing_waits_for_what_was_handed_over",
        ),
        ("as before", _ENDS + "test_another_loop"),
        ("closed / decided", _PROCESS + "TestEnd::test_a_writer_that_hangs_is_killed"),
        (
            "closing / later",
            _PROCESS + "TestEnd::test_a_cancelled_close_goes_on",
            _ENDS + "test_a_cancelled_end",
        ),
        ("later", _PROCESSES + "test_a_trainer_that_dies_while_it_closes"),
        ("closed / decided", _PROCESSES + "test_a_child_that_dies_at_the_end"),
    ),
    **row(
        "CheckpointProcess.abandon",
        (
            "closed / later",
            _CRASH + "TestRecovery::test_an_exception_in_the_block_counts_as_a_death",
        ),
        ("as before", _ENDS + "test_another_loop"),
        ("as cancel", _ENDS + "test_a_cancelled_end"),
        ("closing / later", _ENDS + "test_a_cancelled_end"),
        _TRAINER_DIES,
        ("closed", _PROCESSES + "test_a_child_that_dies_at_the_end"),
    ),
    **row(
        "DefaultStager.stage",
        ("staged", _STAGER + "TestOptions::test_each_stages_everything"),
        ("nothing", _STAGER + "TestMemory::test_a_refused_state_leaves_nothing"),
        ("as cancel", _SAVES + "test_a_cancel_at_every_await"),
        (
            "nothing",
            _SAVES + "test_a_cancel_at_every_await",
            "test_staging.py::TestDevice::test_a_cancel_leaves_the_arena_to_the_copies",
        ),
        _NOBODY,
        _NOBODY,
    ),
    **row(
        "DefaultStager.close",
        ("closed", _STAGER + "TestMemory::test_it_is_reused"),
        ("as before", _ENDS + "test_another_loop"),
        ("as cancel", _ENDS + "test_a_cancelled_end"),
        ("closing", _ENDS + "test_a_cancelled_end"),
        _NOBODY,
        _NOBODY,
    ),
}

BLOCKING: Final[Cells] = {
    **row(
        "SyncCheckpointer.save",
        (
            "as before / after",
            _WRITER + "TestFile::test_the_disk_confirms_each_step_before_the_next",
        ),
        (
            "failed / one",
            _WRITER + "TestFailures::test_a_call_that_fails",
            _WRITER + "TestHooks::test_one_that_fails_before",
            _WRITER + "TestHooks::test_one_that_fails_after",
        ),
        ("failed / one", _TOGETHER + "TestLate::test_it_times_out"),
        _NOBODY,
        (
            "one",
            "faults/test_files.py::test_a_writer_that_is_killed_leaves_nothing_torn",
            "faults/test_files.py::test_nor_at_any_moment",
        ),
        (
            "settled / one",
            _TOGETHER + "TestKilled::test_at_any_moment",
            _TOGETHER + "TestCommitted::test_the_rank_that_committed_warns",
            _TOGETHER + "TestCommitted::test_another_rank_looks_at_the_marker",
            _TOGETHER + "TestCommitted::test_another_rank_says_that_it_is_not_known",
        ),
    ),
    **row(
        "TCPStoreBarrier.meet",
        ("met / met", _TOGETHER + "TestTogether::test_both_save"),
        (
            "well / told",
            _TOGETHER + "TestTogether::test_one_fails",
            _TOGETHER + "TestTogether::test_one_cannot_resolve_its_path",
            _TOGETHER + "TestParting::test_for_those_who_will_read",
        ),
        ("well / told", _TOGETHER + "TestStore::test_a_replaced_process_finds_its_way"),
        _NOBODY,
        ("waits", _TOGETHER + "TestKilled::test_at_any_moment"),
        ("well", _TOGETHER + "TestStore::test_a_replaced_process_finds_its_way"),
    ),
    **row(
        "DistBarrier.meet",
        ("met / met", _TOGETHER + "TestTogether::test_both_save"),
        ("well / told", _TOGETHER + "TestTogether::test_one_fails"),
        ("broken / broken", _BARRIERS + "test_a_rank_that_stays_away"),
        _NOBODY,
        ("broken", _TOGETHER + "TestKilled::test_at_any_moment"),
        ("broken", _TOGETHER + "TestKilled::test_at_any_moment"),
    ),
    **row(
        "aiockpt fetch",
        (
            "as before / after",
            _CLI + "TestServe::test_what_was_fetched_is_the_state_dict",
        ),
        (
            "part / before",
            _CLI + "TestFetchThroughFaults::test_a_bit_that_always_flips",
        ),
        (
            "part / before",
            _CLI
            + "TestFetchThroughFaults::test_a_fetch_goes_on_where_the_last_one_failed",
        ),
        ("part / before", _CLI + "TestFetchThroughFaults::test_an_interrupt"),
        ("part / before", "semantics/test_fetches.py::test_a_fetch_dies"),
        ("part / before", _CLI + "TestFetchThroughFaults::test_a_sender_that_dies"),
    ),
}

SAVING: Final[Cells] = {**CHECKPOINTER, **PARTS, **BLOCKING}
