"""What the command line and the global config say of an inference job, taken together."""

from __future__ import annotations

from persia.config import CommonConfig, GlobalConfig, InferConfig
from persia.roles.inference import config_of
from persia.roles.lifetime import ServerOptions

GIVEN = InferConfig(
    embedding_checkpoint="/old", servers=["old:1"], incremental_poll_ms=20, incremental_max_behind=7
)
CONFIG = GlobalConfig(common_config=CommonConfig(job_type="Infer", infer_config=GIVEN))


def infer_config(**options: object) -> InferConfig:
    common = config_of(ServerOptions(port=0, **options), CONFIG).common_config  # type: ignore[arg-type]
    assert common.job_type == "Infer"
    assert common.infer_config is not None
    return common.infer_config


def test_options_replace_what_they_name_and_nothing_else() -> None:
    of_server = infer_config(checkpoint="/new")
    assert (of_server.embedding_checkpoint, of_server.servers) == ("/new", ["old:1"])
    of_worker = infer_config(parameter_servers=("new:1", "new:2"))
    assert (of_worker.embedding_checkpoint, of_worker.servers) == ("/old", ["new:1", "new:2"])
    for infer in (of_server, of_worker):
        assert (infer.incremental_poll_ms, infer.incremental_max_behind) == (20, 7)


def test_a_job_without_such_options_is_what_its_config_says() -> None:
    assert config_of(ServerOptions(port=0), CONFIG) is CONFIG
