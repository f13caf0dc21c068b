"""`python -m localgen.server`: the background server, started detached by the first client."""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    # imports leave no garbage; run_server enables the collector when it has imported everything
    gc.disable()
    from localgen.server.lifecycle import main

    sys.exit(main())
