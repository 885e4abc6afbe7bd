"""Lists the messages of all errors that we raise, what varies as `...`.

    python tools/error_messages.py [WORD ...]       those that contain all words

docs/when_it_goes_wrong.md gives the cures; a test compares both.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("megatron_trace", "examples", "tools")


def error_messages() -> Iterator[tuple[str, str]]:
    """Yields place (file:line) and message of every error that names one."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            for node in ast.walk(tree):
                for text in _texts(node, functions):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def _texts(node: ast.AST, functions: Mapping[str, ast.FunctionDef]) -> Iterator[str]:
    raised = node.exc if isinstance(node, ast.Raise) else None
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "error":
        raised = node  # Of a parser of flags.
    if isinstance(raised, ast.Call):
        for argument in raised.args:
            yield from filter(None, map(_text, _returned(argument, functions)))


def _returned(node: ast.expr, functions: Mapping[str, ast.FunctionDef]) -> Iterator[ast.expr]:
    """Yields what a call of a function of the same file returns; anything else as it is."""
    called = node.func if isinstance(node, ast.Call) else None
    function = functions.get(getattr(called, "attr", getattr(called, "id", "")))
    if function is None:
        yield node
        return
    for each in ast.walk(function):
        if isinstance(each, ast.Return) and each.value is not None:
            yield each.value


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values
        )
    return ""


def main(arguments: list[str] | None = None) -> None:
    """Prints the messages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="words of the message")
    options = parser.parse_args(arguments)
    for place, text in error_messages():
        if all(word.lower() in text.lower() for word in options.words):
            print(f"{place}: {text}")


if __name__ == "__main__":
    main()
