"""Do models that were trained on short cells hold up on long documents? The figures of docs/evaluation.md.

Trains each family at 256 tokens, with the state reset at each cell and with carried states, and reads documents of 65,536 bytes
that were not trained on: files of Python's standard library. Keeps what was measured in a JSON file.

    python scripts/loss_depth.py    # from the root of the clone: the order of the documents depends on the path as given

All 12 runs take about seven minutes of two cores.
"""

from __future__ import annotations

import json
import statistics
import sysconfig
from pathlib import Path
from typing import Any

from experiments import Results, Setting, markdown, mean_of, rows_of, study_parser, train

BYTES, LEAST, READ = 65_536, 4_096, 6
FAMILIES = ("rglru", "gated_delta")
# A state that is wiped before each step is a state that is reset at each cell.
TRAINED = {
    "reset at each cell": (("ledger.wipe_mode", "full"),),
    "carried": (("ledger.wipe_mode", "lru"),),
}
RESET = next(iter(TRAINED))
DEPTHS = {"8,192 to 16,383": 8_192, "32,768 to 65,535": 32_768}
CONFIG = """
[train]
steps = 200
micro_batches = 1
[data]
seq_len = 256
max_group_cells = 256
[data.mixing]
num_streams_mixed = 1
batch_size = 8
[[data.source]]
name = "documents"
paths = ["{folder}/train.jsonl"]
[model]
dim = 48
num_layers = 2
[ledger]
wipe_every = 1
[optimizer]
lr = 5e-3
[scheduler]
warmup_steps = 20
[eval]
every = 100000
depth = true
[[eval.source]]
name = "long"
paths = ["{folder}/read.jsonl"]
[checkpoint]
every = 0
"""


def write_corpus(folder: Path) -> None:
    """Files of the standard library, cut at `BYTES`: `READ` of the longest to read, and all others to train on."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    texts = [text for path in files if len(text := path.read_bytes()) >= LEAST and text.isascii()]
    long = [text for text in texts if len(text) >= BYTES]
    read = long[:: len(long) // READ][:READ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", [text for text in texts if text not in read]), ("read", read)):
        lines = [json.dumps({"text": text[:BYTES].decode()}) + "\n" for text in chosen]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def run(setting: Setting, seed: int, work: Path) -> dict[str, Any]:
    """Train once, and return the numbers by depth of the evaluation after the last step."""
    run_dir, _ = train(setting, seed, CONFIG.format(folder=work / "corpus"), work)
    (row,) = rows_of(run_dir, "eval")
    prefix = "eval/long/depth/"
    return {"depth": {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}}


def setting_of(family: str, how: str) -> Setting:
    return Setting("stdlib", (("model.family", family), *TRAINED[how]))


def table(results: Results, seeds: int) -> str:
    columns = ["family, trained", *(name for words in DEPTHS for name in (f"loss, {words}", "gain", "against resets"))]
    rows = []
    for family in FAMILIES:
        of_resets = [results.of(setting_of(family, RESET), seed)["depth"] for seed in range(seeds)]
        for how in TRAINED:
            runs = [results.of(setting_of(family, how), seed)["depth"] for seed in range(seeds)]
            cells = [f"{family}, {how}"]
            for start in DEPTHS.values():
                losses, gains = ([each[f"{start}/{name}"] for each in runs] for name in ("loss", "carry_gain"))
                pairs = [loss - each[f"{start}/loss"] for loss, each in zip(losses, of_resets, strict=True)]
                numbers = ["{:+.3f} +- {:.3f}".format(*mean_of(values)) for values in (gains, pairs)]
                cells += [f"{statistics.fmean(losses):.3f}", numbers[0], numbers[1] if how != RESET else ""]
            rows.append(cells)
    return markdown(columns, rows)


def main() -> None:
    args = study_parser(__doc__, "loss_depth").parse_args()
    write_corpus(args.work / "corpus")
    settings, results = [setting_of(family, how) for family in FAMILIES for how in TRAINED], Results(args.out)
    results.complete(settings, args.seeds, lambda setting, seed: run(setting, seed, args.work), args.jobs)
    print(table(results, args.seeds))


if __name__ == "__main__":
    main()
