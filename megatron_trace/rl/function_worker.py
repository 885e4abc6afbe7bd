"""A process that calls one function of the user's, call after call; started by `FunctionPool`.

It imports nothing of ours and no torch, so that it starts fast. What the function prints goes to
the error output.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Of larger ones the squares, whose root a group's spread is, add up to Inf in FP32.
LARGEST_REWARD = 1e18


def load_function(name: str) -> Callable[..., Any]:
    """Gives the function that `module:function` or `path/to/file.py:function` names.

    Raises:
        ValueError: The name is of another form, or the module has no such function.
    """
    module_name, _, function_name = name.rpartition(":")
    if not module_name or not function_name:
        raise ValueError(f"{name!r} must be module:function or file.py:function")
    if module_name.endswith(".py"):
        path = Path(module_name).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ValueError(f"{path} is no file of Python")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        sys.path.insert(0, str(path.parent))  # What stands beside it, it may import.
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name}")
    return function


def as_number(value: Any) -> float:
    """Gives a reward.

    Raises:
        ValueError: It is no number of at most `LARGEST_REWARD`, or NaN.
    """
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"it returned {value!r:.80}, which is no number")
    number = float(value)
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"it returned {number}, which is not from -{LARGEST_REWARD} to as much")
    return number


def as_reply(value: Any) -> str | list[dict[str, Any]] | None:
    """Gives what an environment answered: None, a text, or messages.

    Raises:
        ValueError: It is none of them.
    """
    if value is None or isinstance(value, str):
        return value
    if (
        isinstance(value, list)
        and value
        and all(isinstance(message, dict) for message in value)
        and all(isinstance(message.get("role"), str) for message in value)
    ):
        return value
    raise ValueError(
        f"it returned {value!r:.80}; expected None, a text, or a list of messages with "
        '"role" and "content"'
    )


_RESULTS: dict[str, Callable[[Any], Any]] = {"number": as_number, "reply": as_reply}


def main() -> None:
    """Answers calls until the other end of the connection closes."""
    name, kind, descriptor = sys.argv[1], sys.argv[2], int(sys.argv[3])
    connection = Connection(descriptor)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        function = load_function(name)
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        raise
    connection.send(("ready", ""))
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        connection.send(_called(function, arguments, _RESULTS[kind]))


def _called(function: Callable[..., Any], arguments: Any, checked: Callable[[Any], Any]) -> Any:
    try:
        value = function(*arguments)
    except Exception:  # noqa: BLE001  Whatever it is costs the caller one sample, and is told.
        return "raised", traceback.format_exc()
    try:
        return "value", checked(value)
    except (ValueError, TypeError, OverflowError) as error:
        return "invalid", str(error)


def _end_with_parent(parent: int) -> None:
    # The connection says so only to one that reads it, and a hung function never does.
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
