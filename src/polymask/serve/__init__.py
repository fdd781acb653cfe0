"""A library over HTTP: one resident base, and a merged network for each domain in use.

`polymask serve LIBRARY` starts it; `create_app` gives the ASGI app, for another server or a test;
`polymask.serve.ray_app` runs it on several hosts. See docs/serve.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polymask.serve.app import create_app
    from polymask.serve.settings import Settings

__all__ = ["Settings", "create_app"]


def __getattr__(name: str) -> Any:
    # Late, because a worker process must answer its parent before it imports torch.
    home = {"create_app": "app", "Settings": "settings"}.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"polymask.serve.{home}"), name)
