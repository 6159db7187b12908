"""Models of other libraries as stacks of ours: their own blocks and parameters, in modules that a layout knows."""

from .adapt import CLASSES, adapt
from .model import Foreign

__all__ = ["CLASSES", "Foreign", "adapt"]
