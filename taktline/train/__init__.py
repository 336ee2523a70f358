"""A model, its ranks and its training step in one object."""

from taktline.train.batches import SharedLoader
from taktline.train.elastic import Recovery
from taktline.train.pipeline import Pipeline

__all__ = ["Pipeline", "Recovery", "SharedLoader"]
