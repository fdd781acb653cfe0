"""How a table's rows are called: a method's name as papers write it, its options, its direction."""

ARROWS = {"": "", "down": " ↓", "up": " ↑"}

_LABELS = {
    "affine-full": "Full",
    "affine-full-channel": "Full, channel-wise",
    "affine-full-no-k1": "Full, no bias",
    "affine-full-no-k2": "Full, no k2",
    "affine-full-sigmoid": "Full, sigmoid",
    "affine-simple": "Simple",
    "affine-simple-no-k1": "Simple, no bias",
    "affine-simple-sigmoid": "Simple, sigmoid",
    "ba2": "BA²",
    "ba2-25": "BA² 25 %",
    "ba2-50": "BA² 50 %",
    "ba2-75": "BA² 75 %",
    "bitdelta": "BitDelta",
    "bn-only": "BN only",
    "classifier-only": "Classifier only",
    "covnorm": "CovNorm",
    "dan": "DAN",
    "dan-diagonal": "DAN, diagonal",
    "ewc": "EWC",
    "finetune": "Individual",
    "lora-conv": "LoRA",
    "lwf": "LwF",
    "mtan": "MTAN",
    "pa-svd": "PA-SVD",
    "packnet": "PackNet",
    "parallel-adapter": "PA",
    "piggyback": "Piggyback",
    "piggyback-bn": "Piggyback BN",
    "piggyback-star": "Piggyback*",
    "piggyback-star-bn": "Piggyback* BN",
    "piggyback-star-bn-k1": "Piggyback* BN, k1",
    "progressive": "Progressive",
    "series-adapter": "RA",
    "series-adapter-decay": "RA-decay",
    "series-adapter-joint": "RA-joint",
    "series-adapter-n": "RA-N",
    "spottune": "SpotTune",
}


def label_of(method: str, direction: str = "") -> str:
    """("packnet", "down") -> "PackNet ↓"; ("ba2:norms=own", "") -> "BA² (norms=own)".

    A method that has no other name keeps its own.
    """
    name, _, options = method.partition(":")
    options = f" ({options.replace(':', ', ')})" if options else ""
    return f"{_LABELS.get(name, name)}{options}{ARROWS.get(direction, f' {direction}')}"
