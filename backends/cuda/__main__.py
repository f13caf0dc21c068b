"""`python -m localgen.backends.cuda FD`: the engine process of one model on NVIDIA GPUs."""

from __future__ import annotations

import gc
import os
import sys

if __name__ == "__main__":
    # imports leave no garbage: none is searched for before they are done, nor in them later
    gc.disable()
    from localgen.backends.cuda.loader import load_cuda_model
    from localgen.backends.engine.process import main

    gc.freeze()
    gc.enable()
    # skip interpreter shutdown, which may wait for a GPU: the process exit frees everything
    os._exit(main(int(sys.argv[1]), load_cuda_model))
