"""Breaks the code on purpose, one small break at a time, and checks that the test named beside it turns red.

A mutant that survives is a hole in the tests: write the missing test. A mutant whose text is gone was overtaken by a change:
write it down anew for the code as it is now. Files are changed in temporary copies alone.

    python scripts/mutants.py                          # all of them, about a quarter of an hour on two idle cores
    python scripts/mutants.py --area ledger --workers 1
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SEC = 120.0
AREA_TIMEOUT_SEC = 1200.0


class Mutant(NamedTuple):
    """One break, and the test that must notice it."""

    file: str
    old: str
    """Occurs exactly once in the file."""
    new: str
    test: str
    """A pytest node id, or the beginning of one: a file, or a test without its parameters."""


MUTANTS: dict[str, list[Mutant]] = {
    "profiling": [
        Mutant(
            "trainer/profiling/spans.py",
            "covered_to = max(covered_to, span.end)",
            "covered_to = span.end",
            "tests/unit/profiling/test_trace.py::test_gaps_are_the_times_that_no_span_covers",
        ),
        Mutant(
            "trainer/profiling/spans.py",
            "own[open_spans[-1]] -= spans[index].length",
            "own[open_spans[0]] -= spans[index].length",
            "tests/unit/profiling/test_trace.py::test_own_times_of_nested_spans_add_up_to_what_they_cover",
        ),
        Mutant(
            "trainer/profiling/trace.py",
            "if c.name in SYNCHRONIZING and step.start <= c.start < step.end",
            "if c.name in SYNCHRONIZING and step.start <= c.start",
            "tests/unit/profiling/test_trace.py::test_kernels_idle_time_and_synchronizations_of_the_device",
        ),
        Mutant(
            "trainer/profiling/trace.py",
            "(end - start) / len(steps) / 1e3",
            "(end - start) / 1e3",
            "tests/unit/profiling/test_trace.py::test_kernels_idle_time_and_synchronizations_of_the_device",
        ),
        Mutant(
            "scripts/gpu/gpu_checks.py",
            "(at_most is None or value <= at_most)",
            "(at_most is None or value < at_most)",
            "tests/scripts/test_gpu_harness.py::test_a_goal_is_met_or_missed_and_does_not_apply_in_a_rehearsal",
        ),
    ],
    "branching": [
        Mutant(
            "trainer/branching/verdict.py",
            "factor not in compared or not compared[factor].is_within",
            "factor in compared and not compared[factor].is_within",
            "tests/unit/branching/test_verdict.py::test_a_batch_without_a_loss_is_outside",
        ),
        Mutant(
            "trainer/branching/verdict.py",
            "    error = standard_error(differences)\n",
            "    error = each.error\n",
            "tests/unit/branching/test_verdict.py::test_what_seeds_have_in_common_is_no_error",
        ),
        Mutant(
            "trainer/branching/verdict.py",
            "    next_larger = outside[0] if outside else None\n",
            "    next_larger = outside[-1] if outside else None\n",
            "tests/unit/branching/test_verdict.py::test_the_search_ends_at_the_first_batch_outside",
        ),
        Mutant(
            "trainer/branching/verdict.py",
            "max(tolerance * abs(reference.mean), ",
            "max(tolerance, ",
            "tests/unit/branching/test_verdict.py::test_the_tolerance_is_relative",
        ),
        Mutant(
            "trainer/branching/batches.py",
            "        if all((size * share)",
            "        if any((size * share)",
            "tests/unit/branching/test_batches.py::test_a_factor_is_made_of_micro_batches_or_else_of_fewer_rows",
        ),
        Mutant(
            "trainer/branching/fork.py",
            '        "pool": [],\n',
            "",
            "tests/unit/branching/test_fork.py::test_an_order_begins_every_group_it_reads",
        ),
        Mutant(
            "trainer/branching/fork.py",
            '        "epoch": order * EPOCHS,\n',
            "",
            "tests/unit/branching/test_fork.py::test_each_order_differs_and_repeats_itself",
        ),
        Mutant(
            "trainer/branching/answer.py",
            "if len(losses) == seeds]",
            "if losses]",
            "tests/unit/branching/test_answer.py::test_a_rate_that_diverged_with_one_seed_does_not_count",
        ),
        Mutant(
            "trainer/branching/branch_config.py",
            "math.ceil(table.stale_threshold / factor)",
            "math.ceil(table.stale_threshold)",
            "tests/unit/branching/test_study.py::test_the_config_of_a_branch_differs_in_batch_rate_and_length_alone",
        ),
        Mutant(
            "trainer/branching/branch_config.py",
            '    data = {"mixing": study.origin.config.data.mixing, ',
            '    data = {"mixing": config.data.mixing, ',
            "tests/unit/branching/test_study.py::test_fewer_rows_are_fewer_of_every_source_and_modality_and_evaluated_with_all",
        ),
        Mutant(
            "trainer/branching/results.py",
            "    if changed:\n",
            "    if False:\n",
            "tests/unit/branching/test_answer.py::test_results_of_other_settings_are_refused",
        ),
        Mutant(
            "trainer/branching/origin.py",
            '        if not is_free:\n            problem = "is still',
            '        if False:\n            problem = "is still',
            "tests/cli/test_cbs.py::test_a_run_that_is_still_trained_is_refused",
        ),
    ],
    "scale": [
        Mutant(
            "trainer/training/setup/live_bytes.py",
            "            if storage._cdata in self._seen:\n",
            "            if False:\n",
            "tests/unit/training/test_memory.py::test_what_makes_a_sharded_step_smaller_or_larger_shows",
        ),
        Mutant(
            "trainer/training/setup/memory.py",
            "                window *= 2  #",
            "                pass  #",
            "tests/unit/training/test_memory.py::test_what_makes_a_sharded_step_smaller_or_larger_shows",
        ),
        Mutant(
            "trainer/training/setup/memory.py",
            "    finally:\n        dist.destroy_process_group()\n",
            "    finally:\n        pass\n",
            "tests/unit/training/test_memory.py::test_no_process_group_is_left_behind",
        ),
        Mutant(
            "trainer/training/setup/plausible.py",
            "-(-num_parameters // shape[1])",
            "num_parameters",
            "tests/unit/training/test_plausible.py::test_of_a_sharded_model_a_rank_needs_memory_for_its_shards_alone",
        ),
        Mutant(
            "trainer/distributed/strategy.py",
            "root.set_requires_gradient_sync if keeps_whole else root.set_requires_all_reduce",
            "root.set_requires_gradient_sync",
            "tests/distributed/test_collectives.py::test_the_collectives_of_a_sharded_step_follow_from_its_units[hsdp]",
        ),
        Mutant(
            "trainer/distributed/strategy.py",
            "is_deferred = keeps_whole or replicas > 1",
            "is_deferred = replicas > 1",
            "tests/distributed/test_collectives.py::test_the_collectives_of_a_sharded_step_follow_from_its_units[fsdp whole]",
        ),
    ],
    "deferred initialization": [
        Mutant(
            "trainer/model/deferred/steps.py",
            "        if not step.draws and not live",
            "        if not live",
            "tests/unit/model/test_deferred.py::test_a_family_is_replayed[rglru]",
        ),
        Mutant(
            "trainer/model/deferred/steps.py",
            "(live - step.creates - step.overwrites.keys())",
            "(live - step.creates)",
            "tests/unit/model/test_deferred.py::test_one_parameter_exists_at_a_time[rglru]",
        ),
        Mutant(
            "trainer/model/deferred/recorder.py",
            "            self._number.uniform_(generator=generator)\n",
            "            pass\n",
            "tests/unit/model/test_deferred.py::test_what_cannot_be_replayed_is_refused",
        ),
    ],
    "stores": [
        Mutant(
            "trainer/training/remote/checkpoints.py",
            '            self._check(f"{name}/{file}", expected, report)\n',
            "",
            "tests/unit/remote/test_mirror.py::test_a_file_that_reads_back_differently_is_uploaded_again",
        ),
        Mutant(
            "trainer/training/remote/checkpoints.py",
            '        self.storage.remove([f"{name}/{MARKER}"])\n'
            '        self.storage.remove([f"{name}/{file}" for file in self.storage.files(name)])\n',
            '        self.storage.remove(sorted((f"{name}/{file}" for file in self.storage.files(name)), reverse=True))\n',
            "tests/unit/remote/test_mirror.py::test_a_deletion_begins_with_the_marker",
        ),
        Mutant(
            "trainer/training/remote/checkpoints.py",
            ' and digest == expected["sha256"])',
            ")",
            "tests/unit/remote/test_mirror.py::test_a_download_leaves_nothing_of_a_damaged_checkpoint",
        ),
        Mutant(
            "trainer/training/remote/mirror.py",
            "**keep, spared=self._busy)",
            "**keep)",
            "tests/unit/remote/test_mirror.py::test_publishing_waits_for_no_store_and_what_is_being_uploaded_is_not_deleted",
        ),
        Mutant(
            "trainer/training/remote/claim.py",
            "(not resumes or found is None or found.id != own)",
            "(found is None or found.id != own)",
            "tests/unit/remote/test_mirror.py::test_two_runs_cannot_share_a_prefix",
        ),
        Mutant(
            "trainer/training/remote/resume.py",
            "        return left == remote.marker(step)\n",
            "        return False\n",
            "tests/unit/remote/test_resume.py::test_a_branch_that_was_left_is_not_taken_from_the_store",
        ),
        Mutant(
            "trainer/data/stored/cache.py",
            "            if not _try(lock, fcntl.LOCK_EX):\n                return False\n",
            "",
            "tests/unit/data/test_stored.py::test_the_least_recently_used_copy_makes_room_but_none_that_is_in_use",
        ),
    ],
    "rows in pieces": [
        Mutant(
            "trainer/model/cellwise.py",
            "            state = _returned(output.state, state)\n",
            "            state = _returned(output.state, state).detach()\n",
            "tests/unit/model/test_cellwise.py::test_all_cells_of_a_document_give_the_uncut_gradient",
        ),
        Mutant(
            "trainer/model/cellwise.py",
            "torch.where(continues[:, None], _returned(output.state, state), 0.0)",
            "_returned(output.state, state)",
            "tests/unit/model/test_burn_in.py::test_losses_gradients_and_stored_states_are_those_of_the_oracle",
        ),
        Mutant(
            "trainer/model/cellwise.py",
            "if stop == self._stores_at:",
            "if stop == self._row:",
            "tests/unit/model/test_burn_in.py::test_losses_gradients_and_stored_states_are_those_of_the_oracle",
        ),
        Mutant(
            "trainer/model/cellwise.py",
            "    @torch.no_grad()\n    def _burn",
            "    def _burn",
            "tests/unit/model/test_burn_in.py::test_losses_gradients_and_stored_states_are_those_of_the_oracle",
        ),
        Mutant(
            "trainer/training/checkpointing/resume_checks.py",
            '    "ledger.burn_in",\n',
            "",
            "tests/distributed/test_burn_in.py::test_a_resume_with_another_burn_in_is_refused",
        ),
        Mutant(
            "trainer/config/schema.py",
            "return self.data.max_group_cells // self.train.tbptt_cells",
            "return self.data.max_group_cells",
            "tests/distributed/test_tbptt.py::test_cells_through_which_the_gradient_flows_train_as_one_long_cell",
        ),
    ],
    "contract": [
        Mutant(
            "trainer/contracts/forward.py",
            """if not hasattr(model, "state_layout") or""",
            """if hasattr(model, "state_layout") or""",
            "tests/unit/contracts/test_check_model.py::test_a_mutant_is_convicted_by_the_check_meant_for_it",
        ),
        Mutant(
            "trainer/contracts/forward.py",
            """hasattr(model, "state_layout") or "state" not in inspect.signature(model.forward).parameters:""",
            """hasattr(model, "state_layout"):""",
            "tests/unit/contracts/test_check_model.py::test_a_model_that_returns_no_state_on_purpose_is_not_convicted",
        ),
        Mutant(
            "trainer/contracts/forward.py",
            "if in_training.state is not None:",
            "if False:",
            "tests/unit/contracts/test_check_model.py::test_a_mutant_is_convicted_by_the_check_meant_for_it",
        ),
        Mutant(
            "trainer/contracts/forward.py",
            "for training in (True, False):",
            "for training in (True,):",
            "tests/unit/contracts/test_check_model.py::test_a_mutant_is_convicted_by_the_check_meant_for_it",
        ),
        Mutant(
            "trainer/contracts/carry.py",
            """    if size <= limit:
        return None""",
            """    if size >= 0:
        return None""",
            "tests/unit/contracts/test_check_model.py::test_a_mutant_is_convicted_by_the_check_meant_for_it",
        ),
        Mutant(
            "trainer/contracts/rows.py",
            "state = state + change",
            "state = state + 0 * change",
            "tests/unit/contracts/test_check_model.py::test_a_mutant_is_convicted_by_the_check_meant_for_it",
        ),
        Mutant(
            "trainer/contracts/check.py",
            "trial = make_trial(working, **options)",
            "raise",
            "tests/unit/contracts/test_check_model.py::test_a_forward_that_lacks_float64_is_not_taken_for_one_that_fails",
        ),
        Mutant(
            "trainer/contracts/check.py",
            """verdicts["carry"] = nan""",
            """nan = None""",
            "tests/unit/contracts/test_check_model.py::test_a_mutant_is_convicted_by_the_check_meant_for_it",
        ),
        Mutant(
            "trainer/contracts/check.py",
            """if check != "resets" or trial.subject is not working:""",
            "if True:",
            "tests/unit/contracts/test_check_model.py::test_a_mutant_is_convicted_by_the_check_meant_for_it",
        ),
        Mutant(
            "trainer/contracts/check.py",
            'raise NotTestable("forward fails") from error',
            'del verdicts["forward"]',
            "tests/unit/contracts/test_check_model.py::test_a_mutant_is_convicted_by_the_check_meant_for_it",
        ),
        Mutant(
            "trainer/cli/verbs/doctor.py",
            "if report.breaches or _is_unchecked(report):",
            "if report.breaches:",
            "tests/cli/test_broken_models.py::test_the_doctor_does_not_call_a_model_sound_that_it_could_not_check",
        ),
        Mutant(
            "trainer/diagnostics/rules/model.py",
            """== "resets" and run.setting("data.pack", None) is False:""",
            """== "resets":""",
            "tests/unit/diagnostics/test_rules.py::test_broken_resets_matter_with_packed_rows_alone",
        ),
        Mutant(
            "trainer/diagnostics/rules/model.py",
            """if verdicts and causality.get("status") != "not testable here":""",
            "if verdicts:",
            "tests/unit/diagnostics/test_rules.py::test_a_model_of_which_nothing_could_be_judged_is_not_called_healthy",
        ),
        Mutant(
            "trainer/contracts/check.py",
            "live = Subject(drawn,",
            "live = Subject(working.model,",
            "tests/unit/contracts/test_check_model.py::test_a_mutant_is_convicted_by_the_check_meant_for_it",
        ),
        Mutant(
            "trainer/contracts/subject.py",
            "with nullcontext() if self.is_live else Plain(",
            "with Plain(",
            "tests/unit/contracts/test_check_model.py::test_a_mutant_is_convicted_by_the_check_meant_for_it",
        ),
        Mutant(
            "trainer/contracts/purity.py",
            "live.training = False",
            "live.training = True",
            "tests/unit/contracts/test_check_model.py::test_an_honest_model_is_not_convicted",
        ),
        Mutant(
            "trainer/contracts/purity.py",
            "if not draws or subject",
            "if subject",
            "tests/unit/contracts/test_check_model.py::test_a_model_that_is_random_in_eval_is_told_so_once",
        ),
    ],
    "carry": [
        Mutant(
            "trainer/ledger/probe.py",
            "continues = cells_before > back  #",
            "continues = cells_before >= back  #",
            "tests/unit/ledger/test_probe.py::test_numbers_equal_a_loop_that_reads_documents_again",
        ),
        Mutant(
            "trainer/ledger/probe.py",
            "state = self._model(**inputs, state=torch.where(begun, state, 0.0)).state.to(stored.dtype)",
            "state = stored",
            "tests/unit/ledger/test_probe.py::test_numbers_equal_a_loop_that_reads_documents_again",
        ),
        Mutant(
            "trainer/ledger/probe.py",
            "is_probed = to_device(is_exact, age.device) & (age >= 0)",
            "is_probed = to_device(is_exact, age.device)",
            "tests/unit/ledger/test_probe.py::test_rows_without_a_held_state_do_not_count_but_lower_the_share",
        ),
        Mutant(
            "trainer/ledger/probe.py",
            "(cells_before > 0) & (cells_before <= min",
            "(cells_before > 0) & (cells_before <= 1 + min",
            "tests/unit/ledger/test_probe.py::test_cells_further_back_than_the_tokens_reach_are_left_out",
        ),
        Mutant(
            "trainer/ledger/probe.py",
            "            self._model.eval()\n",
            "",
            "tests/unit/ledger/test_probe.py::test_modes_generators_buffers_gradients_and_states_are_as_before",
        ),
        Mutant(
            "trainer/ledger/probe.py",
            "                    module.training = mode\n",
            "                    pass\n",
            "tests/unit/ledger/test_probe.py::test_modes_generators_buffers_gradients_and_states_are_as_before",
        ),
        Mutant(
            "trainer/ledger/probe.py",
            'given["tokens_before"] = self._cell(self._tokens, back + 1)',
            'given["tokens_before"] = self._cell(self._tokens, back)',
            "tests/unit/ledger/test_probe.py::test_a_model_with_burn_in_is_measured_as_it_trains",
        ),
        Mutant(
            "trainer/ledger/probe.py",
            'return {**inputs, "continues": torch.zeros_like(inputs["continues"])}',
            "return dict(inputs)",
            "tests/unit/ledger/test_probe.py::test_a_model_with_burn_in_is_measured_as_it_trains",
        ),
        Mutant(
            "trainer/ledger/probe.py",
            "if targets.shape[1] != length:",
            "if False:",
            "tests/unit/ledger/test_probe.py::test_rows_of_another_length_are_skipped",
        ),
        Mutant(
            "trainer/ledger/ledger.py",
            "torch.where(torch.as_tensor(is_valid), steps, -1)",
            "steps",
            "tests/unit/ledger/test_probe.py::test_the_age_of_a_state_is_that_of_its_last_store",
        ),
        Mutant(
            "trainer/metrics/aggregate.py",
            "squares * num / (num - 1)",
            "squares",
            "tests/unit/metrics/test_rank_reduction.py::test_the_error_of_equal_weights_is_that_of_a_mean",
        ),
        Mutant(
            "trainer/metrics/aggregate.py",
            "- 2 * ratio * float(self.cross) + ",
            "- ratio * float(self.cross) + ",
            "tests/unit/metrics/test_rank_reduction.py::test_the_error_covers_the_truth_as_often_as_it_should",
        ),
        Mutant(
            "trainer/metrics/tracker.py",
            "self._open[-1].start += seconds",
            "pass",
            "tests/unit/metrics/test_tracker.py::test_what_measures_a_step_is_in_none_of_its_times",
        ),
        Mutant(
            "trainer/training/setup/open_run.py",
            "            row_model,\n            token_loss",
            "            self.state.model,\n            token_loss",
            "tests/distributed/test_carry_probe.py::test_without_learning_nothing_drifts",
        ),
        Mutant(
            "trainer/data/mixing/collate.py",
            "places = (ends - num_before - 1)[:, None] + columns",
            "places = (ends - num_before)[:, None] + columns",
            "tests/properties/test_data_tokens_before.py::test_tokens_before_are_the_groups_own_in_any_world_and_after_any_resume",
        ),
        Mutant(
            "trainer/data/mixing/collate.py",
            "tokens[is_earlier & ~is_token] = self._bos",
            "pass",
            "tests/properties/test_data_tokens_before.py::test_tokens_before_are_the_groups_own_in_any_world_and_after_any_resume",
        ),
        Mutant(
            "trainer/data/blending/blend.py",
            "return plan.step_of(batch) % every == 0",
            "return plan.step_of(batch) % every == 1",
            "tests/properties/test_data_tokens_before.py::test_a_blend_adds_them_on_the_steps_asked_for_and_changes_nothing_else",
        ),
        Mutant(
            "trainer/diagnostics/rules/carry.py",
            "max(own, stdev(values.values) / math.sqrt(count))",
            "own",
            "tests/unit/diagnostics/test_rules.py::test_probes_whose_streams_differ_are_judged_by_their_scatter",
        ),
        Mutant(
            "trainer/diagnostics/rules/divergence.py",
            "has_doubled = lowest >= DOUBLED * first",
            "has_doubled = lowest >= 20 * DOUBLED * first",
            "tests/unit/diagnostics/test_divergence.py::test_a_run_that_ends_above_its_first_loss_diverged",
        ),
        Mutant(
            "trainer/diagnostics/rules/divergence.py",
            "rise > END_SIGMAS * noise(loss.values[-2 * most :])",
            "rise > 0.0",
            "tests/unit/diagnostics/test_divergence.py::test_noise_bumps_of_some_percent_and_drifts_are_healthy",
        ),
        Mutant(
            "trainer/diagnostics/rules/divergence.py",
            "max(after) - first >= peak - max(after)",
            "max(after) >= peak",
            "tests/unit/diagnostics/test_divergence.py::test_a_first_row_of_a_source_with_low_losses_is_neither",
        ),
        Mutant(
            "trainer/diagnostics/rules/divergence.py",
            "lasts or peak > LONE_BUMP * first",
            "lasts",
            "tests/unit/diagnostics/test_divergence.py::test_a_run_that_rose_far_above_its_first_loss_and_came_back_is_a_warning",
        ),
        Mutant(
            "trainer/diagnostics/rules/speed.py",
            "fewest, found = mistaken, index",
            "fewest, found = mistaken, index + 1",
            "tests/unit/diagnostics/test_rules.py::test_a_drop_of_throughput_is_dated_to_the_row_and_shown_from_there_on",
        ),
    ],
    "ledger": [
        Mutant(
            "trainer/ledger/index.py",
            "live = (self._last_step[piece] == self._front_step).nonzero()[0][:count]",
            "live = np.arange(piece.size)[:count]",
            "tests/unit/ledger/test_store_order.py::test_random_stores_and_takes_equal_a_sort_of_all_slots",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "if self._front.size else np.sort(slots)",
            "if self._front.size else slots",
            "tests/unit/ledger/test_store_order.py::test_slots_come_in_order_of_step_then_slot",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "while self._buckets and (not self._front.size or self._buckets[0][0] == self._front_step):",
            "while self._buckets and not self._front.size:",
            "tests/unit/ledger/test_store_order.py::test_random_stores_and_takes_equal_a_sort_of_all_slots",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "self._front_step < cutoff",
            "self._front_step <= cutoff",
            "tests/unit/ledger/test_ledger_evictions.py::test_stale_sweep_evicts_what_is_older_than_the_threshold",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "if self.num_entries > 2 * self._last_step.size + 1024:",
            "if False:",
            "tests/unit/ledger/test_ledger_evictions.py::test_order_of_stores_stays_small_over_many_steps",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "                if cell:\n",
            "                if True:\n",
            "tests/unit/ledger/test_ledger_evictions.py::test_group_that_comes_back_at_its_start_is_forgotten_without_counting",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "evicted.pop(group)",
            "evicted[group]",
            "tests/unit/ledger/test_ledger_evictions.py::test_group_that_comes_back_in_mid_document_counts_once_for_its_mode",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "self.last_step[slots[is_kept & is_held]] = PINNED",
            "pass",
            "tests/unit/ledger/test_ledger_evictions.py::test_lru_evicts_the_least_recently_stored_and_pins_the_micro_batch",
        ),
        Mutant(
            "trainer/ledger/eviction.py",
            "while len(self.entries) > self._capacity:",
            "while False:",
            "tests/unit/ledger/test_ledger_evictions.py::test_memory_of_evicted_groups_is_bounded_by_the_capacity",
        ),
        Mutant(
            "trainer/ledger/eviction.py",
            "if self.entries.get(group) is evicted:",
            "if group in self.entries:",
            "tests/unit/ledger/test_ledger_evictions.py::test_a_group_that_was_evicted_again_is_not_the_oldest",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "        self._found_for = None\n        num_free",
            "        num_free",
            "tests/unit/ledger/test_ledger.py::test_a_group_is_found_from_its_first_store_to_its_last",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "        self._found_for = None\n        groups: list",
            "        groups: list",
            "tests/unit/ledger/test_ledger.py::test_a_group_is_found_from_its_first_store_to_its_last",
        ),
        Mutant(
            "trainer/ledger/slab.py",
            "            self._batches.clear()\n\n\n",
            "\n\n",
            "tests/unit/ledger/test_not_finite.py::test_counts_of_the_device_are_carried_between_two_drains",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "        self._vacate(self.held_slots())\n        self.evicted.clear()\n",
            "        self._vacate(self.held_slots())\n",
            "tests/unit/ledger/test_ledger_evictions.py::test_full_wipe_forgets_who_was_evicted",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "num_free - groups.size : num_free][::-1]",
            "num_free - groups.size : num_free]",
            "tests/properties/test_ledger_oracle.py::test_ledger_equals_the_oracle[lru-numpy]",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "self._check_room(is_kept, self.num_live - ended.size + new.size)",
            "pass",
            "tests/unit/ledger/test_ledger.py::test_full_capacity_without_eviction_names_the_capacity_needed_and_changes_nothing",
        ),
        Mutant(
            "trainer/ledger/index.py",
            "        if ended.size:\n            self._vacate(ended)\n",
            "",
            "tests/unit/ledger/test_ledger.py::test_last_cell_frees_its_slot_and_is_no_eviction",
        ),
        Mutant(
            "trainer/ledger/slab.py",
            "self.library.isfinite(self.native(rows)).all(1)",
            "self.library.isfinite(self.native(rows)).any(1)",
            "tests/unit/ledger/test_not_finite.py::test_it_costs_one_cold_start_at_the_next_look_up",
        ),
        Mutant(
            "trainer/ledger/slab.py",
            "self._rows[self.library.where(is_valid, index, self._no_slot)]",
            "self._rows[index]",
            "tests/unit/ledger/test_not_finite.py::test_it_costs_one_cold_start_at_the_next_look_up",
        ),
        Mutant(
            "trainer/ledger/slab.py",
            "(~self._slab.library.concatenate(is_valid) & all_counted).sum()",
            "(~self._slab.library.concatenate(is_valid)).sum()",
            "tests/unit/ledger/test_not_finite.py::test_a_first_cell_after_it_is_no_cold_start",
        ),
        Mutant(
            "trainer/ledger/ledger.py",
            "slots[~is_kept] = self._slab.waste_slot",
            "pass",
            "tests/unit/ledger/test_ledger.py::test_rows_that_are_not_kept_leave_no_state_behind",
        ),
        Mutant(
            "trainer/ledger/ledger.py",
            "is_fresh = (cell_index == 0) | (group_ids < 0)",
            "is_fresh = group_ids < 0",
            "tests/unit/ledger/test_ledger.py::test_group_start_begins_from_zero_whatever_is_held",
        ),
        Mutant(
            "trainer/ledger/ledger.py",
            'counts["ledger/refused_rows"] += self._refused.read()',
            "pass",
            "tests/unit/ledger/test_not_finite.py::test_counts_of_the_device_are_carried_between_two_drains",
        ),
        Mutant(
            "trainer/ledger/ledger.py",
            "self._stored_at = int(self._index.last_step.max(initial=-1))",
            "self._stored_at = -1",
            "tests/unit/ledger/test_ledger.py::test_steps_that_stored_nothing_may_begin_again",
        ),
        Mutant(
            "trainer/ledger/eviction.py",
            "return step // every > previous_step // every",
            "return step % every == 0",
            "tests/unit/ledger/test_ledger_evictions.py::test_a_wipe_or_sweep_of_a_step_that_is_never_begun_happens_at_the_next",
        ),
        Mutant(
            "trainer/ledger/snapshot.py",
            'order = np.argsort(last_step, kind="stable")',
            "order = np.arange(last_step.size)",
            "tests/unit/ledger/test_ledger_checkpoint.py::test_of_a_group_in_several_shards_the_newest_state_counts",
        ),
        Mutant(
            "trainer/ledger/snapshot.py",
            "rows[chosen], is_valid[chosen])",
            "rows[chosen], torch.ones(len(chosen), dtype=torch.bool))",
            "tests/unit/ledger/test_not_finite.py::test_it_stays_lost_on_another_number_of_ranks",
        ),
        Mutant(
            "trainer/ledger/snapshot.py",
            "places = order - start",
            "places = order",
            "tests/unit/ledger/test_ledger_checkpoint.py::test_other_world_size_keeps_everything_or_what_is_owned",
        ),
        Mutant(
            "trainer/ledger/slab.py",
            "are_finite[doubtful] = np.isfinite(rows.numpy()[doubtful]).all(1)",
            "are_finite[doubtful] = False",
            "tests/unit/ledger/test_large_states.py::test_a_row_is_valid_if_each_of_its_numbers_is_finite",
        ),
        Mutant(
            "trainer/ledger/host_slab.py",
            "self._reading.wait_event(written)",
            "pass",
            "tests/unit/ledger/test_large_states.py::test_rows_in_the_hosts_memory_are_those_of_the_device_and_wait_for_what_they_need",
        ),
        Mutant(
            "trainer/ledger/host_slab.py",
            "self._writing.wait_stream(torch.cuda.current_stream(self.device))",
            "pass",
            "tests/unit/ledger/test_large_states.py::test_rows_in_the_hosts_memory_are_those_of_the_device_and_wait_for_what_they_need",
        ),
        Mutant(
            "trainer/ledger/snapshot.py",
            'return max((int(shard["step"])',
            'return min((int(shard["step"])',
            "tests/unit/ledger/test_ledger_checkpoint.py::test_ledger_goes_on_from_the_latest_step_of_all_shards",
        ),
        Mutant(
            "trainer/ledger/snapshot.py",
            "if own is not None and is_same and (",
            "if False and (",
            "tests/properties/test_ledger_oracle.py::test_ledger_equals_the_oracle[lru-numpy]",
        ),
        Mutant(
            "trainer/ledger/snapshot.py",
            "if group not in held}",
            "}",
            "tests/unit/ledger/test_ledger_checkpoint.py::test_a_group_that_one_shard_holds_and_another_evicted_is_held",
        ),
        Mutant(
            "trainer/ledger/snapshot.py",
            "order = order[keeps(groups[order])]",
            "pass",
            "tests/unit/ledger/test_ledger_checkpoint.py::test_other_world_size_keeps_everything_or_what_is_owned",
        ),
        Mutant(
            "trainer/ledger/exchange.py",
            "splitmix64(group_ids) % np.uint64(world_size)",
            "group_ids % world_size",
            "tests/unit/ledger/test_exchange.py::test_owners_are_spread_whatever_the_stride_of_the_ids",
        ),
    ],
    "data": [
        Mutant(
            "trainer/data/inspection/encoding.py",
            "{position - begun + error.start}",
            "{position + error.start}",
            "tests/unit/data/test_encoding.py::test_the_first_wrong_byte_is_named",
        ),
        Mutant(
            "trainer/data/tokenizer.py",
            "encode_batch_fast(texts, add_special_tokens=False)",
            "encode_batch_fast(texts, add_special_tokens=True)",
            "tests/unit/data/test_tokenizer_json.py::test_texts_together_are_encoded_as_each_alone",
        ),
        Mutant(
            "trainer/data/formats/id_bounds.py",
            "tokenizer.bos_id if isinstance(tokenizer, IdsTokenizer) else tokenizer.vocab_size",
            "tokenizer.vocab_size",
            "tests/unit/data/test_id_bounds.py::test_the_id_that_begins_documents_is_refused_in_files_of_ids",
        ),
        Mutant(
            "trainer/data/formats/id_bounds.py",
            "tokenizer.bos_id if isinstance(tokenizer, IdsTokenizer) else tokenizer.vocab_size",
            "tokenizer.bos_id",
            "tests/unit/data/test_id_bounds.py::test_ids_of_a_tokenizer_with_text_may_be_any_of_its_vocabulary",
        ),
        Mutant(
            "trainer/data/formats/id_bounds.py",
            "if not 0 <= eod < self.num_ids:",
            "if not 0 <= eod <= self.num_ids:",
            "tests/unit/data/test_eod.py::test_an_eod_outside_the_vocabulary_is_refused",
        ),
        Mutant(
            "trainer/data/streams/opener.py",
            "return int(documents.tokens[-1]) != eod",
            "return True",
            "tests/unit/data/test_eod.py::test_files_that_eod_splits_or_ends_are_no_warning",
        ),
        Mutant(
            "trainer/data/streams/opener.py",
            "        self._has_said.add(what)\n",
            "",
            "tests/unit/data/test_eod.py::test_an_eod_that_a_file_lacks_is_one_warning_per_source",
        ),
        Mutant(
            "trainer/data/formats/token_arrays.py",
            " and (sample[0::2] == 0).mean() <= 0.9",
            "",
            "tests/unit/data/test_eod.py::test_other_ids_are_of_no_doubtful_dtype",
        ),
        Mutant(
            "trainer/data/formats/jsonl.py",
            "lines.readline()  # of the span before",
            "pass",
            "tests/unit/data/test_tokenize.py",
        ),
        Mutant(
            "trainer/data/corpus/tokenize.py",
            "if name in before and before[name] != files[name]:",
            "if False:",
            "tests/unit/data/test_tokenize.py::test_a_file_that_has_changed_is_tokenized_again_and_the_others_are_not",
        ),
        Mutant(
            "trainer/data/formats/documents.py",
            "document = len(lengths) - len(waiting) + inside",
            "document = inside",
            "tests/unit/data/test_tokenizer_json.py::test_pieces_may_come_one_by_one_and_beyond_a_size_they_are_in_a_file",
        ),
        Mutant(
            "trainer/data/mixing/dataset.py",
            'KeyedUniforms("pick", name, seed, "all" if self._shared else rank)',
            'KeyedUniforms("pick", name, seed, "all")',
            "tests/unit/data/test_mixing.py::test_ranks_pick_alike_with_one_pool_and_each_for_itself_with_its_own",
        ),
        Mutant(
            "trainer/data/mixing/dataset.py",
            'KeyedUniforms("pick", name, seed, "all" if self._shared else rank)',
            'KeyedUniforms("pick", name, seed, rank)',
            "tests/unit/data/test_mixing.py::test_ranks_pick_alike_with_one_pool_and_each_for_itself_with_its_own",
        ),
        Mutant(
            "trainer/data/tokenizer.py",
            "self._tokenizer.no_truncation()",
            "pass",
            "tests/unit/data/test_tokenizer_json.py::test_a_document_is_neither_cut_nor_padded_nor_marked",
        ),
        Mutant(
            "trainer/data/tokenizer.py",
            "self.bos_id = int(max(ids)) + 1",
            "self.bos_id = len(ids)",
            "tests/unit/data/test_tokenizer_json.py::test_ids_with_gaps_come_back_from_a_stream_as_they_are",
        ),
        Mutant(
            "trainer/data/streams/globs.py",
            "if (status.st_dev, status.st_ino) in seen:",
            "if False:",
            "tests/unit/data/test_globs.py::test_a_link_to_an_ancestor_ends_and_one_to_elsewhere_is_followed_once",
        ),
        Mutant(
            "trainer/data/mixing/restart.py",
            " if path not in restarted}",
            "}",
            "tests/properties/test_data_change.py::test_streams_that_did_not_change_go_on_and_the_others_begin_anew",
        ),
        Mutant(
            "trainer/data/mixing/restart.py",
            "reader = (rank - new.turns[stream] + old.turns[known]) % world_size",
            "reader = rank",
            "tests/properties/test_data_change.py::test_streams_that_did_not_change_go_on_and_the_others_begin_anew",
        ),
        Mutant(
            "trainer/data/inspection/fingerprint.py",
            "if path in before and not _agree(before[path], after[path])",
            "if False",
            "tests/distributed/test_data_change.py::test_a_change_is_refused_by_name_and_accepted_on_purpose",
        ),
        Mutant(
            "trainer/data/tokenizer.py",
            "encode(text, add_special_tokens=False)",
            "encode(text, add_special_tokens=True)",
            "tests/unit/data/test_formats.py::test_a_tokenizer_json_encodes_text_and_begins_documents_with_an_id_of_its_own",
        ),
        Mutant(
            "trainer/data/blending/blend.py",
            "if self._ended[index] else drained",
            "if False else drained",
            "tests/unit/data/test_aggregate.py::test_an_exhausted_source_reports_its_last_events_and_no_readers",
        ),
        Mutant(
            "trainer/data/blending/blend.py",
            "            del self._latest[key][index]\n",
            "            pass\n",
            "tests/unit/data/test_blend.py::test_an_ended_source_has_no_readers_and_no_gauges",
        ),
        Mutant(
            "trainer/data/blending/blend.py",
            "latest[key].update(dict.fromkeys(self._undrained & latest[key].keys(), 0.0))",
            "pass",
            "tests/unit/data/test_aggregate.py::test_a_blend_merges_what_its_sources_reported_last_and_counts_events_once",
        ),
        Mutant(
            "trainer/data/blending/blend.py",
            '    "min": min,\n',
            '    "min": max,\n',
            "tests/unit/data/test_aggregate.py::test_a_blend_merges_what_its_sources_reported_last_and_counts_events_once",
        ),
        Mutant(
            "trainer/data/blending/blend.py",
            "            self._unsaved.add(chosen)\n",
            "",
            "tests/unit/data/test_blend.py::test_a_state_taken_after_every_batch_is_the_one_that_is_taken_once",
        ),
        Mutant(
            "trainer/data/blending/blend.py",
            "self._undrained = set(range(len(self.sources)))",
            "self._undrained = set()",
            "tests/unit/data/test_blend.py::test_resuming_a_blend_gives_the_samples_and_the_shares_of_an_uninterrupted_run",
        ),
        Mutant(
            "trainer/data/mixing/dataset.py",
            "            pool.note(slot)\n",
            "            pass\n",
            "tests/unit/data/test_mixing.py::test_metrics_equal_a_slow_reference_at_every_pick",
        ),
        Mutant(
            "trainer/data/mixing/pool.py",
            "stats[_SURPRISE, slot] = 0.0",
            "pass",
            "tests/unit/data/test_mixing.py::test_metrics_equal_a_slow_reference_at_every_pick",
        ),
        Mutant(
            "trainer/data/mixing/pool.py",
            "            self.turn -= self.turn > slot\n",
            "",
            "tests/unit/data/test_mixing.py::test_round_robin_takes_the_slots_in_turn",
        ),
        Mutant(
            "trainer/data/mixing/pool.py",
            'self.seen = dict(state["seen"])',
            "pass",
            "tests/properties/test_data_pool.py::test_metrics_equal_a_reference_from_scratch_at_every_pick_through_refills_epochs_and_a_resume",
        ),
        Mutant(
            "trainer/data/mixing/reader.py",
            "self.position = self.slice_start + plan.cells_before(picks)",
            "self.position = self.slice_start",
            "tests/properties/test_data_mixing.py::test_resuming_anywhere_gives_the_samples_of_an_uninterrupted_run",
        ),
        Mutant(
            "trainer/data/mixing/reader.py",
            "self.num_picks = max([plan.num_batches, *lengths])",
            "self.num_picks = plan.num_batches",
            "tests/unit/data/test_mixing.py::test_a_rank_whose_slice_has_ended_yields_a_masked_row",
        ),
        Mutant(
            "trainer/data/mixing/reader.py",
            "self._rows_start, self._rows_stop = start, stop",
            "self._rows_start, self._rows_stop = start, self._num_own_picks",
            "tests/unit/data/test_mixing.py::test_batches_do_not_depend_on_how_many_are_prepared_together",
        ),
        Mutant(
            "trainer/data/mixing/reader_queue.py",
            "self.points_state = points_to_state(self.points)",
            "self.points_state = points_to_state(points)",
            "tests/unit/data/test_mixing.py::test_a_smaller_pool_drops_readers_with_one_line_and_goes_on_with_them_first",
        ),
        Mutant(
            "trainer/data/mixing/reader_queue.py",
            "            picks=picks,\n",
            "            picks=0,\n",
            "tests/properties/test_data_mixing.py::test_resuming_anywhere_gives_the_samples_of_an_uninterrupted_run",
        ),
        Mutant(
            "trainer/data/mixing/rows.py",
            "is_odd = (left < source.seq_len) | (windows != wanted)",
            "is_odd = left < source.seq_len",
            "tests/properties/test_data_mixing.py::test_inputs_are_the_tokens_before_the_targets",
        ),
        Mutant(
            "trainer/data/mixing/rows.py",
            "(block[1:] != block[:-1]).any(axis=1, out=is_new[1:])",
            "(block[1:] != block[:-1]).all(axis=1, out=is_new[1:])",
            "tests/unit/data/test_mixing.py::test_batches_do_not_depend_on_how_many_are_prepared_together",
        ),
        Mutant(
            "trainer/data/mixing/collate.py",
            "            tokens[row, 0] = self._bos\n        for row in rows.odd",
            "            pass\n        for row in rows.odd",
            "tests/properties/test_data_mixing.py::test_inputs_are_the_tokens_before_the_targets",
        ),
        Mutant(
            "trainer/data/mixing/collate.py",
            'batch["resets"][row, at] = at > 0',
            'batch["resets"][row, at] = False',
            "tests/properties/test_data_mixing.py",
        ),
        Mutant(
            "trainer/data/mixing/epochs.py",
            "np.concatenate([begun, before[is_next[before]]])",
            "np.concatenate([before[is_next[before]], begun])",
            "tests/unit/data/test_mixing.py::test_a_smaller_pool_drops_readers_with_one_line_and_goes_on_with_them_first",
        ),
        Mutant(
            "trainer/data/mixing/epochs.py",
            "return (rank - self.turns[stream_id]) % world_size",
            "return rank",
            "tests/properties/test_data_deal.py::test_streams_of_one_group_are_read_by_all_ranks",
        ),
        Mutant(
            "trainer/data/mixing/epochs.py",
            "(*by_rank[turn:], *by_rank[:turn])",
            "tuple(by_rank)",
            "tests/properties/test_data_mixing.py::test_resuming_on_other_worlds_loses_and_repeats_nothing",
        ),
        Mutant(
            "trainer/data/mixing/dataset.py",
            'self._batch_index = state["batch_index"]',
            "self._batch_index = 0",
            "tests/unit/data/test_mixing.py::test_a_list_of_states_on_the_same_world_gives_each_rank_its_own",
        ),
        Mutant(
            "trainer/data/blending/blend.py",
            "for i, source in enumerate(self.sources):\n            weights",
            "for i, source in enumerate(self.sources):\n          if not self._ended[i]:\n            weights",
            "tests/unit/data/test_blend.py::test_an_ended_source_keeps_its_configured_share_and_is_counted",
        ),
        Mutant(
            "trainer/training/step/window.py",
            "self._loader = itertools.chain([first], self._loader)",
            "pass",
            "tests/unit/training/test_one_step_late.py::test_a_rank_without_data_keeps_the_cursor_of_its_last_batch",
        ),
        Mutant(
            "trainer/data/mixing/state.py",
            'if not state["is_barren"]]',
            "]",
            "tests/unit/data/test_mixing.py::test_a_rank_without_cells_does_not_hold_back_the_epoch_of_a_reshard",
        ),
        Mutant(
            "trainer/data/mixing/state.py",
            '"num_streams_mixed", "batch_size", "batch_size_by_modality")\n    return',
            '"num_streams_mixed", "batch_size_by_modality")\n    return',
            "tests/properties/test_data_mixing.py::test_resuming_on_other_worlds_loses_and_repeats_nothing",
        ),
        Mutant(
            "trainer/data/formats/registry.py",
            'load_npy, kind="ids", options=("eod",))',
            'load_npy, kind="text", options=("eod",))',
            "tests/unit/data/test_new_format.py::test_the_kind_of_a_file_is_its_formats_or_what_its_first_record_holds",
        ),
        Mutant(
            "trainer/data/formats/registry.py",
            "return kind(path) if callable(kind) else kind",
            'return "text"',
            "tests/unit/data/test_new_format.py::test_layout_and_guess_follow_the_table",
        ),
        Mutant(
            "trainer/data/formats/documents.py",
            "            self.bounds.check(tokens, begin)\n",
            "            pass\n",
            "tests/unit/data/test_megatron.py",
        ),
        Mutant(
            "trainer/data/streams/holdout.py",
            'return held if split == "holdout" else ~held',
            "return held",
            "tests/unit/data/test_mixing.py::test_train_and_holdout_share_no_document_and_miss_none",
        ),
        Mutant(
            "trainer/data/loader.py",
            "state = None if self._state_dict is None else self._state_dict()",
            "state = None",
            "tests/unit/data/test_loader.py::test_batches_metrics_and_states_are_those_of_the_dataset",
        ),
        Mutant(
            "trainer/hashing.py",
            "np.uint64(27)",
            "np.uint64(28)",
            "tests/unit/data/test_layout.py::test_group_ids_are_63_bit_distinct_and_pinned",
        ),
    ],
    "gns": [
        Mutant(
            "trainer/metrics/noise_scale/current.py",
            "TOLERANCE = 2.0",
            "TOLERANCE = 20.0",
            "tests/properties/test_current_noise_scale.py::test_the_interval_covers_the_current_value",
        ),
        Mutant(
            "trainer/metrics/noise_scale/current.py",
            "SHORTENED = 0.5",
            "SHORTENED = 0.05",
            "tests/properties/test_current_noise_scale.py::test_the_window_grows_with_a_run_that_does_not_drift",
        ),
        Mutant(
            "trainer/metrics/noise_scale/current.py",
            "weight = share - tilt * (share @ a)",
            "weight = share",
            "tests/properties/test_current_noise_scale.py::test_a_straight_line_without_noise_is_read_off_exactly",
        ),
        Mutant(
            "trainer/metrics/noise_scale/current.py",
            "(x0, y0), (x1, y1) = level.pop(0), level.pop(0)",
            "(x0, y0), (x1, y1) = level.pop(0), level[0]",
            "tests/properties/test_current_noise_scale.py::test_a_history_stays_small_and_loses_nothing",
        ),
        Mutant(
            "trainer/metrics/noise_scale/components.py",
            "- sums[k - 1] - squares[k]",
            "- sums[k - 1]",
            "tests/unit/metrics/test_noise_components.py::test_the_components_are_unbiased_and_the_bounds_cover",
        ),
        Mutant(
            "trainer/metrics/noise_scale/components.py",
            "if other.stream == piece.stream",
            "if False",
            "tests/unit/metrics/test_noise_components.py::test_the_components_are_unbiased_and_the_bounds_cover",
        ),
        Mutant(
            "trainer/metrics/noise_scale/components.py",
            "to_mean = np.array([1.0, coincidence, 0.0, 0.0])",
            "to_mean = np.array([1.0, 0.0, 0.0, 0.0])",
            "tests/unit/metrics/test_noise_components.py::test_few_streams_belong_to_the_mean",
        ),
        Mutant(
            "trainer/metrics/noise_scale/components.py",
            "if STREAM not in kept and coincidence < 1.0:",
            "if False:",
            "tests/unit/metrics/test_noise_components.py::test_one_stream_per_step_cannot_be_told_from_the_mean",
        ),
        Mutant(
            "trainer/metrics/noise_scale/hooks.py",
            "square if is_whole else square * math.nan",
            "square",
            "tests/unit/metrics/test_gns_hooks_faults.py::test_pairs_are_unknown_where_the_gradient_is_not_the_running_sum",
        ),
        Mutant(
            "trainer/training/step/components.py",
            "[half for micro in window for half in halves(micro)]",
            "list(window)",
            "tests/unit/training/test_microbatch.py::test_halves_have_all_rows_in_order_with_their_groups_and_extras",
        ),
        Mutant(
            "trainer/runs/noise_scale.py",
            "step = max(batches)",
            "step = min(batches)",
            "tests/unit/diagnostics/test_rules.py::test_the_last_row_counts_and_is_named",
        ),
        Mutant(
            "trainer/metrics/noise_scale/ratio.py",
            "HIGH_QUANTILE = 3.72",
            "HIGH_QUANTILE = 1.96",
            "tests/properties/test_noise_scale_coverage.py::test_lucky_windows_show_no_point_that_excludes_the_truth",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "kappa * (1.0 - 1e-9)",
            "0.0",
            "tests/unit/metrics/test_noise_scale.py::test_the_middle_of_some_ranks_does_not_pass_for_that_of_all",
        ),
        Mutant(
            "trainer/metrics/noise_scale/ratio.py",
            "LOW_QUANTILE = 1.96",
            "LOW_QUANTILE = 1.4",
            "tests/properties/test_noise_scale_coverage.py::"
            "test_the_interval_covers_the_truth_in_90_to_99_percent_everywhere",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "MIN_PAIRS = 5",
            "MIN_PAIRS = 2",
            "tests/unit/metrics/test_noise_scale_average.py::test_b_simple_waits_for_enough_windows",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "grad_sq / factor / factor",
            "grad_sq / factor",
            "tests/unit/metrics/test_noise_scale.py::test_the_scale_of_the_loss_cancels",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "grad_sq=(v_small * q_big - v_big * q_small) / spread",
            "grad_sq=q_big",
            "tests/unit/metrics/test_noise_scale.py::test_estimates_are_unbiased",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "tr_sigma=(q_small - q_big) / spread",
            "tr_sigma=max((q_small - q_big) / spread, 0.0)",
            "tests/unit/metrics/test_noise_scale.py::test_an_estimate_is_never_clamped",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "sums[BIG_NOISE] / kappa / kappa",
            "sums[BIG_NOISE] / kappa",
            "tests/unit/metrics/test_noise_scale.py::test_the_scale_of_the_loss_cancels",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "within = (q_small - q_middle) / (v_small - v_middle)",
            "within = (q_small - q_middle) / (v_small - v_big)",
            "tests/unit/metrics/test_noise_scale.py::test_between_and_within_are_unbiased_on_several_ranks",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "if not all(map(math.isfinite, (*sums, grad_sq))):",
            "if not all(map(math.isfinite, sums)):",
            "tests/unit/metrics/test_noise_scale_average.py::test_a_window_that_is_not_finite_is_a_counted_skip",
        ),
        Mutant(
            "trainer/metrics/noise_scale/ratio.py",
            "- 2.0 * x * y * cov ",
            "",
            "tests/unit/metrics/test_noise_scale_average.py::test_the_error_of_a_ratio_counts_the_covariance",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "scale = share / (1.0 - share) / self.weight",
            "scale = share / self.weight",
            "tests/unit/metrics/test_noise_scale_average.py::test_averages_equal_the_textbook_form",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "fresh * dx * (y - self.mean_y)",
            "fresh * dx * dy",
            "tests/unit/metrics/test_noise_scale_average.py::test_averages_equal_the_textbook_form",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "is_positive(pair.mean_x, moments[0], pair.freedom) and",
            "pair.mean_x > 0.0 and",
            "tests/unit/metrics/test_noise_scale_average.py::test_consistency_is_capped_only_where_the_noise_between_ranks_is_sure",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "self.skipped += float(window.is_fault)",
            "self.skipped += 1.0",
            "tests/unit/metrics/test_noise_scale_average.py::test_one_micro_batch_on_one_rank_is_absent_with_advice",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "        self.drained = self.skipped\n",
            "",
            "tests/unit/metrics/test_noise_scale_average.py::test_a_drain_reports_each_skip_once_also_across_a_resume",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            '"token_weight", "skipped", "drained")',
            '"token_weight", "skipped")',
            "tests/unit/metrics/test_noise_scale_average.py::test_a_drain_reports_each_skip_once_also_across_a_resume",
        ),
        Mutant(
            "trainer/metrics/noise_scale/estimate.py",
            "fresh * window.num_tokens * window.big_noise",
            "fresh * window.num_tokens",
            "tests/unit/metrics/test_noise_scale_average.py::test_tokens_are_those_of_an_effective_example",
        ),
        Mutant(
            "trainer/metrics/noise_scale/hooks.py",
            "self._micro_square / torch.where(has_weight, factor, 1.0), 0.0)",
            "self._micro_square, 0.0)",
            "tests/unit/metrics/test_gns_hooks.py::test_sums_equal_separate_backwards",
        ),
        Mutant(
            "trainer/metrics/noise_scale/hooks.py",
            "noise = weights.square().sum() / total.square()",
            "noise = 1.0 / (weights > 0).sum()",
            "tests/unit/metrics/test_gns_hooks.py::test_sums_equal_separate_backwards",
        ),
        Mutant(
            "trainer/metrics/noise_scale/hooks.py",
            "(num_micros + 1) // 2 if",
            "num_micros // 2 if",
            "tests/unit/metrics/test_gns_hooks.py::test_sums_equal_separate_backwards",
        ),
        Mutant(
            "trainer/metrics/noise_scale/hooks.py",
            "fault = (~has_weight & (self._micro_square > 0.0)).double()",
            "fault = zero",
            "tests/unit/metrics/test_gns_hooks_faults.py::test_a_gradient_without_tokens_is_a_fault",
        ),
        Mutant(
            "trainer/metrics/noise_scale/hooks.py",
            "if gns._fired_in[index] == gns._micro:",
            "if False:",
            "tests/unit/metrics/test_gns_hooks_faults.py::test_a_hook_that_runs_twice_is_a_skip_with_one_warning",
        ),
        Mutant(
            "trainer/metrics/noise_scale/hooks.py",
            "        self._micro_square = self._sums.new_zeros(())\n        self._sum_square",
            "        self._sum_square",
            "tests/unit/metrics/test_gns_hooks.py::test_sums_equal_separate_backwards",
        ),
        Mutant(
            "trainer/metrics/noise_scale/hooks.py",
            "not self._is_moved and self._sum_fires >= len(self._window_fires)",
            "not self._is_moved",
            "tests/unit/metrics/test_gns_hooks_faults.py::test_the_middle_is_left_out_if_a_used_parameter_was_not_seen_in_it",
        ),
        Mutant(
            "trainer/metrics/noise_scale/hooks.py",
            "if not self._window_fires:",
            "if False:",
            "tests/unit/metrics/test_gns_hooks_faults.py::test_hooks_that_never_run_are_a_fault_and_closing_removes_them",
        ),
        Mutant(
            "trainer/metrics/noise_scale/hooks.py",
            "owner = weakref.ref(self)",
            "owner = lambda: self",
            "tests/unit/metrics/test_gns_hooks.py::test_hooks_do_not_keep_an_owner_that_nobody_closed",
        ),
        Mutant(
            "trainer/metrics/noise_scale/square_norm.py",
            "else torch.float32\n",
            "else flat.dtype\n",
            "tests/unit/metrics/test_square_norm.py",
        ),
        Mutant(
            "trainer/metrics/noise_scale/square_norm.py",
            "wide = flat[in_rows:].double()",
            "wide = flat[:0].double()",
            "tests/unit/metrics/test_square_norm.py",
        ),
    ],
    "layers": [
        Mutant(
            "trainer/metrics/noise_scale/hooks.py",
            "own_small = self._own_squares / torch.where(has_weight, factor, 1.0)",
            "own_small = self._own_squares",
            "tests/unit/metrics/test_per_layer.py::test_the_noise_of_each_layer_is_that_of_the_closed_form_and_adds_up_to_the_whole",
        ),
        Mutant(
            "trainer/metrics/noise_scale/hooks.py",
            "gns._own_squares[index] = square",
            "gns._own_squares[-1] = square",
            "tests/unit/metrics/test_per_layer.py::test_the_noise_of_each_layer_is_that_of_the_closed_form_and_adds_up_to_the_whole",
        ),
        Mutant(
            "trainer/metrics/noise_scale/per_layer.py",
            "own[SMALL_SQUARE], own[MIDDLE_KAPPA] = small, 0.0",
            "own[MIDDLE_KAPPA] = 0.0",
            "tests/unit/metrics/test_per_layer.py::test_the_noise_of_each_layer_is_that_of_the_closed_form_and_adds_up_to_the_whole",
        ),
        Mutant(
            "trainer/metrics/noise_scale/per_layer.py",
            "math.sqrt(big) / factor",
            "math.sqrt(big)",
            "tests/unit/metrics/test_per_layer.py::test_the_gradient_may_have_been_scaled",
        ),
        Mutant(
            "trainer/metrics/noise_scale/per_layer.py",
            "torch.cat([big, moved, weights]) / self._copies",
            "torch.cat([big, moved, weights])",
            "tests/distributed/test_per_layer.py::test_two_ranks_measure_each_layer_as_the_closed_form_says",
        ),
        Mutant(
            "trainer/metrics/noise_scale/per_layer.py",
            "        if is_taken:\n",
            "        if True:\n",
            "tests/unit/metrics/test_per_layer.py::test_a_skipped_step_has_neither_norm_nor_update_and_is_no_window",
        ),
        Mutant(
            "trainer/metrics/noise_scale/per_layer.py",
            "if members := [numbers[parameter] for",
            "if members := [0 for",
            "tests/distributed/test_per_layer.py::test_the_layers_of_a_run_add_up_to_its_gradient",
        ),
        Mutant(
            "trainer/metrics/noise_scale/per_layer.py",
            "            if weights > 0.0:\n",
            "            if True:\n",
            "tests/unit/metrics/test_per_layer.py::test_weights_of_zero_have_no_ratio",
        ),
        Mutant(
            "trainer/metrics/noise_scale/per_layer.py",
            "has_noise = sums[RANKS] == self._world_size",
            "has_noise = True",
            "tests/unit/metrics/test_per_layer.py::test_windows_without_the_squares_of_parameters_have_norms_alone",
        ),
        Mutant(
            "trainer/metrics/noise_scale/weight_sample.py",
            "max(parameter.numel() / limit, 1.0)",
            "1.0",
            "tests/unit/metrics/test_per_layer.py::test_a_sample_of_a_large_tensor_stands_for_all_of_it_within_its_error",
        ),
        Mutant(
            "trainer/metrics/noise_scale/weight_sample.py",
            "return self._squares(self._now_parts), self._squares(self._before_parts)",
            "return self._squares(self._now_parts), self._squares(self._now_parts)",
            "tests/unit/metrics/test_per_layer.py::test_the_update_ratio_is_that_of_a_copy_of_the_weights",
        ),
        Mutant(
            "trainer/metrics/noise_scale/weight_sample.py",
            "MOST_IN_ALL // max(num_tensors, 1)",
            "MOST_PER_TENSOR",
            "tests/unit/metrics/test_per_layer.py::test_what_is_kept_of_the_weights_does_not_grow_with_the_model",
        ),
        Mutant(
            "trainer/metrics/noise_scale/weight_sample.py",
            "drawn[(drawn >= first) & (drawn < stop)] - first",
            "drawn[(drawn >= first) & (drawn < stop)].clamp(max=stop - first - 1)",
            "tests/distributed/test_per_layer.py::test_shards_are_sampled_as_the_whole_tensor_is",
        ),
        Mutant(
            "trainer/metrics/noise_scale/layer_names.py",
            "parts[: number + 1]",
            "parts[:number]",
            "tests/unit/metrics/test_per_layer.py::test_a_parameter_belongs_to_the_layer_of_its_first_number_or_to_its_module",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "coincidence is not None, self._measures_layers",
            "coincidence is not None, False",
            "tests/distributed/test_per_layer.py::test_a_run_reports_the_noise_scale_of_its_layers",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "self._per_layer is not None and details is not None",
            "self._per_layer is not None",
            "tests/distributed/test_collectives.py::test_layers_take_one_small_reduction_of_a_logged_step_alone",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "if layer_sums[NUM_MEASURED] == self._world_size:",
            "if True:",
            "tests/distributed/test_broken_diagnostics.py::test_what_fails_to_be_measured_on_one_rank_is_absent_on_all",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "is_taken = is_finite and tokens > 0",
            "is_taken = True",
            "tests/distributed/test_per_layer.py::test_a_skipped_step_reports_no_layer",
        ),
        Mutant(
            "trainer/diagnostics/rules/layers.py",
            "if value < STANDS_STILL * typical",
            "if value <= 0.0",
            "tests/unit/diagnostics/test_rules.py::test_a_fault_is_reported_with_evidence_and_a_knob",
        ),
        Mutant(
            "trainer/diagnostics/rules/layers.py",
            "column.since((first + last) // 2)",
            "column.since(first)",
            "tests/unit/diagnostics/test_rules.py::test_layers_are_judged_by_the_second_half_and_not_by_few_rows",
        ),
        Mutant(
            "trainer/diagnostics/rules/layers.py",
            "(a / b) ** 2 if",
            "a / b if",
            "tests/unit/diagnostics/test_rules.py::test_a_share_is_of_the_squared_norm",
        ),
    ],
    "reductions": [
        Mutant(
            "trainer/metrics/aggregate.py",
            'if entry is None or how == "last":',
            "if entry is None:",
            "tests/unit/metrics/test_aggregate.py::test_each_kind_is_put_together_in_its_own_way",
        ),
        Mutant(
            "trainer/metrics/aggregate.py",
            "if a != a or b != b:",
            "if a != a:",
            "tests/unit/metrics/test_aggregate.py::test_nan_is_a_value_and_not_an_absence",
        ),
        Mutant(
            "trainer/metrics/aggregate.py",
            'return self.total / self.count if self.how == "mean" else self.total',
            "return self.total",
            "tests/unit/metrics/test_aggregate.py::test_a_gauge_is_averaged_over_the_micro_steps_that_reported_it",
        ),
        Mutant(
            "trainer/metrics/aggregate.py",
            "else (value, 1.0)",
            "else (value, 0.0)",
            "tests/unit/metrics/test_aggregate.py::test_a_plain_number_of_a_weighted_mean_counts_once",
        ),
        Mutant(
            "trainer/metrics/aggregate.py",
            'next drain."""\n        self._latest = {}\n',
            'values."""\n',
            "tests/unit/metrics/test_aggregate.py::test_a_gauge_of_an_earlier_step_is_not_reported_as_the_latest",
        ),
        Mutant(
            "trainer/metrics/aggregate.py",
            "self._kept = dict.fromkeys(self._counters, 0.0)",
            "self._kept = {}",
            "tests/unit/metrics/test_aggregate.py::test_named_counters_are_reported_as_zero",
        ),
        Mutant(
            "trainer/metrics/aggregate.py",
            'if kind == "counter" else _larger',
            "if False else _larger",
            "tests/unit/metrics/test_aggregate.py::test_what_was_counted_on_silent_steps_is_in_the_next_drain",
        ),
        Mutant(
            "trainer/metrics/aggregate.py",
            "        self._entries = {}\n        return result",
            "        return result",
            "tests/unit/metrics/test_aggregate.py::test_each_kind_is_put_together_in_its_own_way",
        ),
        Mutant(
            "trainer/metrics/aggregate.py",
            "        return value.detach()\n",
            "        return value\n",
            "tests/unit/metrics/test_aggregate.py::test_tensors_stay_tensors_and_carry_no_graph",
        ),
        Mutant(
            "trainer/metrics/rank_reduction.py",
            "np.where(present, values, 0.0).sum(0)",
            "values.sum(0)",
            "tests/properties/test_metrics_properties.py::test_a_mean_over_nothing_is_left_out_though_it_is_nan",
        ),
        Mutant(
            "trainer/metrics/rank_reduction.py",
            "np.where(present, values, np.inf).min(0)",
            "np.where(present, values, 0.0).min(0)",
            "tests/properties/test_metrics_properties.py::test_a_reduction_equals_its_definition_in_any_order_of_ranks",
        ),
        Mutant(
            "trainer/metrics/rank_reduction.py",
            "weights = counts.sum(0)",
            "weights = present.sum(0)",
            "tests/properties/test_metrics_properties.py::test_the_loss_is_that_of_the_same_tokens_in_one_batch",
        ),
        Mutant(
            "trainer/metrics/rank_reduction.py",
            "reduced[key + WORST_SUFFIX] = float(most[index])",
            "reduced[key + WORST_SUFFIX] = float(totals[index])",
            "tests/properties/test_metrics_properties.py::test_a_reduction_equals_its_definition_in_any_order_of_ranks",
        ),
        Mutant(
            "trainer/metrics/rank_reduction.py",
            "for key in sorted(set(keys))}",
            "for key in keys}",
            "tests/unit/metrics/test_rank_reduction.py::test_the_plan_is_the_same_however_the_keys_are_collected",
        ),
        Mutant(
            "trainer/metrics/rank_reduction.py",
            "    if unlisted and guard is None:\n",
            "    if False:\n",
            "tests/unit/metrics/test_rank_reduction.py::test_a_key_outside_the_plan_is_refused",
        ),
        Mutant(
            "trainer/metrics/rank_reduction.py",
            "if not present[:, index].any():",
            "if False:",
            "tests/unit/metrics/test_rank_reduction.py::test_a_mean_over_nothing_is_absent",
        ),
        Mutant(
            "trainer/metrics/tracker.py",
            "(self._clock() if ended.stop is None else ended.stop) - ended.start",
            "self._clock() - ended.start",
            "tests/unit/metrics/test_tracker.py::test_a_step_may_end_after_the_next_has_started_and_no_time_counts_twice",
        ),
        Mutant(
            "trainer/metrics/tracker.py",
            "speed = tokens / seconds if",
            "speed = tokens if",
            "tests/unit/metrics/test_tracker.py::test_however_late_numbers_are_read_steps_of_equal_time_have_one_speed",
        ),
        Mutant(
            "trainer/metrics/tracker.py",
            "return step % self._log_interval == 0 or step == 1",
            "return step % self._log_interval == 0",
            "tests/unit/metrics/test_tracker.py::test_the_first_step_and_every_interval_are_logged",
        ),
        Mutant(
            "trainer/metrics/tracker.py",
            "if sample is not None:",
            "if sample is not None and is_logged:",
            "tests/unit/metrics/test_tracker.py::test_smoothing_sees_steps_that_do_not_log",
        ),
        Mutant(
            "trainer/metrics/tracker.py",
            "parts.get(name, 0.0) + self._clock() - began",
            "self._clock() - began",
            "tests/unit/metrics/test_tracker.py::test_sections_name_the_slow_part_of_this_step",
        ),
        Mutant(
            "trainer/metrics/tracker.py",
            'self._tokens_seen = state["tokens_seen"]',
            "pass",
            "tests/unit/metrics/test_tracker.py::test_a_resumed_tracker_goes_on_where_the_other_stopped",
        ),
        Mutant(
            "trainer/metrics/tracker.py",
            "num_devices=self._num_devices,",
            "num_devices=1,",
            "tests/unit/metrics/test_tracker.py::test_mfu_counts_all_devices",
        ),
    ],
    "report": [
        Mutant(
            "trainer/report/run_summary.py",
            "for at in (lowest, starts[-1]))",
            "for at in (lowest,))",
            "tests/unit/report/test_run_summary.py::test_rounded_sums_do_not_hide_that_the_final_loss_is_the_best",
        ),
        Mutant(
            "trainer/report/run_summary.py",
            "    width = len(_final_rows(run, losses, window))\n",
            "    width = 1\n",
            "tests/unit/report/test_run_summary.py::test_the_best_loss_is_a_mean_of_as_many_rows_as_the_final_one_and_never_worse",
        ),
        Mutant(
            "trainer/report/run_summary.py",
            "    total = sum(sum(column.values()) for column in columns)\n",
            "    total = sum(columns[0].values())\n",
            "tests/unit/report/test_run_summary.py::test_a_total_covers_all_its_keys",
        ),
        Mutant(
            "trainer/report/undrawn.py",
            "float(curve.low[0]) == 0.0",
            "float(curve.low[0]) >= 0.0",
            "tests/unit/report/test_write_report.py::test_a_value_is_called_the_same_throughout_only_if_it_was_measured_more_than_once",
        ),
        Mutant(
            "trainer/report/undrawn.py",
            "curve in (line.curve, line.spread)",
            "curve in (line.curve, None)",
            "tests/unit/report/test_undrawn.py::test_zeros_with_an_error_bar_are_drawn",
        ),
        Mutant(
            "trainer/report/views.py",
            "bad_steps=bad)",
            "bad_steps=bad[:0])",
            "tests/unit/report/test_undrawn.py::test_one_value_that_is_not_zero_is_drawn",
        ),
        Mutant(
            "trainer/report/run_summary.py",
            '"" if run.has_ended else "Latest loss"',
            '""',
            "tests/unit/report/test_run_summary.py::test_the_final_loss_is_called_the_latest_while_a_run_goes_on",
        ),
        Mutant(
            "trainer/report/follow.py",
            "if path.exists() or not path.parent.is_dir():",
            "if path.exists():",
            "tests/unit/report/test_follow.py::test_a_path_in_a_directory_that_does_not_exist_is_refused_at_the_start",
        ),
        Mutant(
            "trainer/report/serve.py",
            'if self.command != "HEAD":',
            "if self.command:",
            "tests/unit/report/test_serve.py::test_head_is_answered_as_get_without_the_body",
        ),
        Mutant(
            "trainer/runs/noise_scale.py",
            "or self.low > 0.0",
            "or self.low >= 0.0",
            "tests/unit/runs/test_noise_scale.py::test_a_lower_bound_of_0_alone_is_no_number_and_with_an_upper_one_it_is",
        ),
        Mutant(
            "trainer/preview/summary.py",
            "max(tally.batches for tally",
            "sum(tally.batches for tally",
            "tests/cli/test_preview.py::test_drawn_batches_add_up_to_the_run_and_are_told_from_expected_ones",
        ),
        Mutant(
            "trainer/report/views.py",
            'key=READINGS.index) or ["gns/b_now"]',
            'key=READINGS.index)[:0] or ["gns/b_now"]',
            "tests/unit/report/test_charts.py::test_tile_diagnosis_and_chart_read_the_noise_scale_of_the_same_key_and_row",
        ),
        Mutant(
            "trainer/report/undrawn.py",
            "line.curve.num_values == 1 for line",
            "line.curve.num_values == 0 for line",
            "tests/unit/report/test_write_report.py::"
            "test_a_value_is_called_the_same_throughout_only_if_it_was_measured_more_than_once",
        ),
        Mutant(
            "trainer/report/seed_groups.py",
            "self.deviation / math.sqrt(self.n)",
            "self.deviation / self.n",
            "tests/unit/report/test_seed_groups.py::test_the_spread_is_that_of_a_sample",
        ),
        Mutant(
            "trainer/report/seed_groups.py",
            "statistics.stdev(means)",
            "statistics.pstdev(means)",
            "tests/unit/report/test_seed_groups.py::test_the_spread_is_that_of_a_sample",
        ),
        Mutant(
            "trainer/report/seed_groups.py",
            "math.hypot(errors[0], errors[1])",
            "max(errors[0], errors[1])",
            "tests/unit/report/test_seed_groups.py::test_a_difference_is_resolved_beyond_two_standard_errors_of_both",
        ),
        Mutant(
            "trainer/report/seed_groups.py",
            "abs(self.difference) > ERRORS_WIDE * self.error",
            "abs(self.difference) > self.error",
            "tests/unit/report/test_seed_groups.py::test_a_difference_is_resolved_beyond_two_standard_errors_of_both",
        ),
        Mutant(
            "trainer/report/seed_groups.py",
            "    means = [statistics.fmean(of_seed) for of_seed in values.values()]\n",
            "    means = [value for of_seed in values.values() for value in of_seed]\n",
            "tests/unit/report/test_seed_groups.py::test_a_seed_that_was_run_twice_counts_once",
        ),
        Mutant(
            "trainer/report/seed_groups.py",
            "if run.config else str(number)",
            "if run else str(number)",
            "tests/unit/report/test_seed_groups.py::test_runs_without_recorded_settings_are_not_pooled",
        ),
        Mutant(
            "trainer/report/serve.py",
            "return len(hosts) == 1 and hosts[0].partition",
            "return hosts[0].partition",
            "tests/unit/report/test_serve.py::test_a_request_without_one_host_is_refused",
        ),
        Mutant(
            "trainer/report/serve.py",
            'hosts[0].partition(":")[0].lower() in _HOSTS',
            "hosts[0].lower().startswith(_HOSTS)",
            "tests/unit/report/test_serve.py::test_another_name_for_this_machine_is_refused",
        ),
        Mutant(
            "trainer/report/follow.py",
            "max(SHORTEST_PAUSE_SEC, BUSY_FACTOR * (end - start))",
            "SHORTEST_PAUSE_SEC",
            "tests/unit/report/test_follow.py::test_reading_pauses_in_proportion_to_how_long_it_takes",
        ),
        Mutant(
            "trainer/report/follow.py",
            'return [*stamps, status.get("state"), status.get("reason"), path.exists()]',
            "return [*stamps, *status.values()]",
            "tests/unit/report/test_follow.py::test_a_heartbeat_is_no_news_and_the_end_is",
        ),
    ],
    "step": [
        Mutant(
            "trainer/training/setup/live_bytes.py",
            "if key in self._seen:",
            "if False:",
            "tests/unit/training/test_memory.py::test_storages_are_counted_once_and_until_they_go",
        ),
        Mutant(
            "trainer/model/adapters/as_hugging_face.py",
            "mixer.taps.flip(0).T[:, None]",
            "mixer.taps.T[:, None]",
            "tests/unit/model/test_hugging_face.py",
        ),
        Mutant(
            "trainer/model/adapters/hugging_face.py",
            '"pad_token_id": None',
            '"pad_token_id": 0',
            "tests/unit/model/test_hugging_face.py::test_every_token_of_a_new_model_is_learned",
        ),
        Mutant(
            "trainer/model/headless.py",
            "del head.forward",
            "pass",
            "tests/unit/objective/test_chunked.py::test_the_model_itself_still_gives_logits",
        ),
        Mutant(
            "trainer/objective/chunked.py",
            "checkpoint(self._of_chunk, *pair, meta, use_reentrant=False, preserve_rng_state=False)",
            "self._of_chunk(*pair, meta)",
            "tests/unit/objective/test_chunked.py::test_logits_are_held_for_a_chunk_alone",
        ),
        Mutant(
            "trainer/objective/chunked.py",
            "for chunk in chunks]).sum() for i in range(2))",
            "for chunk in chunks[1:]]).sum() for i in range(2))",
            "tests/unit/objective/test_chunked.py::test_losses_parts_and_gradients_are_those_of_the_plain_loss",
        ),
        Mutant(
            "trainer/model/headless.py",
            "if not is_same:",
            "if False:",
            "tests/unit/objective/test_chunked.py::test_a_model_that_changes_its_logits_is_refused_and_another_is_not",
        ),
        Mutant(
            "trainer/model/recompute.py",
            "block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)",
            "pass",
            "tests/unit/model/test_recompute.py",
        ),
        Mutant(
            "trainer/training/step/muon.py",
            "tensor.copy_(torch.where(self.found_inf > 0, kept, tensor))",
            "pass",
            "tests/unit/training/test_optimizer.py::test_a_skipped_step_changes_nothing_and_the_next_is_as_if_it_had_not_been",
        ),
        Mutant(
            "trainer/training/step/optimizer.py",
            "optimizer.link_groups()",
            "pass",
            "tests/unit/training/test_optimizer.py::test_a_resume_restores_the_state_and_takes_the_settings_of_the_config",
        ),
        Mutant(
            "trainer/training/step/optimizer.py",
            'optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)',
            "pass",
            "tests/unit/training/test_optimizer.py::test_a_skipped_step_changes_nothing_and_the_next_is_as_if_it_had_not_been",
        ),
        Mutant(
            "trainer/training/step/optimizer.py",
            "for number, name in enumerate(names[key]) if name in saved}",
            "for number, name in enumerate(sorted(names[key])) if name in saved}",
            "tests/unit/training/test_optimizer.py::test_a_resume_restores_the_state_and_takes_the_settings_of_the_config",
        ),
        Mutant(
            "trainer/training/step/optimizer.py",
            "p.requires_grad and p.shape[0] not in sizes",
            "p.requires_grad",
            "tests/unit/training/test_optimizer.py::test_muon_takes_the_matrices_between_embedding_and_output",
        ),
        Mutant(
            "trainer/training/step/schedule.py",
            "lr * group.get(LR_SCALE, 1.0)",
            "lr",
            "tests/unit/training/test_optimizer.py::test_groups_have_settings_of_their_own",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "scale_gradients(gradients, tokens * self._kappa / self._world_size,",
            "scale_gradients(gradients, torch.ones_like(tokens),",
            "tests/distributed/test_step.py::test_any_layout_equals_one_big_batch[1-2]",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "scale_gradients(gradients, tokens * self._kappa / self._world_size,",
            "scale_gradients(gradients, tokens * self._kappa,",
            "tests/distributed/test_step.py::test_any_layout_equals_one_big_batch[2-1]",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "self._tokens += result.num_tokens",
            "self._tokens = self._tokens * 0 + result.num_tokens",
            "tests/distributed/test_step.py::test_any_layout_equals_one_big_batch[1-2]",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "[self._tokens, self._loss_sum, *votes]",
            "[self._loss_sum, self._tokens, *votes]",
            "tests/distributed/test_step.py::test_any_layout_equals_one_big_batch[1-2]",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "(loss_sum.isfinite() & grad_sq.isfinite())",
            "(loss_sum.isfinite())",
            "tests/unit/training/test_one_step_late.py::test_a_bad_step_is_skipped_and_leaves_no_trace_in_weights[inf_gradient-11]",
        ),
        Mutant(
            "trainer/training/step/step.py",
            " | (tokens == 0)",
            "",
            "tests/distributed/test_step.py::test_a_step_without_tokens_changes_nothing",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "for vote in (stop, saved, save_due, spiked, exhausted)]",
            "for vote in (saved, stop, save_due, spiked, exhausted)]",
            "tests/unit/training/test_one_step_late.py::test_a_stop_takes_effect_one_step_later_unless_the_step_is_read_at_once",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "grad_factor=factor)",
            "grad_factor=1.0)",
            "tests/distributed/test_step.py::test_the_noise_scale_does_not_depend_on_how_the_loss_is_scaled",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "        set_lr(self._optimizer, lr)\n",
            "",
            "tests/golden/test_golden_losses.py::test_losses_are_the_golden_ones",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "        self._optimizer.zero_grad(set_to_none=True)\n",
            "",
            "tests/golden/test_golden_losses.py::test_losses_are_the_golden_ones",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "                state = self._ledger.lookup(carry.group_ids, carry.cell_index)",
            "                self._ledger.lookup(carry.group_ids, carry.cell_index)",
            "tests/golden/test_golden_losses.py::test_losses_are_the_golden_ones",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "with nullcontext() if is_last else self._no_sync():",
            "with nullcontext():",
            "tests/distributed/test_collectives.py::test_a_step_has_one_gradient_sync_and_one_small_reduction_and_a_logged_one_more[False]",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "own_sq.reshape(1) / self._copies",
            "own_sq.reshape(1)",
            "tests/distributed/test_strategies.py::test_every_number_is_that_of_ddp[hsdp]",
        ),
        Mutant(
            "trainer/metrics/noise_scale/leaves.py",
            "copies = mesh.size(0) if mesh.ndim == 2 else 1",
            "copies = 1",
            "tests/distributed/test_gns_fsdp.py::test_step_adds_up_the_shards",
        ),
        Mutant(
            "trainer/distributed/strategy.py",
            "return [unit for unit in units if all(uses[parameter] == n for parameter, n in _uses(unit).items())]",
            "return units",
            "tests/distributed/test_strategies.py::test_what_a_step_can_do_it_does_on_shards[model.family=lstm]",
        ),
        Mutant(
            "trainer/training/step/muon.py",
            'update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum',
            "update = momentum",
            "tests/distributed/test_strategies.py::test_other_optimizers_step_the_same[muon]",
        ),
        Mutant(
            "trainer/training/evaluation/evaluator.py",
            "if not self._in_lockstep:",
            "if True:",
            "tests/distributed/test_strategies.py::test_a_stop_of_one_rank_ends_an_evaluation_of_shards_on_all",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "is_finite = math.isfinite(loss_sum) and math.isfinite(grad_sq)",
            "is_finite = math.isfinite(loss_sum)",
            "tests/unit/training/test_one_step_late.py::test_a_bad_step_is_skipped_and_leaves_no_trace_in_weights[inf_gradient-11]",
        ),
        Mutant(
            "trainer/training/step/on_device.py",
            '"found_inf", is_bad.float())',
            '"found_inf", is_bad.float() * 0)',
            "tests/unit/training/test_one_step_late.py::test_a_bad_step_is_skipped_and_leaves_no_trace_in_weights[nan-7]",
        ),
        Mutant(
            "trainer/training/step/on_device.py",
            "(grad_sq.sqrt() / loss_factor + 1e-6)",
            "(grad_sq.sqrt() + 1e-6)",
            "tests/distributed/test_step.py::test_clipping_shrinks_the_true_gradient_to_the_limit",
        ),
        Mutant(
            "trainer/training/step/on_device.py",
            "    if limit:\n",
            "    if False:\n",
            "tests/distributed/test_step.py::test_clipping_shrinks_the_true_gradient_to_the_limit",
        ),
        Mutant(
            "trainer/training/step/on_device.py",
            "scale = shrink / loss_factor",
            "scale = shrink",
            "tests/distributed/test_step.py::test_any_layout_equals_one_big_batch[1-2]",
        ),
        Mutant(
            "trainer/training/loop.py",
            "step = run.position.step + (1 if previous is None else 2)",
            "step = run.position.step + 1",
            "tests/unit/training/test_one_step_late.py::test_the_numbers_are_those_of_steps_read_at_once[settings0]",
        ),
        Mutant(
            "trainer/training/loop.py",
            "if at_once or reason is not None:",
            "if at_once:",
            "tests/unit/training/test_one_step_late.py::test_a_stop_takes_effect_one_step_later_unless_the_step_is_read_at_once[fault0-3]",
        ),
        Mutant(
            "trainer/training/loop.py",
            "return finish(run, current) or reason, None",
            "return reason or finish(run, current), None",
            "tests/unit/training/test_one_step_late.py::test_a_stop_takes_effect_one_step_later_unless_the_step_is_read_at_once[fault0-3]",
        ),
        Mutant(
            "trainer/training/loop.py",
            "(config.eval.every, config.checkpoint.every, config.sample.every)",
            "(config.eval.every, config.sample.every)",
            "tests/unit/training/test_one_step_late.py::test_the_numbers_are_those_of_steps_read_at_once[settings0]",
        ),
        Mutant(
            "trainer/training/loop.py",
            "(config.eval.every, config.checkpoint.every, config.sample.every)",
            "(config.checkpoint.every, config.sample.every)",
            "tests/unit/training/test_one_step_late.py::test_the_numbers_are_those_of_steps_read_at_once[settings0]",
        ),
        Mutant(
            "trainer/training/loop.py",
            "at_once = is_read_at_once(run, step)",
            "at_once = True",
            "tests/unit/training/test_no_waiting.py::test_the_program_reads_nothing_of_a_step_that_does_not_log",
        ),
        Mutant(
            "trainer/training/loop.py",
            "details=run.details if run.logs(step) else None",
            "details=run.details",
            "tests/unit/training/test_one_step_late.py::test_the_numbers_are_those_of_steps_read_at_once[settings0]",
        ),
        Mutant(
            "trainer/training/finish.py",
            "        position.skipped_in_a_row = 0\n",
            "",
            "tests/unit/training/test_one_step_late.py::test_a_good_step_ends_bad_steps_in_a_row_and_a_resume_does_not",
        ),
        Mutant(
            "trainer/training/finish.py",
            "if position.skipped_in_a_row > table.max_skips:",
            "if position.skipped_in_a_row >= table.max_skips:",
            "tests/unit/training/test_one_step_late.py::test_too_many_bad_steps_in_a_row_end_the_run_at_the_same_step",
        ),
        Mutant(
            "trainer/training/finish.py",
            "if outcome.should_stop or not at_boundary",
            "if not at_boundary",
            "tests/unit/training/test_one_step_late.py::test_a_stop_takes_effect_one_step_later_unless_the_step_is_read_at_once[fault0-3]",
        ),
        Mutant(
            "trainer/training/finish.py",
            '        run.count({"non_finite_steps": 0.0})  # reported as 0, not left out\n',
            "",
            "tests/unit/training/test_switches.py::test_a_step_with_a_bad_number_is_skipped_and_training_goes_on",
        ),
        Mutant(
            "trainer/training/finish.py",
            "position.step, position.reached, position.data_state = step, taken.reached, taken.window.data_state",
            "position.step, position.reached = step, taken.reached",
            "tests/unit/training/test_stops.py::test_a_stop_at_any_moment_is_made_up_for[fault0-2-logged0]",
        ),
        Mutant(
            "trainer/training/step/microbatch.py",
            'copied["group_ids"] = np.full(1, -1, dtype=np.int64)',
            "pass",
            "tests/unit/training/test_microbatch.py::test_a_masked_copy_has_one_row_with_nothing_to_predict_and_no_group",
        ),
        Mutant(
            "trainer/training/step/window.py",
            "batch = masked_copy(self._last_batch)",
            "batch = self._last_batch",
            "tests/unit/training/test_one_step_late.py::test_a_rank_without_data_keeps_the_cursor_of_its_last_batch",
        ),
        Mutant(
            "trainer/training/step/details.py",
            "before.total + total, before.weight + count",
            "total, count",
            "tests/unit/metrics/test_step_details.py::test_micro_batches_are_weighted_by_their_tokens",
        ),
        Mutant(
            "trainer/training/step/optimizer.py",
            '"weight_decay": 0.0 if is_vector else table.weight_decay',
            '"weight_decay": table.weight_decay',
            "tests/unit/training/test_optimizer.py::test_vectors_are_not_decayed",
        ),
        Mutant(
            "trainer/training/step/schedule.py",
            "return peak * step / table.warmup_steps",
            "return peak * (step - 1) / table.warmup_steps",
            "tests/unit/training/test_schedule.py",
        ),
        Mutant(
            "trainer/training/loop.py",
            "run.position.tokens_before if previous is None else run.position.tokens",
            "run.position.tokens",
            "tests/distributed/test_length_in_tokens.py",
        ),
        Mutant(
            "trainer/training/step/schedule.py",
            "table.warmup_tokens or length.in_full_steps(table.warmup_steps)",
            "length.in_full_steps(table.warmup_steps)",
            "tests/distributed/test_length_in_tokens.py",
        ),
        Mutant(
            "trainer/training/checkpointing/saver.py",
            '"tokens": [position.tokens_before, position.tokens]',
            '"tokens": [position.tokens, position.tokens]',
            "tests/distributed/test_length_in_tokens.py",
        ),
    ],
    "growth": [
        Mutant(
            "trainer/micro_batches.py",
            "steps_with_m >= self.every and 2 * m",
            "2 * m",
            "tests/distributed/test_batch_growth.py::test_after_a_resume_with_another_interval_m_still_stays_as_long_as_that",
        ),
        Mutant(
            "trainer/micro_batches.py",
            "low > self.multiple * batch",
            "low >= self.multiple * batch",
            "tests/properties/test_micro_batches.py::test_auto_doubles_only_with_permission_and_never_more_often_than_every_n_steps",
        ),
        Mutant(
            "trainer/micro_batches.py",
            "return first_step + (batch - first_batch) // m",
            "return first_step + batch // m",
            "tests/properties/test_micro_batches.py::test_batches_and_steps_of_a_plan_are_those_of_a_loop_that_counts",
        ),
        Mutant(
            "trainer/micro_batches.py",
            "-(-max(x - tokens, 0) // (micro_tokens * m))",
            "max(x - tokens, 0) // (micro_tokens * m)",
            "tests/properties/test_micro_batches.py::test_a_plan_by_tokens_is_one_by_steps_if_all_batches_are_full",
        ),
        Mutant(
            "trainer/micro_batches.py",
            '"sqrt": math.sqrt(ratio)',
            '"sqrt": ratio',
            "tests/properties/test_micro_batches.py::test_the_learning_rate_follows_the_batch_by_the_rule_that_is_named",
        ),
        Mutant(
            "trainer/config/rules.py",
            "    if world_size == 1 and batches.first == 1:\n",
            "    if False:\n",
            "tests/unit/config/test_batch_size.py::test_what_cannot_work_is_refused_in_one_line_that_says_how_to_fix_it",
        ),
        Mutant(
            "trainer/training/setup/sources.py",
            "if by_step is None or config.micro_batches.is_known_ahead:",
            "if True:",
            "tests/unit/config/test_batch_size.py::test_what_cannot_work_is_refused_in_one_line_that_says_how_to_fix_it",
        ),
        Mutant(
            "trainer/data/blending/blend.py",
            "latest // every > (earliest - 1) // every",
            "earliest % every == 0",
            "tests/properties/test_micro_batches.py::test_batches_of_a_step_that_probes_have_the_tokens_before_however_far_they_are_made_ahead",
        ),
        Mutant(
            "trainer/training/step/batch_growth.py",
            "is_agreed = all(gather_from_ranks(own, world_size=self._world_size))",
            "is_agreed = own",
            "tests/distributed/test_batch_growth.py::test_ranks_agree_on_the_batch_when_one_of_them_lost_the_noise_scale[guard]",
        ),
        Mutant(
            "trainer/training/step/batch_growth.py",
            "tokens = tokens_before + before * self._micro_tokens",
            "tokens = tokens_before",
            "tests/distributed/test_batch_growth.py::test_planned_changes_come_where_they_are_planned[tokens-one rank]",
        ),
        Mutant(
            "trainer/training/step/step.py",
            "factor = launched.kappa * tokens",
            "factor = self._kappa * tokens",
            "tests/distributed/test_batch_growth.py::test_what_is_read_early_does_not_move_a_change[steps-one rank]",
        ),
        Mutant(
            "trainer/training/loop.py",
            "is_asked = run.growth is not None and run.growth.decides_after(step)",
            "is_asked = False",
            "tests/distributed/test_batch_growth.py::test_what_is_read_early_does_not_move_a_change[auto-one rank]",
        ),
        Mutant(
            "trainer/training/loop.py",
            "run.length.reached_by(step, tokens_before, num_before + num_micros)",
            "run.length.reached_by(step, tokens_before, 2 * num_micros)",
            "tests/distributed/test_batch_growth.py::test_a_run_in_tokens_ends_near_its_length_and_resumes[one rank]",
        ),
        Mutant(
            "trainer/training/checkpointing/saver.py",
            '"micro_batches": [position.micro_batches, position.micro_batches_since]',
            '"micro_batches": [0, position.micro_batches_since]',
            "tests/distributed/test_batch_growth.py::test_a_run_resumed_around_a_change_is_the_whole_run[auto-one rank-0]",
        ),
        Mutant(
            "trainer/training/checkpointing/restore.py",
            "config.micro_batches.auto is None or _was_auto(saved)",
            "True",
            "tests/distributed/test_batch_growth.py::test_auto_that_resumes_a_constant_batch_begins_at_its_start",
        ),
        Mutant(
            "trainer/diagnostics/facts.py",
            "min(logged, step) - min(before, step)",
            "logged - before",
            "tests/unit/diagnostics/test_rules.py::test_a_batch_that_grew_counts_with_what_it_was_at_each_step",
        ),
    ],
    "checkpoint": [
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            "if found != expected:",
            'if found["bytes"] != expected["bytes"]:',
            "tests/unit/training/test_run_files.py::test_damage_is_seen_auto_falls_back_one_and_a_path_is_refused[damage_flip]",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            'needed = {*map(model_file, state["model_files"]), *map(rank_file, expected_ranks)}',
            'needed = set(map(model_file, state["model_files"]))',
            "tests/unit/training/test_run_files.py::test_damage_is_seen_auto_falls_back_one_and_a_path_is_refused[damage_unlisted_shard]",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            "if not is_file_name(name) or name == MARKER:",
            "if False:",
            "tests/unit/training/test_run_files.py::test_damage_is_seen_auto_falls_back_one_and_a_path_is_refused[damage_marker_leaves_the_directory]",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            "if version not in (FORMER_VERSION, FORMAT_VERSION):",
            "if False:",
            "tests/unit/training/test_run_files.py::test_damage_is_seen_auto_falls_back_one_and_a_path_is_refused[damage_version]",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            "    for path in candidates:",
            "    for path in candidates[:1]:",
            "tests/unit/training/test_run_files.py::test_damage_is_seen_auto_falls_back_one_and_a_path_is_refused[damage_flip]",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            "    if candidates:\n",
            "    if False:\n",
            "tests/unit/training/test_run_files.py::test_auto_starts_anew_without_checkpoints_and_refuses_if_none_is_whole",
        ),
        Mutant(
            "trainer/training/checkpointing/former.py",
            "weights_only=True)",
            "weights_only=False)",
            "tests/unit/training/test_run_files.py::test_a_pickle_in_a_checkpoint_is_not_run",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            "complete_checkpoints(checkpoints)[keep_last:]",
            "complete_checkpoints(checkpoints)[keep_last - 1 :]",
            "tests/unit/training/test_run_files.py::test_the_newest_and_every_nth_are_kept",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            "if not keep_every or step % keep_every:",
            "if True:",
            "tests/unit/training/test_run_files.py::test_the_newest_and_every_nth_are_kept",
        ),
        Mutant(
            "trainer/files.py",
            "    path.rename(doomed)\n",
            "",
            "tests/unit/training/test_run_files.py::test_a_checkpoint_that_is_half_deleted_is_none",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            "    staging.rename(target)\n",
            "    shutil.copytree(staging, target)\n",
            "tests/unit/training/test_run_files.py::test_a_checkpoint_reads_back_and_latest_points_to_it",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            "sorted(staging.iterdir())",
            'sorted(staging.glob("*.pt"))',
            "tests/unit/training/test_run_files.py::test_a_checkpoint_reads_back_and_latest_points_to_it",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            "    replace_link(checkpoints / LATEST, target.name)\n",
            "",
            "tests/unit/training/test_run_files.py::test_a_checkpoint_reads_back_and_latest_points_to_it",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            "if step_of(path) > step:",
            "if step_of(path) >= step:",
            "tests/unit/training/test_run_files.py::test_going_back_sets_the_other_branch_aside_so_that_auto_does_not_return_to_it",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            '    for path in checkpoints.glob(".tmp_step_*"):',
            '    for path in checkpoints.glob("tmp_step_*"):',
            "tests/unit/training/test_run_files.py::test_the_newest_and_every_nth_are_kept",
        ),
        Mutant(
            "trainer/training/checkpointing/resume_checks.py",
            'BREAKING = (\n    "model.",',
            "BREAKING = (",
            "tests/unit/training/test_run_files.py::test_changed_keys_are_named_and_breaking_ones_refused",
        ),
        Mutant(
            "trainer/training/checkpointing/checkpoint.py",
            "tensors = sum(part.tensor.nbytes for part in self.rows.values())",
            "tensors = sum(part.tensor.numel() for part in self.rows.values())",
            "tests/unit/training/test_run_files.py::test_what_a_save_says_it_needs_is_about_what_its_file_takes",
        ),
        Mutant(
            "trainer/training/checkpointing/tensor_files.py",
            "if at != stop:",
            "if False:",
            "tests/unit/training/test_checkpoint_format.py::test_rows_are_joined_from_any_cut_into_files",
        ),
        Mutant(
            "trainer/training/checkpointing/tensor_files.py",
            "pieces.sort(key=lambda piece: piece[0])",
            "pass",
            "tests/unit/training/test_checkpoint_format.py::test_rows_are_joined_from_any_cut_into_files",
        ),
        Mutant(
            "trainer/training/checkpointing/tree.py",
            'name += "+"',
            "break",
            "tests/unit/training/test_checkpoint_format.py::test_two_tensors_never_get_one_name",
        ),
        Mutant(
            "trainer/training/checkpointing/model_part.py",
            "return as_shard(saved.read(name, *own_range(like)), like)",
            "return as_shard(saved.read(name)[: like.to_local().shape[0]], like)",
            "tests/distributed/test_strategies.py::test_each_checkpoint_is_restored_bit_for_bit_under_each_strategy",
        ),
        Mutant(
            "trainer/training/checkpointing/saver.py",
            '"evaluation_is_due": position.evaluation_is_due,',
            '"evaluation_is_due": False,',
            "tests/unit/training/test_stops.py::test_a_stop_at_any_moment_is_made_up_for[fault4-4-logged4]",
        ),
        Mutant(
            "trainer/training/checkpointing/restore.py",
            'position.evaluation_is_due = saved.get("evaluation_is_due", False)',
            "pass",
            "tests/unit/training/test_stops.py::test_a_stop_at_any_moment_is_made_up_for[fault4-4-logged4]",
        ),
        Mutant(
            "trainer/training/checkpointing/restore.py",
            'set_generator_states(own["generators"], device)',
            "pass",
            "tests/unit/training/test_switches.py::test_a_resumed_model_draws_the_random_numbers_of_an_unbroken_run",
        ),
        Mutant(
            "trainer/training/checkpointing/restore.py",
            "load_optimizer(state.optimizer, state.model, tensors)",
            "pass",
            "tests/unit/training/test_stops.py::test_a_stop_at_any_moment_is_made_up_for[fault0-2-logged0]",
        ),
        Mutant(
            "trainer/training/checkpointing/restore.py",
            'state.ledger.load_state_dict([part["ledger"] for part in parts], room=room)',
            "pass",
            "tests/unit/training/test_stops.py::test_a_stop_at_any_moment_is_made_up_for[fault0-2-logged0]",
        ),
        Mutant(
            "trainer/training/checkpointing/restore.py",
            "    state.load_shared(saved)\n",
            "",
            "tests/unit/training/test_stops.py::test_a_stop_at_any_moment_is_made_up_for[fault0-2-logged0]",
        ),
        Mutant(
            "trainer/training/checkpointing/restore.py",
            'position.load_counts(state, own.get("unlogged", {}))',
            "pass",
            "tests/unit/training/test_stops.py::test_what_was_counted_between_two_logged_steps_survives_a_kill",
        ),
        Mutant(
            "trainer/training/checkpointing/restore.py",
            "state.dataset.load_state_dict(blends if own is None else blends[info.rank])",
            "pass",
            "tests/unit/training/test_stops.py::test_a_stop_at_any_moment_is_made_up_for[fault0-2-logged0]",
        ),
        Mutant(
            "trainer/training/checkpointing/train_state.py",
            'self.skipped_in_a_row = int(saved.get("in_a_row", 0))',
            "self.skipped_in_a_row = 0",
            "tests/unit/training/test_one_step_late.py::test_a_good_step_ends_bad_steps_in_a_row_and_a_resume_does_not",
        ),
        Mutant(
            "trainer/training/checkpointing/train_state.py",
            'self.gns.load_state_dict(saved["gns"])',
            "pass",
            "tests/unit/training/test_stops.py::test_a_stop_at_any_moment_is_made_up_for[fault0-2-logged0]",
        ),
        Mutant(
            "trainer/training/checkpointing/train_state.py",
            'state.ledger.load_undrained(saved["ledger"])',
            "pass",
            "tests/unit/training/test_stops.py::test_what_was_counted_between_two_logged_steps_survives_a_kill",
        ),
        Mutant(
            "trainer/training/loop.py",
            "if run.saver.last_saved != position.step and position.step > 0:",
            "if False:",
            "tests/unit/training/test_stops.py::test_a_stop_at_any_moment_is_made_up_for[fault0-2-logged0]",
        ),
    ],
    "config": [
        Mutant(
            "trainer/config/rules.py",
            "capacity < in_flight",
            "capacity <= in_flight",
            "tests/unit/config/test_rules.py::test_capacity_below_the_groups_in_flight_is_refused_in_every_mode",
        ),
        Mutant(
            "trainer/config/lines.py",
            "reversed(list(self.overrides.items()))",
            "list(self.overrides.items())",
            "tests/unit/config/test_load.py::test_the_later_of_two_overrides_is_named",
        ),
        Mutant(
            "trainer/config/overrides.py",
            'parsed.keys() == {"value"}',
            "True",
            "tests/unit/config/test_load.py::test_a_value_with_a_newline_is_a_string",
        ),
    ],
    "diagnostics": [
        Mutant(
            "trainer/diagnostics/rules/batch.py",
            "if value + within < SAME_DATA:",
            "if value < SAME_DATA:",
            "tests/unit/diagnostics/test_rules.py::test_the_same_data_on_all_ranks_are_seen_by_the_noise_between_them",
        ),
        Mutant(
            "trainer/diagnostics/rules/batch.py",
            "if abs(noise.values[-1]) <= ROUNDING",
            "if abs(noise.values[-1]) < 0.0 * ROUNDING",
            "tests/unit/diagnostics/test_rules.py::test_the_same_data_on_all_ranks_are_seen_by_the_noise_between_them",
        ),
        Mutant(
            "trainer/diagnostics/rules/batch.py",
            "if run.world_size != 1 and not one_each:",
            "if False:",
            "tests/unit/diagnostics/test_rules.py::test_the_same_data_on_all_ranks_are_seen_by_the_noise_between_them",
        ),
        Mutant(
            "trainer/diagnostics/rules/batch.py",
            "    if current == 1:\n        return None\n",
            "",
            "tests/unit/diagnostics/test_rules.py::test_what_no_setting_would_mend_gets_no_setting",
        ),
        Mutant(
            "trainer/diagnostics/rules/ledger.py",
            "median(sizes) / run.world_size",
            "median(sizes)",
            "tests/unit/diagnostics/test_rules.py::test_the_ledger_of_a_loop_without_a_config_is_suggested_by_rank",
        ),
        Mutant(
            "trainer/diagnostics/rules/record.py",
            "lost > LOST_SHARE * total and suggested != every",
            "True",
            "tests/unit/diagnostics/test_rules.py::test_what_no_setting_would_mend_gets_no_setting",
        ),
        Mutant(
            "trainer/diagnostics/rules/rule.py",
            "if not missing:",
            "if len(missing) < 2:",
            "tests/unit/diagnostics/test_rules.py::test_absent_keys_are_not_measured",
        ),
        Mutant(
            "trainer/diagnostics/series.py",
            "if step in common)",
            "if i < len(common))",
            "tests/unit/diagnostics/test_rules.py::test_aligned_columns_have_the_common_steps_only",
        ),
        Mutant(
            "trainer/diagnostics/rules/stability.py",
            "in_a_row < NEW_LEVEL:",
            "in_a_row < 0:",
            "tests/unit/diagnostics/test_rules.py::test_neighboring_spikes_are_found_and_a_lasting_level_is_not_one_spike_per_row",
        ),
        Mutant(
            "trainer/diagnostics/rules/mixing.py",
            "gap.surprise <= math.log(len(columns) / ALPHA)",
            "gap.surprise <= 0",
            "tests/unit/diagnostics/test_rules.py::test_an_absence_that_the_share_of_a_modality_explains_is_healthy",
        ),
        Mutant(
            "trainer/diagnostics/diagnose.py",
            "2 * self.num_judged >= len(self.rulings)",
            "self.num_judged",
            "tests/unit/diagnostics/test_rules.py::test_a_run_is_healthy_if_at_least_half_of_the_rules_judged_it",
        ),
        Mutant(
            "trainer/diagnostics/facts.py",
            "most = readers - len(tables) + 1",
            "most = readers",
            "tests/unit/diagnostics/test_rules.py::test_the_suggested_stale_threshold_is_that_of_the_source_that_waits_longest",
        ),
        Mutant(
            "trainer/diagnostics/facts.py",
            "(weight / sum(weights), max(count, 1))",
            "(1.0, max(count, 1))",
            "tests/unit/preview/test_config_warnings.py::test_the_diagnosis_of_the_run_suggests_the_threshold_of_the_preview",
        ),
        Mutant(
            "trainer/diagnostics/rules/ledger.py",
            "cold.total <= known",
            "cold.total < known",
            "tests/unit/diagnostics/test_rules.py::test_cold_starts_caused_by_false_evictions_are_explained",
        ),
    ],
    "runs": [
        Mutant(
            "trainer/runs/status.py",
            "in reversed(lines)",
            "in lines",
            "tests/unit/runs/test_status.py::test_the_last_step_is_that_of_the_last_complete_row",
        ),
        Mutant(
            "trainer/runs/status.py",
            "error.code in (None, 0)",
            "error.code is not None",
            "tests/unit/runs/test_status.py::test_an_exception_is_passed_on_and_says_how_the_run_ended",
        ),
        Mutant(
            "trainer/training/run_dir.py",
            'run.status_file.exists() and run.status().get("loop") != OWN_LOOP',
            "run.status_file.exists()",
            "tests/cli/test_program.py::test_a_record_of_another_program_is_not_continued_but_a_run_without_its_status_is",
        ),
        Mutant(
            "trainer/runs/load.py",
            "self.steps_redone.append(max(self._last_step - found.global_step, 0))",
            "self.steps_redone.append(0)",
            "tests/unit/runs/test_load.py::test_after_a_restart_the_later_row_of_a_step_replaces_the_earlier_one",
        ),
        Mutant(
            "trainer/runs/rows.py",
            "pyarrow.float64(), from_pandas=False)",
            "pyarrow.float64(), from_pandas=True)",
            "tests/unit/runs/test_rows.py::test_parquet",
        ),
    ],
    "scan": [
        Mutant(
            "trainer/model/scan/kernels.py",
            "            a = tl.where(is_inside, a, 1.0)\n",
            "",
            "tests/unit/model/test_fused_scan.py::test_states_and_gradients_equal_float64",
        ),
        Mutant(
            "trainer/model/scan/kernels.py",
            "tl.where(log_a > -0.5, -2.0 * a * sinh, 1.0 - a * a)",
            "1.0 - a * a",
            "tests/unit/model/test_fused_scan.py::test_input_scale_is_accurate_from_a_decay_of_almost_one_to_almost_zero",
        ),
        Mutant(
            "trainer/model/scan/kernels.py",
            "tl.maximum(x, 0.0) + 2.0 * s * series",
            "tl.maximum(x, 0.0) + tl.log(1.0 + u)",
            "tests/unit/model/test_fused_scan.py::test_input_scale_is_accurate_from_a_decay_of_almost_one_to_almost_zero",
        ),
        Mutant(
            "trainer/model/scan/kernels.py",
            "tl.where(is_kept, a * previous, 0.0)",
            "a * previous",
            "tests/unit/model/test_fused_scan.py::test_resets_anywhere",
        ),
        Mutant(
            "trainer/model/scan/kernels.py",
            "            a = tl.where(is_kept, a, tl.where(is_inside, 0.0, 1.0))\n",
            "            a = tl.where(is_inside, a, 1.0)\n",
            "tests/unit/model/test_fused_scan.py::test_no_value_and_no_gradient_passes_a_reset",
        ),
        Mutant(
            "trainer/model/scan/kernels.py",
            "        scale_before_2 * shift_1 + shift_before_2,\n",
            "        scale_before_2 * shift_1,\n",
            "tests/unit/model/test_fused_scan.py::test_a_row_cut_anywhere_gives_the_same_states",
        ),
        Mutant(
            "trainer/model/scan/kernels.py",
            "tl.where(t == 0, first_state, load(h, offset - dim, mask & (t > 0)))",
            "load(h, offset - dim, mask & (t > 0))",
            "tests/unit/model/test_fused_scan.py::test_states_and_gradients_equal_float64",
        ),
        Mutant(
            "trainer/model/scan/kernels.py",
            "tl.where(segment == SEGMENTS - 1, product * initial + end, 0.0)",
            "tl.where(segment == SEGMENTS - 1, end, 0.0)",
            "tests/unit/model/test_fused_scan.py::test_gradients_through_one_output_alone",
        ),
        Mutant(
            "trainer/model/scan/kernels.py",
            "tl.sqrt(tl.where(square < TINY, TINY, square))",
            "tl.sqrt(tl.where(square >= TINY, square, TINY))",
            "tests/unit/model/test_fused_scan.py::test_a_gate_that_is_nan_shows_at_a_reset_too",
        ),
        Mutant(
            "trainer/model/scan/kernels.py",
            "load_resets(resets, first + (SEGMENTS + segment) * STEPS, num_steps, STEPS, 1)",
            "load_resets(resets, first + segment * STEPS, num_steps, STEPS, 1)",
            "tests/unit/model/test_fused_scan.py::test_resets_anywhere",
        ),
        Mutant(
            "trainer/model/scan/fused.py",
            "_gated_scan_backward_op(grad_h.contiguous(),",
            "_gated_scan_backward_op(grad_h,",
            "tests/unit/model/test_fused_scan.py::test_non_contiguous_inputs",
        ),
        Mutant(
            "trainer/model/scan/fused.py",
            "        state.float().contiguous(),\n",
            "        state.contiguous(),\n",
            "tests/unit/model/test_fused_scan.py::test_16_bit_inputs_give_16_bit_states_and_gradients_and_a_float32_final_state",
        ),
        Mutant(
            "trainer/model/recurrence.py",
            "if x.is_cuda and x.dtype in KERNEL_DTYPES:",
            "if x.is_cuda:",
            "tests/unit/model/test_fused_scan.py::test_cuda_tensors_take_the_kernels_unless_they_are_float64",
        ),
        Mutant(
            "trainer/model/recurrence.py",
            "@functools.cache\n",
            "",
            "tests/unit/model/test_fused_scan.py::test_a_missing_triton_is_said_once_and_the_plain_scan_runs",
        ),
        Mutant(
            "trainer/training/setup/memory.py",
            "            use_kernels(model)\n",
            "            pass\n",
            "tests/unit/training/test_memory.py::test_a_run_on_cuda_keeps_no_coefficients_of_the_scan",
        ),
    ],
    "preview": [
        Mutant(
            "trainer/preview/counted.py",
            "self._active[modality] -= 1",
            "pass",
            "tests/unit/preview/test_waits.py::test_with_a_single_reader_every_pick_lacks_the_other_modality",
        ),
        Mutant(
            "trainer/preview/forecast.py",
            'if is_first or not batch["is_shared"]:',
            "if is_first:",
            "tests/unit/preview/test_forecast.py::test_counts_match_the_real_pipeline",
        ),
        Mutant(
            "trainer/cli/init/mix.py",
            "asked[name] * batches[name] / tokens[name]",
            "asked[name]",
            "tests/cli/test_init_mix.py::test_the_tokens_that_are_drawn_have_the_shares_that_were_asked_for",
        ),
        Mutant(
            "trainer/cli/init/mix.py",
            'documents_of("train", ',
            'documents_of("all", ',
            "tests/cli/test_init_mix.py::test_equal_weights_draw_another_mix_which_preview_and_check_show_and_warn_about",
        ),
        Mutant(
            "trainer/preview/config_warnings.py",
            "not 1 / SKEW <= view.drawn_share",
            "not 0 <= view.drawn_share",
            "tests/cli/test_init_mix.py::test_an_underdrawn_modality_alone_is_warned_about",
        ),
        Mutant(
            "trainer/preview/summary.py",
            "corpus_share=view.corpus_tokens / corpus",
            "corpus_share=view.tokens / tokens",
            "tests/cli/test_init_mix.py::test_equal_weights_draw_another_mix_which_preview_and_check_show_and_warn_about",
        ),
    ],
}


class Copy:
    """A copy of the repository's files, in which tests run."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "repository"
        self._temporary = folder / "tmp"
        self._output = folder / "output"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():  # a deleted file is still listed
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._root / name)

    def run_tests(self, tests: list[str], timeout: float) -> tuple[int | None, str]:
        """pytest's exit code, None if it was killed after `timeout` seconds, and what it printed."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        # PYTHONPATH, because tests start programs of their own, which must import the copy too.
        environment = {**os.environ, "PYTHONPATH": str(self._root), "OMP_NUM_THREADS": "1"}
        with self._output.open("wb") as output:
            process = subprocess.Popen(
                [*command, f"--basetemp={self._temporary}", *tests],
                cwd=self._root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that the test started
                process.wait()
                code = None
        return code, self._output.read_text(encoding="utf-8", errors="replace")

    def check_whole(self, area: str, mutants: list[Mutant]) -> str:
        """What is wrong with the tests of an area without any mutant; empty if they pass."""
        code, output = self.run_tests(list(dict.fromkeys(mutant.test for mutant in mutants)), AREA_TIMEOUT_SEC)
        return "" if code == 0 else f"{output[-4000:]}\n{area}: red, or not found, without any mutant: see above"

    def try_mutant(self, mutant: Mutant) -> str:
        """`caught`, `caught (timeout)`, `SURVIVED`, or why the mutant is unusable."""
        path = self._root / mutant.file
        # Python tells old bytecode by the file's second and size: no two tests of a file start in one second.
        whole = path.read_bytes()
        path.write_bytes(whole.replace(mutant.old.encode(), mutant.new.encode()))
        try:
            code, _ = self.run_tests([mutant.test], TIMEOUT_SEC)
        finally:
            path.write_bytes(whole)
        known = {None: "caught (timeout)", 0: "SURVIVED", 1: "caught"}
        return known.get(code, f"unusable (pytest ends with {code}: does the mutant still import?)")


def problem_of(mutant: Mutant) -> str | None:
    """Why a mutant cannot be tried, as far as the files alone say; None if it can."""
    for name in (mutant.file, mutant.test.partition("::")[0]):
        if not (ROOT / name).is_file():
            return f"{name} does not exist"
    count = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)
    if count != 1:
        return f"the old text occurs {count} times in {mutant.file}, not once"
    return "the new text is the old one" if mutant.old == mutant.new else None


def line_of(area: str, mutant: Mutant) -> str:
    """The mutant in one line."""
    old, new = (" ".join(text.split()) or "(nothing)" for text in (mutant.old, mutant.new))
    return f"{area}: {mutant.file}: {old} -> {new} [{mutant.test.partition('::')[2] or mutant.test}]"


def try_all(chosen: dict[str, list[Mutant]], num_workers: int) -> int:
    """Run the tests without mutants, then with each; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder, ThreadPoolExecutor(num_workers) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for worker in range(num_workers):
            copies.put(Copy(Path(folder, str(worker))))

        def on_a_copy(action: Callable[[Copy], str]) -> str:
            copy = copies.get()
            try:
                return action(copy)
            finally:
                copies.put(copy)

        checks = [partial(Copy.check_whole, area=area, mutants=mutants) for area, mutants in chosen.items()]
        if red := "\n".join(filter(None, pool.map(on_a_copy, checks))):
            print(red)
            return 1
        listed = [(area, mutant) for area, mutants in chosen.items() for mutant in mutants]
        attempts = [partial(Copy.try_mutant, mutant=mutant) for _, mutant in listed]
        num_caught = 0
        for (area, mutant), result in zip(listed, pool.map(on_a_copy, attempts), strict=True):
            num_caught += result.startswith("caught")
            print(f"{result:9} {line_of(area, mutant)}", flush=True)
    print(f"{num_caught} of {len(listed)} mutants caught")
    return 0 if num_caught == len(listed) else 1


def main() -> int:
    """Parse the command line and try the mutants."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--area", action="append", choices=MUTANTS, help="try this area alone; repeatable")
    parser.add_argument("--workers", type=int, default=2, help="mutants tried at the same time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    options = parser.parse_args()
    chosen = {area: mutants for area, mutants in MUTANTS.items() if area in (options.area or MUTANTS)}
    listed = [(area, mutant) for area, mutants in chosen.items() for mutant in mutants]
    if options.list:
        print("\n".join(line_of(area, mutant) for area, mutant in listed))
        return 0
    unusable = [
        f"unusable ({found}) {line_of(area, mutant)}" for area, mutant in listed if (found := problem_of(mutant))
    ]
    if unusable:
        print("\n".join(unusable))
        return 1
    return try_all(chosen, options.workers)


if __name__ == "__main__":
    sys.exit(main())
