"""Builds the frontend image on a Debian base, and runs it as a container runtime would.

There is no daemon: mmdebstrap makes the base, buildah builds with chroot isolation, and `Container`
is a chroot in a mount namespace of its own: read-only root, a fresh /tmp, the image's user and
environment. It shares the network of the machine.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SUITE = "bookworm"  # its Python is the one that the lock files were made with
BASE = "tidemill-test-base"
IMAGE = "tidemill-test-frontend"
CERTIFICATES = "/etc/ssl/certs"
STEP_S = 400  # for any one command; together they take about two minutes

ENTER = """
set -e
mount --bind "$0" "$0"
mount -o remount,bind,ro "$0"
mount -t tmpfs tmpfs "$0/tmp"
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
exec chroot --userspec="$1" "$0" "${@:2}"
"""


def missing() -> str:
    """Why no image can be built here; empty when it can."""
    lacking = [name for name in ("mmdebstrap", "buildah") if shutil.which(name) is None]
    if lacking:
        return f"needs {' and '.join(lacking)} (apt-get install)"
    return "" if os.geteuid() == 0 else "needs root, for chroot and mounts"


def command(*words: object, folder: Path | None = None) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=STEP_S,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


class Built:
    """The image, and its files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buildah = ("buildah", f"--root={folder}/root", f"--runroot={folder}/run")
        self._base()
        self._frontend()
        self.config: dict[str, Any] = json.loads(self.buildah("inspect", "--type=image", IMAGE))
        container = self.buildah("from", IMAGE).strip()
        self.files = Path(self.buildah("mount", container).strip())

    def buildah(self, *words: object) -> str:
        return command(*self._buildah, *words, folder=ROOT)

    def _base(self) -> None:
        container = self.buildah("from", "scratch").strip()
        place = self.buildah("mount", container).strip()
        wanted = "--include=python3,python3-venv,ca-certificates"
        again = '--aptopt=Acquire::Retries "9"'  # a mirror may stumble
        # The disk need not survive, and half of all files are read by nobody.
        quick = ["--dpkgopt=force-unsafe-io"]
        quick += [
            f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")
        ]
        how = ("--quiet", "--variant=minbase", wanted, again, *quick)
        command("mmdebstrap", *how, SUITE, place)
        self.buildah("umount", container)
        self.buildah("commit", "--quiet", container, BASE)

    def _frontend(self) -> None:
        settings, volumes = _index_of_this_machine()
        conf = self._folder / "pip.conf"
        conf.write_text(settings)
        how = ("--format=docker", "--isolation=chroot", f"--build-arg=BASE_IMAGE=localhost/{BASE}")
        how += (f"--secret=id=pip,src={conf}", *volumes, "--quiet")
        self.buildah("bud", *how, "-f", "docker/frontend.Dockerfile", "-t", IMAGE, ".")

    @property
    def settings(self) -> dict[str, Any]:
        """User, Env, Healthcheck and the like."""
        found: dict[str, Any] = self.config["Docker"]["config"]
        return found

    @contextmanager
    def container(self, *words: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
        """A process in the image; what it says comes through its pipe."""
        own = dict(pair.split("=", 1) for pair in self.settings["Env"])
        enter = ("unshare", "--mount", "--propagation=private", "bash", "-c", ENTER)
        process = subprocess.Popen(
            [*enter, str(self.files), self.settings["User"], *words],
            env={"PATH": os.environ["PATH"]} | own | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def run(self, *words: str, **environ: str) -> tuple[int, str]:
        """Status and output of a command in a container of its own."""
        with self.container(*words, **environ) as process:
            out, _ = process.communicate(timeout=STEP_S)
            return process.returncode, out


def _index_of_this_machine() -> tuple[str, list[str]]:
    """A pip.conf with what pip here is told, and the local folders that it names, as volumes."""
    told = command(sys.executable, "-m", "pip", "config", "list")
    lines, volumes = ["[global]"], [f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"]
    settings = {"retries": "9", "timeout": "60"}
    for line in told.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    for name, value in settings.items():
        lines.append(f"{name} = {' '.join(value.split())}")
        for scheme, path in re.findall(r"(?:^|\s|(file://))(/\S+)", value):
            # The pages of an index link to files beside its folder.
            source = Path(path).parent if scheme else Path(path)
            if source.exists() and not path.startswith(CERTIFICATES):
                volumes.append(f"--volume={source}:{source}:ro")
    return "\n".join(lines) + "\n", volumes
