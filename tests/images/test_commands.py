"""``ccssl data``: what it prints, what it refuses, and what it leaves on the disk."""

import json
import subprocess
import sys

import numpy as np
import pytest
from official import FIXTURES, pictures
from PIL import Image
from server import serving
from test_sources import trust

from ccssl import cli
from ccssl.images import SOURCES, load, open_packed, pack
from ccssl.images.commands import COMMANDS
from ccssl.images.progress import progress


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("CCSSL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def data(capsys):
    """Return a function that runs ``ccssl data ...`` and gives its exit code and outputs."""

    def run(*arguments):
        try:
            code = cli.main(["data", *map(str, arguments)])
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def published(tmp_path, monkeypatch):
    folder = tmp_path / "published"
    folder.mkdir()
    FIXTURES["mnist"](folder)
    trust(monkeypatch, "mnist", folder)
    return folder


def test_every_command_has_help(data):
    assert list(COMMANDS) == ["list", "fetch", "verify", "pack"]
    for name in COMMANDS:
        code, out, _ = data(name, "--help")
        assert code == 0
        assert (COMMANDS[name].__doc__ or "").strip().split("\n")[0][:40] in out


def test_the_commands_and_the_room_load_nothing_heavy():
    code = (
        "import sys, argparse; from ccssl.images.commands import COMMANDS\n"
        "for command in COMMANDS.values(): command(argparse.ArgumentParser())\n"
        "print([name for name in ('numpy', 'torch', 'PIL', 'scipy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_loading_data_needs_no_torch():
    code = (
        "import sys; from ccssl.images import load; load('digits')\n"
        "print([name for name in ('torch', 'scipy', 'rich', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_list(data, published, home):
    code, out, err = data("list")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in lines[1 : 1 + len(SOURCES)]] == list(SOURCES)
    assert "stl10" in out
    assert "5,000 + 100,000 + 8,000" in out
    assert "non-commercial use only" in out
    assert str(home) in lines[-1]
    data("fetch", "mnist", "--from", published)
    told = {entry["name"]: entry for entry in json.loads(data("list", "--json")[1])}
    assert told["mnist"]["state"] == "ready"
    assert told["mnist"]["folder"] == str(home / "mnist")
    assert told["digits"]["state"] == "embedded"
    assert told["cifar10"]["state"] == "not fetched"
    assert (told["svhn"]["train"], told["svhn"]["test"], told["svhn"]["classes"]) == (73257, 26032, 10)


def test_fetch_from_files_and_again(data, published, home):
    code, out, err = data("fetch", "mnist", "--from", *published.iterdir())
    assert (code, err) == (0, "")
    assert out.count("fetched ") == 4
    ready = f"mnist is ready: 11 training and 6 test images of 10 classes in {home / 'mnist'}\n"
    assert out.endswith(ready)
    assert data("fetch", "mnist") == (0, ready, "")


def test_fetch_over_http(data, published):
    with serving({file.name: file.read_bytes() for file in published.iterdir()}) as site:
        code, out, err = data("fetch", "mnist", "--url", site.url)
    assert (code, err) == (0, "")
    assert "mnist is ready" in out


def test_svhn_extra_on_request_only(data, tmp_path, monkeypatch):
    folder = tmp_path / "svhn"
    folder.mkdir()
    FIXTURES["svhn-extra"](folder)
    trust(monkeypatch, "svhn", folder)
    trust(monkeypatch, "svhn-extra", folder)
    assert "svhn is ready: 12 training" in data("fetch", "svhn", "--from", folder)[1]
    assert not list((tmp_path / "home" / "svhn").glob("extra*.mat"))
    code, out, _ = data("fetch", "svhn", "--extra", "--from", folder)
    assert code == 0
    assert out.count("fetched") == 1  # the others are there
    assert "svhn-extra is ready: 18 training" in out
    assert data("fetch", "mnist", "--extra")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fetch", "cifar-10"], "Did you mean cifar10?"),
        (["fetch", "digits"], "nothing to fetch"),
        (["fetch", "mnist", "--from", "nowhere"], "nowhere is none of the archives"),
        (["fetch", "mnist", "--url", "ftp://x"], "must begin with http:// or https://"),
        (["verify", "nothing"], "There is no data set named 'nothing'"),
        (["verify", "cifar10"], "cifar10 is not on this machine"),
        (["pack", "nothing", "--out", "x"], "There is no data set named 'nothing'"),
        (["pack", "digits", "--out", "x", "--size", "8"], "size belongs to a folder of pictures"),
        (["pack", "digits"], "--out"),
        (["pack", "digits", "--out", "x", "--size", "big"], "--size"),
        (["fech"], "Did you mean fetch?"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(arguments, sentence, data, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = data(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert sentence in err
    assert not (tmp_path / "x").exists()


def test_verify(data, published, home, tmp_path):
    assert data("verify")[1].splitlines()[1:] == [
        f"ok     {SOURCES['digits'].read.__globals__['EMBEDDED']}/digits.npz"
    ]
    data("fetch", "mnist", "--from", published)
    code, out, err = data("verify", "mnist", "digits")
    assert (code, err) == (0, "")
    assert out.count("ok ") == 4 + 4 + 1

    file = home / "mnist" / "t10k-labels-idx1-ubyte.gz"
    file.write_bytes(b"x")
    (home / "mnist" / "packed" / "mnist" / "test_labels.npy").unlink()
    code, out, err = data("verify", "--json")
    states = {finding["file"]: finding["state"] for finding in json.loads(out)}
    assert code == 2
    assert states[str(file)] == "wrong"
    assert list(states.values()).count("missing") == 1
    assert f"{file} is damaged: expected checksum" in err
    assert "found 9dd4e461268c8034f5c8564e155c67a6" in err  # of one letter
    assert "So are 1 other files." in err

    pack(load("digits"), tmp_path / "mine")
    assert data("verify", tmp_path / "mine")[0] == 0
    with (tmp_path / "mine" / "train_labels.npy").open("ab") as changed:
        changed.write(b"x")
    assert data("verify", tmp_path / "mine")[0] == 2


def test_pack_pictures(data, tmp_path):
    for index, place in enumerate(("train/a", "train/b", "test/a", "test/b", "unlabeled")):
        (tmp_path / "own" / place).mkdir(parents=True)
        Image.fromarray(pictures(1, (20, 16 + index, 3), index)[0]).save(tmp_path / "own" / place / "1.png")
    code, _, err = data("pack", tmp_path / "own", "--out", tmp_path / "out")
    assert code == 2
    assert f"`ccssl data pack {tmp_path / 'own'} --out PACKED --size 32`" in err
    code, out, err = data("pack", tmp_path / "own", "--out", tmp_path / "out", "--size", "8", "--flip")
    assert (code, err) == (0, "")
    assert out == f"{tmp_path / 'out'}: 3 training and 2 test images of 2 classes, 8x8x3\n"
    packed = load(str(tmp_path / "out"))
    assert packed.flip
    assert packed.flip_told
    assert not load(tmp_path / "own", size=8).flip_told  # nor would it be told of a cached copy
    assert not load(tmp_path / "own", size=8).flip_told
    np.testing.assert_array_equal(packed.train_images, load(tmp_path / "own", size=8).train_images)
    assert data("pack", tmp_path / "own", "--out", tmp_path / "out", "--size", "8")[0] == 2  # it exists


def test_pack_keeps_what_the_set_says_of_flips_unless_told(data, tmp_path):
    plain = {
        "train_images": pictures(4, (8, 8), 0),
        "train_labels": [0, 1, 0, 1],
        "test_images": pictures(2, (8, 8), 0),
        "test_labels": [0, 1],
    }
    np.savez(tmp_path / "mine.npz", **plain, flip=True)
    np.savez(tmp_path / "silent.npz", **plain)
    for number, (flags, flip, told) in enumerate([([], False, False), (["--no-flip"], False, True)]):
        assert data("pack", tmp_path / "silent.npz", "--out", tmp_path / f"s{number}", *flags)[0] == 0
        packed = open_packed(tmp_path / f"s{number}")
        assert (packed.flip, packed.flip_told) == (flip, told)
    for number, (flags, flip) in enumerate([([], True), (["--no-flip"], False), (["--flip"], True)]):
        assert data("pack", tmp_path / "mine.npz", "--out", tmp_path / str(number), *flags)[0] == 0
        assert open_packed(tmp_path / str(number)).flip is flip


def test_progress_is_for_terminals(monkeypatch, capsys):
    with progress("counting", 3, "images") as advance:
        advance(1)
    assert capsys.readouterr().err == ""

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for unit in ("images", "bytes"):
        with progress("counting", 3, unit, done=1) as advance:
            advance(2)
    captured = capsys.readouterr()
    assert "counting" in captured.err
    assert captured.out == ""
