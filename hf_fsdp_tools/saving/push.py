"""Upload what a save wrote to a repository on the hub, with a model card where there is none."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import nn
from transformers import PreTrainedModel

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.hub import CARD, hub_name_of, upload
from hf_fsdp_tools.modeling.module_tree import own_class
from hf_fsdp_tools.modeling.tree_copy import is_adapted
from hf_fsdp_tools.saving.publish import SaveReport
from hf_fsdp_tools.saving.target import WEIGHTS_OF_A_SAVE
from hf_fsdp_tools.sharding.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS


def push_saved(model: nn.Module, report: SaveReport, target: dict[str, Any] | None) -> SaveReport:
    """The report of a save, with the page of the commit in which rank 0 uploads its files, and a model card that lies
    next to them; without a target, as it is. Every rank must call, and waits for as long as the upload moves."""
    if target is None:
        return report
    page = ""
    with agreed("uploading to the hub", report.folder):
        if rank_and_size()[0] == 0:
            folder = Path(report.folder)
            names = [*report.files, *report.others, *([CARD] if (folder / CARD).is_file() else [])]
            files = {name: folder / name for name in names}
            outdated = partial(is_outdated, files=names)
            page = upload(folder, files, is_outdated=outdated, card=partial(model_card_of, model), **target)
        page = all_ranks(page, "uploading to the hub")[0]
    return replace(report, commit_url=page)


def is_outdated(name: str, files: Collection[str]) -> bool:
    """Whether a file of a repository goes where these come: weights of another save, and an adapter, for a full model;
    nothing for an adapter."""
    is_of_a_save = WEIGHTS_OF_A_SAVE.fullmatch(name) or name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    return bool(is_of_a_save) and ADAPTER_CONFIG not in files


def model_card_of(model: nn.Module) -> ModelCard:
    """huggingface_hub's template of a model card, with the model's tags and the name of the model it was made from."""
    library = own_class(model).__module__.partition(".")[0].replace("_", "-")
    data = ModelCardData(
        base_model=hub_name_of(model) or None,
        library_name="transformers" if isinstance(model, PreTrainedModel) or is_adapted(model) else library,
        tags=list(getattr(model, "model_tags", None) or []),
    )
    card: ModelCard = ModelCard.from_template(data)
    return card
