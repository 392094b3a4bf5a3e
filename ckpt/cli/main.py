"""The program `ckpt`: what people do with checkpoints from a shell, without a config and without the recipes.

Each command is a function that takes a dataclass of keys; `_Command` makes the options of it. A command is imported when it is called:
`ckpt --help` needs no torch. Exit codes are those of diff and fsck: 0 nothing to report, 1 differences or damage, 2 trouble. Damage that a
command meets in its source is 1, too; what cannot be read, for lack of permission or of a store that answers, is trouble.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any, NoReturn, get_args, get_type_hints

import click
from click.shell_completion import get_completion_class

from ckpt.cli.arguments import as_option, message_of, spelled
from ckpt.cli.environment import import_torch
from ckpt.version import __version__

DAMAGE, TROUBLE = 1, 2


@dataclass(frozen=True)
class _Entry:
    """Where a command is, and how it is shown.

    Attributes:
        place: module and function; the function takes a dataclass, `keys`, and returns an exit code or None.
        short: its line in the list of commands.
        text: more about it: paragraphs, and lines that begin with `$` are examples.
    """

    place: str
    short: str
    text: str = ""


COMMANDS = {
    "ls": _Entry(
        "listing:list_checkpoints",
        "List the checkpoints of a folder or an address, one line each.",
        """
        The oldest commit comes first. Size is that of tensors and values, as `ckpt show` has it. Marks are newest, best (by a metric
        that was saved with the checkpoints), damaged, where the manifest is not as it was written, unreadable, where you may not read
        it, and without the components that retention has removed; `ckpt verify` reads every byte. Of a folder that holds runs, each
        folder of checkpoints below it gets a line.

        $ ckpt ls outputs/dev/checkpoints
        $ ckpt ls s3://bucket/run --best accuracy --greater
        """,
    ),
    "show": _Entry(
        "pages.inspect_page:inspect",
        "Show what a checkpoint holds: components, arrays, types, shapes and sizes.",
        """
        It reads checkpoints of this project, DCP, Megatron-Core, safetensors, Orbax, DeepSpeed,
        torch_checkpointing and torch.save. Size is that of tensors and values; files is that of all files, which a copy needs and
        `ckpt verify` reads; unique is what removing the checkpoint frees, without files that others share.

        $ ckpt show outputs/dev/checkpoints/checkpoint-00000100 --filter attn
        $ ckpt show outputs/dev/checkpoints --html checkpoints.html
        """,
    ),
    "verify": _Entry(
        "reading:verify",
        "Read every byte of a checkpoint, or of all in a folder, and report damage.",
        """
        It exits with 0 if every byte is as it was saved, with 1 if not, and with 2 if what could be read is, but not all could be
        read. It writes nothing.

        $ ckpt verify outputs/dev/checkpoints
        $ ckpt verify s3://bucket/run/checkpoint-00000100 --json
        """,
    ),
    "diff": _Entry(
        "comparing:diff",
        "Compare two checkpoints, of any formats: every tensor, value and key of the config.",
        """
        It exits with 0 if they are equal, and with 1 if they differ or one is damaged.

        $ ckpt diff checkpoints/checkpoint-00000100 checkpoints/checkpoint-00000200
        """,
    ),
    "convert": _Entry(
        "converting:convert",
        "Write a checkpoint, of this project or of another program, in another format.",
        """
        The names, shapes and bits stay. DST appears only after all of it was written, read back and compared. Under torchrun each
        rank does a share of the bytes.

        $ ckpt convert checkpoints/checkpoint-00000100 hf --to safetensors --check logits
        $ ckpt convert folder_of_peft merged --to safetensors --merge-adapters
        $ ckpt convert their_dcp_checkpoint ours --allow-pickle
        $ torchrun --nproc-per-node 4 -m ckpt convert large copy --to tensorstore
        """,
    ),
    "copy": _Entry(
        "copying:copy",
        "Copy a checkpoint, or all of a folder, between any two storages.",
        """
        Every byte is read back and compared with its digest before the copy is committed. A copy that was interrupted goes on where
        it was when the same command is given again. Of a folder, the checkpoints are copied that are not there yet, the oldest
        first.

        $ ckpt copy outputs/dev/checkpoints/checkpoint-00000100 s3://bucket/run/checkpoint-00000100
        $ ckpt copy s3://bucket/run local --last 2
        """,
    ),
    "rm": _Entry(
        "removing:remove_checkpoints",
        "Remove checkpoints.",
        """
        It asks first. What is no checkpoint of this project is refused, and so is a checkpoint of a run that is saving now. Files
        that others have put into a checkpoint stay.

        $ ckpt rm outputs/dev/checkpoints/checkpoint-00000100
        """,
    ),
    "bisect": _Entry(
        "bisecting:bisect",
        "Find the first checkpoint at which two runs differ, and what differs in it.",
        """
        It compares the checkpoints that both runs have, the oldest first, by their recorded digests where both have the same arrays;
        `ckpt verify` tells whether the bytes are still those. It exits with 0 if all are equal, and with 1 if not. In a
        checkout, `python -m recipes.bisect` also replays two runs of its recipes, down to one step.

        $ ckpt bisect outputs/good/checkpoints outputs/bad/checkpoints
        """,
    ),
    "serve": _Entry(
        "serving:serve",
        "Show the runs, sweeps and checkpoints below a folder in a browser, on this machine.",
        """
        The pages follow the runs while they save. Only this machine can ask for them, and only by the address that is printed.

        $ ckpt serve outputs
        """,
    ),
}


class _NoneOr(click.ParamType[Any]):
    """A value, or `none`."""

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self.inner = inner
        self.name = f"{inner.name} or none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if value is None or value == "none" else self.inner.convert(value, param, ctx)


class _Commands(click.Group):
    """The commands, each made when it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, "completion"]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return _command(name, COMMANDS[name]) if name in COMMANDS else super().get_command(ctx, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            rows = {name: entry.short for name, entry in COMMANDS.items()} | {"completion": str(_completion.help)}
            formatter.write_dl(list(rows.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "--version", prog_name="ckpt")
def ckpt() -> None:
    """Look at checkpoints, verify, compare, convert, copy and remove them.

    PATH is a folder, or an address such as s3://bucket/run, gs://... or az://...
    """


@ckpt.command("completion", help="Print the code with which a shell completes commands and options.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def _completion(shell: str) -> None:
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ckpt, {}, "ckpt", "_CKPT_COMPLETE").source())


def _command(name: str, entry: _Entry) -> click.Command:
    import_torch()
    module, _, name_in_it = entry.place.partition(":")
    function = getattr(import_module(f"ckpt.cli.{module}"), name_in_it)
    kind = get_type_hints(function)["keys"]

    def call(**given: Any) -> int | None:
        keys = _keys(kind, given)
        if (validate := getattr(keys, "validate", None)) is not None:
            validate()
        code: int | None = function(keys)
        return code

    return click.Command(name, callback=call, params=list(_params(kind)), help=_help(entry), short_help=entry.short)


def _help(entry: _Entry) -> str:
    """Paragraphs that click fills, and examples whose lines it keeps."""
    lines = [line.strip() for line in entry.text.strip().splitlines()]
    first = next((at for at, line in enumerate(lines) if line.startswith("$")), len(lines))
    return "\n".join([entry.short, "", *lines[:first], "\b", *(f"  {line}" for line in lines[first:])])


def _params(kind: type) -> Iterator[click.Parameter]:
    """Make an argument of each key without a default, and an option of every other; keys of a nested dataclass have no prefix."""
    hints = get_type_hints(kind)
    for key in fields(kind):
        hint, about = hints[key.name], key.metadata
        if is_dataclass(hint):
            yield from _params(hint)  # type: ignore[arg-type]
        elif key.default is MISSING and key.default_factory is MISSING:
            yield _argument(key.name, is_many=hint == list[str])
        else:
            yield _option(key.name, hint, key.default, about)


def _argument(name: str, *, is_many: bool) -> click.Argument:
    metavar = f"{name.upper().removesuffix('S')}..." if is_many else name.upper()
    return click.Argument([name], type=click.Path(readable=False), nargs=-1 if is_many else 1, required=True, metavar=metavar)


def _option(name: str, hint: Any, default: Any, about: Mapping[str, Any]) -> click.Option:
    flag = f"--{name.replace('_', '-')}"
    if hint is bool:
        return click.Option([flag, name], is_flag=True, default=default, help=about["help"])
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    inner = click.Choice(about["choices"]) if about["choices"] else click.types.convert_type(kinds[0])
    kind = _NoneOr(inner) if type(None) in get_args(hint) else inner
    metavar = None if about["choices"] else kinds[0].__name__.upper().replace("STR", "TEXT")
    if kind is not inner and (default is not None or kinds[0] is int):  # where none is more than to leave it out
        metavar = f"{metavar}|none"
    return click.Option([flag, name], type=kind, default=default, show_default=default is not None, metavar=metavar, help=about["help"])


def _keys(kind: type, given: dict[str, Any]) -> Any:
    hints = get_type_hints(kind)
    values = {}
    for key in fields(kind):
        hint = hints[key.name]
        if is_dataclass(hint):
            values[key.name] = _keys(hint, given)  # type: ignore[arg-type]
        else:
            value = given[key.name]
            values[key.name] = list(value) if isinstance(value, tuple) else value
    return kind(**values)


def run(words: list[str] | None = None) -> int:
    """Run one command line, print an error as one sentence on stderr, and return the exit code."""
    try:
        with spelled(as_option):
            code = ckpt.main(words, prog_name="ckpt", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return TROUBLE
    except click.ClickException as error:
        return _printed(f"error: {_sentence(error)}", TROUBLE)
    except (click.Abort, KeyboardInterrupt) as error:
        return _printed("; ".join(["interrupted", *map(str, (error.__cause__ or error).args)]), 130)
    except SystemExit:  # click's own: the reader of stdout has ended, as in `| head`
        return 0
    except Exception as error:
        from ckpt.errors import CheckpointError, CorruptCheckpointError

        if not isinstance(error, CheckpointError | OSError):
            raise
        return _printed(f"error: {message_of(error, as_option)}", DAMAGE if isinstance(error, CorruptCheckpointError) else TROUBLE)


def _sentence(error: click.ClickException) -> str:
    """Return what click says of a command line, as one sentence."""
    if isinstance(error, click.NoSuchOption):
        near = f"; did you mean {' or '.join(sorted(error.possibilities))}?" if error.possibilities else ""
        return f"there is no option {error.option_name}{near}"
    text = " ".join(error.format_message().split())
    return text[:1].lower() + text[1:].removesuffix(".")


def _printed(text: str, code: int) -> int:
    from ckpt.errors import printable

    if os.environ.get("RANK", "0") == "0":  # the other ranks say the same
        click.echo(printable(text), err=True)
    return code


def main() -> NoReturn:
    """Run the command line of this process."""
    sys.exit(run())
