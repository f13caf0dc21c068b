"""`python -m localgen.server`: the background server, started detached by the first client."""

from __future__ import annotations

import sys

from localgen.server.lifecycle import main

if __name__ == "__main__":
    sys.exit(main())
