"""The wall: one table of the core names `trainer.lab` and `trainer.tools`, and a run needs neither."""

import re
import sys

import pytest

from tests.support.in_process import train_here
from tests.support.runs import FULL_ROWS, ROOT, fresh, overrides, write_tiny_config
from trainer.errors import UserError
from trainer.training import NO_PARTS

PACKAGE = ROOT / "trainer"
TABLE = PACKAGE / "cli" / "parts.py"
NAMED = re.compile(r"trainer[./](lab|tools)\b|(from|import) (trainer|\.+)(.* import)? *(lab|tools)\b")
# The program's verbs, whose options it has to know, and what they import; a run takes none of them.
OF_THE_PROGRAM = re.compile(r"trainer\.tools(\.verbs(\.\w+)?)?")
# The tools that every run is given, and what they import.
GIVEN = {"trainer.lab", "trainer.lab.moments"} | {
    f"trainer.tools.{name}" for name in ("doubts", "evaluation_sample", "limits", "services", "summary")
}
EVALUATED = ("eval.every=2", "eval.depth=false", "eval.holdout_fraction=0.2", "train.steps=4")
LISTED = """
import sys
from trainer.training.extension import Extension

class Listed(Extension):
    def closed(self):
        with open(f"modules.{self.run.info.rank}", "w") as file:
            file.write("\\n".join(sys.modules))
"""


def test_no_file_of_the_core_but_one_names_what_is_around_it():
    core = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("lab", "tools")]
    assert [path for path in core if NAMED.search(path.read_text(encoding="utf-8"))] == [TABLE]


def test_the_smoke_run_imports_nothing_of_the_lab_on_any_rank(tmp_path):
    write_tiny_config(tmp_path)
    (tmp_path / "listed.py").write_text(LISTED)
    sources = ", ".join(f'{{name="{each}",root="corpus",modalities=["{each}"]}}' for each in "ab")
    words = (*EVALUATED, f"data.source=[{sources}]", "data.seq_len=16", 'extension=[{target="listed:Listed"}]')
    command = f"-m trainer --nproc 2 --config {ROOT}/train_configs/smoke.toml --run-dir run --stdout off".split()
    done = fresh([sys.executable, *command, *overrides(*words)], cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    for rank in "01":
        imported = re.findall(r"^trainer\.(?:lab|tools).*", (tmp_path / f"modules.{rank}").read_text(), re.MULTILINE)
        assert not [name for name in imported if not OF_THE_PROGRAM.fullmatch(name) and name not in GIVEN]


NEEDS_A_PART = """
    metrics.per_layer=true metrics.profile=1 metrics.tensorboard=true train.spike_sigma=6 sample.every=2 optimizer.name=muon
    model.family=transformer objective.chunk_tokens=8 train.activation_checkpointing=block checkpoint.remote=memory://runs
    data.mixing.batching_mode=per_stream
""".split()  # noqa: SIM905 - as on a command line


def test_a_run_without_parts_trains_and_a_setting_that_needs_one_is_refused_by_its_key(tmp_path):
    config = write_tiny_config(tmp_path)
    train_here(config, tmp_path / "run", FULL_ROWS, parts=NO_PARTS)
    for setting in NEEDS_A_PART:
        with pytest.raises(UserError, match=rf"^{setting.partition('=')[0]}: the run was given no such part; do with"):
            train_here(config, tmp_path / "refused", FULL_ROWS, setting, parts=NO_PARTS)
