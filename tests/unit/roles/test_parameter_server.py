"""What a parameter server makes of its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia.errors import ConfigError
from persia.roles.lifetime import ServerOptions
from persia.roles.parameter_server import config_of

CONFIG = """
embedding_parameter_server_config:
  storage: {kind: file, path: /mnt/nvme, cache_rows: 5000}
"""


def test_pmem_is_a_short_cut_for_storage(tmp_path: Path) -> None:
    (tmp_path / "global.yml").write_text(CONFIG)
    options = {"port": 0, "pmem": "/mnt/pmem0"}
    storage = config_of(ServerOptions(**options)).embedding_parameter_server_config.storage  # type: ignore[arg-type]
    assert (storage.kind, storage.path, storage.num_cache_rows) == ("pmem", "/mnt/pmem0", 1_000_000)
    options["global_config"] = str(tmp_path / "global.yml")
    storage = config_of(ServerOptions(**options)).embedding_parameter_server_config.storage  # type: ignore[arg-type]
    assert (storage.kind, storage.path, storage.cache_rows) == ("pmem", "/mnt/pmem0", 5000)


def test_servers_of_inference_jobs_have_no_pmem() -> None:
    with pytest.raises(ConfigError, match="storage.kind='pmem' with job_type='Infer'"):
        config_of(ServerOptions(port=0, pmem="/mnt/pmem0", checkpoint="model/"))
