"""Prompt files, their split, and the tokenizer made from them."""

import json
from dataclasses import replace

import pytest

from megatron_trace.rl.tasks import (
    END_TOKEN,
    PADDING_TOKEN,
    CharTokenizer,
    TaskItem,
    encode_prompts,
    items_digest,
    load_tasks,
    save_tasks,
    split_tasks,
)

GOOD = {"prompt": "1+2=", "answer": "3", "task": "chain_sum", "entry": {"answer": "3"}}


def item(prompt, answer="3"):
    return TaskItem(prompt, answer, "chain_sum", {"answer": answer})


def write_lines(path, *lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_saved_tasks_load_as_they_were(tmp_path):
    items = [item("1+2="), TaskItem("π?", None, "any", {"nested": [1, {"a": None}]})]
    save_tasks(tmp_path / "new folder" / "tasks.jsonl", items)
    loaded = load_tasks(tmp_path / "new folder" / "tasks.jsonl")
    assert [(i.prompt, i.answer, i.task, i.entry) for i in loaded] == [
        (i.prompt, i.answer, i.task, i.entry) for i in items
    ]
    assert list(tmp_path.glob("**/*.tmp")) == []


def test_digest_of_items_sees_prompts_answers_and_order_but_not_where_they_stand():
    items = [item("1+2="), item("2+2=", "4")]
    moved = [replace(one, source="elsewhere") for one in items]
    assert items_digest(moved) == items_digest(items)
    others = ([item("1+3="), items[1]], [item("1+2=", "4"), items[1]], items[::-1], items[:1])
    assert len({items_digest(items), *map(items_digest, others)}) == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object; got list"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "entry"}), "'entry' is missing"),
        (json.dumps(GOOD | {"answer": 3}), "'answer' must be str or NoneType; got int"),
        (json.dumps(GOOD | {"entry": "3"}), "'entry' must be dict; got str"),
        (json.dumps(GOOD | {"prompt": ""}), "'prompt' is empty"),
    ],
)
def test_faulty_line_is_named(tmp_path, line, message):
    # Line 2 is empty and counts: the number must be the one that an editor shows.
    path = write_lines(tmp_path / "tasks.jsonl", json.dumps(GOOD), "", line)
    with pytest.raises(ValueError, match=rf"tasks\.jsonl, line 3: {message}"):
        load_tasks(path)


def test_file_without_tasks_raises(tmp_path):
    with pytest.raises(ValueError, match="has no task"):
        load_tasks(write_lines(tmp_path / "tasks.jsonl", ""))


def test_split_is_reproducible_and_complete():
    items = [item(f"{n}=") for n in range(20)]
    train, held_out = split_tasks(items, num_held_out=5, seed=1)
    assert (train, held_out) == split_tasks(items[::-1], num_held_out=5, seed=1)
    assert held_out != split_tasks(items, num_held_out=5, seed=2)[1]
    assert len(held_out) == 5
    assert {i.prompt for i in train + held_out} == {i.prompt for i in items}


def test_repeated_prompts_stay_on_one_side():
    items = [item(f"{n % 4}=") for n in range(20)]
    train, held_out = split_tasks(items, num_held_out=2, seed=0)
    assert {i.prompt for i in train}.isdisjoint(i.prompt for i in held_out)
    assert len(train) == len(held_out) == 10


@pytest.mark.parametrize("num_held_out", [0, 3, 4])
def test_split_with_an_empty_side_raises(num_held_out):
    with pytest.raises(ValueError, match="num_held_out must be from 1 to 2"):
        split_tasks([item("1="), item("2="), item("3=")], num_held_out=num_held_out, seed=0)


def test_token_ids_are_those_written_down():
    tokenizer = CharTokenizer.of_tasks([item("1+2=", "3"), item("2-1=", "1")])
    assert tokenizer.characters == "+-123="
    assert (PADDING_TOKEN, END_TOKEN) == (0, 1)
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("3-1=") == [6, 3, 4, 7]
    assert tokenizer.decode([6, 3, 4, 7]) == "3-1="


def test_special_tokens_do_not_vanish_in_text():
    # "1 <padding> 2" must not read as 12, or a wrong response would be credited.
    tokenizer = CharTokenizer("12")
    assert tokenizer.decode([2, PADDING_TOKEN, 3]) == "1\ufffd2"


def test_unknown_character_raises():
    with pytest.raises(ValueError, match=r"'\*' of '1\*2' is not in the vocabulary"):
        CharTokenizer("12").encode("1*2")


def test_a_token_of_no_vocabulary_does_not_vanish_in_text():
    # A policy with a padded vocabulary samples such tokens.
    assert CharTokenizer("12").decode([2, 4, 3]) == "1\ufffd2"


def test_vocabulary_out_of_order_raises():
    with pytest.raises(ValueError, match="distinct and ascending"):
        CharTokenizer("21")


def test_prompt_that_just_fits_is_encoded():
    assert encode_prompts([item("12")], CharTokenizer("12"), context=5, max_response_tokens=3) == [
        [2, 3]
    ]


def test_prompt_longer_than_the_context_raises():
    long = TaskItem("12", "3", "chain_sum", {}, source="tasks.jsonl, line 7")
    with pytest.raises(ValueError, match=r"2 tokens and a response of 3 .* context of 4 .*line 7"):
        encode_prompts([long], CharTokenizer("12"), context=4, max_response_tokens=3)
