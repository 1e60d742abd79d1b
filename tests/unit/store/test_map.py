"""The list of the store's modules in its docstring, from which a reader starts."""

from __future__ import annotations

import pkgutil
import re

from turnwise import store


def test_the_docstring_of_the_store_names_each_of_its_modules_once() -> None:
    lines = re.findall(r"^ ([a-z_, ]+?)  ", store.__doc__ or "", re.MULTILINE)
    named = [name for line in lines for name in line.split(", ")]
    assert sorted(named) == sorted(module.name for module in pkgutil.iter_modules(store.__path__))
