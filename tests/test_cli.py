"""The command line: quick help, plain sentences for bad input, exit codes; and what doctor finds."""

import argparse
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ccssl
from ccssl import cli, doctor
from ccssl.errors import InputError

HEAVY = ("torch", "numpy", "numba", "scipy", "matplotlib")


def python(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **options)


def run(arguments, capsys):
    """Return exit code, output and error output, whether main returned or argparse ended the process."""
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)])
def test_help_is_quick_and_loads_nothing_heavy(arguments):
    code = (
        "import sys; from ccssl.cli import main\n"
        f"try: main({arguments!r})\n"
        f"finally: print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    start = time.perf_counter()
    result = python(code)
    assert time.perf_counter() - start < 2  # 0.05 s when the machine is idle
    assert result.returncode == 0
    assert result.stderr.strip() == "[]"
    assert result.stdout.strip()


def test_importing_the_package_loads_nothing_heavy_and_finds_every_public_name():
    code = (
        "import sys, ccssl\n"
        f"assert not [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert set(ccssl.__all__) <= set(dir(ccssl))\n"
        "from ccssl import credal, conformal\n"
        "for name in ccssl.__all__: getattr(ccssl, name)\n"
        "assert ccssl.project is credal.project and ccssl.Calibration is conformal.Calibration\n"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_unknown_public_name():
    with pytest.raises(AttributeError, match="module 'ccssl' has no attribute 'nothing'"):
        _ = ccssl.nothing
    assert set(ccssl._HOMES) | {"__version__"} == set(ccssl.__all__)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    code, out, _ = run([name, "--help"], capsys)
    assert code == 0
    assert f"usage: ccssl {name}" in out
    assert name in run(["--help"], capsys)[1]
    assert (cli.COMMANDS[name].__doc__ or "").strip().endswith(".")


def test_version(capsys):
    assert run(["--version"], capsys)[:2] == (0, f"ccssl {ccssl.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["dmeo"], "got 'dmeo'. Did you mean demo? See ccssl --help."),
        (["zzz"], "COMMAND must be one of demo, train, "),
        (["demo", "--sed", "3"], "there is no argument --sed. Did you mean --seed? See ccssl demo --help."),
        (["doctor", "--jsn=1"], "there is no argument --jsn. Did you mean --json? See ccssl doctor --help."),
        (["doctor", "extra"], "there is no argument extra."),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--seed", "many"], "--seed: expected a whole number, at least 0, got 'many'."),
        (["demo", "--seed"], "--seed: expected one argument."),
        (["--sed"], "there is no argument --sed."),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(arguments, sentence, capsys):
    code, out, err = run(arguments, capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert sentence in err


def test_no_command_shows_the_help(capsys):
    code, out, err = run([], capsys)
    assert code == 2
    assert out == ""
    assert "demo" in err
    assert "doctor" in err


def raising(error):
    def command(parser):
        """Raise."""

        def act(args):
            raise error

        return act

    return command


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            InputError("labels must be fewer than items, got 7."),
            2,
            "ccssl: labels must be fewer than items, got 7.\n",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.npz"), 2, "ccssl: a.npz: No such file\n"),
        (KeyboardInterrupt(), 130, "ccssl: stopped\n"),
    ],
)
def test_expected_ends(error, code, line, capsys, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "boom", raising(error))
    assert run(["boom"], capsys) == (code, "", line)


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("no file involved"), KeyError("k")])
def test_programming_errors_keep_their_traceback(error, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "boom", raising(error))
    with pytest.raises(type(error)):
        cli.main(["boom"])


def test_commands_of_commands(capsys, monkeypatch):
    def inner(parser: argparse.ArgumentParser):
        """Do it."""
        parser.add_argument("--times", type=int, default=1)
        return lambda args: print("done" * args.times)

    def group(parser: argparse.ArgumentParser):
        """Hold commands."""
        return cli.add_commands(parser, {"inner": inner})

    monkeypatch.setitem(cli.COMMANDS, "group", group)
    assert run(["group", "inner", "--times", "2"], capsys) == (0, "donedone\n", "")
    assert run(["group"], capsys)[0] == 2
    code, _, err = run(["group", "iner"], capsys)
    assert code == 2
    assert "Did you mean inner?" in err
    code, _, err = run(["group", "inner", "--tims", "2"], capsys)
    assert code == 2
    assert "Did you mean --times? See ccssl group inner --help." in err


@pytest.mark.skipif(os.name != "posix", reason="pipes end by a signal only on POSIX systems")
def test_a_reader_that_leaves_ends_the_command_quietly():
    code = "import sys; from ccssl.cli import main; sys.exit(main(['doctor', '--json']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr as stream:
        message = stream.read()
    assert process.wait(timeout=60) == 141
    assert message == ""


def test_python_m_ccssl():
    result = subprocess.run([sys.executable, "-m", "ccssl", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"ccssl {ccssl.__version__}\n")


def test_doctor_prints_a_table_and_the_same_as_json(capsys):
    code, table, _ = run(["doctor"], capsys)
    assert code == 0
    code, text, _ = run(["doctor", "--json"], capsys)
    assert code == 0
    findings = json.loads(text)
    for word in (findings["torch"], findings["kernels"]["used"]["cpu"], findings["cache"]["folder"]):
        assert word in table


def test_doctor_reports_the_kernel_that_project_uses():
    from ccssl.credal.projection import kernel

    assert doctor.examine()["kernels"]["used"]["cpu"] == kernel("cpu").__name__.rpartition(".")[-1]


@pytest.fixture
def healthy():
    return {
        "cores": 4,
        "threads": 4,
        "memory": {"total": 16 * 10**9, "available": 8 * 10**9},
        "devices": [{"type": "cpu", "name": "x"}],
        "kernels": {
            "used": {"cpu": "numba"},
            "packages": {"numba": "0.61", "triton": None},
            "numba_cache": "/somewhere",
        },
        "cache": {"folder": "/data", "size": 0, "free": 10**11, "writable": True},
    }


def ail(findings, path, value):
    *parents, last = path
    for parent in parents:
        findings = findings[parent]
    findings[last] = value


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ([], None),
        (
            [(("kernels", "used"), {"cpu": "torch"}), (("kernels", "packages", "numba"), None)],
            "numba is missing",
        ),
        ([(("kernels", "used"), {"cpu": "torch"})], "numba 0.61 cannot be imported"),
        ([(("kernels", "numba_cache"), None)], "NUMBA_CACHE_DIR"),
        (
            [
                (("devices",), [{"type": "cuda", "name": "y", "capability": "9.0", "memory": 1}]),
                (("kernels", "used"), {"cpu": "numba", "cuda": "torch"}),
            ],
            "pip install triton",
        ),
        ([(("threads",), 64)], "OMP_NUM_THREADS=4"),
        ([(("memory", "available"), 10**9)], "1.0 GB of memory"),
        ([(("memory", "available"), None)], None),
        ([(("cache", "writable"), False)], "cannot be written"),
        ([(("cache", "free"), 10**8)], "make room"),
    ],
)
def test_doctor_advises_on_each_problem(healthy, changes, word, monkeypatch):
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", Path("/nowhere"))
    for path, value in changes:
        ail(healthy, path, value)
    sentences = doctor.advice(healthy)
    assert len(sentences) == (word is not None)
    assert word is None or word in sentences[0]


def test_doctor_sees_a_driver_that_torch_cannot_use(healthy, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path)
    assert "torch sees no device" in doctor.advice(healthy)[0]


def test_data_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("CCSSL_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert doctor.data_folder() == tmp_path / "ccssl"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert doctor.data_folder() == Path.home() / ".cache" / "ccssl"
    monkeypatch.setenv("CCSSL_HOME", str(tmp_path / "home"))
    assert doctor.data_folder() == tmp_path / "home"


def test_doctor_measures_the_data_folder_and_creates_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("CCSSL_HOME", str(tmp_path / "home"))
    assert doctor.examine()["cache"]["size"] == 0
    assert not (tmp_path / "home").exists()
    (tmp_path / "home" / "deep").mkdir(parents=True)
    (tmp_path / "home" / "deep" / "file").write_bytes(b"x" * 1000)
    assert doctor.examine()["cache"]["size"] == 1000


def test_doctor_knows_where_numba_keeps_compiled_kernels(monkeypatch, tmp_path):
    pytest.importorskip("numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert doctor.examine()["kernels"]["numba_cache"] == str(tmp_path)
