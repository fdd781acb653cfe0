"""A library over HTTP: one resident base, a network merged for each domain that is asked for.

`polymask serve LIBRARY` starts it; `create_app` gives the ASGI app, for another server or a test;
`polymask.serve.ray_app` runs it on several hosts. See docs/serve.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polymask.serve.app import create_app
    from polymask.serve.settings import Settings

__all__ = ["Settings", "create_app"]


def __getattr__(name: str) -> Any:
    # Late, because a worker process must answer its parent before it imports torch.
    if name == "create_app":
        from polymask.serve.app import create_app

        return create_app
    if name == "Settings":
        from polymask.serve.settings import Settings

        return Settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
