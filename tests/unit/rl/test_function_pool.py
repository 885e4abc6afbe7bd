"""A user's function in processes of its own: what goes wrong costs the call that it was."""

import os

import pytest

from megatron_trace.rl.function_pool import Failure, FunctionPool
from megatron_trace.testing.processes import came_true

FUNCTIONS = """
import os, sys, time
import beside

def act(what, value=1.0):
    print("printed to where answers could be")
    if what == "raise":
        raise KeyError("no such field")
    if what == "hang":
        time.sleep(3600)
    if what == "start and hang":
        import subprocess
        subprocess.run(["sleep", str(value)])
    if what == "exit":
        sys.exit(3)
    if what == "crash":
        os.kill(os.getpid(), 11)
    if what == "pid":
        return os.getpid()
    return value

def reply(value):
    return value

not_a_function = beside.NUMBER
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "beside.py").write_text("NUMBER = 3\n")
    path = folder / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def pool_of(module):
    pools = []

    def pool_of(function="act", result="number", **limits):
        limits = {"num_workers": 2, "timeout_s": 300.0} | limits
        pools.append(FunctionPool(f"{module}:{function}", result=result, **limits))
        return pools[-1]

    yield pool_of
    for pool in pools:
        pool.close()


def kinds(results):
    return [result.kind if isinstance(result, Failure) else result for result in results]


def test_results_come_in_the_order_of_the_calls(pool_of):
    assert pool_of().results([("give", float(n)) for n in range(20)]) == list(range(20))


def test_a_call_that_fails_costs_only_itself(pool_of):
    calls = [("give",), ("raise",), ("crash",), ("give", 2), ("exit",), ("give", True)]
    results = pool_of().results(calls)
    assert kinds(results) == [1.0, "raised", "crashed", 2.0, "crashed", 1.0]
    assert "no such field" in results[1].sentence
    assert "signal 11" in results[2].reason
    assert "exit status 3" in results[4].reason


@pytest.mark.parametrize(
    "value", ["1", None, float("nan"), float("inf"), [1.0], 1e300, -3e38], ids=str
)
def test_what_no_advantage_follows_from_is_no_reward(pool_of, value):
    assert kinds(pool_of(num_workers=1).results([("give", value)])) == ["invalid"]


def test_a_call_that_hangs_ends_with_what_it_started(pool_of):
    # A length of sleep that no other process on the machine has.
    seconds = 3600 + os.getpid() / 1e7
    # Long enough for the other calls on a machine that is busy.
    pool = pool_of(timeout_s=3.0)
    results = pool.results([("hang",), ("give",), ("start and hang", seconds), ("give",)])
    assert kinds(results) == ["timed_out", 1.0, "timed_out", 1.0]
    # What was killed ends when it next gets its turn.
    assert came_true(lambda: not runs(str(seconds)), within_s=300)


def runs(argument):
    """Whether a process of this machine has an argument."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"/proc/{entry.name}/cmdline") as file:
                    if argument in file.read():
                        return True
            except OSError:  # It ended meanwhile.
                continue
    return False


def test_a_process_that_ended_while_it_was_idle_is_replaced(pool_of):
    pool = pool_of(num_workers=1)
    (first,) = pool.results([("pid",)])
    os.kill(int(first), 9)
    # Until all its threads ended, but without taking the status, which is the pool's to take.
    os.waitid(os.P_PID, int(first), os.WEXITED | os.WNOWAIT)
    (second,) = pool.results([("pid",)])
    assert not isinstance(second, Failure)
    assert second != first


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", "has no function absent"),
        ("not_a_function", "has no function not_a_function"),
    ],
)
def test_a_function_that_is_not_there_is_refused_at_the_start(pool_of, function, message):
    with pytest.raises(ValueError, match=message):
        pool_of(function)


def test_a_module_that_raises_is_refused_with_its_traceback(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    with pytest.raises(ValueError, match="No module named 'no_such_module'"):
        FunctionPool(f"{tmp_path}/broken.py:score", result="number", num_workers=1, timeout_s=1)


def test_a_module_is_found_in_the_current_folder(module, monkeypatch):
    monkeypatch.chdir(module.parent)
    pool = FunctionPool("functions:act", result="number", num_workers=1, timeout_s=300)
    assert pool.results([("give", 4)]) == [4.0]
    pool.close()


def test_replies_are_none_a_text_or_messages(pool_of):
    pool = pool_of("reply", result="reply", num_workers=1)
    message = {"role": "tool", "content": "7"}
    calls = [(None,), ("7",), ([message],), (7,), ([],), ([{"content": "7"}],)]
    assert kinds(pool.results(calls)) == [None, "7", [message], *["invalid"] * 3]
