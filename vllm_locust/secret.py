"""The key of the server, out of whatever the server repeats: some do, of a key that they refuse."""

_TELLING = 8
"""So much of a secret tells it; what quotes a server may have cut the rest off."""


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
