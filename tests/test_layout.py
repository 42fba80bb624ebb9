"""The layout of the package: imports point one way, and `__init__` re-exports only."""

import ast
from pathlib import Path

import pytest

import keras_efficient_attn
from keras_efficient_attn import benchmark, layers, models, ops

pytestmark = pytest.mark.any_backend

ROOT = Path(keras_efficient_attn.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
}
# Each floor, and the floors that it may import from.
FLOORS = {
    "benchmark": {"benchmark", "models", "layers", "distribution", "ops"},
    "models": {"models", "layers", "distribution", "ops"},
    "layers": {"layers", "distribution", "ops"},
    # Attention layers query it for sequences that are split across devices.
    "distribution": {"distribution", "ops"},
    "ops": {"ops"},
}
MOST_PARAMETERS = 8
# Functions whose parameters Keras or KerasHub prescribe.
PRESCRIBED = {"__init__", "call", "compute_output_spec", "score"}
BACKENDS = ("jax", "tensorflow", "torch")


def parse(module):
    return ast.parse(MODULES[module].read_text())


def imports(module):
    """Modules of the package that a module imports, at any depth of its code."""
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] != ROOT.name:
                continue
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                known = whole in MODULES or f"{whole}.__init__" in MODULES
                yield whole if known else node.module


def room(module):
    """A module's floor and, for operations, its folder."""
    parts = module.split(".")[1:]
    if parts[:1] == ["ops"]:
        return tuple(parts[:2])
    return tuple(parts[:1])


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    own = room(module)
    if own in ((), ("__init__",)):
        return
    for imported in imports(module):
        other = room(imported)
        if not other:
            assert own == ("benchmark",), "The package's version is the benchmark's."
            continue
        assert other[0] in FLOORS[own[0]], f"{module} imports {imported}"
        if own[0] == "ops" and own[1:] != ("__init__",):
            assert other in (own, ("ops", "common")), f"{module} imports {imported}"


def test_init_files_re_export_only():
    for module, path in MODULES.items():
        if path.name != "__init__.py" or path.parent == ROOT:
            continue
        for node in parse(module).body:
            docstring = isinstance(node, ast.Expr) and isinstance(
                node.value, ast.Constant
            )
            names = isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
            imported = isinstance(node, ast.Import | ast.ImportFrom)
            assert docstring or names or imported, f"{module}: line {node.lineno}"


def test_functions_have_few_parameters():
    public = {
        name
        for package in (benchmark, layers, models, ops, ops.fourier, ops.feature_maps)
        for name in dir(package)
    }
    long = []
    for module in MODULES:
        for node in ast.walk(parse(module)):
            if not isinstance(node, ast.FunctionDef):
                continue
            if node.name in PRESCRIBED or node.name in public:
                continue
            arguments = node.args
            names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            count = sum(name.arg not in ("self", "cls") for name in names)
            if count > MOST_PARAMETERS:
                long.append(f"{module}.{node.name}: {count}")
    assert not long


def test_backends_are_told_apart_in_one_place():
    """Only in `ops.common`, in the benchmark's execution, and in backend files."""
    elsewhere = []
    for module in MODULES:
        parts = module.split(".")[1:]
        own_file = any(backend in parts[-1] for backend in BACKENDS)
        if parts[:2] in (["ops", "common"], ["benchmark", "execution"]) or own_file:
            continue
        for node in ast.walk(parse(module)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                "backend.backend"
            ):
                elsewhere.append(f"{module}: line {node.lineno}")
    assert not elsewhere
