"""The one line of a run on a terminal: how far it is, its loss and its speed, its last save, and bytes under way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from ckpt.cli.progress import watched
from ckpt.errors import printable
from ckpt.saving.prepared_save import SaveReport

_WINDOW = 20
_LEAST_BAR, _LONGEST_BAR = 10, 40


def samples_a_second(speed: float) -> str:
    """Return such as "1,200 samples/s" or "0.03 samples/s"."""
    return f"{speed:,.0f} samples/s" if speed >= 10 else f"{speed:.2f} samples/s"


class LiveLine:
    """Draws the line anew at each step; while bytes move, and a step is long, a thread does. Ends of saves and loads are lines above it.

    Args:
        steps: of the run, in total.
        batch_size: samples of one step.
    """

    def __init__(self, console: Console, steps: int, batch_size: int) -> None:
        self._console = console
        self._steps = steps
        self._batch_size = batch_size
        self._step: int | None = None
        self._loss = ""
        self._last_save = ""
        self._moving = ""
        self._times: deque[tuple[int, float]] = deque(maxlen=_WINDOW + 1)
        self._live: Live | None = None

    @contextmanager
    def shown(self, *, transient: bool = False) -> Iterator[None]:
        """Show the line inside the block, and leave it on the terminal, unless it is transient."""
        # No refresh thread, so that a debugger in the training loop has the terminal alone.
        live = Live(get_renderable=self.text, console=self._console, auto_refresh=False, transient=transient)
        with live:
            self._live = live
            self._draw()
            try:
                yield
            finally:
                self._live = None

    @property
    def is_shown(self) -> bool:
        return self._live is not None

    def begin(self, done: int) -> None:
        """Begin to count steps and time after a step."""
        self._step = done
        self._times.append((done, time.monotonic()))

    def step(self, step: int, loss: float) -> None:
        self._step, self._loss = step, f"loss {loss:.4f}"
        self._times.append((step, time.monotonic()))
        self._draw()

    def saved(self, one: SaveReport) -> None:
        rate = f" {one.bytes / one.save_s / 1e9:.2f} GB/s" if one.save_s else ""
        self._last_save = f"save {decimal(one.bytes)} {one.save_s:.2f} s{rate} blocked {one.blocked_s:.2f} s"

    @contextmanager
    def moving(self, what: str) -> Iterator[Callable[[int], None]]:
        """Show the bytes that are counted in the block in place of the last save, once it takes more than two seconds."""
        with ExitStack() as stack:

            def show(num_bytes: int, seconds: float) -> None:
                rate = f"{num_bytes / seconds / 1e9:.2f} GB/s"
                self._moving = f"{what}: {decimal(num_bytes)}, {rate}, {seconds:.0f} s"
                if self._live is None:
                    stack.enter_context(self.shown(transient=True))
                self._draw()

            with watched(show) as count:
                yield count
            self._moving = ""

    @property
    def samples_s(self) -> float | None:
        """Samples a second over the last steps, saves included; None: there was no step."""
        if len(self._times) < 2:
            return None
        (first, began), (last, now) = self._times[0], self._times[-1]
        return (last - first) * self._batch_size / max(now - began, 1e-9)

    def text(self) -> Text:
        """The line, as wide as the terminal at most: the bar gives way first."""
        if self._step is None:
            return _one_line(self._moving)
        parts = [self._loss]
        left_s = ""
        if speed := self.samples_s:
            parts.append(samples_a_second(speed))
            left_s = _clock((self._steps - self._step) * self._batch_size / speed)
        parts.append(self._moving or self._last_save)
        head, tail = f"step {self._step}/{self._steps}", "  ".join(filter(None, parts))
        room = self._console.width - len(head) - len(tail) - len(left_s) - 7
        if room < _LEAST_BAR:
            return _one_line(f"{head}  {tail}")
        bar = self._bar(self._step, min(room, _LONGEST_BAR))
        return _one_line(f"{head}  ").append_text(bar).append(f"  {tail}  {left_s}".rstrip())

    def _bar(self, step: int, width: int) -> Text:
        full = width * min(step, self._steps) // self._steps
        done, rest = ("=", "-") if self._console.options.ascii_only else ("━", "━")
        return Text(done * full, style="bar.complete").append(rest * (width - full), style="bar.back")

    def _draw(self) -> None:
        if self._live is not None:
            self._live.refresh()


def _one_line(text: str) -> Text:
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
