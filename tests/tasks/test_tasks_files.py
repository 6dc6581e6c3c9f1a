"""Reading and fetching original files: plain, packed, damaged, and over HTTP from this machine."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
from tasks_files import CIFAR_NAMES, MNIST_NAMES, cifar_files, idx, mnist_files, tar_gz, write

from edgetrain import tasks
from edgetrain.errors import TaskError
from edgetrain.tasks import handwriting, pictures
from edgetrain.tasks.download import Download, cache_folder, fetch, say
from edgetrain.tasks.formats import read_cifar, read_digits, read_idx_pair


@pytest.mark.parametrize("gzipped", [False, True])
def test_mnist_is_read_plain_and_gzipped(tmp_path, gzipped):
    task = tasks.mnist(str(write(tmp_path, mnist_files(), gzipped)), held_out=5)
    assert task.samples(0, 1) == 40
    images, labels = next(task.batches(0, 1, 16, 0))
    assert images.shape == (16, 1, 28, 28)
    middle = (images[:, 0, 14, 14] * 78.6 + 33.3).round()
    np.testing.assert_array_equal(middle % 10, labels)
    assert len(task.test.labels) == 5


def test_a_plain_file_is_mapped_and_not_copied(tmp_path):
    write(tmp_path, mnist_files())
    images, _ = read_idx_pair(*(tmp_path / name for name in MNIST_NAMES[:2]))
    owner = images
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    assert isinstance(owner, np.memmap)


@pytest.mark.parametrize("archived", [False, True])
def test_cifar10_is_read_from_its_batches_and_from_the_archive(tmp_path, archived):
    if archived:
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(tar_gz(cifar_files()))
    else:
        write(tmp_path / "cifar-10-batches-bin", cifar_files())
    task = tasks.cifar10(str(tmp_path), held_out=3)
    assert task.samples(0, 1) == 40
    everything = task.train.pixels[np.arange(40)]
    assert everything.shape == (40, 3, 32, 32)
    expected = (np.arange(5)[:, None] * 20 + np.arange(8)).ravel()
    np.testing.assert_array_equal(everything[:, 2, 31, 31], expected)
    np.testing.assert_array_equal(task.train.labels, expected % 20)
    images, labels = next(task.batches(0, 2, 16, 0))
    assert images.shape == (16, 3, 32, 32)
    np.testing.assert_array_equal((images[:, 0, 16, 16] * 64.2 + 120.7).round() % 20, labels)


def damage(folder: Path, name: str, data: bytes) -> str:
    (folder / name).write_bytes(data)
    return str(folder)


GOOD = mnist_files()
IMAGES, LABELS = MNIST_NAMES[:2]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        (IMAGES, b"", "begins with nothing"),
        (IMAGES, b"\x1f\x8b\x08\x00more", "begins with 1f8b0800, not the magic"),
        (IMAGES, GOOD[IMAGES][:10], "truncated within its header"),
        (IMAGES, GOOD[IMAGES][:-1], "31375 bytes, expected 31376"),
        (IMAGES, GOOD[IMAGES] + b"x", "31377 bytes, expected 31376"),
        (IMAGES, idx(np.zeros((40, 8, 8))), r"declares the sizes \(40, 8, 8\)"),
        (
            IMAGES,
            GOOD[IMAGES][:4] + b"\xff" * 4 + GOOD[IMAGES][8:],
            r"declares the sizes \(4294967295",
        ),
        (IMAGES, GOOD[LABELS], "labels, expected images"),
        (LABELS, GOOD[IMAGES], "images, expected labels"),
        (LABELS, idx(np.zeros(39)), "39 labels for the 40 images"),
        (LABELS, idx(np.full(40, 10)), "a label of 10"),
    ],
)
def test_a_damaged_mnist_file_is_named_with_what_is_wrong(tmp_path, name, data, says):
    write(tmp_path, GOOD)
    with pytest.raises(TaskError, match=f"{name}: {says}"):
        tasks.mnist(damage(tmp_path, name, data))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (gzip.compress(GOOD[IMAGES])[:-20], "not a whole gzip file"),
        (gzip.compress(GOOD[IMAGES][:-1]), "31359 bytes after the header, expected 31360"),
        (gzip.compress(GOOD[IMAGES] + b"x"), "more bytes after the header"),
        (b"no gzip at all", "not a whole gzip file"),
        (b"\x1f\x8b\x08\x00" + b"\xff" * 100, "not a whole gzip file"),
    ],
)
def test_a_damaged_gzip_is_named_with_what_is_wrong(tmp_path, data, says):
    write(tmp_path, GOOD, gzipped=True)
    with pytest.raises(TaskError, match=f"{IMAGES}.gz: {says}"):
        tasks.mnist(damage(tmp_path, f"{IMAGES}.gz", data))


FIRST = cifar_files()["data_batch_1.bin"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "0 bytes, expected whole records of 3073"),
        (FIRST[:-1], "24583 bytes, expected whole records"),
        (b"\x0a" + FIRST[1:], "a label of 10"),
    ],
)
def test_a_damaged_cifar_file_is_named_packed_or_not(tmp_path, data, says):
    files = {**cifar_files(), "data_batch_1.bin": data}
    with pytest.raises(TaskError, match=f"data_batch_1.bin: {says}"):
        tasks.cifar10(str(write(tmp_path / "plain", files)))
    write(tmp_path / "tar", {"cifar-10-binary.tar.gz": tar_gz(files)})
    with pytest.raises(TaskError, match=f"tar.gz:data_batch_1.bin: {says}"):
        tasks.cifar10(str(tmp_path / "tar"))


def test_a_cifar_file_whose_bytes_are_not_all_there_is_refused(tmp_path):
    entry = tarfile.TarInfo("data_batch_1.bin")
    entry.type = tarfile.GNUTYPE_SPARSE
    head = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    head[483:495], head[148:156] = b"%011o\0" % len(FIRST), b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    write(tmp_path, {"cifar-10-binary.tar.gz": gzip.compress(bytes(head) + bytes(1024))})
    with pytest.raises(TaskError, match=r"data_batch_1\.bin: a sparse entry"):
        tasks.cifar10(str(tmp_path))


def test_an_incomplete_cifar_is_named(tmp_path):
    files = cifar_files()
    del files["data_batch_3.bin"]
    with pytest.raises(TaskError, match=r"no data_batch_3\.bin in"):
        tasks.cifar10(str(write(tmp_path / "plain", files)))
    packed = tar_gz(files)
    write(tmp_path / "tar", {"cifar-10-binary.tar.gz": packed})
    with pytest.raises(TaskError, match=r"tar.gz: holds no data_batch_3\.bin"):
        tasks.cifar10(str(tmp_path / "tar"))
    for data in (packed[:-30], packed[:500], b"nothing"):
        write(tmp_path / "torn", {"cifar-10-binary.tar.gz": data})
        with pytest.raises(TaskError, match=r"cifar-10-binary.tar.gz"):
            tasks.cifar10(str(tmp_path / "torn"))


def digits_csv() -> bytes:
    return Path(tasks.__file__).with_name("digits.csv.gz").read_bytes()


def test_digits_may_lie_in_a_folder(tmp_path):
    (tmp_path / "digits.csv.gz").write_bytes(digits_csv())
    assert tasks.digits(str(tmp_path)).samples(0, 1) == 1438
    with pytest.raises(TaskError, match="no file"):
        tasks.digits(str(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-40], "not a gzipped table"),
        (lambda data: b"plain", "not a gzipped table"),
        (lambda data: gzip.compress(b"1,2,x\n"), "not a gzipped table"),
        (
            lambda data: gzip.compress(b"".join(gzip.decompress(data).splitlines(True)[1:])),
            "1796 lines of 65 numbers, expected 1797",
        ),
        (lambda data: gzip.compress(b"1,2\n3,4\n"), "2 lines of 2 numbers"),
        (lambda data: gzip.compress(gzip.decompress(data) * 8), "not a gzipped table"),  # cut
        (lambda data: gzip.compress(gzip.decompress(data).replace(b"16", b"17")), "outside 0 … 16"),
    ],
)
def test_a_damaged_digits_file_is_named_with_what_is_wrong(tmp_path, change, says):
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(change(digits_csv()))
    with pytest.raises(TaskError, match=f"digits.csv.gz: .*{says}"):
        read_digits(path)


def test_missing_files_say_both_ways_out(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for make in (tasks.mnist, tasks.cifar10):
        with pytest.raises(TaskError, match=r"data\.folder, or set data\.download=true"):
            make()
    with pytest.raises(TaskError, match=r"data\.download = 1"):
        tasks.mnist(download=1)
    with pytest.raises(TaskError, match=r"data\.held_out = 0"):
        tasks.mnist(str(write(tmp_path, mnist_files())), held_out=0)
    assert cache_folder("mnist") == tmp_path / "edgetrain" / "mnist"


class Shelf(http.server.BaseHTTPRequestHandler):
    """Serves the files of its server's `files`, and counts what is asked for."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        data = self.server.files.get(self.path)
        self.send_response(200 if data is not None else 404)
        self.send_header("Content-Length", str(len(data or b"") + self.server.missing_bytes))
        self.end_headers()
        self.wfile.write(data or b"")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Shelf) as serving:
        serving.files, serving.asked, serving.missing_bytes = {}, [], 0
        serving.url = f"http://127.0.0.1:{serving.server_port}"
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def offer(server, name: str, data: bytes) -> Download:
    server.files[f"/{name}"] = data
    return Download(f"{server.url}/{name}", hashlib.sha256(data).hexdigest(), len(data))


def test_a_file_is_fetched_once_and_checked(server, tmp_path, capfd):
    data = bytes(3_000_000)
    wanted = offer(server, "data.bin", data)
    seen = []
    folder = tmp_path / "new" / "folder"
    path = fetch(wanted, folder, lambda *at: seen.append(at))
    assert path.read_bytes() == data
    assert seen[-1] == ("data.bin", 3_000_000, 3_000_000)
    assert fetch(wanted, folder) == path
    assert server.asked == ["/data.bin"]
    assert sorted(entry.name for entry in folder.iterdir()) == [".lock", "data.bin"]
    say("data.bin", 3_000_000, 3_000_000)
    assert capfd.readouterr().err == "data.bin: 3.0 of 3.0 MB\n"


@pytest.mark.parametrize(
    ("served", "missing_bytes", "says"),
    [
        (b"other bytes!", 0, "SHA-256 .*, expected"),
        (b"right", 0, "5 bytes, expected 12"),
        (b"right", 7, "5 bytes, expected 12"),
        (b"right bytes and more", 0, "more bytes, expected 12"),
        (None, 0, "HTTP Error 404"),
    ],
)
def test_what_does_not_arrive_whole_leaves_nothing_behind(
    server, tmp_path, served, missing_bytes, says
):
    wanted = offer(server, "data.bin", b"right bytes!")
    server.files["/data.bin"], server.missing_bytes = served, missing_bytes
    with pytest.raises(TaskError, match=says):
        fetch(wanted, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


def test_addresses_that_cannot_be_fetched_are_refused(tmp_path):
    for url in ("file:///etc/hostname", "http://[bad/file", "http://127.0.0.1:9/closed"):
        with pytest.raises(TaskError, match="cannot fetch"):
            fetch(Download(url, "", 1), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(TaskError, match="cannot fetch"):
        fetch(Download("http://127.0.0.1:9/x", "", 1), tmp_path / "file")


def test_processes_that_want_the_same_file_download_it_once(server, tmp_path):
    wanted = offer(server, "data.bin", bytes(2_000_000))
    threads = [threading.Thread(target=fetch, args=(wanted, tmp_path, print)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.asked == ["/data.bin"]


def test_tasks_download_from_a_mirror_when_asked(server, tmp_path, monkeypatch):
    packed = {f"{name}.gz": gzip.compress(data) for name, data in mnist_files().items()}
    offers = tuple(offer(server, name, packed[f"{name}"]) for name in packed)
    monkeypatch.setattr(handwriting, "MNIST_FILES", offers)
    assert tasks.mnist(str(tmp_path / "mnist"), download=True).samples(0, 1) == 40

    archive = offer(server, "cifar-10-binary.tar.gz", tar_gz(cifar_files()))
    elsewhere = Download("http://127.0.0.1:9/" + archive.name, archive.sha256, archive.size_bytes)
    monkeypatch.setattr(pictures, "CIFAR_ARCHIVE", elsewhere)
    task = tasks.cifar10(str(tmp_path / "cifar"), download=f"{server.url}/")
    assert task.samples(0, 1) == 8 * len(CIFAR_NAMES[:5])


def test_a_mapped_batch_is_a_view_of_its_file(tmp_path):
    write(tmp_path, cifar_files())
    pixels, labels = read_cifar(tmp_path / "data_batch_2.bin")
    assert pixels.shape == (8, 3, 32, 32)
    assert not pixels.flags.owndata
    assert labels.tolist() == list(range(8))
