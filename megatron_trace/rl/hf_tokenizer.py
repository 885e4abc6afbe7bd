"""A tokenizer of transformers, from a folder, with its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_trace.rl.tokenizer import Message

try:
    from jinja2 import TemplateError
    from transformers import AutoTokenizer
except ImportError as error:
    raise ImportError(
        f"a tokenizer of Hugging Face needs {error.name}; pip install 'megatron-trace[own]' brings "
        "what one's own prompts and tokenizers need"
    ) from error

# What a sampled token beyond the tokenizer's vocabulary decodes to.
_NOT_TEXT = "\N{REPLACEMENT CHARACTER}"
# Stands in a rendered conversation where the model's turn was; no template changes it.
_TURN = "TURN-OF-THE-MODEL"


class HfTokenizer:
    """A tokenizer of a folder as published with a model; see `Tokenizer`.

    Text of special tokens is encoded as those tokens, as chat templates need; a plain prompt begins
    with the tokens that the tokenizer itself puts before a text (BOS, in models that have one).

    Args:
        folder: Folder with tokenizer.json, tokenizer_config.json, and chat_template.jinja if any.

    Raises:
        ValueError: There is no tokenizer that transformers can read, or it names no end token.
    """

    def __init__(self, folder: str | Path) -> None:
        if not Path(folder).is_dir():
            raise ValueError(
                f"{folder} is no folder; give the folder of a tokenizer, which has tokenizer.json "
                "and tokenizer_config.json"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(
                f"transformers reads no tokenizer from {folder} ({error}); it needs tokenizer.json "
                "and tokenizer_config.json"
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer of {folder} names no end token, without which no response ends; "
                'set "eos_token" in its tokenizer_config.json'
            )
        self.folder = Path(folder)
        self._prefix = self.decode(self._added_before())

    def _added_before(self) -> list[int]:
        """Gives the special tokens that the tokenizer puts before a text."""
        plain = self.encode("a")
        added = list(self._tokenizer("a").input_ids)
        for start in range(len(added) - len(plain) + 1):
            if added[start : start + len(plain)] == plain:
                return added[:start]
        return []

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added and special ones included."""
        return len(self._tokenizer)

    @property
    def end_token(self) -> int:
        """The tokenizer's `eos_token`, which ends a turn in a chat model."""
        return int(self._tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Gives the tokens of a text, adding none."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def decode(self, tokens: Iterable[int]) -> str:
        """Gives the text, special tokens by their names; U+FFFD for one of no vocabulary."""
        parts, known = [], []
        for token in map(int, tokens):
            if 0 <= token < self.vocab_size:
                known.append(token)
                continue
            parts += [self._decoded(known), _NOT_TEXT]
            known = []
        return "".join([*parts, self._decoded(known)])

    def _decoded(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def prompt_text(self, prompt: str | Sequence[Message], **context: Any) -> str:
        """Gives a text after what begins texts, or a conversation by the chat template.

        Raises:
            ValueError: There is no chat template, or it refuses the conversation.
        """
        if isinstance(prompt, str):
            return self._prefix + prompt
        return self._rendered(prompt, **context)

    def continuation(self, reply: str | Sequence[Message]) -> list[int]:
        """Gives the tokens between the model's turn and its next one.

        Raises:
            ValueError: There is no chat template for messages, or it refuses them.
        """
        if isinstance(reply, str):
            if self._tokenizer.chat_template is None:
                return self.encode(reply)
            reply = [{"role": "tool", "content": reply}]
        first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _TURN}]
        text = self._rendered([*first, *reply])
        end = self._tokenizer.eos_token
        _, _, after_turn = text.partition(_TURN)
        before_end, found, rest = after_turn.partition(end)
        if not found or before_end.strip():
            raise ValueError(
                f"the chat template of {self.folder} does not end the model's turn with {end!r}, "
                "so that no reply can follow it; set eos_token to the token that ends a turn"
            )
        return self.encode(rest)

    def _rendered(self, messages: Sequence[Message], **context: Any) -> str:
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer of {self.folder} has no chat template for messages; add "
                "chat_template.jinja, or write prompts and replies as texts"
            )
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **context,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(
                f"the chat template of {self.folder} refuses messages of the roles "
                f"{[message.get('role') for message in messages]}: {error}"
            ) from error
