"""`python -m localgen.backends.cuda.compile_process FD`: compile kernels beside a running engine.

It receives a LaunchPlanner and Triton's target from the socket FD, and compiles the planner's later
launches into Triton's cache, where the engine finds them. It has a low priority and no GPU. It
answers with an error message, empty if there is none. The end of the socket means that the engine
is gone.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia_driver

from localgen.backends.cuda.precompile import compile_launches
from localgen.backends.messages import FrameSocket, inherited_socket

_THREADS = 2  # other cores stay free
_LOWEST_PRIORITY = 19


def main(fd: int) -> None:
    """Compile once."""
    os.nice(_LOWEST_PRIORITY)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles it
    engine = inherited_socket(fd)
    planner, target = pickle.loads(engine.receive())
    threading.Thread(target=_exit_with_engine, args=(engine,), daemon=True).start()
    try:
        triton.runtime.driver.set_active(driver_for(target))
        compile_launches(planner.later_launches(), _THREADS)
    except Exception as error:
        engine.send((str(error) or type(error).__name__).encode())
    else:
        engine.send(b"")


def driver_for(target: GPUTarget) -> SimpleNamespace:
    """Return what Triton needs of a driver to compile for a GPU that this process does not use."""
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    if hasattr(nvidia_driver, "make_launcher"):  # up to Triton 3.6 launchers are compiled too
        driver.launcher_cls = nvidia_driver.CudaLauncher
    return driver


def _exit_with_engine(engine: FrameSocket) -> None:
    for _ in engine:
        pass
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # no cleanup: torch takes long to exit
