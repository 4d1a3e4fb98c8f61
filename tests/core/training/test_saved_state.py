"""A checkpoint that was changed, with a marker that agrees, is refused in one line or restored; nothing raises or hangs."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import file_content, sign, write_content
from tests.support.in_process import plan_of, train_here
from tests.support.runs import write_tiny_config
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.training import checkpoint as files
from trainer.training.build import make_state
from trainer.training.record import check_data
from trainer.training.saved_state import restore
from trainer.training.tensor_files import CheckpointError, TensorFiles, model_file, rank_file, write_part
from trainer.training.train_state import load_optimizer, model_part

ALONE, CPU = RankInfo(), torch.device("cpu")
EXTRA = "[gns]\nenabled = true\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    config_path = write_tiny_config(directory, EXTRA)
    train_here(config_path, directory / "run", "train.steps=2")
    path = directory / "run" / "checkpoints" / "step_00000002"
    parts = {name: file_content(path / name) for name in (model_file(0), rank_file(0))}
    return config_path, path, json.loads((path / files.STATE_FILE).read_text()) | {"evaluation_is_due": True}, parts


def write(path: Path, state: dict[str, Any], parts: dict[str, Any]) -> None:
    """The checkpoint's files, and a marker that agrees with them."""
    for name, value in parts.items():
        write_content(path / name, value)
    (path / files.STATE_FILE).write_text(json.dumps(state))
    sign(path)


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """A copy with something else in a place; without it if that is `...`."""
    found = copied = copy.deepcopy(value)
    for key in place[:-1]:
        found = found[key]
    if new is ...:
        del found[place[-1]]
    else:
        found[place[-1]] = new
    return copied


def resume(config_path: Path, path: Path) -> str:
    """How it ends."""
    try:
        _, state_json = files.find(path.parent, str(path)) or (None, {})
        plan = plan_of(config_path, "gns.enabled=true")
        check_data(plan, state_json, ALONE)
        position = restore(path, state_json, plan, make_state(plan, ALONE, CPU), ALONE)
        assert not position.evaluation_is_due, "there is none in the config"
    except UserError as error:
        return error.message
    return "restored"


@pytest.mark.parametrize(
    ("place", "new"),
    [(("step",), 7), (("tracker", "tokens_seen"), None), (("config",), "x"), (("evaluation_is_due",), 3)],
)
def test_what_state_json_cannot_hold_counts_as_damage_so_that_auto_falls_back(saved, place, new):
    config_path, path, state, parts = saved
    write(path, changed(state, place, new), parts)
    with pytest.raises(CheckpointError, match="is damaged: "):
        files.verify(path)
    assert "--resume" in resume(config_path, path)


@pytest.fixture
def copied(saved, tmp_path):
    """(config, a copy of the checkpoint)."""
    config_path, path, state, parts = saved
    write(path, state, parts)
    return config_path, Path(shutil.copytree(path, tmp_path / path.name))


@pytest.mark.parametrize("name", [files.MARKER, model_file(0)])
@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.timeout(60)
def test_and_what_is_no_plain_file(copied, name, plant):
    config_path, path = copied
    (path / name).unlink()
    plant(path / name)
    with pytest.raises(CheckpointError, match="not a plain file"):
        files.verify(path)
    assert "not a plain file" in resume(config_path, path)


def counting(groups, lr):
    optimizer = torch.optim.AdamW(groups, lr=lr)
    optimizer.register_step_post_hook(lambda own, *_: [g.update(k=1 + g.get("k", 0)) for g in own.param_groups])
    return optimizer


def test_what_a_custom_optimizer_counts_in_its_groups_goes_on_and_its_settings_are_the_config_s(saved, tmp_path):
    own = f"optimizer={{target='{__name__}:counting', weight_decay="
    one, other = (make_state(plan_of(saved[0], f"{own}{decay}}}"), ALONE, CPU) for decay in (0.1, 0.7))
    one.optimizer.step()
    write_part(tmp_path / "model", model_part(one, rank=0))
    load_optimizer(other.optimizer, other.model, TensorFiles([tmp_path / "model"]))
    assert {(each["k"], each["weight_decay"]) for each in other.optimizer.param_groups} == {(1, 0.7), (1, 0.0)}


def test_a_checkpoint_under_another_name_is_one(copied, tmp_path):
    config_path, path = copied
    mine = Path(shutil.copytree(path, tmp_path / "7"))
    (tmp_path / "latest").symlink_to(path)
    assert resume(config_path, mine) == resume(config_path, tmp_path / "latest") == "restored"
