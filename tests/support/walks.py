"""Which files of the package a thing goes through: those whose functions ran, once everything was imported.

python walks.py learn|predict FOLDER      prints them, one a line
"""

import os
import sys
import threading
from pathlib import Path

import polymask as pm

HOUSE = f"{Path(pm.__file__).parent}{os.sep}"
IN_FUNCTION = 0x2  # the flag of code that has locals of its own: bodies of modules do not


class Walk:
    """Collects files while `on`; threads are watched that begin after it was made."""

    def __init__(self) -> None:
        self.files: set[str] = set()  # relative to the package
        self.on = False
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame, event, arg) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_flags & IN_FUNCTION and code.co_filename.startswith(HOUSE):
            self.files.add(code.co_filename.removeprefix(HOUSE))


def learn(folder: Path) -> set[str]:
    """From a folder of images to a pack, by the command line; the second time, when all is imported."""
    from image_folders import make_folder
    from polymask.cli import main

    make_folder(folder / "images")
    walk = Walk()
    for name in ("first", "second"):
        walk.on = name == "second"
        options = [
            "--data",
            str(folder / "images"),
            "--side",
            "32",
            "--epochs",
            "1",
            "--limit",
            "8",
            "--out",
            str(folder / "packs"),
        ]
        main(["learn", name, *options])
    return walk.files


def predict(folder: Path) -> set[str]:
    """From a pack that is not in memory to the server's answer; another domain was asked for before."""
    from starlette.testclient import TestClient

    from serving import LOCAL, library, make_app, picture, text

    packs = library(folder / "packs", 2)
    walk = Walk()
    with TestClient(make_app(packs), base_url=LOCAL) as client:
        for domain in ("d0", "d1"):
            walk.on = domain == "d1"
            client.post("/v1/predict", json={"domain": domain, "images": [text(picture())]}).raise_for_status()
        walk.on = False
    return walk.files


if __name__ == "__main__":
    files = {"learn": learn, "predict": predict}[sys.argv[1]](Path(sys.argv[2]))
    sys.setprofile(None)
    print("\n".join(sorted(files)))
