"""`python -m localgen.backends.cuda FD`: an engine process for one model on NVIDIA GPUs."""

from __future__ import annotations

import sys

from localgen.backends.cuda.load import load
from localgen.backends.engine.process import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), load))
