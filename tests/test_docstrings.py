"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import nrgpt.dynamics


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(nrgpt.dynamics.__path__)])
def test_examples(name):
    module = importlib.import_module(f"nrgpt.dynamics.{name}")
    assert doctest.testmod(module).failed == 0
