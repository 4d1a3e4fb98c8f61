"""Files that change between stop and resume: what did not change is read once, what did is read anew."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.properties.test_data_mixing import PROFILE, settings_of, tokens_read, world
from tests.support.streams import write_tokens
from trainer.data.epochs import restart_streams
from trainer.data.layout import Stream

Documents = tuple[int, ...]  # their lengths
corpora = st.dictionaries(
    st.sampled_from([f"{label}/s{number}" for number, label in enumerate("abababab")]),
    st.lists(st.integers(0, 20), min_size=1, max_size=5).map(tuple).filter(any),
    min_size=1,
    max_size=8,
)


def write(folder, corpus):
    """These streams alone."""
    for path in folder.rglob("*.jsonl"):
        path.unlink()
    return write_tokens(folder, corpus)


def take(ranks, number):
    batches = []
    for dataset in ranks:
        batches += list(itertools.islice(dataset, number))
    return batches


def expected(corpus, first_token):
    return Counter(
        (f"{name}.jsonl", first_token + token) for name, lengths in corpus.items() for token in range(sum(lengths))
    )


def relabelled(streams, corpus, shift, folder):
    """Replace the files of the streams in `shift`: the same documents' lengths, other tokens."""
    for name in shift:
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        rows = [{"tokens": [token + 500 for token in row["tokens"]]} for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@PROFILE
@given(
    before=corpora,
    change=st.data(),
    kwargs=settings_of,
    worlds=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    stops=st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 6)),
)
def test_streams_that_did_not_change_go_on_and_the_others_begin_anew(
    tmp_path_factory, before, change, kwargs, worlds, stops
):
    folder = tmp_path_factory.mktemp("corpus")
    streams = write(folder, before)
    first: Counter[tuple[str, int]] = Counter()
    states: list[dict[str, Any]] = []
    for size, batches in zip(worlds[:2], stops, strict=False):  # the epoch may have a reshard point already
        ranks = world(streams, size, **kwargs)
        for dataset in ranks:
            if states:
                dataset.load_state_dict(states)
        first += tokens_read(take(ranks, batches))
        states = [json.loads(json.dumps(dataset.state_dict())) for dataset in ranks]

    changed = {name for name in before if change.draw(st.booleans(), label=f"{name} changed")}
    missing = {name for name in before if name not in changed and change.draw(st.booleans(), label=f"{name} missing")}
    new = change.draw(corpora, label="new")
    after = {name: lengths for name, lengths in before.items() if name not in missing}
    after |= {name: lengths for name, lengths in new.items() if name not in before}
    after |= {name: change.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5).map(tuple)) for name in changed}
    assume(after)
    kept = before.keys() - changed - missing
    streams = write(folder, after)
    relabelled(streams, after, after.keys() - kept, folder)

    paths = [stream.relative_path for stream in sorted_streams(before)]
    fresh = world(streams, 1, **kwargs)[0]
    rewritten = restart_streams(states, paths, fresh, {f"{name}.jsonl" for name in changed})
    second: Counter[tuple[str, int]] = Counter()
    for number, size in enumerate(worlds[2:]):  # and goes on elsewhere, twice
        resumed = world(streams, size, **kwargs)
        for dataset in resumed:
            dataset.load_state_dict(rewritten)
        second += tokens_read(take(resumed, stops[2] if number == 0 else 10_000))
        rewritten = [json.loads(json.dumps(dataset.state_dict())) for dataset in resumed]

    old = {f"{name}.jsonl" for name in kept}
    of_kept = Counter({key: count for key, count in (first + second).items() if key[0] in old})
    assert of_kept == expected({name: before[name] for name in kept}, 0)
    of_others = Counter({key: count for key, count in second.items() if key[0] not in old})
    assert of_others == expected({name: after[name] for name in after.keys() - kept}, 500)


def sorted_streams(corpus):
    """The streams of a corpus that is no longer on disk, in the order of their ids."""
    return [Stream(i, "", f"{name}.jsonl", name[0]) for i, name in enumerate(sorted(corpus))]
