"""What a run asks of a tokenizer; `CharTokenizer` and `HfTokenizer` are two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

# A turn of a conversation: "role" and "content", and what else a chat template reads.
Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        ...

    @property
    def end_token(self) -> int:
        """Token that ends a turn."""
        ...

    def encode(self, text: str) -> list[int]:
        """Gives the tokens of a text, adding none; ValueError where there are none for it."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Gives the text of tokens."""
        ...

    def prompt_text(self, prompt: str | Sequence[Message], **context: Any) -> str:
        """Gives the text with which a rollout begins.

        Args:
            prompt: A text, or the messages of a conversation.
            **context: What a chat template may read beside them, such as `tools`.

        Raises:
            ValueError: The tokenizer cannot write such a prompt.
        """
        ...

    def continuation(self, reply: str | Sequence[Message]) -> list[int]:
        """Gives what follows the end token of a turn, up to where the model goes on.

        Args:
            reply: Messages; or a text, which is one message of role `tool` where there is a chat
                template, and is taken as it is where there is none.

        Raises:
            ValueError: The tokenizer cannot write such a reply.
        """
        ...
