"""A root file system for arm64, made without running one program of it.

It is a Debian for amd64, installed here, in which the files of all packages are those of the same
packages for arm64: what installing leaves (users, links, enabled units) is the same on both. Its
kernel gets an initramfs of a shell script and a static busybox.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

KERNEL = "linux-image-arm64"
TREE = "bcm2837-rpi-3-b.dtb"
"""The file that describes a Raspberry Pi 3B to the kernel."""
_EARLY = (
    "virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "bcm2835", "sdhci_iproc", "mmc_block",
    "phy_generic", "dwc2",
)  # fmt: skip
"""Modules by which the kernel finds the card of each machine that boots it. A Pi's USB, if it is
looked for later, does not find what QEMU has there."""
_SKIPPED = (
    "./etc", "./var", "./usr/share/doc", "./usr/share/man", "./usr/share/locale",
    "./lib/modules/*/kernel/sound", "./lib/modules/*/kernel/drivers/gpu",
    "./lib/modules/*/kernel/drivers/media", "./lib/modules/*/kernel/drivers/net/wireless",
    "./lib/modules/*/kernel/drivers/net/ethernet", "./lib/modules/*/kernel/drivers/infiniband",
    "./lib/modules/*/kernel/drivers/staging", "./lib/modules/*/kernel/drivers/scsi",
)  # fmt: skip
_X86_64 = b"\x3e\x00"
_INIT = """\
#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /root
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
while read name; do /bin/busybox insmod /modules/$name; done < /modules/order
while true; do
  for disk in vda2 mmcblk0p2; do
    if [ -b /dev/$disk ]; then
      /bin/busybox mount -t ext4 /dev/$disk /root
      # What could not be run when the card was made.
      [ -e /root/etc/ld.so.cache ] || /bin/busybox chroot /root /sbin/ldconfig
      for place in proc sys dev; do /bin/busybox mount --move /$place /root/$place; done
      exec /bin/busybox switch_root /root /sbin/init
    fi
  done
  /bin/busybox sleep 1
done
"""


def fetch_packages(amd64: Path, out: Path) -> None:
    """Make a tar file of what is in the packages of a Debian, for arm64, and of the kernel's.

    amd64: a tar file of that Debian.
    """
    status = subprocess.run(
        ["tar", "xOf", str(amd64), "./var/lib/dpkg/status"], check=True, capture_output=True
    ).stdout.decode()
    names = [line.split()[1] for line in status.splitlines() if line.startswith("Package: ")]
    words = ["mmdebstrap", "--mode=root", "--variant=extract", "--architectures=arm64"]
    words += ['--aptopt=APT::Install-Recommends "false"']
    words += [f"--include={','.join([*names, KERNEL, 'busybox-static'])}"]
    words += ["bookworm", f"{out}.part.tar"]
    subprocess.run(words, check=True, capture_output=True, timeout=3600)
    Path(f"{out}.part.tar").rename(out)


def overlay(root: Path, packages: Path) -> None:
    """Turn an unpacked root file system for amd64 into one for arm64. Needs root."""
    skipped = [f"--exclude={pattern}" for pattern in _SKIPPED]
    unpack = ["tar", "xf", str(packages), "-C", str(root), "--keep-directory-symlink", *skipped]
    # depmod is the twin's own, which runs here: the modules come first.
    subprocess.run([*unpack, "--wildcards", "./lib/modules/*"], check=True, timeout=1200)
    release = _release(root)
    subprocess.run(["chroot", str(root), "depmod", release], check=True, timeout=1200)
    for name in ("usr/lib/x86_64-linux-gnu", "usr/lib64"):
        shutil.rmtree(root / name)
    for path in (root / "usr/bin").glob("*x86_64-linux-gnu*"):
        path.unlink()
    (root / "lib64").unlink()
    (root / "etc/ld.so.cache").unlink()
    folders = (
        "/usr/local/lib/aarch64-linux-gnu\n/lib/aarch64-linux-gnu\n/usr/lib/aarch64-linux-gnu\n"
    )
    (root / "etc/ld.so.conf.d/aarch64-linux-gnu.conf").write_text(folders)
    kept = "--exclude=./lib/modules/*/modules.*"
    subprocess.run([*unpack, kept], check=True, timeout=1200)
    left = [path for path in (root / "usr/bin").iterdir() if _is_for_amd64(path)]
    assert not left, f"still for amd64: {left}"


def early_files(root: Path, folder: Path) -> None:
    """Put kernel, initramfs and device tree, as `boot_qemu` wants them, into `folder`."""
    release = _release(root)
    shutil.copy(root / f"boot/vmlinuz-{release}", folder / "vmlinuz")
    shutil.copy(root / f"usr/lib/linux-image-{release}/broadcom/{TREE}", folder / TREE)
    modules = root / "lib/modules" / release
    needs = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()[::-1]
    by_name = {Path(path).name.removesuffix(".ko").replace("-", "_"): path for path in needs}
    order: list[str] = []
    for name in _EARLY:
        if name in by_name:  # else it is part of the kernel
            for path in (*needs[by_name[name]], by_name[name]):
                if path not in order:
                    order.append(path)
    files = {f"modules/{Path(path).name}": (modules / path).read_bytes() for path in order}
    files["modules/order"] = "".join(f"{Path(path).name}\n" for path in order).encode()
    files["bin/busybox"] = (root / "bin/busybox").read_bytes()
    files["init"] = _INIT.encode()
    (folder / "initrd.img").write_bytes(_archive(files))


def _release(root: Path) -> str:
    (found,) = (root / "lib/modules").iterdir()
    return found.name


def _is_for_amd64(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(20)
    return head[:4] == b"\x7fELF" and head[18:] == _X86_64


def _archive(files: dict[str, bytes]) -> bytes:
    """A cpio archive as the kernel reads it ("newc"), with the folders of the files."""
    folders = sorted({str(Path(name).parent) for name in files} - {"."})
    entries = [(name, 0o40755, b"") for name in folders]
    entries += [(name, 0o100755, content) for name, content in files.items()]
    out = bytearray()
    for number, (name, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        fields = [number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0]
        out += b"070701" + "".join(f"{field:08X}" for field in fields).encode()
        for part in (name.encode() + b"\0", content):
            out += part + bytes(-(len(out) + len(part)) % 4)
    return bytes(out)
