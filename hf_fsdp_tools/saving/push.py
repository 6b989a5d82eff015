"""Upload what a save wrote to a repository on the hub, with a model card where there is none."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import nn

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.hub import CARD, HubTarget, local_path, upload, upload_errors
from hf_fsdp_tools.saving.publish import ADAPTER_WEIGHTS, WEIGHTS_OF_A_SAVE, SaveReport
from hf_fsdp_tools.sharding.adapters import ADAPTER_CONFIG
from hf_fsdp_tools.text import did_you_mean


def hub_target(folder: Path, push_to_hub: bool, arguments: Mapping[str, Any]) -> HubTarget | None:
    """The repository to upload a save to; None where nothing is to be uploaded."""
    known = set(HubTarget.__dataclass_fields__)
    if unknown := sorted(set(arguments) - known):
        raise ConfigError(
            f"save_pretrained has no argument {unknown[0]!r}{did_you_mean(unknown[0], known)} Those "
            f"for an upload are push_to_hub and {', '.join(sorted(known))}."
        )
    if push_to_hub:
        return HubTarget(**{"repo_id": folder.resolve().name, **arguments})
    if arguments:
        raise ConfigError(f"{', '.join(sorted(arguments))} mean nothing without an upload. Add push_to_hub=True.")
    return None


def push_saved(model: nn.Module, report: SaveReport, target: HubTarget | None) -> SaveReport:
    """The report of a save, with the page of the commit that uploads its files; without a target, as it is.

    Rank 0 uploads. What is uploaded are the files of the save, and a model card that lies beside them, nothing else
    that the folder may hold. Weights of earlier saves, and an adapter where the model is a full one, leave the
    repository with the same commit.

    Every rank must call; those that wait do so for as long as the upload moves.
    """
    if target is None:
        return report
    page = ""
    with agreed("uploading to the hub", report.folder):
        if rank_and_size()[0] == 0:
            folder = Path(report.folder)
            names = [*report.files, *report.others, *([CARD] if (folder / CARD).is_file() else [])]
            is_adapter = ADAPTER_CONFIG in names
            with upload_errors(target, report.folder):
                page = upload(
                    target,
                    {name: folder / name for name in names},
                    card=lambda: str(model_card_of(model)),
                    is_outdated=(lambda name: False) if is_adapter else is_outdated,
                )
        page = all_ranks(page, "uploading to the hub")[0]
    return replace(report, commit_url=page)


def is_outdated(name: str) -> bool:
    """Whether a file of a repository is of those that a full model replaces: weights of another save, an adapter."""
    return bool(WEIGHTS_OF_A_SAVE.fullmatch(name)) or name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)


def model_card_of(model: nn.Module) -> ModelCard:
    """huggingface_hub's template of a model card, with the model's tags and the name of the model it was made from."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    data = ModelCardData(
        base_model=name if name and local_path(name) is None else None,
        library_name="transformers",
        tags=list(getattr(model, "model_tags", None) or []),
    )
    card: ModelCard = ModelCard.from_template(data)
    return card
