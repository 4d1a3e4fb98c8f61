"""The wall: one table of the core names `trainer.lab` and `trainer.tools`, and a run needs neither."""

import re
import sys

from tests.support.runs import ROOT, fresh, overrides, write_tiny_config

PACKAGE = ROOT / "trainer"
TABLE = PACKAGE / "cli" / "parts.py"
NAMED = re.compile(r"trainer[./](lab|tools)\b|(from|import) (trainer|\.+)(.* import)? *(lab|tools)\b")
# The program's verbs, whose options it has to know, and what they import; a run takes none of them.
OF_THE_PROGRAM = re.compile(r"trainer\.tools(\.verbs(\.\w+)?)?")
# The tools that every run is given.
GIVEN = {f"trainer.tools.{name}" for name in ("doubts", "evaluation_sample", "limits", "summary")}
EVALUATED = ("eval.every=2", "eval.holdout_fraction=0.2", "train.steps=4")
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
