"""Accuracies in a JSON file, with as many decimals as they are written with."""

import json
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from polymask.errors import BenchmarkError

_PARTS = ("accuracy", "reference", "params")


@dataclass(frozen=True)
class Row:
    """Accuracies in percent by name of domain, and the decimals that they are written with."""

    values: dict[str, float]
    decimals: int


@dataclass(frozen=True)
class Accuracies:
    """What a file says of one system."""

    accuracy: Row
    reference: Row | None = None
    params: float | None = None


def read_accuracies(path: str | Path) -> Accuracies:
    """Read `{domain: percent}` or `{"accuracy": {…}, "reference": {…}, "params": 1.17}`.

    A row has the decimals of its longest number, since writers of JSON drop a last zero.
    """
    path = Path(path)
    content = _read(path)
    if "accuracy" not in content:
        content = {"accuracy": content}
    for name in content:
        if name not in _PARTS:
            raise BenchmarkError(
                f'{path}: {name!r} has no meaning beside "accuracy"; there may be "reference" and "params"'
            )
    params = content.get("params")
    if params is not None and not isinstance(params, Decimal):
        raise BenchmarkError(f"{path}: params must be a number, as 1.17")
    return Accuracies(
        _row(path, content["accuracy"], "accuracy"),
        _row(path, content["reference"], "reference") if "reference" in content else None,
        None if params is None else float(params),
    )


def _row(path: Path, content: Any, what: str) -> Row:
    if not isinstance(content, dict) or not content:
        raise BenchmarkError(f"{path}: {what} must give a percentage for each domain by its name")
    for name, value in content.items():
        if not isinstance(value, Decimal):
            raise BenchmarkError(f"{path}: the {what} of {name!r} must be a number, as 82.4")
    if 0 < max(content.values()) <= 1:
        raise BenchmarkError(f"{path}: no {what} is above 1, so they look like fractions; give percent, 82.4 for 0.824")
    values = {name: float(value) for name, value in content.items()}
    return Row(values, max(_decimals(value) for value in content.values()))


def _decimals(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)  # JSON has no NaN, and the reader below refuses it
    return max(0, -exponent)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"),
            parse_float=Decimal,
            parse_int=Decimal,
            parse_constant=_refuse,
            object_pairs_hook=_no_name_twice,
        )
    except OSError as error:
        raise BenchmarkError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise BenchmarkError(f"{path} is not JSON that can be scored: {error}") from error
    if not isinstance(content, dict):
        raise BenchmarkError(f'{path} must be a JSON object, as {{"aircraft": 52.8, …}}')
    return content


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found
