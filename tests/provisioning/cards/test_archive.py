"""Worker archives: the same bytes each time, read back, and refused where they cannot run."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import tarfile
import tomllib
from pathlib import Path

import pytest

from edgetrain.errors import ConfigError
from edgetrain.provisioning.cards import archive, looking, making

ROOT = Path(__file__).parents[3]
MANIFEST = archive.Manifest(
    "raspberry-pi-os-13", "3.13", "aarch64", {"edgetrain": "0.1.0", "torch": "2.9.1"}
)
LOOK = looking.ImageDescription(
    "raspberry-pi-os-13", (3, 13), "aarch64", "cloud-init",
    looking.Partition(1, 0, 0), looking.Partition(2, 0, 0),
)  # fmt: skip


def folder_at(path: Path, stamp: int) -> Path:
    """A folder of packages, made at another time and by another user's umask."""
    (path / "torch/lib").mkdir(parents=True)
    (path / "torch/__init__.py").write_text("version = 1\n")
    (path / "torch/lib/libtorch.so").write_bytes(b"\x7fELF" + bytes(10_000))
    (path / "torch/__pycache__").mkdir()
    (path / "torch/__pycache__/x.pyc").write_bytes(os.urandom(8))
    (path / "torch-2.9.1.dist-info").mkdir()
    (path / "torch-2.9.1.dist-info/METADATA").write_text("Name: torch\n")
    (path / "torch-2.9.1.dist-info/direct_url.json").write_text(f'{{"url": "file://{path}"}}')
    (path / "typing_extensions-4.16.0.dist-info").mkdir()
    (path / "torch/bin").mkdir()
    (path / "torch/bin/torch_shm_manager").write_bytes(b"\x7fELF")
    (path / "bin").mkdir()
    (path / "bin/torchrun").write_text(f"#!{path}/python\n")
    for each in path.rglob("*"):
        os.utime(each, (stamp, stamp))
        each.chmod(0o700 if stamp % 2 else 0o755)
    return path


def test_an_archive_made_twice_has_the_same_bytes(tmp_path):
    first = archive.pack(folder_at(tmp_path / "a", 1), MANIFEST, tmp_path / "a.tar")
    second = archive.pack(folder_at(tmp_path / "b", 10**9 + 1), MANIFEST, tmp_path / "b.tar")
    assert first == second
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    assert archive.check(tmp_path / "a.tar") == first
    assert first.unpacked > 10_000


def test_what_pip_says_of_this_machine_is_left_out(tmp_path):
    archive.pack(folder_at(tmp_path / "a", 1), MANIFEST, tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as outer:
        payload = outer.extractfile("payload.tar.gz")
        with tarfile.open(fileobj=payload) as inner:
            names = inner.getnames()
    assert {"torch/lib/libtorch.so", "torch/bin/torch_shm_manager"} <= set(names)
    assert not [n for n in names if re.search(r"pycache|^bin|direct_url", n)]


def test_versions_are_read_from_what_pip_installed(tmp_path):
    found = archive.installed(folder_at(tmp_path / "a", 1))
    assert found == {"torch": "2.9.1", "typing-extensions": "4.16.0"}


def test_a_link_is_refused(tmp_path):
    folder = folder_at(tmp_path / "a", 1)
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="link is a link"):
        archive.pack(folder, MANIFEST, tmp_path / "a.tar")
    assert not (tmp_path / "a.tar").exists()


def test_a_damaged_archive_and_other_files(tmp_path):
    path = tmp_path / "a.tar"
    archive.pack(folder_at(tmp_path / "a", 1), MANIFEST, path)
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        content[tar.getmember("payload.tar.gz").offset_data + 50] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged"):
        archive.check(path)
    path.write_text("hello")
    with pytest.raises(ConfigError, match=r"is not a worker archive: it is not a tar file$"):
        archive.read_manifest(path)
    with pytest.raises(ConfigError, match="cannot read"):
        archive.read_manifest(tmp_path / "none.tar")
    newer = dataclasses.replace(MANIFEST, version=3)
    archive.pack(folder_at(tmp_path / "b", 1), newer, path)
    with pytest.raises(ConfigError, match=r"version 3, this is 2 \(make it anew"):
        archive.read_manifest(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"python": (3, 11)}, r"for Python 3\.13 on aarch64, and the image has Python 3\.11"),
        ({"machine": "x86_64"}, "the image has Python 3.13 on x86_64"),
        (
            {"release": "debian-13"},
            "is for Raspberry Pi OS 13 .trixie., and the image is Debian 13",
        ),
    ],
)
def test_an_archive_for_another_system_is_refused(change, said):
    archive.check_fits(MANIFEST, LOOK)
    with pytest.raises(ConfigError, match=said):
        archive.check_fits(MANIFEST, dataclasses.replace(LOOK, **change))


# -- which torch where ----------------------------------------------------------------------------


def test_torch_2_10_is_refused_on_a_raspberry_pi_4_and_not_on_a_5():
    table = archive.workers()
    assert table.torch_needs("2.9.1+cpu", "aarch64") == ()
    newer = dataclasses.replace(
        MANIFEST, packages={"torch": "2.10.0"}, needs=table.torch_needs("2.10.0", "aarch64")
    )
    table.check_board(newer, "raspberry-pi-5")
    for board in ("raspberry-pi-4b", "raspberry-pi-3b"):
        table.check_board(MANIFEST, board)
        with pytest.raises(ConfigError, match=r"torch 2\.10\.0 needs lse, .*torch 2\.9\.1\)"):
            table.check_board(newer, board)
    with pytest.raises(ConfigError, match=r"torch 2\.12\.0 was never tried on aarch64"):
        table.torch_needs("2.12.0", "aarch64")
    with pytest.raises(
        ConfigError, match=r"no card can be made for 'raspbery-pi-5' \(did you mean"
    ):
        table.check_board(MANIFEST, "raspbery-pi-5")


def test_every_release_has_a_list_with_hashes_and_a_torch_that_was_tried():
    table = archive.workers()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.match(r"[a-z0-9-]+", line)[0] for line in project["dependencies"]}
    assert wanted >= {"torch", "pyzmq"}
    assert set(table.releases) <= set(looking.RELEASES)
    for release, (_, machine) in table.releases.items():
        text = table.lock(release).read_text()
        pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
        assert pinned.keys() >= wanted
        assert table.torch_needs(pinned["torch"], machine) == ()
        blocks = re.split(r"^(?=[a-z0-9-]+==)", text, flags=re.MULTILINE)[1:]
        assert all("--hash=sha256:" in block for block in blocks)
    with pytest.raises(ConfigError, match=r"no worker for 'raspberry-pi-os-14' \(did you mean"):
        table.lock("raspberry-pi-os-14")


def test_a_damaged_table(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        archive.workers(tmp_path)
    (tmp_path / "workers.toml").write_text("[release]\n")
    with pytest.raises(ConfigError, match="cannot read"):
        archive.workers(tmp_path)


# -- edgetrain's own wheel ------------------------------------------------------------------------


def test_a_wheel_for_another_machine_is_refused(tmp_path):
    for name, said in (
        ("edgetrain-0.1.0-py3-none-any.whl", "has no compiled kernels"),
        ("edgetrain-0.1.0-py3-none-linux_x86_64.whl", "is for linux_x86_64"),
    ):
        (tmp_path / name).write_text("")
        with pytest.raises(ConfigError, match=said):
            making.check_wheel(tmp_path / name, "aarch64")
    good = tmp_path / "edgetrain-0.1.0-py3-none-manylinux_2_17_aarch64.whl"
    with pytest.raises(ConfigError, match="no wheel"):
        making.check_wheel(good, "aarch64")
    good.write_text("")
    making.check_wheel(good, "aarch64")


def test_an_installed_edgetrain_says_where_a_wheel_comes_from(tmp_path):
    with pytest.raises(ConfigError, match="EDGETRAIN_TARGET=aarch64 pip wheel"):
        making.build_wheel(tmp_path, "aarch64", source=tmp_path)


def test_what_pip_says_last_is_the_error(tmp_path):
    if not importlib.util.find_spec("pip"):
        pytest.skip("pip is not installed")
    with pytest.raises(ConfigError, match="pip failed: "):
        making.install(tmp_path / "x", "3.13", "aarch64", "--no-index", "no-such-package")
