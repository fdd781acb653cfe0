"""A method as a person writes it: a name, and after colons its options and fields of the recipe.

    lora-conv:rank=4:rate=3e-3                  an option of the method, a field of the recipe
    series-adapter:recipe=residual-adapters     another recipe to start from
    ba2:norms=own                               where both have the name, the method's option

Values are true, false, none, numbers, words, or several of these with commas between.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from polymask.core.method import Method
from polymask.core.registry import create_method
from polymask.errors import MethodError, near_matches
from polymask.train.recipe import Recipe, get_recipe

_RECIPE = "recipe"
_NOT_A_ROWS = ("name", "selection", "train_on_val")  # fields that rule how all rows are measured
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class MethodText:
    """What a text says: a method's name, its options, and how its recipe differs."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe_name: str | None = None
    recipe_fields: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe that this row is trained by, where the others have `recipe`."""
        if self.recipe_name is not None:
            kept = {name: getattr(recipe, name) for name in _NOT_A_ROWS if name != "name"}
            recipe = get_recipe(self.recipe_name, **kept)
        return recipe.changed(self.recipe_fields)

    def method(self, recipe: Recipe) -> Method:
        """The method as the row's own recipe trains it."""
        return method_by(self.recipe(recipe), self.name, **self.options)


def method_by(recipe: Recipe, name: str, **options: Any) -> Method:
    """The method `name` with what a recipe decides for it, unless the options say otherwise."""
    decided = recipe.method_options(create_method(name).norms)
    return create_method(name, **(decided | options)).at_rate(recipe.rate)


def read_method(text: str) -> MethodText:
    """Read a method's text; raise where it names no option or field, or gives it no value."""
    name, *settings = text.split(":")
    options, recipe_fields = {}, {}
    recipe_name = None
    known = {f.name for f in fields(create_method(name))} - {"name"}
    allowed = {f.name for f in fields(Recipe)} - set(_NOT_A_ROWS)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not value:
            raise MethodError(f"{text}: {setting!r} is not OPTION=VALUE")
        if key in known:
            options[key] = read_value(value)
        elif key == _RECIPE:
            recipe_name = value
        elif key in allowed:
            recipe_fields[key] = read_value(value)
        else:
            raise MethodError(
                f"{text}: neither {name} nor a recipe has {key!r}; {near_matches(key, known | allowed | {_RECIPE})}"
            )
    create_method(name, **options)  # values that make no sense are refused here
    return MethodText(name, options, recipe_name, recipe_fields)


def read_value(text: str) -> Any:
    """A value as it is written after an equals sign."""
    if "," in text:
        return tuple(read_value(part) for part in text.split(",") if part)
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def write_value(value: Any) -> str:
    """What `read_value` reads as this value."""
    if isinstance(value, tuple | list):
        return ",".join(map(write_value, value))
    words = {id(word): text for text, word in _WORDS.items()}
    if value is None or isinstance(value, bool):
        return words[id(value)]
    return f"{value:g}" if isinstance(value, float) else str(value)
