"""`torchrun -m trainer ...` and `python -m trainer ...`: the program `train`."""

from trainer.cli.main import main

main()
