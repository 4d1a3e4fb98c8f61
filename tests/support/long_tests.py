"""What `make test` leaves to `make test-slow`, by what it takes; CI runs both."""

# By file, how names of tests begin (the first that fits counts): what takes long, beside others that fail for the same reasons.
# After a colon, how many of a test's cases stay, the first ones.
LEFT = {
    "tools/cli/test_eval": "two_ranks_share_drawn",
    "core/cli/test_every_key": "every_key_of_the save_sec_sums_the the_parts_of_the",
    "lab/cli/test_losses": "losses_are_trained_on:1 what_does_not_fit:6",
    "core/cli/test_own_parts": "a_failure_is_told",
    "tools/cli/test_shipped_configs": "what_a_shipped_config:2",
    "core/cli/test_untrusted_runs": "a_run_whose_names damage_of_one_run:2 reading_verbs_neither_wait:4",
    "core/cli/test_program": "every_way_to_launch:1",
    "tools/cli/test_report": "the_charts_show_the",
    "tools/cli/test_slow_data": "the_slow_source_and:2",
    "core/cli/test_stalled_run": "a_run_that_works",
    "cuda/test_compiled": "a_compiled_run_is",
    "cuda/test_cuda_graph": "a_replayed_run_is:1",
    "cuda/test_parts": "states_and_counts_are:3",
    "core/distributed/test_data_change": "a_source_of_weight a_file_that_is:1",
    "core/distributed/test_data_shards": "another_number_of_shards two_and_four_ranks:1",
    "core/distributed/test_exhausted": "a_rank_that_had a_run_that_had",
    "core/distributed/test_families": "a_run_resumes_bit:1",
    "core/distributed/test_full_rows": "an_epoch_has_the:1",
    "core/distributed/test_length_in_tokens": "the_tokens_of_skipped",
    "core/distributed/test_replicas": "a_weight_of_one:1",
    "core/distributed/test_resume": "a_run_on_fewer a_stopped_run_resumes:1 a_save_by_time",
    "core/distributed/test_same_numbers": "no_number_depends_on:1",
    "core/distributed/test_stdout": "a_pipe_that_nobody",
    "core/distributed/test_strategies": "a_stop_of_one",
    "lab/data/test_tokenize": "one_process_tokenizes_for",
    "core/faults/test_config_fuzz": "no_senseless_value_of",
    "golden/test_golden_runs": "run_is_the_golden:11",
    "core/properties/test_current_noise_scale": "the_interval_covers_the the_window_grows_with",
    "core/properties/test_data_mixing": "an_epoch_reads_every:3",
    "core/properties/test_data_pool": "weighted_picks_of_a:1",
    "core/properties/test_data_schedule": "shares_of_20000_picks:1",
    "core/properties/test_ledger_oracle": "ledger_equals_the_oracle:1",
    "core/properties/test_noise_scale_coverage": "the_interval_covers_the",
    "science/test_diagnosis_calibration": "a_fault_is_found:8 a_few_healthy_runs short_real_runs_raise",
    "science/test_key_recall": "a_stale_threshold_that carrying_is_worth_what",
    "science/test_noise_scale_jumps": "at_most_one_bound",
    "scripts/test_scripts": "check_refuses_hugging_face",
    "scripts/test_gpu_harness": "a_hang_is_killed",
    "lab/contracts/test_check_model": "a_model_has_the:20 an_honest_model_is_judged:5",
    "core/metrics/test_noise_scale": "estimates_are_unbiased:4",
    "lab/model/test_families": "a_family_keeps_the:1",
    "lab/model/test_flash_linear_attention": "outputs_states_and_gradients:3",
    "core/model/test_fused_scan": "states_and_gradients_equal:2 the_layer_runs_on:1",
    "lab/model/test_hugging_face": "the_reopened_model_computes:3",
    "lab/objective/test_chunked": "under_bf16_gradients_are:1",
    "lab/training/test_depth": "every_number_is_that:1",
    "core/training/test_evaluation": "over_draws_the_loss",
    "core/training/test_no_waiting": "a_step_reads_nothing:2",
    "core/training/test_one_step_late": "the_numbers_are_those:4",
    "tools/training/test_doubts": "check_says_the_memory",
    "core/training/test_stops": "a_stop_at_any:1 a_resumed_run:1",
}


def is_left(file: str, name: str, number: int) -> bool:
    """Whether a case of a test is left to `make test-slow`; `number`: cases of it before, as pytest orders them."""
    for each in LEFT.get(file.removesuffix(".py"), "").split():
        begin, _, stay = each.partition(":")
        if name.startswith(f"test_{begin}"):
            return number >= int(stay or 0)
    return False
