"""`python -m localgen.backends.llamacpp FD`: an engine process for one GGUF model."""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    # imports leave no garbage: none is searched for before they are done, nor in them later
    gc.disable()
    from localgen.backends.engine.process import main
    from localgen.backends.llamacpp.loader import load_llamacpp_model

    gc.freeze()
    gc.enable()
    sys.exit(main(int(sys.argv[1]), load_llamacpp_model))
