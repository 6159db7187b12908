"""Scripts for one process, made parallel in a few lines."""

from .config import ScriptConf, read_config
from .model import ParallelModel
from .parallelize import parallelize

__all__ = ["ParallelModel", "ScriptConf", "parallelize", "read_config"]
