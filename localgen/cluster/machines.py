"""The machines of a Ray cluster that runs: each must have this localgen, the model and the keys."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import localgen
from localgen.backends.errors import LoadFailed, LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.cluster.config import ClusterConfig
from localgen.cluster.model_download import require_available
from localgen.cluster.running import HEAD
from localgen.server.http.access import read_api_keys

_CONNECT_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 60.0
# in which a head ends whose owner was killed, and in which that is asked again
_END_TIMEOUT_S, _POLL_S = 15.0, 0.2
_GONE = "the machine has left"


class VersionError(RuntimeError):
    """A machine of the cluster has another version of localgen."""


@dataclass(frozen=True, slots=True)
class Build:
    """Facts that all parts of a cluster share. version: of localgen. secret: by which replicas know
    the gateway. model: the name of the model that all have."""

    version: str
    secret: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class Machines:
    """gateway: address of the machine with the gateway. count: of all machines."""

    gateway: str
    count: int


def require_listening(address: str) -> None:
    """Raise LoadFailed if nothing listens at HOST:PORT: Ray itself would try for minutes.

    `auto` is left to Ray, which says at once that none runs.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise LoadFailed(f"no Ray cluster answers at {address}: {reason}") from error


def require_version(wanted: str) -> None:
    """Raise VersionError unless this machine has the version that built the cluster."""
    if localgen.__version__ != wanted:
        raise VersionError(
            f"machine {socket.gethostname()} has localgen {localgen.__version__}, the cluster has "
            f"{wanted}: install the same version there"
        )


@dataclass(frozen=True, slots=True)
class KeysDigest:
    """A salted digest of the API keys in their order, to compare those of machines.

    salt: random, so that digests of two clusters with the same keys differ.
    """

    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, config: ClusterConfig, salt: bytes) -> KeysDigest:
        """Of the keys on this machine. Raises BadSetting if they cannot be read."""
        keys = read_api_keys(Path(config.api_key_file)) if config.api_key_file else ()
        return cls(salt, hmac.digest(salt, "\n".join(keys).encode(), "sha256"))


def find_problem(config: ClusterConfig, version: str, keys: KeysDigest) -> str | None:
    """Why a replica cannot start on this machine, in one line, or None.

    version, keys: of the machine of `localgen cluster up`.
    """
    try:
        require_version(version)
        if KeysDigest.of(config, keys.salt) != keys:
            return (
                f"machine {socket.gethostname()}: the keys in {config.api_key_file} are not those "
                "of the machine of `localgen cluster up`: copy the file from there"
            )
        require_available(config)
    except VersionError as error:
        return str(error)
    except LocalgenError as error:
        return f"machine {socket.gethostname()}: {one_line(error.message)}"
    return None


def require_gpus(config: ClusterConfig, found: float) -> None:
    """Raise LoadFailed if the machines have fewer GPUs, for which Ray would wait without end."""
    if config.num_gpus > found:
        count = config.replicas + config.prompt_replicas
        raise LoadFailed(
            f"{count} replicas with {config.gpus_per_replica} GPUs each need {config.num_gpus}, "
            f"and Ray has found {found:.0f}: set fewer --replicas or --gpus-per-replica"
        )


def require_unowned() -> None:
    """Raise LoadFailed if a head lives that owns the cluster of this Ray, after a while in which
    one may be ending.

    The Ray cluster is that to which this process is connected.
    """
    deadline = time.monotonic() + _END_TIMEOUT_S
    while owner := _find_head():
        if time.monotonic() > deadline:
            raise LoadFailed(
                f"a localgen cluster runs in this Ray cluster, started on {owner}: "
                "`localgen cluster down` ends it there, as its user"
            )
        time.sleep(_POLL_S)


def _find_head() -> str:
    """The machine and the process of another head that is connected to this Ray, or empty."""
    import ray
    from ray._private.state import jobs  # the public list of jobs needs Ray's dashboard

    here = ray.util.get_node_ip_address()
    for job in jobs():
        address, pid = job["DriverIPAddress"], job["DriverPid"]
        if job["IsDead"] or HEAD not in job["Entrypoint"]:
            continue
        # Ray may not yet have noticed that one has ended
        if address != here or (pid != os.getpid() and psutil.pid_exists(pid)):
            return f"machine {address} (process {pid})"
    return ""


def check_machines(config: ClusterConfig) -> Machines:
    """The machines of the Ray cluster to which this process is connected.

    Raises LoadFailed that names the first one on which a replica cannot start: Serve would try
    without end.
    """
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    keys = KeysDigest.of(config, secrets.token_bytes(16))
    asked = [(node["NodeManagerHostname"], _ask(node["NodeID"], config, keys)) for node in nodes]
    answers = [_answer(name, answer) for name, answer in asked]
    for problem in answers:
        if problem not in (None, _GONE):
            raise LoadFailed(problem)
    return Machines(ray.util.get_node_ip_address(), len(answers) - answers.count(_GONE))


def _ask(node_id: str, config: ClusterConfig, keys: KeysDigest) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=here)(find_problem)
    return task.remote(config, localgen.__version__, keys)


def _answer(name: str, answer: Any) -> str | None:
    import ray
    from ray.exceptions import GetTimeoutError, RayError, TaskUnschedulableError

    try:
        problem: str | None = ray.get(answer, timeout=_CHECK_TIMEOUT_S)
    except TaskUnschedulableError:
        return _GONE
    except GetTimeoutError:
        return f"machine {name} does not answer within {_CHECK_TIMEOUT_S:.0f} s"
    except RayError as error:  # localgen is not there, or is too old to be asked
        reason = one_line(str(error).strip().splitlines()[-1])
        return f"machine {name} cannot run localgen {localgen.__version__}: {reason}"
    return problem
