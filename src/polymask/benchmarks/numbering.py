"""How the decathlon numbers its test images and classes.

Domains are counted k = 1 … 10 in the order of their names. Image ids are k·10⁷ + 200000 + n, with n
running from 1 over train, val and test, so the test images of a domain are one run of numbers, in
the order of their file names (000001.jpg …). Category ids are k·10⁷ + c with c from 1; class c − 1
in polymask's order, which is that of category ids.
"""

from dataclasses import dataclass

from polymask.benchmarks.domains import DECATHLON

_BLOCK = 10_000_000
_FIRST_IMAGE = 200_000


@dataclass(frozen=True)
class Numbering:
    """One domain's place in the numbers."""

    domain: str
    k: int
    classes: int
    before: int  # train and val images
    test: int  # test images

    @property
    def images(self) -> range:
        """The ids of the test images."""
        first = self.k * _BLOCK + _FIRST_IMAGE + self.before + 1
        return range(first, first + self.test)

    @property
    def categories(self) -> range:
        """The ids of the classes."""
        first = self.k * _BLOCK + 1
        return range(first, first + self.classes)

    def owns_image(self, image_id: int) -> bool:
        """Whether the number is one that images of this domain may have, in any split."""
        return _FIRST_IMAGE < image_id - self.k * _BLOCK < _BLOCK


_COUNTS = {  # classes, train and val images, test images: as in the organisers' own files
    "aircraft": (100, 6_667, 3_333),
    "cifar100": (100, 50_000, 10_000),
    "daimlerpedcls": (2, 29_400, 19_600),
    "dtd": (47, 3_760, 1_880),
    "gtsrb": (43, 39_209, 12_630),
    "imagenet12": (1000, 1_281_167, 48_238),
    "omniglot": (1623, 24_345, 8_115),
    "svhn": (10, 73_257, 26_032),
    "ucf101": (101, 9_537, 3_783),
    "vgg-flowers": (102, 2_040, 6_149),
}

NUMBERINGS = {
    domain: Numbering(domain, k, *_COUNTS[domain]) for k, domain in enumerate(sorted(DECATHLON.domains), start=1)
}


def domain_of(image_id: int) -> str | None:
    """The domain whose images may have this number."""
    for domain, numbering in NUMBERINGS.items():
        if numbering.owns_image(image_id):
            return domain
    return None


def name_images(image_ids: list[int]) -> str:
    """The first of some images, with its domain, and how many more there are in which domains."""
    first, more = image_ids[0], image_ids[1:]
    text = f"image {first} of {domain_of(first) or 'no domain'}"
    if not more:
        return text
    counts: dict[str, int] = {}
    for image_id in more:
        domain = domain_of(image_id) or "no domain"
        counts[domain] = counts.get(domain, 0) + 1
    where = ", ".join(f"{count} of {domain}" for domain, count in sorted(counts.items()))
    return f"{text}, and {len(more)} more ({where})"
