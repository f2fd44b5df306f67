"""What a data loader needs of the context it runs in. Contexts implement it; they live in a layer above."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager

import torch

from persia.job.embedded import EmbeddedJob
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.counters import Counters
from persia.pipeline.lease import LeaseReaper
from persia.pipeline.prefetch import Prefetcher
from persia.pipeline.receive import StreamReceiver
from persia.pipeline.staleness import Consistency, LookupStage, Mode, lookup_stages

__all__ = ["LoaderHost"]


class LoaderHost(abc.ABC):
    """A context that can look embeddings up."""

    @property
    @abc.abstractmethod
    def backend(self) -> EmbeddingBackend:
        """Where embeddings come from."""

    @property
    @abc.abstractmethod
    def releaser(self) -> LeaseReaper:
        """Gives batches up."""

    @property
    @abc.abstractmethod
    def lookup_counters(self) -> Counters:
        """Counts the batches of this context."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device | None:
        """Where tensors go; None is the CPU."""

    @property
    @abc.abstractmethod
    def training(self) -> bool:
        """Whether batches that ask for gradients get them here."""

    @property
    def consistency(self) -> Consistency:
        """How far lookups may run ahead of updates."""
        return Consistency.HYBRID

    def lookup_stages(self, embedding_staleness: int | None) -> list[LookupStage]:
        """The lookups of a training batch, the loosest first."""
        job = Mode.of(self.consistency, embedding_staleness)
        return lookup_stages(job, self.backend.slot_modes) if self.training else [LookupStage(job)]

    @property
    @abc.abstractmethod
    def embedded_job(self) -> EmbeddedJob | None:
        """The job of this process that the context has begun; None in a cluster or another context."""

    @abc.abstractmethod
    def open_stream(self, buffer_size: int, *, ordered: bool) -> StreamReceiver:
        """Starts receiving the loaders' stream, at most once a context."""

    @abc.abstractmethod
    def attach(self, prefetcher: Prefetcher) -> None:
        """The context closes the prefetcher when it ends, and fails it when training cannot go on."""

    @abc.abstractmethod
    def detach(self, prefetcher: Prefetcher) -> None:
        """The prefetcher was closed."""

    @abc.abstractmethod
    def uneven_inputs(self) -> AbstractContextManager[object]:
        """Around the iteration of a stream: ranks may get unequal numbers of batches and end together."""
