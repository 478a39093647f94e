"""Imports point one way: a package imports only from packages below it."""

import ast
import re
from functools import cache
from pathlib import Path

from plaudit import plugins
from support.paths import REPOSITORY, TESTS

# From the bottom up; packages on one line do not import each other.
LEVELS = [
    ["redaction"],
    ["errors"],
    ["host", "heavy_imports", "shipped", "threads", "turns", "hub", "json_files", "wrapping", "languages"],
    ["expandable_segments", "lora_folder", "manifest", "model_files"],
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
    ["metrics_files", "sample_files"],
    ["saving"],
    ["run"],
    ["inputs", "options"],
    ["scoring"],
    ["prepare", "audit", "adapters", "serving", "convert"],
    ["loops", "doctor", "viewing"],
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


def name_of(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))


def test_a_package_imports_only_from_lower_levels():
    wrong = []
    for module in MODULES:
        here = package_of(module)
        if here == "__init__":
            continue
        for there in {name.split(".")[1] for name in imports(module) if name.startswith("plaudit.")} - {"__version__", here}:
            if there not in LEVEL:
                wrong.append(f"{name_of(module)}: add {there} to LEVELS")
            elif LEVEL[there] >= LEVEL[here] and (here, there) not in ALLOWED_SIDEWAYS | ALLOWED_UPWARDS:
                wrong.append(f"{name_of(module)}: {here} must not import {there}")
    assert not wrong, "\n".join(wrong)


def test_objectives_and_rewards_import_no_distributed_code():
    forbidden = {"rewards": ("ray", "vllm", "torch.distributed")}
    forbidden["objectives"] = (*forbidden["rewards"], "plaudit.config", "plaudit.recipe")
    wrong = [
        f"{name_of(module)}: {name}"
        for module in MODULES
        for name in imports(module)
        if name.startswith(forbidden.get(package_of(module), ()))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_cluster_knows_ray():
    """And imports it when it is needed: most runs do without."""
    wrong = []
    for module in MODULES:
        if not name_of(module).startswith("plaudit/cluster/ray_") and "ray" in {name.partition(".")[0] for name in imports(module)}:
            wrong.append(f"{name_of(module)}: only plaudit/cluster/ray_*.py import ray")
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
            if "ray" in [imported.partition(".")[0] for imported in names]:
                wrong.append(f"{name_of(module)}: import ray inside a function")
    assert not wrong, "\n".join(wrong)


def test_no_file_is_too_long():
    long = {name_of(m): n for m in MODULES if (n := len(m.read_text().splitlines())) > 450}
    assert not long, f"split these: {long}"


# Tests ---------------------------------------------------------------------------------------------------------------

TEST_MODULES = sorted(TESTS.rglob("*.py"))


def test_no_test_module_imports_another():
    """Shared code belongs in tests/support."""
    wrong = [
        f"{name_of(module)}: {name}"
        for module in TEST_MODULES
        for name in imports(module)
        if any(part.startswith("test_") or part == "conftest" for part in name.split("."))
    ]
    assert not wrong, "\n".join(wrong)


def test_test_folders_mirror_packages():
    folders = {str(module.parent.relative_to(TESTS)) for module in TEST_MODULES if module.name.startswith("test_")}
    for folder in folders - {"attacks"}:  # on all of them
        assert (REPOSITORY / "plaudit" / folder).is_dir(), f"tests/{folder}: plaudit/{folder} does not exist"


# Documents -----------------------------------------------------------------------------------------------------------

DOCUMENTS = [
    *REPOSITORY.glob("*.md"),
    *(file for folder in ("docs", "bench", "recipes") for file in (REPOSITORY / folder).rglob("*.md")),
    REPOSITORY / "Makefile",
    *(REPOSITORY / "bench").glob("requirements-*.txt"),
]


def test_paths_named_in_documents_exist():
    named = r"(?<![\w/.])(?:tests|bench|recipes|plaudit|docs)/[\w./-]*\w"
    wrong = [
        f"{name_of(document)}: {path}"
        for document in DOCUMENTS
        for path in re.findall(named, document.read_text(encoding="utf-8"))
        if Path(path).name not in ("x.py", "x") and not (REPOSITORY / path).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_a_reward_is_named_after_its_file():
    """Otherwise a recipe could not name it: `kind: x` is looked up as a class in x.py."""
    wrong = []
    for file in sorted((REPOSITORY / "plaudit/rewards").rglob("*.py")):
        kinds = re.findall(r'^    kind: Literal\["(\w+)"\]', file.read_text(encoding="utf-8"), re.M)
        if kinds not in ([], [file.stem]):
            wrong.append(f"{name_of(file)} has the kinds {kinds}")
        elif kinds and file.stem not in plugins.kinds("rewards"):
            wrong.append(f"{name_of(file)} has no class named after it")
    assert not wrong, "\n".join(wrong)


def test_tags_of_thoughts_are_written_in_one_module():
    from plaudit.response_files import TAGS

    found = [
        f"{module.relative_to(REPOSITORY)}:{node.lineno}"
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip() in TAGS
    ]
    assert {place.partition(":")[0] for place in found} == {"plaudit/response_files.py"}, found
