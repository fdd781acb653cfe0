import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from polymask.data.load import load_data
from polymask.data.split import require_vision
from polymask.errors import DataError
from polymask.nets.zoo import import_torchvision


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("digit", "did you mean digits"),
        ("torchvison:MNIST", "did you mean torchvision:MNIST"),
        ("zzz", "give a folder, a .csv file, decathlon:…, sketch:…, hf:…, torchvision:…, or digits"),
    ],
)
def test_an_unknown_source_suggests_near_ones(source: str, hint: str) -> None:
    with pytest.raises(DataError, match=hint):
        load_data(source)


def test_a_folder_with_a_near_name_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "flowers").mkdir()
    with pytest.raises(DataError, match=r"did you mean .*flowers\?"):
        load_data(f"{tmp_path}/flower")


def test_impossible_numbers_are_refused() -> None:
    for wrong in ({"seed": -1}, {"limit": 0}):
        with pytest.raises(DataError, match="give a seed from 0 and a limit from 1"):
            load_data("digits", **wrong)


def test_a_missing_package_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'polymask\[demo\]'"):
        load_data("digits")


def test_importing_the_data_package_imports_nothing_heavy_but_torch() -> None:
    code = (
        "import sys, polymask.data;"
        "heavy = {'PIL', 'torchvision', 'sklearn', 'matplotlib', 'datasets', 'timm'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torchvision_imports_beside_any_torch_and_only_once() -> None:
    code = (
        "from polymask.nets.zoo import import_torchvision;"
        "first = import_torchvision(); assert import_torchvision() is first;"
        "import torchvision.transforms.v2"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_torchvision_is_imported_with_values_whatever_the_callers_device(tmp_path: Path) -> None:
    stand_in = tmp_path / "torchvision" / "__init__.py"  # 0.21 does the like, newer ones do not
    stand_in.parent.mkdir()
    stand_in.write_text("import torch; HALF = (torch.ones(1) / 2).item()")
    code = (
        "import sys, torch; from polymask.nets.zoo import import_torchvision;"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "with torch.device('meta'): assert import_torchvision().HALF == 0.5"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_torchvision_is_an_import_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'polymask\[vision\]'"):
        import_torchvision()
    with pytest.raises(DataError, match=r"pip install 'polymask\[vision\]'"):
        require_vision("torchvision.datasets")


def test_the_first_classes_of_a_domain_can_be_taken_alone() -> None:
    whole, few = load_data("digits"), load_data("digits", classes=3)
    assert few.classes == whole.classes[:3]
    for part, split in few.splits().items():
        assert len(split) == (whole.splits()[part].labels < 3).sum()
    assert few.notes[-1] == "only the first 3 of 10 classes"
    assert load_data("digits", classes=10).notes == whole.notes
    with pytest.raises(DataError, match="1 classes are too few"):
        load_data("digits", classes=1)
