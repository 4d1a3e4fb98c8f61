"""Rules about the pool of active readers, the rows and the blend."""

from __future__ import annotations

import math
from typing import Any

from trainer.tools import limits
from trainer.tools.diagnostics.rule import (
    Knob,
    Outcome,
    Series,
    aligned,
    batches_through,
    finding,
    has_full_rows,
    healthy,
    not_measured,
    not_yet,
    rule,
    series,
)
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.readings import number_text
from trainer.wording import counted

PICKS = "stream_mixing/active/picks"  # since the row before, of all readers
SURPRISE = "stream_mixing/active/pick_surprise_max"  # nats; since a reader was last picked
REMAINING_MIN = "stream_mixing/active/remaining_min"  # picks of the reader with fewest left
REMAINING_MAX = "stream_mixing/active/remaining_max"  # picks of the reader with most left
FRACTION_MIN = "stream_mixing/active/remaining_fraction_min"  # share of its slice
EXHAUSTED = "stream_mixing/refill/exhaust_events"  # readers since the row before
MODALITIES = "stream_mixing/active/modalities/"  # its active readers
ABSENCES = "stream_mixing/refill/absence/"  # nats; since one of its streams was opened
ROWS_FILL = "data/fill"  # share of the positions of full rows
SHARE_ERROR = "blend/max_share_error"  # largest difference of a share so far
LONGEST_SHARE = "blend/longest_share"  # of the tokens so far, the longest document's
ENDED_SOURCES = "blend/ended_sources"  # sources without data left

FULL_ROWS = not_measured("with full rows a document stays on its row, whatever its file has left")


@rule("error", needs=(SURPRISE, PICKS))
def stuck_reader(run: RunRecord) -> Outcome:
    """A reader that waits longer than chance explains."""
    surprise, key = series(run, SURPRISE), "data.mixing.pick_mode"
    modes = {key: run.setting(key)}
    owns = {place: own.get("pick_mode") for place, own in _own_mixing(run).items()}
    modes |= {f"{place}.pick_mode": own for place, own in owns.items() if own}
    drawn = [(key, mode) for key, mode in modes.items() if mode != "round_robin"]
    if not drawn:
        return not_measured("round_robin picks readers in turn, so no wait is improbable")
    hits, chance = _improbable(surprise, series(run, PICKS).total)  # each pick ends a wait
    if not hits:
        return healthy(f"the longest wait of an open stream {chance}")
    words = f"an open stream was not read: so long a wait {chance}; first at step {surprise.steps[hits[0]]}"
    return finding(words, surprise.evidence(hits), knob=Knob(*drawn[-1], "round_robin"))


def _improbable(surprise: Series, num_waits: float) -> tuple[list[int], str]:
    """The rows with a wait too long for chance; and in words, how probable the longest is."""
    # A wait's surprise is a unit exponential: of so many, one exceeds this in 1 of 1 / ALPHA runs.
    limit = math.log(max(num_waits, 2) / limits.ALPHA)
    chance, alarm = (number_text(math.exp(-nats), 2) for nats in (max(surprise.values), limit))
    return surprise.where(lambda nats: nats > limit), f"has a chance of {chance} (limit {alarm})"


def _own_mixing(run: RunRecord) -> dict[str, dict[str, Any]]:
    """The tables `[data.source.mixing]`, by what `--set` calls them."""
    tables = {each.get("name"): each.get("mixing") for each in run.setting("data.source", [])}
    return {f"data.source.{name}.mixing": own for name, own in tables.items() if own}


def _batch_sizes(run: RunRecord) -> set[int]:
    """Of the modalities of all sources."""
    names, found = [key.removeprefix(MODALITIES) for key in run.train.keys if key.startswith(MODALITIES)], set()
    for own in (each.get("mixing", {}) for each in run.setting("data.source", [{}])):
        table = {"batch_size_by_modality": {}, "batch_size": None, **run.setting("data.mixing", {}), **own}
        found |= {table["batch_size_by_modality"].get(name, table["batch_size"]) for name in names}
    return found - {None}


@rule("warning", needs=(REMAINING_MIN, REMAINING_MAX, FRACTION_MIN))
def uneven_slices(run: RunRecord) -> Outcome:
    """Slices so different in length that readers of the short ones wait."""
    if has_full_rows(run):
        return FULL_ROWS
    if any(series(run, SHARE_ERROR).values):  # one source has exactly its share
        return not_measured("with several sources these keys do not say which source they are of")
    least, most, fraction = aligned(*(series(run, key) for key in (REMAINING_MIN, REMAINING_MAX, FRACTION_MIN)))
    if len(least) < limits.UNEVEN_ROWS:
        return not_yet(f"needs {limits.UNEVEN_ROWS} rows, has {len(least)}")
    ratios = list(map(_ratio_of_slices, least.values, most.values, fraction.values))
    hits = [index for index, ratio in enumerate(ratios) if ratio > limits.UNEVEN_RATIO]
    times = f"at least {number_text(max(ratios))} times as many batches as the shortest"
    words = f"the longest open stream gives {times} (limit {limits.UNEVEN_RATIO:g})"
    if len(hits) < max(limits.UNEVEN_ROWS, limits.UNEVEN_SHARE * len(least)):
        return healthy(words)
    words += ", and streams are read in proportion to their batches: those with few wait"
    evidence, sizes = (least.evidence(hits), most.evidence(hits)), _batch_sizes(run)
    if sizes and max(sizes) > limits.EVEN_BATCHES * min(sizes):
        value = f"sizes within a factor of {limits.EVEN_BATCHES}, not {min(sizes)} to {max(sizes)}"
        knob = Knob("data.mixing.batch_size_by_modality", None, value, in_words=True)
        return finding(words, *evidence, knob=knob)
    # The batches are even, so the streams differ in size, which is the user's choice.
    knob = Knob("data.source", None, "streams of similar size", in_words=True)
    return finding(words, *evidence, knob=knob, severity="advice")


def _ratio_of_slices(low: float, high: float, share: float) -> float:
    """Lower bound on the ratio of the longest slice to the shortest, in picks; 0 if unknown.

    The reader with the fewest picks left began with at most low / share + 1, the one with most left
    with at least `high`.
    """
    if low <= 0 or share <= 0:
        return 0.0
    return high / (low / share + 1)


@rule("warning", needs=[EXHAUSTED])
def starved_modality(run: RunRecord) -> Outcome:
    """A modality that is absent for longer than chance explains."""
    absences = [series(run, key) for key in run.train.keys if key.startswith(ABSENCES)]
    if not absences:
        return not_measured(f"needs {ABSENCES}<modality>")
    if len(absences) == 1:
        return healthy("there is only one modality")
    opened = series(run, EXHAUSTED).total
    opened += sum(max(series(run, key).values) for key in run.train.keys if key.startswith(MODALITIES))
    worst = max(absences, key=lambda absence: max(absence.values))
    # Each stream that is opened ends the wait for its modality.
    hits, chance = _improbable(worst, opened + len(absences))
    name = worst.key.removeprefix(ABSENCES)
    if not hits:
        return healthy(f"the longest wait for a stream of a modality ({name}) {chance}")
    words = f"no stream of modality {name} was opened: so long a wait {chance}; "
    words += f"first at step {worst.steps[hits[0]]}"
    knob = Knob("data.source", None, "a source of its own for the modality", in_words=True)
    return finding(words, worst.evidence(hits), knob=knob)


@rule("warning", needs=[EXHAUSTED, PICKS])
def exhaust_churn(run: RunRecord) -> Outcome:
    """Readers that end after a few picks."""
    if has_full_rows(run):
        return FULL_ROWS
    ended, picks = aligned(series(run, EXHAUSTED), series(run, PICKS))
    if len(ended) < 2:
        return not_yet(f"needs 2 rows, has {len(ended)}")
    # The first row counts what ended before it, in steps that are not known.
    events = math.fsum(ended.values[1:])
    if not events:
        return healthy("no stream ended")
    per_slice = math.fsum(picks.values[1:]) / events
    words = f"a stream gives a rank {number_text(per_slice)} batches before it ends"
    if per_slice > limits.CHURN_PICKS or events < limits.CHURN_EVENTS * (run.world_size or 1):
        return healthy(words)
    size = run.setting("data.mixing.batch_size")
    knob = Knob("data.source", None, "longer streams: merge files", in_words=True)
    if _batch_sizes(run) == {size} and size > 1:
        knob = Knob("data.mixing.batch_size", size, max(size // 4, 1))
    return finding(words, ended.evidence(ended.positive), knob=knob)


@rule("warning", needs=[ROWS_FILL])
def low_fill(run: RunRecord) -> Outcome:
    """Rows in which many positions hold no token."""
    fill = series(run, ROWS_FILL)
    if any(table.get("target") for table in run.setting("data.source", [])):
        return not_measured("data sets of your own make rows")
    if len(fill) < limits.FILL_ROWS:
        return not_yet(f"needs {limits.FILL_ROWS} rows, has {len(fill)}")
    mean, least, most = fill.total / len(fill), min(fill.values), max(fill.values)
    words = f"{mean:.1%} of the positions held a token (from {least:.1%} to {most:.1%})"
    if mean >= limits.LOW_FILL:
        return healthy(words)
    if not has_full_rows(run):
        mode = run.setting("data.mixing.batching_mode")
        knob = Knob("data.mixing.batching_mode", mode, "per_row")
        # Whoever chose another mode knows that its batches shrink.
        return finding(words, fill.evidence(), knob=knob, severity="advice" if mode else None)
    rows = run.setting("data.mixing.batch_size")
    knob = Knob("data.source", None, "more data, or cut documents (data.max_group_cells)", in_words=True)
    align = run.setting("data.align")
    if run.environment.get("align", align) == "document":  # padded, whatever the number of rows
        unpadded = "stream, with a model that takes resets; or a shorter data.seq_len"
        knob = Knob("data.align", align, unpadded, in_words=True)
    elif isinstance(rows, int) and rows > 1:
        knob = Knob("data.mixing.batch_size", rows, max(int(mean * rows), 1))
    return finding(words, fill.evidence(), knob=knob)


@rule("warning", needs=[SHARE_ERROR])
def shares(run: RunRecord) -> Outcome:
    """Sources whose share differs from their weight, or that have ended."""
    errors, ended, tables = series(run, SHARE_ERROR), series(run, ENDED_SOURCES), run.setting("data.source", [])
    longest = dict(zip(*run.column(LONGEST_SHARE), strict=True))
    bounds, due = {}, 1
    for index, step in enumerate(errors.steps):
        # The first row at or after each power of two, and the last row.
        if step >= due or index == len(errors) - 1:
            batches = max(batches_through(run, step), 1)
            bounds[index] = math.sqrt(math.log(1024 / limits.ALPHA) / (2 * batches))
            bounds[index] += 2 * longest.get(step, 0.0)  # a document is handed to a row whole
            due = 2 ** step.bit_length()
    hits = [index for index, limit in bounds.items() if errors.values[index] > limit]
    index = [len(errors) - 1, *hits][-1]
    words = f"by {errors.values[index]:.1%} at step {errors.steps[index]}; "
    why = "chance and the longest document explain" if longest else "chance explains"
    words += f"{why} {min(bounds[index], 1):.1%}"
    evidence = [errors.evidence(hits)] * bool(hits)
    if ended.positive:
        first = ended.steps[ended.positive[0]]
        words = f"{counted(max(ended.values), 'source')} without further documents, the first by step {first}"
        owns = {f"{place}.repeat": own.get("repeat") for place, own in _own_mixing(run).items()}
        repeats = {key: own for key, own in owns.items() if own is not None}
        if not repeats or len(repeats) < len(tables):
            repeats["data.mixing.repeat"] = run.setting("data.mixing.repeat")
        off = [(key, repeat) for key, repeat in repeats.items() if not repeat]
        more = "mixing.repeat = true for what ended" if off else "more data"
        knob = Knob("data.source", None, more, in_words=True)
        if len(off) == 1:
            knob = Knob(*off[0], True)
        evidence.append(ended.evidence(ended.positive[:1]))
        return finding(words, *evidence, knob=knob, severity=None if hits else "advice")
    if not hits:
        return healthy(f"the shares of the sources differ from their weights {words}")
    knob = Knob("data.source", None, "a weight that the amount of data allows", in_words=True)
    return finding(f"the share of a source differs from its weight {words}", *evidence, knob=knob)


RULES = (stuck_reader, uneven_slices, starved_modality, exhaust_churn, low_fill, shares)
