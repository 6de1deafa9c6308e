"""Every example in a public docstring runs."""

import doctest
import importlib

import pytest

MODULES = [
    "activations",
    "explaining",
    "functional",
    "integrations",
    "modules",
    "plan",
    "reference",
    "tiles",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(
        importlib.import_module(f"fused_mlp.{name}"), optionflags=doctest.ELLIPSIS
    )
    assert result.attempted
    assert not result.failed
