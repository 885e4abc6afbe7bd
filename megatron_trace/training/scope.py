"""Which micro-batch the pass that runs now belongs to: forward, backward and recomputation.

Pipeline schedules forward several micro-batches before the first of them goes backward. So a scope
covers a forward pass, and the model's output remembers it: when autograd reaches that output, its
backward pass begins, and the scope is in force again until that backward pass ends.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatron_trace.compat import at_end_of_backward, backward_is_running

if TYPE_CHECKING:
    from megatron_trace.training.micro_batch import MicroBatch


@dataclass
class Scope:
    """One forward pass of a micro-batch, with its backward pass and what that recomputes.

    Attributes:
        micro_batch: The micro-batch.
        replay_routing: Whether tokens go to the rollout's experts.
        counted: What was counted already.
    """

    micro_batch: MicroBatch
    replay_routing: bool
    counted: set[object] = field(default_factory=set)

    def first_time(self, key: object) -> bool:
        """Whether the key is new; recomputation and a second pass are counted once."""
        first = key not in self.counted
        self.counted.add(key)
        return first


@dataclass
class _Backward:
    """The backward pass that runs, of a forward pass in a scope or in none.

    Only autograd's call back at its end holds it, so it also ends with a pass that raises.
    """

    scope: Scope | None


class PassEnds(Protocol):
    """What is to happen at the ends of passes."""

    def ask(self) -> None:
        """Asks for what a pass noted, as it has ended; may raise."""
        ...

    def forget(self) -> None:
        """Lets go of what a pass noted that ended otherwise."""
        ...


class Scopes:
    """Follows the passes of one model (with pipelining: of one model chunk).

    What passes note is asked for where the model's forward ends, where a backward pass ends, which
    may have recomputed some of it, and where a scope ends, in which parts of the model may have run
    by themselves; always before anybody can use gradients.

    Args:
        model: The model; every pass of it that needs gradients gets a hook on its output.
        notes: What passes note.
    """

    def __init__(self, model: torch.nn.Module, notes: PassEnds) -> None:
        self._notes = notes
        self._forward: Scope | None = None
        self._known_backward: weakref.ref[_Backward] | None = None
        model.register_forward_hook(self._remember)

    @property
    def _backward(self) -> _Backward | None:
        return None if self._known_backward is None else self._known_backward()

    @property
    def current(self) -> Scope | None:
        """The scope in force; None outside of micro-batches."""
        backward = self._backward
        if backward is not None and backward_is_running():
            return backward.scope
        return self._forward

    @property
    def is_lost(self) -> bool:
        """Whether autograd runs a backward pass of which nobody knows the forward pass."""
        return self._forward is None and self._backward is None and backward_is_running()

    @contextlib.contextmanager
    def entered(self, scope: Scope) -> Iterator[None]:
        """Puts a scope in force for a forward pass, and through its output for the backward pass.

        Raises:
            RuntimeError: Another scope is in force.
            NonFiniteError: See `NonFiniteNotes.ask`.
        """
        if self._forward is not None:
            names = self._forward.micro_batch.sample_ids
            raise RuntimeError(
                f"a micro-batch of {len(names)} samples is in force already (first: {names[0]}); "
                "scopes do not nest: leave one before entering the next"
            )
        # A backward pass outside of scopes may have raised.
        self._notes.forget()
        self._forward = scope
        try:
            yield
        except BaseException:
            self._notes.forget()
            raise
        finally:
            self._forward = None
        self._notes.ask()

    def _remember(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Ties the scope in force, or none, to the output of a forward pass."""
        self._notes.ask()
        if torch.is_tensor(output) and output.requires_grad:
            scope = self.current
            output.register_hook(lambda _: self._begin_backward(scope))

    def _begin_backward(self, scope: Scope | None) -> None:
        if self._forward is None and self._backward is None:
            self._notes.forget()  # What a backward pass noted that raised.
        backward = _Backward(scope)
        self._known_backward = weakref.ref(backward)
        at_end_of_backward(lambda: self._end_backward(backward))

    def _end_backward(self, backward: _Backward) -> None:
        # One call of backward may have gone through the outputs of several passes.
        if self._backward is backward:
            self._known_backward = None
            self._notes.ask()
