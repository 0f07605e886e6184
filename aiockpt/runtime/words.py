"""Names for a terminal, and commands to paste into a shell.

Names come from files, peers and people. A terminal obeys some characters, and text that
runs from right to left hides others, so neither is ever written as it is.
"""

from __future__ import annotations

import os
import shlex


def printable(text: str) -> str:
    """Escape what would control the terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def clipped(text: str, width: int) -> str:
    """Return printable text of at most ``width`` characters: its two ends if longer."""
    if len(text) > width:  # first, as escaping takes time and memory
        half = (width - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    if len(text := printable(text)) > width:
        text = f"{text[: width - 3]}..."
    return text


def command_line(*words: str) -> str:
    """Return words as a line for a shell, which gets them exactly as they are.

    A word with characters that do not print has them as numbers, in ``$'...'``, which
    bash, zsh and ksh know.
    """
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    shown = "".join(
        f"\\{char}" if char in "'\\" else char if char.isprintable() else _octal(char)
        for char in word
    )
    return f"$'{shown}'"


def _octal(char: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(char))
