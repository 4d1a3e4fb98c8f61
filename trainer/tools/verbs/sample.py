"""`train sample`: generate text with a trained model, written as it is generated."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.cli.imports import uncollected
from trainer.cli.options import TrustOption, pick_device, require_run
from trainer.errors import UserError

if TYPE_CHECKING:
    import torch

    from trainer.model.generate import Draw
    from trainer.tools.trained.saved_model import SavedModel

DEFAULT_LENGTH = 200


def sample(
    run_dir: Annotated[str, typer.Argument(help="A run directory, or an exported model.", metavar="RUN_DIR")],
    prompt: Annotated[str, typer.Option(help="Text to continue; default: the start of a document.")] = "",
    num_bytes: Annotated[int | None, typer.Option("--bytes", min=1, help="Bytes of text to generate [200].")] = None,
    num_tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Tokens to generate, instead of --bytes.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Divides the logits; 0: greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0: from all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Sampling seed.")] = 0,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Path of the tokenizer.json if it moved.", metavar="PATH")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    trust_code: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Generate text from a run's newest checkpoint, with the recurrent state carried from token to token."""
    if num_bytes is not None and num_tokens is not None:
        raise UserError("--bytes", "does not go with --tokens", "give one of the two")
    require_run(run_dir)
    with uncollected():
        from trainer.model.generate import Draw, GenerationError
        from trainer.tools.trained.saved_model import load_model

    on = pick_device(device)
    saved = load_model(run_dir, step=step, device=on, tokenizer=tokenizer, trust_code=trust_code)
    draw = Draw(temperature, top_k, seed)
    pieces = []
    if not as_json:
        _write(prompt)
    try:
        for piece in _text_pieces(saved, prompt, draw, num_bytes=num_bytes, num_tokens=num_tokens, device=on):
            pieces.append(piece)
            if not as_json:
                _write(piece)
    except GenerationError as error:
        raise UserError(run_dir, str(error), "take an earlier checkpoint with --step") from None
    if as_json:
        _write(json.dumps({"step": saved.step, "prompt": prompt, "text": "".join(pieces)}, ensure_ascii=False))
    _write("\n")


def _text_pieces(
    saved: SavedModel,
    prompt: str,
    draw: Draw,
    *,
    num_bytes: int | None,
    num_tokens: int | None,
    device: torch.device,
) -> Iterator[str]:
    """The generated text, piece by piece, up to the requested length."""
    from trainer.data.tokenizer import TextStream, prompt_ids
    from trainer.model.generate import generate

    is_text = saved.tokenizer.name != "ids"
    if num_bytes is not None and not is_text:
        raise UserError("--bytes", "the model was trained on token ids, which have no bytes", "use --tokens")
    # With the bytes tokenizer a token is a byte, so that counting tokens is enough.
    counts_bytes = is_text and saved.tokenizer.name != "bytes" and num_tokens is None
    limit = num_tokens or num_bytes or DEFAULT_LENGTH
    tokens = generate(
        saved.model,
        prompt_ids(saved.tokenizer, prompt, "--prompt"),
        draw=draw,
        cell=saved.config.data.seq_len,
        forbidden=[saved.tokenizer.bos_id],
        device=device,
    )
    stream = TextStream(saved.tokenizer)
    written = 0
    # A token has one byte or more, so that a limit in bytes limits the tokens too.
    for token in itertools.islice(tokens, limit):
        piece = stream.push(token)
        written += len(piece.encode("utf-8"))
        yield piece
        if counts_bytes and written >= limit:
            break
    yield stream.flush()


def _write(text: str) -> None:
    if sys.stdout.isatty():
        # A model may write anything; an escape sequence must not reach the terminal as one.
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    if sys.stdout.encoding.lower().replace("-", "") != "utf8":
        text = text.encode(sys.stdout.encoding, errors="replace").decode(sys.stdout.encoding)
    sys.stdout.write(text)
    sys.stdout.flush()
