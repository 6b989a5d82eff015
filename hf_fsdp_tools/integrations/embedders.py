"""sentence-transformers on shards: its modules are made as always, around a sharded model where it would load one."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from transformers import Trainer

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.trainer import FSDPTrainerMixin
from hf_fsdp_tools.modeling.module_tree import replaced


class EmbedderMixin(FSDPTrainerMixin):
    """`FSDPTrainerMixin` for `SentenceTransformerTrainer`, whose model holds the sharded one as its first module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the Trainer; its loss is a mean over a rank's own rows, which nothing is to multiply."""
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        inside = self.model[0].model  # into its shards; sentence-transformers would load all of it on each rank
        if hasattr(inside, "peft_config"):
            return Trainer._load_from_checkpoint(self, resume_from_checkpoint, inside)  # type: ignore[no-any-return]
        return super()._load_from_checkpoint(resume_from_checkpoint, inside)


def load_embedder(
    load: Callable[..., Any], name: str, *, revision: str | None = None, device: str, is_adapted: bool
) -> SentenceTransformer:
    """A SentenceTransformer of a checkpoint, with the sharded model that `load(subfolder=…)` returns inside.

    A checkpoint with `modules.json` keeps its pooling; any other gets the mean of its tokens. Weights next to the
    transformer are refused unless an adapter is trained (`is_adapted`). Every rank must call.
    """

    def load_model(module: Any, name: str, task: str, config: object, *_: Any, **keywords: Any) -> Any:
        return _through_hooks(load(**{key: keywords[key] for key in ("subfolder",) if keywords.get(key)}))

    with replaced(Transformer, _load_model=load_model):  # which would load a model whole on every rank (6.2)
        model = SentenceTransformer(name, revision=revision, device=device)
    beside = [type(module).__name__ for module in list(model)[1:] if any(True for _ in module.parameters())]
    if not isinstance(model[0], Transformer) or (beside and not is_adapted):
        raise ConfigError(
            f"{name} has weights next to its transformer ({', '.join(beside) or 'a router'}), which each process "
            "would train for itself. Train an adapter (--use_peft); they stay as they are then."
        )
    for module in list(model)[1:]:
        module.requires_grad_(False)
    card = model.model_card_data
    card.generate_widget_examples = False  # rank 0 writes the card alone, and cannot run the model
    card.set_widget_examples = lambda dataset: None  # for which it would draw rows, and show a bar
    return model


def _through_hooks(model: Any) -> Any:
    """A sharded model whose `forward` calls the model: sentence-transformers calls it past the hooks that gather."""
    plain: Any = model.forward
    running: list[bool] = []

    @wraps(plain)
    def forward(*args: Any, **keywords: Any) -> Any:
        return plain(*args, **keywords) if running else model(*args, **keywords)

    model.register_forward_pre_hook(lambda *_: running.append(True))
    model.register_forward_hook(lambda *_: running.clear(), always_call=True)
    model.forward = forward
    return model
