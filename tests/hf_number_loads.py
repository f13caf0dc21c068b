"""Load the built-in model with one field of its config.json changed, for each line on stdin.

A program of a test: absurd numbers could take all memory of the process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from localgen.backends.cuda.loader import load_cuda_model
from localgen.backends.errors import LocalgenError
from localgen.backends.memory.system import peak_memory_bytes
from localgen.backends.model_info import LoadOptions, ModelLoadRequest

if __name__ == "__main__":
    source, folder = map(Path, sys.argv[1:])
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").unlink()
    for line in sys.stdin:
        (folder / "config.json").write_text(json.dumps(config | json.loads(line)))
        request = ModelLoadRequest("m", str(folder), LoadOptions(device="cpu"))
        try:
            model = load_cuda_model(request, lambda share: None)
            outcome: object = model.info.ctx
            model.runner.close()
        except LocalgenError as error:
            outcome = error.message
        print(json.dumps([outcome, peak_memory_bytes()]), flush=True)
