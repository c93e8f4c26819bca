"""The dispatcher: help at once, unknown verbs, errors in one line."""

import os
import subprocess
import sys
import time
import types

import pytest

from vision_attn.cli import main as cli
from vision_attn.errors import UserError


@pytest.fixture
def verb(monkeypatch):
    """Installs a verb that does what the test says."""

    def install(action):
        module = types.ModuleType("vision_attn.cli.models")
        module.run = action
        monkeypatch.setitem(sys.modules, "vision_attn.cli.models", module)

    return install


def test_help_imports_nothing_heavy():
    code = "import sys; from vision_attn.cli.main import main; main(['--help']); print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: vision-attn VERB" in result.stdout
    for name in ("torch", "lightning", "numpy", "jsonargparse", "yaml"):
        assert f"'{name}'" not in result.stdout


def test_the_package_is_imported_at_once():
    code = "import sys, vision_attn; dir(vision_attn); print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("torch", "lightning", "numpy", "PIL"):
        assert f"'{name}'" not in result.stdout


def test_help_is_quick():
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "vision_attn", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("vision-attn 0")


def test_every_verb_of_the_table_exists():
    from importlib.util import find_spec

    assert [verb for verb in cli.VERBS if find_spec(f"vision_attn.cli.{verb}") is None] == []


@pytest.mark.parametrize(("word", "near"), [("fti", "fit"), ("validat", "validate"), ("model", "models")])
def test_unknown_verb_offers_near_ones(word, near, capsys):
    assert cli.main([word]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: unknown verb '{word}'. Did you mean {near}")
    assert len(error.strip().splitlines()) == 1


def test_no_verb_shows_the_usage(capsys):
    assert cli.main([]) == 2
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error", [UserError("no such thing"), ValueError("bad"), FileNotFoundError(2, "none", "a.png")]
)
def test_user_errors_are_one_line(verb, capsys, error):
    def run(argv):
        raise error

    verb(run)
    assert cli.main(["models", "x"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert "Traceback" not in text
    with pytest.raises(type(error)):
        cli.main(["models", "--debug"])


def test_bugs_are_not_hidden(verb):
    def run(argv):
        raise KeyError("bug")

    verb(run)
    with pytest.raises(KeyError):
        cli.main(["models"])


def test_ctrl_c(verb, capsys):
    def run(argv):
        raise KeyboardInterrupt

    verb(run)
    assert cli.main(["models"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_arguments_arrive_without_debug(verb):
    seen = []
    verb(lambda argv: seen.append(argv) or 7)
    assert cli.main(["models", "a", "--debug", "--b"]) == 7
    assert seen == [["a", "--b"]]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "ascii:surrogateescape", "utf-8"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_no_character_ends_a_verb(encoding, stream):
    """A log file in another encoding than the terminal's must not end a training of hours."""
    code = (
        "import sys, types; m = types.ModuleType('vision_attn.cli.models'); "
        f"m.run = lambda argv: print('a ━ 猫 \\udce9 b', file=sys.{stream}); sys.modules[m.__name__] = m; "
        "from vision_attn.cli.main import main; sys.exit(main(['models']))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    text = getattr(done, stream).decode(encoding.split(":")[0])
    assert text.startswith("a ")
    assert text.strip().endswith(" b")
    assert ("━ 猫" in text) is (encoding == "utf-8")
