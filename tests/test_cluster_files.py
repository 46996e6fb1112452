"""Files for batch systems that are not here: they have the form that those want, and their commands are Shoal's."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.documented_commands import wrong

FILES = Path(__file__).parents[1] / "examples" / "clusters"


def pods() -> dict[str, Any]:
    return {part["kind"]: part for part in yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())}


def slurm_commands() -> list[str]:
    lines = (FILES / "slurm.sbatch").read_text().splitlines()
    return [line for line in lines if line.startswith("srun ")]


def test_kubernetes_finds_pods_by_the_names_that_torchrun_is_told() -> None:
    service, job = pods()["Service"], pods()["Job"]
    assert (service["apiVersion"], job["apiVersion"]) == ("v1", "batch/v1")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["restartPolicy"] in ("OnFailure", "Never")
    (container,) = pod["containers"]
    command = container["command"]
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{pod['subdomain']}:29400" in command
    assert f"--nnodes=1:{spec['parallelism']}" in command
    assert all(isinstance(word, str) for word in command)
    names = {variable["name"] for variable in container["env"]}
    assert "--local-addr=$(POD_IP)" in command
    assert names == {"POD_IP", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    written = next(word.removeprefix("--out=") for word in command if word.startswith("--out="))
    assert any(written.startswith(path) for path in mounts.values()), "on the disk that all pods see"


def test_skypilot_has_what_it_needs() -> None:
    task = yaml.safe_load((FILES / "skypilot.yaml").read_text())
    assert task.keys() == {"name", "num_nodes", "resources", "file_mounts", "setup", "run"}
    assert "$SKYPILOT_NODE_RANK" in task["run"]
    assert any(f"--out {path}/" in task["run"] for path in task["file_mounts"])


@pytest.mark.parametrize("engine", ["slurm", "kubernetes", "skypilot"])
def test_commands_are_shoals(engine: str) -> None:
    match engine:
        case "slurm":
            commands = slurm_commands()
        case "kubernetes":
            commands = [" ".join(pods()["Job"]["spec"]["template"]["spec"]["containers"][0]["command"])]
        case _:
            commands = [yaml.safe_load((FILES / "skypilot.yaml").read_text())["run"]]
    assert len(commands) == 1
    assert " train " in commands[0]
    assert wrong(commands[0]) is None
    assert wrong(f"{commands[0]} --chekpoint-every 3") is not None, "this check can fail"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_slurms_file_is_a_script_whose_options_come_first() -> None:
    file = FILES / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", file], check=False).returncode == 0
    lines = [line for line in file.read_text().splitlines() if line]
    assert lines[0] == "#!/bin/bash"
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert lines[1 : 1 + len(options)] == options, "Slurm reads none after the first command"
    assert {"--requeue", "--signal=USR1@120"} <= {option.split()[1] for option in options}
