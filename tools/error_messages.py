"""Lists the messages of all errors that we raise, what varies as `...`.

    python tools/error_messages.py [WORD ...]       those that contain all words

docs/when_it_goes_wrong.md gives the cures; a test compares both.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("megatron_trace", "examples", "tools")


def error_messages() -> Iterator[tuple[str, str]]:
    """Yields place (file:line) and message of every error that names one."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                for text in _texts(node):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def _texts(node: ast.AST) -> Iterator[str]:
    raised = node.exc if isinstance(node, ast.Raise) else None
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "error":
        raised = node  # Of a parser of flags.
    if isinstance(raised, ast.Call):
        yield from (text for argument in raised.args if (text := _text(argument)))


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
