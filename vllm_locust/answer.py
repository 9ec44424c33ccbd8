"""What a request was answered, in texts: kept while it streams where the user asks for it, and only so much of it."""

from collections.abc import Mapping
from io import StringIO

from vllm_locust.secret import blotted

KEPT_CHARACTERS = 1_000_000
"""Of one answer: what servers send has no end."""
_CHOICES = 128
"""Most choices that this dialect lets anyone ask for."""

Texts = dict[int, StringIO]
"""By choice."""


class Answer:
    """The texts of one answer."""

    def __init__(self) -> None:
        self._content: Texts = {}
        self._reasoning: Texts = {}
        self._left = KEPT_CHARACTERS
        self.truncated = False
        """Whether there was more than is kept."""

    def add(self, choice: int, content: str, reasoning: str) -> None:
        """Append what an event says of one choice."""
        for texts, text in ((self._content, content), (self._reasoning, reasoning)):
            if text:
                self._append(texts, choice, text)

    def _append(self, texts: Texts, choice: int, text: str) -> None:
        known = texts.get(choice)
        if known is None and len(texts) < _CHOICES:
            known = texts[choice] = StringIO()
        if known is None or len(text) > self._left:
            self.truncated = True
        if known is not None:
            self._left -= known.write(text[: self._left])

    @property
    def content(self) -> dict[int, str]:
        """Texts by choice, of those that have any."""
        return {choice: text.getvalue() for choice, text in sorted(self._content.items())}

    @property
    def reasoning(self) -> dict[int, str]:
        """The same of what came apart from the content."""
        return {choice: text.getvalue() for choice, text in sorted(self._reasoning.items())}


def text_of(by_choice: Mapping[int, str], secret: str | None) -> str | list[str] | None:
    """Return the text of the only choice that has one, those of several in the order of the choices; no secret."""
    texts = [blotted(text, secret) for text in by_choice.values()]
    return texts if len(texts) > 1 else next(iter(texts), None)
