"""What `train sample` does: load, generate, write each piece of text as soon as it is whole."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import typer

from trainer.data.text_stream import TextStream, prompt_ids
from trainer.errors import UserError
from trainer.model.generate import Draw, GenerationError, generate
from trainer.training.export.saved_model import SavedModel, load_model

DEFAULT_LENGTH = 200


@dataclass(frozen=True)
class Request:
    """The command line of `train sample`."""

    prompt: str
    num_bytes: int | None
    num_tokens: int | None
    draw: Draw
    step: int | None
    tokenizer: str | None
    device: str
    as_json: bool


def run_sample(run_dir: str, request: Request) -> None:
    """Write the prompt and what follows to stdout.

    Raises:
        UserError: no usable model, a prompt that cannot be tokenised, two lengths, or scores that are not finite.
    """
    if request.num_bytes is not None and request.num_tokens is not None:
        raise UserError("--bytes", "does not go with --tokens", "give one of the two")
    device = _device(request.device)
    saved = load_model(run_dir, step=request.step, device=device, tokenizer=request.tokenizer)
    pieces = []
    if not request.as_json:
        _write(request.prompt)
    try:
        for piece in text_pieces(saved, request, device):
            pieces.append(piece)
            if not request.as_json:
                _write(piece)
    except GenerationError as error:
        raise UserError(run_dir, str(error), "take an earlier checkpoint with --step") from None
    if request.as_json:
        _write(json.dumps({"step": saved.step, "prompt": request.prompt, "text": "".join(pieces)}, ensure_ascii=False))
    _write("\n")


def text_pieces(saved: SavedModel, request: Request, device: torch.device) -> Iterator[str]:
    """The generated text, piece by piece, until it is as long as was asked for."""
    is_text = saved.tokenizer.name != "ids"
    if request.num_bytes is not None and not is_text:
        raise UserError("--bytes", "the model was trained on token ids, which have no bytes", "use --tokens")
    is_bytes = saved.tokenizer.name == "bytes"
    limit = request.num_tokens or request.num_bytes or DEFAULT_LENGTH
    tokens = generate(
        saved.model,
        prompt_ids(saved.tokenizer, request.prompt, "--prompt"),
        draw=request.draw,
        cell=saved.config.data.seq_len,
        forbidden=[saved.tokenizer.bos_id],
        device=device,
    )
    stream = TextStream(saved.tokenizer)
    written = 0
    # A token is a byte or more, so that a limit in bytes is one in tokens too.
    for token in itertools.islice(tokens, limit):
        piece = stream.push(token)
        written += len(piece.encode("utf-8"))
        yield piece
        if is_text and not is_bytes and request.num_tokens is None and written >= limit:
            break
    yield stream.flush()


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise UserError("--device", f"must be one of auto, cpu, cuda; got {name!r}", "use auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device", "there is no CUDA device", "use cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _write(text: str) -> None:
    if sys.stdout.isatty():
        # A model may write anything; an escape sequence must not reach the terminal as one.
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    if sys.stdout.encoding.lower().replace("-", "") != "utf8":
        text = text.encode(sys.stdout.encoding, errors="replace").decode(sys.stdout.encoding)
    typer.echo(text, nl=False)
    sys.stdout.flush()
