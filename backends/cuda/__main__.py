"""`python -m localgen.backends.cuda FD`: an engine process for one model on NVIDIA GPUs."""

from __future__ import annotations

import os
import sys

from localgen.backends.cuda.loader import load_cuda_model
from localgen.backends.engine.process import main

if __name__ == "__main__":
    # without taking down what may wait for a GPU: everything goes with the process
    os._exit(main(int(sys.argv[1]), load_cuda_model))
