"""The training census as text: what was compared, how much agrees, and what does not, with its reason."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.measuring.comparison import table_of

Row = dict[str, Any]
PREFACE = """# Census of training

Every model type that transformers registers with a model class, at a small size, on 2 ranks (gloo, CPU), beside the
plain model in one process. Made with {versions} by

    python benchmarks/census.py --train

`{output}` holds one row of each type. The default configuration is shrunk by rule
(`benchmarks/architectures/shrink.py`), weights are random, transformers writes the checkpoint, and `from_pretrained` of
this package loads it. `benchmarks/architectures/agree.py` says what is compared and with what. Both sides are in
evaluation mode. A type stands here with one class and the fullest batch that its plain model takes; `inputs` of a row
names it. Rows are kept between runs.
"""


def render(rows: Iterable[Row], versions: str, output: str) -> str:
    """The summary in Markdown."""
    rows = sorted(rows, key=lambda row: row["type"].lower())
    agrees = [row for row in rows if row["verdict"] == "agrees"]
    failed = [row for row in rows if row["verdict"] == "failed"]
    absent = [row for row in rows if row["verdict"] not in ("agrees", "failed")]
    counts = [("registered with a model class", len(rows)), ("agree in everything", len(agrees))]
    counts += [("do not agree", len(failed)), ("take no part", len(absent))]
    largest = []
    for check in ("outputs", "loss", "gradients", "step"):
        worst = (max((row.get(f"{p}_{check}", 0.0) for row in agrees), default=0.0) for p in ("fp32", "bf16"))
        largest.append((check, *(f"{value:.1e}" for value in worst)))
    lines = [PREFACE.format(versions=versions, output=output), *table(("", "types"), counts), ""]
    lines += table(("largest difference among those that agree", "fp32", "bf16"), largest)
    cells = [(row["type"], row.get("class"), row["why"][:200], row.get("alone", "")) for row in failed]
    lines += ["", "## Do not agree", "", *table(("type", "class", "what", "of transformers alone"), cells)]
    lines += [
        "",
        "## Take no part",
        "",
        *table(("type", "reason"), [(row["type"], row["why"][:200]) for row in absent]),
    ]
    return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    return table_of(head, [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows])
