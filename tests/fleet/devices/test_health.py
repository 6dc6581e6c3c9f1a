"""Temperature and throttling, on made-up boards."""

from __future__ import annotations

import os
import struct

import pytest

from edgetrain.fleet.devices.health import Health


def board(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


class Firmware:
    """A Pi's firmware at /dev/vcio: it answers a property as the kernel's driver passes it on."""

    def __init__(self, flags=0):
        self.flags, self.asked, self.errors = flags, 0, []

    def ioctl(self, file, request, message):
        assert os.fstat(file)
        assert request in (0xC0086400, 0xC0046400), "_IOWR(100, 0, char *), of 64 or 32 bits"
        if self.errors:
            raise self.errors.pop()
        size, code, tag, room, done, forget, end = struct.unpack("=7I", message)
        assert (size, code, room, done, end) == (len(message), 0, 4, 0, 0)
        self.asked += 1
        if tag == 0x00030046:
            assert forget == 0, "it changes nothing: other programs read these bits, too"
            message[:] = struct.pack("=7I", size, 0x80000000, tag, room, 0x80000004, self.flags, 0)
        else:
            message[4:8] = struct.pack("=I", 0x80000001)


@pytest.mark.parametrize(
    "node",
    [
        "soc/soc:firmware",  # up to the 4
        "soc@107c000000/soc@107c000000:firmware",  # 5
        "soc:firmware",
        "soc@107c000000:firmware",
        "axi/axi:soc@107c000000:firmware",
    ],
)
def test_throttling_is_read_wherever_a_kernel_has_the_file(tmp_path, node):
    file = f"sys/devices/platform/{node}/get_throttled"
    health = Health(board(tmp_path, {file: "50005\n"}))
    assert health.throttled is True
    (tmp_path / file).write_text("50000\n")
    assert health.throttled is False, "it was, and is not now"
    (tmp_path / file).unlink()
    assert health.throttled is None


def test_where_there_is_no_file_the_firmware_is_asked(tmp_path):
    firmware = Firmware(0x50004)
    health = Health(board(tmp_path, {"dev/vcio": ""}), firmware.ioctl)
    assert health.throttled is True
    firmware.flags = 0x50000
    assert health.throttled is False
    firmware.errors.append(OSError("the firmware does not answer"))
    assert health.throttled is None
    assert health.throttled is False


def test_a_file_is_preferred_to_the_firmware(tmp_path):
    firmware = Firmware(0xF)
    file = "sys/devices/platform/soc/soc:firmware/get_throttled"
    health = Health(board(tmp_path, {"dev/vcio": "", file: "0\n"}), firmware.ioctl)
    assert health.throttled is False
    assert firmware.asked == 0


def test_boards_that_do_not_say(tmp_path):
    assert Health(tmp_path).throttled is None, "no device"
    assert Health(tmp_path).celsius is None
    board(tmp_path, {"dev/vcio": "", "sys/devices/platform/x/yfirmware/get_throttled": "what\n"})
    assert Health(tmp_path).throttled is None, "a device that is another one"
    refused = lambda file, request, message: None  # noqa: E731
    assert Health(tmp_path, refused).throttled is None, "the message comes back as it was"


def test_the_hottest_zone_of_the_processor_counts(tmp_path):
    zone = "sys/class/thermal/thermal_zone"
    files = {f"{zone}0/temp": "100000\n", f"{zone}0/type": "PMIC-Die\n"}
    assert Health(board(tmp_path, files)).celsius == 100.0
    files = {f"{zone}1/temp": "61500\n", f"{zone}1/type": "cpu-thermal\n", f"{zone}2/temp": "x\n"}
    assert Health(board(tmp_path, files)).celsius == 61.5


@pytest.mark.parametrize(
    ("said", "celsius"),
    [
        ("61500", 61.5), ("-40000", -40.0), ("150000", 150.0), ("61", 61.0), ("-12", -12.0),
        ("-40001", None), ("150001", None), ("-273150", None), ("4294967295", None), ("x", None),
        ("", None), ("61.5", None), ("-127000", None), ("255000", None), ("-60", None), ("0", 0.0),
    ],
)  # fmt: skip
def test_a_temperature_that_no_processor_has_is_unknown(said, celsius, tmp_path):
    zone = "sys/class/thermal/thermal_zone0"
    board(tmp_path, {f"{zone}/temp": f"{said}\n", f"{zone}/type": "cpu\n"})
    (tmp_path / zone / "type").write_bytes(b"cpu\xff\n")
    assert Health(tmp_path).celsius == celsius


def test_what_changes_slowly(tmp_path):
    board = Health(tmp_path)
    assert (board.megahertz, board.swap_bytes, board.wifi_dbm) == (None, None, None)
    for name, text in {
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "2400000\n",
        "proc/meminfo": "MemTotal: 8 kB\nSwapTotal: 2048 kB\nSwapFree: 1024 kB\n",
        "proc/net/wireless": "Inter-| sta\n face | tus\n wlan0: 0000   54.  -56.  -256  0\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (board.megahertz, board.swap_bytes, board.wifi_dbm) == (2400, 1 << 20, -56)
    (tmp_path / "proc/net/wireless").write_text("\x00\n\n wlan0: nothing\n")
    (tmp_path / "proc/meminfo").write_text("SwapTotal: x\n")
    assert (board.swap_bytes, board.wifi_dbm) == (None, None)
    assert board.disk_bytes
