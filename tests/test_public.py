"""The public door."""

import ast
import subprocess
import sys
from pathlib import Path

import polymask as pm


def test_every_public_name_can_be_had_and_is_documented():
    for name in pm.__all__:
        value = getattr(pm, name)
        assert name == "__version__" or value.__doc__, name
    assert set(pm.__all__) <= set(dir(pm))


def test_the_names_for_type_checkers_are_those_at_run_time():
    tree = ast.parse(Path(pm.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {(node.module.removeprefix("polymask."), alias.name) for node in block.body for alias in node.names}
    assert declared == {(module, name) for name, module in pm._MODULE_OF.items()}


def test_no_module_has_a_public_name():
    # Importing polymask.x puts the module x in the package, in place of a function of that name.
    modules = {path.stem for path in Path(pm.__file__).parent.iterdir()}
    assert not modules & set(pm.__all__)


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, polymask; print({'torch', 'numpy', 'timm'} & sys.modules.keys() or 'light')"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "light"


def test_the_core_imports_neither_torchvision_nor_timm():
    code = (
        "import sys, torch, polymask as pm; net = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3));"
        "base = pm.load_base(net); pm.new_domain(base, 'affine-full');"
        "print({'torchvision', 'timm', 'PIL', 'rich', 'tyro'} & sys.modules.keys() or 'light')"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "light"
