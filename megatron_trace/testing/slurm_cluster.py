"""A throw-away Slurm cluster on 127.0.0.1: munged, slurmctld and several slurmd of this machine.

Debian's packages suffice, and neither systemd nor cgroups nor root is needed. Nodes n1, n2, ... are
all this machine; each claims processors that it need not have. Tested with Slurm 22.05.8.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_CONF = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,bf_hetjob_immediate,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait_s}
EnforcePartLimits=ALL
InactiveLimit=0
MinJobAge=3600
SlurmctldTimeout=60
SlurmdTimeout=120
{gres_types}
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs={cpus} RealMemory=2000 {gres} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=120 State=UP
"""  # noqa: E501  Slurm reads a node's line as one line.


def missing_programs() -> list[str]:
    """Gives the programs of Slurm and munge that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class SlurmCluster:
    """A cluster that lives as long as its context.

    Args:
        folder: Configuration, state and logs; its path must be short enough for a socket (107).
        environment: Environment of the daemons and commands; Slurm's own variables are left out.
        nodes: Number of nodes.
        cpus: Processors that each node claims.
        kill_wait_s: Seconds from TERM to KILL.
        gpus: GPUs that each node claims, device files that lead nowhere; needs root.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        *,
        nodes: int = 2,
        cpus: int = 4,
        kill_wait_s: int = 5,
        gpus: int = 0,
    ) -> None:
        self.folder = folder.resolve()
        self.nodes = nodes
        self.cpus = cpus
        self.kill_wait_s = kill_wait_s
        self.gpus = gpus
        self.environment = {
            name: value
            for name, value in environment.items()
            if not name.startswith(("SLURM_", "SBATCH_"))
        } | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def run(
        self, *command: str | Path, timeout_s: float = 60, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command of Slurm and gives its result, whatever it is."""
        return subprocess.run(
            [str(word) for word in command],
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            **options,
        )

    def state(self, job: str) -> str:
        """Gives the state of a job, such as RUNNING, or of a component such as `7+1`."""
        shown = self.run("scontrol", "show", "job", job).stdout
        states = [word[9:] for word in shown.split() if word.startswith("JobState=")]
        return states[0] if states else "UNKNOWN"

    def wait(
        self, done: Callable[[], bool], what: str, *, timeout_s: float, poll_s: float = 0.5
    ) -> None:
        """Waits until something is so.

        Raises:
            TimeoutError: It did not happen.
        """
        end = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
            time.sleep(poll_s)

    def __enter__(self) -> Self:
        """Starts the daemons and waits until all nodes are idle."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)  # munged refuses a path that a group can write.
        (self.folder / "state").mkdir(exist_ok=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        port = _free_ports(self.nodes + 1)
        (self.folder / "slurm.conf").write_text(
            _CONF.format(
                host=socket.gethostname().split(".")[0],
                user=getpass.getuser(),
                folder=self.folder,
                nodes=self.nodes,
                cpus=self.cpus,
                kill_wait_s=self.kill_wait_s,
                controller_port=port,
                first_port=port + 1,
                last_port=port + self.nodes,
                gres_types="GresTypes=gpu" if self.gpus else "",
                gres=f"Gres=gpu:{self.gpus}" if self.gpus else "",
            )
        )
        if self.gpus:
            self._make_devices()
        try:
            self._start_daemons(key)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stops everything."""
        self.stop()

    def stop(self) -> None:
        """Cancels jobs, then ends slurmds and controller, and munged last."""
        controller = self._daemons[1] if len(self._daemons) > 1 else None
        if controller is not None and controller.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                jobs = self.run("squeue", "-h", "-o", "%A", timeout_s=10).stdout.split()
                if jobs:
                    self.run("scancel", "-f", *jobs, timeout_s=10)
                end = time.monotonic() + 3 * self.kill_wait_s
                while time.monotonic() < end and self.run("squeue", "-h").stdout.strip():
                    time.sleep(0.3)
                self.run("scontrol", "shutdown", timeout_s=10)
        # munged last, by TERM: without it the others could not end.
        for daemons, signals in (
            (self._daemons[1:], (None, signal.SIGTERM, signal.SIGKILL)),
            (self._daemons[:1], (signal.SIGTERM, signal.SIGKILL)),
        ):
            for sent in signals:
                for daemon in daemons:
                    if sent is not None and daemon.poll() is None:
                        daemon.send_signal(sent)
                end = time.monotonic() + 5
                while time.monotonic() < end and any(d.poll() is None for d in daemons):
                    time.sleep(0.05)
        self._daemons = []

    def _start_daemons(self, key: Path) -> None:
        folder, conf = self.folder, str(self.folder / "slurm.conf")
        end = time.monotonic() + 60
        self._spawn(
            *("munged", "-F", "--force", f"--socket={folder}/munge.sock", f"--key-file={key}"),
            *(f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"),
            f"--log-file={folder}/munged.log",
        )
        while not (folder / "munge.sock").exists():
            self._require_alive(end)
        self._spawn("slurmctld", "-D", "-c", "-f", conf)
        for number in range(1, self.nodes + 1):
            self._spawn("slurmd", "-D", "-N", f"n{number}", "-f", conf)
        while self.run("sinfo", "-h", "-N", "-o", "%T").stdout.split() != ["idle"] * self.nodes:
            self._require_alive(end)

    def _make_devices(self) -> None:
        # Slurm sets CUDA_VISIBLE_DEVICES for device files only: these are /dev/null by other names.
        for number in range(self.gpus):
            os.mknod(self.folder / f"nvidia{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(
            f"NodeName=n[1-{self.nodes}] Name=gpu File={self.folder}/nvidia[0-{self.gpus - 1}]\n"
        )

    def _spawn(self, *command: str) -> None:
        with (self.folder / "daemons.txt").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _require_alive(self, end: float) -> None:
        dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
        if dead or time.monotonic() > end:
            said = (self.folder / "daemons.txt").read_text()[-2000:]
            raise RuntimeError(f"Slurm did not start ({dead or 'in time'}):\n{said}")
        time.sleep(0.1)


def _free_ports(count: int) -> int:
    """Gives the first of some consecutive free ports, below those that connections get."""

    def free(port: int) -> bool:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
            return True

    first = 20000 + os.getpid() * 7 % 10000
    while not all(free(first + n) for n in range(count)):
        first += count
    return first
