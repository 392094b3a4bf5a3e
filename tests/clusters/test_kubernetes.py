"""The manifests of `examples/k8s/`: their fields are those of the published schemas, and what they run is a command of ours. No cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conf.configs import composed

MANIFESTS = sorted((Path(__file__).parents[2] / "examples" / "k8s").glob("*.yaml"))


def _inside(value: Any) -> Iterator[dict[str, Any]]:
    """All mappings of a document."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
        yield from _inside(one)


def _pods(manifest: Path) -> list[dict[str, Any]]:
    return [one for one in _inside(yaml.safe_load(manifest.read_text())) if "containers" in one]


def test_there_is_a_manifest_for_each() -> None:
    assert [one.stem for one in MANIFESTS] == ["jobset", "pytorchjob"]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: one.stem)
def test_a_pod_runs_a_recipe_that_is_done_before_it_is_killed(manifest: Path, tmp_path: Path) -> None:
    for pod in _pods(manifest):
        (container,) = pod["containers"]
        launcher, _, overrides = " ".join([*container["command"], *container["args"]]).partition(" -m recipes.train ")
        cfg = composed(tmp_path, *overrides.split())
        assert cfg.resume == "latest" and cfg.checkpoint_root.startswith("s3://")
        wait_s = [int(one.partition("=")[2]) for one in launcher.split() if one.startswith("--shutdown-timeout=")]
        in_turn = [cfg.save.grace_s, *wait_s, pod["terminationGracePeriodSeconds"]]
        assert in_turn == sorted(set(in_turn))
        assert bool(wait_s) is launcher.startswith("torchrun"), "torchrun kills its ranks after 30 s unless it is told otherwise"


def test_the_schema_of_jobset_knows_all_fields() -> None:
    api = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the published schema: pip install kubeflow-trainer-api")
    (document,) = (yaml.safe_load(one.read_text()) for one in MANIFESTS if one.stem == "jobset")
    assert json.loads(api.JobsetV1alpha2JobSet.from_dict(document).to_json()) == document
    document["spec"]["replicatedJobs"][0]["template"]["spec"]["parralelism"] = 4
    assert json.loads(api.JobsetV1alpha2JobSet.from_dict(document).to_json()) != document, "a misspelt field is found"


def test_the_schema_of_pytorchjob_knows_all_fields() -> None:
    training = pytest.importorskip("kubeflow.training", reason="needs the published schema: pip install kubeflow-training")
    (document,) = (yaml.safe_load(one.read_text()) for one in MANIFESTS if one.stem == "pytorchjob")
    assert _through(training, document) == document
    document["spec"]["runPolicy"]["backofLimit"] = 4
    assert _through(training, document) != document, "a misspelt field is found"


def _through(training: Any, document: dict[str, Any]) -> Any:
    """What is left of a document whose fields a client of the API reads into its models."""
    client = training.ApiClient()

    class Answer:
        data = json.dumps(document)

    return client.sanitize_for_serialization(client.deserialize(Answer, training.KubeflowOrgV1PyTorchJob))
