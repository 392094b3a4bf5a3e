"""Run a recipe under Hydra: the decorator `recipe` makes a command of a main function.

An error of the user is printed as one sentence on stderr, with exit code 1, or of a command that `ckpt` has too with that of `ckpt`; a bug
keeps its traceback.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ckpt.cli.arguments import spelled
from ckpt.cli.environment import import_torch, variables
from ckpt.errors import private_name
from recipes.support import CONF
from recipes.support.completion import script
from recipes.support.help import help_text
from recipes.support.keys import as_choices
from recipes.support.path_values import with_literal_paths
from recipes.support.sentences import in_config_words, sentence_of, sentence_of_arguments, sentence_of_choices

Work = Callable[[DictConfig], int | float | None]

_SILENT = ("hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")  # no .hydra/, no log
_NO_FOLDER = ("hydra.run.dir=.", *_SILENT)
_SWEEPERS = {"hydra/sweeper/optuna": "hydra-optuna-sweeper"}
_LAUNCHERS = ("joblib", "submitit")
_HELP = {"--help", "-h", "--help-all"}
_COMPLETION = {"--shell-completion", "-sc"}
_HELP_OR_COMPLETION = _HELP | _COMPLETION


def recipe(config_name: str, *, writes: bool = True, trouble: int = 1) -> Callable[[Work], Callable[[], None]]:
    """Make a command of a function that takes the composed config and returns an exit code, a figure for a sweeper, or None.

    Under torchrun or Slurm every rank calls it. Ranks other than 0 write no Hydra files, and print only errors that
    rank 0 cannot know.

    Args:
        config_name: the file in conf/ that the command composes, without `.yaml`.
        writes: False for a command that only reads: it makes no folder, no `.hydra/` and no log, and refuses a sweep.
        trouble: the exit code of an error; that of damage is 1.
    """

    def decorate(work: Work) -> Callable[[], None]:
        @functools.wraps(work)
        def main() -> None:
            code = _Command(work, config_name, writes, trouble).run()
            if code:
                sys.exit(code)

        return main

    return decorate


class _Command:
    """One call of a recipe: a run, or a sweep, whose jobs Hydra's launcher runs in this process or in others."""

    def __init__(self, work: Work, config_name: str, writes: bool, trouble: int) -> None:
        self.job = _Job(work, config_name, sys.stderr)
        self.config_name = config_name
        self.file = CONF / f"{config_name}.yaml"
        self.writes = writes
        self.stderr = sys.stderr
        self.rank = 0
        self.code = trouble
        self.sweep_dir: Path | None = None
        self.new_folders: list[Path] = []  # made by this command, the deepest first
        self.new_files: list[Path] = []

    def run(self) -> int:
        """Compose the config, run, print an error as one sentence, and return the exit code."""
        if self.writes and not _HELP_OR_COMPLETION & set(sys.argv[1:]):  # which are quick without torch
            import_torch()
            from ckpt.errors import ConfigurationError
            from recipes.support.ranks import rank_of_environment, take_slurm_ranks

            try:
                take_slurm_ranks()
            except ConfigurationError as error:
                self._print(str(error))
                return self.code
            self.rank = rank_of_environment()
        if not self.writes and {"-m", "--multirun"} & set(sys.argv):  # Hydra would make the folder of a sweep
            self._print(f"{self.config_name} only reads, one path at a time: leave out -m")
            return self.code
        under_way = _UNDER_WAY.set(self)
        with contextlib.ExitStack() as self.held, spelled(in_config_words):
            try:
                self._run()
            finally:
                _UNDER_WAY.reset(under_way)
                self._tidy()
        return max(self.code, self.job.code)

    def _run(self) -> None:
        try:
            if (text := self._said_about_itself()) is not None:
                print(text)
                self.code = 0
                return
            overrides = _NO_FOLDER if not self.writes else _SILENT if self.rank else ()
            # For the processes of other launchers, which do not start in the checkout: it is not installed.
            paths = os.pathsep.join([str(CONF.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
            with (
                variables({"PYTHONPATH": paths.strip(os.pathsep), "HYDRA_FULL_ERROR": "1"}),
                _arguments(self.file, overrides),
                _own_stderr(self.stderr) as lines,
            ):
                hydra.main(version_base="1.3", config_path=str(CONF), config_name=self.config_name)(self.job)()
            self.code = 0
        except KeyboardInterrupt:
            self._print("interrupted")
            self.code = 130
        except SystemExit as stop:  # argparse's
            if stop.code != 2:
                raise
            self._print(sentence_of_arguments("".join(lines), sys.argv[1:]))
        except _Refused as refusal:
            self._report(refusal.__cause__ or refusal)
        except _user_errors() as error:
            self._report(error)
        except Exception as error:
            self._report_unforeseen(error)
        if self.sweep_dir is not None and self.rank == 0:
            from recipes.support.sweep import show

            show(self.sweep_dir)

    def _said_about_itself(self) -> str | None:
        """The help, or the shell's function for completion, if the command line asks for one of them."""
        words = sys.argv[1:]
        if _COMPLETION & set(words) and "install=bash" in words:
            return script(CONF)
        if not _HELP & set(words):
            return None
        parser = private_name("hydra._internal.utils", "get_args_parser", "show the help of a command")()
        given, _ = parser.parse_known_args([word for word in words if word not in _HELP])
        folders = [f"hydra.searchpath=[file://{Path(given.config_dir).absolute()}]"] if given.config_dir else []
        name = given.config_name or self.config_name
        overrides = with_literal_paths(as_choices(given.overrides, self.file), swept=given.multirun)
        return help_text(CONF, name, [*overrides, *folders], everything="--help-all" in words)

    def begin(self, folder: Path, hydra_files: Iterable[str]) -> None:
        """Note the folder that Hydra is about to make, and the files that it will write there."""
        self.new_folders = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        self.new_files = [folder / name for name in hydra_files if not (folder / name).exists()]

    def begin_sweep(self, folder: Path, cfg: DictConfig) -> None:
        """Hold the folder of a sweep until the sweep ends.

        Raises:
            CheckpointError: the folder cannot be written, or another run or sweep uses it.
        """
        import_torch()
        from recipes.support.run_folder import lock_of, writing

        self.sweep_dir = folder
        if self.rank == 0:
            what = "the folder of the sweep"
            with writing(what, folder):
                folder.mkdir(parents=True, exist_ok=True)
                self.held.enter_context(lock_of(folder, what, cfg))

    def _tidy(self) -> None:
        """Remove the empty folders, and Hydra's files, of a run or sweep that was refused."""
        self.held.close()
        if self.sweep_dir is not None and not (self.sweep_dir / "sweep.json").exists():
            for file in self.new_files:
                file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the first one that is not empty stays, and all above it
            for folder in self.new_folders:
                folder.rmdir()

    def _report(self, error: BaseException) -> None:
        from ckpt.errors import LOAD_EARLIER, CorruptCheckpointError, DeviceUnavailableError, RankAbsentError

        cause = error.__cause__ or error
        if isinstance(cause, BrokenPipeError):  # the reader of stdout has ended, as in `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        text = _of_absent_plugin(error) or sentence_of(error, CONF, self.config_name)
        if isinstance(cause, CorruptCheckpointError):
            self.code = 1
        if not self.writes:  # it loads nothing
            text = text.removesuffix(LOAD_EARLIER)
        if self.job.calls == 0 and _is_of_system(error):
            text = f"the folder of the run cannot be made: {text}; choose another with output_dir=<folder>"
        # This host lacks a device or a file.
        only_here = isinstance(cause, DeviceUnavailableError) or _is_of_system(cause)
        self._print(text, only_here=only_here, lead_is_gone=isinstance(cause, RankAbsentError) and not cause.rank)

    def _report_unforeseen(self, error: Exception) -> None:
        """Print a sentence for an error of Hydra, of a launcher, or of a job that has printed its traceback; raise any other."""
        if isinstance(error, JobFailed):
            if error.pid != os.getpid():
                self._print(str(error))
        elif self.job.calls == 0 and isinstance(error, ValueError):  # Hydra's own, of an override such as ckpt=null
            self._print(sentence_of_choices(str(error), sys.argv[1:], CONF))
        elif isinstance(error, KeyError) and error.args == ("COMP_LINE",):  # of Hydra's completion
            self._print(
                "-sc query=bash is asked by bash, which sets COMP_LINE; -sc install=bash prints the code for completion"
            )
        elif self.sweep_dir is not None and type(error).__module__.partition(".")[0] in _LAUNCHERS:
            self._print(f"the launcher of the sweep lost a job: {sentence_of(error, CONF, self.config_name)}")
        else:
            raise error

    def _print(self, text: str, *, only_here: bool = False, lead_is_gone: bool = False) -> None:
        from ckpt.errors import printable

        text = printable(text)
        if self.rank == 0 or (self.rank == 1 and lead_is_gone):
            print(text, file=self.stderr, flush=True)
        elif only_here and _leads_its_host():
            print(f"rank {self.rank}: {text}", file=self.stderr, flush=True)


_UNDER_WAY: ContextVar[_Command] = ContextVar("command under way")


class _Refused(BaseException):
    """Ends the command with its cause, the error of a callback. Hydra turns an `Exception` of a callback into a warning."""


class FolderCallback(Callback):
    """Hydra callback: tells the command under way which folder Hydra is about to write."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        if (command := _UNDER_WAY.get(None)) is not None:
            try:
                folder = str(config.hydra.run.dir)
            except OmegaConfBaseException as error:  # output_dir=null
                raise _Refused from error
            command.begin(Path(folder).absolute(), ())

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if (command := _UNDER_WAY.get(None)) is not None:
            try:
                folder = Path(str(config.hydra.sweep.dir)).absolute()
                command.begin(folder, ("multirun.yaml",))
                command.begin_sweep(folder, config)
            except Exception as error:
                raise _Refused from error


class JobFailed(Exception):
    """A bug in a job of a sweep. Process `pid` ran the job and printed the traceback on its stderr."""

    def __init__(self, message: str, pid: int) -> None:
        super().__init__(message, pid)
        self.pid = pid

    def __str__(self) -> str:
        return str(self.args[0])


class _Job:
    """The function that Hydra calls for each job. Pickled by name, so that a launcher can call it in another process."""

    def __init__(self, work: Work, config_name: str, stderr: TextIO | None) -> None:
        self.home = _module_of(work)
        self.__module__ = self.home.removesuffix(".__main__")  # Hydra names the job after it
        self.work = work
        self.config_name = config_name
        self.stderr = stderr
        self.calls = 0
        self.code = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _job_of, (self.home, self.work.__name__, self.config_name)

    def __call__(self, cfg: DictConfig) -> int | float | None:
        self.calls += 1
        swept = HydraConfig.get().mode == RunMode.MULTIRUN
        with contextlib.redirect_stderr(self.stderr or sys.stderr), spelled(in_config_words):
            return self._work(cfg, swept)

    def _work(self, cfg: DictConfig, swept: bool) -> int | float | None:
        """Run one job. Hydra catches what it raises, so that a job of a sweep fails and the next one begins."""
        import_torch()
        try:
            code = self.work(cfg)
        except _user_errors() as error:
            raise CompactHydraException(sentence_of(error, CONF, self.config_name)) from error
        except Exception as error:
            if swept:  # Hydra raises one job's error, after the last job
                traceback.print_exc()
                raise JobFailed(sentence_of(error, CONF, self.config_name), os.getpid()) from error
            raise
        if not isinstance(code, float):
            self.code = max(self.code, code or 0)
        return code


def _module_of(work: Work) -> str:
    """The module of a recipe's function, by the name under which other processes can import it."""
    if work.__module__ != "__main__":
        return work.__module__
    main = sys.modules["__main__"]
    if main.__spec__:
        return main.__spec__.name
    path = Path(str(main.__file__)).resolve().with_suffix("")
    if path.is_relative_to(CONF.parent):
        return ".".join(path.relative_to(CONF.parent).parts)
    return f"recipes.{path.stem}"  # a user's own script


def _job_of(module: str, name: str, config_name: str) -> _Job:
    work: Work = getattr(import_module(module), name).__wrapped__
    return _Job(work, config_name, None)


def _user_errors() -> tuple[type[BaseException], ...]:
    """The errors that are printed as a sentence."""
    import_torch()
    from ckpt.errors import CheckpointError

    return HydraException, OmegaConfBaseException, OSError, CheckpointError


def _of_absent_plugin(error: BaseException) -> str | None:
    """The sentence about a choice of `hparams_search=` whose sweeper is not installed."""
    missing = str(getattr(error, "missing_cfg_file", None))
    package = _SWEEPERS.get(missing)
    return package and (
        f"hparams_search= needs the package {package}, which is not installed: pip install {package}, or leave hparams_search= out"
    )


def _is_of_system(error: BaseException) -> bool:
    """Whether the operating system raised it. Some of Hydra's errors, and of ckpt's, are OSErrors too."""
    from ckpt.errors import CheckpointError

    return isinstance(error, OSError) and not isinstance(error, (CheckpointError, HydraException))


def _leads_its_host() -> bool:
    """Whether this rank has local rank 0, or none is known."""
    from ckpt.errors import ConfigurationError
    from recipes.support.ranks import Environment

    try:
        return Environment.read().local_rank in (0, None)
    except ConfigurationError:
        return True


@contextlib.contextmanager
def _arguments(file: Path, overrides: tuple[str, ...]) -> Iterator[None]:
    """Add overrides to the command line, and put all overrides first: argparse refuses `a=1 -m b=2,3`. Paths are quoted for Hydra."""
    before = sys.argv
    given = [word for word in before[1:] if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    others = [word for word in before[1:] if word not in given]
    literal = with_literal_paths(as_choices(given, file), swept=not {"-m", "--multirun"}.isdisjoint(others))
    sys.argv = [before[0], *literal, *overrides, *others]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _own_stderr(stderr: TextIO) -> Iterator[list[str]]:
    """Hold back Hydra's line of overrides above an error, and argparse's messages, which are returned."""
    lines: list[str] = []

    class Filter:
        def write(self, text: str) -> int:
            if text.startswith("usage: ") or ": error: " in text:  # of argparse; jobs write to the real stderr
                lines.append(text)
            elif not text.startswith("Error executing job with overrides:"):
                return stderr.write(text)
            return len(text)

        def __getattr__(self, name: str) -> object:
            return getattr(stderr, name)

    with contextlib.redirect_stderr(Filter()):  # type: ignore[type-var]
        yield lines
