"""Fetching over HTTP: continued, repeated, checked, and explained when it does not work."""

import hashlib
import shutil
import socket
import threading
import types
from pathlib import Path

import pytest
from official import FIXTURES
from server import serving
from test_sources import assert_equal, trust

from ccssl.errors import InputError
from ccssl.images import fetch, load, sources

BODY = bytes(range(256)) * 40  # 10,240 bytes
MD5 = (hashlib.md5(BODY).hexdigest(),)


@pytest.fixture(autouse=True)
def impatient(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "PAUSE", 0.0)
    monkeypatch.setattr(fetch, "TIMEOUT", 5.0)
    monkeypatch.setattr(fetch, "BLOCK", 1000)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CCSSL_HOME", str(tmp_path / "home"))


@pytest.fixture
def site():
    with serving({"data.bin": BODY}) as site:
        yield site


@pytest.fixture
def target(tmp_path):
    return tmp_path / "data.bin"


def get(site, target, md5=MD5, file="data.bin"):
    fetch.download(f"{site.url}/{file}", target, md5)


def left_behind(target):
    return sorted(path.name for path in target.parent.iterdir() if not path.name.startswith("."))


def test_a_file_arrives_whole(site, target):
    get(site, target)
    assert target.read_bytes() == BODY
    assert left_behind(target) == ["data.bin"]
    assert site.asked == [("/data.bin", None)]
    get(site, target)  # it is there, and right
    assert len(site.asked) == 1


def test_a_file_that_is_wrong_is_fetched_anew(site, target):
    target.write_bytes(b"something else")
    get(site, target)
    assert target.read_bytes() == BODY


def test_a_broken_connection_is_taken_up_where_it_broke(site, target):
    site.break_after = [3000, 0, 2500]
    get(site, target)
    assert target.read_bytes() == BODY
    assert [span for _, span in site.asked] == [None, "bytes=3000-", "bytes=3000-", "bytes=5500-"]


def test_what_an_earlier_command_fetched_is_kept(site, target):
    site.break_after = [4000] + [0] * 9
    with pytest.raises(
        InputError, match=r"cannot be fetched \(the connection broke after 4,000 bytes\).*4,000 bytes "
    ):
        get(site, target)
    assert left_behind(target) == ["data.bin.part"]
    site.break_after, site.asked = [], []
    get(site, target)
    assert site.asked == [("/data.bin", "bytes=4000-")]
    assert target.read_bytes() == BODY


def test_attempts_that_get_further_do_not_count(site, target):
    site.break_after = [1000] * 9
    get(site, target)
    assert target.read_bytes() == BODY
    assert len(site.asked) == 10


def test_a_server_that_cannot_continue_starts_again(site, target):
    site.ranges = False
    site.break_after = [3000]
    get(site, target)
    assert target.read_bytes() == BODY


def test_a_server_that_always_starts_again_and_breaks_is_given_up(site, target):
    site.ranges = False
    site.break_after = [500, 1000] * 20
    with pytest.raises(InputError, match="the connection broke"):
        get(site, target)
    assert len(site.asked) == 2 + fetch.RETRIES + 1


def test_a_part_that_is_complete_already(site, target):
    target.with_name("data.bin.part").write_bytes(BODY)
    get(site, target)
    assert target.read_bytes() == BODY


@pytest.mark.parametrize("part", [b"x" * 3000, b"x" * len(BODY), b"x" * (len(BODY) + 5)])
def test_a_part_of_another_file_is_given_up(part, site, target):
    target.with_name("data.bin.part").write_bytes(part)
    get(site, target)
    assert target.read_bytes() == BODY
    assert left_behind(target) == ["data.bin"]


def test_a_wrong_file_is_not_accepted(site, target):
    site.files["data.bin"] = b"<html>please log in</html>"
    found = hashlib.md5(site.files["data.bin"]).hexdigest()
    sentence = (
        rf"data.bin has the wrong checksum: expected MD5 {MD5[0]}, found {found} \(26 bytes\). It came from "
        rf"{site.url}/data.bin: try again, or get it elsewhere and pass it with --from"
    )
    with pytest.raises(InputError, match=sentence):
        get(site, target)
    assert left_behind(target) == []


def test_without_a_checksum_anything_is_accepted(site, target):
    get(site, target, md5=())
    assert target.read_bytes() == BODY


@pytest.mark.parametrize("code", [404, 403, 401, 410])
def test_refusals_are_final(code, site, target):
    site.answers = [code]
    with pytest.raises(InputError, match=rf"{site.url}/data.bin answered {code} .*--url, or get .*--from"):
        get(site, target)
    assert len(site.asked) == 1
    assert left_behind(target) == []


@pytest.mark.parametrize("code", [500, 503, 429])
def test_busy_servers_are_asked_again(code, site, target):
    site.answers = [code, code]
    get(site, target)
    assert target.read_bytes() == BODY
    site.answers = [code] * 9
    with pytest.raises(InputError, match=rf"cannot be fetched \(it answered {code}"):
        get(site, target.with_name("other.bin"))


def test_no_network(target):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/data.bin"
    with pytest.raises(InputError, match=rf"{address} cannot be fetched \(.*refused.*another machine .*--from"):
        fetch.download(address, target, MD5)
    with pytest.raises(InputError, match=r"cannot be fetched \(.*"):
        fetch.download("http://no-such-host.invalid/data.bin", target, MD5)


def test_a_server_that_says_nothing(target, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.05)
    monkeypatch.setattr(fetch, "RETRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/data.bin"
        with pytest.raises(InputError, match=r"cannot be fetched \(timed out\)"):
            fetch.download(address, target, MD5)


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://host/data.bin", "data.bin", "/data.bin"])
def test_other_addresses(address, target):
    with pytest.raises(InputError, match=r"must begin with http:// or https://.*use --from for a file"):
        fetch.download(address, target, MD5)


def test_a_disk_without_room_is_noticed_before_the_first_byte(site, target, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10_239))
    with pytest.raises(InputError, match=r"too small.*CCSSL_HOME"):
        get(site, target)
    assert left_behind(target) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=7_240))
    target.with_name("data.bin.part").write_bytes(BODY[:3000])
    get(site, target)  # only the rest needs room
    assert target.read_bytes() == BODY


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full, a disk that is always full")
def test_a_disk_that_fills_up(site, target):
    target.with_name("data.bin.part").symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"is full .*make room and run the same command again"):
        get(site, target)
    target.with_name("mine.bin").write_bytes(BODY)
    with pytest.raises(InputError, match="is full"):
        fetch.copy(target.with_name("mine.bin"), target, MD5)


def test_other_errors_of_the_disk_are_not_hidden(site, target):
    target.with_name("data.bin.part").mkdir()
    with pytest.raises(IsADirectoryError):
        get(site, target)


def test_copies_are_checked_and_leave_the_original(target, tmp_path):
    mine = tmp_path / "mine"
    mine.write_bytes(BODY)
    fetch.copy(mine, target, MD5)
    assert target.read_bytes() == mine.read_bytes() == BODY
    mine.write_bytes(b"x")
    with pytest.raises(InputError, match=r"wrong checksum.*It was copied from .*mine: take the file as it was pub"):
        fetch.copy(mine, target, MD5)
    assert target.read_bytes() == BODY
    with pytest.raises(InputError, match="nothing is not a file"):
        fetch.copy(tmp_path / "nothing", target, MD5)


def test_two_that_fetch_the_same_file_do_not_mix(site, target, capfd):
    site.break_after = [500] * 10
    threads = [threading.Thread(target=get, args=(site, target)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() == BODY
    starts = [int(span.removeprefix("bytes=").removesuffix("-")) if span else 0 for _, span in site.asked]
    assert starts == sorted(set(starts))  # one went on and on; the others found the file


# ------------------------------------------------------------------------------------------- whole data sets


def test_a_data_set_from_its_address(tmp_path, monkeypatch):
    published = tmp_path / "published"
    published.mkdir()
    expected = FIXTURES["mnist"](published)
    trust(monkeypatch, "mnist", published)
    with serving({f"deep/{file.name}": file.read_bytes() for file in published.iterdir()}) as site:
        site.break_after = [100]
        sources.fetch("mnist", url=f"{site.url}/deep")
        asked = len(site.asked)
        assert_equal(load("mnist"), expected)
        sources.fetch("mnist", url=f"{site.url}/deep")
        assert len(site.asked) == asked == 5


@pytest.mark.parametrize("address", ["/deep/other-name.tgz", "/deep/"])
def test_a_single_archive_may_have_another_name_there(address, tmp_path, monkeypatch):
    published = tmp_path / "published"
    published.mkdir()
    expected = FIXTURES["cifar100"](published)
    trust(monkeypatch, "cifar100", published)
    body = (published / "cifar-100-python.tar.gz").read_bytes()
    with serving({"deep/other-name.tgz": body, "deep/cifar-100-python.tar.gz": body}) as site:
        sources.fetch("cifar100", url=site.url + address)
    assert_equal(load("cifar100"), expected)


def test_the_official_address_is_asked_where_no_other_is_given(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(fetch, "download", lambda url, path, md5: asked.append((url, path.name, md5)))
    with pytest.raises(InputError, match="svhn is not on this machine"):
        sources.fetch("svhn")
    assert asked == [
        (
            f"http://ufldl.stanford.edu/housenumbers/{part}_32x32.mat",
            f"{part}_32x32.mat",
            sources.SOURCES["svhn"].archives[index].md5,
        )
        for index, part in enumerate(("train", "test"))
    ]


def test_a_set_that_was_begun(tmp_path, monkeypatch):
    with serving({}) as site, pytest.raises(InputError, match="answered 404"):
        sources.fetch("mnist", url=site.url)
    assert sources.state("mnist") == "not fetched"
    (tmp_path / "home" / "mnist" / "train-labels-idx1-ubyte.gz.part").write_bytes(b"x")
    assert sources.state("mnist") == "partly fetched"
