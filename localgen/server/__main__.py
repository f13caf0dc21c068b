"""`python -m localgen.server`: the server that a first client starts, detached from it."""

from __future__ import annotations

import sys

from localgen.server.lifecycle import main

if __name__ == "__main__":
    sys.exit(main())
