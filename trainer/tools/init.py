"""`train init`: look at the user's data, choose sizes and weights from it, and write a config.

The file has the keys that a newcomer is likely to change, explained.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from trainer.arrays import Ints
from trainer.data.formats import is_import_path, takes_option
from trainer.data.groups import held_out
from trainer.data.layout import Discovery, Stream, discover_direct, refuse_unheeded
from trainer.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.files import is_url, write_file
from trainer.lab.storage import Cache, discover_stored
from trainer.metrics.logger import progress_bar
from trainer.tools.corpus.documents import discover, refuse_empty
from trainer.tools.corpus.survey import Guess, describe, guess, look, not_text
from trainer.tools.fitted_table import duration_text
from trainer.wording import counted, few, printable

CELLS_PER_DOCUMENT = 8  # enough for carried state to matter
SEQ_LEN_RANGE = (16, 256)
SHORT_SEQ_LEN = 128  # of documents that are shorter, several of which a row holds
LARGEST_BATCH, LARGEST_POOL = 8, 8
TOKENS_PER_STEP, MOST_MICRO_BATCHES = 4096, 8
STEPS_RANGE = (100, 2000)
HOLDOUT_FRACTIONS = (0.02, 0.05, 0.1, 0.2)
MOST_HELD_OUT = 0.3
MAX_BYTES = 256_000_000  # of larger data, only evenly spread streams are inspected
MOST_SOURCES = 32  # modalities that get a source of their own, each with open streams of its own
TRIED_STEPS = 4  # the first is slower than the others, and is left out
TIMEOUT_SEC = 60.0
FEWEST_STEPS = 20
QUIET = (
    *("eval.every=0", "metrics.log_interval=1", "metrics.stdout=off", "metrics.wandb.mode=disabled"),
    *("checkpoint.every=0", "scheduler.warmup_steps=0"),
)
# Names of the mark that ends a text.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")
WIDTH = 120  # of notes
TIE_FROM_VOCABULARY = 8192  # from here on, tied embeddings save most of a small model
# A string, number, boolean or list of them, as TOML writes it.
_toml = partial(json.dumps, ensure_ascii=False)


# ---- Sizes and weights, from the lengths of the documents


@dataclass(frozen=True)
class Sizes:
    """Initial values of `[data]`, `[train]` and `[eval]`. `holdout_fraction` 0: too few documents
    to hold any out. `passes`: over the documents that are not held out."""

    seq_len: int
    num_streams_mixed: int
    batch_size: int
    micro_batches: int
    steps: int
    passes: float
    holdout_fraction: float


def choose_sizes(streams: Sequence[Stream], lengths: Sequence[Ints], *, share: float = 1.0) -> Sizes:
    """Sizes with which rows are full, and a run is about one epoch within `STEPS_RANGE`.
    `lengths`: tokens of each document, by stream; at least one document has a token. `share`: of
    all data that these streams are."""
    holdout = _holdout(streams, lengths)
    kept = np.concatenate(
        [
            each[~held_out(stream.relative_path, len(each), holdout)]
            for stream, each in zip(streams, lengths, strict=True)
        ]
    )
    trained = int(kept.sum()) / share
    seq_len = _seq_len(kept, int(kept.sum()))
    # A row reads documents in turn; an epoch has to last longer than its longest document.
    longest = max(int(kept.max()), 32 * seq_len)
    fitting = min(np.count_nonzero(kept) / share, trained / longest)
    batch = _power_of_two(int(fitting), 1, LARGEST_BATCH)
    micro = int(np.clip(round(TOKENS_PER_STEP / (batch * seq_len)), 1, MOST_MICRO_BATCHES))
    tokens_a_step = batch * seq_len * micro
    steps = int(np.clip(round(trained / tokens_a_step), *STEPS_RANGE))
    return Sizes(
        seq_len=seq_len,
        num_streams_mixed=min(LARGEST_POOL, len(lengths)),
        batch_size=batch,
        micro_batches=micro,
        steps=steps,
        passes=steps * tokens_a_step / trained,
        holdout_fraction=holdout,
    )


def _seq_len(lengths: Ints, total: int) -> int:
    """Half of all tokens are in documents of `CELLS_PER_DOCUMENT` cells, unless most are short."""
    ordered = np.sort(lengths)
    typical = int(ordered[np.searchsorted(np.cumsum(ordered), total / 2)])
    roomy = _power_of_two(total // 64, *SEQ_LEN_RANGE)  # little data still gives some cells
    # Most documents fit into a row or two: rows need not be short for the state to matter.
    if typical < 2 * CELLS_PER_DOCUMENT * SEQ_LEN_RANGE[0] and len(lengths) > 1:
        return min(SHORT_SEQ_LEN, roomy)
    return min(_power_of_two(typical // CELLS_PER_DOCUMENT, *SEQ_LEN_RANGE), roomy)


def _power_of_two(value: int, lowest: int, highest: int) -> int:
    """The largest power of two up to `value`, clipped to bounds that are powers of two."""
    return int(np.clip(1 << max(value, 1).bit_length() - 1, lowest, highest))


def _holdout(streams: Sequence[Stream], lengths: Sequence[Ints]) -> float:
    """The smallest usual fraction that holds out some of every modality, if one does; 0 if none."""
    total = sum(int(each.sum()) for each in lengths)
    usable = []
    for fraction in HOLDOUT_FRACTIONS:
        held = sum(held for held, _ in _held_out(streams, lengths, fraction).values())
        # Whole documents are held out: a fraction of few may hold out none, or most of the text.
        if total * fraction / 4 <= held <= total * MOST_HELD_OUT:
            usable.append(fraction)
            if not never_held_out(streams, lengths, fraction):
                return fraction
    return usable[0] if usable else 0.0


def never_held_out(streams: Sequence[Stream], lengths: Sequence[Ints], fraction: float) -> list[str]:
    """The modalities of which this fraction holds out no token, or all."""
    found = _held_out(streams, lengths, fraction)
    return [name for name, (held, all_) in found.items() if not 0 < held < all_]


def _held_out(streams: Sequence[Stream], lengths: Sequence[Ints], fraction: float) -> dict[str, tuple[int, int]]:
    """Modality -> (tokens that this fraction holds out, all tokens)."""
    found: dict[str, tuple[int, int]] = {}
    for stream, each in zip(streams, lengths, strict=True):
        held, tokens = found.get(stream.modality, (0, 0))
        kept_back = each[held_out(stream.relative_path, len(each), fraction)]
        found[stream.modality] = held + int(kept_back.sum()), tokens + int(each.sum())
    return found


@dataclass(frozen=True)
class Part:
    """A modality, and a source of it alone."""

    modality: str
    source: str  # its name
    streams: int
    tokens: int  # of the training documents
    weight: float  # its share of all training tokens


def parts_of(streams: Sequence[Stream], lengths: Sequence[Ints], sizes: Sizes) -> list[Part]:
    """The modalities with the weights that draw each in its share of the training tokens."""
    found = _held_out(streams, lengths, sizes.holdout_fraction)
    tokens = {name: all_ - held for name, (held, all_) in sorted(found.items()) if all_ > held}
    parts: dict[str, Part] = {}
    for modality, number in tokens.items():
        source = re.sub(r"[^A-Za-z0-9_-]+", "-", modality).strip("-") or "part"
        while source in parts:
            source += "-"
        num_streams = sum(stream.modality == modality for stream in streams)
        parts[source] = Part(modality, source, num_streams, number, number / sum(tokens.values()))
    return list(parts.values())


# ---- The data


StarterSource = tuple[str, Mapping[str, Any], Part | None]  # name, keys without weight and mixing, its only modality


@dataclass(frozen=True)
class Starter:
    name: str
    found: str  # the data in words
    notes: list[str]  # what the user should check
    sources: list[StarterSource]
    tokenizer: str
    vocab_size: int  # as in `[data]`: 0 where the tokenizer has its own
    num_ids: int  # vocabulary of the model
    largest_id: tuple[int, int]  # and how often it occurs
    suggests_eod: bool  # whether to suggest the key `eod`, which the sources lack
    end: tuple[str, int] | None  # the tokenizer's mark of the end of a text, and its id
    sizes: Sizes
    length: str  # of the run, in words


def _expanded(path: str) -> str:
    return path if is_url(path) else str(Path(path).expanduser())


def make_starter(
    paths: list[str],
    *,
    format: str = "auto",
    dtype: str | None = None,
    eod: int | None = None,
    column: str | None = None,
    tokenizer: str | None = None,
) -> Starter:
    """The starter config for the data at `paths`; the other arguments are the verb's options.
    Raises UserError: there is nothing to train on."""
    paths = list(map(_expanded, paths))
    if any(map(is_url, paths)):
        at = discover_stored(paths, format=format, cache=Cache(None))
    else:
        at = discover(paths, format=format)
    refuse_empty(at.streams)
    given = {"dtype": dtype, "eod": eod, "column": column}
    refuse_unheeded(at.streams, format, given)
    kind = guess(at.streams, format=format, dtype=dtype, column=column)
    # Only the user knows what a format of their own yields.
    if is_import_path(format) and tokenizer == "ids":
        kind = replace(kind, kind="ids")
    near, named = None, tokenizer or "ids"
    if kind.kind == "text" and tokenizer is None:
        if not is_url(paths[0]):
            near = _tokenizer_near(Path(paths[0]))
        named = near or "bytes"
    chosen, share = sample_streams(at.streams)
    with progress_bar() as report:
        how: dict[str, Any] = {"format": format, "dtype": dtype, "eod": eod, "column": column, "report": report}
        lengths, largest = look(chosen, tokenizer=named, **how)
    if not any(each.any() for each in lengths):
        fix = "name files with text or token ids in them"
        raise UserError(paths[0], "holds no token at all", fix)
    sizes = choose_sizes(chosen, lengths, share=share)
    parts = parts_of(chosen, lengths, sizes)
    notes = _notes(at, kind, share)
    if near:
        notes.append(f"the tokenizer of the data, {near}, is used; for bytes: --tokenizer bytes")
    strange = not_text(chosen, format)
    if strange:
        notes.append(describe(strange, len(chosen)))
    without = []
    if sizes.holdout_fraction:
        without = never_held_out(chosen, lengths, sizes.holdout_fraction)
    if len(parts) > 1 and without:
        note = f"all modalities are one source, without weights: in {', '.join(without)} no document "
        notes.append(note + "would be held out, and evaluation needs some of every source")
        parts = []
    if format != "auto":
        given["format"] = format
    keys = {key: value for key, value in given.items() if value is not None}
    name = _run_name(paths[0])
    vocab_size = largest[0] + 1 if named == "ids" else 0
    ids = load_tokenizer(named, vocab_size=vocab_size)
    return Starter(
        name=name,
        found=_found(at, chosen, lengths, kind),
        notes=notes,
        sources=_sources(at, parts, name, keys, format=format),
        tokenizer=named,
        vocab_size=vocab_size,
        num_ids=ids.vocab_size,
        end=_end_mark(ids),
        largest_id=largest,
        suggests_eod=eod is None and any(takes_option(name, "eod") for name in kind.formats),
        sizes=sizes,
        length=f"about {counted(sizes.passes, 'pass')} over the training documents on 1 rank",
    )


def sample_streams(streams: Sequence[Stream], max_bytes: int = MAX_BYTES) -> tuple[list[Stream], float]:
    """(all streams, or evenly spread ones if there are more than `max_bytes`; their share)."""
    sizes = np.array([Path(stream.path).stat().st_size for stream in streams], dtype=np.float64)
    total = float(sizes.sum())
    if total <= max_bytes:
        return list(streams), 1.0
    chosen = range(0, len(streams), int(np.ceil(total / max_bytes)))
    return [streams[i] for i in chosen], float(sizes[list(chosen)].sum()) / total


def _tokenizer_near(path: Path) -> str | None:
    """A tokenizer.json in the folder of the data, or in the one above."""
    folder = next(each for each in (path, *path.parents) if each.is_dir())
    found = (each / "tokenizer.json" for each in (folder, folder.parent))
    return next((str(each) for each in found if each.is_file()), None)


def _end_mark(tokenizer: Tokenizer) -> tuple[str, int] | None:
    """The mark of the end of a text and its id, by its usual names."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    special = {each["content"]: int(each["id"]) for each in tokenizer.spec["added_tokens"]}
    marks = [mark for mark in ENDS if mark in special]
    return (printable(marks[0]), special[marks[0]]) if marks else None


def _run_name(path: str) -> str:
    """A run's name from the data's path: the last part that has a plain character."""
    named = [part for part in Path(path).resolve().parts if re.search(r"[A-Za-z0-9]", part)]
    stem = ["run", *named][-1]
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(stem).stem).strip("-_")
    return plain[:40] or "run"


def _found(at: Discovery, chosen: list[Stream], lengths: list[Ints], kind: Guess) -> str:
    """The data in words, for the head of the file."""
    what = {"text": "bytes of text", "ids": "token ids"}[kind.kind]
    streams, of = counted(len(chosen), "stream"), ""
    if len(chosen) < len(at.streams):
        of = f" of {len(at.streams):,} streams"
    documents, tokens = counted(sum(map(len, lengths)), "document"), sum(int(each.sum()) for each in lengths)
    formats = ", ".join(kind.formats)
    return f"Found: {streams}, {documents}, {tokens:,} tokens{of}, in layout {at.layout}, {what} ({formats})"


def _notes(at: Discovery, kind: Guess, share: float) -> list[str]:
    notes = []
    if share < 1.0:
        notes.append(f"only {share:.0%} of the bytes were inspected; ids or lengths may differ in the rest")
    if at.left_out:
        notes.append(f"not read, because not in a modality's directory: {few(at.left_out)}")
    return notes


def _sources(at: Discovery, parts: list[Part], name: str, keys: dict[str, Any], *, format: str) -> list[StarterSource]:
    """One source per modality, where a config can name each alone; otherwise a single one."""
    whole: dict[str, Any] = {"paths": list(at.paths)} if at.root is None else {"root": at.root}
    names = [part.modality for part in parts]
    apart: dict[str, dict[str, list[str]]] = {}
    if at.root is not None:
        apart = {name: {"modalities": [name]} for name in names}
    elif not any(map(is_url, at.paths)):
        for path in at.paths:
            found = {stream.modality for stream in discover_direct([path], format=format)}
            # A glob over several modalities stands under no name, so the sources stay one.
            modality = found.pop() if len(found) == 1 else ""
            apart.setdefault(modality, {"paths": []})["paths"].append(path)
    if not 1 < len(parts) <= MOST_SOURCES or apart.keys() != set(names):
        return [(name, whole | keys, None)]
    return [(part.source, whole | apart[part.modality] | keys, part) for part in parts]


# ---- The file


def render_starter(starter: Starter, *, schema: str | None) -> str:
    """The whole file.
    `schema`: path of the JSON Schema from the file's directory, for editors; None: none."""
    sizes, (largest, times) = starter.sizes, starter.largest_id
    notes = [_comment(f"Note: {note}") for note in starter.notes]
    # Lines of the template that begin with one of these and a bar are optional.
    shown = {
        "ids": bool(starter.vocab_size),
        "end": starter.end is not None,
        "large": starter.num_ids >= TIE_FROM_VOCABULARY,
        "bytes": starter.tokenizer == "bytes",
        "held out": sizes.holdout_fraction > 0,
        "few": sizes.holdout_fraction == 0,
    }
    lines, template = [], resources.files("trainer.tools") / "reference" / "starter.toml.in"
    for line in template.read_text(encoding="utf-8").splitlines(keepends=True):
        mark, _, rest = line.partition("|")
        if shown.get(mark, True):
            lines.append(rest if mark in shown else line)
    text = "".join(lines).format(
        **{**asdict(sizes), "name": _toml(starter.name), "tokenizer": _toml(starter.tokenizer)},
        head="\n".join([_comment(starter.found), *notes]),
        length=starter.length,
        largest=largest,
        times=times,
        vocab_size=starter.vocab_size,
        end=starter.end or ("", 0),
        sources=_source_tables(starter),
        every=max(sizes.steps // 10, 10),
        warmup=sizes.steps // 20,
        save=max(sizes.steps // 5, 1),
    )
    if schema:
        text = f"#:schema {schema}\n{text}"
    return text


def _comment(text: str) -> str:
    keep: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="#   ", **keep)


def _source_tables(starter: Starter) -> str:
    head = "# Add [[data.source]] tables to blend in more data; weight sets the proportions."
    if len(starter.sources) > 1:
        head = "# One source per modality. A weight is a share of the tokens: "
        head += "here each modality's own share of the data."
    blocks = []
    for name, keys, part in starter.sources:
        lines = ["[[data.source]]", f"name = {_toml(name)}"]
        lines += [f"{key} = {_toml(value)}" for key, value in keys.items()]
        if part is not None:
            lines.append(f"weight = {part.weight:.4g}   # {part.tokens:,} training tokens")
            if part.streams < starter.sizes.num_streams_mixed:
                lines.append(f"mixing = {{ num_streams_mixed = {part.streams} }}")
        if starter.suggests_eod:
            largest, times = starter.largest_id
            meaning = "id that ends a document, if there is one; without it a file is one document"
            eod = str(largest) if times > 1 else "..."  # such an id occurs often
            lines.append(f"# eod = {eod}   # {meaning}")
        blocks.append("\n".join(lines))
    return head + "\n" + "\n\n".join(blocks)


# ---- The time of a run


def timed(starter: Starter, minutes: float) -> Starter:
    """The starter with as many steps as take `minutes` on a rank here, and the time in words.

    The time is that of a few real steps; a note says why, if they cannot be timed.
    """
    try:
        seconds = _seconds_per_step(starter)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        # Its text is the whole command, and what it captured is bytes.
        if isinstance(error, subprocess.TimeoutExpired):
            said = f"{TRIED_STEPS} steps took longer than {TIMEOUT_SEC:g} s"
        last = said.strip().splitlines()[-1] if said.strip() else type(error).__name__
        note = f"the time of a step could not be measured: {last}"
        return replace(starter, notes=[*starter.notes, note])
    sizes = starter.sizes
    steps = min(sizes.steps, max(int(minutes * 60 / seconds), FEWEST_STEPS))
    passes = sizes.passes * steps / sizes.steps
    length = f"about {counted(round(passes, 2), 'pass')} over the training documents on 1 rank, "
    length += f"{duration_text(steps * seconds)} on this machine ({seconds:.2g} s per step)"
    return replace(starter, sizes=replace(sizes, steps=steps, passes=passes), length=length)


def _seconds_per_step(starter: Starter) -> float:
    """The median time of the steps after the first of a short run. Raises OSError, SubprocessError:
    the run fails, or takes too long."""
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        config, run_dir = Path(folder, "x.toml"), Path(folder, "run")
        write_file(config, render_starter(starter, schema=None).encode(), sync=False)
        # A process of its own: its threads, caches and signals leave nothing behind here.
        line = [sys.executable, "-m", "trainer", "--config", str(config), "--run-dir", str(run_dir)]
        line += [part for setting in QUIET for part in ("--set", setting)]
        line += ["--steps", str(TRIED_STEPS)]
        subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_SEC, check=True)
        text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    metrics = [row["metrics"] for row in rows if row.get("mode") == "train"]
    times: list[float] = [each["step_time_sec"] for each in metrics]
    return statistics.median(times[1:])
