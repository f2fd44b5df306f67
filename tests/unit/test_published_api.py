"""Every public name of the published system: it is there, takes the published arguments, or is refused
with a reason.

Arguments that the published system takes may be more here, with defaults; they may not be fewer or stand in
another order.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from persia.errors import PersiaError

# Module -> name -> positional arguments in their order, or None for what is no function or class of its own.
NAMES: dict[str, dict[str, list[str] | None]] = {
    "persia.ctx": {
        "PreprocessMode": None,
        "BaseCtx": ["threadpool_worker_size", "device_id"],
        "cnt_ctx": [],
        "eval_ctx": [],
        "DataCtx": [],
        "EmbeddingCtx": ["preprocess_mode", "model", "embedding_config"],
        "InferCtx": ["embedding_worker_address_list"],
        "TrainCtx": [
            "embedding_optimizer",
            "dense_optimizer",
            "grad_scalar_update_factor",
            "backward_buffer_size",
            "backward_workers_size",
            "grad_update_buffer_size",
            "lookup_emb_directly",
            "mixed_precision",
            "distributed_option",
        ],
    },
    "persia.embedding": {
        "EmbeddingConfig": ["emb_initialization", "admit_probability", "weight_bound"],
        "get_default_embedding_config": [],
    },
    "persia.embedding.data": {
        "MAX_BATCH_SIZE": None,
        "IDTypeFeature": ["name", "data"],
        "IDTypeFeatureWithSingleID": ["name", "data"],
        "NdarrayDataBase": ["data", "name"],
        "Label": ["data", "name"],
        "NonIDTypeFeature": ["data", "name"],
        "PersiaBatch": [
            "id_type_features",
            "non_id_type_features",
            "labels",
            "batch_size",
            "requires_grad",
            "meta",
        ],
    },
    "persia.embedding.optim": {
        "Optimizer": None,
        "SGD": ["lr", "momentum", "weight_decay"],
        "Adam": ["lr", "betas", "weight_decay", "eps"],
        "Adagrad": [
            "lr",
            "initial_accumulator_value",
            "weight_decay",
            "g_square_momentum",
            "eps",
            "vectorwise_shared",
        ],
    },
    "persia.data": {
        "IterableDatasetBase": ["buffer_size"],
        "IterableDataset": ["buffer_size"],
        "StreamingDataset": ["buffer_size"],
        "DataLoader": [
            "dataset",
            "forward_buffer_size",
            "timeout_ms",
            "num_workers",
            "reproducible",
            "embedding_staleness",
        ],
        # Spellings of the documentation.
        "Dataloader": None,
        "Dataloder": None,
        "PersiaDataset": None,
    },
    "persia.distributed": {
        "DistributedBaseOption": ["master_port", "master_addr"],
        "DDPOption": ["initialization_method", "backend"],
        "BaguaDistributedOption": ["algorithm"],
        "get_default_distributed_option": ["device_id"],
    },
    "persia.env": {
        "get_world_size": [],
        "get_rank": [],
        "get_local_rank": [],
        "get_replica_size": [],
        "get_replica_index": [],
        "reload_env": [],
        "set_env": None,
    },
    "persia.prelude": {"PersiaTrainingBatch": None, "is_cuda_feature_available": []},
    "persia.service": {"get_embedding_worker_services": []},
    "persia.utils": {
        "setup_seed": ["seed"],
        "load_yaml": None,
        "dump_yaml": None,
        "run_command": ["cmd", "env"],
        "resolve_binary_execute_path": None,
        "find_free_port": ["port", "interval"],
    },
    "persia.logger": {
        "setLogger": [
            "name",
            "log_level",
            "log_filename",
            "enable_file_logger",
            "err_redirect_filepath",
            "enable_err_redirect",
            "err_redirect_level",
        ],
        "get_logger": ["name"],
        "get_default_logger": ["name"],
        "levelFilter": ["level"],
    },
    "persia.helper": {
        "PersiaServiceCtx": [
            "data_loader_func",
            "nn_worker_func",
            "embedding_config",
            "embedding_config_path",
            "global_config",
            "global_config_path",
            "data_loader_replica_num",
            "nproc_per_node",
            "embedding_worker_replica_num",
            "embedding_parameter_replica_num",
            "embedding_worker_port",
            "embedding_parameter_server_port",
            "nats_server_port",
        ],
        "ensure_persia_service": None,
    },
    "persia.launcher": {"cli": None},
}

DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("persia.embedding", "EmbeddingConfig"): {
        "emb_initialization": (-0.01, 0.01),
        "admit_probability": 1.0,
        "weight_bound": 10,
    },
    ("persia.embedding.optim", "SGD"): {"momentum": 0.0, "weight_decay": 0.0},
    ("persia.embedding.optim", "Adam"): {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "weight_decay": 0,
        "eps": 1e-8,
    },
    ("persia.embedding.optim", "Adagrad"): {
        "lr": 1e-2,
        "initial_accumulator_value": 1e-2,
        "weight_decay": 0,
        "g_square_momentum": 1,
        "eps": 1e-10,
        "vectorwise_shared": False,
    },
    ("persia.data", "DataLoader"): {
        "forward_buffer_size": 10,
        "timeout_ms": 600000,
        "num_workers": 10,
        "reproducible": False,
        "embedding_staleness": None,
    },
    ("persia.ctx", "TrainCtx"): {
        "grad_scalar_update_factor": 4,
        "backward_buffer_size": 10,
        "backward_workers_size": 8,
        "grad_update_buffer_size": 60,
        "lookup_emb_directly": True,
        "mixed_precision": None,  # published: True, which is an error without CUDA
        "distributed_option": None,
    },
    ("persia.embedding.data", "PersiaBatch"): {"requires_grad": True, "meta": None, "batch_size": None},
    ("persia.ctx", "BaseCtx"): {"threadpool_worker_size": 10, "device_id": None},
}

METHODS: dict[tuple[str, str], list[str]] = {
    ("persia.ctx", "DataCtx"): ["send_data"],
    ("persia.ctx", "EmbeddingCtx"): [
        "forward",
        "prepare_features",
        "dump_checkpoint",
        "load_checkpoint",
        "dump_embedding",
        "load_embedding",
        "wait_for_dump_embedding",
        "wait_for_load_embedding",
        "wait_servers_ready",
        "configure_embedding_parameter_servers",
        "dump_torch_state_dict",
        "load_torch_state_dict",
        "get_embedding_size",
        "clear_embeddings",
        "get_embedding_from_data",
        "get_embedding_from_bytes",
    ],
    ("persia.ctx", "InferCtx"): ["wait_for_serving"],
    ("persia.ctx", "TrainCtx"): ["backward", "dump_checkpoint", "load_checkpoint"],
    ("persia.embedding.data", "PersiaBatch"): ["to_bytes"],
    ("persia.embedding.optim", "Optimizer"): ["apply"],
    ("persia.data", "PersiaTrainingBatch"): [
        "consume_all_non_id_type_feature_tensors",
        "consume_all_id_type_feature_embedding_tensors",
        "consume_all_label_tensors",
        "consume_all_meta_data",
    ],
    ("persia.distributed", "DDPOption"): ["convert2distributed_model", "init_with_env_file"],
}

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "Bagua": (
        lambda: importlib.import_module("persia.distributed").BaguaDistributedOption("async"),
        "(?i)bagua.*discontinued.*DDPOption",
    ),
    "an unknown option of DDP": (
        lambda: importlib.import_module("persia.distributed").DDPOption(bucket_size=1),
        "unknown options for DDPOption: bucket_size",
    ),
}


def public_name(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names])
def test_the_name_is_there_with_its_arguments(module: str, name: str) -> None:
    found, expected = public_name(module, name), NAMES[module][name]
    if expected is None:
        return
    assert callable(found)
    parameters = list(inspect.signature(found).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    assert [p.name for p in positional][: len(expected)] == expected
    # What is new needs a default: published calls do not pass it.
    new = [
        p for p in parameters if p.name not in expected and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    assert [p.name for p in new if p.default is p.empty] == []


@pytest.mark.parametrize(("module", "name"), DEFAULTS)
def test_the_defaults_are_those_published(module: str, name: str) -> None:
    parameters = inspect.signature(public_name(module, name)).parameters
    expected = DEFAULTS[module, name]
    assert {key: parameters[key].default for key in expected} == expected


@pytest.mark.parametrize(("module", "name"), METHODS)
def test_the_methods_are_there(module: str, name: str) -> None:
    found = public_name(module, name)
    assert [method for method in METHODS[module, name] if not callable(getattr(found, method, None))] == []


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_there_says_why(case: str) -> None:
    make, reason = REFUSED[case]
    with pytest.raises(PersiaError, match=reason):
        make()


PAGE = Path(__file__).parents[2] / "docs" / "published_system.md"


def names_in(column: int) -> list[str]:
    """Full names in a column of the page's table of names that are gone."""
    chapter = PAGE.read_text().split("\n## Removed names\n")[1].split("\n## ")[0]
    cells = [line.split("|")[column] for line in chapter.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(persia\.[\w.]+)`", cell)]


def find(full_name: str) -> object:
    """Imports as much of the name as is a module, and looks the rest up."""
    found: Any = importlib.import_module("persia")
    for part in full_name.split(".")[1:]:
        try:
            found = getattr(found, part)
        except AttributeError:
            if not inspect.ismodule(found):
                raise
            found = importlib.import_module(f"{found.__name__}.{part}")
    return found


@pytest.mark.parametrize("name", names_in(1))
def test_names_that_are_gone_are_those_of_the_page(name: str) -> None:
    with pytest.raises((AttributeError, ImportError)):
        find(name)


def test_what_the_page_offers_instead_is_there() -> None:
    instead = names_in(2)
    assert len(instead) >= 10
    for name in instead:
        find(name)


def test_the_prelude_says_what_to_use_instead() -> None:
    prelude = importlib.import_module("persia.prelude")
    assert {f"persia.prelude.{name}" for name in prelude.REPLACEMENTS} == {
        name for name in names_in(1) if name.startswith("persia.prelude.")
    }
    with pytest.raises(ImportError, match=r"has no PyPersiaBatchData: use .*PersiaBatch. with its .to_bytes"):
        exec("from persia.prelude import PyPersiaBatchData")
    for instead in prelude.REPLACEMENTS.values():
        for name in re.findall(r"`(persia\.[\w.]+)`", instead):
            find(name)


def test_the_common_context_says_where_its_methods_are() -> None:
    context = public_name("persia.ctx", "BaseCtx")()
    assert not hasattr(context, "common_context")
    with pytest.raises(AttributeError, match=r"ctx\.get_embedding_size\(\)"):
        _ = context.common_context


def test_values_of_the_modes() -> None:
    mode = public_name("persia.ctx", "PreprocessMode")
    assert [(m.name, m.value) for m in mode] == [("TRAIN", 1), ("EVAL", 2), ("INFERENCE", 3)]


def test_importing_the_package_gives_its_modules() -> None:
    persia = importlib.import_module("persia")
    for name in ("logger", "prelude", "ctx", "embedding", "data", "service", "utils"):
        assert inspect.ismodule(getattr(persia, name))


def test_default_names_of_dense_data() -> None:
    data = importlib.import_module("persia.embedding.data")
    names = [getattr(data, n).DEFAULT_NAME for n in ("NdarrayDataBase", "Label", "NonIDTypeFeature")]
    assert names == ["ndarray_base", "label_anonymous", "non_id_type_feature_anonymous"]
    assert data.MAX_BATCH_SIZE == 65535


COMMANDS = {
    "nn-worker": ["--nproc-per-node", "--node-rank", "--nnodes"],
    "data-loader": ["--replica-index", "--replica-size"],
    "embedding-worker": [
        "--port",
        "--embedding-config",
        "--global-config",
        "--replica-index",
        "--replica-size",
    ],
    "embedding-parameter-server": [
        "--port",
        "--embedding-config",
        "--global-config",
        "--replica-index",
        "--replica-size",
    ],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_the_launcher(name: str) -> None:
    cli = public_name("persia.launcher", "cli")
    command = cli.get_command(click.Context(cli), name)
    options = {option for parameter in command.params for option in parameter.opts}
    assert [option for option in COMMANDS[name] if option not in options] == []
