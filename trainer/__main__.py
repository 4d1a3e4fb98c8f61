"""`torchrun -m trainer ...` and `python -m trainer ...`: the program `train`."""

import sys
from pathlib import Path

if not __package__:  # started by its path, as `train --nproc` starts ranks
    sys.path[0] = str(Path(__file__).parents[1])
import trainer  # noqa: F401 - this one, wherever it lies

if not sys.flags.safe_path:
    # The working directory comes behind what is installed: no fsspec.py there is taken for the package.
    sys.path.append(sys.path.pop(0))
from trainer.cli.main import main

if __name__ == "__main__":
    main()
