"""The key of the server, out of whatever the server repeats: some do, of a key that they refuse.

And what passes for a key in a text of the user's that is saved: there it may be another one, or a token of a hub.
"""

import re

_TELLING = 8
"""So much of a secret tells it; what quotes a server may have cut the rest off."""
_NAMED = re.compile(
    r"""((?:api|access|secret|private)[-_]?key|(?:hf|hub|api|access|auth)[-_]?token|secret|password|bearer)"""
    r"""(["']?(?:\s*[:=]\s*|(?:\s|\\\n)+)["']?)[^\s"',;]+""",
    re.IGNORECASE,
)
"""A value that is named as one to keep, as commands, environments, YAML and JSON write it."""


def without_credentials(text: str) -> str:
    """Return a text without the values that it names as keys, tokens, secrets or passwords."""
    return _NAMED.sub(r"\1\2***", text)


def blotted(text: str, secret: str | None) -> str:
    """Return a text in which no secret stands, nor one that the end of the text cuts short."""
    if not secret:
        return text
    begin = secret[:_TELLING]
    pieces, position = [], 0
    while (found := text.find(begin, position)) >= 0:
        same = next((i for i in range(len(secret)) if text[found + i : found + i + 1] != secret[i]), len(secret))
        pieces += [text[position:found], "***"]
        position = found + same
    return "".join([*pieces, text[position:]])
