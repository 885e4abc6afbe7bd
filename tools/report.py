"""Makes one HTML page of RL runs, which needs no network: curves, tables, settings, versions.

    python tools/report.py out/tiny_rl                        every run below the folder
    python tools/report.py runs/qat runs/trace --output qat_trace.html

A run is a folder with `metrics.jsonl` and `run.json`; runs of one name under several seeds are
repetitions. Runs that are partial, empty or crashed are reported as such.
"""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

from megatron_trace.rl.html_report.page import page
from megatron_trace.rl.html_report.runs import find_runs


def main() -> None:
    """Writes the page and says which runs are not whole."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="folders of runs, or above them")
    parser.add_argument("--output", type=Path, default=Path("report.html"))
    parser.add_argument("--title", default="Reinforcement learning runs")
    args = parser.parse_args()
    if args.output.is_dir():
        parser.error(f"--output {args.output} is a folder; name the file to be written")
    runs = find_runs(args.folders)
    text = page(runs, title=args.title, made=datetime.now(UTC))
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        temporary = args.output.with_name(f"{args.output.name}.tmp-{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, args.output)
    except OSError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{args.output}: {len(runs)} runs, {len(text.encode()) / 1e3:.0f} kB")
    for run in runs:
        if not run.is_whole:
            print(f"  {run.title}: {run.status}{f' ({run.reason})' if run.reason else ''}")


if __name__ == "__main__":
    main()
