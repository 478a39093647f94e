"""Imports point one way: a package imports only from packages below it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from plaudit import plugins
from support.paths import REPOSITORY, TESTS

# From the bottom up; packages on one line do not import each other.
LEVELS = [
    ["redaction"],
    ["errors"],
    ["host", "shipped", "threads", "turns", "hub", "json_files", "wrapping", "languages"],
    ["lora_folder", "manifest", "model_files"],
    ["types", "files", "seeding", "plugins", "command_help", "response_files"],
    ["world", "balance"],
    ["input_files", "output_folder", "run_progress"],
    ["objectives", "statistics"],
    ["recipe", "other_systems"],
    ["suggestions"],
    ["recipe_file"],
    ["config"],
    ["explain"],
    ["data", "models"],
    ["report"],
    ["resumable"],
    ["checkpoint"],
    ["cluster", "servers"],
    ["rollout"],
    ["reward_models"],
    ["rewards"],
    ["train"],
    ["rl", "preference"],
    ["trackers"],
    ["run_identity"],
    ["run_folder"],
    ["metrics_files"],
    ["saving"],
    ["run"],
    ["inputs", "options"],
    ["scoring"],
    ["prepare", "audit", "adapters", "serving", "convert"],
    ["loops", "doctor"],
    ["evaluation"],
    ["api"],
    ["cli"],
    ["__main__"],
]
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
# `models` may import `data` (a policy is saved with its chat template), never the other way round.
ALLOWED_SIDEWAYS = {("models", "data")}
# The package `plaudit.rl` can be called, because it hides the function of that name.
ALLOWED_UPWARDS = {("rl", "api")}
MODULES = sorted((REPOSITORY / "plaudit").rglob("*.py"))


def package_of(module: Path) -> str:
    return module.relative_to(REPOSITORY / "plaudit").parts[0].removesuffix(".py")


@cache
def imports(module: Path) -> list[str]:
    """Every module that a file imports, at its top or inside a function."""
    found = []
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_package_imports_only_from_lower_levels(module):
    here = package_of(module)
    for name in imports(module):
        if not name.startswith("plaudit.") or here == "__init__":
            continue
        there = name.split(".")[1]
        if there in ("__version__", here):
            continue
        assert there in LEVEL, f"{module}: add {there} to LEVELS"
        assert LEVEL[there] < LEVEL[here] or (here, there) in ALLOWED_SIDEWAYS | ALLOWED_UPWARDS, f"{here} must not import {there}"


@pytest.mark.parametrize("module", [m for m in MODULES if package_of(m) in ("objectives", "rewards")], ids=str)
def test_objectives_and_rewards_import_no_distributed_code(module):
    for name in imports(module):
        assert not name.startswith(("ray", "vllm", "torch.distributed")), name
        assert package_of(module) != "objectives" or not name.startswith(("plaudit.config", "plaudit.recipe")), name


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_only_the_cluster_knows_ray(module):
    """And imports it when it is needed: most runs do without."""
    name = str(module.relative_to(REPOSITORY))
    if not name.startswith("plaudit/cluster/ray_"):
        assert not [imported for imported in imports(module) if imported.partition(".")[0] == "ray"]
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
        assert "ray" not in [imported.partition(".")[0] for imported in names], f"{name}: import ray inside a function"


def test_no_file_is_too_long():
    long = {str(m.relative_to(REPOSITORY)): n for m in MODULES if (n := len(m.read_text().splitlines())) > 450}
    assert not long, f"split these: {long}"


# Tests ---------------------------------------------------------------------------------------------------------------

TEST_MODULES = sorted(TESTS.rglob("*.py"))


@pytest.mark.parametrize("module", TEST_MODULES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_module_imports_another(module):
    """Shared code belongs in tests/support."""
    for name in imports(module):
        last = name.split(".")
        assert not any(part.startswith("test_") or part == "conftest" for part in last), f"{module}: {name}"


def test_test_folders_mirror_packages():
    folders = {str(module.parent.relative_to(TESTS)) for module in TEST_MODULES if module.name.startswith("test_")}
    for folder in folders - {"attacks"}:  # on all of them
        assert (REPOSITORY / "plaudit" / folder).is_dir(), f"tests/{folder}: plaudit/{folder} does not exist"


# Documents -----------------------------------------------------------------------------------------------------------

DOCUMENTS = [
    *REPOSITORY.glob("*.md"),
    *(file for folder in ("docs", "bench", "recipes") for file in (REPOSITORY / folder).rglob("*.md")),
    REPOSITORY / "Makefile",
    REPOSITORY / "bench/requirements-vllm.txt",
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_paths_named_in_documents_exist(document):
    for path in re.findall(r"(?<![\w/.])(?:tests|bench|recipes|plaudit|docs)/[\w./-]*\w", document.read_text(encoding="utf-8")):
        if Path(path).name not in ("x.py", "x"):
            assert (REPOSITORY / path).exists(), f"{document}: {path}"


@pytest.mark.parametrize("file", sorted((REPOSITORY / "plaudit/rewards").rglob("*.py")), ids=lambda file: file.stem)
def test_a_reward_is_named_after_its_file(file):
    """Otherwise a recipe could not name it: `kind: x` is looked up as a class in x.py."""
    kinds = re.findall(r'^    kind: Literal\["(\w+)"\]', file.read_text(encoding="utf-8"), re.M)
    assert kinds in ([], [file.stem])
    assert not kinds or file.stem in plugins.kinds("rewards"), f"{file.name} has no class named after it"


def test_tags_of_thoughts_are_written_in_one_module():
    from plaudit.response_files import TAGS

    found = [
        f"{module.relative_to(REPOSITORY)}:{node.lineno}"
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip() in TAGS
    ]
    assert {place.partition(":")[0] for place in found} == {"plaudit/response_files.py"}, found
