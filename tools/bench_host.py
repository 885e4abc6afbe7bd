"""Measures how long the host of a training takes at each place beside the kernels, on any machine.

    python tools/bench_host.py

Prints microseconds of Python of one call at each site, of the methods qat and trace: what rounds,
checks and counts values is replaced by nothing, so that what is left is what a GPU would wait for
in a micro-batch of few tokens. Each number is the least of many repetitions, of a tiny model: none
of it depends on sizes.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from megatron_trace.config import HINT_SITES, Method
from megatron_trace.formats import ops
from megatron_trace.hints.types import Site
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_trainer import RecordedRollout, recorded_rollout, tiny_trainer
from megatron_trace.training import rounding, sites
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.shape import Place


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Replaces what rounds, checks and counts values by nothing."""

    def as_it_is(values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return values

    def guided_as_it_is(values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return values, None

    def nothing(*_: Any) -> None:
        """Finds all finite, and counts nothing."""

    with (
        mock.patch.object(ops, "rtn", as_it_is),
        mock.patch.object(rounding, "guided_values", guided_as_it_is),
        mock.patch.object(sites, "note_bad_values", nothing),
    ):
        yield


def least_microseconds(run: Callable[[], Any], *, repetitions: int) -> float:
    """Gives the least time of a run."""
    least, many = float("inf"), 200
    for _ in range(repetitions):
        started = time.perf_counter()
        for _ in range(many):
            run()
        least = min(least, (time.perf_counter() - started) / many)
    return least * 1e6


def measure(method: Method, rolled: RecordedRollout, *, repetitions: int) -> dict[str, float]:
    """Gives the microseconds of each site, and of putting a micro-batch in force."""
    model, of_model = tiny_trainer(method, settings=rolled.settings, hint_sites=HINT_SITES)
    micro_batch = make_micro_batch(rolled.samples, rolled.store, of_model)
    decoder: Any = model.decoder
    dispatcher = decoder.layers[1].mlp.token_dispatcher

    def in_force() -> None:
        with of_model.micro_batch(micro_batch):
            pass

    def tokens(place: Place, x: torch.Tensor) -> None:
        of_model.quantise_rows(x, place)

    def slots(place: Place, x: torch.Tensor) -> None:
        known = of_model.dispatched_slots(place, dispatcher)
        of_model.slot_rounding(x, place, known, lambda row: (0, row)).quantised(x)

    def counted(run: Callable[[Place, torch.Tensor], None], place: Place, x: torch.Tensor) -> None:
        scope = of_model._scope_at(place)
        scope.counted.clear()  # As in a first pass.
        run(place, x)

    found = {"micro-batch": least_microseconds(in_force, repetitions=repetitions)}
    with torch.no_grad(), of_model.micro_batch(micro_batch):
        token_logprobs(model, of_model, micro_batch)  # The dispatcher then knows its tokens.
        with without_kernels():
            for site in Site:
                call, shape = tokens, (*micro_batch.valid.shape, of_model.shape.row_width(site))
                if site is Site.FC2:
                    num_slots = micro_batch.valid.numel() * of_model.shape.top_k
                    call, shape = slots, (num_slots, of_model.shape.expert_values)
                run = partial(counted, call, (0, site), torch.zeros(shape))
                found[str(site)] = least_microseconds(run, repetitions=repetitions)
    return found


def main() -> None:
    """Prints a row for each method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=15, help="of 200 calls each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with single_process(seed=0):
        rolled = recorded_rollout(sites=HINT_SITES)
        for method in ("qat", "trace"):
            found = measure(method, rolled, repetitions=options.repetitions)
            told = ", ".join(f"{name} {number:.1f} us" for name, number in found.items())
            print(f"{method}: {told}", flush=True)


if __name__ == "__main__":
    main()
