"""Published ranking models as ordinary torch modules, whose embeddings come from a context of persia."""

from persia.models.dlrm import DLRM, DCNv2, DotInteraction, LowRankCrossNet, make_mlp

__all__ = ["DLRM", "DCNv2", "DotInteraction", "LowRankCrossNet", "make_mlp"]
