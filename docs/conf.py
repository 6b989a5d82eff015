"""The documentation as a web site, with the reference of all public names made from their docstrings.

    pip install -e '.[recipes,docs]' && sphinx-build -W --keep-going -c docs . build/site

The sources are the Markdown files as they stand in the repository: its root is the root of the site, so that links
between the README, the documents and the records of measurements are checked, and lead somewhere in both.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from docutils.nodes import paragraph
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.addnodes import toctree
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

project = "hf_fsdp_tools"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
root_doc = "docs/index"
include_patterns = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"]
include_patterns += ["docs/*.md", "docs/*.ipynb", "docs/models/*.md", "benchmarks/results/**.md"]
html_static_path = ["static"]
html_js_files = ["filter.js"]
html_extra_path = ["index.html"]  # at the top of the site, where hosts look for it
html_theme = "furo"
html_title = "hf_fsdp_tools"
html_copy_source = html_show_sphinx = html_show_copyright = False

myst_heading_anchors = 3
autodoc_typehints_format = "short"
maximum_signature_line_length = 90
autodoc_member_order = "bysource"
GOOGLE = Config(napoleon_use_rtype=False, napoleon_use_param=False)
SECTION = re.compile(r"\s*(Args|Raises|Returns|Yields|Example|Examples|Attributes):$")
"""A line that opens a section of a docstring."""


def setup(app: Sphinx) -> None:
    """Connect what is done to docstrings, notebooks and pictures, and for agents."""
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("build-finished", copy_pictures)
    app.connect("build-finished", write_llms)


class NotebookParser(MystParser):
    """A notebook as Markdown, with the outputs that are stored in it."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        super().parse("\n\n".join(map(as_markdown, json.loads(inputstring)["cells"])), document)


def as_markdown(cell: dict[str, Any]) -> str:
    """A cell, and below code the texts and pictures that it left."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    calls_shell = any(line.lstrip().startswith(("!", "%")) for line in source.splitlines())  # which is no Python
    parts = [f"```{'text' if calls_shell else 'python'}\n{source}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            parts.append(f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">')
        elif text := "".join(output.get("text", data.get("text/plain", ""))):
            parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts)


def as_restructured_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Write a docstring of the house as autodoc wants it: `code`, indented examples, `Args:` and `Raises:`."""
    lines[:] = [line for code, run in runs_of(lines) for line in (as_code(run) if code else as_prose(run))]
    if what in ("function", "class", "exception", "method"):
        lines[:] = GoogleDocstring(lines, GOOGLE, app, what, name, obj, options).lines()


def runs_of(lines: list[str]) -> list[tuple[bool, list[str]]]:
    """Runs of lines, and whether each is code: what stands deeper than the paragraph above it, after an empty line."""
    runs: list[tuple[bool, list[str]]] = [(False, [])]
    depth, above = 0, ""
    for number, line in enumerate(lines):
        indent, after_gap = len(line) - len(line.lstrip()), number > 0 and not lines[number - 1].strip()
        if line.strip():
            if runs[-1][0] and indent <= depth:
                runs.append((False, []))
            elif not runs[-1][0] and after_gap and indent > depth and not SECTION.match(above):
                runs.append((True, []))
            if not runs[-1][0]:
                depth, above = indent, line
        runs[-1][1].append(line)
    return runs


def as_code(lines: list[str]) -> list[str]:
    """A block of code that is indented like the paragraph above it."""
    indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
    kind = "pycon" if lines[0].lstrip().startswith(">>>") else "python"
    return [f"{indent[4:]}.. code-block:: {kind}", "", *lines, ""]


def as_prose(lines: list[str]) -> list[str]:
    """Lines whose code stands between double backticks and whose stars are stars."""
    return re.sub(r"`+([^`]+)`+|\*", lambda found: f"``{found[1]}``" if found[1] else r"\*", "\n".join(lines)).split(
        "\n"
    )


def copy_pictures(app: Sphinx, error: Exception | None) -> None:
    """Put the pictures where the HTML in the documents looks for them."""
    pictures = Path("docs", "pictures")
    shutil.copytree(app.srcdir / pictures, app.outdir / pictures, dirs_exist_ok=True)


def write_llms(app: Sphinx, error: Exception | None) -> None:
    """Write `llms.txt`, which agents look for at the top of a site: README's first lines, the rules of AGENTS.md, and
    each page of the index with its first sentence."""
    readme, agents = (Path(app.srcdir, name).read_text(encoding="utf-8") for name in ("README.md", "AGENTS.md"))
    title, about = readme.split("\n\n")[:2]
    rules = "".join(re.findall(r"(?ms)^- .*?(?=^- |\Z)", agents))
    parts = [title, "> " + about.replace("\n", "\n> "), rules]
    for tree in app.env.get_doctree(root_doc).findall(toctree):
        lines = [f"## {tree['caption']}", ""]
        for _, page in tree["entries"]:
            first = next(app.env.get_doctree(page).findall(paragraph)).astext().replace("\n", " ")
            lines.append(f"- [{app.env.titles[page].astext()}]({page}.html): {re.split(r'(?<=[.:]) ', first)[0]}")
        parts.append("\n".join(lines))
    text = "\n\n".join([*map(unlinked, parts[:3]), *parts[3:]])
    Path(app.outdir, "llms.txt").write_text(f"{text}\n", encoding="utf-8")


def unlinked(text: str) -> str:
    """A text whose links to files of the clone, which the site lacks, are their words alone."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text).strip()
