"""A corpus available on every installation: Python, C++ and prose from the running interpreter and its packages.

For smoke runs, tests and benchmarks without a download. The same installation gives the same bytes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path
from pydoc_data import topics
from typing import cast

from trainer.errors import UserError
from trainer.metrics.progress_bar import Report
from trainer.tools.corpus.documents import Candidate, check_all
from trainer.tools.corpus.manifest import Manifest, Skipped
from trainer.tools.corpus.selection import MIN_STREAM_BYTES, Streams, cap_evenly, group_by_directory
from trainer.tools.corpus.writer import write_corpus

MAX_BYTES: Mapping[str, int] = {"python": 18_000_000, "cpp": 10_000_000, "prose": 5_000_000}
_MAX_FILE_BYTES = 2_000_000
_KEY = "train data build pytext"
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "pydoc_data"}  # pydoc_data is the prose modality's
_LICENCE_WORDS = ("LICENSE", "LICENCE", "COPYING", "NOTICE")
_OWN_DISTRIBUTION = "trainer"


def build_pytext(
    out: Path,
    *,
    max_bytes: Mapping[str, int] | None = None,
    force: bool = False,
    progress: Report | None = None,
) -> Manifest:
    """Build the corpus at `out/{python,cpp,prose}/<stream>.jsonl`.

    - python: `.py` files of the standard library and of numpy;
    - cpp: the C++ and CUDA headers in torch's package;
    - prose: descriptions and licences of the installed distributions, and the language reference behind `help()`.

    Args:
        out: the corpus directory; see `write_corpus` for what may be there already.
        max_bytes: modality -> cap on its text, instead of `MAX_BYTES`; see `cap_evenly`.
        force: replace another corpus in `out`.
        progress: gets (done, total, what).

    Raises:
        UserError: numpy or torch's headers are missing, or `max_bytes` names an unknown modality.
    """
    caps = {**MAX_BYTES, **(max_bytes or {})}
    for name in caps:
        if name not in MAX_BYTES:
            raise UserError(_KEY, f"there is no modality {name!r}", f"the modalities are {', '.join(MAX_BYTES)}")
    stdlib, numpy, headers = _roots()
    sources = {"python": lambda: _python(stdlib, numpy), "cpp": lambda: _cpp(headers), "prose": _prose}
    forbidden = sorted({str(stdlib), str(numpy.parent)})
    modalities: dict[str, Streams] = {}
    skipped: list[Skipped] = []
    for name, find in sources.items():
        documents, refused = check_all(
            find(), what=name, max_bytes=_MAX_FILE_BYTES, forbidden=forbidden, progress=progress
        )
        modalities[name] = cap_evenly(
            group_by_directory(documents, min_bytes=MIN_STREAM_BYTES), caps[name], min_bytes=MIN_STREAM_BYTES
        )
        skipped.extend(refused)
    return write_corpus(
        out, modalities, builder="pytext", rules=_rules(caps), skipped=skipped, force=force, progress=progress
    )


def _rules(caps: Mapping[str, int]) -> dict[str, str]:
    return {
        "streams": f"a directory is a stream; one with less than {MIN_STREAM_BYTES} bytes of text joins its parent",
        "cap": "bytes of text: " + ", ".join(f"{name} {cap}" for name, cap in caps.items()) + "; even shares per "
        "stream, within one by the order of the SHA-256 of the source",
        "files": f"larger than {_MAX_FILE_BYTES} bytes, empty, binary and not UTF-8 are skipped; duplicates once",
    }


def _roots() -> tuple[Path, Path, Path]:
    """The standard library, numpy's package, and torch's headers; nothing is imported."""
    numpy, torch = _package("numpy"), _package("torch")
    headers = torch / "include"
    if not headers.is_dir():
        raise UserError(_KEY, "torch's package has no include directory", "install torch from its wheel")
    return Path(sysconfig.get_paths()["stdlib"]), numpy, headers


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(_KEY, f"{name} is not installed for this interpreter", f"pip install {name}")
    return Path(next(iter(spec.submodule_search_locations)))


def _walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Files below `root` with their relative paths."""
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _NOT_SOURCES)
        for file in sorted(files):
            if file.endswith(suffixes):
                path = Path(directory, file)
                yield path, path.relative_to(root).as_posix()


def _python(stdlib: Path, numpy: Path) -> Iterator[Candidate]:
    for path, relative in _walk(stdlib, (".py",)):
        yield Candidate(f"stdlib/{relative}", path)
    for path, relative in _walk(numpy, (".py",)):
        yield Candidate(f"numpy/{relative}", path)


def _cpp(headers: Path) -> Iterator[Candidate]:
    for path, relative in _walk(headers, (".h", ".hpp", ".cuh")):
        yield Candidate(relative, path)


def _prose() -> Iterator[Candidate]:
    for topic, text in topics.topics.items():
        yield Candidate(f"python/topics/{topic}", text)
    seen = {_OWN_DISTRIBUTION}  # ours would change the corpus with every commit
    for distribution in importlib.metadata.distributions():
        metadata = cast(Message, distribution.metadata)
        name = str(metadata["Name"]).lower()
        if name not in seen:  # of two installed versions, the one that imports find
            seen.add(name)
            yield Candidate(f"{name}/METADATA", str(metadata.get_payload() or metadata["Description"] or ""))
            yield from _licences(name, distribution)


def _licences(name: str, distribution: importlib.metadata.Distribution) -> Iterator[Candidate]:
    for file in distribution.files or []:
        is_text = file.suffix.lower() in ("", ".txt", ".md", ".rst")
        if is_text and any(word in file.name.upper() for word in _LICENCE_WORDS):
            _, _, inside = file.as_posix().rpartition(".dist-info/")  # whose name has the version in it
            yield Candidate(f"{name}/{inside}", Path(str(file.locate())))
