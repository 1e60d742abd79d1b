"""A call in a child process, for what loads much and is needed for a moment.

The trainer's settings load torch, a quarter of a gigabyte, and a supervisor that has checked them would keep it.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def call_in_child(function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Return what a function returns in a fork of this process, or raise what it raises there."""
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as child:
        return child.submit(function, *arguments, **options).result()
