"""What is published: the address and the version in one place, links that lead somewhere, an upload without tokens."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import hf_fsdp_tools

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOOK = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]


def texts() -> dict[str, str]:
    """The text files that a person may have to fill in, by name."""
    patterns = ("*.md", "*.toml", "*.py", "*.cff", ".github/**/*.yml", "docs/**/*.*", "hf_fsdp_tools/**/*.py")
    files = {path for pattern in patterns for path in ROOT.glob(pattern) if path.suffix not in (".svg", ".png")}
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files if path.is_file()}


def test_what_a_person_must_fill_in_stands_once_and_contributing_names_it():
    found = {name for name, text in texts().items() if re.search(r"https?://[\w.]*\.invalid\b", text)}
    to_publish = re.split("^## ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    (steps,) = (part for part in to_publish if part.startswith("To publish"))
    assert len(re.findall(r"^\d\. ", steps, re.MULTILINE)) == 5
    assert found <= {"pyproject.toml"} and "in `pyproject.toml` (`repository`)" in steps
    for named in re.findall(r"`((?:\.github|hf_fsdp_tools)/\S+|\w+\.(?:md|toml))`", steps):
        assert (ROOT / named).is_file(), named
    assert "grep -n '\\.invalid' pyproject.toml" in (ROOT / ".ci" / "run").read_text(), "and a release refuses it"


def test_an_index_shows_addresses_and_a_readme_whose_links_lead_somewhere():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    metadata = {"name": "hf-fsdp-tools", "dynamic": ["readme", "urls"]}
    module.Addresses(str(ROOT), {"repository": "https://host/me/it"}).update(metadata)
    assert metadata["urls"]["Issues"] == "https://host/me/it/issues"
    assert all(url.startswith("https://host/me/it") for url in metadata["urls"].values())
    links = re.findall(r"\]\(([^)]+)\)", text := metadata["readme"]["text"])
    assert len(links) > 20 and not [link for link in links if not re.match("https?://|#", link)]
    for kind, path in re.findall(r"https://host/me/it/(raw|blob)/main/([^)#]+)", text):
        assert (ROOT / path).exists() and (kind == "raw") == path.endswith(".svg"), path


def test_the_version_stands_in_one_place():
    assert {"version", "readme", "urls"} == {*PROJECT["project"]["dynamic"]} and HOOK["repository"].startswith("https:")
    assert hf_fsdp_tools.__version__ not in (ROOT / "pyproject.toml").read_text() + (ROOT / "CITATION.cff").read_text()


def test_a_citation_is_of_this_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["title"] == "hf_fsdp_tools" and citation["license"] == PROJECT["project"]["license"]
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["authors"][0]["name"]


def test_one_job_alone_may_upload_and_holds_no_token():
    workflow = yaml.safe_load(text := (ROOT / ".github" / "workflows" / "release.yml").read_text())
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"} and "secrets." not in text and "password" not in text
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["needs"] == "build"
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert not [step for step in jobs["publish"]["steps"] if "run" in step or "checkout" in step["uses"]]
    declared = {each.rpartition(" ")[2] for each in PROJECT["project"]["classifiers"] if ":: 3." in each}
    assert {*jobs["build"]["strategy"]["matrix"]["python"]} == declared
    assert "!hatch_build.py" in (ROOT / ".dockerignore").read_text().splitlines(), "which an image builds by, too"
