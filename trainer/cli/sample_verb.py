"""`train sample`: let a trained model speak."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def sample(
    run_dir: Annotated[str, typer.Argument(help="A run's directory, or an exported model.", metavar="RUN_DIR")],
    prompt: Annotated[str, typer.Option(help="What to go on from; absent: the beginning of a document.")] = "",
    num_bytes: Annotated[int | None, typer.Option("--bytes", min=1, help="Bytes of text to generate [200].")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to generate, instead of --bytes.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Divides the scores; 0: the most likely token.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the k most likely only; 0: from all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    step: Annotated[int | None, typer.Option(help="Which checkpoint; absent: the newest.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The tokenizer.json, if it has moved.", metavar="PATH")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Generate text from a run's newest checkpoint, with the recurrent state carried on, as it comes."""
    from trainer.cli.sample_run import Request, run_sample
    from trainer.model.generate import Draw

    request = Request(prompt, num_bytes, tokens, Draw(temperature, top_k, seed), step, tokenizer, device, as_json)
    run_sample(run_dir, request)
