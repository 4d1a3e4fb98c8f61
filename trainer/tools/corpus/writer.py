"""Writes a corpus (JSON lines and `manifest.json`) beside its place, and renames it at the end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainer.errors import UserError
from trainer.files import read_json, replacing, write_file
from trainer.metrics.logger import Report, silent
from trainer.tools.corpus.documents import Document, Skipped, Streams

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class StreamEntry:
    path: str  # relative to the corpus, with forward slashes
    documents: int
    text_bytes: int  # UTF-8 bytes of the texts
    file_bytes: int
    sha256: str  # of the file


@dataclass(frozen=True)
class Manifest:
    """A whole corpus, without times or paths of the machine: equal inputs give equal manifests."""

    builder: str
    inputs_sha256: str  # of the options and of every document: position and content
    rules: Mapping[str, str]  # how documents were chosen, in words, with the numbers used
    modalities: Mapping[str, tuple[StreamEntry, ...]]
    skipped: tuple[Skipped, ...] = ()
    format_version: int = field(default=FORMAT_VERSION)

    @property
    def entries(self) -> dict[str, StreamEntry]:
        """All streams by their path."""
        return {entry.path: entry for entries in self.modalities.values() for entry in entries}

    def totals(self, modality: str | None = None) -> dict[str, int]:
        """Streams, documents, text_bytes and file_bytes of one modality, or of all."""
        chosen = tuple(self.entries.values())
        if modality is not None:
            chosen = self.modalities[modality]
        names = ("documents", "text_bytes", "file_bytes")
        sums = {name: sum(getattr(entry, name) for entry in chosen) for name in names}
        return {"streams": len(chosen), **sums}

    def to_json(self) -> str:
        content = {
            "format_version": self.format_version,
            "builder": self.builder,
            "inputs_sha256": self.inputs_sha256,
            "rules": dict(self.rules),
            "totals": self.totals(),
            "modalities": {
                name: {"totals": self.totals(name), "streams": [asdict(entry) for entry in entries]}
                for name, entries in self.modalities.items()
            },
            "skipped": [asdict(item) for item in self.skipped],
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a corpus.
    Raises UserError: it is missing, damaged, or of another format version."""
    file = directory / MANIFEST_NAME
    try:
        content = read_json(file)
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version is {content['format_version']}")
        return Manifest(
            builder=content["builder"],
            inputs_sha256=content["inputs_sha256"],
            rules=content["rules"],
            modalities={
                name: tuple(StreamEntry(**entry) for entry in modality["streams"])
                for name, modality in content["modalities"].items()
            },
            skipped=tuple(Skipped(**item) for item in content["skipped"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"is not a corpus's manifest ({error!r})"
        raise UserError(str(file), problem, "build the corpus again") from None


def write_corpus(
    out: Path,
    modalities: Mapping[str, Streams],
    *,
    builder: str,
    rules: Mapping[str, str],
    skipped: Sequence[Skipped],
    force: bool,
    progress: Report = silent,
) -> Manifest:
    """Write `out/<modality>/<stream>.jsonl`, one document per line, and the manifest.

    An `out` that is complete and was built from the same inputs is left untouched, unless `force`.

    Raises:
        UserError: `out` holds something else and `force` is not given, or it holds files that no
            builder wrote; or a file changed meanwhile.
    """
    digest = _inputs_digest(modalities, builder, rules)
    if out.exists() and any(out.iterdir()):
        existing = _existing(out)
        if not force:
            if existing.inputs_sha256 == digest and _is_whole(out, existing):
                return existing
            fix = "use another directory, or --force to replace it"
            raise UserError(str(out), "holds another corpus", fix)
        _refuse_others(out, {MANIFEST_NAME, *existing.entries})
    total = sum(len(documents) for streams in modalities.values() for documents in streams.values())
    with _replaced(out) as directory:
        done = 0
        entries: dict[str, tuple[StreamEntry, ...]] = {}
        for modality, streams in modalities.items():
            (directory / modality).mkdir()
            written = []
            for stream, documents in streams.items():
                progress(done, total, f"writing {modality}/{stream}")
                written.append(_write_stream(directory, f"{modality}/{stream}.jsonl", documents))
                done += len(documents)
            entries[modality] = tuple(written)
        manifest = Manifest(builder, digest, dict(rules), entries, tuple(skipped))
        write_file(directory / MANIFEST_NAME, manifest.to_json())
    progress(total, total, "done")
    return manifest


def _inputs_digest(modalities: Mapping[str, Streams], builder: str, rules: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps([builder, dict(rules)], sort_keys=True).encode())
    for modality, streams in modalities.items():
        for stream, documents in streams.items():
            for document in documents:
                line = json.dumps([modality, stream, document.source, document.digest])
                digest.update(line.encode())
    return digest.hexdigest()


def _existing(out: Path) -> Manifest:
    try:
        return read_manifest(out)
    except UserError:
        fix = "name a new directory for the corpus"
        raise UserError(str(out), "is not empty and holds no corpus", fix) from None


def _refuse_others(out: Path, ours: Collection[str]) -> None:
    """Refuse a directory with files that would be lost with the corpus."""
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if not (path.is_dir() or name in ours or path.name.startswith(".")):
            problem = f"holds {name}, which is no part of the corpus"
            raise UserError(str(out), problem, "move it away, or name another directory")


def _is_whole(out: Path, manifest: Manifest) -> bool:
    """Whether every stream has its size; contents are not checked."""
    entries = manifest.entries.values()
    return all((out / e.path).is_file() and (out / e.path).stat().st_size == e.file_bytes for e in entries)


def _write_stream(directory: Path, path: str, documents: Sequence[Document]) -> StreamEntry:
    digest = hashlib.sha256()
    file_bytes = 0
    # The whole corpus is synced with its manifest, last.
    with replacing(directory / path, sync=False) as file:
        for document in documents:
            text = document.text()
            # The text was left on disk since it was checked.
            if hashlib.sha256(text.encode("utf-8")).hexdigest() != document.digest:
                raise UserError(document.source, "changed while the corpus was built", "build it again")
            row = json.dumps({"text": text, "source": document.source}, ensure_ascii=False)
            line = row.encode("utf-8") + b"\n"
            file.write(line)
            digest.update(line)
            file_bytes += len(line)
    text_bytes = sum(document.num_bytes for document in documents)
    return StreamEntry(path, len(documents), text_bytes, file_bytes, digest.hexdigest())


@contextlib.contextmanager
def _replaced(out: Path) -> Iterator[Path]:
    """A new directory that replaces `out` at the end; on any failure `out` is unchanged."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        new, old = Path(work, "new"), Path(work, "old")
        new.mkdir()
        yield new
        # Two renames: for a moment there is no corpus, but never half of one.
        if out.exists():
            out.rename(old)
        try:
            new.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
