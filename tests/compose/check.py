"""Brings docker-compose.yml up for real: first completion, reward, update, reload, and down again with nothing left.

    cd tests && python -m compose.check [--install] [--directory DIR]

One decision: with a Docker engine the file runs on the images that it names; without one, on podman and on stand-ins
that are built here, because a compose file that nothing runs is broken. It ends with the mean reward, the versions
before and after, and the state of each container; the exit status is 0 only if all of it held.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
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
from pathlib import Path
from turnwise.demo.small_model import build_small_model
build_small_model(Path("/build/model"))
"""


def main() -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="apt-get install what podman needs; as root")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="images, model and settings [%(default)s]")
    arguments = parser.parse_args()
    directory: Path = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        engine = _prepared_engine(directory, install=arguments.install)
    except CheckError as failure:
        print(f"compose-check: {failure}", file=sys.stderr)
        return 1
    return _checked(engine)


def _prepared_engine(directory: Path, *, install: bool) -> ContainerEngine:
    """Return Docker or podman with images, a model and the file's variables in place."""
    variables = {
        "COMPOSE_PROFILES": PROFILE,
        "POSTGRES_PASSWORD": secrets.token_hex(16),
        "MODEL_DIR": str(directory / "model"),
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
    _build_model(engine, directory)
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


def _build_model(engine: ContainerEngine, directory: Path) -> None:
    """Make the small model with our own image, so that this script needs no torch; nothing if it stands already."""
    owner = f"{os.getuid()}:{os.getgid()}"
    options = [
        "--rm",
        "--user",
        owner,
        "--env",
        "HOME=/tmp",
        "--volume",
        f"{directory}:/build",
        "--entrypoint",
        "python3",
    ]
    engine.run("run", *options, OUR_IMAGE, "-c", BUILD_MODEL, seconds=BUILD_SECONDS)
    model = directory / "model"
    for path in (model, *model.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _checked(engine: ContainerEngine) -> int:
    """Bring the stack up, play, take it down whatever happened; return the exit status."""
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
    """Remove what this or an earlier check made, volumes included."""
    engine.down()
    engine.remove_volumes()


def _play(engine: ContainerEngine) -> Played:
    """Start the services, play, and return what came of it."""
    names = list(engine.services)
    tables = names[: names.index("migrate") + 1]
    engine.start(tables)
    engine.wait_for("migrate", "service_completed_successfully")
    made = json.loads(engine.run_once("migrate", "keys", "create", "--role", "admin", "--name", "check", "--json"))
    engine.start(names[len(tables) :])
    print("all services are up", flush=True)
    return play(Proxy(f"http://127.0.0.1:{engine.published_port()}", made["key"]), engine.check_running)


def _volumes_alone_are_left(engine: ContainerEngine) -> list[str]:
    leftovers = engine.leftovers()
    volumes = leftovers.pop("volumes")
    if any(leftovers.values()):
        raise CheckError(f"`down` left {leftovers} behind")
    wanted = sorted(f"{containers.PROJECT}_{name}" for name in ("database", "policies"))
    if sorted(volumes) != wanted:
        raise CheckError(f"`down` was to leave the volumes {wanted}, there are {sorted(volumes)}")
    return wanted


def _explain(engine: ContainerEngine, failure: CheckError) -> None:
    """Say what failed, in which state the containers are, and what the one in question had to say."""
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
