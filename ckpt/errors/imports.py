"""Imports that can fail: of a package that an installation may lack, and of names that another package does not promise to keep.

`tests/unit/test_private_names.py` lists every use of `private_name`, and sees that nothing private is reached in another way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module, metadata
from operator import attrgetter
from typing import Any

from ckpt.errors import CheckpointError, ConfigurationError, sentence


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Turn a failed import inside the block into one sentence that names the package and the cause.

    Args:
        what: it is that needs the import, such as "the backend zarr".

    Raises:
        ConfigurationError: an import failed. Packages raise nearly anything when they are imported beside a wrong version of another.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise import_failure(what, error) from error


def import_failure(what: str, error: Exception) -> ConfigurationError:
    """Return what a person should read of a failed import: a package that is not installed, or one whose version does not fit."""
    package = (getattr(error, "name", None) or "").partition(".")[0].replace("ckpt", "ckpt-coordinator")
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return ConfigurationError(f"{what} needs the package {package}, which is not installed: pip install {package}")
    try:
        installed = f" with {package} {metadata.version(package)}, which is installed" if package else ""
    except metadata.PackageNotFoundError:
        installed = f" with the {package} that is installed"
    cause = str(error) if isinstance(error, ImportError) else sentence(error)
    upgraded = " ".join(dict.fromkeys(("ckpt-coordinator", package or "ckpt-coordinator")))
    return ConfigurationError(
        f"{what} cannot be imported{installed}: {cause}. Install versions that fit: pip install --upgrade {upgraded}"
    )


@cache
def private_name(module: str, name: str, needed_to: str) -> Any:
    """Return what has this name, which may be dotted, in a module. One of its parts begins with an underscore.

    Args:
        needed_to: completes "is needed to".

    Raises:
        ConfigurationError: the installed version has no such name.
    """
    try:
        return attrgetter(name)(import_module(module))
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0]
        raise ConfigurationError(
            f"{package} {metadata.version(package)} has no {module}.{name}, which is needed to {needed_to}: install another version of "
            f"{package}; docs/testing.md of ckpt-coordinator lists those that were tested"
        ) from error
