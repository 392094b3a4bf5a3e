"""After a resume: which values of the config a checkpoint has restored, and which the user has given anew."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from ckpt.errors import ConfigurationError
from ckpt.loading.loader import LoadReport
from ckpt.loading.report import Status
from recipes.support.config import GIVEN, values_of

CHANGEABLE = ("lr", "weight_decay", "betas", "eps")
"""Options of an optimizer that may change when a run goes on: none of them says what state the optimizer keeps."""


class Settled(NamedTuple):
    """The config as it is in use after a resume.

    Attributes:
        cfg: of the run; what the checkpoint restored is in it with the restored value.
        lines: for the user, one for each value that is not the config's or not the checkpoint's.
    """

    cfg: dict[str, Any]
    lines: list[str]


def settle(
    cfg: Mapping[str, Any],
    loaded: LoadReport,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
) -> Settled:
    """Apply what the user gave on the command line over what has just been loaded; let the config say what is in use.

    Every rank calls it with equal arguments, right after the load.

    Raises:
        ConfigurationError: a given value contradicts what the checkpoint restored, and cannot take effect any more.
    """
    restored = {one.key for one in loaded.components if one.status in (Status.RESTORED, Status.PARTLY)}
    settled = Settled(copy.deepcopy(dict(cfg)), [])
    given = cfg.get(GIVEN, ())
    stored = values_of(loaded.config_text)
    if "optimizer" in restored:
        _require_same_class(cfg, stored, loaded.path)
    for option, in_use in _options_in_use(restored, optimizer, scheduler).items():
        if option in cfg["optimizer"]:
            _settle_option(settled, option, in_use, given, optimizer, scheduler)
    if restored & {"rng", "dataset"}:
        _settle_seed(settled, stored, given, loaded.path)
    return settled


def _require_same_class(cfg: Mapping[str, Any], stored: Mapping[str, Any], path: str) -> None:
    key = "optimizer._target_"
    saved, now = stored.get(key), cfg["optimizer"]["_target_"]
    if saved is not None and saved != now:
        raise ConfigurationError(
            f"{path} holds the optimizer state of {saved}, but this run has {key}={now}: give {key}={saved}, or leave the saved state "
            "out with ~components.optimizer ~components.scheduler"
        )


def _options_in_use(
    restored: Collection[str], optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR
) -> dict[str, Any]:
    """The restored options of the recipe's one parameter group; the learning rate is the one that the schedule starts from."""
    group = optimizer.param_groups[0] if "optimizer" in restored else {}
    options = {option: _plain(value) for option, value in group.items() if option not in ("params", "lr")}
    return options | ({"lr": _plain(scheduler.base_lrs[0])} if "scheduler" in restored else {})


def _settle_option(
    settled: Settled,
    option: str,
    in_use: Any,
    given: Collection[str],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
) -> None:
    key, wanted = f"optimizer.{option}", settled.cfg["optimizer"][option]
    if _plain(wanted) == in_use:
        return
    if key not in given:
        settled.cfg["optimizer"][option] = in_use
        settled.lines.append(
            f"{key}={in_use} as in the checkpoint: the config says {wanted}, which was not given on the command line"
        )
        return
    if option not in CHANGEABLE:
        raise ConfigurationError(
            f"{key}={wanted} given on the command line: the checkpoint has {in_use}, and with it the optimizer's state; leave it out, "
            "or leave the saved state out with ~components.optimizer ~components.scheduler"
        )
    _apply(option, wanted, optimizer, scheduler)
    settled.lines.append(f"{key}={wanted} given on the command line: {in_use} in the checkpoint")


def _apply(
    option: str, value: Any, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR
) -> None:
    """Set an option of all groups; a learning rate as if the schedule had started from it."""
    for group in optimizer.param_groups:
        group[option] = value
        if option == "lr":
            group["initial_lr"] = value
    if option == "lr":
        scheduler.base_lrs = [value] * len(optimizer.param_groups)
        for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
            group["lr"] = value * factor(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _settle_seed(settled: Settled, stored: Mapping[str, Any], given: Collection[str], path: str) -> None:
    """Random numbers and the order of the data go on as the run began that the checkpoint is of."""
    seed = stored.get("train.seed", settled.cfg["train"]["seed"])
    wanted = settled.cfg["train"]["seed"]
    if seed == wanted:
        return
    if "train.seed" in given:
        raise ConfigurationError(
            f"train.seed={wanted} given on the command line: {path} goes on with the random numbers and the order of the data of "
            f"train.seed={seed}; leave it out, or restore neither with ~components.rng ~components.dataset"
        )
    settled.cfg["train"]["seed"] = seed
    settled.lines.append(f"train.seed={seed} as in the checkpoint: the config says {wanted}")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
