"""`python -m everytoken_lab` is the console script; `torchrun -m everytoken_lab ...` uses it too."""

import sys

from everytoken_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
