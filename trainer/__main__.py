"""`torchrun -m trainer ...` and `python -m trainer ...`: the program `train`."""

import os
import sys

if __name__ == "__main__":  # a process of a pool imports this
    if not sys.flags.safe_path:
        # The working directory, or where this file lies: no fsspec.py there is taken for the
        # package. `resolve_target` looks there too, behind what is installed.
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import trainer  # noqa: F401 - this one

    sys.path.append(sys.path.pop(0))
    from trainer.cli.main import main

    main()
