"""Build base images where none can be pulled, and Turnwise's image on top, with podman.

A stand-in replaces an image through the compose file's own variable, under a name that identifies it as one, so the
file runs unchanged and a stand-in is not mistaken for the image. Its tag is a digest of its recipe: an unchanged recipe
is not built again.
"""

import ast
import hashlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from compose.compose_file import ROOT
from compose.containers import Podman
from compose.deadline import CheckError

RECIPES = Path(__file__).with_name("recipes")
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
RELEASE = "bookworm"
"""The Debian whose Python is 3.11."""
BUILD_SECONDS = 1800.0
PREFIX = "localhost/turnwise-stand-in"


def build_images(podman: Podman, directory: Path, ours: str) -> dict[str, str]:
    """Build missing images, and Turnwise's image as `ours`; return the compose file's variables for the others."""
    _remove_aborted_builds(podman)
    python = _python(podman, directory)
    images = {
        "PYTHON_IMAGE": python,
        "POSTGRES_IMAGE": _stand_in(podman, directory, "postgres", python),
        "VLLM_CPU_IMAGE": _stand_in(podman, directory, "engine", python),
    }
    # The first stage is named, so that pruning keeps its layers and the next build starts from them.
    argument = f"PYTHON_IMAGE={python}"
    _build(podman, directory, f"{ours}-build", ROOT / "Dockerfile", ROOT, argument, "--target", "build")
    _build(podman, directory, ours, ROOT / "Dockerfile", ROOT, argument)
    podman.run("image", "prune", "--force", seconds=BUILD_SECONDS)
    print(f"the images stay in {directory} for the next check; removing it gives back 7 GB", flush=True)
    return images


def _remove_aborted_builds(podman: Podman) -> None:
    """Remove the files of interrupted builds: gigabytes, in a storage that only this check uses."""
    listed = podman.run("ps", "--all", "--external", "--format", "{{.ID}} {{.Status}}")
    for line in listed.splitlines():
        container, _, status = line.partition(" ")
        if status.startswith("Storage"):
            podman.run("rm", "--force", container)


def _python(podman: Podman, directory: Path) -> str:
    """Build the base of the other images: a minimal Debian with Python, from its packages."""
    name = f"{PREFIX}/python:{_digest(PACKAGES.encode(), RELEASE.encode())}"
    if _exists(podman, name):
        return name
    with _Timed(name):
        root = directory / "debian"
        shutil.rmtree(root, ignore_errors=True)
        _run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", RELEASE, str(root)])
        archive = directory / "debian.tar"
        _run(["tar", "--directory", str(root), "--create", "--file", str(archive), "."])
        podman.run("import", str(archive), name, seconds=BUILD_SECONDS)
        archive.unlink()
        shutil.rmtree(root)
    return name


def _stand_in(podman: Podman, directory: Path, recipe: str, base: str) -> str:
    files = sorted(RECIPES.glob(f"{recipe}*"))
    name = f"{PREFIX}/{recipe}:{_digest(base.encode(), *(file.read_bytes() for file in files))}"
    if not _exists(podman, name):
        _build(podman, directory, name, RECIPES / f"{recipe}.Containerfile", RECIPES, f"BASE={base}")
    return name


def _build(podman: Podman, directory: Path, name: str, recipe: Path, context: Path, argument: str, *more: str) -> None:
    with _Timed(name):
        podman.run(
            *("build", "--isolation", "chroot", "--network", "host", "--build-arg", argument),
            *more,
            *_host_pip_mounts(directory),
            *("--tag", name, "--file", str(recipe), str(context)),
            seconds=BUILD_SECONDS,
        )


def _host_pip_mounts(directory: Path) -> Iterator[str]:
    """Give pip in a build the settings of pip on this machine, and the files that they name.

    They are mounted, not copied, so that neither a private index nor credentials in its address get into an image.
    """
    listed = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, timeout=60, check=True).stdout
    settings = dict(_setting(line) for line in listed.splitlines() if "=" in line)
    file = directory / "pip.conf"
    file.touch(mode=0o600)
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()), encoding="utf-8")
    mounts = {str(file): "/etc/pip.conf"}
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # The files of an index are under its own address.
            shared = str(path.parent if path.name == "simple" else path)
            mounts[shared] = shared
    for source, target in mounts.items():
        yield from ("--volume", f"{source}:{target}:ro")


def _setting(line: str) -> tuple[str, str]:
    """Parse `section.name='value'`; settings of the environment take precedence over a file's."""
    name, _, value = line.partition("=")
    return name.rpartition(".")[2], str(ast.literal_eval(value))


def _exists(podman: Podman, name: str) -> bool:
    return bool(podman.run("images", "--quiet", name).strip())


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    if done.returncode != 0:
        raise CheckError(f"{command[0]} failed ({done.returncode}): {(done.stderr or done.stdout)[-2000:]}")


class _Timed:
    """Prints the name and the duration of a build; a first build takes minutes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._started = time.monotonic()
        print(f"building {self._name}", flush=True)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            print(f"built {self._name} in {time.monotonic() - self._started:.0f} s", flush=True)
