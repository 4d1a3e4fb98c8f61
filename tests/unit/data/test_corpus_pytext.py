"""The corpus that every installation has. One small build is shared; it reads the real packages."""

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


def test_layout_is_modality_then_stream(built):
    out, manifest = built
    found = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.jsonl"))
    assert found == sorted(entry.path for entries in manifest.modalities.values() for entry in entries)
    assert list(manifest.modalities) == ["python", "cpp", "prose"]
    assert {"python/stdlib.jsonl", "python/stdlib.asyncio.jsonl", "prose/python.topics.jsonl"} <= set(found)


def test_caps_hold_and_no_stream_is_tiny(built):
    _, manifest = built
    for name, entries in manifest.modalities.items():
        assert 0.5 * CAPS[name] < manifest.totals(name)["text_bytes"] <= CAPS[name]
        assert len(entries) >= 4
        assert min(entry.text_bytes for entry in entries) > 32_000


def test_documents_are_whole_files_and_appear_once(built):
    out, manifest = built
    for name in manifest.modalities:
        rows = [json.loads(line) for path in (out / name).glob("*.jsonl") for line in path.open(encoding="utf-8")]
        texts = [row["text"] for row in rows]
        assert len(set(texts)) == len(texts) == manifest.totals(name)["documents"]
        assert {tuple(row) for row in rows} == {("text", "source")}
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    row = json.loads((out / "python/stdlib.asyncio.jsonl").open(encoding="utf-8").readline())
    assert row["text"] == (stdlib / row["source"].removeprefix("stdlib/")).read_bytes().decode()


def test_no_path_of_the_machine_gets_in(built):
    out, _ = built
    purelib = sysconfig.get_paths()["purelib"]
    forbidden = [sysconfig.get_paths()["stdlib"], purelib, str(out)]
    for path in out.rglob("*.json*"):
        content = path.read_text(encoding="utf-8")
        assert not any(word in content for word in forbidden), path


def test_the_same_installation_gives_the_same_bytes(built, tmp_path):
    out, manifest = built
    seen: list[tuple[int, int, str]] = []
    again = build_pytext(tmp_path / "again", max_bytes=CAPS, progress=lambda *args: seen.append(args))
    assert again == manifest
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (out / "manifest.json").read_bytes()
    assert all(0 <= done <= total for done, total, _ in seen)
    assert seen[-1][2] == "done"
