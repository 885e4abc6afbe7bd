"""A Hugging Face tokenizer made here: prompts, conversations, and what follows a turn."""

import json

import pytest

from megatron_trace.rl.hf_tokenizer import HfTokenizer
from megatron_trace.testing.tiny_tokenizer import BOS, END, save_tiny_tokenizer

CONVERSATION = [{"role": "user", "content": "1+2="}]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return HfTokenizer(save_tiny_tokenizer(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return HfTokenizer(save_tiny_tokenizer(folder, chat_template=None, adds_bos=True))


def test_a_conversation_is_written_by_the_chat_template(chat):
    text = chat.prompt_text(CONVERSATION)
    assert text == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    assert chat.decode(chat.encode(text)) == text
    # A token for each special word, none of it in pieces.
    assert len(chat.encode(text)) == 12


def test_prompt_turn_and_continuation_are_the_whole_conversation(chat):
    """The template marks a last turn of the model, which the tokens of a rollout cannot have."""
    turn = [*chat.encode("so 3"), chat.end_token]
    reply = [{"role": "tool", "content": "right"}]
    tokens = chat.encode(chat.prompt_text(CONVERSATION)) + turn + chat.continuation(reply)
    whole = [*CONVERSATION, {"role": "assistant", "content": "so 3"}, *reply]
    assert chat.decode(tokens) == chat.prompt_text(whole)
    assert chat.continuation("right") == chat.continuation(reply)


def test_a_plain_prompt_begins_as_the_tokenizer_begins_texts(plain, chat):
    assert plain.prompt_text("1+2=") == BOS + "1+2="
    assert chat.prompt_text("1+2=") == "1+2="
    assert plain.decode(plain.encode(plain.prompt_text("1+2="))) == BOS + "1+2="
    assert plain.continuation("12") == plain.encode("12")


def test_a_token_beyond_the_vocabulary_is_no_text(chat):
    assert chat.decode([*chat.encode("12"), chat.vocab_size + 3, *chat.encode("3")]) == "12\ufffd3"
    assert chat.decode([chat.end_token]) == END


def test_what_the_tokenizer_cannot_write_is_refused(chat, plain):
    with pytest.raises(ValueError, match="has no chat template"):
        plain.prompt_text(CONVERSATION)
    with pytest.raises(ValueError, match=r"refuses messages of the roles \['judge'\]: no role"):
        chat.prompt_text([{"role": "judge", "content": "1"}])


def test_a_template_that_ends_turns_otherwise_is_refused(tmp_path):
    template = "{% for m in messages %}{{ m.role + m.content + '///' }}{% endfor %}"
    tokenizer = HfTokenizer(save_tiny_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match=r"does not end the model's turn with '<\|im_end\|>'"):
        tokenizer.continuation("7")


def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no folder; give the folder of a tokenizer"):
        HfTokenizer(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="transformers reads no tokenizer"):
        HfTokenizer(tmp_path / "empty")
    folder = save_tiny_tokenizer(tmp_path / "endless")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="names no end token"):
        HfTokenizer(folder)
