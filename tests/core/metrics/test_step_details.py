"""What a logged step collects beside its loss, from batches whose extras are not what they should be."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from trainer.data.loader import MicroBatch
from trainer.metrics.best_effort import BestEffort, Diagnostics
from trainer.objective import Objective
from trainer.training.core_extensions import StepDetails

TARGETS = torch.tensor([[1, 2, -100], [0, -100, -100]])
LOGITS = torch.tensor([[[0.0, 2.0, 0.0]] * 3, [[3.0, 0.0, 1.0]] * 3], dtype=torch.float64)


def collected(extras: dict[str, Any], logits: torch.Tensor = LOGITS) -> tuple[dict[str, float], list[BestEffort]]:
    """The means of one micro-batch with these extras, and the two guards."""
    diagnostics = Diagnostics()
    names = {"token_types": ("x", "y"), "sources": ("left", "right"), "modalities": ("text",)}
    details = StepDetails(("token_ce",), **names, diagnostics=diagnostics)
    details.micro_done(MicroBatch({}, TARGETS, None, extras), Objective()(logits, TARGETS))
    sums = details.drain_metrics()
    assert sums.keys() <= set(details.metric_keys)
    assert details.drain_metrics() == {}
    guards = [diagnostics.best_effort(name) for name in ("token_type", "per_source")]
    return {key: float(value.total / value.weight) for key, value in sums.items() if float(value.weight)}, guards


def test_losses_by_source_and_modality_are_those_of_their_rows():
    ce = -LOGITS.log_softmax(-1)
    values, _ = collected({"dataset_labels": ["left", "right"], "dataset_segments": ["text", "text"]})
    assert values["source/left/loss"] == pytest.approx(float(ce[0, 0, 1] + ce[0, 1, 2]) / 2)
    assert values["source/right/loss"] == pytest.approx(float(ce[1, 0, 0]))
    assert values["modality/text/loss"] == pytest.approx(values["loss"])
    assert values["accuracy"] == pytest.approx(2 / 3)
    segments = {"dataset_labels": ("left", "right"), "segment_ids": [[-1, 0, 0], [1, 1, 1]]}
    values, _ = collected(segments, torch.where(LOGITS == 3.0, -torch.inf, LOGITS))  # the right one is infinite
    assert values["source/left/loss"] == pytest.approx(float(ce[0, 1, 2]))


@pytest.mark.parametrize("types", [[[0, 1, 0], [1, 1, 1]], [[0, 1, -1], [1, -1, -1]]])
def test_masked_targets_have_no_token_type(types):
    """As -1, or typed all the same: neither changes a mean."""
    values, _ = collected({"token_types": torch.tensor(types, dtype=torch.int8)})
    ce = -LOGITS.log_softmax(-1)
    assert values["token_type/x/loss"] == pytest.approx(float(ce[0, 0, 1]))
    assert values["token_type/y/loss"] == pytest.approx(float(ce[0, 1, 2] + ce[1, 0, 0]) / 2)
    assert (values["token_type/x/accuracy"], values["token_type/y/accuracy"]) == (1.0, 0.5)


def test_a_label_that_is_not_known_is_left_out_and_the_others_stay():
    values, guards = collected({"dataset_labels": ["left", "made up"], "dataset_segments": ["text", "made up"]})
    assert {key for key in values if "/loss" in key} == {"source/left/loss", "modality/text/loss"}
    assert all(guard.enabled for guard in guards)


@pytest.mark.parametrize(
    ("extras", "guard"),
    [
        ({"dataset_labels": ["left"]}, 1),
        ({"token_types": torch.zeros(2, 2, dtype=torch.int8)}, 0),
    ],
)
def test_extras_of_another_length_skip_the_batch(extras, guard, capsys):
    values, guards = collected(extras)
    assert {"loss", "accuracy", "objective/token_ce"} <= values.keys()
    failed = "token_type/" if "token_types" in extras else ("source/", "modality/")
    assert not any(key.startswith(failed) for key in values)
    assert guards[guard].num_skipped == 1
    assert all(g.enabled for g in guards)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("extras", "guard"), [({"dataset_labels": 7}, 1), ({"token_types": "text"}, 0)])
def test_extras_of_another_kind_cost_their_diagnostic_alone(extras, guard, capsys):
    values, guards = collected({"dataset_segments": ["text", "text"], **extras})
    assert {"loss", "accuracy", "objective/token_ce"} <= values.keys()
    assert [g.enabled for g in guards] == [guard != 0, guard != 1]
    assert capsys.readouterr().err.count("WARNING") == 1


def test_a_stop_is_not_held_back_by_a_guard():
    with pytest.raises(SystemExit):
        BestEffort("x").run(Mock(side_effect=SystemExit))
