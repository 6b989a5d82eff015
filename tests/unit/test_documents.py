"""What the documents say exists: messages, names, commands, files; and printed output is what was printed."""

import ast
import re
import runpy
from pathlib import Path

import pytest

import hf_fsdp_tools
from hf_fsdp_tools import scripting, steps, testing
from hf_fsdp_tools.extensions import fsdp1, streamed
from tests._documents import ROOT, RUNNERS, TEXTS, advise, blocks

PACKAGE = ROOT / "hf_fsdp_tools"
RECIPES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "recipes").glob("*.py")}


def text_of(node: ast.AST) -> str | None:
    """A text of the source, with `…` for each value in it; None for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        case ast.BinOp(op=ast.Add()):
            sides = text_of(node.left), text_of(node.right)
            return "".join(each or "…" for each in sides) if any(sides) else None
    return None


def squeezed(text: str) -> str:
    return " ".join(text.replace("`", "").replace("\\n", " ").split())


def said(text: str) -> re.Pattern[str]:
    """What matches a text of the source that says a message in which `…` stands for anything."""
    parts = [part.strip() for part in squeezed(text).split("…")]
    return re.compile(".*".join(re.escape(part) for part in parts if part))


def test_every_message_of_troubleshooting_is_one_of_the_package():
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    sources = {squeezed(text) for node in nodes if (text := text_of(node)) and len(text) > 10}
    own, _, _ = TEXTS["docs/troubleshooting.md"].partition("## Messages of other libraries")
    messages = re.findall(r"^\| `([^|]+?)` \|", own, re.MULTILINE)
    assert len(messages) > 15
    every = "\n".join(sources)  # no pattern matches beyond a line
    absent = [message for message in messages if not said(message).search(every)]
    assert not absent, f"no source says {absent}"


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if "```python" in text])
def test_code_of_documents_is_python_and_imports_public_names(name):
    for code in (block.text for block in blocks(name, "python")):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module == "hf_fsdp_tools":
                assert {alias.name for alias in node.names} <= set(hf_fsdp_tools.__all__), code
            if isinstance(node, ast.ImportFrom) and node.module == "hf_fsdp_tools.steps":
                assert {alias.name for alias in node.names} <= set(steps.__all__), code


def test_every_block_has_a_class_and_a_test_runs_what_is_run():
    found = blocks()
    bare = [f"{block.page}, block {block.number}: {block.text[:60]!r}" for block in found if block.kind is None]
    assert not bare, f"neither run, parsed, printed, built nor drawn: {bare}"
    assert {block.kind for block in found} == {"run", "parsed", "printed", "built", "drawn"}
    fences = sum(len(re.findall(r"^ *```", text, re.MULTILINE)) for text in TEXTS.values())
    assert fences == 2 * len(found), "a fence that is indented or not closed"
    for (page, language), test in RUNNERS.items():
        assert f'blocks("{page}", "{language}")' in (ROOT / test).read_text(), f"{test} does not run {page}"
    prose = {name: re.sub(r"(?s)```.*?\n```", "", text) for name, text in TEXTS.items()}
    assert not [name for name in prose if re.search(r"\n\n {4}\w", prose[name])], "code without a fence has no class"


@pytest.mark.parametrize("name", sorted(TEXTS | RECIPES))
def test_files_that_documents_name_are_there(name):
    folders, kinds = "recipes|accelerate_configs|benchmarks|docs|tests", "py|yaml|sbatch|md|sh|json|svg"
    named = re.findall(rf"(?:{folders})/[\w/.]+\.(?:{kinds})", (TEXTS | RECIPES)[name])
    assert not [path for path in named if not (ROOT / path).exists()]


def test_no_sentence_begins_with_of():
    """A stranger stumbles over "Of a model, …": the noun comes first."""
    texts = {path: path.read_text() for folder in (PACKAGE, ROOT / "recipes") for path in folder.rglob("*.py")}
    texts |= {ROOT / name: text for name, text in TEXTS.items()}
    begins = re.compile(r"""(?:^|[.:;] |\"\"\"|# |\| |- )Of [a-z]""", re.MULTILINE)
    found = [(path, text[at.start() :][:60]) for path, text in texts.items() for at in begins.finditer(text)]
    advise("\n".join(f"{path}: {text!r}" for path, text in found))


def test_the_reference_has_every_public_name():
    named = re.findall(
        r"^\.\. auto(?!module)\w+:: (?:hf_fsdp_tools\.steps\.)?(\w+)$", TEXTS["docs/reference.md"], re.MULTILINE
    )
    assert sorted(named) == sorted(
        [
            *hf_fsdp_tools.__all__,
            *steps.__all__,
            *fsdp1.__all__,
            *streamed.__all__,
            *scripting.__all__,
            *testing.__all__,
        ]
    )


def test_the_map_and_the_readme_are_short_and_the_readme_names_every_recipe():
    text = TEXTS["README.md"]
    assert len(text.split()) <= 700 and len(TEXTS["ARCHITECTURE.md"].splitlines()) <= 120
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert recipes == set(re.findall(r"\[`(\w+)`\]\(recipes/\1\.py\)", text))


def test_pages_of_models_are_those_of_the_presets_and_certificates(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    made = runpy.run_path(str(ROOT / "docs" / "make_model_pages.py"))["pages"]()
    assert made == {path.name: path.read_text() for path in (ROOT / "docs" / "models").glob("*.md")}


OWNERS = ("benchmarks", "evidence", "extending", "project")  # pages for those who work on the package
GENERATED = ("commands", "reference")


def test_the_pages_for_users_are_few_words():
    """Words of their prose and tables: without code, printed output, generated tables and addresses of links."""
    pages = {name: text for name, text in TEXTS.items() if name.startswith("docs/")}
    pages = {name: text for name, text in pages.items() if Path(name).stem not in (*OWNERS, *GENERATED)}
    left_out = r"(?s)```.*?\n```|<!-- made by.*?<!-- end -->|<!--.*?-->|(?<=\])\([^)]*\)"
    counts = {name: len(re.findall(r"\S*\w\S*", re.sub(left_out, "", text))) for name, text in pages.items()}
    assert len(counts) >= 20 and sum(counts.values()) <= 14_000, counts
