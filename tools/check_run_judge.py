"""Judges what the parts of tools/check_run.py printed: whether a whole run did what it should."""

from __future__ import annotations

import re
from pathlib import Path

METRICS = ("log-prob gap", "kl rollout", "grad norm")
# At most, the gap of trace over that of qat on the policy that rolled out: on an H200 .35 to .38,
# with Gated DeltaNets .37 and .61, as fla rounds otherwise in a decode than in a prefill.
MOST_OF_QAT = {False: 0.5, True: 0.8}
# Of the narrow model, in which BF16 and the order of sums weigh more than FP4's roundings.
MOST_OF_QAT_ON_CPU = 0.9
# After a checkpoint, sums of a GPU's atomic additions may be in another order: a share of the
# value, or (of a gap) as much as two passes over the same weights differ.
GOES_ON_WITHIN, GOES_ON_NATS = 0.05, 1e-3
LEAST_GUIDED_PERCENT = 99.9
# These take the same samples twice: two steps move a wide model by .1 nats, and the guard rejects
# some of its hints (99.4 % guided on an H200).
LEAST_GUIDED_PERCENT_OF = {"trace": 95.0, "goes-on": 95.0}


class Logs:
    """What parts printed, and which of them ended well.

    Args:
        out: Folder of the run.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out / "logs"

    def log(self, name: str) -> Path:
        """Gives the file of what a part printed."""
        return self.folder / f"{name}.log"

    def mark(self, name: str) -> Path:
        """Gives the file that says that a part ended well."""
        return self.folder / f"{name}.done"

    def ended_well(self, name: str) -> bool:
        """Whether a part ran before, or now, to its end."""
        return self.mark(name).exists()

    def text(self, name: str) -> str:
        """Gives what a part printed; of the job, also what its tasks did."""
        text = self.log(name).read_text(errors="replace") if self.log(name).exists() else ""
        if name.startswith("job"):
            logs = sorted((self.out / "job" / "logs").glob("job-*/attempt-*/*.log"))
            text += "".join(path.read_text(errors="replace") for path in logs)
        return text


class Judge:
    """Looks at what parts printed.

    Args:
        logs: What they printed.
        most_of_qat: Of the gap without hints, at most so much is left with them.
        steps: Steps of the job.

    Attributes:
        problems: What is wrong.
    """

    def __init__(self, logs: Logs, *, most_of_qat: float, steps: int) -> None:
        self.logs, self.most_of_qat, self.steps = logs, most_of_qat, steps
        self.problems: list[str] = []

    def judge_all(self) -> dict[str, dict[str, float]]:
        """Notes what is wrong, and gives the first step of each trainer."""
        first: dict[str, dict[str, float]] = {}
        trainers = ("trace", "qat", "trace-te", "qat-te", "trace-te-recipe", "trace-tp")
        for name in (*trainers, "trace-tp-te", "job", "goes-on"):
            self.judge_trainer(name, first)
        for trace, qat in (
            ("trace", "qat"),
            ("trace-te", "qat-te"),
            ("trace-te-recipe", "qat-te"),
            ("trace-tp", "qat"),
            ("trace-tp-te", "qat-te"),
        ):
            if trace in first and qat in first:
                gaps = [first[name]["log-prob gap"] for name in (trace, qat)]
                if not gaps[0] < self.most_of_qat * gaps[1]:
                    self.problems.append(
                        f"the gap of {trace} is {gaps[0]:.3g}, of {qat} {gaps[1]:.3g}"
                    )
        self.judge_goes_on()
        self.judge_digests()
        self.judge_job()
        return first

    def judge_job(self) -> None:
        """Looks whether the job compared its weights in each step, and changed them."""
        if not self.logs.ended_well("job"):
            return
        text = self.logs.text("job")
        rolled_out = re.findall(r"version \d+ has the digest of its rollouts, (\w+)", text)
        if len(rolled_out) < self.steps:
            self.problems.append(f"job: weights were compared in {len(rolled_out)} steps only")
        trained = re.findall(r"^  version \d+ has digest (\w+)", text, re.M)
        if same := set(rolled_out) & set(trained[-1:]):
            self.problems.append(f"job: no step changed the quantised weights, {same.pop()}")

    def judge_trainer(self, name: str, first: dict[str, dict[str, float]]) -> None:
        """Looks at a trainer's steps and at how rows were rounded."""
        if not self.logs.ended_well(name):
            return
        text = self.logs.text(name)
        steps = iterations(text)
        if not steps:
            self.problems.append(f"{name} logged no step")
            return
        first[name] = steps[min(steps)]
        if any(not 0 < step["grad norm"] < float("inf") for step in steps.values()):
            self.problems.append(
                f"{name}: gradient norms {[s['grad norm'] for s in steps.values()]}"
            )
        ran = "TRACE ran: method " + ("qat" if name.startswith("qat") else "trace")
        if ran not in text:
            self.problems.append(f"{name} did not say '{ran}'")
        guided = re.findall(r"(fc1|k|v): +([\d.]+)% of the rows guided", text)
        if name.startswith("qat"):
            if guided or "fc1: all rounded to nearest" not in text:
                self.problems.append(f"{name} did not round all rows of fc1 to nearest")
        elif {site for site, _ in guided} != {"fc1", "k", "v"}:
            self.problems.append(f"{name}: sites {guided}")
        elif (low := min(float(share) for _, share in guided)) < LEAST_GUIDED_PERCENT_OF.get(
            name, LEAST_GUIDED_PERCENT
        ):
            self.problems.append(f"{name}: only {low}% of the rows of a site were guided")

    def judge_goes_on(self) -> None:
        """Compares the step after a checkpoint with that of who was not stopped."""
        if not (self.logs.ended_well("goes-on") and self.logs.ended_well("trace")):
            return
        whole, after = (iterations(self.logs.text(name)) for name in ("trace", "goes-on"))
        if sorted(after) != [3, 4]:
            self.problems.append(f"from the checkpoint of step 2, steps {sorted(after)} followed")
            return
        # Megatron's line of the second step after a start averages over both.
        for name in METRICS:
            one, other = whole[3].get(name), after[3].get(name)
            if one is None or other is None:
                continue
            if abs(one - other) > max(GOES_ON_WITHIN * abs(one), GOES_ON_NATS):
                self.problems.append(
                    f"step 3: {name} {other:.4g} after a checkpoint, not {one:.4g}"
                )

    def judge_digests(self) -> None:
        """Compares the quantised weights of trainers with those of engines."""
        pairs = [("trace", "evaluation", "4")]
        pairs += [("job", "job", str(n)) for n in range(1, self.steps)]
        pairs += [("job", "job-evaluation", str(self.steps))]
        for trainer, engine, version in pairs:
            if not (self.logs.ended_well(trainer) and self.logs.ended_well(engine)):
                continue
            ours = re.findall(
                rf"^  version {version} has digest (\w+)", self.logs.text(trainer), re.M
            )
            if engine == "job":
                pattern = rf"worker \w+: version {version} has digest (\w+)"
            else:
                pattern = rf"'iteration': {version}\b.*'weights_digest': '(\w+)'"
            theirs = re.findall(pattern, self.logs.text(engine))
            if not ours or not theirs or set(ours) != set(theirs):
                self.problems.append(
                    f"version {version}: digest {sorted(set(ours))} in {trainer}, "
                    f"{sorted(set(theirs))} in the engine of {engine}"
                )
            else:
                said(
                    f"version {version} of {trainer}: digest {ours[0]} in the engine too ({engine})"
                )


def iterations(text: str) -> dict[int, dict[str, float]]:
    """Gives what Megatron logged of each step."""
    found: dict[int, dict[str, float]] = {}
    for line in re.findall(r"iteration +\d+/ .*", text):
        number = int(line.split()[1].rstrip("/"))
        values = {name: re.search(rf"{name}: ([-+.\w]+)", line) for name in METRICS}
        found[number] = {name: float(value[1]) for name, value in values.items() if value}
    return found


def table(first: dict[str, dict[str, float]]) -> str:
    """Gives the first step of each trainer as text; Megatron logs no mean below 0 (-)."""
    lines = [f"{'first step of':18}" + "".join(f"{name:>15}" for name in METRICS)]
    for name, values in first.items():
        cells = (f"{values[metric]:.3e}" if metric in values else "-" for metric in METRICS)
        lines.append(f"{name:18}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def said(text: str) -> None:
    """Prints at once."""
    print(text, flush=True)
