"""The wall: one table of the core names `trainer.lab` and `trainer.tools`, and a run needs neither."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.runs import ROOT, environment, losses, write_tiny_config

PACKAGE = ROOT / "trainer"
TABLE = PACKAGE / "cli" / "parts.py"
NAMED = re.compile(r"trainer[./](lab|tools)\b|(from|import) (trainer|\.+)(.* import)? *(lab|tools)\b")
# The program's verbs, whose options it has to know, and what they import; a run takes none of them.
OF_THE_PROGRAM = re.compile(r"trainer\.tools(\.verbs(\.\w+)?)?")
# The tools that every run is given.
GIVEN = {f"trainer.tools.{name}" for name in ("doubts", "evaluation_sample", "limits", "summary")}
EVALUATED = ("eval.every=2", "eval.holdout_fraction=0.2", "train.steps=4")
# What each asks for that only the lab has, and the name of it.
ASKED = {
    "train.spike_sigma=4": "spikes",
    "model.family=gated_delta": "gated_delta",
    'checkpoint.remote="memory://run"': "checkpoints in a store",
}
LISTED = """
import sys
from trainer.training.extension import Extension

class Listed(Extension):
    def closed(self):
        with open(f"modules.{self.run.info.rank}", "w") as file:
            file.write("\\n".join(sys.modules))
"""
WITH_LAB = ("check --config tiny.toml", "doctor --model a.b:c", "data at run 2")
WITH_LAB += ("sample run", "data tokenize corpus --out o --tokenizer bytes")


def launched(directory: Path, *arguments: str, package: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command, made = [sys.executable, *arguments], environment({"PYTHONPATH": str(package)})
    return subprocess.run(command, env=made, cwd=directory, capture_output=True, text=True, check=False)


def trained(directory: Path, *runs: tuple[str, ...], before: str = "") -> tuple[list[int], str]:
    """Exit codes of runs in one new process, and its messages."""
    config = write_tiny_config(directory)
    lines = []
    for number, sets in enumerate(runs):
        words = [word for each in (*EVALUATED, *sets) for word in ("--set", each)]
        lines += [f"train --config {config} --stdout off --run-dir {directory}/{number}".split() + words]
    code = f"""
import json, sys
{before}
from trainer.cli.main import run
codes = []
for sys.argv in {lines}:
    try:
        run()
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps(codes))
"""
    done = launched(directory, "-c", code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_no_file_of_the_core_but_one_names_what_is_around_it():
    core = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("lab", "tools")]
    assert [path for path in core if NAMED.search(path.read_text(encoding="utf-8"))] == [TABLE]


def test_the_smoke_run_imports_nothing_of_the_lab_on_any_rank(tmp_path):
    write_tiny_config(tmp_path)
    (tmp_path / "listed.py").write_text(LISTED)
    sources = ", ".join(f'{{name="{each}",root="corpus",modalities=["{each}"]}}' for each in "ab")
    words = (*EVALUATED, f"data.source=[{sources}]", "data.seq_len=16", 'extension=[{target="listed:Listed"}]')
    command = f"-m trainer --nproc 2 --config {ROOT}/train_configs/smoke.toml --run-dir run --stdout off".split()
    done = launched(tmp_path, *command, *(word for each in words for word in ("--set", each)))
    assert done.returncode == 0, done.stderr
    for rank in "01":
        imported = re.findall(r"^trainer\.(?:lab|tools).*", (tmp_path / f"modules.{rank}").read_text(), re.MULTILINE)
        assert not [name for name in imported if not OF_THE_PROGRAM.fullmatch(name) and name not in GIVEN]


def test_verbs_that_need_the_lab_refuse_without_it_and_others_do_not(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "trainer", ignore=shutil.ignore_patterns("lab", "__pycache__"))
    write_tiny_config(tmp_path)
    others = ["ls .", "report run", "init corpus"]
    lines = ["--config tiny.toml --run-dir run --set checkpoint.every=3", *WITH_LAB, *others]
    # An installation of this package that can be edited finds the modules that are missing in the copy.
    code = f"""
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
from trainer.cli.main import run
for line in {lines}:
    sys.argv = ["train", *line.split()]
    try:
        run()
    except SystemExit as end:
        print("exit", end.code)
"""
    done = launched(tmp_path, "-c", code, package=tmp_path)
    codes = [line for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert codes == ["exit 0"] + ["exit 2"] * len(WITH_LAB) + ["exit 0"] * len(others), done.stderr
    for line in WITH_LAB:
        assert f"train {line.split()[0]}: trainer.lab is not installed" in done.stderr, line


def test_without_the_lab_a_run_trains_alike_and_refuses_what_is_asked_for(tmp_path):
    (tmp_path / "with").mkdir()
    (code,), said = trained(tmp_path / "with", ())
    assert code == 0, said
    runs = ((), *((each,) for each in ASKED))
    codes, said = trained(tmp_path, *runs, before='sys.modules["trainer.lab"] = None')
    assert codes == [0] + [2] * len(ASKED), said
    for setting, name in ASKED.items():
        assert f'{setting.partition("=")[0]}: needs "{name}": trainer.lab is not installed' in said, setting
    with_lab, without = (losses(folder / "0" / "metrics.jsonl") for folder in (tmp_path / "with", tmp_path))
    assert without == with_lab
