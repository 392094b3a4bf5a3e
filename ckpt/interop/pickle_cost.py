"""Bound what reading a pickle takes, before it is read: a few bytes can ask for GiB of memory, or for 2^60 steps.

The scan follows the opcodes with the sizes of values in place of these. It refuses

- a position in the memo that no pickler has reached: Python's unpickler allocates all positions below it;
- a length beyond the end of the data;
- keys, members of sets and arguments of calls that are much larger as trees than in the data. Each is walked when it is used: tuples do not
  keep their hash, and a tuple that holds another one twice, which does so, too, takes 2^n steps.

Nothing is built, imported or called. The time is proportional to the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from ckpt.format.gc_pause import gc_paused

_Value = int | list[Any]
"""The size of a value without parts; of others [own size and that of such parts, *other parts], shared as in the pickle."""

_FREE = 1 << 20
_PER_BYTE = 4
"""Sizes that may be walked: so many, and so many for each byte of the data."""
_TEXT_BYTES = 8
"""Bytes of a text that count as much as a number."""
_GLOBAL = 64
"""A class is larger than other values."""
_MOST_DEPTH = 500
"""Python hashes nested tuples by recursion in C. Its pickler stops at about 1000 levels."""


class TooMuchError(ValueError):
    """The pickle takes far more than its bytes, as a clause."""


@gc_paused()
def require_bounded(data: Any, *, num_pickles: int = 1) -> None:
    """Check pickles that follow one another. `data` is bytes, or a map of a file.

    Raises:
        TooMuchError: one takes far more than its bytes.
        ValueError: one is damaged.
    """
    scan = _Scan(data)
    try:
        for _ in range(num_pickles):
            scan.one()
    except (LookupError, AttributeError, TypeError):  # the stack or the memo lacks something
        raise ValueError("it is no pickle") from None


class _Scan:
    def __init__(self, data: Any) -> None:
        self._data = data
        self._at = 0
        self._left = _FREE + _PER_BYTE * len(data)
        self._stack: list[Any] = []
        self._memo: dict[int, _Value] = {}

    def one(self) -> None:
        """Follow one pickle to its end. The most frequent opcodes are followed here."""
        data, pushed, steps, at = self._data, _PUSHED, _STEPS, self._at
        stack = self._stack = []
        memo = self._memo = {}
        self._marks: list[int] = []
        while True:
            op = data[at]
            at += 1
            if (width := pushed[op]) >= 0:
                at += width
                stack.append(1)
            elif op == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif op == _BINGET:
                stack.append(memo[data[at]])
                at += 1
            elif op == _LONG_BINGET:
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif op == _BINPUT:
                memo[data[at]] = stack[-1]
                at += 1
            elif op == _STOP:
                self._at = at
                return
            else:
                self._at = at
                steps[op](self)
                at = self._at

    def _number(self, width: int) -> int:
        found = int.from_bytes(self._data[self._at : self._at + width], "little")
        self._at += width
        return found

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise TooMuchError("it was cut off")
        line: bytes = self._data[self._at : end]
        self._at = end + 1
        return line

    def _text(self, width: int) -> None:
        length = self._number(width)
        self._at += length
        if self._at > len(self._data):
            raise TooMuchError(f"a value of {length} bytes does not lie in its {len(self._data)}")
        self._stack.append(1 + length // _TEXT_BYTES)

    def _text_line(self) -> None:
        self._stack.append(1 + len(self._line()) // _TEXT_BYTES)

    def _skip(self, width: int) -> None:
        self._at += width

    def _global(self, lines: int) -> None:
        for _ in range(lines):
            self._line()
        self._charge(_GLOBAL)
        self._stack.append(1)

    def _stack_global(self) -> None:
        del self._stack[-2:]
        self._global(0)

    def _pop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _to_mark(self) -> list[_Value]:
        at = self._marks.pop()
        items = self._stack[at:]
        del self._stack[at:]
        return items

    def _dup(self) -> None:
        self._stack.append(self._stack[-1])

    def _put(self, at: int) -> None:
        if at > self._at:
            raise TooMuchError(f"it has a value {at} in its memo after {self._at} bytes")
        self._memo[at] = self._stack[-1]

    def _get(self, at: int) -> None:
        self._stack.append(self._memo[at])

    def _tuple(self, length: int) -> None:
        items = self._stack[-length:]
        self._stack[-length:] = [_node(items)]

    def _container(self) -> None:
        self._stack.append(_node(self._to_mark()))

    def _empty(self) -> None:
        self._stack.append([1])

    def _dict(self) -> None:
        items = self._to_mark()
        self._stack.append([1])
        self._set_items(items)

    def _append(self) -> None:
        self._add([self._stack.pop()])

    def _set_item(self) -> None:
        items = self._stack[-2:]
        del self._stack[-2:]
        self._set_items(items)

    def _set_items(self, items: list[_Value]) -> None:
        for key in items[::2]:
            self._walk(key)
        self._add(items)

    def _add_members(self, items: list[_Value]) -> None:
        for item in items:
            self._walk(item)
        self._add(items)

    def _frozenset(self) -> None:
        items = self._to_mark()
        self._stack.append([1])
        self._add_members(items)

    def _add(self, items: Iterable[_Value]) -> None:
        """Add items to the container on top."""
        top = self._stack[-1]
        if isinstance(top, list):
            _extend(top, items)

    def _call(self, num_args: int) -> None:
        """Replace a class and its arguments by an object. What it takes is as large as they."""
        args = self._stack[-num_args:]
        del self._stack[-num_args - 1 :]
        self._made(args)

    def _call_to_mark(self, num_classes: int) -> None:
        self._made(self._to_mark()[num_classes:])
        if not num_classes:
            self._line()
            self._line()

    def _made(self, args: list[_Value]) -> None:
        before = self._left
        for arg in args:
            self._walk(arg)
        self._stack.append([1 + before - self._left])

    def _build(self) -> None:
        """Objects copy their attributes, and the slots beside them."""
        state = self._stack.pop()
        if isinstance(state, list):
            for inner in chain([state], state[1:]):
                self._charge(inner[0] + len(inner))
        else:
            self._charge(state)

    def _walk(self, value: _Value) -> None:
        """Charge for a value as a tree."""
        if isinstance(value, int):
            self._charge(value)
            return
        todo = [(value, 0)]
        while todo:
            node, depth = todo.pop()
            self._charge(node[0] + len(node))
            if len(node) > 1:
                if depth > _MOST_DEPTH:
                    raise TooMuchError(f"it nests keys or arguments {depth} times")
                todo += [(inner, depth + 1) for inner in node[1:]]

    def _charge(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise TooMuchError("it holds containers that hold themselves, or one another too often")


def _node(items: Iterable[_Value]) -> _Value:
    node: list[Any] = [1]
    _extend(node, items)
    return node


def _extend(node: list[Any], items: Iterable[_Value]) -> None:
    for item in items:
        if isinstance(item, int):
            node[0] += item
        else:
            node.append(item)


def _with(step: Callable[..., None], *args: Any) -> Callable[[_Scan], None]:
    return lambda scan: step(scan, *args)


def _numbered(step: Callable[[_Scan, int], None], width: int) -> Callable[[_Scan], None]:
    """A step whose argument is a number of so many bytes; 0: a line."""
    return lambda scan: step(scan, scan._number(width) if width else int(scan._line()))


_STOP, _MEMOIZE, _BINGET, _LONG_BINGET, _BINPUT = b".\x94hjq"
_PUSHED = [-1] * 256
"""Opcode -> bytes of its argument, of those that push a value of size 1."""
for _op, _width in {**dict.fromkeys(b"N)\x88\x89\x97", 0), **dict.fromkeys(b"K\x82", 1), **dict.fromkeys(b"M\x83", 2),
                    **dict.fromkeys(b"J\x84", 4), ord("G"): 8}.items():  # fmt: skip
    _PUSHED[_op] = _width
_STEPS_BY_OPCODES: dict[bytes, Callable[[_Scan], object]] = {
    b"(": _Scan._mark,
    b"0": _Scan._pop,
    b"1": _Scan._to_mark,
    b"2": _Scan._dup,
    b"ILFSVP": _Scan._text_line,
    b"Q\x98": lambda scan: None,  # what is on top stays there, as another value
    b"R": _with(_Scan._call, 1),
    b"\x81": _with(_Scan._call, 1),
    b"\x92": _with(_Scan._call, 2),
    b"o": _with(_Scan._call_to_mark, 1),
    b"i": _with(_Scan._call_to_mark, 0),
    b"b": _Scan._build,
    b"c": _with(_Scan._global, 2),
    b"\x93": _Scan._stack_global,
    b"U\x8a\x8cC": _with(_Scan._text, 1),
    b"TX\x8bB": _with(_Scan._text, 4),
    b"\x8d\x8e\x96": _with(_Scan._text, 8),
    b"]}\x8f": _Scan._empty,
    b"lt": _Scan._container,
    b"d": _Scan._dict,
    b"\x85": _with(_Scan._tuple, 1),
    b"\x86": _with(_Scan._tuple, 2),
    b"\x87": _with(_Scan._tuple, 3),
    b"a": _Scan._append,
    b"e": lambda scan: scan._add(scan._to_mark()),
    b"s": _Scan._set_item,
    b"u": lambda scan: scan._set_items(scan._to_mark()),
    b"\x90": lambda scan: scan._add_members(scan._to_mark()),
    b"\x91": _Scan._frozenset,
    b"g": _numbered(_Scan._get, 0),
    b"p": _numbered(_Scan._put, 0),
    b"r": _numbered(_Scan._put, 4),
    b"\x80": _with(_Scan._skip, 1),
    b"\x95": _with(_Scan._skip, 8),
}
_STEPS = {opcode: step for opcodes, step in _STEPS_BY_OPCODES.items() for opcode in opcodes}
