"""NVIDIA's `feature_spec.yaml`: which features a data set has, of which type, in which files.

The rules are those of NVIDIA's DLRM and DCNv2 examples, whose files are read unchanged. Beyond them a
categorical feature may be int64 without a cardinality, for hashed IDs, numerical features float32, and a
chunk of the type `parquet` names Parquet files whose columns are all features.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field

from persia.config.loading import load_section, naming
from persia.embedding.checks import at_least
from persia.errors import ConfigError, InvalidArgumentError, NotFoundError
from persia.validation import Section

_ID_TYPES = ("int8", "int16", "int32")
_LABEL_TYPES = ("bool", "int8", "uint8")
_NUMERICAL_TYPES = ("float16", "float32")
_MAX_BYTES = 1 << 24
_Size = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class SpecFeature:
    """A feature of a `FeatureSpec`."""

    dtype: str  # of numpy
    cardinality: int | None = None  # IDs are below it; None: not categorical, or hashed IDs
    hotness: int = 1  # IDs of each sample
    alpha: float | None = None  # exponent of the power law of synthetic IDs


@dataclass(frozen=True)
class FeatureSpec:
    """The features of a data set, and the files of its mappings such as `train` and `test`.

    `load` reads one from a file, `make` makes NVIDIA's standard layout, `save` writes it.
    """

    directory: Path  # to which the names of files are relative
    features: Mapping[str, SpecFeature]
    categorical: tuple[str, ...]
    numerical: tuple[str, ...]
    label: str
    sources: Mapping[str, tuple[tuple[tuple[str, ...], str], ...]]  # mapping: (features, file) of each chunk
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # mappings of one Parquet file, directory or pattern for all features
    parquet: frozenset[str] = frozenset()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FeatureSpec:
        """Reads `path`, a file or a directory that has a `feature_spec.yaml`.

        Raises:
            NotFoundError: no such file.
            ConfigError: a file that breaks a rule of the format: names file, feature, value and rule.
        """
        file = Path(path) / "feature_spec.yaml" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise NotFoundError(f"there is no feature spec {file} (seen from {Path.cwd()}): correct the path")
        if file.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{file} has more than {_MAX_BYTES} bytes: it is no feature spec")
        # First types, key by key, then what must agree: rules of the second kind may rely on the first.
        content = load_section(_File, file)
        with naming(str(file)):
            return content.read(file.parent)

    @classmethod
    def make_parquet(
        cls,
        directory: str | os.PathLike[str],
        cardinalities: Sequence[int | None],
        *,
        num_numerical: int = 13,
        mappings: Sequence[str] = ("train", "test"),
    ) -> FeatureSpec:
        """Makes the spec of Parquet files, one folder for each mapping.

        Their columns are `label`, `num_0` and so on, and `cat_0` and so on.
        """
        names = [f"cat_{index}" for index in range(len(cardinalities))]
        features = {
            name: SpecFeature(_id_type(size), size) for name, size in zip(names, cardinalities, strict=True)
        }
        numerical = tuple(f"num_{index}" for index in range(num_numerical))
        features |= {name: SpecFeature("float32") for name in numerical} | {"label": SpecFeature("uint8")}
        sources = {mapping: (((*names, *numerical, "label"), mapping),) for mapping in mappings}
        parts = Path(directory), features, tuple(names), numerical, "label", sources
        return cls(*parts, parquet=frozenset(mappings))

    @classmethod
    def make(
        cls,
        directory: str | os.PathLike[str],
        cardinalities: Sequence[int | None],
        *,
        num_numerical: int = 13,
        hotness: Sequence[int] | None = None,
        alpha: float | None = None,
        mappings: Sequence[str] = ("train", "test"),
    ) -> FeatureSpec:
        """The standard layout: `cat_0.bin` and so on, `numerical.bin` and `label.bin` in a folder a mapping.

        Args:
            directory: of the files.
            cardinalities: of each categorical feature; None: hashed IDs, int64.
            num_numerical: numerical features, float16.
            hotness: IDs of a sample for each categorical feature; None: 1 each.
            alpha: exponent of the power law of synthetic IDs.
            mappings: names of folders.
        """
        hot = [1] * len(cardinalities) if hotness is None else list(hotness)
        if len(hot) != len(cardinalities):
            raise InvalidArgumentError(
                f"hotness has {len(hot)} values, cardinalities {len(cardinalities)}: pass one a feature"
            )
        features = {
            f"cat_{index}.bin": SpecFeature(
                _id_type(size), size, at_least(1, f"hotness[{index}]", count), alpha
            )
            for index, (size, count) in enumerate(zip(cardinalities, hot, strict=True))
        }
        categorical = tuple(features)
        numerical = tuple(f"num_{index}" for index in range(num_numerical))
        features |= {name: SpecFeature("float16") for name in numerical} | {"label": SpecFeature("bool")}
        sources = {}
        for mapping in mappings:
            chunks = [(numerical, f"{mapping}/numerical.bin")] if numerical else []
            chunks += [(("label",), f"{mapping}/label.bin")]
            chunks += [((name,), f"{mapping}/{name}") for name in categorical]
            sources[mapping] = tuple(chunks)
        return cls(Path(directory), features, categorical, numerical, "label", sources)

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Writes the spec, by default to `feature_spec.yaml` of its directory."""
        kept = ("dtype", "cardinality", "hotness", "alpha")
        features = {}
        for name, feature in self.features.items():
            values = {key: getattr(feature, key) for key in kept}
            features[name] = {
                key: value
                for key, value in values.items()
                if value is not None and (key, value) != ("hotness", 1)
            }
        content = {
            "feature_spec": features,
            "source_spec": {
                mapping: [
                    {
                        "type": "parquet" if mapping in self.parquet else "split_binary",
                        "features": list(names),
                        "files": [file],
                    }
                    for names, file in chunks
                ]
                for mapping, chunks in self.sources.items()
            },
            "channel_spec": {
                "categorical": list(self.categorical),
                "numerical": list(self.numerical),
                "label": [self.label],
            },
            "metadata": dict(self.metadata),
        }
        target = self.directory / "feature_spec.yaml" if path is None else Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    def file(self, mapping: str, feature: str) -> Path:
        """The file of a feature. Raises InvalidArgumentError for a mapping or feature that is not there."""
        for names, file in self.chunks(mapping):
            if feature in names:
                return self.directory / file
        raise InvalidArgumentError(f"source_spec[{mapping!r}] has no feature {feature!r}: correct the name")

    def chunks(self, mapping: str) -> tuple[tuple[tuple[str, ...], str], ...]:
        """(features, file) of each chunk. Raises InvalidArgumentError for an unknown mapping."""
        if mapping not in self.sources:
            raise InvalidArgumentError(
                f"the feature spec in {self.directory} has no mapping {mapping!r}: it has "
                f"{', '.join(self.sources) or 'none'}"
            )
        return self.sources[mapping]

    def slots(self, dim: int) -> dict[str, Any]:
        """The embedding config for `TrainCtx(slots=)`: embeddings of `dim` for each categorical feature."""
        at_least(1, "dim", dim)
        # A slot of its own makes a group of its own; the default has room for 255.
        bits = (
            {"feature_index_prefix_bit": len(self.categorical).bit_length()}
            if len(self.categorical) > 255
            else {}
        )
        slots: dict[str, dict[str, int]] = {name: {"dim": dim} for name in self.categorical}
        for name, slot in slots.items():
            cardinality = self.features[name].cardinality
            if cardinality is not None:
                slot["cardinality"] = cardinality
        return {**bits, "slots_config": slots}


class _Feature(BaseModel):
    """Of a file; other keys are NVIDIA's own."""

    model_config = ConfigDict(strict=True)

    dtype: str
    cardinality: _Size | None = None
    hotness: _Size | None = None
    alpha: Annotated[float, Field(ge=0)] | None = None

    def read(self, name: str) -> SpecFeature:
        try:
            dtype = str(np.dtype(self.dtype))
        except TypeError:
            raise ConfigError(f"feature {name!r}: numpy has no dtype {self.dtype!r}") from None
        return SpecFeature(dtype, self.cardinality, self.hotness or 1, self.alpha)


# Sections refuse unknown keys, as a misspelt channel would leave its features out. Features and chunks ignore
# them: NVIDIA's tools write keys of their own there.
class _Channels(Section):
    categorical: list[str]
    numerical: list[str]
    label: list[str]


class _Chunk(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["split_binary", "parquet"]
    features: list[str]
    files: list[str]


class _File(Section):
    """A `feature_spec.yaml`. Types are checked by pydantic, here what must agree among its sections."""

    feature_spec: dict[str, _Feature]
    channel_spec: _Channels
    source_spec: dict[str, list[_Chunk]] | None = None  # NVIDIA's specs of synthetic data have none
    metadata: dict[str, Any] | None = None

    def read(self, directory: Path) -> FeatureSpec:
        channels, described = self.channel_spec, self.feature_spec
        _demand(len(channels.label) == 1, f"channel_spec.label has {len(channels.label)} features: name one")
        _demand(bool(channels.categorical), "channel_spec.categorical is empty")
        used = [*channels.categorical, *channels.numerical, *channels.label]
        _demand(len(set(used)) == len(used), "channel_spec names a feature twice")
        for name in used:
            _demand(name in described, f"feature_spec lacks {name!r}, which channel_spec names")
        for name in described:
            _demand(name in used, f"channel_spec lacks {name!r}, which feature_spec describes")
        features = {name: feature.read(name) for name, feature in described.items()}
        roles = ("numerical", channels.numerical, _NUMERICAL_TYPES), ("label", channels.label, _LABEL_TYPES)
        for role, names, types in roles:
            for name in names:
                kind = features[name].dtype
                _demand(
                    kind in types,
                    f"feature {name!r}: dtype {kind} is none of {', '.join(types)}, those of a {role}",
                )
        kinds = {features[name].dtype for name in channels.numerical}
        _demand(len(kinds) < 2, f"numerical features have dtypes {', '.join(sorted(kinds))}: use one")
        for name in channels.categorical:
            _check_ids(name, features[name])
        metadata, sources = self.metadata or {}, self.source_spec or {}
        _demand(
            isinstance(metadata.get("rows") or {}, dict),
            f"metadata.rows is {metadata.get('rows')!r}, must be a mapping such as {{train: 1000}}",
        )
        return FeatureSpec(
            directory,
            features,
            tuple(channels.categorical),
            tuple(channels.numerical),
            channels.label[0],
            {name: self._chunks(name, chunks) for name, chunks in sources.items()},
            metadata,
            frozenset(name for name, chunks in sources.items() if chunks[0].type == "parquet"),
        )

    def _chunks(self, mapping: str, chunks: list[_Chunk]) -> tuple[tuple[tuple[str, ...], str], ...]:
        where, numerical = f"source_spec.{mapping}", self.channel_spec.numerical
        _demand(bool(chunks), f"{where} has no chunks")
        for index, chunk in enumerate(chunks):
            what, names, is_parquet = f"{where}[{index}]", chunk.features, chunk.type == "parquet"
            _demand(len(chunk.files) == 1, f"{what} has {len(chunk.files)} files: a chunk has one")
            _demand(
                not is_parquet or len(chunks) == 1,
                f"{where} has {len(chunks)} chunks: of Parquet, one has all features",
            )
            is_whole = names == numerical or (len(names) == 1 and names[0] not in numerical)
            _demand(
                is_parquet or is_whole,
                f"{what} has the features {', '.join(names)}: a chunk has one categorical feature, the "
                "label, or all numerical ones in the order of channel_spec",
            )
        # Counted over all chunks: a feature in two files would be read from one of them, without a word.
        had = Counter(name for chunk in chunks for name in chunk.features)
        for name in self.feature_spec:
            _demand(had[name] == 1, f"{where} has feature {name!r} {had[name]} times, must once")
        for name in had:
            _demand(name in self.feature_spec, f"{where}: unknown feature {name!r}")
        return tuple((tuple(chunk.features), chunk.files[0]) for chunk in chunks)


def _check_ids(name: str, feature: SpecFeature) -> None:
    if feature.dtype == "int64":
        return
    _demand(
        feature.dtype in _ID_TYPES,
        f"feature {name!r}: dtype {feature.dtype} is none of {', '.join(_ID_TYPES)} and int64",
    )
    _demand(feature.cardinality is not None, f"feature {name!r} has no cardinality")
    largest = int(np.iinfo(feature.dtype).max)
    _demand(
        (feature.cardinality or 0) - 1 <= largest,
        f"feature {name!r}: cardinality {feature.cardinality} does not fit {feature.dtype}, "
        f"whose largest value is {largest}",
    )


def _demand(is_right: bool, message: str) -> None:
    if not is_right:
        raise ConfigError(message)


def _id_type(cardinality: int | None) -> str:
    """The dtype that NVIDIA's tools choose."""
    if cardinality is None:
        return "int64"
    for name in _ID_TYPES:
        if cardinality < np.iinfo(name).max:
            return name
    raise InvalidArgumentError(f"cardinality {cardinality} does not fit int32: use hashed IDs, None")
