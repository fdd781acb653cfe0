"""Which known sets must not be mirrored: a mirrored digit, letter or sign is another or none.

The paper mirrors neither SVHN, Omniglot and GTSRB nor, for reasons it does not give, the textures
of DTD; rendered text and the other digit sets follow from the same thought.
"""

_KEEP = (
    "svhn",
    "omniglot",
    "gtsrb",
    "dtd",
    "mnist",
    "usps",
    "semeion",
    "digits",
    "sst2",
    "letters",
)


def may_mirror(name: str) -> bool:
    """Whether left-right mirroring keeps the classes of a set with this name."""
    return not any(word in name.lower() for word in _KEEP)
