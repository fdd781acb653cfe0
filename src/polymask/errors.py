"""The errors a caller may meet: each names the thing, the place and the remedy."""

import re
from collections.abc import Iterable
from difflib import get_close_matches


class PolymaskError(ValueError):
    """Any problem that polymask explains to its caller.

    The library's own errors are all of this kind, so one name catches them.

        >>> import polymask as pm
        >>> try:
        ...     pm.get_recipe("quik")
        ... except pm.PolymaskError as error:
        ...     print(error)
        recipe 'quik' is not known; did you mean quick?...
    """


class BaseError(PolymaskError):
    """A base cannot be loaded, or is not what it was."""


class MethodError(PolymaskError):
    """A method is unknown, or an option of it makes no sense."""


class DomainError(PolymaskError):
    """A domain's name, classes or place in a model are wrong."""


class InputError(PolymaskError):
    """A batch of images does not fit the base."""


class FileError(PolymaskError):
    """A file cannot be written."""


class FileBusy(FileError):  # noqa: N818 - a state of things more than a fault
    """A file is being written by another process."""


class PackError(PolymaskError):
    """A pack is damaged, foreign, or made for another base."""


class PackUnavailable(PackError):  # noqa: N818 - a state of things more than a fault
    """A pack, or a file that it needs, cannot be read as things are; later it may be."""


class PackWarning(UserWarning):
    """A pack can be used, but cannot be checked as newer ones are."""


class DataError(PolymaskError):
    """Images or labels of a domain cannot be used as they are."""


class BenchmarkError(PolymaskError):
    """Accuracies, labels or a submission cannot be scored as they are."""


class EngineError(PolymaskError):
    """Jobs cannot be run where they were asked to."""


class ExportError(PolymaskError):
    """A network cannot be exported, or its export gives other outputs."""


class HubError(PolymaskError):
    """A pack cannot be fetched from the Hugging Face Hub, or pushed to it."""


class TrainingError(PolymaskError):
    """Training cannot go on."""


class NotFinite(TrainingError):  # noqa: N818 - it says what the loss is
    """The loss is infinite or not a number."""


class LostProcess(TrainingError):  # noqa: N818 - not this process's fault
    """A process that trains together with this one is gone."""


class InterruptedTraining(TrainingError):  # noqa: N818 - not a fault
    """Training was asked to stop, and has saved what it needs to go on."""


def near_matches(name: str, known: Iterable[str]) -> str:
    """How an error message ends: the most similar of the known names, or some of them where none is similar."""
    names = sorted(known)
    near = get_close_matches(re.sub(r"[*?\[\]]", "", name), names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"there is {', '.join(names[:5])}{' …' if len(names) > 5 else ''}" if names else "there is none"
