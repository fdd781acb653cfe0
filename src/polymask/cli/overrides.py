"""The fields of a recipe as options of a command."""

from collections.abc import Collection
from dataclasses import fields, make_dataclass
from typing import Any, Optional

from polymask.train.recipe import Recipe


def recipe_overrides(name: str, *, without: Collection[str]) -> Any:
    """A dataclass of a recipe's fields but some, each None unless it is given."""
    kept = [f for f in fields(Recipe) if f.name not in without]
    options: Any = make_dataclass(
        name,
        [(f.name, Optional[f.type], None) for f in kept],  # noqa: UP045
        kw_only=True,
    )
    options.__doc__ = "Fields of the recipe to change; each is as the recipe has it unless given."
    return options


def given(overrides: Any) -> dict[str, Any]:
    """Those of the fields that were given."""
    values = {f.name: getattr(overrides, f.name) for f in fields(overrides)}
    return {name: value for name, value in values.items() if value is not None}
