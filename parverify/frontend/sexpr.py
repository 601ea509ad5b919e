r"""Tokens of a VNN-LIB text, read in pieces.

A token is a parenthesis, a symbol, or one whole *form* of a kind that makes up nearly all of a large file, matched by
one regular expression: `(declare-const X_0 Real)`, `(assert (<= X_0 0.5))`, `(<= Y_0 Y_1)`. Forms are only a short cut:
what they don't match (comments inside, a form cut by the end of a piece) comes as parentheses and symbols with the same
meaning. Memory is one piece; line ends `\r\n` and `\r` count as `\n`.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from typing import BinaryIO, TextIO

from parverify.clock import Clock
from parverify.errors import SpecError

Place = tuple[int, int]
"""1-based line and column."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_INDEX = r"(?:0|[1-9]\d*)"
_NAME = rf"[XY]_{_INDEX}"

NUMBER = re.compile(_NUMBER, re.ASCII)
NAME = re.compile(rf"([XY])_({_INDEX})", re.ASCII)

# Each form is a named group, so `lastgroup` is the kind of token; a comment is in no group. The inner groups are
# numbered from the outer one: declare+1 name; bound+1.. operator, index, number; compare+1.. operator, two operands.
TOKEN = re.compile(
    rf"(?P<bound>\(\s*assert\s*\(\s*([<>]=?)\s+X_({_INDEX})\s+({_NUMBER})\s*\)\s*\))"
    rf"|(?P<compare>\(\s*([<>]=?)\s+({_NAME}|{_NUMBER})\s+({_NAME}|{_NUMBER})\s*\))"
    rf"|(?P<declare>\(\s*declare-const\s+({_NAME})\s+Real\s*\))"
    r"|(?P<open>\()|(?P<close>\))|;[^\n]*|(?P<symbol>[^\s();]+)",
    re.ASCII,
)

_PIECE = 1 << 18
_LONGEST_SYMBOL = 1 << 12


class Source:
    """A text as a stream of tokens with places.

    Args:
        stream: a text, or an open text or binary (UTF-8) stream.
        clock: checked once a piece.
        piece: how many characters are read at once.
    """

    def __init__(self, stream: str | TextIO | BinaryIO, *, clock: Clock, piece: int = _PIECE) -> None:
        self._stream = io.StringIO(stream, newline="") if isinstance(stream, str) else stream
        self._clock = clock
        self._piece = piece
        # Bytes that are no UTF-8 become U+FFFD, which is harmless in a comment and an unknown symbol elsewhere.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._newlines = io.IncrementalNewlineDecoder(None, translate=True)
        self._text = ""
        self._ended = False
        self._line = 1
        self._line_start = 0  # where the current line starts in the piece; negative if before it
        self._counted = 0  # up to where line ends were counted

    def place(self, position: int) -> Place:
        """Line and column of a position in the current piece; positions must not decrease from call to call."""
        text, counted = self._text, self._counted
        newlines = text.count("\n", counted, position)
        if newlines:
            self._line += newlines
            self._line_start = text.rfind("\n", counted, position) + 1
        self._counted = position
        return self._line, position - self._line_start + 1

    @property
    def end(self) -> Place:
        """Line and column of the end of the current piece."""
        return self.place(len(self._text))

    def tokens(self) -> Iterator[re.Match[str]]:
        """All tokens except comments; `lastgroup` is the kind. Positions are those of the current piece.

        Raises:
            SpecError: a symbol that is absurdly long.
        """
        while not self._ended:
            self._ended = not self._refill()
            size = len(self._text)
            for match in TOKEN.finditer(self._text, self._counted):
                # What touches the end of the piece may go on in the next one.
                if match.end() == size and not self._ended and match.lastgroup in (None, "symbol"):
                    self._keep_from(match)
                    break
                if match.lastgroup is not None:
                    yield match
            else:
                self._drop_until(size)

    def _refill(self) -> bool:
        """Append the next piece to what was kept; False at the end of the stream."""
        self._clock.check("parsing the property")
        data = self._stream.read(self._piece)
        final = not data
        text = self._utf8.decode(data, final) if isinstance(data, bytes) else data
        text = self._newlines.decode(text, final)
        if not self._text and self._line == 1 and self._line_start == 0:
            text = text.removeprefix("\ufeff")
        self._text += text
        return not final

    def _keep_from(self, match: re.Match[str]) -> None:
        self._drop_until(match.start())
        if match.lastgroup is None:
            self._text = ";"  # the rest of a long comment need not be kept
        elif len(self._text) > _LONGEST_SYMBOL:
            line, column = self.place(0)
            raise SpecError(f"a symbol of more than {_LONGEST_SYMBOL} characters", line=line, column=column)

    def _drop_until(self, position: int) -> None:
        self.place(position)
        self._text = self._text[position:]
        self._line_start -= position
        self._counted = 0
