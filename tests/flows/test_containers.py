"""Docker and Kubernetes work pools, as a Prefect server and `prefect deploy` take their files; the compose file."""

import asyncio
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import prefect.settings
import pytest
import yaml
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


def compose() -> dict[str, Any]:
    """The compose file, with the values that deployments/compose.env gives its variables, a password beside them."""
    pairs = (line.split("=", 1) for line in COMPOSE_ENV.splitlines() if "=" in line)
    given = dict(pairs) | {"POSTGRES_PASSWORD": "secret"}

    def value(match: re.Match[str]) -> str:
        return given[match[1]]  # each variable is in compose.env

    text = (DEPLOYMENTS / "docker-compose.yaml").read_text()
    made: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{(\w+)[^}]*\}", value, text))
    return made


COMPOSE_ENV = (DEPLOYMENTS / "compose.env").read_text()


def test_the_services_of_compose_find_each_other() -> None:
    services = compose()["services"]

    assert {one["image"] for one in services.values()} == {"postgres:16", "outrider:latest"}
    assert (
        "docker build --file deployments/Dockerfile --tag outrider ."
        in (DEPLOYMENTS / "docker-compose.yaml").read_text()
    )
    server, database = services["server"]["environment"], services["database"]["environment"]
    user, name = database["POSTGRES_USER"], database["POSTGRES_DB"]
    assert server["PREFECT_API_DATABASE_CONNECTION_URL"] == (
        f"postgresql+asyncpg://{user}:{database['POSTGRES_PASSWORD']}@database:5432/{name}"
    )
    assert "--host 0.0.0.0 --port 4200" in services["server"]["command"]
    assert services["server"]["ports"] == ["127.0.0.1:4200:4200"]
    for service in ("server", "deploy", "worker"):
        environment = services[service]["environment"]
        assert environment["PREFECT_API_URL"] == "http://server:4200/api"
        for needed, how in services[service]["depends_on"].items():
            healthy = how["condition"] == "service_healthy"
            assert healthy == ("healthcheck" in services[needed])


def test_compose_sets_only_what_prefect_and_outrider_read() -> None:
    ours = "".join(
        path.read_text() for name in ("flows", "tasks") for path in (ROOT / name).rglob("*.py")
    )
    for service in ("server", "deploy", "worker"):
        for name in compose()["services"][service]["environment"]:
            assert hasattr(prefect.settings, name) or name in ours, name
    assert not hasattr(prefect.settings, "PREFECT_NO_SUCH")  # it does look


def test_compose_keeps_what_has_to_stay_in_volumes_and_starts_what_make_up_starts() -> None:
    made = compose()
    services = made["services"]
    mounts = {
        name: dict(reversed(one.split(":")[:2]) for one in service.get("volumes", []))
        for name, service in services.items()
    }
    named = {source for found in mounts.values() for source in found.values() if "/" not in source}

    assert named == set(made["volumes"])
    assert mounts["database"]["/var/lib/postgresql/data"] == "database"
    assert mounts["server"][services["server"]["environment"]["PREFECT_HOME"]] == "prefect"
    assert mounts["worker"][services["worker"]["environment"]["OUTRIDER_CACHE"]] == "cache"
    assert mounts["worker"]["/store"] == "./runs"
    pool = {one["work_pool"]["name"] for one in deployments()}
    assert services["worker"]["command"] == f"prefect worker start --pool {pool.pop()}"
    assert services["deploy"]["command"] == "python -m flows.operate deploy"
    assert "prefect.yaml" in dockerfile()  # which that reads


def deployments() -> list[dict[str, Any]]:
    return list(yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"])


def dockerfile() -> str:
    return (DEPLOYMENTS / "Dockerfile").read_text()
