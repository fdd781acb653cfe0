import json
from dataclasses import asdict, replace
from pathlib import Path

from made_runs import make_domain, make_outcome, make_plan
from polymask.benchmarks.records import PLAN, Outcome, Plan, Trial, Tuned, read_record

TUNED = Tuned(
    fields=("rate",),
    domains=("cubs",),
    seed=0,
    trials=(
        Trial({"rate": 1e-4}, {"cubs": 61.5}, 61.5),
        Trial({"rate": 1e-3}, {"cubs": None}, None),
    ),
    chosen={"rate": 1e-4},
    remark="1e-3 left the numbers",
)


def test_a_plan_reads_back_its_searches_and_what_each_row_does_differently(tmp_path: Path) -> None:
    plan = make_plan(
        methods=("affine-full", "ba2:norms=own"),
        tuning={"affine-full": TUNED},
        protocols={"ba2:norms=own": {"rate": 1e-2, "milestones": [2]}},
    )
    plan.write(tmp_path)
    assert Plan.from_json(read_record(tmp_path / PLAN)) == plan


def test_a_plan_from_before_there_were_searches_still_reads(tmp_path: Path) -> None:
    plan = make_plan()
    plan.write(tmp_path)
    written = read_record(tmp_path / PLAN)
    for name in ("tuning", "protocols"):
        del written[name]
    assert Plan.from_json(written) == plan


def test_a_result_reads_back_its_flipped_bits_and_its_recipe() -> None:
    outcome = replace(
        make_outcome("affine-full", {}),
        domains={"cubs": make_domain(80.0, flipped=89, masked=3_300_000)},
        recipe={"name": "quick", "rate": 1e-3},
    )
    assert Outcome.from_json(json.loads(json.dumps(asdict(outcome)))) == outcome


def test_a_result_from_before_bits_were_counted_still_reads() -> None:
    written = asdict(make_outcome("affine-full", {"cubs": 80.0}))
    del written["recipe"]
    for name in ("flipped", "masked"):
        del written["domains"]["cubs"][name]
    read = Outcome.from_json(written)
    assert read.recipe == {}
    assert read.domains["cubs"].flipped is None
    assert read.domains["cubs"].masked is None
