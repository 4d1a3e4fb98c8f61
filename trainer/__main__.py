"""`torchrun -m trainer ...` and `python -m trainer ...`: the program `train`."""

from trainer.cli.main import main

if __name__ == "__main__":  # a process of a pool imports this
    main()
