"""Files that change between stop and resume: what did not change is read once, what did is read anew."""

from __future__ import annotations

import itertools
import json
from collections import Counter

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.properties.test_data_mixing import PROFILE, settings_of, state_of, tokens_read, world
from tests.support.streams import write_tokens
from trainer.data.epochs import restart_streams

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


def relabelled(names, folder):
    """Replace the files of these streams: the same documents' lengths, other tokens."""
    for path in (folder / f"{name}.jsonl" for name in names):
        rows = [[token + 500 for token in json.loads(line)["tokens"]] for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))


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

    def part(streams, size, batches, states):
        """What a run reads that goes on from `states` on a world of this size, and its states then."""
        ranks, read = world(streams, size, **kwargs), Counter()
        for rank in ranks:
            if states:
                rank.load_state_dict(states)
            read += tokens_read(itertools.islice(rank, batches))
        return read, [state_of(rank) for rank in ranks]

    streams = write(folder, before)
    one, states = part(streams, worlds[0], stops[0], [])
    two, states = part(streams, worlds[1], stops[1], states)  # the epoch has a reshard point already

    changed = {name for name in before if change.draw(st.booleans(), label=f"{name} changed")}
    missing = {name for name in before if name not in changed and change.draw(st.booleans(), label=f"{name} missing")}
    new = change.draw(corpora, label="new")
    after = {**new, **{name: lengths for name, lengths in before.items() if name not in missing}}
    after |= {name: change.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5).map(tuple)) for name in changed}
    after = {name: lengths for name, lengths in after.items() if name not in missing}
    assume(after)
    kept = before.keys() - changed - missing
    streams = write(folder, after)
    relabelled(after.keys() - kept, folder)

    paths = [f"{name}.jsonl" for name in sorted(before)]
    fresh = world(streams, 1, **kwargs)[0]
    states = restart_streams(states, paths, fresh, {f"{name}.jsonl" for name in changed})
    three, states = part(streams, worlds[2], stops[2], states)  # and goes on elsewhere, twice
    four, states = part(streams, worlds[3], 10_000, states)

    expected = Counter()
    for name, lengths in after.items():
        first = 0 if name in kept else 500
        expected.update((f"{name}.jsonl", first + token) for token in range(sum(lengths)))
    old = {f"{name}.jsonl" for name in kept}
    read = Counter({key: count for key, count in (one + two).items() if key[0] in old}) + three + four
    assert read == expected
