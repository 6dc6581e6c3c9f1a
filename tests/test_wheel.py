"""What is shipped: an sdist, the wheel built from it, and that wheel in a fresh environment."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import TINY, running
from packaging import tags

from edgetrain import __version__
from edgetrain.files.toml import to_toml
from edgetrain.fleet import catalog
from edgetrain.jobs import bundles

ROOT = Path(__file__).parents[1]


def run(argv: Sequence[str | Path], cwd: Path) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(argv, cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    argv = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    if importlib.util.find_spec("hatchling"):
        argv.insert(3, "--no-isolation")  # else build fetches it, as pip would
    run(argv, folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment: this wheel, and the dependencies of this interpreter."""
    home = tmp_path_factory.mktemp("venv")
    run([sys.executable, "-m", "venv", "--without-pip", str(home)], home)
    (wheel,) = built.glob("*.whl")
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], home)
    (packages,) = home.glob("lib/python3.*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


@pytest.mark.real
def test_the_sdist_holds_what_a_checkout_does(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    top = {name.split("/")[0] for name in names}
    assert top >= {
        ".ci", ".pre-commit-config.yaml", "ARCHITECTURE.md", "CHANGELOG.md", "CITATION.cff",
        "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md", "benchmarks",
        "devices", "docs", "edgetrain", "examples", "hatch_build.py", "netem", "pyproject.toml",
        "tests",
    }  # fmt: skip
    assert not {name for name in names if name.startswith((".venv", "runs/", "dist/"))}


@pytest.mark.real
def test_the_wheel_has_one_top_level_package_and_the_catalogs(built):
    (path,) = built.glob("*.whl")
    names = zipfile.ZipFile(path).namelist()
    assert {name.split("/")[0] for name in names} == {
        "edgetrain",
        f"edgetrain-{__version__}.dist-info",
    }
    assert "edgetrain/py.typed" in names
    for kind in ("devices", "netem"):
        inside = {Path(n).stem for n in names if n.startswith(f"edgetrain/_catalog/{kind}/")}
        assert inside >= set(catalog.names(kind))


@pytest.mark.real
def test_a_native_wheel_says_the_oldest_glibc_that_it_runs_on(built):
    (path,) = built.glob("*.whl")
    kernels = zipfile.ZipFile(path).read("edgetrain/codecs/kernels/_kernels.so")
    newest = max(map(int, re.findall(rb"\0GLIBC_2\.(\d+)", kernels)))
    tag = f"manylinux_2_{max(17, newest)}_{platform.machine()}"
    assert path.name == f"edgetrain-{__version__}-py3-none-{tag}.whl"
    assert tag in {each.platform for each in tags.sys_tags()}, "pip takes it here"


@pytest.mark.real
def test_the_installed_command_finds_the_catalogs(installed, tmp_path):
    networks = json.loads(run([installed / "edgetrain", "networks", "list", "--json"], tmp_path))
    devices = json.loads(run([installed / "edgetrain", "devices", "list", "--json"], tmp_path))
    assert {network["name"] for network in networks} == set(catalog.names("netem"))
    assert {device["name"] for device in devices} == set(catalog.names("devices"))
    assert __version__ in run([installed / "edgetrain", "--version"], tmp_path)


@pytest.mark.real
def test_what_is_installed_is_the_wheel(installed, tmp_path):
    code = "import edgetrain; print(edgetrain.__file__)"
    where = Path(run([installed / "python", "-I", "-c", code], tmp_path).strip())
    assert installed.parent in where.parents
    for name in ("devices", "netem"):
        code = f"import importlib.util as u; print(u.find_spec('{name}'))"
        assert run([installed / "python", "-I", "-c", code], tmp_path) == "None\n"


@pytest.mark.real
def test_the_installed_command_trains(installed, tmp_path):
    words = ["run", "steps=4", "members=2", "--json"]
    answer = json.loads(run([installed / "edgetrain", *words], tmp_path))
    assert answer["status"] == "finished"
    environment = json.loads((tmp_path / answer["folder"] / "environment.json").read_text())
    assert environment["git"] is None


@pytest.mark.real
def test_members_run_the_code_that_the_folder_of_their_keys_allows(installed, tmp_path):
    """An encrypted hub and two devices, each with a folder of keys, as processes of the wheel."""
    program = (installed / "python", "-I", "-m", "edgetrain")
    ran = tmp_path / "ran"
    mark = f"import sys\nwith open({str(ran)!r}, 'a') as file:\n    print(sys.argv, file=file)\n"
    (tmp_path / "bundled_tiny.py").write_text(mark + TINY)

    def done(*words):
        return run([*program, *words], tmp_path)

    done("bundle", "make", "bundled_tiny.py", "-o", "tiny.bundle")
    (tmp_path / "bundled_tiny.py").unlink()
    digest = bundles.digest_of((tmp_path / "tiny.bundle").read_bytes())
    job = {
        "task": "tiny.bundle#bundled_tiny:Tiny",
        "fleet": {"members": 2},
        "train": {"steps": 20},
        "strategy": {"name": "fedavg", "local_steps": 2},
    }
    (tmp_path / "job.toml").write_text(to_toml(job))
    done("keys", "init", "--keys", "hub")
    tokens = [done("keys", "enroll", f"d{i}", "--keys", "hub").split() for i in range(2)]
    tokens = [next(word for word in words if word.startswith("edgetrain-")) for words in tokens]

    def member(address, index):
        own = ["--keys", f"d{index}", "--index", str(index)]
        words = ("member", "job.toml", "--hub", address, *own)
        return running(*words, cwd=tmp_path, program=program)

    def refused(address, index):
        with member(address, index) as found:
            assert found.finish() == 2, found.said
        assert "is not allowed on this device" in found.said
        assert f"edgetrain bundle allow {digest} --keys d{index}" in found.said
        assert "Traceback" not in found.said

    bind = ("--bind", "tcp://localhost:0", "--keys", "hub")
    with running("hub", "job.toml", *bind, cwd=tmp_path, program=program) as hub:
        address = hub.until("members join").split()[-1]
        for i, token in enumerate(tokens):
            done("keys", "enroll", "--hub", address, "--token", token, "--keys", f"d{i}")
        done("bundle", "allow", "tiny.bundle", "--keys", "hub")  # says nothing of the devices
        done("bundle", "allow", digest, "--keys", "d1")
        refused(address, 0)
        assert not ran.exists(), "it was imported before it was looked up"
        done("bundle", "allow", "tiny.bundle", "--keys", "d0")
        with member(address, 0) as first, member(address, 1) as second:
            assert (first.finish(), second.finish()) == (0, 0), first.said + second.said
        assert hub.finish() == 0, hub.said
    trained = ran.read_text().splitlines()
    assert len(trained) == 2
    assert all("'member'" in line for line in trained), "the hub needs no task"
    done("bundle", "revoke", digest[:8], "--keys", "d0")
    with running("hub", "job.toml", *bind, cwd=tmp_path, program=program) as hub:
        address = hub.until("members join").split()[-1]
        key = hub.until("its public key is")
        (tmp_path / "hub.key").write_text(key.split()[-1])
        with running(
            "member", "job.toml", "--hub", address, "--keys", "d0", "--index", "0",
            "--hub-key", "hub.key", cwd=tmp_path, program=program,
        ) as found:  # fmt: skip
            assert found.finish() == 2
        assert "is not allowed on this device" in found.said
    assert ran.read_text().splitlines() == trained, "nothing of it ran any more"


def build_for(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the wheel with these variables; hatchling says what went wrong on stderr."""
    pytest.importorskip("hatchling")
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CC")}
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    return subprocess.run(
        argv, cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True
    )


CROSS = "aarch64-linux-gnu-gcc"


@pytest.fixture(scope="module")
def arm_library(tmp_path_factory) -> Path:
    """The kernels in a wheel for ARM."""
    if not shutil.which(CROSS):
        pytest.skip("package gcc-aarch64-linux-gnu is missing")
    folder = tmp_path_factory.mktemp("arm")
    done = build_for(folder, EDGETRAIN_TARGET="aarch64")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    assert path.name.endswith("-py3-none-manylinux_2_17_aarch64.whl")
    with zipfile.ZipFile(path) as wheel:
        assert (
            "Tag: py3-none-manylinux_2_17_aarch64"
            in wheel.read(next(n for n in wheel.namelist() if n.endswith("/WHEEL"))).decode()
        )
        return Path(wheel.extract("edgetrain/codecs/kernels/_kernels.so", folder))


LOADER = """\
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) return puts(dlerror()), 1;
    int (*has_neon)(void) = dlsym(library, "kernels_has_neon");
    int (*best)(void) = dlsym(library, "kernels_best"), missing = 0;
    for (int i = 2; i < argc; i++)
        if (!dlsym(library, argv[i])) missing += puts(argv[i]) > 0;
    return printf("neon %d best %d missing %d", has_neon(), best(), missing) < 0;
}
"""


def test_the_kernels_of_a_wheel_for_arm_load_there_with_all_their_functions(arm_library, tmp_path):
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not emulator:
        pytest.skip("package qemu-user-static is missing")
    (tmp_path / "load.c").write_text(LOADER)
    run([CROSS, "-o", tmp_path / "load", tmp_path / "load.c", "-ldl"], tmp_path)
    # Those that have types in native.py: what it asks of a library when it loads one.
    text = (ROOT / "edgetrain/codecs/kernels/native.py").read_text("utf-8")
    names = re.findall(r'^    "(\w+)": \[', text, re.M)
    assert len(names) > 30
    words = [emulator, "-L", "/usr/aarch64-linux-gnu", tmp_path / "load", arm_library, *names]
    assert run(words, tmp_path) == "neon 1 best 1 missing 0"
    words[-1] = "no_such_function"
    assert run(words, tmp_path).endswith("missing 1")


def test_a_wheel_for_arm_has_a_library_for_arm_that_old_systems_can_load(arm_library, tmp_path):
    library = arm_library
    assert library.read_bytes()[18:20] == b"\xb7\x00"
    if not shutil.which("aarch64-linux-gnu-objdump"):
        pytest.skip("package binutils-aarch64-linux-gnu is missing")
    said = run(["aarch64-linux-gnu-objdump", "-T", library], tmp_path)
    asked = {tuple(int(n) for n in v.split(".")) for v in re.findall(r"GLIBC_([\d.]+)", said)}
    assert asked
    assert max(asked) <= (2, 17), said


@pytest.mark.skipif(not shutil.which(CROSS), reason="package gcc-aarch64-linux-gnu is missing")
def test_a_library_of_another_machine_is_never_put_into_a_wheel(tmp_path):
    for environment, said in (
        ({"CC": CROSS}, "made a library for aarch64, and the wheel is for"),
        ({"CC": "cc", "EDGETRAIN_TARGET": "aarch64"}, "and the wheel is for aarch64"),
        ({"EDGETRAIN_TARGET": "riscv"}, "EDGETRAIN_TARGET=riscv: known are aarch64, x86_64"),
    ):
        done = build_for(tmp_path, **environment)
        assert done.returncode != 0
        assert said in done.stderr + done.stdout
    assert not list(tmp_path.glob("*.whl"))
