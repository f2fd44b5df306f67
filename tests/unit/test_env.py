"""Environment variables: published rules, typed errors that name variable and value."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from persia import env
from persia.errors import ConfigError

_WHO = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE")


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in _WHO:
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    env.reload_env()


def set_and_reload(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    env.reload_env()


def test_a_rank_has_rank_variables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    set_and_reload(monkeypatch, RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", REPLICA_INDEX="7", REPLICA_SIZE="8")
    assert (env.get_rank(), env.get_local_rank(), env.get_world_size()) == (3, 1, 4)
    assert (env.get_replica_index(), env.get_replica_size()) == (None, None)


def test_a_replica_has_replica_variables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    set_and_reload(monkeypatch, REPLICA_INDEX="1", REPLICA_SIZE="2")
    assert (env.get_replica_index(), env.get_replica_size()) == (1, 2)
    assert (env.get_rank(), env.get_local_rank(), env.get_world_size()) == (None, None, None)


def test_alone_by_default() -> None:
    env.reload_env()
    assert (env.get_replica_index(), env.get_replica_size()) == (0, 1)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "-1", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "RANK='-1'"),
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "RANK='x'"),
        ({"RANK": "0", "LOCAL_RANK": "-2", "WORLD_SIZE": "1"}, "LOCAL_RANK='-2'"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"REPLICA_INDEX": "0"}, "REPLICA_SIZE is not set"),
        ({"REPLICA_SIZE": "2"}, "REPLICA_INDEX is not set"),
        ({"REPLICA_INDEX": "2", "REPLICA_SIZE": "2"}, "REPLICA_INDEX=2"),
    ],
)
def test_unusable_values_are_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        set_and_reload(monkeypatch, **variables)


def test_set_env_overrides() -> None:
    env.set_env(rank=1, local_rank=0, world_size=2)
    assert (env.get_rank(), env.get_world_size(), env.get_replica_index()) == (1, 2, None)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rank": 2, "world_size": 2}, "RANK=2"),
        ({"rank": -1, "world_size": 2}, "RANK=-1"),
        ({"rank": 0}, "WORLD_SIZE=None"),
        ({"replica_size": 1}, "REPLICA_INDEX=None"),
        ({"replica_index": 1, "replica_size": 1}, "REPLICA_INDEX=1"),
    ],
)
def test_set_env_refuses_what_cannot_be(values: dict[str, int], named: str) -> None:
    env.set_env(rank=1, world_size=2)
    with pytest.raises(ConfigError, match=f"set_env.*{named}"):
        env.set_env(**values)
    assert env.get_rank() == 1


@pytest.mark.parametrize("name", ["PERSIA_SKIP_CHECK_DATA", "PERSIA_LAUNCHER_VERBOSE"])
def test_the_published_constants(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert getattr(env, name) == 0
    monkeypatch.setenv(name, "1")
    assert getattr(env, name) == 1
    with pytest.raises(AttributeError, match="PERSIA_NOTHING"):
        env.PERSIA_NOTHING  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "getter",
    [env.global_config_path, env.embedding_config_path, env.nn_worker_entry, env.data_loader_entry],
)
def test_an_empty_path_is_none(monkeypatch: pytest.MonkeyPatch, getter: Callable[[], str | None]) -> None:
    for name in ("GLOBAL_CONFIG", "EMBEDDING_CONFIG", "NN_WORKER_ENTRY", "DATALOADER_ENTRY"):
        monkeypatch.setenv(f"PERSIA_{name}", "")
    assert getter() is None


@pytest.mark.parametrize("url", ["nats://127.0.0.1:4222", "nats://user:word@host", "tls://[::1]:4222"])
def test_urls_of_brokers(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("PERSIA_NATS_URL", url)
    assert env.get_nats_url() == url


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:4222", "nats://", "nats://:4222", "nats://h:port", "nats://h:70000", "nats://[::1"]
)
def test_what_is_no_url_of_a_broker(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("PERSIA_NATS_URL", url)
    with pytest.raises(ConfigError, match="PERSIA_NATS_URL=.*nats://host:port"):
        env.get_nats_url()


@pytest.mark.parametrize(
    ("getter", "variable", "value"),
    [
        (env.get_job_name, "PERSIA_JOB_NAME", "a.b"),
        (env.get_nats_url, "PERSIA_NATS_URL", "http://x"),
        (env.get_log_level, "LOG_LEVEL", "loud"),
        (env.get_wire_dtype, "PERSIA_WIRE_DTYPE", "float8"),
        (env.get_exact_row_bytes, "PERSIA_EXACT_ROW_BYTES", "-1"),
        (env.get_num_threads, "PERSIA_NUM_THREADS", "0"),
        (env.get_num_threads, "PERSIA_NUM_THREADS", "all"),
        (env.get_deadline_s, "PERSIA_DEADLINE_SEC", "0"),
        (env.loader_silence_s, "PERSIA_LOADER_SILENCE_SEC", "soon"),
        (env.skip_check_data, "PERSIA_SKIP_CHECK_DATA", "yes"),
        (env.launcher_verbose, "PERSIA_LAUNCHER_VERBOSE", "2"),
        (env.get_advertise_host, "PERSIA_SOCKET_IFNAME", "no-such-interface"),
    ],
)
def test_settings_are_checked(
    monkeypatch: pytest.MonkeyPatch, getter: Callable[[], object], variable: str, value: str
) -> None:
    monkeypatch.setenv("PERSIA_BIND_HOST", "0.0.0.0")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable}='{value}'"):
        getter()


def test_threads_are_unset_or_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSIA_NUM_THREADS", raising=False)
    assert env.get_num_threads() is None
    monkeypatch.setenv("PERSIA_NUM_THREADS", "3")
    assert env.get_num_threads() == 3


def test_servers_are_advertised_where_they_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.get_advertise_host() == "127.0.0.1"
    assert env.get_advertise_host("10.1.2.3") == "10.1.2.3"
    monkeypatch.setenv("PERSIA_SOCKET_IFNAME", "lo")
    assert env.get_advertise_host("0.0.0.0") == "127.0.0.1"
    monkeypatch.setenv("PERSIA_ADVERTISE_HOST", "example.org")
    assert env.get_advertise_host("0.0.0.0") == "example.org"
