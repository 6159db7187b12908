"""The formulas a second time, for all tests of this folder."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def reference():
    """The module `reference.py` beside this file."""
    spec = importlib.util.spec_from_file_location("optim_reference", Path(__file__).with_name("reference.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
