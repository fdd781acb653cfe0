"""The page at /: three files of ours, in the colours of our reports, nothing from elsewhere."""

from pathlib import Path

from fastapi import APIRouter, Response

from polymask.report.palette import variables

PAGES = Path(__file__).parent / "pages"


def pages_router() -> APIRouter:
    """The page, its style and its script."""
    routes = APIRouter(include_in_schema=False)
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {variables('dark')} }} }}"
    html, style, script = (_read(name) for name in ("index.html", "page.css", "page.js"))
    style = f":root {{ {variables('light')} }}\n{dark}\n{style}"

    @routes.get("/")
    async def index() -> Response:
        return _page(html, "text/html")

    @routes.get("/page.css")
    async def css() -> Response:
        return _page(style, "text/css")

    @routes.get("/page.js")
    async def js() -> Response:
        return _page(script, "text/javascript")

    return routes


def _read(name: str) -> str:
    return (PAGES / name).read_text("utf-8")


def _page(text: str, kind: str) -> Response:
    return Response(text, media_type=kind, headers={"Cache-Control": "no-cache"})
