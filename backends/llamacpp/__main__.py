"""`python -m localgen.backends.llamacpp FD`: an engine process for one GGUF model."""

from __future__ import annotations

import sys

from localgen.backends.engine.process import main
from localgen.backends.llamacpp.loader import load_llamacpp_model

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), load_llamacpp_model))
