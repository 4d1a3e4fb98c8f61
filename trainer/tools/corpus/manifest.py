"""`manifest.json`: the contents of a corpus on disk, without times or paths of the machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import read_json

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
SAME_TEXT = "the same text as "
"""How the reason of a skipped copy begins; the file that is used follows."""


@dataclass(frozen=True)
class StreamEntry:
    """One stream file."""

    path: str
    """Relative to the corpus, with forward slashes."""
    documents: int
    text_bytes: int
    """UTF-8 bytes of the texts."""
    file_bytes: int
    sha256: str
    """Of the file."""


@dataclass(frozen=True)
class Skipped:
    """A candidate that was not used, and why."""

    source: str
    reason: str

    @property
    def is_copy(self) -> bool:
        """Whether nothing is lost: another file has the same text."""
        return self.reason.startswith(SAME_TEXT)


@dataclass(frozen=True)
class Manifest:
    """A whole corpus. Equal inputs and options give an equal manifest and equal files."""

    builder: str
    inputs_sha256: str
    """Of the options and of every document: position and content."""
    rules: Mapping[str, str]
    """How documents were chosen, in words, with the numbers used."""
    modalities: Mapping[str, tuple[StreamEntry, ...]]
    skipped: tuple[Skipped, ...] = ()
    format_version: int = field(default=FORMAT_VERSION)

    def totals(self, modality: str | None = None) -> dict[str, int]:
        """Streams, documents, text_bytes and file_bytes of one modality, or of all."""
        chosen = [entry for name, entries in self.modalities.items() if modality in (None, name) for entry in entries]
        return {
            "streams": len(chosen),
            "documents": sum(entry.documents for entry in chosen),
            "text_bytes": sum(entry.text_bytes for entry in chosen),
            "file_bytes": sum(entry.file_bytes for entry in chosen),
        }

    def to_json(self) -> str:
        """The text of `manifest.json`."""
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


def read_manifest(path: Path) -> Manifest:
    """The manifest of a corpus directory, or of a `manifest.json`.

    Raises:
        UserError: missing, damaged, or of another format version.
    """
    file = path / MANIFEST_NAME if path.is_dir() else path
    try:
        content = read_json(file)
    except FileNotFoundError:
        raise UserError(str(file), "there is no corpus here", "build one with `train data build`") from None
    except (OSError, ValueError) as error:
        raise UserError(str(file), f"cannot be read as JSON ({error})", "build the corpus again") from None
    if (found := content.get("format_version")) != FORMAT_VERSION:
        raise UserError(str(file), f"format_version must be {FORMAT_VERSION}, got {found}", "build the corpus again")
    try:
        return _from_json(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(str(file), f"is damaged: {error!r}", "build the corpus again") from None


def _from_json(content: dict[str, Any]) -> Manifest:
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
