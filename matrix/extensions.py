"""Backends and accelerators of other packages, found by entry point."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Protocol, TypeVar

from matrix.errors import UsageError


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


def load(group: str, kind: type[T], shipped: Iterable[T]) -> dict[str, T]:
    """The shipped objects and those that entry points of `group` name, by their `name`.

    Raises:
        UsageError: an entry point does not load, is no `kind`, or takes a name that is taken.
    """
    found = {each.name: each for each in shipped}
    for point in sorted(entry_points(group=group), key=lambda each: (each.name, each.value)):
        origin = f"entry point '{point.name} = {point.value}' of group {group}"
        try:
            loaded = point.load()
        except Exception as error:  # whatever a foreign module raises at import
            raise UsageError(f"{origin} does not load: {type(error).__name__}: {error}") from error
        if not isinstance(loaded, kind):
            raise UsageError(f"{origin} is a {type(loaded).__name__}, expected a {kind.__module__}.{kind.__name__}")
        if loaded.name in found:
            raise UsageError(f"{origin} takes the name '{loaded.name}', which is taken")
        found[loaded.name] = loaded
    return found
