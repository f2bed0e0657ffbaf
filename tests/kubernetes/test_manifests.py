"""The manifests of examples/kubernetes are valid for the published schemas. A field that a schema lacks is an error."""

import copy
import json
from pathlib import Path

import pytest

yaml, jsonschema = pytest.importorskip("yaml"), pytest.importorskip("jsonschema")
EXAMPLES = Path(__file__).parents[2] / "examples/kubernetes"
DEFINITIONS = [json.loads(path.read_text()) for path in (Path(__file__).parent / "schemas").glob("*.json")]
MANIFESTS = {
    (path.name, manifest["kind"]): manifest
    for path in EXAMPLES.glob("*.yaml")
    for manifest in yaml.safe_load_all(path.read_text())
}


def strict(schema):
    """Return a schema in which unknown fields are errors, as for `kubectl apply --validate=strict`."""
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) if isinstance(value, dict) else value for key, value in schema.items()}
    if "properties" in schema:
        found["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        found = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return found


def errors(manifest):
    """Return the errors of a manifest."""
    group, version = manifest["apiVersion"].split("/")
    [definition] = [
        each
        for each in DEFINITIONS
        if (each["group"], each["version"], each["kind"]) == (group, version, manifest["kind"])
    ]
    schema = strict(definition["schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    found = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def test_all_kinds_are_there():
    assert set(MANIFESTS) == {
        ("mpijob.yaml", "MPIJob"), ("trainjob.yaml", "TrainJob"), ("trainjob.yaml", "TrainingRuntime")
    }  # fmt: skip


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_valid(name):
    assert errors(MANIFESTS[name]) == []


def test_a_misspelled_field_and_a_wrong_type_are_found():
    wrong = copy.deepcopy(MANIFESTS["mpijob.yaml", "MPIJob"])
    wrong["spec"]["slotPerWorker"] = 2
    wrong["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    wrong["spec"]["runPolicy"]["backoffLimit"] = "two"
    text = "\n".join(sorted(errors(wrong)))
    for words in ("'slotPerWorker' was unexpected", "'volumeMount' was unexpected", "'two' is not of type 'integer'"):
        assert words in text, text


def test_rules_of_the_operators_that_the_schemas_lack():
    """mpi-operator, pkg/apis/kubeflow/validation: two restart policies. Trainer, pkg/runtime/core/trainingruntime.go:
    resourcesPerNode applies to the launcher, unless it is a node."""
    roles = MANIFESTS["mpijob.yaml", "MPIJob"]["spec"]["mpiReplicaSpecs"]
    assert {role["restartPolicy"] for role in roles.values()} <= {"Never", "OnFailure"}
    assert "resourcesPerNode" not in MANIFESTS["trainjob.yaml", "TrainJob"]["spec"]["trainer"]
    runtime = MANIFESTS["trainjob.yaml", "TrainingRuntime"]["spec"]
    assert runtime["mlPolicy"]["mpi"]["runLauncherAsNode"] is False
    for job in runtime["template"]["spec"]["replicatedJobs"]:
        [container] = job["template"]["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"], job["name"]
