"""A process that reads ahead: the same micro-batches, its errors, and its end."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_trace.hints import HintFiles, HintFilesWriter, HintStore, RecordKind
from megatron_trace.hints.tensor_file import DamagedFileError
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.processes import came_true, open_descriptors
from megatron_trace.testing.tiny_trainer import RecordedRollout
from megatron_trace.training import hint_reader
from megatron_trace.training.batch_content import BatchContent, map_tensors
from megatron_trace.training.hint_reader import HintReader, wants_process
from megatron_trace.training.layout import RankLayout
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.prefetch import MicroBatchPrefetcher
from megatron_trace.training.read_hints import as_sent, mapped
from megatron_trace.training.reader_messages import sample_message, sample_of
from megatron_trace.training.shared_content import content_in, told
from megatron_trace.training.shared_memory import Segment, rounded_bytes
from megatron_trace.training.staging import StagingMemory
from megatron_trace.training.staging_job import StagingJob

CPU = torch.device("cpu")
PATIENCE_S = 300


@pytest.fixture(scope="module")
def reader():
    """One process for most tests: its start takes a second."""
    reader = HintReader(CPU)
    yield reader
    reader.close()


@pytest.fixture
def files(rollout, build, tmp_path):
    """Recorded rollouts in files: the folder, its sample ids, and sites of a trainer."""
    rolled = rollout(codes=True)
    with HintFilesWriter(tmp_path) as writer:
        rolled.put_records(writer, RecordKind)
        writer.commit(rolled.samples)
    _, sites = build("trace", attention="sdpa", settings=rolled.settings)
    sites.diagnostics = True
    return tmp_path, [sample.sample_id for sample in rolled.samples], sites


def assert_same_content(got: BatchContent, expected: BatchContent) -> None:
    """Checks that contents have the same bits, field by field."""
    ours: list[torch.Tensor] = []
    map_tensors(got, lambda tensor: ours.append(tensor) or tensor)
    theirs: list[torch.Tensor] = []
    map_tensors(expected, lambda tensor: theirs.append(tensor) or tensor)
    assert len(ours) == len(theirs) > 10
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_same_bytes(a, b, f"tensor {number}")
    for name in ("order", "sample_ids", "settings_digest"):
        assert getattr(got, name) == getattr(expected, name)
    for name in ("hints", "codes"):
        ours_by_place, theirs_by_place = getattr(got, name), getattr(expected, name)
        assert ours_by_place.keys() == theirs_by_place.keys()
        for place, rows in ours_by_place.items():
            for part in ("num_bits", "scale_form", "number_format"):
                assert getattr(rows, part) == getattr(theirs_by_place[place], part), place


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_process_gives_the_bits_of_micro_batches_made_at_once(files, reader, packed, named):
    folder, names, sites = files
    store = HintFiles(folder)
    batches = [names[:2], names[2:], names[1:3]]
    samples = [[store.sample(name) for name in batch] for batch in batches]
    expected = [make_micro_batch(batch, store, sites, packed=packed) for batch in samples]
    with MicroBatchPrefetcher(
        batches if named else samples,
        HintFiles(folder),
        sites,
        max_host_bytes=None,
        packed=packed,
        reader=reader,
    ) as made:
        for got, content in zip(made, expected, strict=True):
            assert got.made_for is sites
            assert_same_content(got, content)
    assert made.peak_host_bytes >= max(content.hint_bytes for content in expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "layout", [RankLayout(tp_size=2, tp_rank=1, etp_size=2), RankLayout(cp_size=2, cp_rank=1)]
)
def test_what_is_told_of_a_model_stages_the_parts_of_its_rank(files, layout, packed):
    folder, names, sites = files
    store = HintFiles(folder)
    shape = replace(sites.shape, layout=layout, num_kv_heads=2)
    plan = replace(sites.staging_plan(), shape=shape)
    contents = []
    for of in (plan, pickle.loads(pickle.dumps(plan))):
        job = StagingJob([store.sample(name) for name in names], store, of, packed=packed)
        contents.append(job.content(StagingMemory.new(job.num_bytes, pin_memory=False)))
    assert_same_content(*contents)
    whole = make_micro_batch([store.sample(name) for name in names], store, sites, packed=packed)
    assert contents[0].hint_bytes < whole.hint_bytes


@pytest.mark.gpu
def test_on_a_gpu_page_locked_shared_memory_gives_the_same_bits(files):
    folder, names, sites = files
    store, batches = HintFiles(folder), [[name] for name in names * 3]
    expected = {
        name: make_micro_batch([store.sample(name)], store, sites) for name in dict.fromkeys(names)
    }
    reader = HintReader(sites.device)
    with MicroBatchPrefetcher(batches, store, sites, max_host_bytes=None, reader=reader) as made:
        for got, (name,) in zip(made, batches, strict=True):
            assert got.tokens.is_cuda
            assert_same_content(got, expected[name])
    assert all(segment.memory.is_pinned() for segment, _ in reader._segments.values())
    reader.close()


def test_micro_batches_that_were_given_outlive_the_memory_they_were_read_to(files, reader):
    folder, names, sites = files
    store = HintFiles(folder)
    batches = [[name] for name in names]
    with MicroBatchPrefetcher(batches, store, sites, max_host_bytes=None, reader=reader) as made:
        kept = list(made)
    for name, content in zip(names, kept, strict=True):
        assert_same_content(content, make_micro_batch([store.sample(name)], store, sites))


def test_hints_held_stay_within_the_bound(files, reader):
    folder, names, sites = files
    store = HintFiles(folder)
    largest = max(make_micro_batch([store.sample(name)], store, sites).hint_bytes for name in names)
    batches = [[name] for name in names]
    with MicroBatchPrefetcher(batches, store, sites, max_host_bytes=largest, reader=reader) as made:
        assert sum(1 for _ in made) == len(names)
    assert made.peak_host_bytes <= largest
    with (
        MicroBatchPrefetcher(batches, store, sites, max_host_bytes=99, reader=reader) as made,
        pytest.raises(ValueError, match="--trace-hint-memory-mb"),
    ):
        next(made)


def test_memory_that_is_kept_does_not_grow_beyond_what_was_in_use_at_a_time():
    reader = HintReader(CPU)
    client = reader.new_client()

    def kept_after(count: int, num_bytes: int) -> int:
        taken = [reader._segment_of(client, num_bytes) for _ in range(count)]
        for segment in taken:
            reader.release(segment)
        return sum(segment.num_bytes for segment, _ in reader._segments.values())

    many_small = kept_after(8, 16384)
    assert many_small == 8 * 16384
    assert kept_after(2, 4 * 16384) == many_small
    assert kept_after(1, 8 * 16384) == many_small
    reader.close()


def test_memory_that_the_process_does_not_get_is_given_back():
    before = open_descriptors("/memfd:trace-hints")
    closed = HintReader(CPU)
    closed.close()
    with pytest.raises(RuntimeError, match="was closed"):
        closed._segment_of(closed.new_client(), 4096)
    assert open_descriptors("/memfd:trace-hints") <= before, "a descriptor was left open"


def test_a_missing_hint_is_the_same_error_at_its_micro_batch(files, reader):
    folder, names, sites = files
    store = HintFiles(folder)
    bad = replace(store.sample(names[1]), sample_id="unknown")
    with pytest.raises(LookupError) as expected:
        make_micro_batch([bad], store, sites)
    batches = [[store.sample(names[0])], [bad]]
    with MicroBatchPrefetcher(batches, store, sites, max_host_bytes=None, reader=reader) as made:
        next(made)
        with pytest.raises(LookupError) as got:
            next(made)
    assert str(got.value) == str(expected.value)
    assert "in the process that reads hints" in got.value.__notes__[0]


def test_a_sample_that_does_not_fit_is_the_same_error(files, reader):
    folder, names, sites = files
    store = HintFiles(folder)
    bad = replace(store.sample(names[0]), settings_digest="0" * 16)
    with pytest.raises(ValueError, match="give TraceSites the settings") as expected:
        make_micro_batch([bad], store, sites)
    with (
        MicroBatchPrefetcher([[bad]], store, sites, max_host_bytes=None, reader=reader) as made,
        pytest.raises(ValueError, match="give TraceSites") as got,
    ):
        next(made)
    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize("num_taken", [0, 1, 2])
def test_after_an_early_end_the_next_pass_reads_what_it_wants(files, reader, num_taken):
    folder, names, sites = files
    store = HintFiles(folder)
    batches = [[name] for name in names * 30]
    with MicroBatchPrefetcher(batches, store, sites, max_host_bytes=None, reader=reader) as made:
        for _ in range(num_taken):
            next(made)
    last = [names[-1:]]
    with MicroBatchPrefetcher(last, store, sites, max_host_bytes=None, reader=reader) as made:
        (only,) = made
    assert_same_content(only, make_micro_batch([store.sample(names[-1])], store, sites))


def test_two_model_chunks_share_the_process(files, reader):
    folder, names, sites = files
    store = HintFiles(folder)
    first, second = (
        MicroBatchPrefetcher(
            [[name] for name in order], HintFiles(folder), sites, max_host_bytes=None, reader=reader
        )
        for order in (names, names[::-1])
    )
    with first, second:
        for a, b, name, other in zip(first, second, names, names[::-1], strict=True):
            assert_same_content(a, make_micro_batch([store.sample(name)], store, sites))
            assert_same_content(b, make_micro_batch([store.sample(other)], store, sites))


def test_a_sample_that_was_rolled_out_again_is_read_anew(files, reader, rollout):
    folder, names, sites = files
    store, batches, given = HintFiles(folder), [names[:1]], []
    rolled = rollout(codes=True)
    again = replace(rolled.samples[0], logprobs=rolled.samples[0].logprobs - 1)
    for _ in range(2):
        made = MicroBatchPrefetcher(batches, store, sites, max_host_bytes=None, reader=reader)
        with made:
            given += made
        with HintFilesWriter(folder) as writer:
            writer.drop_sample(names[0])
            RecordedRollout(rolled.store, [again], rolled.settings).put_records(writer, RecordKind)
            writer.commit([again])
    first, second = given
    assert torch.equal(second.rollout_logprobs + second.loss_mask, first.rollout_logprobs)


def test_the_process_imports_no_megatron_and_touches_no_gpu():
    code = (
        "import sys, megatron_trace.training.read_hints as read_hints, torch; "
        "print(sorted({name.split('.')[0] for name in sys.modules} & "
        "{'megatron', 'modelopt', 'transformer_engine', 'triton', 'fla'}), "
        "torch.cuda.is_initialized())"
    )
    root = str(Path(__file__).parents[3])
    said = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=root)
    assert said.strip() == "[] False"


def test_a_killed_process_is_one_error_that_names_memory(files):
    folder, names, sites = files
    reader = HintReader(CPU)
    try:
        with MicroBatchPrefetcher(
            [[name] for name in names * 30],
            HintFiles(folder),
            sites,
            max_host_bytes=None,
            reader=reader,
        ) as made:
            next(made)
            assert reader.process_id is not None
            os.kill(reader.process_id, signal.SIGKILL)
            with pytest.raises(RuntimeError, match=r"ended by SIGKILL.*--trace-hint-memory-mb"):
                for _ in made:
                    pass
    finally:
        reader.close()


def test_a_file_that_is_cut_amid_its_reading_ends_the_pass_and_not_the_process(files, reader):
    """The file is mapped: the system would say it by a signal."""
    folder, names, sites = files
    client = reader.new_client()
    reader.begin(client, sites)
    form = {"padding_token": 0, "num_positions": None, "packed": False}
    size = reader.read(client, names[:1], HintFiles(folder), **form)
    for file in folder.rglob("*.hints"):
        os.truncate(file, 0)
    with pytest.raises(DamagedFileError, match="cut to 0 of"):
        reader.stage(client, size, sites)
    reader.end(client)
    reader.begin(reader.new_client(), sites)


class Unsendable(Exception):
    def __init__(self, part: str, number: int) -> None:
        super().__init__(f"{part} of {number}")


def test_an_error_that_cannot_be_sent_arrives_by_its_words_and_place():
    try:
        raise Unsendable("file 3", 7)
    except Unsendable as error:
        sent = pickle.loads(pickle.dumps(as_sent(error)))
    assert str(sent) == "Unsendable: file 3 of 7"
    assert "in the process that reads hints" in sent.__notes__[0]
    assert "test_hint_reader.py" in sent.__notes__[0]


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_to_all_of_a_job_leaves_the_process_to_the_trainer(files, reader, sent):
    """Slurm's ahead of the time limit: the trainer finishes its step, and saves."""
    folder, names, sites = files
    batches = [[name] for name in names * 5]
    with MicroBatchPrefetcher(
        batches, HintFiles(folder), sites, max_host_bytes=None, reader=reader
    ) as made:
        next(made)
        assert reader.process_id is not None
        os.kill(reader.process_id, getattr(signal, sent))
        assert sum(1 for _ in made) == len(batches) - 1


def test_a_trainer_with_thousands_of_open_files_is_read_for(files):
    """Gloo and NCCL open as many: the process's connection then has a number beyond 1024."""
    folder, names, sites = files
    store = HintFiles(folder)
    expected = make_micro_batch([store.sample(name) for name in names], store, sites)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        number = devnull = os.open(os.devnull, os.O_RDONLY)
        opened.callback(os.close, devnull)
        while number < 1024:
            number = os.dup(devnull)
            opened.callback(os.close, number)
        reader = opened.enter_context(contextlib.closing(HintReader(CPU)))
        with MicroBatchPrefetcher(
            [names], store, sites, max_host_bytes=None, reader=reader
        ) as made:
            assert_same_content(next(made), expected)


def test_a_reader_that_is_closed_first_lets_a_pass_end_and_closes_again(files):
    folder, names, sites = files
    reader = HintReader(CPU)
    with MicroBatchPrefetcher(
        [[name] for name in names], HintFiles(folder), sites, max_host_bytes=None, reader=reader
    ) as made:
        next(made)
        reader.close()
    reader.close()
    with pytest.raises(RuntimeError, match="was closed"):
        reader.start()


@pytest.mark.parametrize("num_taken", [0, 1])
def test_a_micro_batch_that_is_taken_after_its_reader_was_closed_is_one_error(files, num_taken):
    """Whether it was read before, and waits, or is to be read."""
    folder, names, sites = files
    reader = HintReader(CPU)
    with MicroBatchPrefetcher(
        [[name] for name in names], HintFiles(folder), sites, max_host_bytes=None, reader=reader
    ) as made:
        for _ in range(num_taken):
            next(made)
        came_true(lambda: made._ahead._ready or made._ahead._ended, within_s=PATIENCE_S)
        assert made._ahead._ready
        reader.close()
        with pytest.raises(RuntimeError, match=r"was closed: take all micro-batches before"):
            list(made)


@pytest.mark.parametrize(
    ("target", "name", "value", "message"),
    [
        (hint_reader, "_START", "raise SystemExit(3)", r"could not start \(exit status 3.*"),
        (sys, "executable", "/nowhere/python", r"cannot be started.*"),
    ],
    ids=["its program ends", "no interpreter"],
)
def test_a_process_that_cannot_start_is_one_error(files, monkeypatch, target, name, value, message):
    folder, names, sites = files
    monkeypatch.setattr(target, name, value)
    reader = HintReader(CPU)
    with (
        MicroBatchPrefetcher(
            [names], HintFiles(folder), sites, max_host_bytes=None, reader=reader
        ) as made,
        pytest.raises(RuntimeError, match=message + "reader thread"),
    ):
        next(made)
    reader.close()


def test_folders_of_imports_may_be_paths(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    reader = HintReader(CPU)
    reader.start()
    reader.close()


def test_more_shared_memory_than_there_is_is_one_error_that_names_the_size():
    with pytest.raises(RuntimeError, match=rf"no {2**60} bytes .*\d+ are available; .*memory-mb"):
        Segment(0, 2**60, CPU)


def test_shared_memory_that_the_system_refuses_is_the_same_error(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(RuntimeError, match=r"no 4096 bytes .*No space left.*reader thread"):
        Segment(0, 4096, CPU)


def test_shared_memory_has_no_name_that_could_be_left():
    segment = Segment(0, 4096, CPU)
    assert os.fstat(segment.descriptor).st_nlink == 0
    segment.memory.fill_(7)
    other = mapped(os.dup(segment.descriptor), 4096)
    assert bool((other == 7).all())
    segment.close()


def test_memory_is_locked_and_unlocked_in_the_context_of_its_device(monkeypatch):
    """Of another device, the thread that reads ahead would make a context there."""
    calls, current = [], []

    class Runtime:
        class cudaError:
            success = 0

        def cudaHostRegister(self, *_):
            calls.append(("lock", *current))
            return 0

        def cudaHostUnregister(self, *_):
            calls.append(("unlock", *current))
            return 0

    @contextlib.contextmanager
    def device(of):
        current.append(of.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", device)
    Segment(0, 4096, torch.device("cuda", 3)).close()
    assert calls == [("lock", 3), ("unlock", 3)]


@pytest.mark.parametrize(
    ("num_bytes", "rounded"),
    [(1, 12288), (12288, 12288), (12289, 16384), (16385, 24576), (3 << 20, 3 << 20)],
)
def test_segments_have_sizes_that_micro_batches_share(num_bytes, rounded):
    assert rounded_bytes(num_bytes) == rounded


def test_the_process_ends_with_its_trainer(tmp_path):
    """Killed, so that the trainer says nothing: the process finds the connection closed."""
    code = (
        "import torch, time\n"
        "from megatron_trace.training import hint_reader\n"
        "child = hint_reader._Child()\n"
        "child._channel.receive()\n"
        "print(child.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert came_true(lambda: not _runs(pid), within_s=PATIENCE_S)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_content_is_told_without_its_tensors(files):
    folder, names, sites = files
    store = HintFiles(folder)
    job = StagingJob([store.sample(name) for name in names], store, sites.staging_plan())
    memory = StagingMemory.new(job.num_bytes, pin_memory=False)
    content = job.content(memory)
    message = told(content, memory)
    there, _ = memory.moved(CPU, non_blocking=False)
    assert_same_content(content_in(there.clone(), message), content)
    assert len(message) < 300 * sum(3 for _ in (*content.hints, *content.codes)) + 3000


def test_a_sample_arrives_as_it_was(files):
    folder, names, _ = files
    sample = HintFiles(folder).sample(names[0])
    got = sample_of(sample_message(sample))
    for name, value in vars(sample).items():
        if isinstance(value, torch.Tensor):
            assert_same_bytes(getattr(got, name), value, name)
        else:
            assert getattr(got, name) == value


def test_hints_in_memory_are_refused(files):
    _, names, sites = files
    with pytest.raises(ValueError, match="--trace-hint-reader thread"):
        wants_process("process", CPU, HintStore())
    with pytest.raises(ValueError, match="cannot read hints in memory"):
        MicroBatchPrefetcher(
            [names], HintStore(), sites, max_host_bytes=None, reader=HintReader(CPU)
        )


def test_a_process_reads_by_default_where_a_gpu_would_wait(files):
    store = HintFiles(files[0])
    gpu = torch.device("cuda", 0)
    wanted = {
        (choice, device, kind): wants_process(choice, where, of)
        for choice in ("auto", "thread")
        for device, where in (("gpu", gpu), ("cpu", CPU))
        for kind, of in (("files", store), ("memory", HintStore()))
    }
    assert [key for key, process in wanted.items() if process] == [("auto", "gpu", "files")]
