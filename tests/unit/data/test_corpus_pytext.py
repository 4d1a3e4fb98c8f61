"""The corpus that every installation has; a small build reads the real packages."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from trainer.tools.corpus.builders import build_pytext

CAPS = {"python": 6_000_000, "cpp": 8_000_000, "prose": 3_000_000}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("pytext") / "corpus"
    return out, build_pytext(out, max_bytes=CAPS)


def test_documents_are_whole_files_that_appear_once_below_the_caps(built):
    out, manifest = built
    found = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.jsonl"))
    assert found == sorted(entry.path for entries in manifest.modalities.values() for entry in entries)
    assert list(manifest.modalities) == ["python", "cpp", "prose"]
    assert {"python/stdlib.jsonl", "python/stdlib.asyncio.jsonl", "prose/python.topics.jsonl"} <= set(found)
    for name, entries in manifest.modalities.items():
        assert 0.5 * CAPS[name] < manifest.totals(name)["text_bytes"] <= CAPS[name]
        assert len(entries) >= 4
        assert min(entry.text_bytes for entry in entries) > 32_000
        rows = [json.loads(line) for path in (out / name).glob("*.jsonl") for line in path.open(encoding="utf-8")]
        assert len({row["text"] for row in rows}) == len(rows) == manifest.totals(name)["documents"]
        assert {tuple(row) for row in rows} == {("text", "source")}
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    row = json.loads((out / "python/stdlib.asyncio.jsonl").open(encoding="utf-8").readline())
    assert row["text"] == (stdlib / row["source"].removeprefix("stdlib/")).read_bytes().decode()


def test_the_same_installation_gives_the_same_bytes_and_no_path_of_the_machine_gets_in(built, tmp_path):
    out, manifest = built
    seen = []
    again = build_pytext(tmp_path / "again", max_bytes=CAPS, progress=lambda *args: seen.append(args))
    assert again == manifest
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (out / "manifest.json").read_bytes()
    assert all(0 <= done <= total for done, total, _ in seen)
    forbidden = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")] + [str(out)]
    for path in out.rglob("*.json*"):
        content = path.read_text(encoding="utf-8")
        assert not any(word in content for word in forbidden), path
