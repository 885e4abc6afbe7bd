"""Shows on this machine that a whole run works: rollouts, trainers, checkpoints, a job, evaluation.

    python tools/check_run.py --out out/check_run                   all GPUs that are visible
    python tools/check_run.py --out out/check_run --cpu             without one, a narrow model
    ... --parts start,trace,qat                                     some parts; what is there, stays

Programs and flags are those of a run of one's own: a preset of launch/models at its full width, cut
to a few layers and experts, learns to answer prompts for a moment; the FP4 engine rolls it out with
hints in files; trainers of several kinds train on the same rollouts; one goes on from a checkpoint;
launch/local.sh runs a job that rolls out and trains by turns, then evaluates. Each part is a
process (or as many as GPUs) with a log of its own. Then it is judged: every row guided, the gap
with hints far below the one without, what goes on as what was not stopped, and the digest of the
quantised weights equal in trainer, job, engine and evaluation.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from check_run_judge import MOST_OF_QAT, MOST_OF_QAT_ON_CPU, Judge, Logs, said, table

ROOT = Path(__file__).resolve().parents[1]
# Hints are read ahead, as in a large run.
AHEAD = ("--trace-prefetch", "--trace-hint-memory-mb=512")
# A model that a CPU trains in seconds; later flags replace those of the preset.
NARROW = """
    --hidden-size=64 --ffn-hidden-size=32 --num-attention-heads=4 --num-query-groups=2
    --kv-channels=32 --num-experts=8 --moe-router-topk=2 --moe-ffn-hidden-size=32
    --moe-shared-expert-intermediate-size=32 --linear-key-head-dim=16 --linear-value-head-dim=16
    --linear-num-key-heads=4 --linear-num-value-heads=8
"""
CLUSTER = """\
PYTHON={python}
GPUS_PER_NODE={ranks}
TIME_LIMIT_MIN=60
SIGNAL_S=60
"""
RUN = """\
RUN={out}/job
START={out}/start
TASKS={tasks}
EVALUATE_TASKS={tasks}
STEPS_OF_RUN={steps}
PROMPTS_PER_BATCH={prompts} SAMPLES_PER_PROMPT=8 BATCHES_PER_STEP={ranks} MAX_LAG=0
MODEL_FLAGS=({model})
ROLLOUT_FLAGS=({rollout})
WORKER_FLAGS=(--rollout-poll-s=0.2)
export MAX_LOSSES=1
TRAIN_FLAGS=({train})
"""


@dataclass(frozen=True)
class Part:
    """One command of the check.

    Attributes:
        name: Its name, and that of its log.
        command: Program and arguments.
        needs: Parts that must have ended well before.
    """

    name: str
    command: Sequence[str]
    needs: tuple[str, ...] = ()


class Run:
    """Parts, and which of them failed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out.resolve()
        self.logs = Logs(self.out)
        self.python = sys.executable
        self.problems: list[str] = []

    # What runs.

    def model(self) -> list[str]:
        """Gives the flags of the model."""
        options = self.options
        preset = ROOT / "launch" / "models" / f"{options.model}.args"
        pattern = pattern_of(preset, options.layers, attention_only=options.attention_only)
        flags = [f"@{preset}", f"@{ROOT}/launch/trace.args"]
        if options.cpu:
            flags += [f"@{ROOT}/launch/cpu.args", *NARROW.split()]
        else:
            flags += [f"--num-experts={options.experts}"]
        flags += [
            f"--hybrid-layer-pattern={pattern}",
            "--vocab-size=128",
            "--make-vocab-size-divisible-by=16",
            f"--seq-length={options.tokens}",
            f"--max-position-embeddings={options.tokens}",
        ]
        return flags + options.model_flags.split()

    def rollout(self) -> list[str]:
        """Gives the flags of rollouts."""
        options = self.options
        flags = [
            f"--trace-reward={options.reward}",
            "--trace-failed-reward=0",
            f"--rollout-max-response-tokens={options.response_tokens}",
            f"--rollout-requests={options.requests}",
        ]
        if not options.cpu:
            flags += ["--rollout-cuda-graphs", "--trace-packed-experts=auto"]
        return flags + options.rollout_flags.split()

    def train(self) -> list[str]:
        """Gives the flags of a trainer but for its folders and layout."""
        return [
            f"--micro-batch-size={self.options.micro_batch}",
            "--lr=1e-5",
            "--lr-decay-style=constant",
            "--log-interval=1",
            "--eval-iters=0",
            "--use-distributed-optimizer",
            "--dist-ckpt-optim-fully-reshardable",
        ]

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.options.prompts * 8

    def trainer(self, name: str, *flags: str, steps: int = 2, ranks: int | None = None) -> Part:
        """Gives a trainer on the recorded rollouts."""
        command = [
            *self.launcher(self.options.ranks if ranks is None else ranks),
            f"{ROOT}/examples/pretrain_trace.py",
            *self.model(),
            *self.train(),
            f"--trace-hint-dir={self.out}/rollouts",
            f"--global-batch-size={self.samples}",
            f"--train-iters={steps}",
        ]
        if not any(flag.startswith("--load") for flag in flags):
            command += [f"--load={self.out}/start", "--finetune", "--no-load-optim"]
            command += ["--no-load-rng"]
        return Part(name, [*command, *flags], ("start",))

    def launcher(self, ranks: int) -> list[str]:
        """Gives how programs of several ranks are started, or of one: it finds a free port."""
        launcher = (self.python, "-m", "torch.distributed.run", "--standalone")
        return [*launcher, f"--nproc-per-node={ranks}"]

    def parts(self) -> list[Part]:
        """Gives everything that the machine can run."""
        options, out = self.options, self.out
        record = [
            *self.launcher(1),
            f"{ROOT}/examples/record_rollouts.py",
            *self.model(),
            *self.rollout(),
            f"--rollout-tasks={options.tasks}",
            f"--rollout-output={out}/rollouts",
            f"--rollout-warm-start={options.warm_start_steps}",
            f"--rollout-warm-start-lr={options.warm_start_lr}",
            f"--rollout-prompts={2 * options.prompts}",
            f"--save={out}/start",
        ]
        ep = f"--expert-model-parallel-size={options.ranks}"
        save = (f"--save={out}/trained", "--save-interval=2")
        trace = self.trainer("trace", ep, *AHEAD, *save, steps=4)
        qat = self.trainer("qat", ep, "--trace-method=qat")
        goes_on = self.trainer("goes-on", ep, f"--load={out}/half", steps=4)
        parts = [
            Part(
                "files",
                [self.python, "tools/inspect_hints.py", f"{out}/rollouts", "--verify"],
                ("start",),
            ),
            trace,
            qat,
        ]
        if options.te:
            parts += [
                self.trainer("trace-te", ep, "--trace-experts=te"),
                self.trainer("qat-te", ep, "--trace-experts=te", "--trace-method=qat"),
                self.trainer("trace-te-recipe", ep, "--trace-experts=te_recipe"),
            ]
        if options.ranks % 2 == 0:
            tp = ("--tensor-model-parallel-size=2", "--sequence-parallel", ep)
            tp += ("--expert-tensor-parallel-size=1",)
            parts.append(self.trainer("trace-tp", *tp))
            if options.te:
                parts.append(self.trainer("trace-tp-te", *tp, "--trace-experts=te"))
        job = [str(ROOT / "launch" / "local.sh")]
        files = [str(self.out / "cluster.env"), str(self.out / "run.env")]
        evaluate = [
            *self.launcher(1),
            f"{ROOT}/examples/evaluate.py",
            *self.model(),
            *self.rollout(),
            f"--load={out}/trained",
            f"--rollout-tasks={options.tasks}",
            f"--evaluate-output={out}/evaluation",
            f"--evaluate-settings={out}/rollouts",
        ]
        return [
            Part("start", record),
            Part("job", [*job, "colocated", *files], ("start",)),  # The longest.
            *parts,
            Part("half", [self.python, "-c", HALF, str(out)], ("trace",)),
            Part(goes_on.name, goes_on.command, ("half",)),
            Part("evaluation", evaluate, ("trace",)),
            Part("job-evaluation", [*job, "evaluate", *files], ("job",)),
        ]

    def write_settings(self) -> None:
        """Writes the job's files of settings, as a user would.

        Raises:
            SystemExit: The folder has parts of another model.
        """
        options = self.options
        model, path = "\n".join(self.model()) + "\n", self.out / "model.args"
        if path.exists() and path.read_text() != model:
            raise SystemExit(f"{path} is of another model: give another --out, or its options")
        path.write_text(model)
        (self.out / "cluster.env").write_text(
            CLUSTER.format(python=self.python, ranks=options.ranks)
        )
        train = [
            *self.train(),
            *AHEAD,
            "--save-retain-interval=1000",
            f"--expert-model-parallel-size={options.ranks}",
        ]
        (self.out / "run.env").write_text(
            RUN.format(
                out=self.out,
                tasks=options.tasks,
                steps=options.steps,
                prompts=options.prompts // options.ranks,
                ranks=options.ranks,
                # A pattern is one of bash too, outside quotes.
                model=" ".join(f"'{flag}'" for flag in self.model()),
                rollout=" ".join(f"'{flag}'" for flag in self.rollout()),
                train=" ".join(train),
            )
        )

    # How it runs.

    def run(self, parts: Sequence[Part]) -> None:
        """Runs parts, some at a time, each when those that it needs have ended well."""
        with concurrent.futures.ThreadPoolExecutor(self.options.at_once) as pool:
            try:
                self.run_in(pool, parts)
            except KeyboardInterrupt:  # It reached the programs too, which end by it.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                pool.shutdown(cancel_futures=True)
                self.problems.append("it was told to stop")

    def run_in(self, pool: concurrent.futures.ThreadPoolExecutor, parts: Sequence[Part]) -> None:
        """Runs parts by threads, each of which waits for one."""
        waiting = {part.name: part for part in parts if not self.logs.ended_well(part.name)}
        running: dict[concurrent.futures.Future[bool], Part] = {}
        while waiting or running:
            for part in list(waiting.values()):
                if all(map(self.logs.ended_well, part.needs)):
                    running[pool.submit(self.run_part, part)] = waiting.pop(part.name)
            if not running:
                for name, part in waiting.items():
                    missing = [need for need in part.needs if not self.logs.ended_well(need)]
                    self.problems.append(f"{name} did not run: it needs {', '.join(missing)}")
                return
            ended, _ = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in ended:
                part = running.pop(future)
                if not future.result():
                    self.problems.append(f"{part.name} failed: {self.logs.log(part.name)}")

    def run_part(self, part: Part) -> bool:
        """Runs one part and says how it ended; its log's end is shown if it failed."""
        started = time.perf_counter()
        with self.logs.log(part.name).open("w") as log:
            status = subprocess.run(
                part.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False
            ).returncode
        seconds = time.perf_counter() - started
        said(f"{part.name}: {'ran' if status == 0 else f'status {status}'}, {seconds:.1f} s")
        if status == 0:
            self.logs.mark(part.name).touch()
        else:
            # What the launcher adds says nothing of the reason.
            own = re.split(r"\n.*/elastic/multiprocessing/api.py", self.logs.text(part.name))[0]
            said("\n".join(f"    {line}" for line in own.splitlines()[-40:]))
        return status == 0


# The checkpoint of step 2 alone, as if the trainer had been stopped there.
HALF = """
import pathlib, sys
out = pathlib.Path(sys.argv[1])
(out / "half").mkdir(exist_ok=True)
if not (out / "half" / "iter_0000002").exists():
    (out / "half" / "iter_0000002").symlink_to(out / "trained" / "iter_0000002")
(out / "half" / "latest_checkpointed_iteration.txt").write_text("2")
"""


def pattern_of(preset: Path, layers: int, *, attention_only: bool) -> str:
    """Gives the pattern of a preset's first layers, each a token mixer and its MoE."""
    lines = preset.read_text().splitlines()
    (whole,) = (line.split("=")[1] for line in lines if line.startswith("--hybrid-layer-pattern"))
    pattern = whole[: 2 * layers]
    return pattern.replace("G", "*") if attention_only else pattern


def sums(count: int) -> list[dict[str, str | int]]:
    """Gives sums of three numbers of up to two digits; a moment of learning gets some right."""
    order = random.Random(0)
    records = []
    for _ in range(count):
        numbers = [order.randrange(100) for _ in range(3)]
        total, prompt = sum(numbers), "+".join(map(str, numbers)) + "="
        records.append({"prompt": prompt, "answer": str(total), "sum": total})
    return records


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Gives the options; what the machine decides is filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of everything: 25 GB, 0.1 with --cpu")
    add("--cpu", action="store_true", help="a narrow model on a machine without a GPU")
    add("--ranks", type=int, help="of each trainer and of the job (default: all GPUs; 1 on a CPU)")
    add("--at-once", type=int, help="parts that run at a time (default 4; 1 on a CPU)")
    add(
        "--parts",
        help="names of parts, with commas between; those that ended well are not repeated",
    )
    add("--model", default="qwen3.5-35b-a3b", help="a preset (default qwen3.5-35b-a3b)")
    add("--layers", type=int, default=4, help="first layers of the preset (default 4)")
    add("--experts", type=int, default=32, help="routed experts (default 32)")
    add("--attention-only", action="store_true", help="attention in place of Gated DeltaNet")
    add("--model-flags", default="", help="more flags of the model, in one argument")
    add("--rollout-flags", default="", help="more flags of rollouts, in one argument")
    add("--tasks", type=Path, help="prompts of one's own (docs/my_data.md; default: sums)")
    add("--reward", default=f"{ROOT}/examples/my_task/rewards.py:score", help="FILE:FUNCTION")
    add("--tokens", type=int, default=64, help="longest sequence (default 64)")
    add("--response-tokens", type=int, default=8, help="longest response (default 8)")
    add("--requests", type=int, default=128, help="requests of the engine at a time (default 128)")
    add("--prompts", type=int, default=16, help="of a step, with 8 samples each (default 16)")
    add("--micro-batch", type=int, default=16, help="default 16")
    add("--steps", type=int, default=2, help="of the job (default 2)")
    add("--warm-start-steps", type=int, default=120, help="on the answers (default 120)")
    add("--warm-start-lr", type=float, help="default 1e-3, of the narrow model 4e-3")
    options = parser.parse_args(arguments)
    import torch  # Takes seconds, which --help need not.

    if not options.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --cpu checks a narrow model on the CPU instead")
    options.ranks = options.ranks or (1 if options.cpu else torch.cuda.device_count())
    options.at_once = options.at_once or (1 if options.cpu else 4)
    options.warm_start_lr = options.warm_start_lr or (4e-3 if options.cpu else 1e-3)
    options.te = not options.cpu and importlib.util.find_spec("transformer_engine") is not None
    if options.prompts % options.ranks or options.prompts * 8 % (
        options.micro_batch * options.ranks
    ):
        parser.error(f"--prompts and --micro-batch must be divisible over {options.ranks} ranks")
    options.tasks = options.tasks and options.tasks.resolve()
    file, _, function = options.reward.partition(":")
    options.reward = f"{Path(file).resolve()}:{function}"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs, judges, prints and ends with status 1 if something is off."""
    options = parse_arguments(arguments)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    run = Run(options)
    run.logs.folder.mkdir(parents=True, exist_ok=True)
    if options.tasks is None:
        options.tasks = run.out / "prompts.jsonl"
        options.tasks.write_text("".join(json.dumps(record) + "\n" for record in sums(4000)))
    run.write_settings()
    parts = run.parts()
    if options.parts:
        chosen = options.parts.split(",")
        names = [part.name for part in parts]
        if unknown := [name for name in chosen if name not in names]:
            raise SystemExit(f"no part {', '.join(unknown)} here; there are {', '.join(names)}")
        parts = [part for part in parts if part.name in chosen]
    run.run(parts)
    patterns = (flag for flag in run.model() if flag.startswith("--hybrid-layer-pattern="))
    delta_nets = any("G" in pattern.partition("=")[2] for pattern in patterns)
    most_of_qat = MOST_OF_QAT_ON_CPU if options.cpu else MOST_OF_QAT[delta_nets]
    judge = Judge(run.logs, most_of_qat=most_of_qat, steps=options.steps)
    first = judge.judge_all()
    problems = run.problems + judge.problems
    said(table(first))
    record = {"first_steps": first, "problems": problems, "options": vars(options)}
    (run.out / "check_run.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    if problems:
        raise SystemExit("not as it must be:\n  " + "\n  ".join(problems))
    said("all as it must be")


if __name__ == "__main__":
    main()
