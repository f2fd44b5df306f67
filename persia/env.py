"""Everything persia reads from the environment, in one place, checked once.

A process is either a DDP rank (`RANK` is set, by torchrun or `persia-launcher nn-worker`) or one replica of
another role (`REPLICA_INDEX` / `REPLICA_SIZE`). The published getters are kept; each raises `ConfigError`
naming the variable and its value where that is not usable.
"""

from __future__ import annotations

import math
import os
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from persia.errors import ConfigError

# A job name is a token of NATS subjects, where "." separates and "*" and ">" are wildcards.
_JOB_NAME = re.compile(r"[A-Za-z0-9_-]+")
_Number = TypeVar("_Number", int, float)
_LOG_LEVELS = ("debug", "info", "warn", "warning", "error", "critical")


def _number(name: str, default: float | None, kind: type[_Number], minimum: float, what: str) -> _Number:
    text = os.environ.get(name)
    if text is None and default is None:
        raise ConfigError(f"environment variable {name} is not set: set it to {what}")
    try:
        value = kind(default if text is None else text)  # type: ignore[arg-type]  # checked above
    except ValueError:
        # One message serves for text that is no number and for numbers out of range.
        value = kind(-1)
    # Infinity is refused: a deadline without an end hides a dead peer.
    if not minimum <= value < math.inf:
        raise ConfigError(f"environment variable {name}={text!r} must be {what}")
    return value


def _integer(name: str, default: int | None = None, minimum: int = 0) -> int:
    return _number(name, default, int, minimum, f"an integer >= {minimum}")


def _seconds(name: str, default: float) -> float:
    # Zero is refused: a deadline of zero fails every wait.
    return _number(name, default, float, math.ulp(0.0), "a number of seconds > 0")


def _choice(name: str, *choices: str) -> str:
    """One of `choices`, of which the first is the default."""
    text = os.environ.get(name, choices[0])
    if text not in choices:
        raise ConfigError(f"environment variable {name}={text!r} must be one of {', '.join(choices)}")
    return text


def _flag(name: str) -> bool:
    return _choice(name, "0", "1") == "1"


@dataclass(frozen=True, kw_only=True)
class ReplicaEnv:
    """Identity of this process. Rank fields are None outside DDP ranks, replica fields None inside."""

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    replica_index: int | None = None
    replica_size: int | None = None

    def __post_init__(self) -> None:
        for index_name, size_name in (("rank", "world_size"), ("replica_index", "replica_size")):
            index, size = getattr(self, index_name), getattr(self, size_name)
            pair = f"{index_name.upper()}={index} and {size_name.upper()}={size}"
            # An index means nothing without the number it is counted within.
            if (index is None) != (size is None):
                raise ConfigError(f"{pair} must be given together")
            if index is not None and not 0 <= index < size:
                raise ConfigError(f"{pair}: an index must be at least 0 and below its size")

    @classmethod
    def read(cls) -> ReplicaEnv:
        """What os.environ says."""
        # RANK wins: torchrun sets it for its children, which may inherit REPLICA_INDEX.
        if "RANK" in os.environ:
            names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
        # One without the other is refused: every loader would take itself for the only one.
        elif "REPLICA_INDEX" in os.environ or "REPLICA_SIZE" in os.environ:
            names = ["REPLICA_INDEX", "REPLICA_SIZE"]
        else:
            return cls(replica_index=0, replica_size=1)
        return cls(**{name.lower(): _integer(name, minimum=int(name.endswith("SIZE"))) for name in names})


# Read once: a training script may change os.environ, and its rank must not change with it.
_current: ReplicaEnv | None = None


def _replica_env() -> ReplicaEnv:
    if _current is None:
        reload_env()
    assert _current is not None, "just read"
    return _current


def reload_env() -> None:
    """Reads the rank and replica variables again, after a change of `os.environ`."""
    global _current
    _current = ReplicaEnv.read()


def set_env(**who: int | None) -> None:
    """Overrides who this process is, by the fields of `ReplicaEnv`; for notebooks and tests.

    `os.environ` stays as it is; `reload_env` reads it again. Raises ConfigError for an index without its
    size, or not below it.
    """
    global _current
    try:
        _current = ReplicaEnv(**who)
    except ConfigError as error:
        raise ConfigError(f"set_env: {error}") from None


def get_rank() -> int | None:
    """This process' rank among the NN workers, or None outside them."""
    return _replica_env().rank


def get_local_rank() -> int | None:
    """This process' rank on its host, or None outside the NN workers."""
    return _replica_env().local_rank


def get_world_size() -> int | None:
    """The number of NN workers, or None outside them."""
    return _replica_env().world_size


def get_replica_index() -> int | None:
    """This replica's index in its role, or None in NN workers. 0 when nothing is set."""
    return _replica_env().replica_index


def get_replica_size() -> int | None:
    """The number of replicas of this role, or None in NN workers. 1 when nothing is set."""
    return _replica_env().replica_size


def get_job_name() -> str:
    """`PERSIA_JOB_NAME`: part of every NATS subject, so that several jobs share a broker."""
    name = os.environ.get("PERSIA_JOB_NAME", "default")
    if not _JOB_NAME.fullmatch(name):
        raise ConfigError(
            f"environment variable PERSIA_JOB_NAME={name!r} may have letters, digits, '_' and '-' only"
        )
    return name


def get_nats_url() -> str | None:
    """`PERSIA_NATS_URL`, for instance nats://127.0.0.1:4222; None when no broker is configured."""
    url = os.environ.get("PERSIA_NATS_URL")
    # Checked where it is read: the NATS client would report a wrong scheme as a broker that does not answer.
    if url is not None and not _is_url(url, ("nats", "tls")):
        raise ConfigError(
            f"environment variable PERSIA_NATS_URL={url!r} must be nats://host:port or tls://host:port"
        )
    return url


def require_nats_url() -> str:
    """`PERSIA_NATS_URL`, for processes that cannot do without a broker."""
    url = get_nats_url()
    if url is None:
        raise ConfigError(
            "PERSIA_NATS_URL is not set: name the job's NATS server in it, such as nats://127.0.0.1:4222 "
            "(`persia-launcher nats-server` runs one)"
        )
    return url


def _is_url(url: str, schemes: tuple[str, ...]) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, a bracket that does not close
        return False


def embedded() -> bool:
    """`PERSIA_EMBEDDED=1`: a broker serves data loaders alone, embeddings stay in the training process."""
    return _flag("PERSIA_EMBEDDED")


def get_log_level() -> str:
    """`LOG_LEVEL`: debug, info, warn, error or critical, in any case; info when not set."""
    level = os.environ.get("LOG_LEVEL", "info")
    if level.lower() not in _LOG_LEVELS:
        raise ConfigError(f"environment variable LOG_LEVEL={level!r} must be one of {', '.join(_LOG_LEVELS)}")
    return level.lower()


def skip_check_data() -> bool:
    """`PERSIA_SKIP_CHECK_DATA=1`: of arrays in batches only what memory safety needs is checked."""
    return _flag("PERSIA_SKIP_CHECK_DATA")


def launcher_verbose() -> bool:
    """`PERSIA_LAUNCHER_VERBOSE=1`: the launcher prints the commands it runs."""
    return _flag("PERSIA_LAUNCHER_VERBOSE")


def get_bind_host() -> str:
    """`PERSIA_BIND_HOST`: the address servers listen on; loopback unless told otherwise."""
    return os.environ.get("PERSIA_BIND_HOST") or "127.0.0.1"


def get_advertise_host(bind_host: str | None = None) -> str:
    """The address other hosts reach this one by.

    `PERSIA_ADVERTISE_HOST`, else `bind_host` (default: `get_bind_host()`), else, when that is the wildcard,
    the address of `PERSIA_SOCKET_IFNAME` or of the default route.
    """
    explicit = os.environ.get("PERSIA_ADVERTISE_HOST")
    if explicit:
        return explicit
    host = bind_host if bind_host is not None else get_bind_host()
    # The wildcard is no address that others can connect to.
    return _primary_address() if host in ("0.0.0.0", "::") else host


def _primary_address() -> str:
    interface = os.environ.get("PERSIA_SOCKET_IFNAME")
    if interface:
        return _interface_address(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: picks the default route, sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _interface_address(interface: str) -> str:
    import fcntl
    import struct

    # From <linux/sockios.h>; the standard library has no call for the address of an interface.
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise ConfigError(
                f"environment variable PERSIA_SOCKET_IFNAME={interface!r} names no interface "
                f"with an IPv4 address: {error}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


# `or None`, here and below: templates of deployments leave variables empty.
def global_config_path() -> str | None:
    """`PERSIA_GLOBAL_CONFIG`; this and the paths below are None when not set or empty."""
    return os.environ.get("PERSIA_GLOBAL_CONFIG") or None


def embedding_config_path() -> str | None:
    """`PERSIA_EMBEDDING_CONFIG`."""
    return os.environ.get("PERSIA_EMBEDDING_CONFIG") or None


def nn_worker_entry() -> str | None:
    """`PERSIA_NN_WORKER_ENTRY`: the script that `persia-launcher nn-worker` runs when none is given."""
    return os.environ.get("PERSIA_NN_WORKER_ENTRY") or None


def data_loader_entry() -> str | None:
    """`PERSIA_DATALOADER_ENTRY`: the script that `persia-launcher data-loader` runs when none is given."""
    return os.environ.get("PERSIA_DATALOADER_ENTRY") or None


def get_metrics_port() -> int | None:
    """`PERSIA_METRICS_PORT`: where metrics and status are shown; 0, the default: a free port; None: "off"."""
    return None if os.environ.get("PERSIA_METRICS_PORT") == "off" else _port("PERSIA_METRICS_PORT", 0)


def get_health_port() -> int | None:
    """`PERSIA_HEALTH_PORT`: port of the gRPC health service; None, the default: it is off."""
    return _port("PERSIA_HEALTH_PORT", None)


def get_restarts() -> int:
    """`PERSIA_RESTARTS`: how often the supervisor has started this process again; set by the launcher."""
    return _integer("PERSIA_RESTARTS", 0)


def get_metrics_gateway() -> str | None:
    """`PERSIA_METRICS_GATEWAY_ADDR`: host:port of the Pushgateway to push metrics to; None: none."""
    return os.environ.get("PERSIA_METRICS_GATEWAY_ADDR") or None


def get_otlp_endpoint() -> str | None:
    """`PERSIA_OTLP_ENDPOINT`: of an OpenTelemetry collector (OTLP/gRPC), http://host:4317; None: none."""
    endpoint = os.environ.get("PERSIA_OTLP_ENDPOINT") or None
    if endpoint is not None and not _is_url(endpoint, ("http", "https")):
        raise ConfigError(
            f"environment variable PERSIA_OTLP_ENDPOINT={endpoint!r} must be http://host:4317, or https:// "
            "with TLS"
        )
    return endpoint


def get_otlp_trace_one_in() -> int:
    """`PERSIA_OTLP_TRACE_ONE_IN`: spans of one batch in so many go to the collector; 0: none. Default 100."""
    return _integer("PERSIA_OTLP_TRACE_ONE_IN", 100)


def get_log_format() -> str:
    """`PERSIA_LOG_FORMAT`: text, or json for one object a line."""
    return _choice("PERSIA_LOG_FORMAT", "text", "json")


def _port(name: str, default: int | None) -> int | None:
    # Empty counts as unset: templates of deployments leave such values.
    port = _integer(name) if os.environ.get(name) else default
    if port is not None and port > 65535:
        raise ConfigError(f"environment variable {name}={port} is not a port number; 0 takes a free one")
    return port


def get_embedding_worker_service() -> str:
    """`EMBEDDING_WORKER_SERVICE`, as published."""
    return os.environ.get("EMBEDDING_WORKER_SERVICE", "embedding_worker:8887")


def get_resume_checkpoint() -> str | None:
    """`PERSIA_RESUME_CHECKPOINT`: checkpoint from which the script should resume; None: none."""
    return os.environ.get("PERSIA_RESUME_CHECKPOINT") or None


def get_sign_key() -> str | None:
    """`PERSIA_SIGN_KEY`: file of the private key that signs checkpoints and packets; None: unsigned."""
    return os.environ.get("PERSIA_SIGN_KEY") or None


def get_verify_keys() -> list[str]:
    """`PERSIA_VERIFY_KEY`: files of public keys, separated by colons, one of which must have signed what is
    loaded; empty: signatures are not checked.
    """
    value = os.environ.get("PERSIA_VERIFY_KEY", "")
    paths = [path for path in value.split(os.pathsep) if path]
    if value and not paths:  # no key would mean no check
        raise ConfigError(f"PERSIA_VERIFY_KEY={value} names no file: give files of public keys, or unset it")
    return paths


def get_job_secret() -> str | None:
    """`PERSIA_JOB_SECRET`: the job's secret, or a role's credential. Empty counts as unset, as templates of
    deployments leave variables empty.
    """
    return os.environ.get("PERSIA_JOB_SECRET") or None


def get_job_secret_file() -> str | None:
    """`PERSIA_JOB_SECRET_FILE`: a file that holds it."""
    return os.environ.get("PERSIA_JOB_SECRET_FILE") or None


def get_tls_dir() -> str | None:
    """`PERSIA_TLS_DIR`: the folder with tls.crt, tls.key and ca.crt; None: nothing is encrypted."""
    return os.environ.get("PERSIA_TLS_DIR") or None


def get_audit_log() -> str | None:
    """`PERSIA_AUDIT_LOG`: the file of the audit log; None: the log."""
    return os.environ.get("PERSIA_AUDIT_LOG") or None


def trusts_scripts() -> bool:
    """`PERSIA_TRUST_SCRIPTS`: 1 runs the TorchScript of any user."""
    return _flag("PERSIA_TRUST_SCRIPTS")


def get_deadline_s() -> float:
    """`PERSIA_DEADLINE_SEC`: seconds that discovery, retries and draining may take before a typed error."""
    return _seconds("PERSIA_DEADLINE_SEC", 300.0)


def loader_silence_s() -> float:
    """`PERSIA_LOADER_SILENCE_SEC`: seconds that a loader may be unreachable, with its stream not ended."""
    return _seconds("PERSIA_LOADER_SILENCE_SEC", 30.0)


def get_wire_dtype() -> str:
    """`PERSIA_WIRE_DTYPE`: how embeddings and gradients travel between embedding workers and this process."""
    return _choice("PERSIA_WIRE_DTYPE", "float32", "float16", "bfloat16")


def get_exact_row_bytes() -> int:
    """`PERSIA_EXACT_ROW_BYTES`: rows that a rank with consistency="exact" holds beside those in flight."""
    return _integer("PERSIA_EXACT_ROW_BYTES", 1 << 30)


def get_num_threads() -> int | None:
    """`PERSIA_NUM_THREADS`: threads of an engine in this process; None when it is not set."""
    return _integer("PERSIA_NUM_THREADS", minimum=1) if "PERSIA_NUM_THREADS" in os.environ else None


if not TYPE_CHECKING:  # a type checker would take every misspelt getter for an int

    def __getattr__(name: str) -> int:
        """The published constants, 0 or 1, read when they are used."""
        if name in ("PERSIA_SKIP_CHECK_DATA", "PERSIA_LAUNCHER_VERBOSE"):
            return int(_flag(name))
        raise AttributeError(f"module 'persia.env' has no attribute {name!r}")
