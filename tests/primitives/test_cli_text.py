"""What the command line shows, without a command: numbers, bars, trees, URLs."""

from __future__ import annotations

import argparse
import io
import os
import subprocess

import pytest

from aiockpt import Progress
from aiockpt.cli.arguments import address, size
from aiockpt.cli.inspect import outline
from aiockpt.cli.text import (
    MAX_CELL,
    MAX_ROWS,
    ProgressBar,
    format_bytes,
    format_seconds,
    format_table,
    render,
)
from aiockpt.format.paths import Node
from aiockpt.runtime.words import clipped, command_line, printable
from tests.support.proofs import proves

pytestmark = pytest.mark.torch_free


class Terminal(io.StringIO):
    """A stream that says it is a terminal, of unknown width."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"),
        (90_868_376, "90.9 MB"), (2**40, "1.1 TB"), (2**60, "1152921.5 TB"),
    ],
)  # fmt: skip
def test_sizes_are_in_powers_of_1000(count: int, text: str) -> None:
    """A size has at most three digits before the point, except in the last unit."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0), ("4096", 4096), ("10GiB", 10 << 30), ("10gib", 10 << 30),
        ("1.5 MiB", 3 << 19), ("500MB", 500_000_000), ("2tb", 2 * 10**12), ("7B", 7),
    ],
)  # fmt: skip
def test_a_size_may_have_a_unit(text: str, nbytes: int) -> None:
    """A unit with an ``i`` is a power of 1024, and one without it a power of 1000."""
    assert size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "10G", "-1", "1e9", "10iB", "10PB", "nan"])
def test_what_is_no_size_says_how_one_looks(text: str) -> None:
    """The error shows a size, also if the unit was ambiguous."""
    with pytest.raises(argparse.ArgumentTypeError, match="write 10GiB, 500MB"):
        size(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (61, "1:01"), (3723, "1:02:03")]
)
def test_times_are_those_of_a_clock(seconds: float, text: str) -> None:
    """A time shows hours only if there are any."""
    assert format_seconds(seconds) == text


def test_columns_of_a_table_are_aligned() -> None:
    """Numbers to the right; no blanks at the end of a line."""
    rows = [("a", "10"), ("long one", "9")]
    lines = [*format_table(("name", "size"), rows, right=(1,))]
    assert lines == ["name      size", "a           10", "long one     9"]


class TestProgress:
    """A bar on a terminal, lines elsewhere."""

    half = Progress(stop="fetch_chunk", bytes_done=500, bytes_total=1000, rate=100.0)

    def test_a_line_says_where_it_is_and_how_long_it_takes(self) -> None:
        """The stop's name, a bar, share, bytes, rate and what is left."""
        assert render(self.half, 100) == (
            "fetching  [####################--------------------]  50%  "
            "500 B of 1.0 kB  100 B/s  ETA 0:05"
        )

    @pytest.mark.parametrize("width", [0, 10, 40, 60, 75, 200])
    def test_a_line_fits(self, width: int) -> None:
        """The line fits into a window of any width."""
        assert len(render(self.half, width)) <= width

    def test_the_bar_stays_on_its_line_and_ends_it(self) -> None:
        """Notes go above; what comes afterwards starts a new line."""
        stream = Terminal()
        bar = ProgressBar(stream)
        bar(self.half)
        bar.note("a note")
        bar.close()
        bar.close()
        frames = stream.getvalue().split("\r\x1b[2K")
        assert frames[1].startswith("fetching  [")
        assert frames[2] == "a note\n"
        assert frames[3] == frames[1] + "\n"
        assert len(frames) == 4

    def test_a_bar_does_not_flicker(self) -> None:
        """A thousand reports in a moment are one or two frames."""
        stream = Terminal()
        bar = ProgressBar(stream)
        for _ in range(1000):
            bar(self.half)
        assert stream.getvalue().count("\r") <= 2


class TestOutline:
    """The top of a tree in a few lines."""

    def test_children_are_named_counted_and_described(self) -> None:
        """Tensors and other values below each of them."""
        tree: Node = [
            "dict",
            ["model", 3, "lr", "name", "none", "empty"],
            [
                ["odict", ["w", "b"], [["tensor", 0], ["tensor", 1]], ["dict", [], []]],
                ["ext", "torch.Size", ["tuple", [2, 3]]],
                0.1,
                "x",
                None,
                ["list", []],
            ],
        ]
        assert outline(tree) == [
            "dict of 6",
            "  model  OrderedDict of 2: 2 tensors",
            "  3      torch.Size of 2: 2 values",
            "  lr     float 0.1",
            '  name   str "x"',
            "  none   None",
            "  empty  list of 0: empty",
        ]

    def test_a_long_list_is_cut(self) -> None:
        """A list of thousands of items is shortened."""
        lines = outline(["list", list(range(1000))])
        assert lines[0] == "list of 1000"
        assert lines[-1] == "  ... and 970 more"
        assert len(lines) == 32

    @pytest.mark.parametrize("node", [["dict"], ["odd", 1], [], ["tensors", 1, 2], [1]])
    def test_a_malformed_tree_is_still_shown(self, node: Node) -> None:
        """It is read before anybody has decoded it."""
        assert len(outline(node)) == 1

    def test_a_deep_tree_is_no_problem(self) -> None:
        """A tree of any depth can be shown, since decoding comes later."""
        node: Node = 1
        for _ in range(10_000):
            node = ["list", [node]]
        assert outline(node)[1] == "  [0]  list of 1: 1 value"


class TestAddress:
    """An address names a checkpoint at a peer."""

    @pytest.mark.parametrize(
        ("text", "base", "step"),
        [
            ("http://h:1/checkpoint/#t", "http://h:1/checkpoint/", None),
            ("http://h:1/checkpoint#t", "http://h:1/checkpoint/", None),
            ("http://h:1/checkpoint/100#t", "http://h:1/checkpoint/", 100),
            ("https://h/checkpoint/100/full#t", "https://h/checkpoint/", 100),
            ("https://h/a/b/100/metadata#t", "https://h/a/b/", 100),
            ("http://h:1/checkpoint/latest#t", "http://h:1/checkpoint/", None),
            ("http://h:1#t", "http://h:1/checkpoint/", None),
            ("http://[::1]:80#t", "http://[::1]:80/checkpoint/", None),
            ("http://h/7/#t", "http://h/7/", None),
            ("http://h/#t", "http://h/", None),
        ],
    )
    def test_metadata_or_what_lies_under_it(
        self, text: str, base: str, step: int | None
    ) -> None:
        """A slash at the end marks metadata, whose prefix may end in a number."""
        found = address(text)
        assert (found.origin.base_url, found.step) == (base, step)
        assert found.origin.token == "t"

    @pytest.mark.parametrize(
        "text", ["", "host", "ftp://h/#secret", "http://#secret", "http://h:x/#secret"]
    )
    def test_anything_else_is_refused_without_its_secret(self, text: str) -> None:
        """The sentence says what a URL looks like."""
        with pytest.raises(argparse.ArgumentTypeError, match="http://host:port") as why:
            address(text)
        assert "secret" not in str(why.value)


ODD = [
    "two  blanks",
    "$(touch PWNED) `x` \"'\\",
    "-1",
    "~user",
    "a\nb\tc",
    "\x1b]0;EVIL\x07",
    "\u202egnp",
    os.fsdecode(b"\xff\xfe1"),
    "1\x0123",  # an octal number ends after three digits
]


@pytest.mark.parametrize("name", ODD)
def test_a_shell_gets_each_word_as_it_is(name: str) -> None:
    """A quoted word survives the shell, and has no control character for a terminal."""
    line = command_line("printf", "%s", name)
    assert line.isprintable()
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
    assert done.stdout == os.fsencode(name)


@proves("threat D21")
def test_a_table_is_bounded() -> None:
    """A peer cannot make it wider or longer; the last row counts all."""
    rows = ((f"{index or 'n' * 10_000_000}\x1b", "1") for index in range(MAX_ROWS + 5))
    lines = [
        *format_table(("a", "b"), rows, last=lambda count: (f"{count} in all", ""))
    ]
    assert len(lines) == 1 + MAX_ROWS + 2
    assert max(map(len, lines)) <= MAX_CELL + 3
    assert all(line.isprintable() for line in lines)
    assert lines[-2:] == ["... and 5 more", f"{MAX_ROWS + 5} in all"]


def test_a_long_name_shows_both_ends() -> None:
    """Escapes count, too."""
    assert clipped("a" * 50 + "b" * 50, 21) == "a" * 9 + "..." + "b" * 9
    assert len(clipped("\x1b" * 50, 21)) <= 21
    assert printable("\x1b") == "\\x1b"
