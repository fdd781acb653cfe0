"""What each address does, one file for each part of the server."""

from http import HTTPStatus
from typing import Any

from polymask.serve.answers import Problem

Responses = dict[int | str, dict[str, Any]]


def problems(*statuses: int) -> Responses:
    """The answers other than success, for the OpenAPI."""
    return {status: {"model": Problem, "description": HTTPStatus(status).phrase} for status in statuses}
