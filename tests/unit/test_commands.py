"""Commands that are shown: each is parsed by the program that it starts, with a recipe's options by the recipe itself;
those of the recipes' tables fit the GPUs that they name."""

import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools.cli import launch
from hf_fsdp_tools.cli.main import _parser
from tests._dist import imitate_gpus
from tests._documents import ROOT, TEXTS, blocks
from tests.api import Preset, _Parser, commands_of, main, named_config, recipes, split_words
from tests.unit.test_setups import parsed

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOREIGN = "curl envsubst export hf kubectl compgen llama-quantize llama-server mypy pytest ruff sbatch sky"
FOREIGN += " grep head ls tail torchrun transformers vllm . bash run"
"""Programs of others, and CI's: of these the shell's syntax is looked at."""


def commands_in(page: str) -> list[list[str]]:
    """The commands in the shell blocks, code spans and markers of a document; spans name many things, and `…` is what
    a reader knows."""
    lines = [line for block in blocks(page, "bash") for line in block.text.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL))
    lines += [span for span in spans if re.match(r"hf-fsdp \S+ |accelerate launch -|pip install |python \S+\.py", span)]
    lines += re.findall(r"<!-- (?:prints|recorded): (.+?) -->", TEXTS[page])
    found: list[list[str]] = []
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if not re.fullmatch("[&|;]+", word):
                command.append(word)
            elif command:
                found.append(command)
                command = []
    return [words for words in found if "…" not in "".join(words)]


def check(words: list[str], taken: Any) -> None:
    """Refuse a command that its program would not take."""
    while re.fullmatch(r"\w+=.*|srun", words[0]):
        words = words[1:] or ["export"]
    match [words[0].rpartition("/")[2], *words[1:]]:
        case ["hf-fsdp", *given]:
            given = given[given[:1] == ["report"] and len(given) > 1 :]  # which takes the words of a recipe
            given = ["1" if re.fullmatch("[NS]", word) else word for word in given]
            options, rest = _parser().parse_known_args(given)
            if hasattr(options, "rest"):
                taken(given[0], given[1:])
            else:
                assert not rest, f"unknown {rest}"
        case ["accelerate", "launch", *given]:
            place = next((at for at, word in enumerate(given) if word.endswith(".py")), len(given))
            assert not split_words(given[:place])[2]
            if given[place:] and given[place].startswith("recipes/"):
                taken(Path(given[place]).stem, [*given[:place], *given[place + 1 :]])
        case ["python" | "python3", "-m", module, *_]:
            assert importlib.util.find_spec(module)
        case ["python" | "python3", file, *_]:
            assert (ROOT / file).exists() or file in ("script.py", "llama.cpp/convert_hf_to_gguf.py")
        case ["pip", "install", *given]:
            for extras in re.findall(r"(?:hf-fsdp-tools|\.)\[([\w,]+)\]", " ".join(given)):
                assert set(extras.split(",")) <= set(EXTRAS)
            assert "-c" not in given or (ROOT / given[given.index("-c") + 1]).exists()
        case [program, *_]:
            assert program in FOREIGN.split(), f"what is {program}?"


@pytest.fixture
def taken(monkeypatch, tmp_path, capsys):
    """What a recipe makes of the words of `hf-fsdp RECIPE` or of `accelerate launch`, on a machine of 8 GPUs."""
    monkeypatch.chdir(tmp_path)
    for name in ("long.yaml", "two.yaml", "FILE"):
        shutil.copy(named_config("8x80gb"), name)
    Path("run.yaml").write_text("max_steps: 10\n")
    started: list[list[str]] = []
    monkeypatch.setattr(launch, "_run", lambda words: started.append(words) or 0)

    def of(recipe: str, words: list[str]) -> tuple[Any, ...]:
        imitate_gpus(monkeypatch, 8)
        options = {"model_name_or_path": "Qwen/Qwen3-8B"}
        preset = Preset(recipe=recipe.replace("_", "-"), gpu="h100-80gb", launch={"num_processes": 8}, options=options)
        Path("mine.yaml").write_text(preset.text(()))
        assert main([recipe.replace("_", "-"), *words]) == 0, capsys.readouterr().err
        if {"--help", "--help-all"} & set(words):
            return ()
        (launched,) = started
        started.clear()
        imitate_gpus(monkeypatch, 0)
        place = next(at for at, word in enumerate(launched) if Path(word).parent.name == "recipes")
        return parsed(recipe.replace("_", "-"), launched[place + 1 :], monkeypatch, 8)

    return of


@pytest.mark.parametrize("page", [page for page in TEXTS if commands_in(page)])
def test_commands_of_documents_are_those_of_their_programs(page, taken):
    wrong = []
    for words in commands_in(page):
        try:
            check(words, taken)
        except (AssertionError, ConfigError, SystemExit) as error:
            if not (isinstance(error, SystemExit) and not error.code) and words[1:] != ["COMMAND", "--help"]:
                wrong.append(f"{shlex.join(words)}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", [page for page in TEXTS if blocks(page, "bash")])
def test_shell_blocks_are_shell(page):
    for block in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


def shown() -> dict[str, list[str]]:
    """The commands of the tables as `--help` and docs/recipes.md show them, by recipe and launch config."""
    lines = [line for name in recipes() for line in commands_of(name).replace("\\\n", " ").splitlines()]
    words = [shlex.split(line)[1:] for line in lines if not line.startswith("#")]
    return {f"{recipe}-{config}": [recipe, option, config, *rest] for recipe, option, config, *rest in words}


SHOWN = shown()


def test_every_recipe_has_commands_for_one_gpu_and_for_eight_which_help_and_pages_show(capsys):
    for name in recipes():
        configs = [words[2] for words in SHOWN.values() if words[0] == name.replace("_", "-")]
        assert "8x80gb" in configs and {"1x24gb", "1x80gb"} & set(configs), name
        assert commands_of(name) in TEXTS["docs/recipes.md"], "python docs/paste.py"
        assert main([name.replace("_", "-"), "--help"]) == 0 and commands_of(name) in capsys.readouterr().out
    rows = re.findall(r"^\| one GPU .*`hf-fsdp (.*?)` \|$", TEXTS["README.md"], re.MULTILINE)
    assert rows and all(shlex.split(row) in SHOWN.values() for row in rows)


@pytest.mark.parametrize("recipe", recipes())
def test_a_launch_knows_the_options_of_a_recipe_from_sources(recipe, monkeypatch):
    """All that its parser has but DeepSpeed's, for it refuses any other before ranks start."""
    made: list[set[str]] = []

    def note(parser: Any, *_: Any) -> None:
        made.append({name for action in parser._actions for name in action.option_strings if name.startswith("--")})
        raise KeyboardInterrupt

    monkeypatch.setattr(_Parser, "parse", note)
    with pytest.raises(KeyboardInterrupt):
        runpy.run_path(str(recipes()[recipe]))["main"]()
    launch._check_words(recipes()[recipe], sorted(made[0] - {"--deepspeed"}))
