"""Errors of a config are raised before any process starts, as one sentence with the next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf.errors import OmegaConfBaseException

from ckpt.errors import CheckpointError, ConfigurationError
from recipes.support import CONF
from recipes.support.config import fits, given_keys, leave_to_targets
from recipes.support.sentences import sentence_of
from tests.conf.configs import config


class Ema:
    """A component of the user's own."""

    def __init__(self, model: object, *, decay: float = 0.99) -> None:
        self.decay = decay

    def state_dict(self) -> dict[str, float]:
        return {"decay": self.decay}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.decay = state["decay"]


class Needy:
    def __init__(self, *, model: object, must: int) -> None: ...


class Listed:
    def __init__(self, model: object, *, names: list[str]) -> None: ...


def complaint(tmp_path: Path, *overrides: str) -> str:
    with pytest.raises((CheckpointError, OmegaConfBaseException)) as raised:
        config(tmp_path, *overrides)
    sentence = sentence_of(raised.value, CONF, "train")
    assert "\n" not in sentence
    return sentence


def test_the_default_config_is_in_order_and_plain(tmp_path: Path) -> None:
    run = config(tmp_path)
    assert type(run) is dict and all(type(run[key]) is dict for key in ("train", "ckpt", "components", "coordinator"))
    assert run["checkpoint_root"] == f"{tmp_path}/checkpoints"
    assert run["coordinator"]["output_dir"] == run["checkpoint_root"]
    assert run["coordinator"]["backend"] == run["ckpt"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=-1", "train.steps=-1: expected at least 1"),
        ("train.seed=-1", "train.seed=-1: expected at least 0"),
        ("train.batch_size=0", "train.batch_size=0: expected at least 1"),
        ("save.every=0", "save.every=0: expected at least 1"),
        ("save.keep_last=0", "save.keep_last=0: expected at least 1"),
        ("save.grace_s=-1", "save.grace_s=-1.0: expected at least 0"),
        ("launch.nproc_per_node=0", "launch.nproc_per_node=0: expected at least 1"),
        ("agree.timeout_s=0", "agree.timeout_s=0.0: expected more than 0 seconds"),
        ("ledger.stale_s=-3", "ledger.stale_s=-3.0: expected more than 0 seconds"),
        ("parallel.dp=0", "parallel.dp=0: expected at least 1, or null"),
    ],
)
def test_a_number_out_of_range_is_named_with_its_range(tmp_path: Path, override: str, expected: str) -> None:
    assert complaint(tmp_path, override) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("launch.least_ranks=0", "launch.least_ranks=0: expected at least 1"),
        ("launch.least_ranks=5", "launch.least_ranks=5: expected at most launch.nproc_per_node=4"),
        ("launch.max_restarts=-1", "launch.max_restarts=-1: expected at least 0"),
        ("checkpoint_root=memory://here", "checkpoint_root=memory://here is in the memory of one process, and this run has 4 ranks"),
    ],
)
def test_what_ranks_of_ray_cannot_do_is_refused(tmp_path: Path, override: str, expected: str) -> None:
    assert complaint(tmp_path, "launch=ray", override).startswith(expected)


def test_the_checkpoint_root_of_a_recipe_is_no_tier(tmp_path: Path) -> None:
    said = complaint(tmp_path, "tiers=memory", "+tiers.root={_target_:ckpt.saving.tiers.remote,url:s3://bucket/run}")
    assert said.startswith("tiers.root is the checkpoint root")


@pytest.mark.parametrize(
    "override",
    [
        "save.when_busy=queue",
        "save.writer_mib_s=5",
        "save.writer_cores=1",
        "save.overlap=true",
    ],
)
def test_a_setting_of_saves_beside_training_is_refused_where_training_waits(tmp_path: Path, override: str) -> None:
    assert complaint(tmp_path, override).startswith(f"{override} has no effect with save.mode=sync")
    assert config(tmp_path, override, "save.mode=async")["save"]["mode"] == "async"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=many", "train.steps=many: expected a whole number"),
        ("train.steps=null", "train.steps=null: expected a whole number"),
        ("overwrite=perhaps", "overwrite=perhaps: expected true or false"),
        ("parallel.exact_resume=perhaps", "parallel.exact_resume=perhaps: expected true or false"),
        ("parallel.dp=some", "parallel.dp=some: expected a whole number"),
        ("model.dropout=much", "model.dropout=much: expected a number"),
        ("components.model.required=7up", "components.model.required=7up: expected true or false"),
        ("components.model=replicated", "components.model=replicated: expected its keys"),
        (
            f"+components.ema={{_target_: {__name__}.Listed, sharing_pattern: replicated, names: one}}",
            "components.ema.names=one: ",
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_named(tmp_path: Path, override: str, expected: str) -> None:
    assert complaint(tmp_path, override).startswith(expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("+train.step=3", "train.step: there is no such key; did you mean train.steps?"),
        ("+foo=3", "foo: there is no such key; --help-all shows the keys there are"),
        (
            "+components.model.pattern=global",
            "components.model.pattern: there is no such key; a component has sharing_pattern, ",
        ),
        (
            "+model.sise=tiny",
            "model.sise: recipes.training.gpt.GPT takes no sise; did you mean size? it takes size, tie_embeddings, dropout",
        ),
        (
            "+parallel.tp=2",
            "parallel.tp: recipes.training.parallel.replicated.DataParallel takes no tp; it takes dp, exact_resume",
        ),
        (
            "+device.index=2",
            "device.index: ckpt.memory.device.Device takes no index; it takes type, collectives, plugin",
        ),
        ("+strategy.group=dp", "strategy.group: ckpt.loading.direct.DirectLoad takes no group; it takes "),
        (
            "+coordinator.vrify=true",
            "coordinator.vrify=true: there is no such setting; did you mean verify?",
        ),
        (
            "~device.collectives",
            "device: ckpt.memory.device.Device needs collectives; give it with device.collectives=<value>",
        ),
        ("~train.steps", "train.steps has no value: give it with train.steps=<value>"),
        ("~model._target_", "model has no _target_"),
        (
            "model._target_=recipes.training.gpt.GTP",
            "model._target_=recipes.training.gpt.GTP: there is no GTP in recipes.training.gpt",
        ),
        ("model._target_=recipes.gtp.GPT", "model._target_=recipes.gtp.GPT: there is no module recipes.gtp"),
        ("+loss={label_smoothing: 0.1}", "loss has no _target_, the class it should make; choose one with loss=<choice>"),
        (
            "+loss={_target_: torch.nn.CrossEntropyLoss, label_smoothin: 0.1}",
            "loss.label_smoothin: torch.nn.CrossEntropyLoss takes no label_smoothin; did you mean label_smoothing? it takes weight",
        ),
        ("+loss={_target_: torch.nn.functional.nll_loss, wieght: 1}", "loss.wieght: torch.nn.functional.nll_loss takes no wieght; did"),
        ("model._target_=GPT", "model._target_=GPT: expected the name of a class or function with its module"),
    ],
)
def test_a_key_too_many_or_too_few_is_named(tmp_path: Path, override: str, expected: str) -> None:
    assert complaint(tmp_path, override).startswith(expected)


def test_keys_of_a_file_are_left_out_where_the_command_line_names_a_target_that_does_not_take_them() -> None:
    file = {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}
    run: dict[str, Any] = {"optimizer": {"_target_": "torch.optim.SGD", **file}, "loss": None}
    leave_to_targets(run, ["optimizer.lr"])
    assert run["optimizer"].keys() == {"_target_", *file}, "a file of the user's: it is refused"
    leave_to_targets(run, ["optimizer._target_", "optimizer.betas", "loss._target_"])
    assert run["optimizer"].keys() == {"_target_", "lr", "betas"}, "a key that was given is refused, too"


def test_a_choice_whose_package_is_not_installed_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wants_a_package.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = complaint(tmp_path, "model._target_=wants_a_package.GPT")
    assert (
        said
        == "model: wants_a_package.GPT needs the package no_such_package, which is not installed: pip install no_such_package"
    )


def test_one_rank_layouts_refuse_several_ranks_and_name_both_ways_out(tmp_path: Path) -> None:
    said = complaint(tmp_path, "parallel=single", "launch.nproc_per_node=2")
    assert said.startswith("parallel=single trains on one rank, but there are 2: choose parallel=ddp")
    assert said.endswith("or launch.nproc_per_node=1")


def test_a_number_of_data_parallel_ranks_that_is_not_there_is_refused(tmp_path: Path) -> None:
    said = complaint(tmp_path, "parallel.dp=3", "launch.nproc_per_node=2")
    assert said.startswith("parallel=ddp lays out 3 ranks (dp 3), but there are 2: give launch.nproc_per_node=3, or ")


def test_a_batch_that_the_ranks_cannot_share_is_refused_with_one_that_they_can(tmp_path: Path) -> None:
    said = complaint(tmp_path, "train.batch_size=10", "launch.nproc_per_node=4")
    assert said == (
        "train.batch_size=10 does not divide into the 4 parts that parallel=ddp makes of a batch on 4 ranks: give a multiple of 4, such as "
        "train.batch_size=12"
    )
    assert config(tmp_path, "launch.nproc_per_node=4")["train"]["batch_size"] == 12


def test_ranks_that_somebody_else_started_count_instead_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="but there are 2"):
        config(tmp_path, "parallel=single", num_ranks=2)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("device=cuda", "device=cuda: torch "),
        ("device=npu", "device=npu: torch_npu is not installed: pip install "),
    ],
)
def test_a_device_that_is_not_here_is_refused(tmp_path: Path, override: str, expected: str) -> None:
    import torch

    if torch.cuda.is_available() and "cuda" in override:
        pytest.skip("there is a CUDA device")
    assert complaint(tmp_path, override).startswith(expected)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["sharing_pattern=per_group"], "components.model.sharing_pattern=per_group needs process_group_name"),
        (
            ["sharing_pattern=per_group", "process_group_name=tp"],
            "components.model.process_group_name=tp: there is no such process group; ",
        ),
        (["sharing_pattern=everywhere"], "components.model.sharing_pattern=everywhere: expected one of global, per_rank, "),
        (
            ["sharing_pattern=null"],
            "components.model.sharing_pattern=null leaves it to the object, but only the dataset",
        ),
        (["process_group_name=dp"], "components.model.process_group_name=dp goes with sharing_pattern=per_group"),
        (["elastic=rubber"], "components.model.elastic=rubber does not apply"),
        (["validation_level=much"], "components.model.validation_level=much: expected one of "),
    ],
)
def test_a_component_that_contradicts_itself_is_refused(tmp_path: Path, overrides: list[str], expected: str) -> None:
    assert complaint(tmp_path, *(f"components.model.{override}" for override in overrides)).startswith(expected)


def test_a_group_that_the_layout_has_can_be_named(tmp_path: Path) -> None:
    overrides = ["components.model.sharing_pattern=per_group", "components.model.process_group_name=dp"]
    assert config(tmp_path, *overrides)["components"]["model"]["process_group_name"] == "dp"
    assert complaint(tmp_path, *overrides, "parallel=single").endswith("the layout chosen with parallel= has none")


def test_a_component_can_be_left_out(tmp_path: Path) -> None:
    assert list(config(tmp_path, "~components.rng")["components"]) == ["model", "optimizer", "scheduler", "dataset"]


def test_a_component_can_be_added_with_its_object(tmp_path: Path) -> None:
    target = f"{__name__}.Ema"
    run = config(tmp_path, f"+components.ema={{_target_: {target}, sharing_pattern: replicated, decay: 0.5}}")
    assert run["components"]["ema"] == {
        "sharing_pattern": "replicated",
        "process_group_name": None,
        "required": True,
        "validate_replication": False,
        "validation_level": None,
        "elastic": None,
        "_target_": target,
        "decay": 0.5,
    }


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("{sharing_pattern: replicated}", "components.ema has no object: the recipe has model, optimizer, "),
        (
            f"{{_target_: {__name__}.Ema, sharing_pattern: replicated, dcay: 1}}",
            f"components.ema.dcay: {__name__}.Ema takes no dcay; did you mean decay? it takes decay",
        ),
        (
            f"{{_target_: {__name__}.Needy, sharing_pattern: replicated}}",
            f"components.ema: {__name__}.Needy needs must; give it with +components.ema.must=",
        ),
        (f"{{_target_: {__name__}.Ema, sharing_pattern: per_group}}", "components.ema.sharing_pattern=per_group needs"),
        ("{_target_: builtins.float, sharing_pattern: global}", "components.ema.model: builtins.float takes no model"),
    ],
)
def test_an_added_component_without_what_it_needs_is_refused(tmp_path: Path, node: str, expected: str) -> None:
    assert complaint(tmp_path, f"+components.ema={node}").startswith(expected)


def test_going_on_and_starting_anew_exclude_each_other(tmp_path: Path) -> None:
    said = complaint(tmp_path, "resume=latest", "overwrite=true")
    assert said == (
        "resume=latest goes on from the newest checkpoint, so overwrite=true has nothing to overwrite: give one of the two"
    )
    older = config(tmp_path, "resume=/runs/checkpoint-3", "overwrite=true")  # sets newer ones aside
    assert older["overwrite"]


def test_a_checkpoint_named_relative_to_here_is_made_absolute(tmp_path: Path) -> None:
    assert config(tmp_path, "resume=somewhere/checkpoint-3")["resume"] == str(Path.cwd() / "somewhere" / "checkpoint-3")


@pytest.mark.parametrize("key", ["output_dir", "run_dir"])
def test_the_address_of_an_object_store_is_refused_where_a_run_writes_its_log(tmp_path: Path, key: str) -> None:
    assert complaint(tmp_path, f"{key}=s3://b/x").startswith(f"{key} is s3://b/x: expected a folder of a mounted")


@pytest.mark.parametrize("key", ["checkpoint_root", "resume"])
def test_checkpoints_may_be_in_an_object_store(tmp_path: Path, key: str) -> None:
    assert config(tmp_path, f"{key}=s3://b/x")[key] == "s3://b/x"
    assert config(tmp_path, f"{key}=file:///a/b")[key] == "/a/b"
    assert complaint(tmp_path, f"{key}=s3a://b/x").startswith(f"{key} is s3a://b/x: expected the path of a folder, or an")


def test_a_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert complaint(tmp_path, "data.path=/no/such/text") == "data.path=/no/such/text: there is no such file or folder"


def test_a_value_is_turned_into_the_type_that_its_target_asks_for(tmp_path: Path) -> None:
    (tmp_path / "7").write_bytes(b"seven")
    run = config(tmp_path, "model.dropout=0", "data.path=7" if Path.cwd() == tmp_path else f"data.path={tmp_path}/7")
    assert run["model"]["dropout"] == 0.0 and type(run["model"]["dropout"]) is float


def test_keys_given_on_a_command_line_are_told_from_choices_and_defaults() -> None:
    words = ["optimizer.lr=0.1", "+optimizer.amsgrad=true", "~components.rng", "ckpt=zarr", "train={seed: 3, steps: 4}"]
    given = given_keys(words)
    assert given == ["optimizer.lr", "optimizer.amsgrad", "components.rng", "ckpt", "train.seed", "train.steps"]


def test_a_run_fits_on_numbers_of_ranks_that_its_layout_and_its_batch_divide_by(tmp_path: Path) -> None:
    """Of these, a launcher that has lost nodes starts the most that it has room for."""
    run = config(tmp_path, "train.batch_size=12")
    assert [num for num in range(1, 9) if fits(run, num)] == [1, 2, 3, 4, 6]
    run = config(tmp_path, "train.batch_size=12", "parallel=ddp_tp", "launch.nproc_per_node=4")
    assert [num for num in range(1, 9) if fits(run, num)] == [2, 4, 6, 8]
    assert fits({"src": "a"}, 5), "what does not train"
