"""`python -m localgen.backends.cuda FD`: the engine process of one model on NVIDIA GPUs."""

from __future__ import annotations

import os
import sys

from localgen.backends.cuda.loader import load_cuda_model
from localgen.backends.engine.process import main

if __name__ == "__main__":
    # skip interpreter shutdown, which may wait for a GPU: the process exit frees everything
    os._exit(main(int(sys.argv[1]), load_cuda_model))
