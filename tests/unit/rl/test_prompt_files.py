"""Prompts of one's own, from every kind of file."""

import gzip
import json

import pytest

from megatron_trace.rl.prompt_files import load_records, make_items
from megatron_trace.rl.task import open_task
from megatron_trace.rl.tasks import CharTokenizer
from megatron_trace.rl_config import TaskConfig

RECORDS = [{"prompt": "1+1=", "answer": "2", "level": 1}, {"prompt": "2+2=", "level": 2}]


def jsonl(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def table(records):
    pa = pytest.importorskip("pyarrow")
    return pa.Table.from_pylist(
        records, pa.schema({"prompt": pa.string(), "answer": pa.string(), "level": pa.int64()})
    )


def write_jsonl(folder):
    (folder / "p.jsonl").write_text(jsonl(RECORDS))
    return folder / "p.jsonl"


def write_gz(folder):
    (folder / "p.jsonl.gz").write_bytes(gzip.compress(jsonl(RECORDS).encode()))
    return folder / "p.jsonl.gz"


def write_parquet(folder):
    from pyarrow import parquet

    parquet.write_table(table(RECORDS), folder / "p.parquet")
    return folder / "p.parquet"


def write_folder(folder):
    from pyarrow import parquet

    parquet.write_table(table(RECORDS[:1]), folder / "train-0.parquet")
    parquet.write_table(table(RECORDS[1:]), folder / "train-1.parquet")
    (folder / "README.md").write_text("a card")
    return folder


def write_saved_dataset(folder):
    import pyarrow as pa

    names = ["data-0.arrow", "data-1.arrow"]
    for name, records in zip(names, (RECORDS[:1], RECORDS[1:]), strict=True):
        part = table(records)
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, part.schema) as stream,
        ):
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize(
    "write", [write_jsonl, write_gz, write_parquet, write_folder, write_saved_dataset]
)
def test_every_kind_of_file_gives_the_same_items(tmp_path, write):
    items = make_items(load_records(write(tmp_path)), CharTokenizer("+12="), prompt_field="prompt")
    assert [(item.prompt, item.answer, item.entry["level"]) for item in items] == [
        ("1+1=", "2", 1),
        ("2+2=", None, 2),
    ]
    assert len({item.source for item in items}) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not valid JSON"),
        ("[1]", "line 1: expected a JSON object; got list"),
        ('{"question": "1"}', "line 1: 'prompt' is missing, it has question; name the field"),
        ('{"prompt": ""}', "line 1: 'prompt' must be a text that is not empty"),
        ('{"prompt": [{"content": "1"}]}', "must be a text that is not empty, or a list of mess"),
        ('{"prompt": "1", "answer": 1}', "line 1: 'answer' must be a text or left out; got int"),
        ('{"prompt": [{"role": "user", "content": "1"}]}', "is a conversation, which needs a tok"),
        ("\n", "p.jsonl has no prompt"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        open_task(path, TaskConfig(reward="not_loaded_before_the_prompts:score"))


@pytest.mark.parametrize("reward", [None, "not_loaded_before_the_prompts:score"])
def test_prompts_that_are_not_there_are_named_with_what_writes_some(reward):
    with pytest.raises(ValueError, match=r"prompts nowhere\.jsonl do not exist; docs/my_data\.md"):
        open_task("nowhere.jsonl", TaskConfig(reward=reward))


def test_a_dataset_of_several_splits_asks_for_one(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match="has the splits train, test; give the folder of one"):
        load_records(tmp_path)


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "p.csv").write_text("prompt\n1")
    with pytest.raises(ValueError, match=r"p\.csv cannot be read as a \.jsonl"):
        load_records(tmp_path / "p.csv")
    with pytest.raises(ValueError, match="absent does not exist; it must be"):
        load_records(tmp_path / "absent")


@pytest.mark.parametrize(
    "settings",
    [
        {"environment": "m:f"},
        {"prompt_field": "question"},
        {"failed_reward": 0.0},
        {"function_workers": 2},
    ],
)
def test_a_setting_without_a_reward_function_has_no_effect_and_is_refused(settings):
    with pytest.raises(ValueError, match="has no effect without reward"):
        TaskConfig(**settings)
