"""The training run on one rank: its parts, the components of a checkpoint, and the loop."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.profiler
from hydra.utils import instantiate

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.committed import Catalog
from ckpt.cli.config_text import values_of
from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError
from ckpt.format.places import place_of, step_of
from ckpt.interop.registry import require_checkpoint
from ckpt.loading.compatibility import goes_on
from ckpt.loading.loader import LoadReport
from ckpt.loading.report import some_of
from ckpt.memory.device import Device
from ckpt.ranks.sigterm import TOLD_TO_END
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import Declared, offers
from ckpt.state.address import local_tensor
from ckpt.state.state_digest import state_digest
from ckpt.state.statefuls import ModelState, OptimizerState, RNGState
from ckpt.storage.objects.store import retry_for
from recipes.support.config import (
    COMPONENT_KEYS,
    OWN_COMPONENTS,
    Every,
    check_batch,
    config_text,
    loss_of,
    made,
    made_model,
    require_kind,
)
from recipes.support.keys import shown
from recipes.support.ranks import is_asked_to_end
from recipes.support.report import SUMMARY_NAME, Report, Summary, console_of, write_summary
from recipes.support.run_folder import writing
from recipes.training.callbacks import Callbacks
from recipes.training.data import Batches, SampleLoader, batches_of
from recipes.training.model import Step, seeded
from recipes.training.parallel.base import Arranged, Layout
from recipes.training.restored import settle


def settle_start(cfg: dict[str, Any]) -> dict[str, Any]:
    """Check `resume` against the existing checkpoints, before any rank starts.

    Returns:
        the config; `resume=latest` becomes null if there is no checkpoint, and no tier that may have one.

    Raises:
        CheckpointNotFoundError: `resume` names a folder that holds no checkpoint.
        CheckpointExistsError: the checkpoint root holds checkpoints that the run does not continue.
        StorageError: the checkpoint root cannot be made.
    """
    root, resumed = cfg["checkpoint_root"], cfg["resume"]
    retry_for(cfg["storage"]["retry_s"])
    require_named_checkpoint(cfg)
    place = place_of(root)
    ledger = catalog_at(place)
    committed = ledger.committed()
    if not cfg["overwrite"]:
        _require_own_history(cfg, ledger)
    if isinstance(place, Path):
        with writing("the checkpoint root", place, "checkpoint_root"):
            place.mkdir(parents=True, exist_ok=True)
    if resumed == "latest" and not committed and not cfg.get("tiers"):  # of tiers only the ranks on their hosts know
        _tell_of_beginning(cfg)
        return cfg | {"resume": None}
    return cfg


def _tell_of_beginning(cfg: Mapping[str, Any]) -> None:
    console_of(cfg).print(f"resume=latest: there is no checkpoint in {cfg['checkpoint_root']} yet, so the run begins at step 1")


def require_named_checkpoint(cfg: Mapping[str, Any]) -> None:
    """Raise CheckpointNotFoundError if `resume` names a folder that holds no checkpoint."""
    resumed = cfg["resume"]
    if resumed in (None, "latest"):
        return
    try:
        require_checkpoint(place_of(resumed), allow_pickle=cfg["load"]["allow_pickle"])
    except CheckpointNotFoundError as error:
        if not difflib.get_close_matches(Path(resumed).name, ["latest"], cutoff=0.7):
            raise
        raise CheckpointNotFoundError(f"{error} Did you mean resume=latest?", arguments=error.arguments) from error


def _require_own_history(cfg: Mapping[str, Any], ledger: Catalog[Any]) -> None:
    """Refuse to save beside checkpoints of another run: a later `resume=latest` would mix both.

    Raises:
        CheckpointExistsError: there are such checkpoints.
    """
    root, resumed, committed = cfg["checkpoint_root"], cfg["resume"], ledger.committed()
    if resumed is None and committed:
        raise CheckpointExistsError(
            f"{root} holds the checkpoints of an earlier run, up to {committed[-1].path.name}: resume with resume=latest, write elsewhere "
            f"with {_another_root(cfg)}, or replace them with overwrite=true"
        )
    if resumed in (None, "latest"):
        return
    step = step_of(Path(resumed).name.removeprefix("checkpoint-"))
    if step is not None and step >= cfg["train"]["steps"]:
        return  # a run that is resumed at its last step saves nothing
    newer = ledger.newer_than(place_of(resumed))
    others = [commit.path.name for commit in (committed if newer is None else newer)]
    if others:
        foreign = ("checkpoints of another history", "remove")
        kind, then = foreign if newer is None else ("newer checkpoints", "set aside")
        raise CheckpointExistsError(
            f"resume={resumed}: {root} holds {kind}: {some_of(others)}. Give overwrite=true to {then} them, {_another_root(cfg)} to write "
            "elsewhere, or resume=latest to resume from the newest"
        )


def _another_root(cfg: Mapping[str, Any]) -> str:
    """The key that names another checkpoint root: the name of the run, unless the root lies outside of its folder."""
    place, run_dir = place_of(cfg["checkpoint_root"]), Path(cfg["run_dir"])
    follows = isinstance(place, Path) and place.is_relative_to(run_dir)
    return "run_name=<another>" if follows else "checkpoint_root=<another>"


def train(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Train up to step `train.steps`, from `resume` on, and save; return the summary. Every rank calls it."""
    report = _report(cfg, topology)
    training, coordinator = set_up(cfg, topology)
    report.console.print(coordinator.memory)
    summary_path = Path(cfg["run_dir"], SUMMARY_NAME)
    summary = Summary(world_size=topology.world_size, tags=cfg.get("tags", []))
    with closing(report), coordinator:
        if cfg["resume"] is not None:
            resume(training, coordinator, summary, report)
        has_steps = summary.first_step <= cfg["train"]["steps"]
        if topology.is_lead and has_steps:
            summary_path.unlink(missing_ok=True)  # so that a killed run leaves no summary
        with report.running(summary.first_step), training.told_to_end(coordinator), _profiled(cfg, topology):
            for step in range(summary.first_step, cfg["train"]["steps"] + 1):
                summary.add_step(step, training.step())
                training.save(coordinator, step, summary, report)
                report.step(step, summary.losses[-1], summary.add_saves(coordinator.reports))
                if training.is_over:
                    report.ended(step, by_callback=not training.is_told_to_end)
                    break
            with report.moving("finishing the last save"):
                coordinator.wait()
            report.saved(summary.add_saves(coordinator.reports))
        training.require_not_told_to_end(summary, report)
        summary.state_digest = training.digest()
        if cfg["load"]["reread"] and summary.checkpoints:
            _reread(training, coordinator, summary, report)
    if topology.is_lead:
        if has_steps or not summary_path.exists():  # else the run that made the last step has left its summary
            write_summary(summary_path.parent, summary.as_dict())
        report.done(summary, summary_path)
    return summary.as_dict()


@contextmanager
def _profiled(cfg: Mapping[str, Any], topology: Topology) -> Iterator[None]:
    """With `profile` trace the block, and leave the trace in the folder of the run."""
    if not cfg.get("profile"):
        yield
        return
    with torch.profiler.profile() as trace:
        yield
    folder = Path(cfg["run_dir"], "profile")
    folder.mkdir(exist_ok=True)
    trace.export_chrome_trace(str(folder / f"rank-{topology.rank:05d}.json"))


def set_up(cfg: dict[str, Any], topology: Topology) -> tuple[Training, CheckpointCoordinator]:
    """Make the parts of a run, and the coordinator of its components. Collective."""
    make_coordinator = instantiate({**cfg["coordinator"], "_partial_": True})
    device: Device = make_coordinator.keywords["device"]
    with topology.operation("the set-up of the run"), topology.phase("build"), device.telling_of_room():
        training = Training(cfg, topology, device)
    training.join()
    return training, training.coordinated(make_coordinator)


def _report(cfg: dict[str, Any], topology: Topology) -> Report:
    """Make the report of a run. Collective: where the lead cannot import the package that `report` names, all ranks raise."""
    with topology.operation("the set-up of the run"), topology.phase("report"):
        return Report(cfg, shown=topology.is_lead, topology=topology)


class Training:
    """Model, optimizer, schedule and data of one rank.

    The constructor is not collective and draws from no global random generator; every rank calls `join` after it.
    """

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    model_state: ModelState
    optimizer_state: OptimizerState

    def __init__(self, cfg: Mapping[str, Any], topology: Topology, device: Device) -> None:
        self.cfg = cfg
        self.topology = topology
        self.device = device
        self.steps_done = 0
        self.is_told_to_end = False
        self.is_over = False
        self._every = Every.of(cfg["save"]["every"])
        self._saved_at = time.monotonic()
        self._is_time = False
        self._has_sigterm_come: Callable[[], bool] = lambda: False
        device.use(topology.local_rank)
        rank, num_ranks = topology.rank, topology.world_size
        self.layout: Layout = made(cfg["parallel"])
        self.layout.check(num_ranks)
        check_batch(cfg, self.layout, num_ranks)
        seed = cfg["train"]["seed"]
        self._step = Step(made_model(cfg["model"], seed), loss_of(cfg.get("loss"))).to(device.torch_device).train()
        self.model = self._step.model
        self.layout.fit(self.model, num_ranks)
        self.loader = self._batches()
        self.callbacks = Callbacks(cfg.get("callbacks", {}))
        self.rng = RNGState(device, seed=seed, stream=self.layout.stream(rank, num_ranks), step=lambda: self.steps_done)

    def _batches(self) -> Batches:
        rank, num_ranks = self.topology.rank, self.topology.world_size
        seed, batch_size, share = self.cfg["train"]["seed"], self.cfg["train"]["batch_size"], self.layout.share(rank, num_ranks)
        offered = {
            "batch_size": batch_size,
            "rank_batch_size": batch_size // share[1],
            "share": share,
            "seed": seed,
            "model": self.model,
            "device": self.device.torch_device,
            "topology": self.topology,
        }
        if isinstance(context := getattr(self.model, "context", None), int):
            offered["context"] = context
        with seeded(seed):
            return batches_of(self.cfg["data"], offered, is_kept="dataset" in self.cfg["components"])

    def join(self) -> None:
        """Lay the model out over the ranks, and make optimizer, schedule and added components. Collective."""
        topology, device = self.topology, self.device
        arranged = self.layout.arrange(self._step, topology, device.torch_device)
        self.model, self._backward = arranged.module, arranged.backward
        with topology.operation("the set-up of the run"), topology.phase("complete"), device.telling_of_room():
            self._complete(arranged)

    def _complete(self, arranged: Arranged) -> None:
        node = self.cfg["optimizer"]
        try:
            optimizer = made(node, params=self.model.parameters())
        except (TypeError, ValueError, LookupError) as error:  # lr=-1, betas=3: a config does not know their types
            values = " ".join(f"{key}={shown(value)}" for key, value in node.items() if key != "_target_")
            raise ConfigurationError(f"optimizer: {node['_target_']} refuses {values}: {error}") from None
        self.optimizer = arranged.wrap_optimizer(require_kind(torch.optim.Optimizer, "optimizer", node, optimizer))
        schedule = made(self.cfg["schedule"], optimizer=self.optimizer)
        self.scheduler = require_kind(torch.optim.lr_scheduler.LRScheduler, "schedule", self.cfg["schedule"], schedule)
        self.model_state = arranged.state_of(self.model)
        self.optimizer_state = OptimizerState(self.optimizer, self.model)
        self.added = {
            key: made({k: v for k, v in node.items() if k not in COMPONENT_KEYS}, model=self.model)
            for key, node in self.cfg["components"].items()
            if "_target_" in node
        }
        self.rng.seed(self.cfg["train"]["seed"])

    def components(self) -> list[StateComponent]:
        """Return the components of the config: the recipe's own, then added ones, the random generators last."""
        own = {
            "model": self.model_state,
            "optimizer": self.optimizer_state,
            "scheduler": self.scheduler,
            "dataset": self.loader,
            "rng": self.rng,
        }
        objects = own | self.added
        nodes = self.cfg["components"]
        order = [*(key for key in objects if key != "rng"), "rng"]
        found = [_component(key, objects[key], nodes[key]) for key in order if key in nodes]
        if self.callbacks.has_state:
            found.insert(0, StateComponent("callbacks", self.callbacks, "replicated", required=False))
        return found

    @property
    def left_out(self) -> frozenset[str]:
        """The recipe's own components that the config is without, as after `~components.optimizer`."""
        return frozenset(OWN_COMPONENTS) - self.cfg["components"].keys()

    def coordinated(self, make: Callable[..., CheckpointCoordinator]) -> CheckpointCoordinator:
        """Make the coordinator of these components. Collective."""
        coordinator = make(  # by name: `AT_RUN_TIME` of `recipes.support.config` lists the names
            state_components=self.components(),
            process_groups=self.layout.process_groups(self.topology),
            topology=self.topology,
            config_text=config_text(self.cfg),
        )
        return require_kind(CheckpointCoordinator, "coordinator", self.cfg["coordinator"], coordinator)

    def go_on_from(self, path: str, checkpoint_id: str, restored: Collection[str], saved_config: str) -> list[str]:
        """After a load: take over the step, and the values of the config that the checkpoint restored.

        Args:
            restored: the components that were.
            saved_config: text of the config of the run that saved it.

        Returns:
            a line for the user for each value that differs between config and checkpoint.

        Raises:
            ConfigurationError: the checkpoint's id is no step, or a value of the command line contradicts what was restored.
            CorruptCheckpointError: `saved_config` is no config.
        """
        step = step_of(checkpoint_id)
        if step is None:
            raise ConfigurationError(f"{path} has an id that is no step: this recipe did not save it")
        self.steps_done = step
        settled = settle(self.cfg, path, restored, values_of(saved_config), self.optimizer, self.scheduler)
        self.cfg = settled.cfg
        return settled.lines

    def step(self) -> float:
        """Train one step on the next batch and return its loss, the mean over the global batch. Collective."""
        with self.device.telling_of_room():
            batch = self.loader.next_batch()
            self.optimizer.zero_grad(set_to_none=True)
            loss = self._backward(batch)
            self.optimizer.step()
            self.scheduler.step()
        self.steps_done += 1
        mean = self._mean(loss)
        figures = {"loss": mean, "lr": float(self.scheduler.get_last_lr()[0])}
        self.is_over = self.callbacks.after_step(self.steps_done, figures) or self.is_told_to_end
        return mean

    @contextmanager
    def told_to_end(self, coordinator: CheckpointCoordinator) -> Iterator[None]:
        """Inside the block, SIGTERM to any rank sets `is_told_to_end` on all ranks, at the end of the step that it interrupts."""
        if not self.cfg["save"]["on_sigterm"]:
            yield
            return
        with coordinator.sigterm_noted() as has_come:
            self._has_sigterm_come = lambda: has_come() or is_asked_to_end()
            yield

    def save(self, coordinator: CheckpointCoordinator, step: int, summary: Summary, report: Report) -> bool:
        """Save when `save.every` or a tier says so, and at the last step; SIGTERM and callbacks may make any step the last. Collective.

        Returns:
            whether the step was saved: `save.when_busy=skip` skips a step, but not one of the last two kinds.
        """
        is_last = step == self.cfg["train"]["steps"] or self.is_over
        goes_home = is_last or self._is_due(step)
        if not goes_home and all(step % tier["every"] for tier in (self.cfg.get("tiers") or {}).values()):
            return False
        self._saved_at = time.monotonic()
        with report.moving(f"saving checkpoint-{step:08d}"):
            if is_last:
                coordinator.wait()
            metrics = {"loss": summary.losses[-1]} if self.cfg["save"].get("keep_best") is not None else None
            is_saved = (
                coordinator.save_checkpoint(checkpoint_id=f"{step:08d}", metrics=metrics, goes_home=goes_home) is not None
            )
        if not is_saved:
            summary.skipped.append(step)
        return is_saved

    def _is_due(self, step: int) -> bool:
        """Whether `save.every` asks for a save of this step. Equal on all ranks."""
        if self._every.unit == "steps":
            return step % self._every.number == 0
        if self._every.unit == "seconds":
            return self._is_time
        if not isinstance(self.loader, SampleLoader):
            raise ConfigurationError(
                f"save.every={self.cfg['save']['every']}: {self.cfg['data']['_target_']} does not say where an epoch ends: give steps, "
                "or a time"
            )
        before, now = ((self.loader.position - behind) // self.loader.num for behind in (self.loader.batch_size, 0))
        return before // self._every.number != now // self._every.number

    def require_not_told_to_end(self, summary: Summary, report: Report) -> None:
        """End a run that has got SIGTERM. Called when all its saves are done.

        Raises:
            SystemExit: with the exit code for SIGTERM.
        """
        if self.is_told_to_end:
            report.console.print(
                f"SIGTERM: the run ends at step {summary.final_step}, which is saved; go on from it with resume=latest"
            )
        if self.is_told_to_end or self._has_sigterm_come():
            raise SystemExit(TOLD_TO_END)

    def digest(self) -> str:
        """Return the digest of model and optimizer, which does not depend on the layout. Collective."""
        with self.topology.operation("the digest of the state"):
            return state_digest({"model": self.model_state, "optimizer": self.optimizer_state}, self.topology)

    def scramble(self) -> None:
        """Overwrite every tensor of model and optimizer, so that a load which misses an element is noticed."""
        for tensor in self.model.state_dict().values():
            _scramble(tensor)
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    _scramble(value)

    def _mean(self, loss: torch.Tensor | None) -> float:
        """Return the mean of the losses of a batch's parts, summed in the order of ranks, so that its bits are reproducible.

        Each rank sends with its loss whether it has got SIGTERM, and whether `save.every` has passed by its clock: the first rank's counts.
        """
        num_ranks = self.topology.world_size
        is_time = self._every.unit == "seconds" and time.monotonic() - self._saved_at >= self._every.number
        if num_ranks == 1:
            assert loss is not None
            self.is_told_to_end, self._is_time = self._has_sigterm_come(), is_time
            return float(loss)
        mine = torch.zeros((), device=self.device.torch_device) if loss is None else loss
        mine = torch.stack([mine, *(torch.full_like(mine, float(flag)) for flag in (self._has_sigterm_come(), is_time))])
        gathered = [torch.empty_like(mine) for _ in range(num_ranks)]
        torch.distributed.all_gather(gathered, mine)
        losses, signals, is_time_of = torch.stack(gathered).cpu().T.tolist()
        self.is_told_to_end, self._is_time = any(signals), bool(is_time_of[0])
        known = [value for rank, value in enumerate(losses) if self.layout.knows_loss(rank, num_ranks)]
        return sum(known) / len(known)


def resume(training: Training, coordinator: CheckpointCoordinator, summary: Summary, report: Report) -> None:
    """Load the checkpoint that `resume` names. Afterwards no random number is drawn until the next step.

    Values of the command line take effect over those that the checkpoint restored. From then on the config of the run, and
    of its checkpoints, has the values in use.
    """
    cfg = training.cfg
    path = None if cfg["resume"] == "latest" else cfg["resume"]
    try:
        loaded = _load(training, coordinator, report, path, strict=cfg["load"]["strict"], cast=cfg["load"]["cast"])
    except CheckpointNotFoundError:
        if path is not None or not cfg.get("tiers"):
            raise
        if training.topology.is_lead:
            _tell_of_beginning(cfg)
        return
    digest = training.digest()
    restored = {component.key for component in loaded.components if goes_on(component)}
    lines = training.go_on_from(loaded.path, loaded.checkpoint_id, restored, loaded.config_text)
    summary.add_resume(loaded, digest)
    report.cfg = training.cfg
    coordinator.config_text = config_text(training.cfg)
    report.resumed(loaded)
    for line in lines:
        report.console.print(f"  {line}")


def _reread(training: Training, coordinator: CheckpointCoordinator, summary: Summary, report: Report) -> None:
    """Load the last checkpoint into scrambled tensors, and compare the state's digest with the saved one."""
    path = summary.checkpoints[-1]["path"]
    training.scramble()
    loaded = _load(training, coordinator, report, path, strict=True)
    digest = training.digest()
    if digest != summary.state_digest:
        raise CorruptCheckpointError(
            f"load.reread: {path} has the state digest {summary.state_digest}, read back was {digest}"
        )
    summary.add_load(loaded)
    report.reread(loaded)


def _load(
    training: Training,
    coordinator: CheckpointCoordinator,
    report: Report,
    path: str | None,
    *,
    strict: bool,
    cast: bool | list[str] = False,
) -> LoadReport:
    with report.moving(f"loading {'the newest checkpoint' if path is None else Path(path).name}"):
        coordinator.load_checkpoint(path, strict=strict, leave_out=training.left_out, cast=cast)
    assert coordinator.last_load is not None
    return coordinator.last_load


def _component(key: str, stateful: Any, node: Mapping[str, Any]) -> StateComponent:
    pattern = node["sharing_pattern"] or (stateful.sharing_pattern if offers(stateful, Declared) else None)
    if pattern is None:
        raise ConfigurationError(
            f"components.{key}.sharing_pattern=null leaves it to the object, but {type(stateful).__name__} has no attribute sharing_pattern"
        )
    settings = {name: node[name] for name in COMPONENT_KEYS if name != "sharing_pattern"}
    return StateComponent(key, stateful, pattern, **settings)


def _scramble(tensor: torch.Tensor) -> None:
    tensor = local_tensor(tensor)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    else:
        tensor.logical_not_()
