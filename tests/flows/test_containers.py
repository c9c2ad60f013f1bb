"""The files for Docker and Kubernetes work pools, as a Prefect server and `prefect deploy` take them."""

import asyncio
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.base import BaseJobConfiguration

from tests.tiny_runs import ROOT, environment

DEPLOYMENTS = ROOT / "deployments"
KINDS = ("docker", "kubernetes")


class Configuration(BaseJobConfiguration):
    """A worker's, with the fields of every kind of worker."""

    image: str | None = None
    job_manifest: dict[str, Any] | None = None
    volumes: list[str] | None = None
    container_create_kwargs: dict[str, Any] | None = None


def template_of(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOYMENTS / f"{kind}-pool.json").read_text())
    return found


def configured(kind: str, api: str, values: dict[str, Any]) -> Configuration:
    """What a worker makes of the template and the variables of a deployment."""

    async def make() -> Configuration:
        async with get_client() as client:
            return await Configuration.from_template_and_values(
                template_of(kind), values, client=client
            )

    with temporary_settings(updates={PREFECT_API_URL: api}):
        return asyncio.run(make())


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_takes_the_template_of_the_work_pool(kind: str, prefect_api: str) -> None:
    pool = {"name": f"pool-{kind}", "type": kind, "base_job_template": template_of(kind)}
    made = httpx.post(f"{prefect_api}/work_pools/", json=pool, timeout=30)
    assert made.status_code == 201, made.text

    broken = template_of(kind)
    broken["job_configuration"]["image"] = "{{ no_such_variable }}"
    refused = httpx.post(
        f"{prefect_api}/work_pools/",
        json={**pool, "name": f"broken-{kind}", "base_job_template": broken},
        timeout=30,
    )
    assert refused.status_code == 422  # it does look at it


def test_a_container_gets_image_gpus_and_credentials_of_its_host(prefect_api: str) -> None:
    made = configured("docker", prefect_api, {"image": "registry/outrider:1"})

    assert made.image == "registry/outrider:1"
    assert made.volumes == ["outrider-cache:/cache", "/etc/outrider/aws:/root/.aws:ro"]
    assert made.container_create_kwargs is not None
    (request,) = made.container_create_kwargs["device_requests"]
    assert request == {"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}


def test_a_pod_gets_image_gpus_and_the_secret_with_credentials(prefect_api: str) -> None:
    made = configured("kubernetes", prefect_api, {"image": "registry/outrider:1", "gpus": 4})

    assert made.job_manifest is not None
    (container,) = made.job_manifest["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry/outrider:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["envFrom"] == [
        {"secretRef": {"name": "outrider-credentials", "optional": True}}
    ]


def test_the_deployment_for_containers_runs_where_the_image_has_the_code(
    prefect_api: str, tmp_path: Path
) -> None:
    env = environment(tmp_path, PREFECT_API_URL=prefect_api)
    template = str(DEPLOYMENTS / "docker-pool.json")
    for command in (
        [
            "work-pool",
            "create",
            "outrider-gpu",
            "--type",
            "docker",
            "--base-job-template",
            template,
        ],
        ["--no-prompt", "deploy", "--prefect-file", "deployments/containers.yaml", "--all"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *command],
            cwd=ROOT, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    found = httpx.get(f"{prefect_api}/deployments/name/capture-states/capture-states", timeout=30)
    deployment = found.raise_for_status().json()
    workdir = re.search(r"^WORKDIR (\S+)$", dockerfile(), re.MULTILINE)
    assert workdir is not None
    assert deployment["work_pool_name"] == "outrider-gpu"
    assert deployment["pull_steps"] == [
        {"prefect.deployments.steps.set_working_directory": {"directory": workdir[1]}}
    ]


def test_the_image_holds_every_package_and_no_more_of_the_repository() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", dockerfile(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]

    assert {package.split(".")[0] for package in packages} < set(names)
    assert all((ROOT / name).exists() for name in names)


def dockerfile() -> str:
    return (DEPLOYMENTS / "Dockerfile").read_text()
