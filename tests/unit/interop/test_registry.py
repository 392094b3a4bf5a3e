"""The registry of programs whose checkpoints are read."""

from __future__ import annotations

from importlib import import_module

import pytest

from ckpt.cli.converting import DESTINATIONS
from ckpt.interop.programs import PROGRAMS
from ckpt.interop.registry import register_programs
from ckpt.loading import other_checkpoint


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_has_a_reader_and_the_writer_that_the_registry_names(name: str) -> None:
    program = PROGRAMS[name]
    reading = import_module(f"ckpt.interop.{program.room}.reading")
    assert callable(reading.is_at) and callable(reading.open_at)
    assert (name in DESTINATIONS) == bool(program.writer)
    if program.writer:
        assert callable(getattr(import_module(f"ckpt.interop.{program.room}.writing"), program.writer))


def test_loads_know_programs_once_they_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_checkpoint, "_KNOWN", [])
    with pytest.raises(AssertionError, match="register_programs"):
        other_checkpoint.programs()
    register_programs()
    register_programs()
    assert len(other_checkpoint._KNOWN) == 1
