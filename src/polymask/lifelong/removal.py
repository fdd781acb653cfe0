"""A domain leaves its library, with all that was kept for it."""

from pathlib import Path

from polymask.files import SUFFIX, exemplars_path
from polymask.library.versions import kept_versions, version_path


def remove_pack(path: Path) -> None:
    """Delete a pack, its exemplars, and its versions, which a later domain of its name could be rolled back to.

    Whoever calls has the pack `locked`, and has looked who draws on it (`pack.sources.drawing_on`).
    """
    numbers = kept_versions(path.parent).get(path.name.removesuffix(SUFFIX), [])
    path.unlink()
    exemplars_path(path).unlink(missing_ok=True)
    for number in numbers:
        version_path(path, number).unlink(missing_ok=True)
