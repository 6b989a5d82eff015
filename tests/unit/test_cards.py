"""Model cards under our trainers: what they say of the base and of how the model is called is true."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from hf_fsdp_tools.integrations.pushing import PushingMixin


@pytest.mark.parametrize(
    ("name", "template", "said"),
    [
        (
            "org/base",
            "{{ x }}",
            ["base_model: org/base", "[org/base](https://", '"role": "user"', "trained with SFT"],
        ),
        ("{tmp}/base", None, ["version of `base`.", "generator(question, max_new_tokens"]),
        ("s3://bucket/base", None, ["version of `base`."]),
        ("", None, ["This model is trained from scratch."]),
    ],
)
def test_what_trls_card_says_is_true(tmp_path: Path, name: str, template: str | None, said: list[str]) -> None:
    pytest.importorskip("trl")
    from trl.trainer.base_trainer import _BaseTrainer

    class Own(PushingMixin, _BaseTrainer):
        _name = "SFT"

    (tmp_path / "base").mkdir()
    trainer = object.__new__(Own)
    config = LlamaConfig(name_or_path=name.format(tmp=tmp_path))
    trainer.model, trainer.hub_model_id = SimpleNamespace(config=config), None
    trainer.args = SimpleNamespace(output_dir=str(tmp_path), process_index=0)
    trainer.processing_class = SimpleNamespace(chat_template=template)
    trainer.is_world_process_zero = lambda: True
    trainer.create_model_card(model_name="mine")
    card = (tmp_path / "README.md").read_text()
    assert all(words in card for words in said) and "None" not in card, card
    assert ("base_model" in card) == (name == "org/base") and config.name_or_path == name.format(tmp=tmp_path)
