"""Bring docker-compose.yml up for real: first completion, reward, update, reload, and down again with nothing left.

    cd tests && python -m compose.check [--install] [--directory DIR]

The file is brought up twice, each time from an empty state: with nothing filled in, on the model of the image, and
with MODEL_DIR. With a Docker engine it runs on the images that it names; without one, on podman and on
stand-ins that are built here. The check prints the mean reward, the versions before and after, and the state of each
container; the exit status is 0 only if everything held.
"""

import argparse
import os
import socket
import sys
from pathlib import Path

from compose import compose_file, containers, stand_ins
from compose.containers import ContainerEngine, Docker, Podman
from compose.deadline import CheckError
from compose.play import Played, Proxy, play

DIRECTORY = Path.home() / ".cache" / "turnwise-compose-check"
TRAIN_CONFIG = Path(__file__).parent / "train.toml"
PROFILE = "cpu"
OUR_IMAGE = "localhost/turnwise-check"
BUILD_SECONDS = 1800.0
BUILD_MODEL = """
import pathlib, shutil
from turnwise.default_models.small_model import build_small_model
shutil.copytree(build_small_model(pathlib.Path("/tmp/model")), "/models/policy", dirs_exist_ok=True)
"""
ADMIN_KEY_FILE = "/operator/admin-key"


def main() -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="apt-get install what podman needs; as root")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="images, model and settings [%(default)s]")
    arguments = parser.parse_args()
    directory: Path = arguments.directory.resolve()
    (directory / "model").mkdir(parents=True, exist_ok=True)
    for model in (None, directory / "model"):
        print("with nothing filled in" if model is None else f"with MODEL_DIR={model}", flush=True)
        try:
            engine = _prepared_engine(directory, model, install=arguments.install)
        except CheckError as failure:
            print(f"compose-check: {failure}", file=sys.stderr)
            return 1
        if _checked(engine):
            return 1
    return 0


def _prepared_engine(directory: Path, model: Path | None, *, install: bool) -> ContainerEngine:
    """Return Docker or podman with images and the file's variables in place; without a model nothing names one."""
    variables = {
        "COMPOSE_PROFILES": PROFILE,
        **({} if model is None else {"MODEL_DIR": str(model)}),
        "TRAIN_CONFIG": str(TRAIN_CONFIG),
        "PROXY_PORT": str(_free_port()),
        "TURNWISE_IMAGE": OUR_IMAGE,
    }
    services = compose_file.services(PROFILE, variables)
    environment_file = directory / "check.env"
    environment_file.touch(mode=0o600)
    if Docker.answers():
        _write(environment_file, variables)
        engine: ContainerEngine = Docker(services, environment_file)
        engine.compose("build", "migrate", seconds=BUILD_SECONDS)
    else:
        _check_podman_can_run(install=install)
        podman = Podman(services, environment_file, directory)
        _write(environment_file, variables | stand_ins.build_images(podman, directory, OUR_IMAGE))
        engine = podman
    if model is not None:
        _build_model(engine, model)
    return engine


def _check_podman_can_run(*, install: bool) -> None:
    missing = Podman.missing_packages()
    if missing and install and os.geteuid() == 0:
        containers.install(missing)
        missing = Podman.missing_packages()
    if missing:
        raise CheckError(
            "no Docker engine with compose answers, and what podman needs is not all there. Start Docker, or as root: "
            f"apt-get install --no-install-recommends {' '.join(missing)} (make compose-check INSTALL=1 does it)"
        )
    if os.geteuid() != 0:
        raise CheckError("no Docker engine with compose answers, and building base images for podman needs root")


def _build_model(engine: ContainerEngine, model: Path) -> None:
    """Build the small model with Turnwise's image, so that this script needs no torch; keep an existing one."""
    owner = f"{os.getuid()}:{os.getgid()}"
    options = [
        "--rm",
        "--user",
        owner,
        "--env",
        "HOME=/tmp",
        "--volume",
        f"{model}:/models/policy",
        "--entrypoint",
        "python3",
    ]
    if not (model / "config.json").exists():
        engine.run("run", *options, OUR_IMAGE, "-c", BUILD_MODEL, seconds=BUILD_SECONDS)
    for path in (model, *model.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _checked(engine: ContainerEngine) -> int:
    """Bring the stack up, play, and always take it down; return the exit status."""
    try:
        _clear(engine)
        played = _play(engine)
        states = {service: str(engine.state(service)) for service in engine.services}
        engine.down()
        volumes = _volumes_alone_are_left(engine)
    except CheckError as failure:
        _explain(engine, failure)
        return 1
    finally:
        _clear(engine)
    print(f"down again, left over: {', '.join(volumes)}; removed now")
    print(f"mean reward {played.mean_reward:.3f} over {len(played.rewards)} sessions")
    print(f"policy version {played.version_before} before, {played.version_after} after")
    for service, state in states.items():
        print(f"{service}: {state}")
    return 0


def _clear(engine: ContainerEngine) -> None:
    engine.down()
    engine.remove_volumes()


def _play(engine: ContainerEngine) -> Played:
    engine.start(list(engine.services))
    print("all services are up", flush=True)
    key = engine.read_file("migrate", ADMIN_KEY_FILE)
    if key not in engine.log("migrate"):
        raise CheckError("the first admin key is not in the log of migrate", "migrate")
    return play(Proxy(f"http://127.0.0.1:{engine.published_port()}", key), engine.check_running)


def _volumes_alone_are_left(engine: ContainerEngine) -> list[str]:
    leftovers = engine.leftovers()
    volumes = leftovers.pop("volumes")
    if any(leftovers.values()):
        raise CheckError(f"`down` left {leftovers} behind")
    wanted = sorted(f"{containers.PROJECT}_{name}" for name in compose_file.volumes())
    if not set(wanted) - {f"{containers.PROJECT}_demo-model"} <= set(volumes) <= set(wanted):
        raise CheckError(f"`down` was to leave the volumes {wanted}, there are {sorted(volumes)}")
    return sorted(volumes)


def _explain(engine: ContainerEngine, failure: CheckError) -> None:
    """Print the failure, the states of the containers, and the log of the failed one."""
    for service in engine.services:
        print(f"{service}: {engine.state(service) or 'not made'}", file=sys.stderr)
    if failure.service is not None:
        print(f"the end of the log of {failure.service}:\n{engine.log(failure.service)}", file=sys.stderr)
    print(f"compose-check: {failure}", file=sys.stderr)


def _write(file: Path, variables: dict[str, str]) -> None:
    file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()), encoding="utf-8")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main())
