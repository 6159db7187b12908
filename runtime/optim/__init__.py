"""Optimizers for large batches, to be used by the trainer or in a loop of your own: `Lamb` and `Lars`."""

from .lamb import Lamb
from .lars import Lars

__all__ = ["Lamb", "Lars"]
