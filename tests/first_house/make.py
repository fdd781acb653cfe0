"""Write the files that `test_first_house.py` reads, with the polymask that is installed.

They were written by commit 42e1a12, the last one before the modules moved to their rooms; what is
newer must read them. Run it again only for a new promise, beside a new folder: never over these.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import polymask as pm
from nets import SPEC, block_net
from polymask.errors import InterruptedTraining
from sequences import RECIPE, Interrupt, Patterns, learned_net, lesson

HERE = Path(__file__).parent
CUT = {  # the steps after which each training is cut; every epoch has eight, of each domain
    "affine-full": 20,
    "bitdelta": 50,  # in its second stage
    "ba2": 20,  # has an objective with a state
    "covnorm": 40,
    "series-adapter-joint": 40,
    "mtan": 40,
}


def main() -> None:
    """Networks, a pack of every kind of method with its logits, and trainings that were cut."""
    for name, net in (("learned", learned_net()), ("blocks", block_net())):
        save_file(net.state_dict(), HERE / f"{name}.safetensors")
    logits = {}
    images = torch.cat([batch for batch, _ in Patterns(7, 1).batches()])
    kinds = {type(pm.create_method(name)): name for name in reversed(pm.list_methods())}
    # SpotTune's packs hold a whole ResNet: too large for a repository.
    for method in sorted({*kinds.values(), "piggyback", "affine-full-channel"} - {"spottune"}):
        base = base_of(method)
        own = lesson(100, 8) if pm.create_method(method).needs_own else None
        fitted = pm.fit_all(base, lessons(), method, RECIPE.changed({"epochs": 3}), own=own)
        for name, domain in fitted.domains.items():
            domain.save(HERE / f"{method}.{name}.safetensors")
            with torch.no_grad():
                logits[f"{method}.{name}"] = domain(base, images)
    save_file({"images": images, **logits}, HERE / "logits.safetensors")
    for method, steps in CUT.items():
        try:
            pm.fit_all(
                base_of(method), lessons(), method, RECIPE,
                folder=HERE / "cut" / method, listener=Interrupt(steps),
            )  # fmt: skip
        except InterruptedTraining as stopped:
            print(method, stopped, file=sys.stderr)
    (HERE / "made.json").write_text(json.dumps({"version": pm.__version__, "commit": "42e1a12"}))


def lessons() -> dict[str, pm.Lesson]:
    """Two domains of four classes."""
    return {"stripes": lesson(1), "spots": lesson(2)}


def base_of(method: str) -> pm.Base:
    """Blocks for what routes images, every kind of layer for the rest."""
    routed = not pm.create_method(method).mergeable
    net = block_net() if routed else learned_net()
    return pm.load_base(net, name="blocks" if routed else "learned", input=SPEC)


if __name__ == "__main__":
    main()
