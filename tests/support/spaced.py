"""Small tokenizers that put spaces between words in different ways."""

from __future__ import annotations


def spaced(kind):
    """A tokenizer whose words carry their space, or get it from what stands before them; or with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    if kind == "byte_level":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        found = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
        found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        return found
    words, mark = ["al", "beta", "gamma", "delta"], "" if kind in ("pieces", "plain") else "\u2581"
    vocabulary = {"<unk>": 0, **{mark + word: number for number, word in enumerate(words, 1)}, "##pha": 5}
    model = models.WordPiece if kind == "pieces" else models.WordLevel
    found = Tokenizer(model(vocabulary, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "pieces":
        found.decoder = decoders.WordPiece()
    elif kind == "metaspace":
        found.pre_tokenizer, found.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    elif kind == "llama":
        found.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
        found.pre_tokenizer = pre_tokenizers.Split(mark, "merged_with_next")
        found.decoder = decoders.Sequence([decoders.Replace(mark, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return found
