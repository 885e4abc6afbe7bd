"""The package's import directions and its two bans, read from the source text."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_trace"
FILES = sorted(PACKAGE.rglob("*.py"))
# Hands this process's environment on to programs that tests start.
STARTS_PROGRAMS = PACKAGE / "testing" / "programs.py"
LEVEL_2 = {"formats", "hints", "models", "config", "rl_config", "compat", "metrics"}
# Part of the package -> the other parts that it may import.
ALLOWED = {
    "config": {"formats", "hints"},
    "rl_config": set(),
    "compat": set(),
    "formats": set(),
    "hints": {"formats"},
    "metrics": {"formats", "hints"},
    "models": {"formats", "hints", "config", "compat"},
    "conversion": {"formats", "hints", "models", "compat"},
    "planning": {"formats", "hints", "models"},
    "launching": {"config", "formats", "hints", "models", "planning"},
    "rollout": LEVEL_2,
    "training": LEVEL_2,
    "rl": LEVEL_2 | {"rollout", "training"},
    "ptq": LEVEL_2 | {"rollout"},
    "study": LEVEL_2 | {"rollout", "training", "rl"},
    "arguments": {"config", "rl_config"},
    "testing": LEVEL_2 | {"rollout", "training", "rl", "study", "arguments"},
}


def part_of(path: Path) -> str:
    """Gives the first folder or module name below the package."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """Yields every imported dotted name with its line; `from a import b` gives `a.b`."""
    packages = ("megatron_trace", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = packages[: len(packages) + 1 - node.level] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_parts_import_only_what_lies_below_them(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    assert part in ALLOWED, f"{part} is new: give it a row in ALLOWED"
    for name, line in imported_names(path):
        package, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if package == "megatron_trace" and target not in (part, "__version__"):
            assert target in ALLOWED[part], f"{path}:{line}: {part} must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_behaviour_comes_from_arguments_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        name = getattr(node, "attr", getattr(node, "name", getattr(node, "id", None)))
        reads_environment = name in ("environ", "getenv") and path != STARTS_PROGRAMS
        assert not reads_environment, f"{path}:{node.lineno}: reads the environment"
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron."):
            names = [alias.name for alias in node.names]
            assert "get_args" not in names, f"{path}:{node.lineno}: Megatron's global arguments"
