"""The training census as text: what was compared, how much agrees, and what does not, with its reason."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks.architectures.exceptions import REASONS

Row = dict[str, Any]
PREFACE = """# Census of training

Every model type that transformers registers with a model class, at a small size, on 2 ranks (gloo, CPU), beside the
plain model in one process. Made with {versions} by

    python benchmarks/census.py --train

`{output}` holds one row of each type. The default configuration is shrunk by rule
(`benchmarks/architectures/shrink.py`), weights are random, transformers writes the checkpoint, and `from_pretrained` of
this package loads it. Each rank sees a batch of its own; the plain model sees both, and its gradients are their mean.
`benchmarks/architectures/agree.py` says what is compared and with what: in fp32 and in bf16 outputs of an evaluation,
loss, all gradients, the weights after one step of AdamW; the loaded weights and buffers bit for bit; in fp32 the saved
checkpoint, its names, dtypes and shapes beside those that transformers wrote, and its tensors reopened by transformers,
bit for bit; and how many units were gathered at a time.
"""


TRUST = """
## How far to trust this

- Both sides are in evaluation mode: dropout and the update of batch norms' statistics are not compared.
- A type stands here with one class and one batch, the fullest that its plain model takes by these rules; where a model
  of several senses is listed with `input_ids` alone, its towers ran in no pass. `inputs` of the rows says it.
- Rows are kept between runs: what did not agree was run again after each mend, what agreed was not run again.
- How many units may be gathered counts those that FSDP2 frees only at the end of a backward pass, which are all tables
  of markuplm (102).
- An environment without timm, scipy and torchvision builds fewer types.
"""


def render(rows: Iterable[Row], versions: str, output: str) -> str:
    """The summary in Markdown."""
    rows = sorted(rows, key=lambda row: row["type"].lower())
    part = [row for row in rows if row["verdict"] in ("agrees", "failed")]
    agrees = [row for row in part if row["verdict"] == "agrees"]
    lines = [PREFACE.format(versions=versions, output=output)]
    lines += table(
        ("", "types"),
        [
            ("registered with a model class", len(rows)),
            ("take part", len(part)),
            ("agree in everything", len(agrees)),
            ("do not agree", len(part) - len(agrees)),
            ("take no part", len(rows) - len(part)),
        ],
    )
    lines += [""]
    lines += table(("largest difference among those that agree", "fp32", "bf16"), list(_largest(agrees)))
    hows = Counter(row.get("bf16_plain", "none").partition(":")[0] for row in part)
    lines += ["", "What bf16 was compared with: " + ", ".join(f"{how} {n}" for how, n in hows.most_common()) + ".", ""]
    lines += ["## Do not agree", ""]
    failed = [row for row in part if row["verdict"] == "failed"]
    cells = [(row["type"], row.get("class"), _short(row["why"]), _reason(row)) for row in failed]
    lines += table(("type", "class", "what", "reason"), cells)
    lines += ["", "## Take no part", ""]
    out = [row for row in rows if row not in part]
    lines += table(
        ("type", "reason"),
        [(row["type"], _reason(row) or _short(row["why"]) or "no inputs by these rules") for row in out],
    )
    return "\n".join(lines) + "\n" + TRUST


FIGURES = ("outputs", "loss", "gradients", "step")


def table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    """A Markdown table, line by line."""
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def _largest(rows: list[Row]) -> Iterable[tuple[str, str, str]]:
    for check in FIGURES:
        worst = [max((row.get(f"{p}_{check}", 0.0) for row in rows), default=0.0) for p in ("fp32", "bf16")]
        yield check, f"{worst[0]:.1e}", f"{worst[1]:.1e}"


def _reason(row: Row) -> str:
    """A reason by hand, or what the run shows: transformers alone differs, or plain bf16 weights raise as ours do."""
    raised = row.get("bf16_plain_fails", "")
    parts = [REASONS.get(row["type"], ""), row.get("alone", "")]
    if row["why"].startswith("bf16: ") and raised:
        parts.append(f"the plain model raises in bf16 too: {raised}")
    return "; ".join(filter(None, parts))


def _short(why: str) -> str:
    return why if len(why) < 200 else f"{why[:197]}..."
