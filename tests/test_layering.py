"""Imports point down. The levels are those of the file map in README.md.

A *unit* is the first name below the package (``ops``, ``config``, ...). Every import statement of
every file is read with ``ast``, also those inside functions.
"""

import ast
from pathlib import Path

PACKAGE = "dflash_jax"

# Lowest first. The package's own ``__init__`` gathers public names, so it stands below the
# programs that use them and above everything it names.
LEVELS = (
    ("config", "assets"),
    ("sharding",),
    ("pallas",),
    ("ops", "sampling"),
    ("layers", "state"),
    ("target", "draft"),
    ("steps", "diagnostics", "weights"),
    ("engine",),
    ("training",),
    ("__init__",),
    ("chat",),
    ("cli", "scripts"),
)
LEVEL_OF = {unit: level for level, units in enumerate(LEVELS) for unit in units}
SIDEWAYS = {("sampling", "ops")}
FORBIDDEN = {("engine", "target")}
ALONE = {"pallas"}
# What may change with a release of jax, and the one file that names it.
LOWERINGS = {
    "jax.experimental.pallas.triton": "common.py",
    "jax.experimental.pallas.mosaic_gpu": "mosaic.py",
}


def unit_of(path):
    """Unit of a file path relative to the repository root, e.g. ``dflash_jax/ops/norm.py``."""
    parts = Path(path).with_suffix("").parts
    if parts[0] == "scripts":
        return "scripts"
    # ``python -m dflash_jax`` is the command line.
    return "cli" if parts[1] == "__main__" else parts[1]


def imported_modules(source, path):
    """Absolute dotted names a source text imports; ``from a import b`` gives ``a.b``."""
    parts = list(Path(path).with_suffix("").parts[:-1])
    names = []
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def imported_unit(module):
    """Unit an absolute dotted name belongs to, or None when it is not ours."""
    parts = module.split(".")
    if parts[0] == "scripts":
        return "scripts"
    if parts[0] != PACKAGE:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL_OF else "__init__"


def violations(source, path):
    """One line for every import of ``source`` (the text of ``path``) that breaks a rule."""
    unit, found = unit_of(path), []
    if unit not in LEVEL_OF:
        return [f"{path}: {unit} has no level"]
    for module in imported_modules(source, path):
        for lowering, file in LOWERINGS.items():
            if module.startswith(lowering) and Path(path).parts[1:] != ("pallas", file):
                found.append(f"{path}: only pallas/{file} imports {module}")
        other = imported_unit(module)
        if other is None or other == unit:
            continue
        if unit in ALONE:
            found.append(f"{path}: {unit} imports nothing of ours, but {module}")
        elif (unit, other) in FORBIDDEN:
            found.append(f"{path}: {unit} never imports {other}")
        elif LEVEL_OF[other] > LEVEL_OF[unit]:
            found.append(f"{path}: {module} is above {unit}")
        elif LEVEL_OF[other] == LEVEL_OF[unit] and (unit, other) not in SIDEWAYS:
            found.append(f"{path}: {module} is on the level of {unit}")
    return found


def test_every_import_points_down(repository_root):
    folders = (repository_root / PACKAGE, repository_root / "scripts")
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert files
    found = []
    for file in files:
        found += violations(file.read_text("utf-8"), file.relative_to(repository_root))
    assert not found, "\n".join(found)


def test_oracles_import_nothing_of_ours(repository_root):
    for file in (repository_root / "tests" / "oracles").rglob("*.py"):
        modules = imported_modules(file.read_text("utf-8"), file.relative_to(repository_root))
        assert [m for m in modules if m.split(".")[0] in (PACKAGE, "jax", "flax")] == [], file


def test_a_planted_upward_import_is_found():
    for line in (
        "import dflash_jax.steps.verify",
        "from dflash_jax.steps import verify",
        "from dflash_jax.steps.verify import verify",
        "from ..steps import verify",
        "from .. import steps",
        "def f():\n    from dflash_jax.engine.preview import preview",
        "from dflash_jax import generate",
    ):
        assert len(violations(line, "dflash_jax/ops/norm.py")) == 1, line


def test_planted_neighbours_are_found_except_sampling_to_ops():
    assert violations("from dflash_jax.draft import model", "dflash_jax/target/model.py")
    assert violations("from dflash_jax.weights import names", "dflash_jax/steps/verify.py")
    assert violations("from dflash_jax.sampling import uniform", "dflash_jax/ops/vocab.py")
    assert violations("from dflash_jax.layers import Linear", "dflash_jax/state/gdn.py")
    assert not violations("from dflash_jax.ops import vocab", "dflash_jax/sampling/distribution.py")


def test_planted_special_rules_are_found():
    assert violations("from dflash_jax.target.model import Target", "dflash_jax/engine/generate.py")
    assert violations("from dflash_jax.config import RunConfig", "dflash_jax/pallas/common.py")
    assert violations("import dflash_jax.unheard", "dflash_jax/config.py")
    assert violations("import jax", "dflash_jax/unheard.py")
    triton = "from jax.experimental.pallas import triton as plgpu"
    assert violations(triton, "dflash_jax/pallas/softmax_attention.py")
    assert not violations(triton, "dflash_jax/pallas/common.py")
    mosaic = "from jax.experimental.pallas import mosaic_gpu"
    assert violations(mosaic, "dflash_jax/pallas/common.py")
    assert not violations(mosaic, "dflash_jax/pallas/mosaic.py")


def test_downward_and_own_imports_pass():
    assert not violations("import jax\nfrom . import norm", "dflash_jax/ops/rope.py")
    assert not violations("from dflash_jax.steps.round import speculate", "dflash_jax/engine/a.py")
    assert not violations("from dflash_jax import generate", "dflash_jax/cli.py")
    assert not violations("from dflash_jax.cli import main", "dflash_jax/__main__.py")
    assert not violations("from dflash_jax.weights import load_target", "scripts/bench.py")
