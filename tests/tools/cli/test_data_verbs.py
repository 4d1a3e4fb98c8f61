"""What makes corpora."""

from __future__ import annotations

from tests.support.in_process import program


def test_an_output_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    for out in ("loop/new", "file/new", "/dev/full", "n" * 300):
        ended = program(("data", "synth", "key-recall", "--streams", "1", "--out", out), capsys)
        assert ended.mistake.startswith(f"{out}: ")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


def test_skipped_files_are_counted_with_examples(tmp_path, capsys):
    for number in range(50):
        (tmp_path / f"a{number:02d}.txt").write_text("the same")
    build = ["data", "build", "text", "--out", tmp_path / "out", "--modality", f"m={tmp_path}/*.txt"]
    line = program(build, capsys).stderr.splitlines()[0]
    assert line.startswith("skipped 49 files: m/a01.txt (a copy: of a00.txt), m/a02.txt (")
    assert line.endswith(" and 46 more; see manifest.json")
