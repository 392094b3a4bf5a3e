"""After a resume: decide between values of the config that the checkpoint restored and values of the command line."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import ConfigurationError
from recipes.support.config import GIVEN

CHANGEABLE = ("lr", "weight_decay", "betas", "eps")
"""Options of an optimizer that may change on a resume, because the optimizer's state does not depend on them."""


@dataclass
class Settled:
    """The config in use after a resume.

    Attributes:
        cfg: of the run; values that the checkpoint restored replace those of the config.
        lines: for the user, one for each value that differs between config and checkpoint.
    """

    cfg: dict[str, Any]
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    lines: list[str] = field(default_factory=list)

    def settle_option(self, option: str, restored: Any) -> None:
        """Keep the restored value of an optimizer's option, or apply the one that was given on the command line."""
        key, wanted = f"optimizer.{option}", self.cfg["optimizer"][option]
        if _plain(wanted) == restored:
            return
        if key not in self.cfg.get(GIVEN, ()):
            self.cfg["optimizer"][option] = restored
            self.lines.append(
                f"{key}={restored} as in the checkpoint: the config says {wanted}, which was not given on the command line"
            )
            return
        if option not in CHANGEABLE:
            raise ConfigurationError(
                f"{key}={wanted} given on the command line: the checkpoint has {restored}, and with it the optimizer's state; leave it "
                "out, or leave the saved state out with ~components.optimizer ~components.scheduler"
            )
        self._apply(option, wanted)
        self.lines.append(f"{key}={wanted} given on the command line: {restored} in the checkpoint")

    def _apply(self, option: str, value: Any) -> None:
        """Set an option of all groups; a learning rate as if the schedule had started from it."""
        groups, scheduler = self.optimizer.param_groups, self.scheduler
        for group in groups:
            group[option] = value
        if option == "lr":
            factors = getattr(scheduler, "lr_lambdas", None)  # else in proportion
            for at, group in enumerate(groups):
                factor = factors[at](scheduler.last_epoch) if factors else scheduler._last_lr[at] / scheduler.base_lrs[at]
                group |= {"initial_lr": value, "lr": value * factor}
            scheduler.base_lrs = [value] * len(groups)
            scheduler._last_lr = [group["lr"] for group in groups]

    def settle_schedule(self, state: Mapping[str, Any]) -> None:
        """Keep the restored values of the schedule, such as its length, which `train.steps` may be given for."""
        node = self.cfg["schedule"]
        for key in node.keys() & state.keys():
            if (restored := _plain(state[key])) == node[key]:
                continue
            if f"schedule.{key}" in self.cfg.get(GIVEN, ()):
                raise ConfigurationError(
                    f"schedule.{key}={node[key]} given on the command line: the checkpoint goes on with {restored}; leave it out, or begin "
                    "the schedule anew with ~components.scheduler"
                )
            self.lines.append(f"schedule.{key}={restored} as in the checkpoint: the config says {node[key]}")
            node[key] = restored

    def settle_seed(self, seed: int, path: str) -> None:
        """Keep the seed of the checkpoint, which its random numbers and its order of the data go on with."""
        wanted = self.cfg["train"]["seed"]
        if seed == wanted:
            return
        if "train.seed" in self.cfg.get(GIVEN, ()):
            raise ConfigurationError(
                f"train.seed={wanted} given on the command line: {path} goes on with the random numbers and the order of the data of "
                f"train.seed={seed}; leave it out, or restore neither with ~components.rng ~components.dataset"
            )
        self.cfg["train"]["seed"] = seed
        self.lines.append(f"train.seed={seed} as in the checkpoint: the config says {wanted}")


def settle(
    cfg: Mapping[str, Any],
    path: str,
    restored: Collection[str],
    stored: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> Settled:
    """Apply values of the command line over those just loaded, and return the config in use.

    Every rank calls it with equal arguments, right after the load.

    Args:
        path: of the checkpoint.
        restored: the components that the load has restored.
        stored: the values of its config by dotted key.

    Raises:
        ConfigurationError: a value of the command line contradicts what the checkpoint restored, and can no longer take effect.
    """
    settled = Settled(copy.deepcopy(dict(cfg)), optimizer, scheduler)
    options: dict[str, Any] = {}
    if "optimizer" in restored:
        _require_same_class("optimizer", cfg, stored, path)
        options |= {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "lr")}
    if "scheduler" in restored:
        _require_same_class("schedule", cfg, stored, path)
        options["lr"] = scheduler.base_lrs[0]
        settled.settle_schedule(scheduler.state_dict())
    for option, value in options.items():
        if option in cfg["optimizer"]:
            settled.settle_option(option, _plain(value))
    if "rng" in restored or "dataset" in restored:
        settled.settle_seed(stored.get("train.seed", cfg["train"]["seed"]), path)
    return settled


def _require_same_class(group: str, cfg: Mapping[str, Any], stored: Mapping[str, Any], path: str) -> None:
    key = f"{group}._target_"
    saved, now = stored.get(key), cfg[group]["_target_"]
    if saved is not None and saved != now:
        raise ConfigurationError(
            f"{path} holds the {group} state of {saved}, but this run has {key}={now}: give {key}={saved}, or leave the saved state "
            "out with ~components.optimizer ~components.scheduler"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
