"""Files that change between stop and resume: the next epoch is of the files as they are."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.properties.test_data_mixing import PROFILE, settings_of, state_of, tokens_read, world
from tests.support.streams import write_tokens

corpora = st.dictionaries(
    st.sampled_from([f"{label}/s{number}" for number, label in enumerate("abababab")]),
    st.lists(st.integers(0, 20), min_size=1, max_size=5).map(tuple).filter(any),
    min_size=1,
    max_size=8,
)


@PROFILE
@given(
    before=corpora,
    after=corpora,
    kwargs=settings_of,
    worlds=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    stops=st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 6)),
)
def test_after_a_change_every_token_of_the_files_is_read_once(tmp_path_factory, before, after, kwargs, worlds, stops):
    folder = tmp_path_factory.mktemp("corpus")

    def part(streams, size, batches, states):
        """What a run reads that goes on from `states` on a world of this size, and its states then."""
        ranks, read = world(streams, size, **kwargs), Counter()
        for rank in ranks:
            if states:
                rank.load_state_dict(states)
            read += tokens_read(itertools.islice(rank, batches))
        return read, [state_of(rank) for rank in ranks]

    streams = write_tokens(folder, before)
    _, states = part(streams, worlds[0], stops[0], [])
    _, states = part(streams, worlds[1], stops[1], states)  # the epoch has a reshard point already
    for path in folder.rglob("*.jsonl"):
        path.unlink()
    streams = write_tokens(folder, after)
    states = world(streams, 1, **kwargs)[0].restarted(states)
    three, states = part(streams, worlds[2], stops[2], states)  # and goes on elsewhere, twice
    four, states = part(streams, worlds[3], 10_000, states)
    sizes = {f"{name}.jsonl": sum(lengths) for name, lengths in after.items()}
    assert three + four == Counter((name, token) for name, size in sizes.items() for token in range(size))
