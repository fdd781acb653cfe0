"""What a benchmark's runs leave on disk, as plain numbers, and what a table calls its rows. Needs no torch.

The layout, with a job for each domain, or one for all where a method cannot treat them alone:

    RUNS/plan.json                      what was asked for
    RUNS/METHOD/DOMAIN/seed-0/          a job
    RUNS/METHOD/together-down/seed-0/   a job with all domains, in the order of the plan
        result.json                     what it found: a job that has it is done
        log.jsonl                       its epochs, as they came
        packs/DOMAIN.safetensors
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from polymask.errors import BenchmarkError
from polymask.files import write_atomically

PLAN, RESULT = "plan.json", "result.json"
ARROWS = {"": "", "down": " ↓", "up": " ↑"}

# One bit in a thousand. Rows that flipped 0 to 89 of 3.3 million bits, below 0.003 %, were level with rows that have no
# masks; and a thousandth of a layer's weights is not yet another layer.
LEAST_MOVED = 0.001

FACTS: dict[str, Any] = json.loads(files("polymask.benchmarks").joinpath("facts.json").read_text(encoding="utf-8"))


def label_of(method: str, direction: str = "") -> str:
    """("packnet", "down") -> "PackNet ↓"; ("ba2:norms=own", "") -> "BA² (norms=own)".

    A method that has no other name keeps its own.
    """
    name, _, options = method.partition(":")
    options = f" ({options.replace(':', ', ')})" if options else ""
    label = FACTS["labels"].get(name, name)
    return f"{label}{options}{ARROWS.get(direction, f' {direction}')}"


def method_of(label: str) -> str:
    """("PackNet ↓") -> "packnet"; ("BA² (norms=own)") -> "ba2": what `label_of` was given, without its options."""
    name = label.rstrip("".join(ARROWS.values())).partition(" (")[0].partition(":")[0]
    return next((method for method, known in FACTS["labels"].items() if known == name), name)


def counted(count: int, what: str) -> str:
    """(2, "seed") -> "2 seeds"."""
    return f"{count} {what}{'s' if count != 1 else ''}"


@dataclass(frozen=True)
class EpochPoint:
    """One epoch of training: its mean loss, then the accuracy in percent, mostly on validation."""

    epoch: int
    loss: float
    val_accuracy: float


@dataclass(frozen=True)
class LayerStatistics:
    """One site's mask and scalars at a glance; scalars of channels are averaged."""

    site: str
    kind: str  # linear, pointwise, depthwise or conv
    depth: int  # 0 is the first site that the domain transforms
    weights: int
    density: float  # the share of ones in the mask, 0 … 1
    k1: float
    k2: float
    k3: float


@dataclass(frozen=True)
class DomainFacts:
    """A domain of a plan: where its images come from, and how many there are."""

    source: str
    classes: int
    train: int
    val: int
    test: int | None  # None: its test images have no labels here
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """One set of values of a search, and what it reached on validation images, in percent."""

    values: Mapping[str, Any]  # by field
    accuracy: Mapping[str, float | None]  # by domain; None where the trial failed
    mean: float | None  # over the domains


@dataclass(frozen=True)
class Tuned:
    """How a method's fields were chosen: a short search on validation images, and its end."""

    fields: tuple[str, ...]  # of the recipe, or options of the method
    domains: tuple[str, ...]  # whose validation images were used
    seed: int
    trials: tuple[Trial, ...]
    chosen: Mapping[str, Any]  # by field
    remark: str = ""

    @property
    def at_the_end(self) -> dict[str, str]:
        """Fields whose chosen value is the "smallest" or the "largest" that was tried."""
        found = {}
        for name, value in self.chosen.items():
            tried = [trial.values.get(name) for trial in self.trials]
            numbers = [n for n in tried if isinstance(n, int | float) and not isinstance(n, bool)]
            if len(set(numbers)) > 1 and value in (min(numbers), max(numbers)):
                found[name] = "smallest" if value == min(numbers) else "largest"
        return found

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        trials = tuple(Trial(**trial) for trial in values["trials"])
        lists = {name: tuple(values[name]) for name in ("fields", "domains")}
        return cls(**{**values, **lists, "trials": trials})


@dataclass(frozen=True)
class Plan:
    """What was asked for, in words and numbers that other plans can be compared with.

    `methods` are as they were written: a name, or a name with options ("ba2:norms=own"). `tuning`
    and `protocols` go by the same texts: how a row's fields were searched for, and those fields of
    its recipe that are not as in `recipe`, by hand or by the search.
    """

    benchmark: str  # imagenet-to-sketch, decathlon, demo, or a folder's name
    base: str
    fingerprint: str
    parameters: int  # of the base, without its classifier
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    recipe: Mapping[str, Any]
    selection: str  # last, val or test
    crops: str  # 1, 5, 10 or submission
    domains: Mapping[str, DomainFacts]  # by name, in the order of ↓
    own: str | None  # the base's own domain, where it was given
    own_accuracy: float | None  # of the base's classifier there, in percent
    deviations: tuple[str, ...]  # from the paper's protocol, a sentence each
    command: str
    environment: Mapping[str, str]
    tuning: Mapping[str, Tuned] = field(default_factory=dict)
    protocols: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        domains = {
            name: DomainFacts(**{**facts, "notes": tuple(facts["notes"])}) for name, facts in values["domains"].items()
        }
        tuning = {method: Tuned.from_json(tuned) for method, tuned in values.get("tuning", {}).items()}
        lists = {name: tuple(values[name]) for name in ("methods", "seeds", "deviations")}
        return cls(**{**values, "domains": domains, "tuning": tuning, **lists})

    def chosen(self, method: str) -> Mapping[str, Any]:
        """The fields that a search chose for a method; none where there was no search."""
        return self.tuning[method].chosen if method in self.tuning else {}

    def write(self, folder: Path) -> None:
        """Write plan.json, the whole file or nothing."""
        _write(folder / PLAN, asdict(self))


@dataclass(frozen=True)
class DomainOutcome:
    """What a method reached on a domain, and what it keeps for it; accuracies in percent.

    `learned` is the test accuracy right after the domain's own training, `test_accuracy` that when
    all domains of the job were learned. Both are None where test images have no labels.
    """

    test_accuracy: float | None
    learned: float | None
    val_accuracy: float | None  # of the epoch that was kept, where val was held out
    epochs: tuple[Mapping[str, Any], ...]  # epoch, loss, train_accuracy, val_accuracy
    pack_bytes: int
    bits_per_weight: float
    components: Mapping[str, int]  # bits
    layers: tuple[LayerStatistics, ...]  # of methods with affine masks, Piggyback among them
    flipped: int | None = None  # bits of its masks that are not as they started; None: no masks
    masked: int | None = None  # bits of its masks

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        layers = tuple(LayerStatistics(**layer) for layer in values["layers"])
        return cls(**{**values, "layers": layers, "epochs": tuple(values["epochs"])})


@dataclass(frozen=True)
class Outcome:
    """What one job found.

    `direction` is "" for methods that treat domains alone, else "down" or "up": the domains in the
    plan's order, or in the reverse. `base_after` says how the base changed, where it moves:
    change, agreement, accuracy_before, accuracy_after.
    """

    method: str  # as in the plan
    registered: str  # its registered name
    options: Mapping[str, Any]
    seed: int
    direction: str
    domains: Mapping[str, DomainOutcome]
    base_after: Mapping[str, float | None] | None
    params_paper: float  # #Params for all of the plan's domains and the base's own
    params_stored: float
    seconds: float
    recipe: Mapping[str, Any] = field(default_factory=dict)  # all fields, as it was trained

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        found = {name: DomainOutcome.from_json(one) for name, one in values["domains"].items()}
        return cls(**{**values, "domains": found})

    def write(self, folder: Path) -> None:
        """Write result.json, the whole file or nothing."""
        _write(folder / RESULT, asdict(self))


@dataclass(frozen=True)
class Runs:
    """A plan, and what its jobs have found so far."""

    plan: Plan
    outcomes: tuple[Outcome, ...]


def read_runs(folder: str | Path) -> Runs:
    """Read a folder of runs; jobs that are not done are not in it."""
    folder = Path(folder)
    plan = read_plan(folder / PLAN)
    found = [read_outcome(file) for file in sorted(folder.glob(f"*/*/*/{RESULT}"))]
    rank = {method: place for place, method in enumerate(plan.methods)}
    found.sort(key=lambda o: (rank.get(o.method, len(rank)), o.method, o.direction, o.seed))
    return Runs(plan, tuple(found))


def read_plan(file: Path) -> Plan:
    """The plan that a folder of runs has."""
    content = read_record(file)
    try:
        return Plan.from_json(content)
    except (KeyError, TypeError) as error:
        raise BenchmarkError(f"{file} is not a plan of this version ({error}); give another folder") from error


def read_outcome(file: Path) -> Outcome:
    """What a job found, from its file."""
    content = read_record(file)
    try:
        return Outcome.from_json(content)
    except (KeyError, TypeError) as error:
        raise BenchmarkError(f"{file} is not a result of this version ({error}); delete it and run again") from error


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchmarkError(
            f"{path} cannot be read: {error.strerror}; give the folder that `polymask benchmark --out` wrote"
        ) from error
    except ValueError as error:
        raise BenchmarkError(f"{path} is not JSON ({error}); delete it and run again") from error
    if not isinstance(content, dict):
        raise BenchmarkError(f"{path} must be one JSON object; delete it and run again")
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


@dataclass(frozen=True)
class Movement:
    """How far masks moved: bits that are not as they started, and how many there are.

    A mask that stays where it started is a constant. What its row reaches is then due to its norms and its head, and
    says nothing of masks.
    """

    flipped: int
    masked: int

    @property
    def share(self) -> float:
        return self.flipped / self.masked

    @property
    def is_still(self) -> bool:
        """Whether so few bits moved that nothing follows for the masks."""
        return self.share < LEAST_MOVED


def movement(found: Iterable[DomainOutcome]) -> Movement | None:
    """Of all these masks together; None where there are none, or they were not counted."""
    counted = [(one.flipped, one.masked) for one in found if one.flipped is not None and one.masked]
    masked = sum(bits or 0 for _, bits in counted)
    return Movement(sum(bits for bits, _ in counted), masked) if masked else None
