"""The one door from a command line into Hydra: every recipe's main function is wrapped by `recipe`.

A mistake of the user ends as one sentence on stderr and exit code 1; a mistake of ours keeps its traceback.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from recipes.sentences import sentence_of

CONF = Path(__file__).resolve().parent.parent / "conf"
"""The config files, beside the package `recipes` in a checkout and in an installed wheel alike."""

Work = Callable[[DictConfig], int | None]

_SILENT = ("hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")  # no .hydra/, no log
_NO_FOLDER = ("hydra.run.dir=.", *_SILENT)


def recipe(config_name: str, *, writes: bool = True) -> Callable[[Work], Callable[[], None]]:
    """Make a command of a function of the composed config; what the function returns, if anything, is the exit code.

    Under torchrun or Slurm every rank enters here: ranks other than 0 write no files of Hydra's own, and print only the
    errors that rank 0 cannot know.

    Args:
        config_name: the file in conf/ that the command composes, without `.yaml`.
        writes: False for a command that only reads: it leaves no folder, no `.hydra/` and no log, and is never swept.
    """

    def decorate(work: Work) -> Callable[[], None]:
        @functools.wraps(work)
        def main() -> None:
            code = _Command(work, config_name, writes).run()
            if code:
                sys.exit(code)

        return main

    return decorate


class _Command:
    """One call of one recipe: a run, or a sweep whose jobs run one after the other in this process."""

    def __init__(self, work: Work, config_name: str, writes: bool) -> None:
        self.work = work
        self.config_name = config_name
        self.writes = writes
        self.stderr = sys.stderr
        self.rank = 0
        self.code = 0
        self.jobs = 0
        self.sweep_dir: Path | None = None
        self.reported: BaseException | None = None  # the bug that Hydra will raise again after a sweep

    def run(self) -> int:
        """Compose and run, say in one sentence what went wrong, and return the exit code."""
        self.rank = _rank_of_environment() if self.writes else 0
        if not self.writes and {"-m", "--multirun"} & set(sys.argv):  # Hydra would make the folder of a sweep
            self._print(f"{self.config_name} only reads, one path at a time: leave out -m")
            return 1
        try:
            with _environment("HYDRA_FULL_ERROR", "1"), _arguments(self._overrides()), _without_header(self.stderr):
                hydra.main(version_base="1.3", config_path=str(CONF), config_name=self.config_name)(self._job())()
        except KeyboardInterrupt:
            self._print("interrupted")
            self.code = 130
        except _user_errors() as error:
            self.code = 1
            self._report(error)
        except Exception as error:
            self.code = 1
            if self.jobs == 0 and isinstance(error, ValueError):  # Hydra's own, of an override such as ckpt=null
                self._print(" ".join(str(error).split()))
            elif error is not self.reported:
                raise
        if self.sweep_dir is not None and self.rank == 0:
            from recipes.sweep import show

            show(self.sweep_dir)
        return self.code

    def _overrides(self) -> tuple[str, ...]:
        if not self.writes:
            return _NO_FOLDER
        return _SILENT if self.rank else ()

    def _job(self) -> Work:
        @functools.wraps(self.work)  # Hydra takes the job's name from the file of the function inside
        def job(cfg: DictConfig) -> int | None:
            self.jobs += 1
            swept = HydraConfig.get().mode == RunMode.MULTIRUN
            if swept:
                self.sweep_dir = Path(str(HydraConfig.get().sweep.dir)).absolute()
            with contextlib.redirect_stderr(self.stderr):
                return self._work(cfg, swept)

        return job

    def _work(self, cfg: DictConfig, swept: bool) -> int | None:
        """Do one job's work. Hydra sees what it raises: that is how a job of a sweep fails and the next begins."""
        import_torch()
        try:
            code = self.work(cfg)
        except _user_errors() as error:
            raise CompactHydraException(sentence_of(error, CONF, self.config_name)) from error
        except Exception as error:
            if swept:  # Hydra raises one job's error, after the last job
                traceback.print_exc()
                self.reported = self.reported or error
            raise
        self.code = max(self.code, code or 0)
        return code

    def _report(self, error: BaseException) -> None:
        if isinstance(error.__cause__ or error, BrokenPipeError):  # whoever read our output has enough, as in `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        text = sentence_of(error, CONF, self.config_name)
        if self.jobs == 0 and isinstance(error, OSError) and not isinstance(error, HydraException):
            text = f"the folder of the run cannot be made: {text}; choose another with output_dir=<folder>"
        cause = error.__cause__ or error
        self._print(text, only_here=_is_local(cause), lead_is_gone=_says_that_rank_0_is_gone(cause))

    def _print(self, text: str, *, only_here: bool = False, lead_is_gone: bool = False) -> None:
        if self.rank == 0 or (self.rank == 1 and lead_is_gone):
            print(text, file=self.stderr, flush=True)
        elif only_here and _leads_its_host():
            print(f"rank {self.rank}: {text}", file=self.stderr, flush=True)


def import_torch() -> None:
    """Import torch without the device plugins that it loads by itself.

    A plugin that is installed without its driver makes every plain `import torch` fail, whatever device the run is for.
    So plugins are imported by name, by `ckpt.device.Device` alone, which can say what is missing. Nor may torch's C++
    parts warn on stderr: where no name server answers, they do so for every connection between ranks.
    """
    level = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    with _environment("TORCH_DEVICE_BACKEND_AUTOLOAD", "0"), _environment("TORCH_CPP_LOG_LEVEL", level):
        import torch  # noqa: F401


def _rank_of_environment() -> int:
    import_torch()
    from recipes.ranks import rank_of_environment, ranks_exist

    return rank_of_environment() if ranks_exist() else 0


def _user_errors() -> tuple[type[BaseException], ...]:
    """What is answered with a sentence."""
    import_torch()
    from ckpt.errors import CheckpointError

    return HydraException, OmegaConfBaseException, OSError, CheckpointError


def _is_local(error: BaseException) -> bool:
    """Whether this rank may be the only one that knows, because its host lacks a device or a file."""
    from ckpt.errors import CheckpointError, DeviceUnavailableError

    if isinstance(error, DeviceUnavailableError):
        return True
    return isinstance(error, OSError) and not isinstance(error, (CheckpointError, HydraException))


def _says_that_rank_0_is_gone(error: BaseException) -> bool:
    from ckpt.errors import RankAbsentError

    return isinstance(error, RankAbsentError) and error.rank == 0


def _leads_its_host() -> bool:
    """Whether this rank is the one to speak for its host, where that is known."""
    from ckpt.errors import ConfigurationError
    from recipes.ranks import Environment

    try:
        return Environment.read().local_rank in (0, None)
    except ConfigurationError:
        return True


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _arguments(overrides: tuple[str, ...]) -> Iterator[None]:
    """Add overrides to the command line, and put all of them in one place: argparse refuses `a=1 -m b=2,3`."""
    before = sys.argv
    given = [word for word in before[1:] if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    others = [word for word in before[1:] if word not in given]
    sys.argv = [before[0], *given, *overrides, *others]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _without_header(stderr: TextIO) -> Iterator[None]:
    """Keep back the line of overrides that Hydra writes above an error: the sentence below it names what matters."""

    class Filter:
        def write(self, text: str) -> int:
            return len(text) if text.startswith("Error executing job with overrides:") else stderr.write(text)

        def __getattr__(self, name: str) -> object:
            return getattr(stderr, name)

    with contextlib.redirect_stderr(Filter()):  # type: ignore[type-var]
        yield
