"""Which disks may be written: the policy, on listings as lsblk 2.38 prints them.

`THIS_MACHINE` and the files in `listings` are recordings. The files were printed by lsblk of
util-linux 2.38.1 on Debian 12 (kernel 6.1.0-56-amd64) in QEMU 7.2, with QEMU's NVMe disk, its USB
stick (usb-storage, removable), a USB device of two slots (usb-bot), a USB SSD (usb-uas) and a card
behind a PCI reader (sdhci-pci, sd-card); what lies on them was made there by pvcreate, mdadm,
cryptsetup, mkswap, losetup and blockdev. Those that begin with `pi-` are of QEMU's Raspberry Pi 3B
(kernel 6.1.0-56-arm64, the same lsblk, without udev), with its own SD controller. `LISTINGS` are
put together by hand, one property at a time, from what lsblk's manual and the kernel's sources say:
of the machines in it, eMMC, ZFS, a CD, an empty slot and lsblk 2.39 are not among the recordings.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from edgetrain.errors import ConfigError
from edgetrain.provisioning.cards import disks

GB = 10**9
THIS_MACHINE = """{"blockdevices": [
 {"name":"zram0","kname":"zram0","path":"/dev/zram0","type":"disk","size":0,"ro":false,"rm":false,
  "hotplug":false,"tran":null,"subsystems":"block","model":null,"serial":null,
  "mountpoints":[null],"fstype":null},
 {"name":"vda","kname":"vda","path":"/dev/vda","type":"disk","size":274877906944,"ro":false,
  "rm":false,"hotplug":false,"tran":null,"subsystems":"block:virtio:pci","model":null,
  "serial":null,"mountpoints":["/"],"fstype":null}]}"""


def entry(name: str, size: int, children: Any = (), **more: Any) -> dict[str, Any]:
    """One block device as lsblk prints it."""
    plain = dict.fromkeys(("tran", "model", "serial", "fstype"))
    found = {
        **plain, "name": name, "kname": name, "path": f"/dev/{name}", "type": "disk",
        "size": size, "ro": False, "rm": False, "hotplug": False, "subsystems": "block",
        "mountpoints": [None], **more,
    }  # fmt: skip
    return found | ({"children": list(children)} if children else {})


def part(name: str, mount: str | None = None, **more: Any) -> dict[str, Any]:
    return entry(name, 1 * GB, type="part", mountpoints=[mount], **more)


NVME = entry("nvme0n1", 512 * GB, [part("nvme0n1p1", "/boot/efi"), part("nvme0n1p2", "/")],
             tran="nvme", subsystems="block:nvme:pci", model="Samsung SSD 980")  # fmt: skip
READER = {"tran": "usb", "subsystems": "block:scsi:usb:pci", "rm": True, "hotplug": True}
NATIVE = {"subsystems": "block:mmc:mmc_host:pci"}

LISTINGS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "laptop with NVMe and USB reader": (
        [NVME, entry("sda", 32 * GB, [part("sda1")], model="STORAGE DEVICE", **READER)],
        ["/dev/sda"],
    ),
    "laptop with a native reader": (
        [NVME, entry("mmcblk0", 32 * GB, [part("mmcblk0p1")], **NATIVE)],
        ["/dev/mmcblk0"],
    ),
    # util-linux issue 2379: since 2.39 a native reader has a transport and is not hotplugged
    "a native reader, as lsblk 2.39 sees it": (
        [NVME, entry("mmcblk0", 32 * GB, [part("mmcblk0p1")], tran="mmc", **NATIVE)],
        ["/dev/mmcblk0"],
    ),
    "eMMC beside a card": (
        [
            entry("mmcblk0", 64 * GB, **NATIVE),
            entry("mmcblk0boot0", 4 << 20, ro=True, **NATIVE),
            entry("mmcblk0boot1", 4 << 20, ro=True, **NATIVE),
            entry("mmcblk1", 32 * GB, **NATIVE),
        ],
        ["/dev/mmcblk1"],
    ),
    "USB SSD": ([NVME, entry("sda", 1000 * GB, tran="usb", subsystems="block:scsi:usb")], []),
    "reader with several slots, one empty": (
        [entry(n, size * GB, **READER) for n, size in (("sda", 0), ("sdb", 16), ("sdc", 64))],
        ["/dev/sdb", "/dev/sdc"],
    ),
    "zram": ([NVME, entry("zram0", 8 * GB, mountpoints=["[SWAP]"])], []),
    "zram that is not swap": ([entry("zram0", 8 * GB, rm=True)], []),
    "swap on a stick": ([entry("sda", 8 * GB, [part("sda1", "[SWAP]")], **READER)], []),
    "sleeping swap on a stick": (
        [entry("sda", 8 * GB, [part("sda1", fstype="swap")], **READER)], []
    ),
    "LVM on a stick": (
        [entry("sda", 64 * GB, [part("sda1", None, fstype="LVM2_member")], **READER)], []
    ),
    "LVM in use on a stick": (
        [entry("sda", 64 * GB, [part("sda1"), entry("vg-home", GB, type="lvm")], **READER)], []
    ),
    "RAID": (
        [entry(n, 64 * GB, fstype="linux_raid_member", **READER) for n in ("sda", "sdb")], []
    ),
    "RAID in use": (
        [entry("sda", 64 * GB, [entry("md0", 64 * GB, type="raid1")], **READER)], []
    ),
    "dm-crypt": (
        [entry("sda", 64 * GB, [part("sda1", fstype="crypto_LUKS")], **READER)], []
    ),
    "ZFS": ([entry("sda", 64 * GB, [part("sda1", fstype="zfs_member")], **READER)], []),
    "loop devices": ([NVME, entry("loop0", 4 * GB, type="loop")], []),
    "CD": ([entry("sr0", 1 * GB, type="rom", **READER)], []),
    "a Pi with its own card": (
        [entry("mmcblk0", 32 * GB,
               [part("mmcblk0p1", "/boot/firmware"), part("mmcblk0p2", "/")], **NATIVE)],
        [],
    ),
    "a Pi that boots from SSD, a card in its slot": (
        [
            entry("sda", 240 * GB, [part("sda1", "/boot/firmware"), part("sda2", "/")],
                  tran="usb", subsystems="block:scsi:usb", hotplug=True),
            entry("mmcblk0", 32 * GB, [part("mmcblk0p1"), part("mmcblk0p2")], **NATIVE),
        ],
        ["/dev/mmcblk0"],
    ),
    "a mounted card": (
        [entry("sda", 32 * GB, [part("sda1", "/media/me/bootfs")], **READER)], []
    ),
    "a locked card": ([entry("sda", 32 * GB, ro=True, **READER)], []),
    "an internal SATA disk": ([entry("sda", 120 * GB, tran="sata")], []),
    "an old lsblk, all texts": (
        [entry("sda", 32 * GB, **{**READER, "rm": "1", "hotplug": "1", "ro": "0"})], ["/dev/sda"]
    ),
}  # fmt: skip


RECORDED: dict[str, tuple[list[str], dict[str, str]]] = {
    "nvme-and-usb-reader": (["/dev/sda"], {"nvme0n1": "nvme0n1p1 is mounted at /run/a"}),
    "mounted-card": ([], {"sda": "sda1 is mounted at /run/media"}),
    "native-reader": (["/dev/mmcblk0"], {"nvme0n1": "nvme0n1p1 is mounted at /run/b"}),
    "own-card": ([], {"mmcblk0": "mmcblk0p1 is mounted at /run/a"}),
    "two-slots": (["/dev/sda", "/dev/sdb"], {}),
    "usb-ssd": ([], {"sda": "has 1000 GB, more than a card of 256 GiB"}),
    "zram": (["/dev/sda", "/dev/sdb"], {"zram0": "is not a medium that can be taken out"}),
    "loop": (["/dev/sda", "/dev/sdb"], {"loop0": "is a loop device"}),
    "lvm-idle": (["/dev/sdb"], {"sda": "sda holds LVM"}),
    "lvm": (["/dev/sdb"], {"sda": "sda holds LVM"}),
    "luks": (["/dev/sdb"], {"sda": "sda holds LUKS"}),
    "raid": ([], {"sda": "sda holds RAID", "sdb": "sdb holds RAID"}),
    "swap-idle": (["/dev/sdb"], {"sda": "sda holds swap"}),
    "swap": (["/dev/sdb"], {"sda": "is in use: sda is swap"}),
    "pi-own-card": ([], {"mmcblk0": "mmcblk0p1 is mounted at /boot/firmware"}),
    "pi-and-usb-reader": (["/dev/sda"], {"mmcblk0": "mmcblk0p1 is mounted at /boot/firmware"}),
    "locked": (["/dev/sdb"], {"sda": "is read-only: look at the card's lock switch"}),
}
"""What is a card in each recording, and why other disks are not."""


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_a_card_on_machines_that_were_recorded(name):
    cards, refused = RECORDED[name]
    listing = disks.disks((Path(__file__).parent / "listings" / f"{name}.json").read_text())
    assert [disk.path for disk in disks.cards(listing)] == cards
    for disk in listing:
        why_not = disks.why_not(disk)
        assert refused.get(disk.entry["name"], "") in why_not
        if disk.path == "/dev/vda":
            assert why_not == "is in use: vda is mounted at /"


def found(entries: list[dict[str, Any]]) -> list[disks.Disk]:
    return disks.disks(json.dumps({"blockdevices": entries}))


@pytest.mark.parametrize("name", LISTINGS)
def test_what_is_a_card(name):
    entries, cards = LISTINGS[name]
    assert [disk.path for disk in disks.cards(found(entries))] == cards


def test_no_card_on_this_machine_as_it_was_recorded():
    assert disks.cards(disks.disks(THIS_MACHINE)) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a mounted card", "is in use: sda1 is mounted at /media/me/bootfs"),
        ("a Pi with its own card", "is in use: mmcblk0p1 is mounted at /boot/firmware"),
        ("swap on a stick", "is in use: sda1 is swap"),
        ("LVM on a stick", "sda1 holds LVM"),
        ("LVM in use on a stick", "vg-home holds LVM"),
        ("RAID", "sda holds RAID"),
        ("RAID in use", "md0 holds RAID"),
        ("dm-crypt", "sda1 holds LUKS"),
        ("ZFS", "sda1 holds ZFS"),
        ("a locked card", "is read-only"),
        ("USB SSD", "is in use: nvme0n1p1"),
        ("an internal SATA disk", "is not removable"),
        ("CD", "is a rom"),
        ("eMMC beside a card", "is not a medium that can be taken out"),
        ("reader with several slots, one empty", "has no card in it"),
    ],
)
def test_why_not_in_words(name, said):
    assert said in disks.why_not(found(LISTINGS[name][0])[0])


def test_too_small_and_too_large():
    (small,) = found([entry("sda", 2 * GB, **READER)])
    assert disks.why_not(small, 3 * GB) == "has 2000000000 bytes, and 3000000000 are needed"
    assert not disks.why_not(small, 2 * GB)
    (large,) = found([entry("sda", 512 * GB, **READER)])
    assert "more than a card of 256 GiB (--larger allows it)" in disks.why_not(large)
    assert not disks.why_not(large, larger=True)
    (usual,) = found([entry("sda", 256 * GB, **READER)])
    assert not disks.why_not(usual)


def test_a_loop_device_only_where_a_test_asks_for_it():
    (loop,) = found([entry("loop0", 2 * GB, type="loop")])
    assert "is a loop device" in disks.why_not(loop)
    assert not disks.why_not(loop, loops=True)


def test_a_disk_is_found_by_its_path():
    listing = found(LISTINGS["laptop with NVMe and USB reader"][0])
    assert disks.disk_at("/dev/sda", listing).model == "STORAGE DEVICE"
    with pytest.raises(ConfigError, match="/dev/sda1 is a part of /dev/sda"):
        disks.disk_at("/dev/sda1", listing)
    with pytest.raises(ConfigError, match=r"no disk /dev/sdb \(did you mean '/dev/sda'"):
        disks.disk_at("/dev/sdb", listing)


def test_a_disk_that_is_not_there_is_no_reason_to_name_that_of_the_system():
    with pytest.raises(ConfigError) as refused:
        disks.disk_at("/dev/vdb", disks.disks(THIS_MACHINE))
    assert "/dev/vda" not in str(refused.value)


def test_a_card_is_described_by_what_a_person_can_compare():
    (disk,) = found([entry("sda", 31914983424, model="SD/MMC ", serial="1234", **READER)])
    assert disk.describe() == "/dev/sda  31.9 GB  SD/MMC, serial 1234"


@pytest.mark.parametrize("text", ["", "[]", '{"blockdevices": [{"name": "sda"}]}', "{}"])
def test_another_output_is_an_error(text):
    with pytest.raises(ConfigError, match="something unexpected"):
        disks.disks(text)


def test_lsblk_missing_or_not_linux(monkeypatch):
    monkeypatch.setattr(disks.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match=r"lsblk is not installed \(apt install util-linux\)"):
        disks.listing()
    monkeypatch.setattr(disks.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="written on Linux, not on darwin"):
        disks.listing()


def test_lsblk_of_this_machine_can_be_read():
    try:
        text = disks.listing()
    except (ConfigError, subprocess.SubprocessError) as error:
        pytest.skip(str(error))
    assert isinstance(disks.disks(text), list)
